"""Records of a run as input of the rollout simulator: the lengths of its groups, and speeds that are fitted to its steps."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from scipy.optimize import nnls

from mrl.checkpoint.run_dir import read_run_record
from mrl.config.schema import RolloutConfig
from mrl.planner.engine_time import EngineQueue, EngineSpeeds, SimulatedRequest
from mrl.planner.rollout_simulator import GroupLengths, RolloutSetup, RunSpeeds
from mrl.rollout.staleness_buffer import split_over_engines

MIN_STEPS = 4  # smallest number of steps for a fit
MAX_ROUNDS = 20  # most repetitions of fitting and choosing the slowest engine
END_OF_TIME = 1e18  # s


@dataclass(frozen=True)
class RecordedStep:
    """Lengths and seconds of one step of a synchronous run."""

    prompts: NDArray[np.int64]  # [N] tokens
    responses: NDArray[np.int64]  # [N, G] tokens
    engine_s: float  # waiting for the engines
    train_s: float  # everything except waiting for engines and pushing weights
    push_s: float


@dataclass(frozen=True)
class SpeedFit:
    """Fitted speeds, and how well they explain the seconds of the steps."""

    speeds: RunSpeeds
    engine_error: float  # root mean square error of the engines' seconds, divided by their mean
    train_error: float  # the same for the trainers' seconds


@dataclass(frozen=True)
class RunTrace:
    """A recorded run."""

    groups: GroupLengths
    steps: list[RecordedStep]  # in order; without the first one, which contains one-time costs
    setup: RolloutSetup
    max_running: int  # requests of one engine at one time
    trainer_gpus: int
    engine_gpus: int  # of one engine

    def fit(self) -> SpeedFit:
        """Fit the speeds of the run. Raises ValueError if the record does not determine them."""
        if self.setup.staleness or self.setup.extra:
            raise ValueError(
                "the speeds of engines cannot be fitted to a run whose engines sample while it trains; record a run with "
                "rollout.mode=sync and without over-sampling, or give step_ms, request_ms and prefill_ms."
            )
        return fit_steps(self.steps, self.setup.num_engines, self.max_running)


def fit_steps(steps: Sequence[RecordedStep], num_engines: int, max_running: int) -> SpeedFit:
    """Fit speeds by least squares. Raises ValueError for fewer than MIN_STEPS steps."""
    if len(steps) < MIN_STEPS:
        raise ValueError(f"{len(steps)} steps after the first: expected {MIN_STEPS} or more to fit speeds to.")
    engine, engine_error = fit_engine(steps, num_engines, max_running)
    tokens = [float(step.responses.sum() + step.prompts.sum() * step.responses.shape[1]) for step in steps]
    (constant, per_token), train_error = _least_squares(
        np.column_stack([np.ones(len(tokens)), tokens]), np.array([step.train_s for step in steps])
    )
    push_s = float(np.mean([step.push_s for step in steps]))
    return SpeedFit(RunSpeeds(engine, float(constant), float(per_token), push_s), engine_error, train_error)


def fit_engine(steps: Sequence[RecordedStep], num_engines: int, max_running: int) -> tuple[EngineSpeeds, float]:
    """Fit the speeds of an engine by least squares. Returns (speeds, SpeedFit.engine_error).

    A step waits for its slowest engine. That engine takes a x decoding steps + c x response tokens + d x prefilled tokens. The
    numbers of steps and tokens follow from the lengths alone. Which engine is the slowest depends on a, c and d, so fitting and
    choosing the slowest engine alternate. d is at most c, because a decoded token needs all the computation of a prefilled one;
    without this bound d would be undetermined where prompts are short.
    """
    features = [_work_of_engines(step, num_engines, max_running) for step in steps]  # each [E, 3]
    seconds = np.array([step.engine_s for step in steps])
    slowest = [int(work[:, 0].argmax()) for work in features]
    coefficients, error = np.zeros(3), 0.0
    for _ in range(MAX_ROUNDS):
        chosen = np.array([work[engine] for work, engine in zip(features, slowest, strict=True)])
        coefficients, error = _least_squares(chosen, seconds)
        now_slowest = [int((work @ coefficients).argmax()) for work in features]
        if now_slowest == slowest:
            break
        slowest = now_slowest
    step_s, extra_s, prefill_s = map(float, coefficients)
    return EngineSpeeds(step_s, extra_s + prefill_s, prefill_s, max_running), error


def _work_of_engines(step: RecordedStep, num_engines: int, max_running: int) -> NDArray[np.float64]:
    """Return [E, 3]: for each engine, the numbers by which a, c - d and d are multiplied to get its seconds."""
    engines = [EngineQueue(EngineSpeeds(1.0, 0.0, 0.0, max_running)) for _ in range(num_engines)]
    for group in split_over_engines(range(len(step.prompts)), num_engines, step.responses.shape[1]):
        engine = min(engines, key=lambda one: one.pending)
        for number in group:
            for tokens in step.responses[number].tolist():
                engine.add(SimulatedRequest(number, number, int(step.prompts[number]), tokens))
    decoded = [sum(request.response_tokens for request in engine.advance(END_OF_TIME)) for engine in engines]
    return np.array(
        [[e.busy_s, tokens, tokens + e.prefilled_tokens] for e, tokens in zip(engines, decoded, strict=True)]
    )


def _least_squares(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return (non-negative coefficients, root mean square error divided by the mean of `seconds`)."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    coefficients = nnls(features / scale, seconds)[0] / scale
    error = np.sqrt(np.mean((features @ coefficients - seconds) ** 2)) / max(seconds.mean(), 1e-12)
    return coefficients, float(error)


def read_run(run_dir: Path) -> RunTrace:
    """Read a run directory. Raises ValueError if the folder is not a run directory or has no step."""
    run_record, ledger = read_run_record(run_dir), _read_lines(run_dir / "ledger.jsonl")
    if run_record is None or not ledger:
        raise ValueError(
            f"run.dir={run_dir}: expected a run directory, with run.json and a ledger.jsonl that has steps."
        )
    if any("lengths" not in line for line in ledger):
        raise ValueError(f"run.dir={run_dir}: its ledger.jsonl has no response lengths; an older mrl wrote it.")
    config = run_record["config"]
    by_step = {line["step"]: line for line in _read_lines(run_dir / "metrics.jsonl") if "time/step_s" in line}
    colocated = _is_colocated(config.get("placement", {}).get("pools", {}))
    setup = replace(_setup(config["rollout"]), colocated=colocated)
    parallel = config["parallel"]
    trainer_gpus = math.prod(parallel.get(axis) or 1 for axis in ("tp", "pp", "dp", "cp"))
    return RunTrace(
        groups=_groups(ledger),
        steps=[_step(line, by_step[line["step"]]) for line in ledger[1:] if line["step"] in by_step],
        setup=setup,
        max_running=config.get("sglang", {}).get("max_running_requests")
        or setup.prompts_per_step * config["rollout"]["responses_per_prompt"],
        trainer_gpus=parallel.get("world_size") or trainer_gpus,
        engine_gpus=config["rollout"]["engine_tp"],
    )


def _setup(rollout: Mapping[str, Any]) -> RolloutSetup:
    """Build the setup from the section `rollout` of the recorded config."""
    fields = RolloutConfig.__dataclass_fields__
    known = RolloutConfig(**{name: value for name, value in rollout.items() if name in fields})
    extra = math.ceil(known.over_sample_rate * known.prompts_per_step)
    return RolloutSetup(known.prompts_per_step, known.num_engines, known.staleness, known.in_order, extra)


def _is_colocated(pools: Mapping[str, Any]) -> bool:
    """Return whether the actor and the engines share GPUs."""
    roles = [pool["roles"] if isinstance(pool, Mapping) else pool for pool in pools.values()]
    return any({"actor", "engines"} <= set(of_pool) for of_pool in roles)


def _step(line: Mapping[str, Any], metrics: Mapping[str, float]) -> RecordedStep:
    engine_s, push_s = metrics["spent/engine_s"], metrics["time/weight_sync_s"]
    responses = np.array(line["lengths"])
    prompts = np.array(line.get("prompts", [0] * len(responses)))
    return RecordedStep(prompts, responses, engine_s, metrics["time/step_s"] - engine_s - push_s, push_s)


def _groups(ledger: Iterable[Mapping[str, Any]]) -> GroupLengths:
    """Return the groups of all steps, in the order in which they were drawn."""
    groups = []
    for line in ledger:
        rows, prompts = [row for row, _ in line["groups"]], line.get("prompts", [0] * len(line["groups"]))
        groups += zip(line["requests"], rows, prompts, line["lengths"], strict=True)
    groups.sort(key=lambda group: group[0])
    _, rows, prompts, lengths = zip(*groups, strict=True)
    return GroupLengths(np.array(lengths), np.array(prompts), np.array(rows))


def read_lengths(path: Path, prompt_tokens: int = 0) -> GroupLengths:
    """Read groups from a JSON Lines file. Each line is a list with the response lengths of one group.

    All lists must have the same number of responses. Raises ValueError if the file cannot be read or a line is invalid.
    """
    try:
        lengths = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(
            f"lengths={path}: {error}; expected JSON Lines, with the response lengths of one group per line."
        ) from None
    valid = [
        isinstance(group, list) and group and all(isinstance(n, int) and n > 0 for n in group) for group in lengths
    ]
    if not lengths or not all(valid) or len(set(map(len, lengths))) != 1:
        wrong = valid.index(False) + 1 if False in valid else 1
        raise ValueError(
            f"lengths={path}, line {wrong}: expected the response lengths of one group: a list of integers above 0, of the same "
            "size in each line."
        )
    return GroupLengths(np.array(lengths), np.full(len(lengths), prompt_tokens))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
