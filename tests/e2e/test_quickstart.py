"""The quickstart learns: training raises the reward of sampled responses and the accuracy on held-out problems."""

import numpy as np
import orjson


def test_the_quickstart_learns(start_mrl, inputs, warm):
    """After the supervised warm start, training raises the reward to 0.9, and also the accuracy on held-out problems."""
    start = [f"data.inputs.folder={inputs}", "sft.train=null", f"model.path={warm}"]
    run = start_mrl("train", "experiment=quickstart", *start).finish(360)
    assert run.process.returncode == 0, run.output()
    assert np.mean([step["reward/mean"] for step in run.metrics()[-5:]]) >= 0.90
    before, after = (orjson.loads(line) for line in (run.folder / "eval.jsonl").read_text().splitlines())
    for name in ("eval/reward_sampled", "eval/reward_greedy"):
        assert after[name] - before[name] >= 0.25, (name, before, after)
