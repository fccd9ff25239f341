"""The task of sums, and the experiment smollm2, which trains a published model on this task."""

import json

import pyarrow.parquet as pq
import pytest
from planned_runs import memory_of
from published_dense_configs import ANY, SMOLLM2_135M

from mrl.commands import convert
from mrl.config import hydra_entry
from mrl.data.sources import train_sources
from mrl.data.synthetic_tasks import make_sums_task
from mrl.rewards.reward_types import Response
from mrl.rewards.rule_based import GSM8K


def test_every_sum_is_in_one_of_the_two_files_and_has_its_answer(tmp_path):
    make_sums_task(tmp_path / "made")
    rows = {name: pq.read_table(tmp_path / f"made/{name}.parquet").to_pylist() for name in ("train", "test")}
    assert {name: len(part) for name, part in rows.items()} == {"train": 90 * 90 - 256, "test": 256}
    both = rows["train"] + rows["test"]
    assert len({tuple(row["extra_info"]["numbers"]) for row in both}) == 90 * 90
    for row in both[::500]:
        (a, b), truth = row["extra_info"]["numbers"], row["reward_model"]["ground_truth"]
        assert f"{a} + {b}?" in row["prompt"][0]["content"]
        answers = [f" {a + b}\n", f"The answer is {a + b}.", str(a + b + 1)]
        assert GSM8K(strict=False)([Response("sums", text, truth) for text in answers]) == [1.0, 1.0, 0.0]


@pytest.mark.extended
def test_the_experiment_trains_the_published_model_on_sums(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ANY | SMOLLM2_135M))
    keys = ["experiment=smollm2", "run.dir=x", f"data.inputs.folder={tmp_path}/made"]
    config = hydra_entry.compose_config(hydra_entry.check_overrides(keys))
    assert config.reward == {"_target_": "mrl.rewards.rule_based.GSM8K", "strict": False}
    assert config.model.path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    local = hydra_entry.compose_config(hydra_entry.check_overrides([*keys, f"model.path={tmp_path}"]))
    assert not memory_of(local).problems
    make_sums_task(config.data.inputs["folder"])
    (source,) = train_sources(config.data)
    assert [len(table) for table in source.tables()] == [90 * 90 - 256]
    assert "from-gguf" in convert.HELP
