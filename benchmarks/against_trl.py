"""Compares mrl with TRL's GRPOTrainer on the same work: wall seconds and CPU-seconds per step, and until rewards 0.80 and 0.90.

    python benchmarks/against_trl.py --peer FOLDER --peer-python VENV/bin/python [--seeds 0 1 2]

FOLDER contains the run of TRL: data/{train,test}.parquet, the initial model in warm/, and trl_grpo.py, which writes
steps.jsonl. mrl and TRL both train 32 prompts x 8 responses in a step. Responses have at most 8 tokens, and the temperature is
1. The optimizer is AdamW with learning rate 3e-4 and betas (0.9, 0.98). There is no KL penalty. Weights are in float32, and
each process has one thread. The runs alternate. The measured times do not include start-up and evaluation.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from step import StepMeter, measure

GOALS = (0.80, 0.90)
WINDOW = 5  # number of last steps whose mean reward is compared with a goal


def run_mrl(folder: Path, seed: int, steps: int) -> list[dict[str, float]]:
    """Train with mrl. Returns one record per step."""
    meter: StepMeter = measure(
        [
            "experiment=none",
            "model.dtype=float32",
            f"model.path={folder / 'warm'}",
            f"data.train=[{folder / 'data/train.parquet'}]",
            "data.test=[]",
            "rollout.prompts_per_step=32",
            "rollout.responses_per_prompt=8",
            "rollout.max_response_tokens=8",
            "optim.lr=3e-4",
            "optim.betas=[0.9,0.98]",
            "optim.clip_grad=1.0",
            "optim.warmup_steps=0",
            f"run.seed={seed}",
        ],
        steps,
        stop_reward=0.92,
    )
    totals = [sum(cpu.values()) for cpu in meter.cpu]
    # totals[0] includes start-up. Assume that the first step takes as long as the second step.
    start = totals[0] - (totals[1] - totals[0])
    walls = [step["time/step_s"] for step in meter.steps]
    return [
        {"reward": step["reward/mean"], "wall": wall, "cum_wall": sum(walls[: i + 1]), "cum_cpu": totals[i] - start}
        for i, (step, wall) in enumerate(zip(meter.steps, walls, strict=True))
    ]


def run_trl(folder: Path, python: str, seed: int, steps: int) -> list[dict[str, float]]:
    """Train with TRL. Returns one record per step."""
    name = f"trl_{seed}"
    command = [python, "trl_grpo.py", "--root", str(folder), "--name", name, "--seed", str(seed), "--steps", str(steps)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(
            [*command, "--eval-every", "0"], cwd=folder, env=env, stdout=log, stderr=log, check=True, timeout=900
        )
    rows = [json.loads(line) for line in (folder / "out" / name / "steps.jsonl").read_text().splitlines()]
    return [
        {"reward": r["reward"], "wall": r["step_wall"], "cum_wall": r["cum_wall"], "cum_cpu": r["cum_cpu"]}
        for r in rows
    ]


def reached(records: list[dict[str, float]], goal: float) -> tuple[int, float, float] | None:
    """Return (step, wall seconds, CPU-seconds) when the mean reward of the last WINDOW steps first reaches `goal`.

    Returns None if it never does.
    """
    for i in range(WINDOW - 1, len(records)):
        if statistics.mean(r["reward"] for r in records[i - WINDOW + 1 : i + 1]) >= goal:
            return i + 1, records[i]["cum_wall"], records[i]["cum_cpu"]
    return None


def row(name: str, records: list[dict[str, float]]) -> list[str]:
    """Return the table row of one run."""
    wall = statistics.median(r["wall"] for r in records[1:])
    cpu = (records[-1]["cum_cpu"] - records[0]["cum_cpu"]) / (len(records) - 1)
    cells = [name, f"{wall:.3f}", f"{cpu:.3f}"]
    for goal in GOALS:
        found = reached(records, goal)
        cells.append(f"{found[0]} steps, {found[1]:.1f} / {found[2]:.1f} s" if found else "not reached")
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder with the run of TRL")
    parser.add_argument("--peer-python", required=True, help="Python of an environment with TRL")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    table = Table(title=f"per step, and until the mean reward of {WINDOW} steps reaches a goal", title_justify="left")
    for column in ("run", "wall s/step", "CPU-s/step", *(f"until {goal:.2f}: wall / CPU" for goal in GOALS)):
        table.add_column(column)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "peer"
        shutil.copytree(args.peer, folder)
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)
        for seed in args.seeds:
            table.add_row(*row(f"TRL, seed {seed}", run_trl(folder, args.peer_python, seed, args.steps)))
            table.add_row(*row(f"mrl, seed {seed}", run_mrl(folder, seed, args.steps)))
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
