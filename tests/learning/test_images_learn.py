"""A tiny image model learns to count shapes in pictures. Run the test with `-m learning`; it takes about 15 minutes."""

import json
import statistics

import pytest

pytestmark = [pytest.mark.learning, pytest.mark.timeout(2400)]

CONSTANT_ANSWER = 0.25  # expected reward of a constant answer
GOAL = 0.7  # smallest reward that passes


def test_an_image_model_learns_to_count_shapes(start_mrl, tmp_path):
    run = start_mrl("train", "experiment=shapes", f"data.inputs.folder={tmp_path / 'inputs'}").finish(2200)
    assert run.process.returncode == 0, run.output()
    first, *_, last = [json.loads(line) for line in (run.folder / "eval.jsonl").read_text().splitlines()]
    steps = run.metrics()
    rewards = [step["reward/mean"] for step in steps]
    assert statistics.fmean(rewards[:3]) < CONSTANT_ANSWER and statistics.fmean(rewards[-5:]) >= GOAL, rewards
    for name in ("eval/reward_sampled", "eval/reward_greedy"):
        assert first[name] < CONSTANT_ANSWER and last[name] >= GOAL, (first, last)
    assert max(step["mismatch/logprob_abs_max"] for step in steps) <= 1e-4
