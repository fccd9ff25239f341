"""Measures the phases of a training step, samples per second, and CPU-seconds per sample.

    python benchmarks/step.py [--steps 30] [--json FILE] [mrl train overrides, e.g. experiment=quickstart parallel.dp=2]

CPU-seconds are user and system time of the whole process tree (driver, Ray, trainer ranks, engines). They are read after each
step.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise

import psutil
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table

from benchmarks import measurements
from benchmarks.measurements import Measurement, of_repeats
from mrl.config import hydra_entry
from mrl.config.validate import from_hydra
from mrl.controller import build
from mrl.controller.plan_train import plan_training
from mrl.core.run_errors import PreemptionHandler

COMPONENTS = ("engine", "sync_engine", "megatron", "reward", "controller")


def tree_cpu_seconds() -> dict[str, float]:
    """Return the user and system seconds of this process and all its descendants, as a sum for each role."""
    seconds: dict[str, float] = defaultdict(float)
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        try:
            times, line = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        seconds[role_of(line, process.pid)] += times.user + times.system
    return dict(seconds)


def role_of(line: str, pid: int) -> str:
    """Return the role of a process. `line` is its command line."""
    names = {"sglang": "engine", "mrl.rollout": "engine", "TrainWorker": "trainer", "RolloutWorker": "rollout worker"}
    if pid == os.getpid():
        return "driver"
    return next((role for mark, role in names.items() if mark in line), "ray")


class StepMeter:
    """A tracker sink that reads the CPU-seconds of the process tree after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.cpu: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if "time/step_s" in metrics:
            self.steps.append(dict(metrics))
            self.cpu.append(tree_cpu_seconds())

    def rewind(self, last_step: int, evaluated: bool) -> None: ...

    def close(self, failed: bool = False) -> None: ...

    def cpu_per_step(self) -> dict[str, float]:
        """Return the mean CPU-seconds of a step, by role, without the first step."""
        first, last, count = self.cpu[0], self.cpu[-1], len(self.cpu) - 1
        return {name: (last[name] - first.get(name, 0.0)) / count for name in last}

    def measurements(self) -> list[Measurement]:
        """Return the seconds and CPU-seconds of a step, and the shares of its parts, over all steps except the first."""
        steps = self.steps[1:]
        totals = [sum(cpu.values()) for cpu in self.cpu]
        shares = {
            part: [step[f"component_time/{part}_s"] / step["time/step_s"] for step in steps] for part in COMPONENTS
        }
        return [
            of_repeats("step: seconds", [step["time/step_s"] for step in steps], "s", "wall"),
            of_repeats("step: CPU-s", [b - a for a, b in pairwise(totals)], "CPU-s", "cpu_s"),
            *(
                of_repeats(f"{part}: share of the step", shares[part], "ratio", "ratio")
                for part in ("controller", "sync_engine")
            ),
        ]

    def median(self, name: str) -> float:
        """Return the median of a metric over all steps except the first."""
        return statistics.median(step[name] for step in self.steps[1:])


def measure(overrides: list[str], steps: int, stop_reward: float | None = None) -> StepMeter:
    """Run an experiment for at most `steps` steps. The run ends earlier if the mean reward reaches `stop_reward`."""
    hydra_entry.register_schema()
    meter = StepMeter()
    with tempfile.TemporaryDirectory() as folder, initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        goal = "null" if stop_reward is None else stop_reward
        fixed = [f"run.dir={folder}", f"trainer.max_steps={steps}", f"trainer.stop_reward={goal}", "trainer.save=false"]
        config = from_hydra(compose("config", [*hydra_entry.add_default_experiment(overrides), *fixed]))
        with build.trainer(plan_training(config), PreemptionHandler()) as trainer:
            trainer.tracker.sinks.append(meter)
            trainer.fit()
    return meter


def show(meter: StepMeter) -> None:
    """Print the seconds and CPU-seconds of the parts of a step."""
    step = meter.median("time/step_s")
    samples = meter.median("rollout/samples")
    cpu = meter.cpu_per_step()
    table = Table(title=f"{len(meter.steps)} steps, medians without the first", title_justify="left")
    for column in ("", "seconds", "share"):
        table.add_column(column, justify="left" if not column else "right")
    # Steps with an evaluation have one more phase, which the table does not show.
    measured = set.intersection(*(set(step) for step in meter.steps[1:]))
    phases = [n for n in meter.steps[-1] if n.startswith("time/") and n != "time/step_s" and n in measured]
    for name in [*phases, *(f"component_time/{part}_s" for part in COMPONENTS)]:
        table.add_row(name, f"{meter.median(name):.4f}", f"{meter.median(name) / step:.1%}")
        if name == phases[-1]:
            table.add_section()
    table.add_section()
    table.add_row("time/step_s", f"{step:.4f}", "")
    for name, seconds in sorted(cpu.items(), key=lambda item: -item[1]):
        table.add_row(f"CPU-s of a step: {name}", f"{seconds:.4f}", f"{seconds / sum(cpu.values()):.1%}")
    Console().print(table)
    print(f"samples/s {samples / step:.1f}   CPU-s per sample {sum(cpu.values()) / samples:.5f}")
    print(f"controller's share of a step {meter.median('component_time/controller_s') / step:.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    measurements.add_json_option(parser)
    args, overrides = parser.parse_known_args()
    meter = measure(overrides, args.steps)
    show(meter)
    measurements.write(args.json, meter.measurements())
    return 0


if __name__ == "__main__":
    sys.exit(main())
