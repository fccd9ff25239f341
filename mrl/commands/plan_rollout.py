"""`mrl plan rollout`: simulates how fast a run would be with other staleness, other divisions of the GPUs, or over-sampling."""

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mrl.config import hydra_entry
from mrl.planner.engine_time import EngineSpeeds
from mrl.planner.rollout_simulator import (
    GpuCounts,
    GroupLengths,
    RolloutSetup,
    RunSpeeds,
    Scenario,
    compare_scenarios,
)
from mrl.planner.run_trace import RunTrace, SpeedFit, read_lengths, read_run
from mrl.rollout.staleness_buffer import num_extra_groups
from parallel.durable_files import atomic_file

USAGE = """usage: mrl plan rollout run.dir=FOLDER [KEY=VALUE ...]
       mrl plan rollout lengths=FILE.jsonl KEY=VALUE ...

Simulates scenarios of a run: other limits of staleness, other divisions of its GPUs, and over-sampling
(docs/concepts/asynchrony.md). One of three keys gives the lengths of the responses: run.dir (the run directory of a synchronous
run), lengths (a file), or median (a log-normal distribution). Each line of the file has the lengths of one group in tokens, such
as [120, 80]. Speeds are fitted to the run in run.dir. Every speed can also be set by its key. If decode_step_ms,
decode_request_ms and prefill_ms are all set, nothing is fitted, and every speed without a key has a default value.

  mrl plan rollout run.dir=outputs/quickstart picture=what_if.png
  mrl plan rollout median=2000 longest=16384 decode_step_ms=12 num_engines=8 trainer_gpus=8 train_token_us=40

  steps                                   number of simulated steps in each scenario. Default: 60.
  picture                                 PNG file into which the result is drawn
  prompts_per_step, responses_per_prompt  size of a step
  num_engines, max_running                number of engines, and largest number of running requests in one engine
  engine_gpus, trainer_gpus               GPUs of one engine, and GPUs of all trainer ranks
  staleness, over_sample_rate, colocated  settings of the first scenario. With colocated=true, engines and trainers share GPUs.
  median, sigma, longest                  log-normal response lengths: median, sigma, and largest length (tokens)
  prompt_tokens                           length of the prompts (tokens)
  decode_step_ms, decode_request_ms       a decoding step takes decode_step_ms, plus decode_request_ms for each running request
  prefill_ms                              time for the prefill of one token
  train_s, train_token_us                 training on a step takes train_s, plus train_token_us for each token
  push_s                                  time for one push of the weights to the engines
"""


@dataclass(frozen=True)
class RolloutPlanKeys:
    """Arguments of the command; see USAGE. If a field is None, the value of the run in `run.dir` applies, or else a default."""

    run_dir: str | None = None
    lengths: str | None = None
    picture: str | None = None
    steps: int = 60
    prompts_per_step: int | None = None
    responses_per_prompt: int | None = None
    num_engines: int | None = None
    engine_gpus: int | None = None
    trainer_gpus: int | None = None
    max_running: int | None = None
    staleness: int | None = None
    over_sample_rate: float | None = None
    colocated: bool | None = None  # engines and trainers time-share GPUs
    median: float | None = None
    sigma: float = 1.0
    longest: int = 8192
    prompt_tokens: int = 256
    decode_step_ms: float | None = None
    decode_request_ms: float | None = None
    prefill_ms: float | None = None
    train_s: float | None = None
    train_token_us: float | None = None
    push_s: float | None = None

    @classmethod
    def of(cls, argv: list[str]) -> "RolloutPlanKeys":
        """Parse KEY=VALUE arguments. Raises ValueError for a wrong key or value."""
        known = {"run.dir" if field.name == "run_dir" else field.name: str(field.type) for field in fields(cls)}
        values: dict[str, Any] = {}
        for word in argv:
            key, equals, value = word.partition("=")
            if not equals or key not in known:
                matches = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {matches[0]}?" if matches else ""
                raise ValueError(f"{word!r}: expected KEY=VALUE with one of the keys {', '.join(known)}{hint}")
            values[key.replace(".", "_")] = _parse_value(key, value, known[key])
        return cls(**values)


def _parse_value(key: str, text: str, type_name: str) -> str | int | float | bool:
    if "bool" in type_name:
        if text not in ("true", "false"):
            raise ValueError(f"{key}={text}: expected true or false.")
        return text == "true"
    if "str" in type_name:
        return text
    try:
        value = int(text) if "int" in type_name else float(text)
    except ValueError:
        raise ValueError(f"{key}={text}: expected {'an integer' if 'int' in type_name else 'a number'}.") from None
    least = 0 if "float" in type_name or key in ("staleness", "prompt_tokens") else 1
    if not value >= least:
        raise ValueError(f"{key}={text}: expected {least} or more.")
    return value


# Defaults for a command without run.dir. If run.dir, decode_step_ms, decode_request_ms and prefill_ms are all given, nothing is
# fitted to the run. Then train_s, train_token_s and push_s also come from DEFAULT_SPEEDS, if their keys are not given.
DEFAULT_SETUP = RolloutSetup(prompts_per_step=128, num_engines=4, staleness=0, in_order=True)
DEFAULT_SPEEDS = RunSpeeds(
    EngineSpeeds(fixed_step_s=0.015, request_s=0.0001, prefill_s=0.00003, max_running=256),
    train_s=1.0,
    train_token_s=2e-5,
    push_s=2.0,
)
LOG_NORMAL_GROUPS = 2048  # number of groups whose lengths are drawn from the log-normal distribution


@dataclass(frozen=True)
class SimulationInput:
    """Everything that the simulator needs."""

    groups: GroupLengths
    speeds: RunSpeeds
    setup: RolloutSetup
    gpus: GpuCounts
    fit: SpeedFit | None  # result of the fit to a run, with its errors; None if no speeds were fitted


def simulation_input(keys: RolloutPlanKeys) -> SimulationInput:
    """Return the input of the simulator, from the arguments and, if run.dir is given, from the run in run.dir.

    Raises ValueError if the arguments are wrong or the run directory cannot be used.
    """
    if (keys.run_dir, keys.lengths, keys.median).count(None) != 2:
        raise ValueError(
            "the response lengths need exactly one of run.dir=FOLDER, lengths=FILE.jsonl and median=TOKENS."
        )
    trace = read_run(Path(keys.run_dir)) if keys.run_dir else None
    engine_speeds_given = None not in (keys.decode_step_ms, keys.decode_request_ms, keys.prefill_ms)
    fit = None if trace is None or engine_speeds_given else trace.fit()
    speeds = _speeds(keys, fit.speeds if fit else _default_speeds(trace))
    setup = _setup(keys, trace.setup if trace else DEFAULT_SETUP)
    gpus = GpuCounts(
        keys.engine_gpus or (trace.engine_gpus if trace else 1),
        keys.trainer_gpus or (trace.trainer_gpus if trace else 4),
    )
    if trace and keys.trainer_gpus:
        setup = replace(setup, train_scale=trace.trainer_gpus / keys.trainer_gpus)
    return SimulationInput(trace.groups if trace else _groups(keys), speeds, setup, gpus, fit)


def _default_speeds(trace: RunTrace | None) -> RunSpeeds:
    if trace is None:
        return DEFAULT_SPEEDS
    return replace(DEFAULT_SPEEDS, engine=replace(DEFAULT_SPEEDS.engine, max_running=trace.max_running))


def _groups(keys: RolloutPlanKeys) -> GroupLengths:
    if keys.lengths:
        return read_lengths(Path(keys.lengths), keys.prompt_tokens)
    assert keys.median is not None, "simulation_input() checks this"
    shape = (LOG_NORMAL_GROUPS, keys.responses_per_prompt or 8)
    lengths = np.random.default_rng(0).lognormal(np.log(max(keys.median, 1.0)), keys.sigma, shape)
    prompts = np.full(len(lengths), keys.prompt_tokens)
    return GroupLengths(lengths.clip(1, keys.longest).astype(np.int64), prompts)


def _speeds(keys: RolloutPlanKeys, base: RunSpeeds) -> RunSpeeds:
    milliseconds = dict(fixed_step_s=keys.decode_step_ms, request_s=keys.decode_request_ms, prefill_s=keys.prefill_ms)
    changes = {name: value / 1e3 for name, value in milliseconds.items() if value is not None}
    engine = replace(base.engine, **changes, max_running=keys.max_running or base.engine.max_running)
    token_s = None if keys.train_token_us is None else keys.train_token_us / 1e6
    seconds = dict(train_s=keys.train_s, train_token_s=token_s, push_s=keys.push_s)
    return replace(base, engine=engine, **{name: value for name, value in seconds.items() if value is not None})


def _setup(keys: RolloutPlanKeys, base: RolloutSetup) -> RolloutSetup:
    prompts = keys.prompts_per_step or base.prompts_per_step
    staleness = base.staleness if keys.staleness is None else keys.staleness
    extra_groups = (
        base.extra_groups if keys.over_sample_rate is None else num_extra_groups(keys.over_sample_rate, prompts)
    )
    ordered = base.in_order if keys.staleness is None else staleness < 2
    colocated = base.colocated if keys.colocated is None else keys.colocated
    return RolloutSetup(
        prompts_per_step=prompts,
        num_engines=keys.num_engines or base.num_engines,
        staleness=staleness,
        in_order=ordered and not extra_groups,
        extra_groups=extra_groups,
        colocated=colocated,
    )


def show(simulated: SimulationInput, scenarios: list[Scenario]) -> None:
    """Print the speeds, and a table with one row for each scenario."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    engine, speeds = simulated.speeds.engine, simulated.speeds
    console.print(
        f"a decoding step takes {engine.fixed_step_s * 1e3:.4g} ms + {engine.request_s * 1e3:.4g} ms for each running request "
        f"(at most {engine.max_running}); the prefill of a token takes {engine.prefill_s * 1e3:.4g} ms\n"
        f"training on a step takes {speeds.train_s:.4g} s + {speeds.train_token_s * 1e6:.4g} us for each token; "
        f"a weight push takes {speeds.push_s:.4g} s"
    )
    if fit := simulated.fit:
        console.print(
            f"these speeds are fitted to the run; errors: {fit.engine_error:.1%} for engines, {fit.train_error:.1%} for training"
        )
    first = scenarios[0]
    title = f"{len(first.prediction.step_s)} steps in each scenario; the means leave out the first {first.skip} steps"
    table = Table("", title=title, title_justify="left")
    for column in ("s/step", "tokens/s", "speedup", "bound/predicted", "idle", "oldest", "length ratio", "dropped"):
        table.add_column(column, justify="right")
    for scenario in scenarios:
        prediction = scenario.prediction
        table.add_row(
            scenario.name,
            f"{scenario.seconds:.4g}",
            f"{scenario.tokens_per_s:,.0f}",
            f"{scenario.tokens_per_s / first.tokens_per_s:.2f}",
            f"{scenario.bound_over_predicted:.0%}",
            f"{prediction.engine_idle_fraction:.0%}",
            f"{max(prediction.ages)}",
            f"{prediction.selection_ratio:.3f}",
            f"{prediction.dropped}",
        )
    console.print(table)


def draw_scenarios(path: Path, scenarios: Sequence[Scenario], *, title: str) -> None:
    """Draw a bar chart into a PNG file: for each scenario, the seconds of a step and the lower bound of these seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here: the import takes a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.32 * len(scenarios)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    positions = range(len(scenarios))
    colors = ["#E45756" if not position else "#4C78A8" for position in positions]
    axes.barh(positions, [scenario.seconds for scenario in scenarios], color=colors, label="predicted")
    best = [scenario.prediction.best_possible_s for scenario in scenarios]
    axes.plot(best, positions, "|", color="black", markersize=12, markeredgewidth=2, label="best possible")
    axes.set_yticks(positions, [scenario.name for scenario in scenarios])
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a step")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")


def main(argv: list[str]) -> int:
    """Entry point of `mrl plan rollout`."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        (sys.stdout if argv else sys.stderr).write(USAGE)
        return 0 if argv else 2
    with hydra_entry.exit_on_user_error():
        keys = RolloutPlanKeys.of(argv)
        simulated = simulation_input(keys)
    scenarios = compare_scenarios(simulated.groups, simulated.speeds, simulated.setup, simulated.gpus, keys.steps)
    show(simulated, scenarios)
    if keys.picture:
        title = f"predicted time of a step with {simulated.setup.prompts_per_step} groups"
        draw_scenarios(Path(keys.picture), scenarios, title=title)
        sys.stdout.write(f"the result is drawn in {keys.picture}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
