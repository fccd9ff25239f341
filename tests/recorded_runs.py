"""Run directories with the metrics and the ledger of a simulated run."""

import json

import numpy as np

from mrl.planner.engine_time import EngineSpeeds
from mrl.planner.rollout_simulator import GroupLengths, RunSpeeds, simulate

SPEEDS = RunSpeeds(EngineSpeeds(0.02, 0.0003, 0.0001, 8), train_s=0.8, train_token_s=2e-4, push_s=0.3)
N, G, STEPS = 4, 3, 12


def lengths_of(seed, groups=N * STEPS):
    draw = np.random.default_rng(seed)
    return GroupLengths(draw.lognormal(4, 1, (groups, G)).astype(int) + 1, draw.integers(5, 300, groups))


def recorded(run_dir, groups, setup, speeds=SPEEDS, steps=STEPS, pools=None, **rollout):
    """Simulate a run, write the files that such a run would write, and return the prediction."""
    prediction = simulate(groups, speeds, setup, steps)
    (run_dir / "run.json").parent.mkdir(parents=True, exist_ok=True)
    section = (
        dict(prompts_per_step=N, responses_per_prompt=G, num_engines=setup.num_engines, engine_tp=2, mode="sync")
        | rollout
    )
    config = dict(
        rollout=section, parallel=dict(tp=2, dp=3), sglang=dict(max_running_requests=speeds.engine.max_running)
    )
    config["placement"] = dict(pools=pools or {})
    (run_dir / "run.json").write_text(json.dumps(dict(command="train", config=config)))
    ledger, metrics = [], []
    for step in range(steps):
        numbers = list(range(step * N, step * N + N))
        step_groups = [groups.tokens_of(number) for number in numbers]
        tokens = sum(prompt * G + sum(lengths) for prompt, lengths in step_groups)
        train_s, step_s = speeds.training(tokens, 1.0), float(prediction.step_s[step])
        line = dict(
            groups=[[100 + number, "x"] for number in numbers], requests=numbers, prompts=[p for p, _ in step_groups]
        )
        ledger.append(dict(step=step + 1, **line, lengths=[lengths for _, lengths in step_groups]))
        spent = {"component_time/engine_s": step_s - train_s - speeds.push_s, "time/weight_sync_s": speeds.push_s}
        metrics.append({"step": step + 1, "time/step_s": step_s, **spent})
    (run_dir / "ledger.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in ledger))
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    return prediction
