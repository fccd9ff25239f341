"""Measures what the timeline and the text of samples cost: time and CPU-seconds of a step, and bytes through the driver.

    python benchmarks/observability.py [--rounds 5] [--blocks 4] [--steps 4] [--json FILE] [mrl train overrides]

In each round, a new run of each mode is started, and the runs take turns: each makes a block of steps while the others are idle.
So load of the machine that changes slowly affects all modes alike. Two runs of the same mode differ by up to 4 %, because their
processes get other memory and other cores, so only the mean over several rounds says something. CPU-seconds are those of all
processes of a run.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MODES = {
    "off": ["tracking.timeline=false", "tracking.samples_per_step=0"],
    "timeline": ["tracking.timeline=true", "tracking.samples_per_step=0"],
    "timeline and samples": ["tracking.timeline=true"],
}
START_TIMEOUT_S, BLOCK_TIMEOUT_S = 600.0, 600.0


@dataclass(frozen=True)
class Block:
    """Totals of some steps of one run."""

    seconds: float  # of the steps
    cpu_s: float  # of all processes of the run
    driver_bytes: int  # sent and received by the driver through Ray
    tokens: float  # sampled and trained


def serve_blocks(pipe: Connection, overrides: Sequence[str], folder: str) -> None:
    """Start a run, and make a block of steps for each number of steps that arrives. Ends when the pipe is closed."""
    from benchmarks.driver_traffic import Traffic
    from benchmarks.step import tree_cpu_seconds

    with started_run([*overrides, f"run.dir={folder}"]) as trainer:
        trainer.begin_step(1)
        trainer.weight_sync.push(version=0)
        pipe.send("ready")
        num_steps = 0
        while count := pipe.recv():
            cpu_s, tokens, start = sum(tree_cpu_seconds().values()), 0.0, time.perf_counter()
            with Traffic() as traffic:
                for step in range(num_steps, num_steps + count):
                    trainer.begin_step(step + 1)
                    tokens += trainer.step(step).num_tokens
            seconds = time.perf_counter() - start
            pipe.send(Block(seconds, sum(tree_cpu_seconds().values()) - cpu_s, traffic.bytes, tokens))
            num_steps += count


@contextmanager
def started_run(overrides: Sequence[str]) -> Iterator[Any]:
    """Yield the Trainer of a run of the quickstart."""
    from hydra import compose, initialize_config_dir

    from mrl.config import hydra_entry
    from mrl.config.validate import from_hydra
    from mrl.controller import build
    from mrl.controller.plan_train import plan_training
    from mrl.core.run_errors import PreemptionHandler

    hydra_entry.register_schema()
    # With deterministic sampling, all runs sample the same tokens, so that they do the same work.
    fixed = ["experiment=quickstart", "tracking.wandb=false", "trainer.save=false", "rollout.deterministic=true"]
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        config = from_hydra(compose("config", [*fixed, "trainer.max_steps=1000000", *overrides]))
    with build.trainer(plan_training(config), PreemptionHandler()) as trainer:
        yield trainer


type Round = dict[str, list[Block]]  # mode -> blocks, in the order in which they were made


def measure_round(overrides: Sequence[str], num_blocks: int, steps: int) -> Round:
    """Start a run of each mode, and return its blocks. The first block of each run is left out."""
    spawn, blocks = multiprocessing.get_context("spawn"), {mode: list[Block]() for mode in MODES}
    pipes: dict[str, Connection] = {}
    with ExitStack() as stack:
        for mode, more in MODES.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            pipes[mode], other = spawn.Pipe()
            run = spawn.Process(target=serve_blocks, args=(other, [*overrides, *more], folder))
            run.start()
            other.close()
            stack.callback(run.join, 60)
            stack.callback(pipes[mode].send, 0)  # ends the run
        for mode in MODES:
            assert receive(pipes[mode], START_TIMEOUT_S) == "ready", mode
        for index in range(num_blocks + 1):
            modes = list(MODES) if index % 2 else list(reversed(MODES))  # so that no mode is always the first
            for mode in modes:
                pipes[mode].send(steps)
                block = receive(pipes[mode], BLOCK_TIMEOUT_S)
                blocks[mode] += [block] if index else []
    return blocks


def receive(pipe: Connection, timeout_s: float) -> Any:
    """Return what a run sends. Raises TimeoutError after `timeout_s` seconds, and EOFError if the run has ended."""
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"a run did not answer within {timeout_s:g} s")
    return pipe.recv()


def total(blocks: Sequence[Block], field: str) -> float:
    """Return the sum of a field over blocks."""
    return sum(getattr(block, field) for block in blocks)


def measurements(rounds: Sequence[Round], steps: int) -> list[dict[str, Any]]:
    """Return the measurements. A ratio is the mean over the rounds, and its noise is the standard error of this mean."""
    found = []
    for mode in MODES:
        blocks = [block for each in rounds for block in each[mode]]
        num_steps = steps * len(blocks)
        found.append(
            entry(f"{mode}: tokens of a step", total(blocks, "tokens") / num_steps, unit="tokens", kind="count")
        )
        driver_bytes = statistics.median(block.driver_bytes for block in blocks) / steps
        found.append(entry(f"{mode}: bytes of a step through the driver", driver_bytes, unit="bytes", kind="count"))
        cpu_s = [total(each[mode], "cpu_s") / steps / len(each[mode]) for each in rounds]
        found.append(entry(f"{mode}: CPU-seconds of a step", *mean_and_error(cpu_s), kind="cpu_s", unit="s"))
    for mode in list(MODES)[1:]:
        for field, name in {"seconds": "wall time", "cpu_s": "CPU-seconds"}.items():
            ratios = [total(each[mode], field) / total(each["off"], field) for each in rounds]
            found.append(entry(f"{mode}: {name} of a step, on / off", *mean_and_error(ratios), kind="ratio", unit=""))
    return found


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values and its standard error."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.mean(values), spread / len(values) ** 0.5


def entry(name: str, value: float, noise: float = 0.0, *, unit: str, kind: str) -> dict[str, Any]:
    """Return one measurement for the JSON file."""
    return dict(name=name, value=value, unit=unit, noise=noise, better="lower", kind=kind)


def main() -> None:
    """Measure, print a table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of each mode")
    parser.add_argument("--blocks", type=int, default=4, help="number of blocks of each run")
    parser.add_argument("--steps", type=int, default=4, help="number of steps of a block")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    args, overrides = parser.parse_known_args()
    rounds = [measure_round(overrides, args.blocks, args.steps) for _ in range(args.rounds)]
    found = measurements(rounds, args.steps)
    title = f"{args.rounds} runs of each mode, {args.blocks} blocks of {args.steps} steps"
    table = Table("measurement", "value", "noise", title=title)
    for each in found:
        table.add_row(each["name"], f"{each['value']:.4f} {each['unit']}", f"{each['noise']:.4f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
