"""Simulates the rollouts, the training and the weight pushes of a run, event by event, and compares different setups.

mrl.planner.engine_time.EngineQueue simulates each engine. The simulation calls the code of real runs to admit groups to the
staleness buffer, to choose the groups of a step, and to split groups over engines. So the simulated schedule is exact if the
seconds per token are exact. The simulation starts no processes.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from math import inf

import numpy as np
from numpy.typing import NDArray

from mrl.config.process_schema import PauseMode
from mrl.placement.resource_pools import pluralize
from mrl.planner.engine_time import EngineQueue, EngineSpeeds, SimulatedRequest
from mrl.rollout.staleness_buffer import (
    PromptRequest,
    ResponseLengths,
    StalenessBuffer,
    longest_first,
    num_extra_groups,
    split_over_engines,
)
from mrl.rollout.trajectory import StepGroups


@dataclass(frozen=True)
class RunSpeeds:
    """Speeds of a run's engines, trainers and weight pushes."""

    engine: EngineSpeeds
    train_s: float  # seconds of training in a step that do not depend on the number of tokens
    train_token_s: float  # additional seconds of training for each token of prompts and responses
    push_s: float  # seconds of a weight push, during which engines are paused

    def training(self, tokens: float, scale: float) -> float:
        """Return the seconds of training on `tokens` tokens. `scale` multiplies `train_token_s` (RolloutSetup.train_scale)."""
        return self.train_s + self.train_token_s * tokens * scale


@dataclass(frozen=True)
class RolloutSetup:
    """Batch size, engines and asynchrony of a run."""

    prompts_per_step: int  # N
    num_engines: int
    staleness: int  # K: number of training steps that sampling may be ahead of training; 0 in synchronous runs
    in_order: bool = False  # whether steps train on groups in the order in which the groups were drawn
    extra_groups: int = 0  # number of groups that over-sampling adds to the groups that are in flight
    train_scale: float = 1.0  # seconds of training per token, relative to the measured run
    colocated: bool = False  # whether engines and trainers time-share the same GPUs


@dataclass(frozen=True)
class GroupLengths:
    """Lengths of the first T groups of G responses that a run draws, in order. Later groups are random draws from the first T."""

    responses: NDArray[np.int64]  # [T, G] tokens of each response
    prompts: NDArray[np.int64]  # [T] tokens of each prompt
    rows: NDArray[np.int64] | None = None  # [T] row of each prompt in the data set; None: all rows are different
    seed: int = 0  # seed of the random draws

    def __post_init__(self) -> None:
        assert len(self.responses) == len(self.prompts) > 0, (
            f"{len(self.responses)} groups, {len(self.prompts)} prompts"
        )

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @cached_property
    def _indices(self) -> list[int]:
        """Serial number of a drawn group -> index of the group in `prompts` and `responses`."""
        return list(range(len(self.prompts)))

    def tokens_of(self, number: int) -> tuple[int, list[int]]:
        """Return (prompt tokens, response tokens [G]) of the group with the serial number `number`."""
        while len(self._indices) <= number:
            self._indices.append(int(self._random.integers(len(self.prompts))))
        index = self._indices[number]
        return int(self.prompts[index]), self.responses[index].tolist()

    def row_of(self, number: int) -> int:
        """Return the data set row of the group with this serial number. A random group gets a new row with a negative index."""
        return int(self.rows[number]) if self.rows is not None and number < len(self.rows) else -1 - number


@dataclass(frozen=True)
class Prediction:
    """Result of a simulated run. The age of a group is the number of steps from its admission to its training."""

    step_s: NDArray[np.float64]  # [steps] seconds of each step
    tokens: NDArray[np.int64]  # [steps] response tokens on which the step trained
    best_possible_s: float  # lower bound of the mean of step_s; see the function best_possible_s
    engine_idle_fraction: float  # fraction of time in which an engine runs no request, as a mean over engines
    occupancy: float  # mean number of running requests of an engine, divided by the largest possible number
    ages: dict[int, int]  # age -> number of groups of this age
    selection_ratio: float  # mean length of the trained responses / mean length of all drawn responses
    dropped: int  # number of groups that over-sampling dropped

    def seconds(self, skip: int = 0) -> float:
        """Return the mean seconds of a step, without the first `skip` steps."""
        return float(self.step_s[skip:].mean())

    def tokens_per_s(self, skip: int = 0) -> float:
        """Return the number of trained response tokens per second, without the first `skip` steps."""
        return float(self.tokens[skip:].sum() / self.step_s[skip:].sum())


def simulate(groups: GroupLengths, speeds: RunSpeeds, setup: RolloutSetup, steps: int) -> Prediction:
    """Simulate `steps` steps of a run."""
    return _SimulatedRun(groups, speeds, setup).run(steps)


def best_possible_s(tokens: float, train_s: float, speeds: RunSpeeds, setup: RolloutSetup) -> float:
    """Return a lower bound for the seconds of a step with `tokens` response tokens and `train_s` seconds of training.

    The bound is max(engine_s, train_s) + push_s. On shared GPUs, it is engine_s + train_s + push_s. Here, engine_s is the time
    that the engines need for the tokens if they always run as many requests as possible.
    """
    full = speeds.engine.max_running
    engine_s = tokens * speeds.engine.decoding_step_s(full) / (full * setup.num_engines)
    both = (engine_s, train_s)
    return (sum(both) if setup.colocated else max(both)) + speeds.push_s


@dataclass
class _StepLog:
    """Record of the steps that have been simulated so far."""

    ends: list[float] = field(default_factory=list)  # [steps] time at which the step ended, in seconds
    tokens: list[int] = field(default_factory=list)  # [steps] response tokens on which the step trained
    ages: Counter[int] = field(default_factory=Counter)  # see Prediction
    train_s: float = 0.0  # seconds of training in all steps
    dropped: int = 0  # see Prediction


@dataclass(eq=False)
class _EngineRequest:
    """One HTTP request to an engine. All groups of the request finish at the same time."""

    engine: int  # index of the engine
    # expected number of response tokens; in synchronous runs without over-sampling, the number of responses
    work: float
    numbers: list[int]  # serial numbers of the groups
    unfinished: int  # number of responses that are not finished


@dataclass(eq=False)
class _SimulatedRun:
    """A simulated run. Its loop has the same phases as mrl.controller.trainer."""

    groups: GroupLengths
    speeds: RunSpeeds
    setup: RolloutSetup
    now: float = 0.0  # seconds since the start of the run
    _num_ready: int = 0  # number of finished groups on which no step has trained yet
    _requests: dict[Hashable, _EngineRequest] = field(default_factory=dict)  # serial number of a group -> its request
    # serial number of a group -> weight version at the admission of the group
    _admitted_version: dict[int, int] = field(default_factory=dict)
    # serial number of a group -> (tokens of the prompt times the number of responses, tokens of all responses)
    _lengths: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        setup = self.setup
        self.buffer: StalenessBuffer[None] = StalenessBuffer(
            setup.prompts_per_step, setup.staleness, setup.extra_groups, setup.in_order
        )
        self.engines = [EngineQueue(self.speeds.engine) for _ in range(setup.num_engines)]
        self._next_finish = [inf] * len(self.engines)  # time of each engine's next finished response
        self._expected_work = [0.0] * len(self.engines)
        self._expected_lengths = ResponseLengths(float(self.groups.responses.mean()))
        self._rows = count()

    def run(self, steps: int) -> Prediction:
        """Simulate the steps one after another: wait for the groups of the step, train, push."""
        log = _StepLog()
        for step in range(steps):
            chosen = self._collect(step)
            self._drop(chosen.dropped)
            prompts, responses = np.sum([self._lengths[number] for number in chosen.numbers], axis=0)
            seconds = self.speeds.training(prompts + responses, self.setup.train_scale)
            self._train(seconds)
            self._push()
            log.ends.append(self.now)
            log.tokens.append(int(responses))
            log.ages.update(step - self._admitted_version[number] for number in chosen.numbers)
            log.train_s += seconds
            log.dropped += len(chosen.dropped)
        return self._prediction(log)

    def _collect(self, step: int) -> StepGroups[None]:
        """Admit groups while the staleness buffer has capacity, wait for the groups of the step, and return them."""
        while True:
            if capacity := self.buffer.free_capacity():
                self._admit(self.buffer.admit([next(self._rows) for _ in range(capacity)], step))
            if self._num_ready >= self.buffer.groups_per_step and (chosen := self.buffer.take_step(step)) is not None:
                self._num_ready -= len(chosen.numbers)
                return chosen
            self._wait_for_group()

    def _wait_for_group(self) -> None:
        """Advance the time until another group is finished."""
        num_ready = self._num_ready
        while self._num_ready == num_ready:
            assert min(self._next_finish) < inf, "a step waits for groups, and no engine has a request"
            self._advance(min(self._next_finish))

    def _admit(self, prompts: Sequence[PromptRequest]) -> None:
        """Send the groups of these prompts to the engines. Each request goes to the engine with the least expected work."""
        for request in prompts:
            prompt, responses = self.groups.tokens_of(request.serial_number)
            self._admitted_version[request.serial_number] = request.min_weight_version
            self._lengths[request.serial_number] = (prompt * len(responses), sum(responses))
        for numbers, work in self._split([request.serial_number for request in prompts]):
            engine = self._expected_work.index(min(self._expected_work))
            self._expected_work[engine] += work
            responses = sum(len(self.groups.tokens_of(number)[1]) for number in numbers)
            self._requests |= dict.fromkeys(numbers, _EngineRequest(engine, work, numbers, responses))
            for finished in self.engines[engine].advance(self.now):  # because of rounding, a response may finish now
                self._finish(finished)
            for number in numbers:
                prompt, lengths = self.groups.tokens_of(number)
                for tokens in lengths:
                    self.engines[engine].add(SimulatedRequest(number, number, prompt, tokens))
        self._update_next_finish()

    def _split(self, numbers: Sequence[int]) -> Iterator[tuple[list[int], float]]:
        """Yield (serial numbers of the groups, expected work) of each request. A real run forms the same requests."""
        if self.setup.staleness or self.setup.extra_groups:
            for number in longest_first(numbers, self._expected_length):
                yield [number], len(self.groups.tokens_of(number)[1]) * self._expected_length(number)
        else:
            size = self.groups.responses.shape[1]
            for request_numbers in split_over_engines(numbers, len(self.engines), size):
                yield request_numbers, float(len(request_numbers) * size)

    def _expected_length(self, number: int) -> float:
        return self._expected_lengths.expected(self.groups.row_of(number))

    def _advance(self, until: float) -> None:
        """Advance the time to `until`, and process finished responses in the order of finishing."""
        while (finish_time := min(self._next_finish)) <= until:
            index = self._next_finish.index(finish_time)
            engine = self.engines[index]
            for request in engine.advance(finish_time):
                self._finish(request)
            self._next_finish[index] = engine.next_finish()
        self.now = max(self.now, until)

    def _finish(self, response: SimulatedRequest) -> None:
        """Process a finished response. The last response of a request finishes all groups of the request."""
        request = self._requests.get(response.key)
        if request is None:  # because of rounding, a response of a dropped group may finish when the group is dropped
            return
        request.unfinished -= 1
        if not request.unfinished:
            self._expected_work[request.engine] -= request.work
            for number in request.numbers:
                del self._requests[number]
                self.buffer.finish(number, None, passed_filter=True)
                self._expected_lengths.learn(self.groups.row_of(number), self.groups.tokens_of(number)[1])
            self._num_ready += len(request.numbers)

    def _train(self, seconds: float) -> None:
        if self.setup.colocated:
            self._for_all_engines(lambda engine: engine.pause(PauseMode.in_place))
        self._advance(self.now + seconds)

    def _push(self) -> None:
        """Push weights in the same way as a real run: retract running requests, empty the prefix cache, copy weights, resume."""
        self._for_all_engines(lambda engine: engine.pause(PauseMode.retract))
        self._for_all_engines(EngineQueue.flush)
        self.now += self.speeds.push_s
        self._for_all_engines(EngineQueue.resume)

    def _drop(self, numbers: Sequence[int]) -> None:
        """Remove these groups, which over-sampling drops. The engines abort the requests of unfinished groups."""
        unfinished = {number for number in numbers if number in self._requests}
        self._num_ready -= len(numbers) - len(unfinished)
        for number in unfinished:
            request = self._requests.pop(number)
            self._expected_work[request.engine] -= request.work
        if unfinished:
            self._for_all_engines(lambda engine: engine.abort(lambda request: request.key in unfinished))

    def _for_all_engines(self, function: Callable[[EngineQueue], object]) -> None:
        """Advance every engine to the current time, then call `function` with it."""
        for engine in self.engines:
            for request in engine.advance(self.now):
                self._finish(request)
            function(engine)
        self._update_next_finish()

    def _update_next_finish(self) -> None:
        self._next_finish = [engine.next_finish() for engine in self.engines]

    def _prediction(self, log: _StepLog) -> Prediction:
        engine_s = self.now * len(self.engines)
        lengths = np.array([responses for _, responses in self._lengths.values()])
        steps, full = len(log.ends), self.speeds.engine.max_running
        return Prediction(
            step_s=np.diff(log.ends, prepend=0.0),
            tokens=np.array(log.tokens),
            best_possible_s=best_possible_s(sum(log.tokens) / steps, log.train_s / steps, self.speeds, self.setup),
            engine_idle_fraction=max(0.0, 1 - sum(engine.busy_s for engine in self.engines) / engine_s),
            occupancy=sum(engine.request_seconds for engine in self.engines) / (engine_s * full),
            ages=dict(sorted(log.ages.items())),
            selection_ratio=sum(log.tokens) / log.ages.total() / float(lengths.mean()),
            dropped=log.dropped,
        )


STALENESS_VALUES = (0, 1, 2, 4, 8)  # values of staleness that are compared
OVER_SAMPLE_RATES = (0.25, 0.5)  # additional groups, divided by the groups of a step
MAX_SPLITS = 7  # largest number of divisions of the GPUs that are compared


@dataclass(frozen=True)
class GpuCounts:
    """Numbers of GPUs of a run."""

    per_engine: int
    trainers: int  # GPUs of all trainer ranks together

    def total(self, engines: int) -> int:
        """Return the number of GPUs of `engines` engines and the trainers together."""
        return engines * self.per_engine + self.trainers


@dataclass(frozen=True)
class Scenario:
    """A setup of a run, and its predicted result."""

    name: str
    setup: RolloutSetup
    prediction: Prediction
    skip: int  # number of first steps that the means do not include, because the run is not in steady state yet

    @property
    def seconds(self) -> float:
        """Mean seconds of a step, without the first `skip` steps."""
        return self.prediction.seconds(self.skip)

    @property
    def tokens_per_s(self) -> float:
        """Number of trained response tokens per second, without the first `skip` steps."""
        return self.prediction.tokens_per_s(self.skip)

    @property
    def bound_over_predicted(self) -> float:
        """Lower bound of the seconds of a step, divided by the predicted seconds.

        Both are means over all steps, including the first `skip` steps. Later steps may train on groups that were sampled during
        the first steps. So without the first steps, the result could be larger than 1.
        """
        return self.prediction.best_possible_s / self.prediction.seconds()


def compare_scenarios(
    groups: GroupLengths, speeds: RunSpeeds, setup: RolloutSetup, gpus: GpuCounts, steps: int
) -> list[Scenario]:
    """Simulate the run with its own setup and with other setups.

    Each other setup changes the staleness, the over-sampling, or the division of the GPUs, and what follows from this change.
    """
    skip = steps // 2
    setups = [("as it is", setup), *_other_staleness(setup), *_over_sampled(setup), *_other_splits(setup, gpus)]
    return [Scenario(name, changed, simulate(groups, speeds, changed, steps), skip) for name, changed in setups]


def _other_staleness(setup: RolloutSetup) -> Iterator[tuple[str, RolloutSetup]]:
    """Yield setups with other values of staleness. On shared GPUs, staleness must be 0, so there are no other values."""
    for staleness in () if setup.colocated else STALENESS_VALUES:
        # the order of a run with staleness above 1, otherwise the default order: only staleness 0 and 1 are in order
        in_order = setup.in_order if setup.staleness > 1 else staleness < 2
        changed = replace(setup, staleness=staleness, in_order=in_order and not setup.extra_groups)
        if changed != setup:
            yield f"staleness {staleness}{', in order' if changed.in_order and staleness else ''}", changed


def _over_sampled(setup: RolloutSetup) -> Iterator[tuple[str, RolloutSetup]]:
    for rate in OVER_SAMPLE_RATES:
        changed = replace(setup, extra_groups=num_extra_groups(rate, setup.prompts_per_step), in_order=False)
        if changed != setup:
            yield f"over-sampling {rate:g}", changed


def _other_splits(setup: RolloutSetup, gpus: GpuCounts) -> Iterator[tuple[str, RolloutSetup]]:
    """Yield setups that divide the same GPUs differently between engines and trainers.

    If the run is not colocated, the last setup is colocated on all GPUs. The setups assume that the trainers' seconds per token
    are inversely proportional to the number of the trainers' GPUs.
    """
    disaggregated = gpus.total(setup.num_engines)
    total = max(gpus.trainers, disaggregated - gpus.trainers) if setup.colocated else disaggregated
    possible = [engines for engines in range(1, total) if total - engines * gpus.per_engine > 0]
    stride = -(-len(possible) // MAX_SPLITS) if possible else 1
    for engines in possible[::stride]:
        trainers = total - engines * gpus.per_engine
        changed = replace(setup, num_engines=engines, train_scale=gpus.trainers / trainers, colocated=False)
        if changed != setup:
            yield f"{pluralize(engines, 'engine')}, {pluralize(trainers, 'GPU')} to train", changed
    if not setup.colocated and total >= gpus.per_engine:
        shared = replace(setup, num_engines=total // gpus.per_engine, train_scale=gpus.trainers / total, colocated=True)
        name = f"synchronous, colocated on {pluralize(total, 'GPU')}"
        yield name, replace(shared, staleness=0, in_order=not setup.extra_groups)
