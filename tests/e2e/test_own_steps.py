"""Runs with a training step of the user's own: the ledger, the metrics, the samples and a resume work without its doing."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mrl_runs import KILLING_FILTER
from run_comparison import check_equal_runs

from mrl.core.sample_file import read_samples

STEPS = "mrl.controller.own_steps"
SOURCE = "{_target_: mrl.controller.own_steps.SourceAlgorithm, advantage: {_target_: mrl.algorithms.advantages.%s}, "
SOURCE += "loss: {_target_: mrl.algorithms.losses.%s}}"
ALGORITHMS = f"{{even: {SOURCE % ('GRPO', 'PPOClip')}, odd: {SOURCE % ('RLOO', 'CISPO')}}}"


@pytest.fixture(scope="module")
def two_sources(inputs, tmp_path_factory) -> list[str]:
    """The training prompts of the quickstart, as two data sources: even and odd numbers."""
    folder = tmp_path_factory.mktemp("sources")
    rows = pq.read_table(inputs / "train.parquet").to_pylist()
    for name, rest in (("even", 0), ("odd", 1)):
        chosen = [
            row | {"data_source": name} for row in rows if int(row["reward_model"]["ground_truth"]) // 2 % 2 == rest
        ]
        pq.write_table(pa.Table.from_pylist(chosen), folder / f"{name}.parquet")
    return [f"data.train=[{folder / 'even.parquet'},{folder / 'odd.parquet'}]"]


@pytest.fixture(scope="module")
def own_steps(two_sources) -> dict[str, list[str]]:
    """Name of a step -> its settings."""
    return {
        "best_of_n": [
            f"trainer._target_={STEPS}.best_of_n",
            "trainer.arguments.keep=2",
            "trainer.arguments.min_reward=0",
        ],
        "by_source": [
            f"trainer._target_={STEPS}.by_source",
            f"trainer.arguments.algorithms={ALGORITHMS}",
            "algorithm.skip_zero_advantage=false",
            *two_sources,
        ],
    }


@pytest.mark.parametrize("name", ["best_of_n", "by_source"])
def test_a_killed_run_with_an_own_step_equals_an_uninterrupted_one(
    start_mrl, quickstart, own_steps, tmp_path, user_module, name
):
    user_module("killing_filter", KILLING_FILTER)
    settings = [
        *quickstart,
        *own_steps[name],
        "trainer.max_steps=5",
        "checkpoint.every=2",
        "checkpoint.asynchronous=false",
    ]
    kill = ["rollout.filter._target_=killing_filter.Killing", f"++rollout.filter.done={tmp_path / 'killed'}"]
    undisturbed = start_mrl("train", *settings).finish()
    assert undisturbed.process.returncode == 0, undisturbed.output()
    killed = start_mrl("train", *settings, *kill).finish()
    assert killed.process.returncode == 0, killed.output()
    assert (tmp_path / "killed").exists() and "restart 1 of 5" in killed.output()
    check_equal_runs(killed.folder, undisturbed.folder)
    assert [step for step, _ in read_samples(killed.folder)] == [1, 2, 3, 4, 5]
    check_updates(killed.folder, name)


def check_updates(folder: Path, name: str) -> None:
    """Check how many optimizer steps the ledger has for each step, and that each token is trained at most once in a step."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    for line, step in zip(ledger, metrics, strict=True):
        sampled = sum(sum(lengths) for lengths in line["lengths"])
        trained = sum(count for update in line["updates"] for count, _ in update.values())
        assert step["batch/optimizer_steps"] == len(line["updates"])
        if name == "best_of_n":
            assert len(line["updates"]) == 1 and trained < sampled, "only the best responses are trained"
        else:
            assert len(line["updates"]) in (1, 2) and trained == sampled
    assert name == "best_of_n" or max(len(line["updates"]) for line in ledger) == 2
