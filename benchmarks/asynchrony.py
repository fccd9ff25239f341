"""What asynchronous rollouts are worth, and whether the simulator knows it beforehand: mrl's worker, engines that only take time.

    python benchmarks/asynchrony.py [--rounds 2] [--scale 1.0] [--modes sync async]    8 minutes a round

The rollout worker, its window, stream, journal, scoring, HTTP and weight versions are those of a run (RolloutManager, on Ray);
engines are benchmarks/simulated_engine.py, in a process of their own, and the trainer sleeps. Lengths are log-normal, cut at a
maximum, and the same in every mode: each follows from its response's seed. Modes run in turn. Numbers leave out the steps in
which the largest window fills (SKIPPED). Needs two cores that are not busy: time is real.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.simulated_engine import LongTailed
from mrl.data.prompts import PromptConstraints, PromptDataset, PromptStream
from mrl.data.sources import PromptSource
from mrl.data.synthetic_tasks import make_tiny_model, write_prompts
from mrl.data.tokenizer import character_tokenizer
from mrl.placement.ray_cluster import ray_cluster
from mrl.planner.engine_queue import EngineSpeeds
from mrl.planner.rollout_simulator import GroupLengths, Prediction, RolloutSetup, RunSpeeds, best_possible_s, simulate
from mrl.planner.run_trace import RecordedStep, fit_steps
from mrl.rewards.rule_based import Length
from mrl.rollout.manager import FixedEngines, RolloutManager, RolloutWorkerHandle
from mrl.rollout.request_builder import TRAINING, seed_of
from mrl.rollout.spec import RolloutSpec
from mrl.weight_sync.coordinator import Coordinator

N, G, ENGINES, SEED = 32, 8, 4, 0
LENGTHS = LongTailed(median=60, sigma=1.0, longest=480)
SPEEDS = RunSpeeds(EngineSpeeds(0.024, 0.0003, 0.00003, 64), train_s=5.1, train_token_s=0.0, push_s=0.3)
STEPS = {"sync": 8, "one_step_off": 11, "async": 21}
SETUPS = {
    "sync": RolloutSetup(N, ENGINES, 0, in_order=True),
    "one_step_off": RolloutSetup(N, ENGINES, 1, in_order=True),
    "async": RolloutSetup(N, ENGINES, 4),
}
SKIPPED = 5  # first steps


@dataclass
class Measured:
    """One run."""

    step_s: list[float]  # [steps]
    engine_s: list[float]  # [steps] of these, waiting for engines
    push_s: list[float]  # [steps] of these, pushing weights
    tokens: list[int]  # [steps] response tokens trained
    oldest: int  # versions from a response's first token to its training
    idle: float  # of the engines' time

    def seconds(self) -> float:
        """Of a mean step."""
        return statistics.fmean(self.step_s[SKIPPED:])

    def tokens_per_s(self) -> float:
        """Trained response tokens."""
        return sum(self.tokens[SKIPPED:]) / sum(self.step_s[SKIPPED:])


def slowed(speeds: RunSpeeds, scale: float) -> RunSpeeds:
    """The same, every second so many times as long."""
    engine = speeds.engine
    times = EngineSpeeds(engine.step_s * scale, engine.request_s * scale, engine.prefill_s * scale, engine.max_running)
    return RunSpeeds(times, speeds.train_s * scale, speeds.train_token_s * scale, speeds.push_s * scale)


def make_data(folder: Path) -> PromptDataset:
    """Prompts of a dozen tokens."""
    tokenizer = character_tokenizer()
    make_tiny_model(folder / "model", tokenizer, context=LENGTHS.longest + 64, initializer_range=0.02, seed=0)
    write_prompts(folder / "train.parquet", "train", list(range(1000, 9000)))
    source = PromptSource((str(folder / "train.parquet"),))
    return PromptDataset.load([source], folder / "model", PromptConstraints(64, len(tokenizer)))


def groups_of(data: PromptDataset, tickets: int) -> GroupLengths:
    """Lengths of what a run draws, by ticket: from its seeds, as engines have them."""
    rows = data.stream(N, SEED, shuffle=True).take(tickets)
    prompts = [data.encode(row) for row in rows.tolist()]
    seeds = [[seed_of(SEED, TRAINING, G * ticket + member) for member in range(G)] for ticket in range(tickets)]
    lengths = [[LENGTHS.length(p, seed) for seed in members] for p, members in zip(prompts, seeds, strict=True)]
    return GroupLengths(np.array(lengths), np.array([len(p) for p in prompts]), rows)


@contextmanager
def engines(speeds: EngineSpeeds) -> Iterator[list[str]]:
    """URLs of fresh engines."""
    milliseconds = dict(step_ms=speeds.step_s, request_ms=speeds.request_s, prefill_ms=speeds.prefill_s)
    known = {name: 1000 * value for name, value in milliseconds.items()} | asdict(LENGTHS)
    known |= dict(engines=ENGINES, max_running=speeds.max_running)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in known.items()]
    command = [sys.executable, "-m", "benchmarks.simulated_engine", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield [process.stdout.readline().strip() for _ in range(ENGINES)]
    finally:
        process.terminate()
        process.wait(10)


def rollout_spec(data: PromptDataset, urls: Sequence[str], setup: RolloutSetup, run_dir: Path) -> RolloutSpec:
    """What a run's worker is built from."""
    (run_dir / "logs").mkdir(parents=True)
    unused: dict[str, Any] = dict(test=None, advantage_pipeline=None, group_filter=None, eval_rows=None, replay=None)
    plain = dict(needs_greedy=False, old_from_rollout=False, record=False, temperature=1.0, num_engines=0, engine_tp=1)
    return RolloutSpec(
        **unused,
        **plain,
        model_path=data.model_path,
        run_dir=str(run_dir),
        train=data,
        reward=Length(LENGTHS.longest),
        prompts_per_step=N,
        responses_per_prompt=G,
        max_response_tokens=LENGTHS.longest,
        engine_urls=tuple(urls),
        seed=SEED,
        request_timeout_s=300.0,
        deterministic=True,
        staleness=setup.staleness,
        in_order=setup.in_order,
    )


def measure(
    data: PromptDataset, speeds: RunSpeeds, setup: RolloutSetup, steps: int, options: dict[str, Any]
) -> Measured:
    """So many steps of the real worker."""
    with tempfile.TemporaryDirectory() as folder, engines(speeds.engine) as urls:
        worker = RolloutWorkerHandle(rollout_spec(data, urls, setup, Path(folder)), options, timeout_s=360.0)
        coordinator = Coordinator(urls, 1, 60.0, "retract", join_channel=None)
        try:
            worker.wait_ready(60.0)
            _push(coordinator, 0, 0.0)
            manager = RolloutManager(worker, FixedEngines())
            return _run(manager, coordinator, data.stream(N, SEED, shuffle=True), speeds, steps)
        finally:
            worker.close()
            coordinator.close()


def _run(
    manager: RolloutManager, coordinator: Coordinator, prompts: PromptStream, speeds: RunSpeeds, steps: int
) -> Measured:
    found, now = Measured([], [], [], [], 0, 0.0), time.monotonic()
    busy, start = _busy_s(coordinator), now
    for step in range(steps):
        rollouts = manager.generate(prompts, step)
        sequences = rollouts.prompt_lengths + rollouts.response_lengths
        time.sleep(speeds.training(float(sequences.sum()), 1.0))
        trained = time.monotonic()
        with manager.worker.paused() if rollouts.waiting else nullcontext():
            _push(coordinator, step + 1, speeds.push_s)
        before, now = now, time.monotonic()
        found.step_s.append(now - before)
        found.engine_s.append(rollouts.numbers["spent/engine_s"])
        found.push_s.append(now - trained)
        found.tokens.append(int(rollouts.response_lengths.sum()))
        found.oldest = max(found.oldest, step - int(rollouts.weight_versions.min()))
    found.idle = 1 - (_busy_s(coordinator) - busy) / (ENGINES * (now - start))
    return found


def _push(coordinator: Coordinator, version: int, seconds: float) -> None:
    """As the first trainer rank does it, but for the weights."""
    coordinator.call_all(lambda engine: engine.pause("retract"))
    coordinator.call_all(lambda engine: engine.begin_weight_update())
    time.sleep(seconds)
    coordinator.publish(str(version), version)
    assert not coordinator.failed, coordinator.failures


def _busy_s(coordinator: Coordinator) -> float:
    return sum(told["busy_s"] for told in coordinator.call_all(lambda engine: engine.server_info()).values())


def fitted(run: Measured, groups: GroupLengths) -> RunSpeeds:
    """The speeds that a synchronous run tells of, as `mrl plan rollout` fits them."""
    places = [slice(step * N, step * N + N) for step in range(len(run.step_s))]
    parts = zip(places, run.step_s, run.engine_s, run.push_s, strict=True)
    steps = [RecordedStep(groups.prompts[p], groups.responses[p], e, s - e - push, push) for p, s, e, push in parts]
    return fit_steps(steps[1:], ENGINES, SPEEDS.engine.max_running).speeds


def bound_s(tokens: Sequence[int], speeds: RunSpeeds, setup: RolloutSetup) -> float:
    """Seconds that a mean step takes at least."""
    mean = statistics.fmean(tokens[SKIPPED:])
    return best_possible_s(mean, speeds.training(mean, 1.0), speeds, setup)


def show(
    found: dict[str, list[Measured]],
    predicted: dict[str, Prediction],
    foretold: dict[str, Prediction],
    speeds: RunSpeeds,
) -> None:
    """A row per mode; `predicted` from the speeds of the engines, `foretold` from what synchronous runs told of them."""
    table = Table("", title=f"{N} x {G} responses, {ENGINES} engines; after {SKIPPED} steps", title_justify="left")
    columns = (
        "s/step (runs)",
        "predicted",
        "error",
        "from sync",
        "error",
        "tokens/s over sync",
        "of best possible",
        "idle",
        "oldest",
    )
    for column in columns:
        table.add_column(column, justify="right")
    base = statistics.fmean(run.tokens_per_s() for run in found["sync"]) if "sync" in found else float("nan")
    for mode, runs in found.items():
        seconds = statistics.fmean(run.seconds() for run in runs)
        expected = predicted[mode].seconds(SKIPPED)
        speedup = statistics.fmean(run.tokens_per_s() for run in runs) / base
        best = bound_s(runs[0].tokens, speeds, SETUPS[mode]) / seconds
        each = ", ".join(f"{run.seconds():.3f}" for run in runs)
        error = max(abs(expected / run.seconds() - 1) for run in runs)
        told = foretold[mode].seconds(SKIPPED) if mode in foretold else float("nan")
        told_error = max(abs(told / run.seconds() - 1) for run in runs)
        idle = statistics.fmean(run.idle for run in runs)
        oldest = max(run.oldest for run in runs)
        numbers = (
            f"{expected:.3f}",
            f"{error:.1%}",
            f"{told:.3f}",
            f"{told_error:.1%}",
            f"{speedup:.2f}",
            f"{best:.1%}",
            f"{idle:.2f}",
            f"{oldest}",
        )
        table.add_row(mode, each, *numbers)
    Console(width=120).print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="of all times: more where the machine is slow or busy")
    parser.add_argument("--modes", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--out", type=Path, help="write what was measured here, as JSON")
    known = parser.parse_args()
    speeds = slowed(SPEEDS, known.scale)
    with tempfile.TemporaryDirectory() as folder, ray_cluster(None) as options:
        data = make_data(Path(folder))
        groups = groups_of(data, (max(STEPS.values()) + 6) * N)
        predicted = {mode: simulate(groups, speeds, SETUPS[mode], STEPS[mode]) for mode in known.modes}
        found: dict[str, list[Measured]] = {mode: [] for mode in known.modes}
        for _ in range(known.rounds):
            for mode in known.modes:
                found[mode].append(measure(data, speeds, SETUPS[mode], STEPS[mode], options | dict(num_cpus=0)))
                print(
                    f"{mode}: {found[mode][-1].seconds():.3f} s/step, {predicted[mode].seconds(SKIPPED):.3f} predicted"
                )
    told = [fitted(run, groups) for run in found.get("sync", [])][:1]
    foretold = {mode: simulate(groups, told[0], SETUPS[mode], STEPS[mode]) for mode in known.modes if told}
    show(found, predicted, foretold, speeds)
    if known.out:
        runs = {mode: [asdict(run) for run in runs] for mode, runs in found.items()}
        known.out.write_text(json.dumps(dict(scale=known.scale, runs=runs)))


if __name__ == "__main__":
    main()
