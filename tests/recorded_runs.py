"""Folders of runs that took exactly the seconds of a simulation."""

import json

import numpy as np

from mrl.planner.engine_queue import EngineSpeeds
from mrl.planner.rollout_simulator import Groups, Speeds, simulate

SPEEDS = Speeds(EngineSpeeds(0.02, 0.0003, 0.0001, 8), train_s=0.8, train_token_s=2e-4, push_s=0.3)
N, G, STEPS = 4, 3, 12


def lengths_of(seed, groups=N * STEPS):
    draw = np.random.default_rng(seed)
    return Groups(draw.lognormal(4, 1, (groups, G)).astype(int) + 1, draw.integers(5, 300, groups))


def recorded(run_dir, groups, setup, speeds=SPEEDS, steps=STEPS, pools=None, **rollout):
    """A run's folder with what it would have written had it taken the seconds of a simulation."""
    found = simulate(groups, speeds, setup, steps)
    (run_dir / "run.json").parent.mkdir(parents=True, exist_ok=True)
    known = (
        dict(prompts_per_step=N, responses_per_prompt=G, num_engines=setup.num_engines, engine_tp=2, mode="sync")
        | rollout
    )
    config = dict(rollout=known, parallel=dict(tp=2, dp=3), sglang=dict(max_running_requests=speeds.engine.max_running))
    config["placement"] = dict(pools=pools or {})
    (run_dir / "run.json").write_text(json.dumps(dict(command="train", config=config)))
    ledger, metrics = [], []
    for step in range(steps):
        tickets = list(range(step * N, step * N + N))
        own = [groups.of(ticket) for ticket in tickets]
        tokens = sum(prompt * G + sum(lengths) for prompt, lengths in own)
        train_s, whole_s = speeds.training(tokens, 1.0), float(found.step_s[step])
        line = dict(groups=[[100 + t, "x"] for t in tickets], tickets=tickets, prompts=[p for p, _ in own])
        ledger.append(dict(step=step + 1, **line, lengths=[lengths for _, lengths in own]))
        spent = {"spent/engine_s": whole_s - train_s - speeds.push_s, "time/weight_sync_s": speeds.push_s}
        metrics.append({"step": step + 1, "time/step_s": whole_s, **spent})
    (run_dir / "ledger.jsonl").write_text("\n".join(map(json.dumps, ledger)))
    (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, metrics)))
    return found
