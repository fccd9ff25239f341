"""Who of those that share devices has its memory there. Turns are taken on demand: whoever is needed wakes, its rivals sleep.

Engines that have slept have no weights. So they wake around a push: rivals sleep, the actor has its weights alone on the device,
engines take the memory of theirs, weights are pushed, the actor sleeps, engines take the memory of their KV cache and go on.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

ACTOR, ENGINES = "actor", "engines"
Sharing = frozenset[frozenset[str]]
"""Names of roles that share devices, by devices."""


class Trainers(Protocol):
    """The processes of one model. Both calls may be repeated."""

    def sleep(self, keep_weights: bool = False) -> int:
        """Leave the device, but for the weights where they are to be kept, whatever was there before; bytes still held."""
        ...

    def wake(self) -> None:
        """Be there as a whole."""
        ...


class Engines(Protocol):
    """All engines. Every call may be repeated."""

    def sleep(self) -> int:
        """Leave the device, requests waiting; bytes still held."""
        ...

    def wake_weights(self) -> None:
        """Have room for weights."""
        ...

    def wake_cache(self) -> None:
        """Have room for the KV cache as well, and go on with what waits."""
        ...


class State(Enum):
    """What of a role is on its devices."""

    ABSENT = "absent"  # nothing: it was not started, or has ended
    AWAKE = "awake"
    ASLEEP = "asleep"
    BETWEEN = "between"  # a part; or a move began and did not end


class Turns:
    """Roles that share no device are always awake, and nothing here happens to them.

    A move that fails raises what the role raised; the role is BETWEEN then, and what is asked for next moves it again.
    """

    def __init__(self, trainers: Mapping[str, Trainers], engines: Engines, sharing: Sharing) -> None:
        """`trainers`: by role, the actor among them; `sharing`: groups of their roles and `engines`."""
        self._trainers, self._engines, self._sharing = trainers, engines, sharing
        self.bring: Callable[[], object] = (
            _nobody  # pushes, through `push`, the weights that engines had before they slept
        )
        self._states = dict.fromkeys((*trainers, ENGINES), State.ABSENT)
        self._seconds, self._switches, self._residual = 0.0, 0, 0

    def state(self, role: str) -> State:
        """What of a role is on its devices, as far as it is known here."""
        return self._states[role]

    def rivals(self, role: str) -> list[str]:
        """Roles, of those there are, that share a device with this one; in a fixed order."""
        shared = frozenset().union(*(group for group in self._sharing if role in group))
        return [other for other in self._states if other in shared and other != role]

    def need(self, role: str) -> None:
        """Have this role awake, or room for it where it starts now, and its rivals asleep; nothing where it is so already."""
        there = self._is(role, State.AWAKE, State.ABSENT)  # who starts now is awake then
        if not self.rivals(role) or (there and self._alone(role)):
            return
        if role == ENGINES and not there:
            self.bring()
            return
        with self._timed():
            self._make_room(role)
            if not there:
                self._move(role, self._trainers[role].wake, State.AWAKE)

    def push[T](self, send: Callable[[bool], T]) -> T:
        """Have engines awake with what `send` pushes; it is told whether they had given their memory back.

        Whatever `send` says of engines that failed, the others are awake afterwards.
        """
        if not self.rivals(ENGINES):
            self.need(ACTOR)
            return send(False)
        with self._timed():
            self._sleep([ENGINES])  # its KV cache leaves the room for the actor's weights
            self._make_room(ENGINES, but=ACTOR)
            self._make_room(ACTOR)
            stays = ACTOR not in self.rivals(ENGINES) and self._is(ACTOR, State.AWAKE)
            if not stays:
                self._move(ACTOR, lambda: self._trainers[ACTOR].sleep(keep_weights=True), State.BETWEEN)
            self._move(ENGINES, self._engines.wake_weights, State.BETWEEN)
        sent = send(True)
        with self._timed():
            if not stays:
                self._sleep([ACTOR])
            self._move(ENGINES, self._engines.wake_cache, State.AWAKE)
        return sent

    def started(self, *roles: str) -> None:
        """These roles have new processes, which are awake."""
        self._states |= dict.fromkeys(roles, State.AWAKE)

    def forget(self, *roles: str) -> None:
        """The processes of these roles have ended; `started` says when there are others."""
        self._states |= dict.fromkeys(roles, State.ABSENT)

    def metrics(self) -> dict[str, float]:
        """`placement/*` since the last call; empty where nothing is shared."""
        numbers = {
            "placement/switch_s": self._seconds,
            "placement/switches": float(self._switches),
            "placement/residual_bytes": float(self._residual),
        }
        self._seconds, self._switches, self._residual = 0.0, 0, 0
        return numbers if any(self.rivals(role) for role in self._states) else {}

    def _is(self, role: str, *states: State) -> bool:
        return self._states[role] in states

    def _alone(self, role: str) -> bool:
        return all(self._is(rival, State.ASLEEP, State.ABSENT) for rival in self.rivals(role))

    def _make_room(self, role: str, but: str = "") -> None:
        self._sleep([rival for rival in self.rivals(role) if rival != but])

    def _sleep(self, roles: Sequence[str]) -> None:
        for role in roles:
            if not self._is(role, State.ASLEEP, State.ABSENT):
                sleeper = self._engines if role == ENGINES else self._trainers[role]
                self._residual = max(self._residual, self._move(role, sleeper.sleep, State.ASLEEP))

    def _move(self, role: str, act: Callable[[], Any], state: State) -> Any:
        slept, self._states[role] = not self._is(role, State.AWAKE), State.BETWEEN
        result = act()
        self._states[role] = state
        self._switches += slept and state is State.AWAKE
        return result

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start


def _nobody() -> None:
    raise RuntimeError("engines sleep, and nobody brings weights to them.")
