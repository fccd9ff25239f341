"""Measures the speedup of asynchronous rollouts, and compares it with the predictions of the rollout simulator.

    python benchmarks/asynchrony.py [--rounds 2] [--scale 1.0] [--modes sync async] [--json FILE]

The real rollout worker runs on Ray, with its staleness buffer, rollout log, scoring, HTTP client and weight versions. The
engines are simulated (benchmarks/simulated_engine.py) and run in a separate process. Training is simulated by a sleep. Response
lengths are log-normal and truncated. The lengths are equal in all modes, because each length follows from the seed of the
response. One round runs all modes, one after the other, and takes 8 minutes. The means do not include the first SKIPPED steps, in
which the largest staleness buffer fills. The benchmark needs two idle cores, because the simulated times are real times.
"""

import argparse
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

from benchmarks import measurements
from benchmarks.simulated_engine import LogNormalScript
from mrl.config.process_schema import ClusterConfig, PauseMode
from mrl.data.prompts import PromptConstraints, PromptDataset, PromptStream
from mrl.data.sources import PromptSource
from mrl.data.synthetic_tasks import make_tiny_model, write_prompts
from mrl.data.tokenizer import character_tokenizer
from mrl.placement.ray_cluster import ray_cluster
from mrl.planner.engine_time import EngineSpeeds
from mrl.planner.rollout_simulator import GroupLengths, Prediction, RolloutSetup, RunSpeeds, best_possible_s, simulate
from mrl.planner.run_trace import RecordedStep, fit_steps
from mrl.rewards.rule_based import Length
from mrl.rollout.client import TRAINING, SamplingParams, response_seed
from mrl.rollout.manager import FixedEngines, RolloutManager, RolloutWorkerHandle
from mrl.rollout.spec import RolloutSpec
from mrl.weight_sync.coordinator import Coordinator

N, G, ENGINES, SEED = 32, 8, 4, 0
LENGTHS = LogNormalScript(median=60, sigma=1.0, longest=480)
SPEEDS = RunSpeeds(EngineSpeeds(0.024, 0.0003, 0.00003, 64), train_s=5.1, train_token_s=0.0, push_s=0.3)
STEPS = {"sync": 8, "one_step_off": 11, "async": 21}
SETUPS = {
    "sync": RolloutSetup(N, ENGINES, 0, in_order=True),
    "one_step_off": RolloutSetup(N, ENGINES, 1, in_order=True),
    "async": RolloutSetup(N, ENGINES, 4),
}
SKIPPED = 5  # number of steps at the start of a run that the means do not include


@dataclass
class MeasuredRun:
    """Measurements of one run."""

    step_s: list[float]  # [steps] duration of each step
    engine_s: list[float]  # [steps] part of step_s in which the run waits for engines
    push_s: list[float]  # [steps] part of step_s in which the run pushes weights
    tokens: list[int]  # [steps] number of response tokens on which the step trains
    oldest: int  # largest staleness of a token
    idle: float  # fraction of the time in which engines are idle

    def seconds(self) -> float:
        """Return the mean duration of a step."""
        return statistics.fmean(self.step_s[SKIPPED:])

    def tokens_per_s(self) -> float:
        """Return the number of response tokens per second on which the run trains."""
        return sum(self.tokens[SKIPPED:]) / sum(self.step_s[SKIPPED:])


def slow_down(speeds: RunSpeeds, scale: float) -> RunSpeeds:
    """Return speeds with which everything takes `scale` times as long."""
    engine = speeds.engine
    times = EngineSpeeds(
        engine.fixed_step_s * scale, engine.request_s * scale, engine.prefill_s * scale, engine.max_running
    )
    return RunSpeeds(times, speeds.train_s * scale, speeds.train_token_s * scale, speeds.push_s * scale)


def make_data(folder: Path) -> PromptDataset:
    """Write and load prompts of about a dozen tokens."""
    tokenizer = character_tokenizer()
    make_tiny_model(folder / "model", tokenizer, context=LENGTHS.longest + 64, initializer_range=0.02, seed=0)
    write_prompts(folder / "train.parquet", "train", list(range(1000, 9000)))
    source = PromptSource((str(folder / "train.parquet"),))
    return PromptDataset.load([source], folder / "model", PromptConstraints(64, len(tokenizer)))


def drawn_groups(data: PromptDataset, count: int) -> GroupLengths:
    """Return the lengths of the first `count` groups that a run draws.

    The seeds of the responses determine these lengths, as in the simulated engines.
    """
    rows = data.stream(N, SEED, shuffle=True).take(count)
    prompts = [data.encode(row) for row in rows.tolist()]
    seeds = [[response_seed(SEED, TRAINING, G * number + member) for member in range(G)] for number in range(count)]
    lengths = [[LENGTHS.length(p, seed) for seed in members] for p, members in zip(prompts, seeds, strict=True)]
    return GroupLengths(np.array(lengths), np.array([len(p) for p in prompts]), rows)


@contextmanager
def engines(speeds: EngineSpeeds) -> Iterator[list[str]]:
    """Start simulated engines in a separate process. Yields their URLs."""
    milliseconds = dict(step_ms=speeds.fixed_step_s, request_ms=speeds.request_s, prefill_ms=speeds.prefill_s)
    options = {name: 1000 * value for name, value in milliseconds.items()} | asdict(LENGTHS)
    options |= dict(engines=ENGINES, max_running=speeds.max_running)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "benchmarks.simulated_engine", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield [process.stdout.readline().strip() for _ in range(ENGINES)]
    finally:
        process.terminate()
        process.wait(10)


def rollout_spec(data: PromptDataset, urls: Sequence[str], setup: RolloutSetup, run_dir: Path) -> RolloutSpec:
    """Return the specification of the rollout worker."""
    (run_dir / "logs").mkdir(parents=True)
    unused: dict[str, Any] = dict(test=None, advantage_pipeline=None, rollout_filter=None, evaluations=(), replay=None)
    plain = dict(needs_greedy=False, rollout_logprobs_as_old=False, record=False, num_engines=0, engine_tp=1)
    return RolloutSpec(
        **unused,
        **plain,
        model_path=data.model_path,
        run_dir=str(run_dir),
        train=data,
        reward=Length(LENGTHS.longest),
        prompts_per_step=N,
        responses_per_prompt=G,
        sampling=SamplingParams(LENGTHS.longest),
        engine_urls=tuple(urls),
        seed=SEED,
        request_timeout_s=300.0,
        deterministic=True,
        staleness=setup.staleness,
        in_order=setup.in_order,
    )


def measure(
    data: PromptDataset, speeds: RunSpeeds, setup: RolloutSetup, steps: int, options: dict[str, Any]
) -> MeasuredRun:
    """Run the rollout worker for `steps` steps."""
    with tempfile.TemporaryDirectory() as folder, engines(speeds.engine) as urls:
        worker = RolloutWorkerHandle(rollout_spec(data, urls, setup, Path(folder)), options, timeout_s=360.0)
        coordinator = Coordinator(urls, 1, 60.0, PauseMode.retract, join_channel=None)
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
) -> MeasuredRun:
    run, now = MeasuredRun([], [], [], [], 0, 0.0), time.monotonic()
    busy, start = _busy_s(coordinator), now
    for step in range(steps):
        rollouts = manager.generate(prompts, step)
        sequences = rollouts.prompt_lengths + rollouts.response_lengths
        time.sleep(speeds.training(float(sequences.sum()), 1.0))
        trained = time.monotonic()
        with manager.worker.recorded_as_paused() if rollouts.untrained_requests else nullcontext():
            _push(coordinator, step + 1, speeds.push_s)
        before, now = now, time.monotonic()
        run.step_s.append(now - before)
        run.engine_s.append(rollouts.sampling_metrics["component_time/engine_s"])
        run.push_s.append(now - trained)
        run.tokens.append(int(rollouts.response_lengths.sum()))
        run.oldest = max(run.oldest, step - int(rollouts.weight_versions.min()))
    run.idle = 1 - (_busy_s(coordinator) - busy) / (ENGINES * (now - start))
    return run


def _push(coordinator: Coordinator, version: int, seconds: float) -> None:
    """Push a weight version as trainer rank 0 does, but without weights."""
    coordinator.call_all(lambda engine: engine.pause(PauseMode.retract))
    coordinator.call_all(lambda engine: engine.begin_weight_update())
    time.sleep(seconds)
    coordinator.publish(str(version), version)
    assert not coordinator.failed, coordinator.failures


def _busy_s(coordinator: Coordinator) -> float:
    return sum(info["busy_s"] for info in coordinator.call_all(lambda engine: engine.server_info()).values())


def fit_speeds(run: MeasuredRun, groups: GroupLengths) -> RunSpeeds:
    """Return speeds that are fitted to a synchronous run, as `mrl plan rollout` fits them."""
    slices = [slice(step * N, step * N + N) for step in range(len(run.step_s))]
    parts = zip(slices, run.step_s, run.engine_s, run.push_s, strict=True)
    steps = [RecordedStep(groups.prompts[p], groups.responses[p], e, s - e - push, push) for p, s, e, push in parts]
    return fit_steps(steps[1:], ENGINES, SPEEDS.engine.max_running).speeds


def bound_s(tokens: Sequence[int], speeds: RunSpeeds, setup: RolloutSetup) -> float:
    """Return a lower bound for the mean duration of a step."""
    mean = statistics.fmean(tokens[SKIPPED:])
    return best_possible_s(mean, speeds.training(mean, 1.0), speeds, setup)


def show(
    measured: dict[str, list[MeasuredRun]],
    predicted: dict[str, Prediction],
    predicted_from_fit: dict[str, Prediction],
    speeds: RunSpeeds,
) -> None:
    """Print a table with a row for each mode.

    `predicted` are predictions from the true speeds. `predicted_from_fit` are predictions from speeds that were fitted to a
    synchronous run.
    """
    table = Table("", title=f"{N} x {G} responses, {ENGINES} engines; after {SKIPPED} steps", title_justify="left")
    columns = (
        "s/step (runs)",
        "predicted",
        "error",
        "predicted from sync",
        "error",
        "tokens/s over sync",
        "best possible over s/step",
        "idle",
        "oldest",
    )
    for column in columns:
        table.add_column(column, justify="right")
    base = statistics.fmean(run.tokens_per_s() for run in measured["sync"]) if "sync" in measured else float("nan")
    for mode, runs in measured.items():
        seconds = statistics.fmean(run.seconds() for run in runs)
        expected = predicted[mode].seconds(SKIPPED)
        speedup = statistics.fmean(run.tokens_per_s() for run in runs) / base
        best = bound_s(runs[0].tokens, speeds, SETUPS[mode]) / seconds
        each = ", ".join(f"{run.seconds():.3f}" for run in runs)
        error = max(abs(expected / run.seconds() - 1) for run in runs)
        from_fit = predicted_from_fit[mode].seconds(SKIPPED) if mode in predicted_from_fit else float("nan")
        fit_error = max(abs(from_fit / run.seconds() - 1) for run in runs)
        idle = statistics.fmean(run.idle for run in runs)
        oldest = max(run.oldest for run in runs)
        numbers = (
            f"{expected:.3f}",
            f"{error:.1%}",
            f"{from_fit:.3f}",
            f"{fit_error:.1%}",
            f"{speedup:.2f}",
            f"{best:.1%}",
            f"{idle:.2f}",
            f"{oldest}",
        )
        table.add_row(mode, each, *numbers)
    Console(width=120).print(table)


def measurements_of(
    measured: dict[str, list[MeasuredRun]], predicted: dict[str, Prediction], scale: float
) -> list[measurements.Measurement]:
    """Return the duration of steps divided by the prediction, and the speed divided by the speed of synchronous runs."""
    result = []
    for mode, runs in measured.items():
        seconds, expected = [run.seconds() for run in runs], predicted[mode].seconds(SKIPPED)
        name = f"{mode}: s/step over prediction, scale {scale:g}"
        result.append(measurements.of_repeats(name, [taken / expected for taken in seconds], "ratio", "ratio"))
        if mode != "sync" and "sync" in measured:
            speeds = ([run.tokens_per_s() for run in of_mode] for of_mode in (runs, measured["sync"]))
            result.append(measurements.paired_ratio(f"{mode}: tokens/s over sync", *speeds, better="higher"))
    return result


def main() -> None:
    """Parse the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor for all times; above 1 for a slow or busy machine"
    )
    parser.add_argument("--modes", nargs="+", choices=SETUPS, default=list(SETUPS))
    measurements.add_json_option(parser)
    args = parser.parse_args()
    speeds = slow_down(SPEEDS, args.scale)
    with tempfile.TemporaryDirectory() as folder, ray_cluster(ClusterConfig()) as options:
        data = make_data(Path(folder))
        groups = drawn_groups(data, (max(STEPS.values()) + 6) * N)
        predicted = {mode: simulate(groups, speeds, SETUPS[mode], STEPS[mode]) for mode in args.modes}
        measured: dict[str, list[MeasuredRun]] = {mode: [] for mode in args.modes}
        for _ in range(args.rounds):
            for mode in args.modes:
                measured[mode].append(measure(data, speeds, SETUPS[mode], STEPS[mode], options | dict(num_cpus=0)))
                print(
                    f"{mode}: {measured[mode][-1].seconds():.3f} s/step, {predicted[mode].seconds(SKIPPED):.3f} predicted"
                )
    fits = [fit_speeds(run, groups) for run in measured.get("sync", [])][:1]
    predicted_from_fit = {mode: simulate(groups, fits[0], SETUPS[mode], STEPS[mode]) for mode in args.modes if fits}
    show(measured, predicted, predicted_from_fit, speeds)
    measurements.write(args.json, measurements_of(measured, predicted, args.scale))


if __name__ == "__main__":
    main()
