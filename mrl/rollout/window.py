"""Which prompts may be in the making, and which finished groups a step trains: the whole of synchronous and asynchronous rollout.

Prompts are drawn as numbered tickets, a group of G responses each. With N groups per step and K the largest staleness in
weight versions, at most (K + 1) N groups are drawn and not yet trained, so memory is bounded whatever the speeds; and no
group is trained by a step s with a token older than version s - K. K = 0 is synchronous training.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ticket:
    """A prompt drawn for a group of responses."""

    number: int  # in the order of drawing, since the run began
    row: int  # of the data set
    born: int  # version of the weights when it was admitted: no token of it is older


@dataclass(frozen=True)
class Chosen[T]:
    """What a step trains, and what it leaves behind."""

    numbers: list[int]  # of the groups trained, in the order of drawing
    groups: list[T]
    refused: list[T]  # finished since the last choice, and not to be trained
    refused_numbers: list[int]
    dropped: list[int]  # given up, finished or not: they would be too old for the next step


@dataclass
class Window[T]:
    """The tickets that are drawn and not trained.

    `extra` groups beyond what steps need are over-sampling: a step then waits for nobody and drops what is left behind and
    too old. Without it nothing is ever dropped: a step waits for every group that no later step may train. `in_order`: steps
    train groups in the order of drawing, so that no response is preferred for being quick. `refusals`: refused groups of one
    step that are replaced by others; after so many it may have fewer groups.
    """

    size: int  # N: groups that a step trains
    staleness: int  # K: weight versions
    extra: int = 0
    in_order: bool = False
    refusals: int = 0
    drawn: int = 0  # tickets since the run began: the next one's number
    open: dict[int, Ticket] = field(default_factory=dict)  # in the making
    _finished: dict[int, tuple[Ticket, T]] = field(default_factory=dict)  # in the order in which they were finished
    _refused: dict[int, T] = field(default_factory=dict)  # since the last choice

    def room(self) -> int:
        """Tickets that may be drawn now."""
        unreplaced = max(0, len(self._refused) - self.refusals)
        capacity = (self.staleness + 1) * self.size + self.extra
        return max(0, capacity - len(self.open) - len(self._finished) - unreplaced)

    def admit(self, rows: Iterable[int], version: int) -> list[Ticket]:
        """Tickets for these rows, the next in the order of drawing; `version` is what the engines serve."""
        tickets = [Ticket(self.drawn + place, row, version) for place, row in enumerate(rows)]
        assert len(tickets) <= self.room(), f"{len(tickets)} more tickets, room for {self.room()}"
        self.drawn += len(tickets)
        self.open |= {ticket.number: ticket for ticket in tickets}
        return tickets

    def finish(self, number: int, group: T, kept: bool) -> None:
        """A group is complete; without `kept` nobody trains it, and another may be drawn. One that was dropped is ignored."""
        ticket = self.open.pop(number, None)
        if ticket is None:
            return
        if kept:
            self._finished[number] = (ticket, group)
        else:
            self._refused[number] = group

    def choose(self, step: int) -> Chosen[T] | None:
        """The groups that `step` trains, which leave the window; None while some that it must wait for are open."""
        numbers = self._in_order() if self.in_order else self._as_finished(step)
        short = not self.open and not self.room()  # refused groups were replaced often enough
        if numbers is None or (len(numbers) < self.size and not short):
            return None
        groups = {number: self._finished.pop(number)[1] for number in sorted(numbers)}
        refused, self._refused = self._refused, {}
        return Chosen(list(groups), list(groups.values()), list(refused.values()), list(refused), self._drop(step))

    def take(self, numbers: Sequence[int]) -> None:
        """These tickets were trained or refused by an earlier process, which knows what they became."""
        for number in numbers:
            self.open.pop(number, None)
            self._finished.pop(number, None)

    def restore(self, drawn: int, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Begin anew with these tickets in the making, of `drawn` so far."""
        self.drawn, self.open = drawn, {ticket.number: ticket for ticket in tickets}
        self._finished, self._refused = {}, {}
        return list(self.open.values())

    @property
    def waiting(self) -> list[Ticket]:
        """All that are drawn and not trained, in the order of drawing: what a run that goes back must draw again."""
        tickets = [*self.open.values(), *(ticket for ticket, _ in self._finished.values())]
        return sorted(tickets, key=lambda ticket: ticket.number)

    @property
    def finished(self) -> dict[int, T]:
        """The groups that are whole and wait for a step, by ticket."""
        return {number: group for number, (_, group) in self._finished.items()}

    def _in_order(self) -> list[int] | None:
        """The first `size` tickets, once all of them are finished."""
        first = sorted([*self.open, *self._finished])[: self.size]
        return None if any(number in self.open for number in first) else first

    def _as_finished(self, step: int) -> list[int] | None:
        """Up to `size` finished groups, the first finished first, but for those that leave later steps nothing too old.

        Of the tickets that are too old for a step after s + d, at most d * `size` may be left behind by step s.
        """
        first = next(iter(self.open.values()), None)  # none in the making is older
        if first and not self.extra and first.born <= step - self.staleness:
            return None  # at once: it is asked after every group
        chosen: dict[int, None] = {}
        for later in range(0 if self.extra else self.staleness + 1):
            oldest = step - self.staleness + later
            left = sum(ticket.born <= oldest for ticket in self.waiting) - later * self.size
            ours = [number for number, (ticket, _) in self._finished.items() if ticket.born <= oldest]
            missing = left - sum(number in chosen for number in ours)
            free = [number for number in ours if number not in chosen]
            if missing > len(free):
                return None
            chosen |= dict.fromkeys(free[: max(0, missing)])
        rest = [number for number in self._finished if number not in chosen]
        return [*chosen, *rest[: max(0, self.size - len(chosen))]]

    def _drop(self, step: int) -> list[int]:
        """Give up what is too old for the next step; with over-sampling only, else nothing is."""
        old = [ticket.number for ticket in self.waiting if ticket.born <= step - self.staleness]
        assert self.extra or not old, f"step {step} left {old} behind, which no later step may train"
        self.take(old)
        return old
