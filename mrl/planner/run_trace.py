"""What a run recorded of itself, as a simulation needs it: lengths by ticket, and how long tokens took."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from scipy.optimize import nnls

from mrl.checkpoint.run_dir import begun_with
from mrl.config.schema import RolloutConfig
from mrl.planner.engine_queue import Decoding, EngineSpeeds, Request
from mrl.planner.rollout_simulator import Groups, Setup, Speeds
from mrl.rollout.dealing import together

LEAST_STEPS = 4  # that speeds are fitted to
ROUNDS = 20  # of finding out which engine is the slowest
FOR_EVER = 1e18  # s


@dataclass(frozen=True)
class Step:
    """One step of a synchronous run."""

    prompts: NDArray[np.int64]  # [N] tokens
    responses: NDArray[np.int64]  # [N, G] tokens
    engine_s: float  # waiting for the engines
    train_s: float  # all that is neither waiting for engines nor pushing weights
    push_s: float


@dataclass(frozen=True)
class Fit:
    """Speeds, and how well they tell the seconds of the steps they were fitted to."""

    speeds: Speeds
    engine_error: float  # root mean square over the mean
    train_error: float


@dataclass(frozen=True)
class Trace:
    """A run that was recorded."""

    groups: Groups
    steps: list[Step]  # in their order, the first one left out: it has what only happens once
    setup: Setup
    max_running: int  # requests of one engine
    trainer_gpus: int
    engine_gpus: int  # of one engine

    def fit(self) -> Fit:
        """Speeds of the run. Raises ValueError where they do not follow from what was recorded."""
        if self.setup.staleness or self.setup.extra:
            raise ValueError(
                "how fast engines are does not follow from the steps of a run whose engines go on while it trains; record one "
                "with rollout.mode=sync and without over-sampling, or give step_ms, request_ms and prefill_ms."
            )
        return fit_steps(self.steps, self.setup.num_engines, self.max_running)


def fit_steps(steps: Sequence[Step], num_engines: int, max_running: int) -> Fit:
    """Speeds by least squares. Raises ValueError for too few steps."""
    if len(steps) < LEAST_STEPS:
        raise ValueError(f"{len(steps)} steps after the first: expected {LEAST_STEPS} or more to fit speeds to.")
    engine, engine_error = fit_engine(steps, num_engines, max_running)
    tokens = [float(step.responses.sum() + step.prompts.sum() * step.responses.shape[1]) for step in steps]
    (constant, per_token), train_error = _solved(
        np.column_stack([np.ones(len(tokens)), tokens]), np.array([step.train_s for step in steps])
    )
    push_s = float(np.mean([step.push_s for step in steps]))
    return Fit(Speeds(engine, float(constant), float(per_token), push_s), engine_error, train_error)


def fit_engine(steps: Sequence[Step], num_engines: int, max_running: int) -> tuple[EngineSpeeds, float]:
    """An engine's speeds by least squares, and the error (see Fit).

    A step waits for its slowest engine, whose seconds are a x its decoding steps + c x its tokens + d x its prefill; how many
    steps it takes follows from lengths alone. Which engine is the slowest depends on a, c and d, so this is done in rounds.
    d is at most c: what is computed of a prompt's token is computed of a decoded one too. (Where prompts are short, their
    seconds would else be anybody's guess.)
    """
    features = [_work_of_engines(step, num_engines, max_running) for step in steps]  # each [E, 3]
    seconds = np.array([step.engine_s for step in steps])
    slowest = [int(each[:, 0].argmax()) for each in features]
    found, error = np.zeros(3), 0.0
    for _ in range(ROUNDS):
        chosen = np.array([each[place] for each, place in zip(features, slowest, strict=True)])
        found, error = _solved(chosen, seconds)
        now = [int((each @ found).argmax()) for each in features]
        if now == slowest:
            break
        slowest = now
    step_s, more_s, prefill_s = map(float, found)
    return EngineSpeeds(step_s, more_s + prefill_s, prefill_s, max_running), error


def _work_of_engines(step: Step, num_engines: int, max_running: int) -> NDArray[np.float64]:
    """[E, 3] of each engine when it makes its share of the step: what a, c - d and d are multiplied by in its seconds."""
    engines = [Decoding(EngineSpeeds(1.0, 0.0, 0.0, max_running)) for _ in range(num_engines)]
    for group in together(range(len(step.prompts)), num_engines, step.responses.shape[1]):
        engine = min(engines, key=lambda one: one.pending)
        for number in group:
            for tokens in step.responses[number].tolist():
                engine.add(Request(number, number, int(step.prompts[number]), tokens))
    tokens = [sum(request.response_tokens for request in engine.advance(FOR_EVER)) for engine in engines]
    return np.array([[e.busy_s, had, had + e.prefilled_tokens] for e, had in zip(engines, tokens, strict=True)])


def _solved(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Coefficients, none negative, and the root mean square of what they leave over the mean of the seconds."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    found = nnls(features / scale, seconds)[0] / scale
    return found, float(np.sqrt(np.mean((features @ found - seconds) ** 2)) / max(seconds.mean(), 1e-12))


def read_run(run_dir: Path) -> Trace:
    """What is in a run's folder. Raises ValueError where that is no run, or one without a step."""
    begun, ledger, metrics = begun_with(run_dir), _lines(run_dir / "ledger.jsonl"), _lines(run_dir / "metrics.jsonl")
    if begun is None or not ledger:
        raise ValueError(
            f"run_dir={run_dir}: expected the folder of a run, with run.json and a ledger.jsonl that has steps."
        )
    if any("lengths" not in line for line in ledger):
        raise ValueError(f"run_dir={run_dir}: its ledger.jsonl has no lengths of responses; an older mrl wrote it.")
    config = begun["config"]
    by_step = {line["step"]: line for line in metrics if "time/step_s" in line}
    setup = replace(_setup(config["rollout"]), colocated=_by_turns(config.get("placement", {}).get("pools", {})))
    parallel = config["parallel"]
    lanes = math.prod(parallel.get(axis) or 1 for axis in ("tp", "pp", "dp", "cp"))
    return Trace(
        groups=_groups(ledger),
        steps=[_step(line, by_step[line["step"]]) for line in ledger[1:] if line["step"] in by_step],
        setup=setup,
        max_running=config.get("sglang", {}).get("max_running_requests")
        or setup.prompts_per_step * config["rollout"]["responses_per_prompt"],
        trainer_gpus=parallel.get("world_size") or lanes,
        engine_gpus=config["rollout"]["engine_tp"],
    )


def _setup(rollout: Mapping[str, Any]) -> Setup:
    """The shape of a run, from its config as written."""
    fields = RolloutConfig.__dataclass_fields__
    known = RolloutConfig(**{name: value for name, value in rollout.items() if name in fields})
    extra = math.ceil(known.over_sampling * known.prompts_per_step)
    return Setup(known.prompts_per_step, known.num_engines, known.staleness, known.in_order, extra)


def _by_turns(pools: Mapping[str, Any]) -> bool:
    """Whether the policy and its engines share GPUs."""
    roles = [pool["roles"] if isinstance(pool, Mapping) else pool for pool in pools.values()]
    return any({"actor", "engines"} <= set(of_pool) for of_pool in roles)


def _step(line: Mapping[str, Any], metrics: Mapping[str, float]) -> Step:
    engine_s, push_s = metrics["spent/engine_s"], metrics["time/weight_sync_s"]
    responses = np.array(line["lengths"])
    prompts = np.array(line.get("prompts", [0] * len(responses)))
    return Step(prompts, responses, engine_s, metrics["time/step_s"] - engine_s - push_s, push_s)


def _groups(ledger: Iterable[Mapping[str, Any]]) -> Groups:
    """The groups of all steps, in the order of drawing."""
    found = []
    for line in ledger:
        rows, prompts = [row for row, _ in line["groups"]], line.get("prompts", [0] * len(line["groups"]))
        found += zip(line["tickets"], rows, prompts, line["lengths"], strict=True)
    found.sort(key=lambda group: group[0])
    _, rows, prompts, lengths = zip(*found, strict=True)
    return Groups(np.array(lengths), np.array(prompts), np.array(rows))


def read_lengths(path: Path, prompt_tokens: int = 0) -> Groups:
    """Groups from a jsonl file: each line a list of response lengths, all of one size. Raises ValueError."""
    try:
        lengths = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(
            f"lengths={path}: {error}; expected a jsonl file of lists of tokens, a list for each group."
        ) from None
    fits = [isinstance(group, list) and group and all(isinstance(n, int) and n > 0 for n in group) for group in lengths]
    if not lengths or not all(fits) or len(set(map(len, lengths))) != 1:
        wrong = fits.index(False) + 1 if False in fits else 1
        raise ValueError(
            f"lengths={path}, line {wrong}: expected a list of whole numbers above 0, as many in each line: the lengths of a "
            "group."
        )
    return Groups(np.array(lengths), np.full(len(lengths), prompt_tokens))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
