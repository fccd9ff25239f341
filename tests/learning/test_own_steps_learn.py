"""The training steps of mrl/controller/example_steps.py raise the quickstart's reward.

Run the tests with `-m learning`; each takes minutes. They write the rewards to outputs/learning. docs/concepts/loop.md shows an
example.
"""

import json

import numpy as np
import pytest
import step_page
from test_every_algorithm_learns import GOAL, MAX_STEPS, OUTPUT, common_overrides

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1200)]

LEAST_RISE = 0.4  # smallest increase of the reward that passes, for each data source and for held-out prompts


@pytest.mark.parametrize("name", ["best_of_n", "by_source"])
def test_a_training_step_of_mrl_raises_the_reward(start_mrl, inputs, warm, tmp_path, name):
    settings = {
        "best_of_n": [
            "trainer._target_=mrl.controller.example_steps.best_of_n",
            "trainer.arguments.keep=2",
            "trainer.arguments.min_reward=0",
        ],
        "by_source": [*step_page.config_arguments(tmp_path / "conf"), step_page.data_argument(inputs, tmp_path)],
    }
    goal = [f"trainer.stop_reward={GOAL}", f"trainer.max_steps={MAX_STEPS}", "trainer.save=false"]
    run = start_mrl("train", *common_overrides(inputs, warm), *settings[name], *goal).finish(1000)
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    evaluations = [json.loads(line) for line in (run.folder / "eval.jsonl").read_text().splitlines()]
    sources = [f"reward/{source}/mean" for source in step_page.DATA_SOURCES] if name == "by_source" else []
    rewards = {metric: [step[metric] for step in steps] for metric in ("reward/mean", *sources)}
    held_out = [evaluation["eval/reward_sampled"] for evaluation in evaluations]
    seconds = float(np.median([step["time/step_s"] for step in steps]))
    OUTPUT.mkdir(parents=True, exist_ok=True)
    record = {**rewards, "held-out": held_out, "seconds per step": seconds}
    (OUTPUT / f"{name}.json").write_text(json.dumps(record))
    first, last = (np.mean(part) for part in (rewards["reward/mean"][:3], rewards["reward/mean"][-5:]))
    assert first < 0.2 and last >= GOAL, f"{first:.3f} -> {last:.3f} in {len(steps)} steps"
    for metric in sources:
        assert np.mean(rewards[metric][-5:]) - np.mean(rewards[metric][:3]) >= LEAST_RISE, rewards[metric]
    assert held_out[-1] - held_out[0] >= LEAST_RISE, held_out
    gaps = [step["mismatch/logprob_abs_max"] for step in steps if "mismatch/logprob_abs_max" in step]
    assert max(gaps) <= 1e-4, "engines have the trained weights"
