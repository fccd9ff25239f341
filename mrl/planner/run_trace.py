"""Reads the record of a run for the rollout simulator: the lengths of all groups, and speeds that fit the recorded seconds."""

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
from mrl.core.jsonl import check_lines
from mrl.planner.engine_time import EngineQueue, EngineSpeeds, SimulatedRequest
from mrl.planner.rollout_simulator import GroupLengths, RolloutSetup, RunSpeeds
from mrl.rollout.staleness_buffer import num_extra_groups, split_over_engines

MIN_STEPS = 4  # smallest number of steps to which speeds can be fitted
MAX_ROUNDS = 20  # fit_engine repeats its two parts at most this number of times
END_OF_TIME = 1e18  # seconds; no simulated request finishes later


@dataclass(frozen=True)
class RecordedStep:
    """Lengths and seconds of one step of a run. The step has N groups of G responses."""

    prompts: NDArray[np.int64]  # [N] tokens of each prompt
    responses: NDArray[np.int64]  # [N, G] tokens of each response
    engine_s: float  # seconds in which the step waited for the engines
    train_s: float  # all other seconds of the step, except the weight push
    push_s: float  # seconds of the weight push


@dataclass(frozen=True)
class SpeedFit:
    """Fitted speeds, and how far their predictions are from the recorded seconds.

    An error is the root mean square error of the predicted seconds, divided by the mean of the recorded seconds.
    """

    speeds: RunSpeeds
    engine_error: float  # error of RecordedStep.engine_s
    train_error: float  # error of RecordedStep.train_s


@dataclass(frozen=True)
class RunTrace:
    """A recorded run."""

    groups: GroupLengths
    steps: list[RecordedStep]  # the steps that have metrics, except the first step, which includes one-time costs
    setup: RolloutSetup
    max_running: int  # largest number of requests that run together on one engine
    trainer_gpus: int  # GPUs of all trainer ranks of the actor
    engine_gpus: int  # GPUs of one engine

    def fit(self) -> SpeedFit:
        """Fit the speeds of the run. Raises ValueError if the speeds cannot be determined from the record."""
        if self.setup.staleness or self.setup.extra_groups:
            raise ValueError(
                "the speeds of engines cannot be fitted to a run in which engines sample during training; record a run with "
                "rollout.mode=sync and without over-sampling, or give decode_step_ms, decode_request_ms and prefill_ms."
            )
        return fit_steps(self.steps, self.setup.num_engines, self.max_running)


def fit_steps(steps: Sequence[RecordedStep], num_engines: int, max_running: int) -> SpeedFit:
    """Fit the speeds of engines, trainers and pushes by least squares. Raises ValueError for fewer than MIN_STEPS steps."""
    if len(steps) < MIN_STEPS:
        raise ValueError(
            f"the run has {len(steps)} steps after the first; {MIN_STEPS} or more are necessary to fit speeds."
        )
    engine, engine_error = fit_engine(steps, num_engines, max_running)
    tokens = [float(step.responses.sum() + step.prompts.sum() * step.responses.shape[1]) for step in steps]
    (constant, per_token), train_error = _least_squares(
        np.column_stack([np.ones(len(tokens)), tokens]), np.array([step.train_s for step in steps])
    )
    push_s = float(np.mean([step.push_s for step in steps]))
    return SpeedFit(RunSpeeds(engine, float(constant), float(per_token), push_s), engine_error, train_error)


def fit_engine(steps: Sequence[RecordedStep], num_engines: int, max_running: int) -> tuple[EngineSpeeds, float]:
    """Fit the speeds of an engine by least squares. Returns (speeds, SpeedFit.engine_error).

    An engine takes `a * decoding_steps + c * response_tokens + d * prefilled_tokens` seconds, where a, c and d are fixed_step_s,
    request_s and prefill_s of EngineSpeeds. The numbers of decoding steps and tokens follow from the lengths of the prompts and
    responses alone. A training step waits for its slowest engine. Which engine is the slowest depends on a, c and d. So this
    function repeats two parts: choose the slowest engine of each step, and fit the coefficients to these engines.

    The fitted coefficients are a, c - d and d, and the fit keeps them at 0 or more. So d <= c: a prefilled token takes no
    longer than a decoded token. Without this bound, d would be undetermined if prompts are short.
    """
    features = [_engine_features(step, num_engines, max_running) for step in steps]  # for each step [engines, 3]
    seconds = np.array([step.engine_s for step in steps])
    slowest = [int(of_engines[:, 0].argmax()) for of_engines in features]
    coefficients, error = np.zeros(3), 0.0
    for _ in range(MAX_ROUNDS):
        chosen = np.array([of_engines[engine] for of_engines, engine in zip(features, slowest, strict=True)])
        coefficients, error = _least_squares(chosen, seconds)
        new_slowest = [int((of_engines @ coefficients).argmax()) for of_engines in features]
        if new_slowest == slowest:
            break
        slowest = new_slowest
    fixed_step_s, extra_s, prefill_s = map(float, coefficients)
    return EngineSpeeds(fixed_step_s, extra_s + prefill_s, prefill_s, max_running), error


def _engine_features(step: RecordedStep, num_engines: int, max_running: int) -> NDArray[np.float64]:
    """Return [engines, 3]: the factors of the coefficients a, c - d and d in the seconds of each engine (see fit_engine)."""
    # with these speeds, busy_s is the number of decoding steps
    engines = [EngineQueue(EngineSpeeds(1.0, 0.0, 0.0, max_running)) for _ in range(num_engines)]
    for groups in split_over_engines(range(len(step.prompts)), num_engines, step.responses.shape[1]):
        engine = min(engines, key=lambda queue: queue.pending)
        for group in groups:
            for tokens in step.responses[group].tolist():
                engine.add(SimulatedRequest(group, group, int(step.prompts[group]), tokens))
    decoded = [sum(request.response_tokens for request in engine.advance(END_OF_TIME)) for engine in engines]
    return np.array(
        [[e.busy_s, tokens, tokens + e.prefilled_tokens] for e, tokens in zip(engines, decoded, strict=True)]
    )


def _least_squares(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Fit `features @ coefficients` to `seconds`, with coefficients of 0 or more.

    Returns (coefficients, root mean square error divided by the mean of `seconds`).
    """
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    coefficients = nnls(features / scale, seconds)[0] / scale
    error = np.sqrt(np.mean((features @ coefficients - seconds) ** 2)) / max(seconds.mean(), 1e-12)
    return coefficients, float(error)


def read_run(run_dir: Path) -> RunTrace:
    """Read the record of a run.

    Raises ValueError if the folder is not a run directory, the run has no steps, its groups differ in size, a line of its ledger
    or metrics is damaged, or its ledger has no lengths.
    """
    run_record, ledger = read_run_record(run_dir), _read_lines(run_dir / "ledger.jsonl")
    if run_record is None or not ledger:
        raise ValueError(
            f"run.dir={run_dir}: expected a run directory with the files run.json and ledger.jsonl, and one step or more."
        )
    if any("lengths" not in line for line in ledger):
        raise ValueError(
            f"run.dir={run_dir}: ledger.jsonl has no response lengths, because an older version of mrl wrote it."
        )
    if len({len(group) for line in ledger for group in line["lengths"]}) > 1:
        raise ValueError(
            f"run.dir={run_dir}: the groups of this run differ in size (rollout.group_sizes), but the simulation needs groups of "
            "equal size; record a run without rollout.group_sizes."
        )
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
    """Return the setup that the section `rollout` of the recorded config describes."""
    fields = RolloutConfig.__dataclass_fields__
    known = RolloutConfig(**{name: value for name, value in rollout.items() if name in fields})
    extra_groups = num_extra_groups(known.over_sample_rate, known.prompts_per_step)
    return RolloutSetup(known.prompts_per_step, known.num_engines, known.staleness, known.in_order, extra_groups)


def _is_colocated(pools: Mapping[str, Any]) -> bool:
    """Return whether the actor and the engines share GPUs."""
    roles = [pool["roles"] if isinstance(pool, Mapping) else pool for pool in pools.values()]
    return any({"actor", "engines"} <= set(of_pool) for of_pool in roles)


def _step(line: Mapping[str, Any], metrics: Mapping[str, float]) -> RecordedStep:
    engine_s, push_s = metrics["component_time/engine_s"], metrics["time/weight_sync_s"]
    responses = np.array(line["lengths"])
    prompts = np.array(line.get("prompts", [0] * len(responses)))
    return RecordedStep(prompts, responses, engine_s, metrics["time/step_s"] - engine_s - push_s, push_s)


def _groups(ledger: Iterable[Mapping[str, Any]]) -> GroupLengths:
    """Return the groups of all steps, in the order in which the run drew them."""
    groups = []
    for line in ledger:
        rows, prompts = [row for row, _ in line["groups"]], line.get("prompts", [0] * len(line["groups"]))
        groups += zip(line["requests"], rows, prompts, line["lengths"], strict=True)
    groups.sort(key=lambda group: group[0])
    _, rows, prompts, lengths = zip(*groups, strict=True)
    return GroupLengths(np.array(lengths), np.array(prompts), np.array(rows))


def read_lengths(path: Path, prompt_tokens: int = 0) -> GroupLengths:
    """Read groups from a JSON Lines file. Each line is a list with the response lengths of one group.

    All lists must have the same size. Every prompt gets `prompt_tokens` tokens. Raises ValueError if the file cannot be read or a
    line is invalid.
    """
    try:
        lengths = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(
            f"lengths={path}: {error}; expected a JSON Lines file in which each line has the response lengths of one group."
        ) from None
    valid = [
        isinstance(group, list) and group and all(isinstance(n, int) and n > 0 for n in group) for group in lengths
    ]
    if not lengths or not all(valid) or len(set(map(len, lengths))) != 1:
        wrong = valid.index(False) + 1 if False in valid else 1
        raise ValueError(
            f"lengths={path}, line {wrong}: expected the response lengths of one group, as a list of integers above 0. All lines "
            "must have lists of the same size."
        )
    return GroupLengths(np.array(lengths), np.full(len(lengths), prompt_tokens))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of a run. Raises ValueError if lines are damaged or missing."""
    checked = check_lines(path)
    if checked.damaged or checked.lost_steps:
        raise ValueError(
            f"{path}: {len(checked.damaged)} lines are damaged, and the lines of these steps are damaged or missing: "
            f"{checked.lost_steps}; name the folder of another run."
        )
    return [orjson.loads(line) for _, line in checked.lines]
