"""Measures what the timeline and the text of samples cost: time and CPU-seconds of a step, and bytes through the driver.

    python benchmarks/observability.py [--blocks 20] [--steps 4] [--json FILE] [mrl train overrides]

One run alternates between three modes, with a block of steps in each: without timeline and samples, with the timeline only, and
with the timeline and samples. So the ratios compare the same processes, and a load of the machine that changes slowly affects all
modes alike. CPU-seconds count all processes of the run. The engines cannot turn their timeline off, so they record in all modes.
The measured cost of one span shows how much this adds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table

from benchmarks import measurements
from benchmarks.driver_traffic import Traffic
from benchmarks.measurements import Measurement
from benchmarks.step import tree_cpu_seconds
from mrl.config import hydra_entry
from mrl.config.validate import from_hydra
from mrl.controller import build
from mrl.controller.plan_train import plan_training
from mrl.controller.trainer import Trainer
from mrl.core.run_errors import PreemptionHandler
from parallel import spans

MODES = ("off", "timeline", "timeline and samples")
SPANS_TO_TIME = 50_000


@dataclass(frozen=True)
class Block:
    """Totals of some steps in one mode."""

    seconds: float
    cpu_s: float  # CPU-seconds of all processes of the run
    driver_bytes: int  # bytes that the driver sends and receives through Ray, without the calls that change the mode


def set_mode(trainer: Trainer, mode: str, run_dir: str, samples_per_step: int) -> None:
    """Turn the timeline on or off in the driver, the trainer ranks and the rollout worker, and the samples in the driver.

    `samples_per_step`: number of responses that a step keeps in the mode with samples.
    """
    handle, ranks = trainer.rollout.worker, trainer.actor.group.workers  # type: ignore[missing-attribute]
    worker = handle.actor
    if mode == "off":
        spans.stop()
        ray.get([actor.__ray_call__.remote(lambda _: spans.stop()) for actor in [worker, *ranks]])
    else:
        folder = Path(run_dir) / spans.FOLDER
        spans.start(folder, "driver", 0, "driver")
        ray.get(worker.__ray_call__.remote(lambda _: spans.start(folder, "rollout", 0, "rollout worker")))
    # If `kept` is 0, the driver does not ask the rollout worker for samples.
    kept = samples_per_step if mode == "timeline and samples" else 0
    handle.spec = replace(handle.spec, samples_per_step=kept)


def measure(overrides: Sequence[str], num_blocks: int, steps: int) -> dict[str, list[Block]]:
    """Return the blocks of each mode, in the order in which they were run. The first block of each mode is left out."""
    hydra_entry.register_schema()
    blocks: dict[str, list[Block]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        fixed = ["experiment=quickstart", "tracking.backends=[]", "trainer.save=false", "tracking.timeline=true"]
        more = ["trainer.max_steps=1000000", f"run.dir={folder}"]
        with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
            config = from_hydra(compose("config", [*fixed, *more, *overrides]))
        with build.trainer(plan_training(config), PreemptionHandler()) as trainer:
            trainer.weight_sync.push(version=0)
            first = 0
            for index in range(num_blocks + 1):
                for mode in MODES if index % 2 else reversed(MODES):  # so that no mode is always the first
                    set_mode(trainer, mode, folder, config.tracking.samples_per_step)
                    block = run_block(trainer, range(first, first + steps), records=mode != "off")
                    blocks[mode] += [block] if index else []
                    first += steps
    return blocks


def run_block(trainer: Trainer, steps: range, records: bool) -> Block:
    """Run these steps, and return their totals."""
    cpu_s, start = sum(tree_cpu_seconds().values()), time.perf_counter()
    with Traffic() as traffic:
        for step in steps:
            if records:
                trainer.begin_step(step + 1)
            trainer.step(step)
    seconds = time.perf_counter() - start
    return Block(seconds, sum(tree_cpu_seconds().values()) - cpu_s, traffic.bytes)


def span_cost_s() -> float:
    """Return the CPU-seconds of one span, from its begin until it is in the file."""
    with tempfile.TemporaryDirectory() as folder:
        spans.start(folder, "driver", 0, "driver")
        cpu_s = time.process_time()
        for _ in range(SPANS_TO_TIME):
            with spans.span("forward", "micro_batch", tokens=100):
                pass
        spans.stop()
        return (time.process_time() - cpu_s) / SPANS_TO_TIME


def measurements_of(blocks: dict[str, list[Block]], steps: int) -> list[Measurement]:
    """Return the measurements. A ratio compares a block with the block of the mode "off" beside it.

    The value of a ratio is the median. The spread is the standard error of a median: 1.25 times the standard error of a mean.
    """
    found = [Measurement("a span, CPU time", 1e6 * span_cost_s(), "us", "cpu_s")]
    for mode in MODES:
        driver_bytes = statistics.median(block.driver_bytes for block in blocks[mode]) / steps
        found.append(Measurement(f"{mode}: bytes of a step through the driver", driver_bytes, "bytes", "ratio"))
    for mode in MODES[1:]:
        for field, name in {"seconds": "wall time", "cpu_s": "CPU-seconds"}.items():
            pairs = zip(blocks[mode], blocks["off"], strict=True)
            ratios = [getattr(block, field) / getattr(base, field) for block, base in pairs]
            middle, error = statistics.median(ratios), 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
            name = f"{mode}: {name} of a step, on / off"
            found.append(Measurement(name, middle, "ratio", "ratio", spread=error / middle))
    return found


def main() -> None:
    """Measure, print a table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="number of blocks of each mode")
    parser.add_argument("--steps", type=int, default=4, help="number of steps of a block")
    measurements.add_json_option(parser)
    args, overrides = parser.parse_known_args()
    found = measurements_of(measure(overrides, args.blocks, args.steps), args.steps)
    table = Table("measurement", "value", "noise", title=f"{args.blocks} blocks of {args.steps} steps in each mode")
    for each in found:
        unit = "" if each.unit == "ratio" else each.unit
        table.add_row(each.name, f"{each.value:.4f} {unit}", f"{each.spread * each.value:.4f}")
    Console().print(table)
    measurements.write(args.json, found)


if __name__ == "__main__":
    main()
