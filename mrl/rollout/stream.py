"""Groups in the making: asked of the engines, scored as soon as they are whole, and kept until a step takes them."""

import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from mrl.rollout.asking import NoEngineError
from mrl.rollout.engines import Engines, late
from mrl.rollout.trajectory import Group, Trajectory
from mrl.rollout.window import Chosen, Ticket, Window

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Draft:
    """The responses to a ticket's prompt, not scored yet."""

    ticket: Ticket
    prompt: list[int]
    paths: list[Trajectory]
    greedy: Trajectory | None = None


class Stream:
    """Sampling and scoring go on in threads of their own; whoever calls only admits prompts and waits for whole groups.

    `answer`: the drafts of some tickets, in the engines' loop. `score`: their groups, in the scoring thread. `keep`: whether a
    group is trained. `together`: tickets that share a request: their groups are whole at one time.
    """

    def __init__(
        self,
        window: Window[Group],
        engines: Engines,
        answer: Callable[[Sequence[Ticket]], Awaitable[list[Draft]]],
        score: Callable[[list[Draft]], list[Group]],
        keep: Callable[[Group], bool],
        together: Callable[[Sequence[Ticket]], Sequence[Sequence[Ticket]]],
    ) -> None:
        self.window, self.engines = window, engines
        self._waited_s = self._scored_s = (
            0.0  # for groups; of that, while responses were scored; since they were read last
        )
        self._scoring_s = 0.0  # in all
        self._answer, self._score, self._keep, self._together = answer, score, keep, together
        self._changed = threading.Condition()  # guards all that follows, and the window
        self._started: dict[int, Future[None]] = {}  # tickets in the making, and what makes them
        self._error: BaseException | None = None
        self._life = 0  # counts restarts: what began before one is not wanted any more
        self._drafts: queue.SimpleQueue[tuple[int, list[Draft]] | None] = queue.SimpleQueue()
        self._scoring: threading.Thread | None = None

    def admit(self, first: int, rows: Sequence[int], version: int) -> None:
        """Take prompts in, of which `first` is the number of the first; those that are in already are left as they are."""
        with self._changed:
            self.window.admit(rows[max(0, self.window.drawn - first) :], version)

    def go_on(self, version: int) -> None:
        """Ask for all tickets that are in and not asked for; engines serve `version`."""
        with self._changed:
            self._error = None
            there = [ticket for ticket in self.window.open.values() if ticket.born <= version]
            new = [ticket for ticket in there if ticket.number not in self._started]
            for tickets in self._together(new) if new else ():
                making = self.engines.start(self._make(list(tickets), self._life))
                self._started |= dict.fromkeys((ticket.number for ticket in tickets), making)

    def wait(self, step: int, timeout_s: float) -> Chosen[Group] | None:
        """The groups of a step; None where prompts may be drawn in place of refused ones.

        Raises NoEngineError where no engine is left (`go_on` asks again), what sampling or scoring raised, and EngineError
        when the time is up.
        """
        start, scoring_s = time.monotonic(), self._scoring_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                chosen = self.window.choose(step)
                if chosen is not None:
                    self._give_up(chosen.dropped)
                    break
                if self.window.room():
                    break
                left = start + timeout_s - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise late(timeout_s)
        self._waited_s += time.monotonic() - start
        self._scored_s += self._scoring_s - scoring_s
        return chosen

    def take_seconds(self) -> tuple[float, float]:
        """Seconds that callers waited for engines, and for scores, since the last call."""
        scored = min(self._scored_s, self._waited_s)
        waited, self._waited_s, self._scored_s = self._waited_s, 0.0, 0.0
        return waited - scored, scored

    def room(self) -> int:
        """Prompts that may be drawn now."""
        with self._changed:
            return self.window.room()

    def waiting(self) -> list[Ticket]:
        """The tickets that no step has taken."""
        with self._changed:
            return self.window.waiting

    def finished(self) -> dict[int, Group]:
        """Those of them whose groups are whole, and of which one might be trained."""
        with self._changed:
            return self.window.finished

    def known(self, numbers: Sequence[int], rows: Sequence[int]) -> bool:
        """Whether these tickets wait, for these rows, as far as they are drawn."""
        with self._changed:
            waiting = {ticket.number: ticket.row for ticket in self.window.waiting}
            drawn = [pair for pair in zip(numbers, rows, strict=True) if pair[0] < self.window.drawn]
            return all(waiting.get(number) == row for number, row in drawn)

    def take(self, numbers: Sequence[int]) -> None:
        """These tickets are trained or refused already."""
        with self._changed:
            self.window.take(numbers)
            self._give_up(numbers)

    def restart(self, drawn: int, tickets: Sequence[Ticket], step: int) -> None:
        """Give everything up, and begin anew before `step` with these tickets of `drawn` so far."""
        with self._changed:
            self._life += 1
            self._give_up(list(self._started))
            self._error = None
            self.window.restore(drawn, tickets, step)

    def close(self) -> None:
        """End the scoring thread; the engines are the caller's."""
        self.restart(0, [], 0)
        self._drafts.put(None)

    async def _make(self, tickets: list[Ticket], life: int) -> None:
        try:
            self._to_score(life, await self._answer(tickets))
        except Exception as error:
            with self._changed:
                if life == self._life:
                    for ticket in tickets:
                        self._started.pop(ticket.number, None)
                    self._fail(error)

    def _to_score(self, life: int, drafts: list[Draft]) -> None:
        if self._scoring is None:
            self._scoring = threading.Thread(target=self._score_all, name="scoring", daemon=True)
            self._scoring.start()
        self._drafts.put((life, drafts))

    def _take(self) -> list[tuple[int, list[Draft]] | None]:
        """All that waits to be scored, at least one."""
        found = [self._drafts.get()]
        while not self._drafts.empty():
            found.append(self._drafts.get())
        return found

    def _score_all(self) -> None:
        while None not in (found := self._take()):
            life = self._life
            drafts = [draft for entry in found if entry and entry[0] == life for draft in entry[1]]
            start = time.perf_counter()
            try:
                groups = self._score(drafts) if drafts else []
                kept = [self._keep(group) for group in groups]
            except Exception as error:
                with self._changed:
                    if life == self._life:
                        self._fail(error)
                continue
            with self._changed:
                if life != self._life:
                    continue
                self._scoring_s += time.perf_counter() - start
                for draft, group, keep in zip(drafts, groups, kept, strict=True):
                    self._started.pop(draft.ticket.number, None)
                    self.window.finish(draft.ticket.number, group, keep)
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Have who waits raise this; that no engine is left yields to anything worse."""
        if self._error is None or isinstance(self._error, NoEngineError):
            self._error = error
        self._changed.notify_all()

    def _give_up(self, numbers: Sequence[int]) -> None:
        """End the requests for these tickets that no other ticket shares."""
        for number in numbers:
            making: Future[Any] | None = self._started.pop(number, None)
            if making is not None and making not in self._started.values():
                making.cancel()
