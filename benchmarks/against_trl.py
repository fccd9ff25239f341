"""Compares mrl with TRL's GRPOTrainer: wall seconds and CPU-seconds per step, and until the mean reward is 0.80 and 0.90.

    python benchmarks/against_trl.py toy --peer-python VENV/bin/python [--seeds 0 1 2] [--steps 80] [--json FILE]
    python benchmarks/against_trl.py smollm2 --peer-python VENV/bin/python --model FOLDER [--steps 5]

"toy" trains the model of the quickstart after its supervised warm start, with 32 prompts x 8 responses in a step. "smollm2"
trains SmolLM2-135M-Instruct on two-digit sums, with 4 prompts x 8 responses. Both trainers get the same weights, data and seeds,
no KL penalty, AdamW with betas (0.9, 0.98), and float32. The runs alternate. Each process has one thread for the toy, and two
threads for SmolLM2. The measured times do not include start-up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table
from step import StepMeter, measure

from benchmarks import measurements
from mrl.data.synthetic_tasks import make_doubling_task, make_sums_task

GOALS = (0.80, 0.90)
WINDOW = 5  # number of last steps whose mean reward is compared with a goal
Records = list[dict[str, float]]


@dataclass(frozen=True)
class Work:
    """The model, data and settings with which both trainers train."""

    model: Path
    train: Path
    prompts: int
    responses: int
    max_response_tokens: int
    lr: str
    threads: int


def toy_work(folder: Path) -> Work:
    """Make the task of the quickstart, and train its model with supervised training."""
    make_doubling_task(folder / "inputs")
    fixed = [f"data.inputs.folder={folder / 'inputs'}", f"run.dir={folder / 'warm'}", f"sft.output={folder / 'hf'}"]
    command = [sys.executable, "-m", "mrl.cli", "sft", "experiment=quickstart", *fixed]
    env = os.environ | {"WANDB_MODE": "disabled"}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, timeout=300)
    return Work(folder / "hf", folder / "inputs/train.parquet", 32, 8, 7, "3e-4", 1)


def smollm2_work(folder: Path, model: Path) -> Work:
    """Make the task of two-digit sums for a published model."""
    make_sums_task(folder / "inputs")
    return Work(model.resolve(), folder / "inputs/train.parquet", 4, 8, 14, "2e-5", 2)


def run_mrl(work: Work, seed: int, steps: int) -> Records:
    """Train with mrl. Returns one record per step."""
    meter: StepMeter = measure(
        [
            "experiment=none",
            "model.dtype=float32",
            f"model.path={work.model}",
            f"data.train=[{work.train}]",
            "data.test=[]",
            "reward=gsm8k",
            "+reward.strict=false",
            f"rollout.prompts_per_step={work.prompts}",
            f"rollout.responses_per_prompt={work.responses}",
            f"rollout.max_response_tokens={work.max_response_tokens}",
            f"optim.lr={work.lr}",
            "optim.betas=[0.9,0.98]",
            "optim.clip_grad=1.0",
            "optim.warmup_steps=0",
            f"cluster.cpu_threads={work.threads}",
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


def run_trl(work: Work, python: str, seed: int, steps: int, folder: Path) -> Records:
    """Train with TRL. Returns one record per step."""
    output = folder / f"trl_{seed}.jsonl"
    options = dict(model=work.model, train=work.train, output=output, prompts=work.prompts, responses=work.responses)
    options |= dict(max_response_tokens=work.max_response_tokens, lr=work.lr, threads=work.threads, seed=seed)
    options |= dict(steps=steps, stop_reward=0.92)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    script = Path(__file__).with_name("trl_peer.py")
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}
    env["OMP_NUM_THREADS"] = str(work.threads)
    done = subprocess.run([python, str(script), *flags], env=env, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{python} {script.name} ended with exit status {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in output.read_text().splitlines()]


def reached(records: Records, goal: float) -> tuple[int, float, float] | None:
    """Return (step, wall seconds, CPU-seconds) when the mean reward of the last WINDOW steps first reaches `goal`.

    Returns None if the mean reward never reaches `goal`.
    """
    for i in range(WINDOW - 1, len(records)):
        if statistics.mean(r["reward"] for r in records[i - WINDOW + 1 : i + 1]) >= goal:
            return i + 1, records[i]["cum_wall"], records[i]["cum_cpu"]
    return None


def seconds_of(records: Records) -> tuple[list[float], list[float]]:
    """Return the wall seconds and the CPU-seconds of all steps except the first."""
    return [r["wall"] for r in records[1:]], [b["cum_cpu"] - a["cum_cpu"] for a, b in pairwise(records)]


def row(name: str, records: Records) -> list[str]:
    """Return the table row of one run."""
    wall = statistics.median(r["wall"] for r in records[1:])
    cpu = (records[-1]["cum_cpu"] - records[0]["cum_cpu"]) / (len(records) - 1)
    cells = [name, f"{wall:.3f}", f"{cpu:.3f}"]
    for goal in GOALS:
        found = reached(records, goal)
        cells.append(f"{found[0]} steps, {found[1]:.1f} / {found[2]:.1f} s" if found else "not reached")
    return cells


def measurements_of(pairs: list[tuple[Records, Records]]) -> list[measurements.Measurement]:
    """Return mrl's seconds and CPU-seconds per step, divided by TRL's. `pairs`: (run of TRL, run of mrl) for each seed."""
    found = []
    for place, what in enumerate(("wall s/step", "CPU-s/step")):
        trl, mrl = ([statistics.median(seconds_of(pair[who])[place]) for pair in pairs] for who in (0, 1))
        found.append(measurements.paired_ratio(f"mrl: {what} over TRL", mrl, trl))
    return found


def main() -> int:
    """Parse the arguments, run both trainers, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("toy", "smollm2"))
    parser.add_argument("--peer-python", required=True, help="Python of an environment with TRL")
    parser.add_argument("--model", type=Path, help="folder with SmolLM2-135M-Instruct, for smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=80)
    measurements.add_json_option(parser)
    args = parser.parse_args()
    if args.work == "smollm2" and not (args.model and args.model.is_dir()):
        parser.error(
            f"--model is {args.model}; give the folder with SmolLM2. docs/tutorials/model.md says how to get it"
        )
    table = Table(title=f"per step, and until the mean reward of {WINDOW} steps reaches a goal", title_justify="left")
    for column in ("run", "wall s/step", "CPU-s/step", *(f"until {goal:.2f}: wall / CPU" for goal in GOALS)):
        table.add_column(column)
    pairs = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        work = toy_work(folder) if args.work == "toy" else smollm2_work(folder, args.model)
        for seed in args.seeds:
            trl = run_trl(work, args.peer_python, seed, args.steps, folder)
            pairs.append((trl, run_mrl(work, seed, args.steps)))
            table.add_row(*row(f"TRL, seed {seed}", pairs[-1][0]))
            table.add_row(*row(f"mrl, seed {seed}", pairs[-1][1]))
    Console(width=120).print(table)
    measurements.write(args.json, measurements_of(pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
