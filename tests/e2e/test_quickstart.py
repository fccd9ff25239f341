"""The quickstart learns: training raises the reward of sampled responses and the accuracy on held-out problems."""

import numpy as np
import orjson
import pytest


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("goal", [0.4, 0.92])
def test_the_quickstart_learns(start_mrl, inputs, warm, goal):
    """Training raises the mean reward from 0.08 to the goal, and also the accuracy on held-out problems. 0.92 is the default."""
    start = [f"data.inputs.folder={inputs}", "sft.train=null", f"model.path={warm}"]
    run = start_mrl("train", "experiment=quickstart", *start, f"trainer.stop_reward={goal}").finish(360)
    assert run.process.returncode == 0, run.output()
    assert np.mean([step["reward/mean"] for step in run.metrics()[-5:]]) >= goal - 0.02
    before, after = (orjson.loads(line) for line in (run.folder / "eval.jsonl").read_text().splitlines())
    for name in ("eval/reward_sampled", "eval/reward_greedy"):
        assert after[name] - before[name] >= 0.25, (name, before, after)
