"""What is expected of a response's length, from those that were seen: who is asked for first, and of which engine."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mrl.rollout.journal import Entry
from mrl.rollout.trajectory import Group


@dataclass
class Lengths:
    """Mean lengths of the responses to each row of the data, and of all."""

    guess: float  # tokens, before anything was seen
    rows: dict[int, float] = field(default_factory=dict)  # what each row's last group had on average
    _sum: float = 0.0
    _count: int = 0

    def learn(self, row: int, tokens: list[int]) -> None:
        """Responses to a row were so long."""
        self.rows[row] = sum(tokens) / len(tokens)
        self._sum, self._count = self._sum + sum(tokens), self._count + len(tokens)

    def expected(self, row: int) -> float:
        """Tokens of a response to this row: as the last time, else as all responses so far."""
        return self.rows.get(row, self._sum / self._count if self._count else self.guess)


@dataclass
class Selection:
    """What choosing groups by their speed does to the lengths of those trained.

    They are compared with an unbroken run of tickets, all of which are finished, as many as steps trained lately. Of a group
    that was given up nobody knows its length: it counts as long as the longest that its step took, which is too little.
    """

    steps: int = 4  # compared at one time
    _lengths: dict[int, float] = field(default_factory=dict)  # ticket -> mean length of its finished group
    _trained: deque[list[float]] = field(default_factory=deque)  # of the last steps

    def of_step(self, taken: Entry, finished: Mapping[int, Group]) -> dict[str, float]:
        """`rollout/length_selected_ratio`: mean length of what was trained lately over that of what was drawn; 1 is fair.

        `finished`: groups that are whole and wait.
        """
        trained = [_mean_length(group) for group in taken.groups]
        self._lengths |= dict(zip(taken.numbers, trained, strict=True))
        self._lengths |= zip(taken.refused_numbers, map(_mean_length, taken.refused), strict=True)
        self._lengths |= dict.fromkeys(taken.dropped, max(trained, default=0.0))
        self._lengths |= {number: _mean_length(group) for number, group in finished.items()}
        self._trained = deque([*self._trained, trained], maxlen=self.steps)
        lately = [length for step in self._trained for length in step]
        fair = self._unbroken(len(lately))
        return {"rollout/length_selected_ratio": float(np.mean(lately) / np.mean(fair))} if fair else {}

    def _unbroken(self, count: int) -> list[float]:
        """Of the last `count` tickets before the first that is not finished; what is older is forgotten."""
        end = first = min(self._lengths, default=0)
        while end in self._lengths:
            end += 1
        for ticket in range(first, end - 4 * count):
            del self._lengths[ticket]
        return [self._lengths[ticket] for ticket in range(max(first, end - count), end)]


def _mean_length(group: Group) -> float:
    return float(np.mean([sample.trajectory.num_sampled for sample in group.samples]))
