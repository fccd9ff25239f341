"""A run whose two data sources have different rewards, and whose held-out sets have different sampling settings."""

import json
from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.core.sample_file import read_samples
from mrl.rewards.rule_based import Length

pytestmark = pytest.mark.extended
STEPS, ROWS = 2, 12
REWARDS = {
    "exact": {"source": "doubling", "reward": {"_target_": "mrl.rewards.rule_based.ExactMatch"}},
    "form": {
        "ability": "form",
        "reward": {
            "_target_": "mrl.rewards.reward_types.Weighted",
            "parts": {
                "digits": {"_target_": "mrl.rewards.rule_based.Format", "pattern": "[0-9]+"},
                "short": {"_target_": "mrl.rewards.rule_based.Length", "max_tokens": 10},
            },
        },
    },
}


def as_override(value) -> str:
    """Return a value in the grammar of Hydra's overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_override(inner)}" for key, inner in value.items()) + "}"
    return f"'{value}'" if isinstance(value, str) else json.dumps(value)


@pytest.fixture(scope="module")
def two_sources(inputs, tmp_path_factory):
    """Training rows of the doubling task. Every second row has the data source `any form` and the ability `form`."""
    rows = pq.read_table(inputs / "train.parquet").slice(0, 200).to_pylist()
    for row in rows[::2]:
        row |= {"data_source": "any form", "ability": "form"}
    path = tmp_path_factory.mktemp("sources") / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="module")
def run(start_mrl, quickstart, inputs, two_sources):
    test = f"{inputs}/test.parquet"
    gsm8k = {"_target_": "mrl.rewards.rule_based.GSM8K", "strict": False}
    sets = {
        "several": {"files": [test], "rows": ROWS, "n": 4, "temperature": 1.3, "top_p": 0.95, "top_k": 8},
        "cut": {"files": [test], "rows": ROWS, "stop": "4", "max_response_tokens": 5, "reward": gsm8k},
    }
    started = start_mrl(
        "train",
        *quickstart,
        f"data.train=[{two_sources}]",
        f"data.test_sets={as_override(sets)}",
        "reward=by_source",
        *[f"reward.rewards.{name}={as_override(node)}" for name, node in REWARDS.items()],
        f"trainer.max_steps={STEPS}",
        f"trainer.eval_rows={ROWS}",
        "trainer.eval_every=1",
        "trainer.save=false",
        "rollout.record=true",
        "tracking.samples_per_step=24",
    ).finish()
    assert started.process.returncode == 0, started.output()
    return started


def evaluations(run) -> dict[int, dict[str, float]]:
    return {line.pop("step"): line for line in map(json.loads, (run.folder / "eval.jsonl").read_text().splitlines())}


def recorded(run, step: int, index: int) -> list[dict]:
    path = run.folder / f"rollouts/evaluation_{step:06d}_{index}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_source_is_scored_by_its_reward_and_has_metrics(run):
    for step, samples in read_samples(run.folder):
        metrics = run.metrics()[step - 1]
        by_source: dict[str, list] = {}
        for sample in samples:
            by_source.setdefault(sample.source, []).append(sample)
        assert len(samples) == 24 and by_source.keys() == {"doubling", "any form"}
        for sample in by_source["doubling"]:
            assert sample.reward == (sample.response.strip() == sample.ground_truth) and not sample.parts
        for sample in by_source["any form"]:
            short = Length(10)
            expected = {
                "digits": float(sample.response.isdigit()),
                "short": 1 - min(sample.num_tokens / short.max_tokens, 1),
            }
            assert sample.parts == pytest.approx(expected) and sample.reward == pytest.approx(sum(expected.values()))
        for source, name in (("doubling", "doubling"), ("any form", "any_form")):
            rewards = [sample.reward for sample in by_source[source]]
            assert metrics[f"reward/{name}/mean"] == pytest.approx(np.mean(rewards))
            assert metrics[f"reward/{name}/failed_fraction"] == 0
        assert "reward/any_form/digits_mean" in metrics and "reward/doubling/digits_mean" not in metrics
        assert metrics["mismatch/logprob_abs_max"] <= 1e-4, "an engine with a tokenizer samples as before"


def test_the_numbers_of_an_evaluation_are_those_of_the_recorded_responses(run, inputs):
    truths = [row["reward_model"]["ground_truth"] for row in pq.read_table(inputs / "test.parquet").to_pylist()]
    assert evaluations(run).keys() == {0, 1, 2}
    for step, metrics in evaluations(run).items():
        lines = recorded(run, step, 2)
        assert {line["set"] for line in lines} == {"several"} and len(lines) == 4 * ROWS
        correct = np.array([line["response"].strip() == truths[n // 4] for n, line in enumerate(lines)])
        assert [line["correct"] for line in lines] == correct.tolist()
        groups, texts = correct.reshape(ROWS, 4), np.array([line["response"] for line in lines]).reshape(ROWS, 4)
        assert any(len(set(group)) > 1 for group in texts.tolist()), "the responses to a prompt differ"
        pairs = list(combinations(range(4), 2))
        votes = {2: [], 4: []}
        for right, answers in zip(groups, texts, strict=True):
            worth = {answer: np.mean(right[answers == answer]) for answer in answers}
            for k, subsets in ((2, pairs), (4, [range(4)])):
                chosen = []
                for subset in subsets:
                    drawn = [answers[i] for i in subset]
                    most = max(map(drawn.count, drawn))
                    chosen.append(np.mean([worth[answer] for answer in set(drawn) if drawn.count(answer) == most]))
                votes[k].append(np.mean(chosen))
        expected = {
            "eval/several/reward": correct.mean(),
            "eval/several/accuracy": correct.mean(),
            "eval/several/pass_at_2": np.mean([[group[list(pair)].any() for pair in pairs] for group in groups]),
            "eval/several/pass_at_4": groups.any(axis=1).mean(),
            "eval/several/maj_at_2": np.mean(votes[2]),
            "eval/several/maj_at_4": np.mean(votes[4]),
        }
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_a_set_may_have_its_own_reward_limit_and_stop_text(run):
    """Greedy decoding with a stop text returns the beginning of the greedy response without a stop text."""
    for step, metrics in evaluations(run).items():
        greedy, cut = recorded(run, step, 1), recorded(run, step, 4)
        assert {line["set"] for line in cut} == {"cut"} and {line["sampling"] for line in cut} == {"greedy"}
        whole = {n: line["response"] for n, line in enumerate(line for line in greedy if line["set"] == "")}
        assert len(cut) == len(whole) == ROWS
        for n, line in enumerate(cut):
            head, found, _ = whole[n].partition("4")
            assert line["response"] == (head + found)[:5] and line["num_tokens"] <= 5
        assert any(line["response"].endswith("4") for line in cut) and not any(
            "4" in line["response"][:-1] for line in cut
        )
        assert metrics["eval/cut/reward_greedy"] == np.mean([line["reward"] for line in cut])
        names = {
            "eval/cut/reward_sampled",
            "eval/cut/reward_greedy",
            "eval/cut/accuracy_sampled",
            "eval/cut/accuracy_greedy",
        }
        default = {name.replace("cut/", "") for name in names}
        several = {name for name in metrics if name.startswith("eval/several/")}
        assert metrics.keys() == names | default | several and len(several) == 6
    assert "held-out, before -> after: sampled" in run.output() and "held-out several reward" in run.output()


def test_a_row_of_an_unknown_source_is_refused_before_anything_starts(start_mrl, quickstart, two_sources):
    one = f"reward.rewards.exact={as_override(REWARDS['exact'])}"
    started = start_mrl("train", *quickstart, f"data.train=[{two_sources}]", "reward=by_source", one).finish(60)
    assert started.process.returncode == 2 and "Traceback" not in started.output()
    assert (
        f"{two_sources}, row 0, column 'data_source': no pattern of the reward matches data_source 'any form', ability 'form', "
        "style 'rule'; the patterns are openai/gsm8k, math*, exact (source doubling)."
    ) in started.output()
    assert not (started.folder / "logs").exists()
