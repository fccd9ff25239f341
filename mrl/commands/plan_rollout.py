"""`mrl plan rollout`: what steps would take with other staleness, other shares of the GPUs, or over-sampling."""

import difflib
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mrl.commands import hydra_app
from mrl.planner.engine_queue import EngineSpeeds
from mrl.planner.rollout_simulator import Gpus, Groups, Row, Setup, Speeds, draw, what_if
from mrl.planner.run_trace import Fit, Trace, read_lengths, read_run

USAGE = """usage: mrl plan rollout run_dir=FOLDER [KEY=VALUE ...]
       mrl plan rollout lengths=FILE.jsonl KEY=VALUE ...

Simulates a run with other staleness, other shares of its GPUs, and over-sampling (docs/asynchrony.md). Lengths of responses and
speeds are those that a synchronous run left in its folder; lengths may also be lines of a file, a list of tokens for each
group, or log-normal, and every speed may be given.

  mrl plan rollout run_dir=outputs/quickstart picture=what_if.png
  mrl plan rollout median=2000 longest=16384 step_ms=12 num_engines=8 trainer_gpus=8 train_token_us=40

  steps                                       simulated for each row; 60
  picture                                     also draw into this PNG
  prompts_per_step, responses_per_prompt, num_engines, engine_gpus, trainer_gpus, max_running (requests of one engine)
  staleness, over_sampling, colocated         the shape that the first row has
  median, sigma, longest, prompt_tokens       log-normal lengths, tokens
  step_ms, request_ms, prefill_ms             of a decoding step; of it, for each running request; of a prompt token
  train_s, train_token_us                     of a step's training; of it, for each token of prompts and responses
  push_s                                      of bringing weights to the engines
"""


@dataclass(frozen=True)
class Keys:
    """What can be given; None: as the run in `run_dir` has it, else the default in DEFAULTS."""

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
    over_sampling: float | None = None
    colocated: bool | None = None  # engines and trainers by turns
    median: float | None = None
    sigma: float = 1.0
    longest: int = 8192
    prompt_tokens: int = 256
    step_ms: float | None = None
    request_ms: float | None = None
    prefill_ms: float | None = None
    train_s: float | None = None
    train_token_us: float | None = None
    push_s: float | None = None

    @classmethod
    def of(cls, argv: list[str]) -> "Keys":
        """From KEY=VALUE words. Raises ValueError."""
        known, found = {field.name: str(field.type) for field in fields(cls)}, {}
        for word in argv:
            key, equals, value = word.partition("=")
            if not equals or key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"{word!r}: expected KEY=VALUE with one of {', '.join(known)}{hint}")
            found[key] = _value(key, value, known[key])
        return cls(**found)


def _value(key: str, text: str, kind: str) -> str | int | float | bool:
    if "bool" in kind:
        if text not in ("true", "false"):
            raise ValueError(f"{key}={text}: expected true or false.")
        return text == "true"
    if "str" in kind:
        return text
    try:
        value = int(text) if "int" in kind else float(text)
    except ValueError:
        raise ValueError(f"{key}={text}: expected a {'whole ' if 'int' in kind else ''}number.") from None
    smallest = 0 if "float" in kind or key in ("staleness", "prompt_tokens") else 1
    if not value >= smallest:
        raise ValueError(f"{key}={text}: expected {smallest} or more.")
    return value


DEFAULT_SETUP = Setup(prompts_per_step=128, num_engines=4, staleness=0, in_order=True)
DEFAULT_SPEEDS = Speeds(EngineSpeeds(0.015, 0.0001, 0.00003, 256), train_s=1.0, train_token_s=2e-5, push_s=2.0)
LOG_NORMAL_GROUPS = 2048


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    groups: Groups
    speeds: Speeds
    setup: Setup
    gpus: Gpus
    fit: Fit | None  # None: speeds were given


def case_of(keys: Keys) -> Case:
    """From a run's folder, or from what was given. Raises ValueError."""
    if (keys.run_dir, keys.lengths, keys.median).count(None) != 2:
        raise ValueError(
            "expected one of run_dir=FOLDER, lengths=FILE.jsonl and median=TOKENS: whose lengths are simulated."
        )
    trace = read_run(Path(keys.run_dir)) if keys.run_dir else None
    measured = None if trace is None or _all_given(keys) else trace.fit()
    speeds = _speeds(keys, measured.speeds if measured else _without_fit(trace))
    setup = _setup(keys, trace.setup if trace else DEFAULT_SETUP)
    gpus = Gpus(
        keys.engine_gpus or (trace.engine_gpus if trace else 1),
        keys.trainer_gpus or (trace.trainer_gpus if trace else 4),
    )
    if trace and keys.trainer_gpus:
        setup = replace(setup, train_scale=trace.trainer_gpus / keys.trainer_gpus)
    return Case(trace.groups if trace else _groups(keys), speeds, setup, gpus, measured)


def _all_given(keys: Keys) -> bool:
    return None not in (keys.step_ms, keys.request_ms, keys.prefill_ms)


def _without_fit(trace: Trace | None) -> Speeds:
    if trace is None:
        return DEFAULT_SPEEDS
    return replace(DEFAULT_SPEEDS, engine=replace(DEFAULT_SPEEDS.engine, max_running=trace.max_running))


def _groups(keys: Keys) -> Groups:
    if keys.lengths:
        return read_lengths(Path(keys.lengths), keys.prompt_tokens)
    assert keys.median is not None, "case_of() looks first"
    shape = (LOG_NORMAL_GROUPS, keys.responses_per_prompt or 8)
    drawn = np.random.default_rng(0).lognormal(np.log(max(keys.median, 1.0)), keys.sigma, shape)
    return Groups(drawn.clip(1, keys.longest).astype(np.int64), np.full(len(drawn), keys.prompt_tokens))


def _speeds(keys: Keys, base: Speeds) -> Speeds:
    given = dict(step_s=keys.step_ms, request_s=keys.request_ms, prefill_s=keys.prefill_ms)
    changes = {name: value / 1e3 for name, value in given.items() if value is not None}
    engine = replace(base.engine, **changes, max_running=keys.max_running or base.engine.max_running)
    token_s = None if keys.train_token_us is None else keys.train_token_us / 1e6
    known = dict(train_s=keys.train_s, train_token_s=token_s, push_s=keys.push_s)
    return replace(base, engine=engine, **{name: value for name, value in known.items() if value is not None})


def _setup(keys: Keys, base: Setup) -> Setup:
    size = keys.prompts_per_step or base.prompts_per_step
    staleness = base.staleness if keys.staleness is None else keys.staleness
    extra = base.extra if keys.over_sampling is None else round(keys.over_sampling * size)
    ordered = base.in_order if keys.staleness is None else staleness < 2
    by_turns = base.colocated if keys.colocated is None else keys.colocated
    engines = keys.num_engines or base.num_engines
    return Setup(size, engines, staleness, ordered and not extra, extra, colocated=by_turns)


def show(case: Case, rows: list[Row]) -> None:
    """Where the speeds are from, and a line per shape."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    engine, speeds = case.speeds.engine, case.speeds
    console.print(
        f"engine: {engine.step_s * 1e3:.4g} ms a decoding step + {engine.request_s * 1e3:.4g} ms a running request "
        f"({engine.max_running} at most), {engine.prefill_s * 1e3:.4g} ms a prefilled token\n"
        f"training: {speeds.train_s:.4g} s + {speeds.train_token_s * 1e6:.4g} us a token; push {speeds.push_s:.4g} s"
    )
    if case.fit:
        console.print(f"fitted; errors {case.fit.engine_error:.1%} (engines), {case.fit.train_error:.1%} (training)")
    table = Table(
        "", title=f"{len(rows[0].found.step_s)} steps each, the first {rows[0].skip} left out", title_justify="left"
    )
    for column in ("s/step", "tokens/s", "over first", "of best", "idle", "oldest", "length ratio", "dropped"):
        table.add_column(column, justify="right")
    for row in rows:
        found, speedup = row.found, row.tokens_per_s / rows[0].tokens_per_s
        table.add_row(
            row.name,
            f"{row.seconds:.4g}",
            f"{row.tokens_per_s:,.0f}",
            f"{speedup:.2f}",
            f"{row.of_best:.0%}",
            f"{found.engine_idle_fraction:.0%}",
            f"{max(found.ages)}",
            f"{found.selection_ratio:.3f}",
            f"{found.dropped}",
        )
    console.print(table)


def main(argv: list[str]) -> int:
    """Entry point of `mrl plan rollout`."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        (sys.stdout if argv else sys.stderr).write(USAGE)
        return 0 if argv else 2
    with hydra_app.as_user_error():
        keys = Keys.of(argv)
        case = case_of(keys)
    rows = what_if(case.groups, case.speeds, case.setup, case.gpus, keys.steps)
    show(case, rows)
    if keys.picture:
        draw(Path(keys.picture), rows, title=f"{case.setup.prompts_per_step} groups a step: what if")
        sys.stdout.write(f"drawn in {keys.picture}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
