"""Scheduling of rollouts, without threads or engines: requests in flight, the groups of a step, the split over engines.

A prompt request stands for a group of G responses. With N groups per step and a maximal staleness of K weight versions, at
most (K + 1) N groups are drawn and not yet trained. Memory is therefore bounded, whatever the speed of engines and trainers.
Step s never trains a token that is older than weight version s - K. K = 0 is synchronous training.

Runs and the rollout simulator of `mrl plan rollout` share this module, so it imports neither Ray nor torch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mrl.rollout.trajectory import StepGroups

MAX_RESPONSES_PER_REQUEST = 64
"""Limit of responses in one HTTP request. A failed engine loses all responses of its unfinished requests. With one response per
request, the engine's HTTP server would need about a millisecond of CPU per response."""


@dataclass(frozen=True)
class PromptRequest:
    """A prompt drawn for a group of responses."""

    number: int  # position in the order of drawing since the run began
    row: int  # row of the data set
    admitted_version: int  # weight version when it entered the staleness buffer; no older version samples its tokens


@dataclass
class StalenessBuffer[T]:
    """The prompt requests that are drawn and not yet trained. A pure data structure; the planner simulates runs with it.

    - Over-sampling: `extra` groups are in flight beyond those that steps need. A step takes the groups that finish first, and
      drops the others once they are too old. Without over-sampling nothing is dropped: a step waits for every group that would
      be too old for the next step.
    - `in_order`: steps train groups in the order of drawing, so short responses are not preferred.
    - `max_replaced`: number of groups per step that are replaced if the group filter rejects them. If it rejects more, the
      step has fewer groups.
    """

    groups_per_step: int  # N
    staleness: int  # K, weight versions
    extra: int = 0  # groups
    in_order: bool = False
    max_replaced: int = 0
    drawn: int = 0  # prompt requests since the run began; the next one gets this number
    in_flight: dict[int, PromptRequest] = field(default_factory=dict)  # being sampled or scored, by number
    _finished: dict[int, tuple[PromptRequest, T]] = field(default_factory=dict)  # in the order of finishing
    _filtered: dict[int, T] = field(default_factory=dict)  # rejected by the group filter since the last step

    def room(self) -> int:
        """Return the number of prompts that may be drawn now."""
        not_replaced = max(0, len(self._filtered) - self.max_replaced)
        capacity = (self.staleness + 1) * self.groups_per_step + self.extra
        return max(0, capacity - len(self.in_flight) - len(self._finished) - not_replaced)

    def admit(self, rows: Iterable[int], version: int) -> list[PromptRequest]:
        """Create prompt requests for the next rows. `version`: weight version that the engines serve."""
        requests = [PromptRequest(self.drawn + index, row, version) for index, row in enumerate(rows)]
        assert len(requests) <= self.room(), f"{len(requests)} more prompt requests, room for {self.room()}"
        self.drawn += len(requests)
        self.in_flight |= {request.number: request for request in requests}
        return requests

    def finish(self, number: int, group: T, keep: bool) -> None:
        """Store a scored group. If not `keep`, no step trains it, and a new prompt may replace it. Ignore a dropped group."""
        request = self.in_flight.pop(number, None)
        if request is None:
            return
        if keep:
            self._finished[number] = (request, group)
        else:
            self._filtered[number] = group

    def take_step(self, step: int) -> StepGroups[T] | None:
        """Remove the groups that `step` trains and return them; None while the step must wait for groups in flight."""
        numbers = self._select_in_order() if self.in_order else self._select_finished(step)
        may_be_short = not self.in_flight and not self.room()  # no more rejected groups are replaced
        if numbers is None or (len(numbers) < self.groups_per_step and not may_be_short):
            return None
        groups = {number: self._finished.pop(number)[1] for number in sorted(numbers)}
        filtered, self._filtered = self._filtered, {}
        return StepGroups(
            list(groups), list(groups.values()), list(filtered), list(filtered.values()), self._drop_stale(step)
        )

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove prompt requests that were trained or rejected already, or are dropped."""
        for number in numbers:
            self.in_flight.pop(number, None)
            self._finished.pop(number, None)

    def restore(self, drawn: int, requests: Sequence[PromptRequest], step: int) -> None:
        """Start over before `step`, after `drawn` prompts were drawn, with these requests (in the order of drawing) in flight.

        If there are more requests than the buffer has room for, the last ones get the later version at which there will be room.
        """
        oldest = step - self.staleness
        versions = [
            max(request.admitted_version, oldest + index // self.groups_per_step)
            for index, request in enumerate(requests)
        ]
        self.in_flight = {
            request.number: replace(request, admitted_version=version)
            for request, version in zip(requests, versions, strict=True)
        }
        self.drawn, self._finished, self._filtered = drawn, {}, {}

    @property
    def waiting(self) -> list[PromptRequest]:
        """All requests that are drawn and not trained, in the order of drawing. A resumed run needs them again."""
        requests = [*self.in_flight.values(), *(request for request, _ in self._finished.values())]
        return sorted(requests, key=lambda request: request.number)

    @property
    def finished(self) -> dict[int, T]:
        """The groups that are sampled and wait for a step, by number."""
        return {number: group for number, (_, group) in self._finished.items()}

    def _select_in_order(self) -> list[int] | None:
        """Return the first N requests in the order of drawing; None until all of them are finished."""
        first = sorted([*self.in_flight, *self._finished])[: self.groups_per_step]
        return None if any(number in self.in_flight for number in first) else first

    def _select_finished(self, step: int) -> list[int] | None:
        """Select up to N finished groups, in the order of finishing, so that all other groups can still be trained in time.

        Condition, for d = 0 to K: of the other requests, at most d * N are too old for the steps after `step + d`. Returns None
        if too few groups are finished for that.
        """
        first = next(iter(self.in_flight.values()), None)  # the oldest request in flight
        if first and not self.extra and first.admitted_version <= step - self.staleness:
            return None  # a quick exit, because this runs after every group
        chosen: dict[int, None] = {}
        for later in range(0 if self.extra else self.staleness + 1):
            oldest = step - self.staleness + later
            num_old = sum(request.admitted_version <= oldest for request in self.waiting)
            old = [number for number, (request, _) in self._finished.items() if request.admitted_version <= oldest]
            missing = num_old - later * self.groups_per_step - sum(number in chosen for number in old)
            free = [number for number in old if number not in chosen]
            if missing > len(free):
                return None
            chosen |= dict.fromkeys(free[: max(0, missing)])
        rest = [number for number in self._finished if number not in chosen]
        return [*chosen, *rest[: max(0, self.groups_per_step - len(chosen))]]

    def _drop_stale(self, step: int) -> list[int]:
        """Remove and return requests that are too old for the next step. There are none without over-sampling."""
        stale = [request.number for request in self.waiting if request.admitted_version <= step - self.staleness]
        assert self.extra or not stale, f"step {step} left {stale} behind, which no later step may train"
        self.remove(stale)
        return stale


def longest_first[T](requests: Sequence[T], expected_length: Callable[[T], float]) -> list[T]:
    """Sort requests so that those with the longest expected responses are sent first."""
    return sorted(requests, key=lambda request: -expected_length(request))


def split_over_engines[T](requests: Sequence[T], num_engines: int, responses_per_prompt: int) -> list[list[T]]:
    """Split prompt requests into equal shares for the engines, and each share into HTTP requests of limited size."""
    shares = np.array_split(np.arange(len(requests)), max(1, num_engines))
    size = max(1, MAX_RESPONSES_PER_REQUEST // responses_per_prompt)
    parts = [share[start : start + size] for share in shares for start in range(0, len(share), size)]
    return [[requests[index] for index in part.tolist()] for part in parts]


@dataclass
class ResponseLengths:
    """Mean response length of each row of the data set, and of all rows, learned from sampled groups."""

    initial_guess: float  # tokens, until something was sampled
    rows: dict[int, float] = field(default_factory=dict)  # row -> mean length of its last group
    _sum: float = 0.0
    _count: int = 0

    def learn(self, row: int, lengths: list[int]) -> None:
        """Add the response lengths, in tokens, of a group of this row."""
        self.rows[row] = sum(lengths) / len(lengths)
        self._sum, self._count = self._sum + sum(lengths), self._count + len(lengths)

    def expected(self, row: int) -> float:
        """Return the expected tokens of a response: the mean of the row's last group, or of all responses so far."""
        return self.rows.get(row, self._sum / self._count if self._count else self.initial_guess)
