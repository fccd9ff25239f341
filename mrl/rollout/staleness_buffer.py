"""Scheduling of rollouts: how many prompts are drawn, which groups a step gets, which prompts share an HTTP request.

A prompt request asks for a group of G responses to one prompt. A step trains on N groups. K is the maximal staleness, in weight
versions. Without over-sampling, at most (K + 1) N groups are drawn, not rejected by the rollout filter, and not yet used by a
step. Memory is therefore bounded, however fast the engines and the trainers are. Step s trains only on tokens that weight version
s - K or a later version sampled. With K = 0, training is synchronous.

This module contains no threads and no engines, and imports neither Ray nor torch, because the rollout simulator
(`mrl plan rollout`) also uses it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mrl.rollout.trajectory import StepGroups

MAX_RESPONSES_PER_REQUEST = 64
"""Largest number of responses in one HTTP request. In training, a larger group is still one request.

Requests must not be large, because a failed engine loses all responses of its unfinished requests. Requests must not be small
either, because each request costs the engine's HTTP server about 1 ms of CPU."""


def num_extra_groups(over_sample_rate: float, prompts_per_step: int) -> int:
    """Return the number of groups that over-sampling adds to the (K + 1) N groups of the staleness buffer."""
    return math.ceil(over_sample_rate * prompts_per_step)


@dataclass(frozen=True)
class PromptRequest:
    """A prompt that was drawn from the data set, and that the engines answer with a group of responses."""

    serial_number: int  # position in the order of drawing, from 0, since the run began
    row: int  # row of the data set
    # Lowest weight version that may sample the responses; usually the weight version at the time of drawing
    min_weight_version: int
    size: int | None = None  # number of responses; None: rollout.responses_per_prompt


@dataclass
class StalenessBuffer[T]:
    """The prompt requests that no step has used yet. The caller samples their groups and stores the finished groups.

    T, the type of a group, is Group in runs and None in simulations.

    - `extra_groups` (over-sampling): the buffer holds up to this many more groups than (K + 1) N. A step takes the groups that
      finish first. Other groups are dropped when they are too old for the next step. Without over-sampling no group is dropped:
      a step waits for every group that would be too old for the next step.
    - `in_order`: steps take groups in the order in which their prompts were drawn, so short responses are not preferred.
    - `max_replaced_groups`: a step replaces at most this many groups that the rollout filter rejects. If the filter rejects
      more groups, the step may train on fewer than N groups.
    """

    groups_per_step: int  # N
    staleness: int  # K: maximal staleness, in weight versions
    extra_groups: int = 0
    in_order: bool = False
    max_replaced_groups: int = 0
    num_drawn: int = 0  # number of prompts drawn since the run began; also the serial number of the next prompt request
    # The keys of the following dicts are serial numbers of prompt requests
    in_flight: dict[int, PromptRequest] = field(default_factory=dict)  # groups that are not sampled and scored yet
    _finished: dict[int, tuple[PromptRequest, T]] = field(default_factory=dict)  # in the order of finishing
    _filtered: dict[int, T] = field(default_factory=dict)  # groups of this step that the rollout filter rejected

    def free_capacity(self) -> int:
        """Return the number of prompts that may be drawn now."""
        not_replaced = max(0, len(self._filtered) - self.max_replaced_groups)
        capacity = (self.staleness + 1) * self.groups_per_step + self.extra_groups
        return max(0, capacity - len(self.in_flight) - len(self._finished) - not_replaced)

    def admit(self, rows: Iterable[int], version: int, sizes: Sequence[int] | None = None) -> list[PromptRequest]:
        """Create a prompt request for each row of the data set.

        `version`: weight version that the engines serve now. `sizes`: number of responses to each row. None: all rows get
        rollout.responses_per_prompt responses.
        """
        requests = [
            PromptRequest(self.num_drawn + index, row, version, None if sizes is None else sizes[index])
            for index, row in enumerate(rows)
        ]
        capacity = self.free_capacity()
        assert len(requests) <= capacity, f"{len(requests)} new prompt requests, but the buffer has room for {capacity}"
        self.num_drawn += len(requests)
        self.in_flight |= {request.serial_number: request for request in requests}
        return requests

    def finish(self, number: int, group: T, passed_filter: bool) -> None:
        """Store the scored group of the prompt request with serial number `number`. Does nothing for a dropped request.

        No step trains on a group that did not pass the rollout filter. A new prompt may replace it.
        """
        request = self.in_flight.pop(number, None)
        if request is None:
            return
        if passed_filter:
            self._finished[number] = (request, group)
        else:
            self._filtered[number] = group

    def take_step(self, step: int) -> StepGroups[T] | None:
        """Take the groups on which `step` trains out of the buffer. Returns None if the step must wait for more groups."""
        numbers = self._select_in_order() if self.in_order else self._select_finished(step)
        # Fewer than N groups are enough if no more groups can follow, because `max_replaced_groups` is reached.
        may_be_short = not self.in_flight and not self.free_capacity()
        if numbers is None or (len(numbers) < self.groups_per_step and not may_be_short):
            return None
        groups = {number: self._finished.pop(number)[1] for number in sorted(numbers)}
        filtered, self._filtered = self._filtered, {}
        return StepGroups(
            numbers=list(groups),
            groups=list(groups.values()),
            filtered_numbers=list(filtered),
            filtered=list(filtered.values()),
            dropped=self._drop_stale(step),
        )

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove prompt requests that no later step needs."""
        for number in numbers:
            self.in_flight.pop(number, None)
            self._finished.pop(number, None)

    def restore(self, num_drawn: int, requests: Sequence[PromptRequest], step: int) -> None:
        """Set the buffer to the state before `step`, in which exactly `requests` are in flight and no group is finished.

        `num_drawn`: number of prompts drawn so far. `requests` are in the order of drawing. Each step takes N groups, so the
        request with index i may have to wait for step `step + i // N`. Its `min_weight_version` is therefore raised, if
        necessary, to `step + i // N - K`: otherwise its tokens might be too old for that step. The caller sends the request when
        the engines serve this version.
        """
        oldest = step - self.staleness
        versions = [
            max(request.min_weight_version, oldest + index // self.groups_per_step)
            for index, request in enumerate(requests)
        ]
        self.in_flight = {
            request.serial_number: replace(request, min_weight_version=version)
            for request, version in zip(requests, versions, strict=True)
        }
        self.num_drawn, self._finished, self._filtered = num_drawn, {}, {}

    @property
    def untrained_requests(self) -> list[PromptRequest]:
        """All requests that are in flight or finished, in the order of drawing. No step has taken them yet."""
        requests = [*self.in_flight.values(), *(request for request, _ in self._finished.values())]
        return sorted(requests, key=lambda request: request.serial_number)

    @property
    def finished(self) -> dict[int, T]:
        """Serial number of the prompt request -> its group, for all sampled groups that wait for a step."""
        return {number: group for number, (_, group) in self._finished.items()}

    def _select_in_order(self) -> list[int] | None:
        """Return the serial numbers of the first N requests in drawing order. Returns None if one of them is not finished."""
        first = sorted([*self.in_flight, *self._finished])[: self.groups_per_step]
        return None if any(number in self.in_flight for number in first) else first

    def _select_finished(self, step: int) -> list[int] | None:
        """Return the serial numbers of up to N finished groups. Groups that finished first are preferred.

        Without over-sampling, later steps must be able to take all remaining requests before these are too old. The next d
        steps take d * N groups. Therefore, for each d below K, at most d * N of the remaining requests may be too old for
        the steps after `step + d`. For d = K this always holds: at most (K + 1) * N requests can be too old then, and this step
        takes N of them. Returns None if the step would have to take unfinished groups to keep this limit.
        """
        first = next(iter(self.in_flight.values()), None)  # the oldest request in flight
        if first and not self.extra_groups and first.min_weight_version <= step - self.staleness:
            # The step must wait for this request. This fast check comes first, because this method runs many times in each step.
            return None
        chosen: dict[int, None] = {}
        for d in range(0 if self.extra_groups else self.staleness):
            # Requests whose `min_weight_version` is at most `version` are too old for the steps after `step + d`.
            version = step - self.staleness + d
            num_old = sum(request.min_weight_version <= version for request in self.untrained_requests)
            old = [number for number, (request, _) in self._finished.items() if request.min_weight_version <= version]
            missing = num_old - d * self.groups_per_step - sum(number in chosen for number in old)
            not_chosen = [number for number in old if number not in chosen]
            if missing > len(not_chosen):
                return None
            chosen |= dict.fromkeys(not_chosen[: max(0, missing)])
        rest = [number for number in self._finished if number not in chosen]
        return [*chosen, *rest[: max(0, self.groups_per_step - len(chosen))]]

    def _drop_stale(self, step: int) -> list[int]:
        """Remove the requests that are too old for the step after `step`, and return their serial numbers.

        Without over-sampling there are no such requests.
        """
        stale = [
            request.serial_number
            for request in self.untrained_requests
            if request.min_weight_version <= step - self.staleness
        ]
        assert self.extra_groups or not stale, (
            f"step {step} left requests {stale} behind, on which no later step may train"
        )
        self.remove(stale)
        return stale


def longest_first[T](requests: Sequence[T], expected_length: Callable[[T], float]) -> list[T]:
    """Return the requests sorted by expected response length, longest first."""
    return sorted(requests, key=lambda request: -expected_length(request))


def split_over_engines[T](requests: Sequence[T], num_engines: int, responses_per_prompt: int) -> list[list[T]]:
    """Split prompt requests into one equal part for each engine, and each part into HTTP requests of limited size.

    `responses_per_prompt`: largest number of responses to a prompt. Returns the prompt requests of each HTTP request.
    """
    engine_parts = np.array_split(np.arange(len(requests)), max(1, num_engines))
    size = max(1, MAX_RESPONSES_PER_REQUEST // responses_per_prompt)
    http_requests = [part[start : start + size] for part in engine_parts for start in range(0, len(part), size)]
    return [[requests[index] for index in indices.tolist()] for indices in http_requests]


@dataclass
class ResponseLengths:
    """Mean response length of each row of the data set and of all rows, measured on sampled groups."""

    initial_guess: float  # expected length, in tokens, before any response was sampled
    rows: dict[int, float] = field(default_factory=dict)  # row -> mean length of its last group
    _sum: float = 0.0  # tokens of all responses
    _count: int = 0  # number of all responses

    def learn(self, row: int, lengths: list[int]) -> None:
        """Add the response lengths, in tokens, of a group of this row."""
        self.rows[row] = sum(lengths) / len(lengths)
        self._sum, self._count = self._sum + sum(lengths), self._count + len(lengths)

    def expected(self, row: int) -> float:
        """Return the expected length, in tokens, of a response to this row.

        This is the mean length of the row's last group. If the row was never sampled, this is the mean length of all responses,
        or `initial_guess` if there are no responses.
        """
        return self.rows.get(row, self._sum / self._count if self._count else self.initial_guess)
