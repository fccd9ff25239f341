"""Time-shares GPUs between colocated models and engines.

A role is the actor, the critic, the engines or a model of the key `roles`. A served model is a model of the key `roles` that
SGLang serves to rewards or to distillation. The peers of a role are the other roles that time-share its devices. The engines
and the served models work at the same time, so they are never peers of each other. Before a role is used, the scheduler
offloads the peers of that role and loads the role. A role without peers always stays on its devices.

Offloaded engines lose their weights, so the trainer ranks push the actor's weights when the engines are loaded again:

1. The scheduler offloads the engines' peers, except for the weights of the actor.
2. The engines allocate memory for weights, and the trainer ranks push the weights.
3. The scheduler offloads the actor, unless the actor was loaded before and shares no device with the engines. The engines
   allocate their KV cache and resume.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

ACTOR, ENGINES = "actor", "engines"
ColocatedRoles = frozenset[frozenset[str]]
"""Each inner set contains roles that share devices."""


class OffloadableModel(Protocol):
    """The trainer ranks of one model, or the servers of a served model. Both methods are idempotent."""

    def offload(self, keep_weights: bool = False) -> int:
        """Free the model's device memory. Returns the number of bytes that are still allocated.

        With `keep_weights`, only the weights are on the devices after the call, even if they were offloaded before.
        """
        ...

    def load_to_device(self) -> None:
        """Load the whole model to its devices."""
        ...


class OffloadableEngines(Protocol):
    """All engines of a run. Every call is idempotent."""

    def offload(self) -> int:
        """Pause the engines and free their device memory. Returns the bytes that are still allocated."""
        ...

    def load_weights(self) -> None:
        """Allocate memory for the weights. The weights are undefined until the next push."""
        ...

    def load_kv_cache(self) -> None:
        """Allocate the KV cache and resume the requests that wait."""
        ...

    def resync(self) -> None:
        """Load the engines, and push the current weight version to them, inside `MemoryScheduler.during_push`."""
        ...


class MemoryState(Enum):
    """Whether the memory of a role is on its devices."""

    NOT_STARTED = "not started"  # the role has no processes: they have not started yet, or they have ended
    ON_DEVICE = "on device"
    OFFLOADED = "offloaded"
    TRANSITIONING = "transitioning"  # a part of the memory is on the device, or a transition has failed


class MemoryScheduler:
    """Loads each role before its use and offloads the peers that share its devices.

    If the memory of a role cannot be loaded or offloaded, the scheduler raises the error, and the role stays TRANSITIONING. The
    next call that loads or offloads the role tries again.
    """

    def __init__(self, colocated_roles: ColocatedRoles) -> None:
        self._colocated_roles = colocated_roles
        self._models: dict[str, OffloadableModel] = {}
        self._engines: OffloadableEngines | None = None
        self._states: dict[str, MemoryState] = {}
        # Metrics since the last call of metrics(): seconds of transitions, number of loads, largest number of bytes that stayed
        # allocated after an offload.
        self._seconds, self._switches, self._residual_bytes = 0.0, 0, 0
        # The engines and the served models. They work at the same time, so they never offload each other.
        self._used_by_rollout = {ENGINES}

    def register_model(self, role: str, model: OffloadableModel) -> None:
        """Add the trainer ranks of a model. Peers are offloaded in the order of registration."""
        self._models[role], self._states[role] = model, MemoryState.NOT_STARTED

    def register_served(self, role: str, model: OffloadableModel) -> None:
        """Add the servers of a served model. The scheduler loads them together with the engines."""
        self.register_model(role, model)
        self._used_by_rollout.add(role)

    def register_engines(self, engines: OffloadableEngines) -> None:
        """Add the engines."""
        self._engines, self._states[ENGINES] = engines, MemoryState.NOT_STARTED

    def state(self, role: str) -> MemoryState:
        """Return the state of this role after its last transition."""
        return self._states[role]

    def peers(self, role: str) -> list[str]:
        """Return the registered roles that time-share a device with this role, in order of registration."""
        shared = frozenset().union(*(roles for roles in self._colocated_roles if role in roles))
        beside = self._used_by_rollout if role in self._used_by_rollout else set()
        return [other for other in self._states if other in shared and other != role and other not in beside]

    def load(self, role: str) -> None:
        """Offload the peers of this role, then load the role. Does nothing if the role has no peers.

        Also does nothing if the role is loaded and its peers are offloaded. A role without processes counts as loaded,
        because its processes will start on the device. Offloaded engines are loaded by a push of the current weight version.
        """
        resident = self._state_is(role, MemoryState.ON_DEVICE, MemoryState.NOT_STARTED)
        if not self.peers(role) or (resident and self._peers_are_offloaded(role)):
            return
        if role == ENGINES and not resident:
            self._registered_engines.resync()
            return
        with self._timed():
            self._offload(self.peers(role))
            if not resident:
                self._transition(role, self._models[role].load_to_device, MemoryState.ON_DEVICE)

    @property
    def sglang_roles(self) -> list[str]:
        """The engines and all served models."""
        return [ENGINES, *sorted(self._used_by_rollout - {ENGINES})]

    def rollout_shares_devices(self) -> bool:
        """Return whether a role in `sglang_roles` time-shares a device with trainers."""
        return any(self.peers(role) for role in self.sglang_roles)

    def load_for_rollout(self) -> None:
        """Load the engines and all served models."""
        for role in self.sglang_roles:
            self.load(role)

    def make_room_for_rollout(self) -> None:
        """Offload the peers of the engines and of all served models, because the engines and the servers are about to start."""
        for role in self.sglang_roles:
            self.make_room(role)

    def make_room(self, role: str) -> None:
        """Offload the peers of a role whose processes are about to start."""
        with self._timed():
            self._offload(self.peers(role))

    @contextmanager
    def during_push(self) -> Iterator[bool]:
        """Keep device memory allocated for the weights of the actor and of the engines during a push.

        Yields whether the engines have peers. If so, the engines are offloaded first, so their memory holds no weights before
        the push. If the push then raises, the engines stay TRANSITIONING. The actor stays ON_DEVICE if it was loaded and shares
        no device with the engines, and TRANSITIONING otherwise. If the push succeeds, the engines are on their devices after
        the context.
        """
        if not self.peers(ENGINES):
            self.load(ACTOR)
            yield False
            return
        engines, actor = self._registered_engines, self._models[ACTOR]
        with self._timed():
            self._offload([ENGINES])  # the actor's weights need the memory of the KV cache
            self._offload([peer for peer in self.peers(ENGINES) if peer != ACTOR])
            self._offload(self.peers(ACTOR))
            actor_stays = ACTOR not in self.peers(ENGINES) and self._state_is(ACTOR, MemoryState.ON_DEVICE)
            if not actor_stays:
                self._transition(ACTOR, lambda: actor.offload(keep_weights=True), MemoryState.TRANSITIONING)
            self._transition(ENGINES, engines.load_weights, MemoryState.TRANSITIONING)
        yield True
        with self._timed():
            if not actor_stays:
                self._offload([ACTOR])
            self._transition(ENGINES, engines.load_kv_cache, MemoryState.ON_DEVICE)

    def mark_started(self, *roles: str) -> None:
        """Record that new processes of these roles are on their devices."""
        self._states |= dict.fromkeys(roles, MemoryState.ON_DEVICE)

    def mark_ended(self, *roles: str) -> None:
        """Record that the processes of these roles have ended."""
        self._states |= dict.fromkeys(roles, MemoryState.NOT_STARTED)

    def metrics(self) -> dict[str, float]:
        """Return the metrics placement/* for the time since the last call, or {} if no roles share devices."""
        metrics = {
            "placement/switch_s": self._seconds,
            "placement/switches": float(self._switches),
            "placement/residual_bytes": float(self._residual_bytes),
        }
        self._seconds, self._switches, self._residual_bytes = 0.0, 0, 0
        return metrics if any(self.peers(role) for role in self._states) else {}

    @property
    def _registered_engines(self) -> OffloadableEngines:
        assert self._engines is not None, "register_engines() must be called first"
        return self._engines

    def _state_is(self, role: str, *states: MemoryState) -> bool:
        return self._states[role] in states

    def _peers_are_offloaded(self, role: str) -> bool:
        return all(self._state_is(peer, MemoryState.OFFLOADED, MemoryState.NOT_STARTED) for peer in self.peers(role))

    def _offload(self, roles: Sequence[str]) -> None:
        for role in roles:
            if not self._state_is(role, MemoryState.OFFLOADED, MemoryState.NOT_STARTED):
                offload = self._registered_engines.offload if role == ENGINES else self._models[role].offload
                self._residual_bytes = max(self._residual_bytes, self._transition(role, offload, MemoryState.OFFLOADED))

    def _transition(self, role: str, action: Callable[[], Any], state: MemoryState) -> Any:
        was_resident, self._states[role] = self._state_is(role, MemoryState.ON_DEVICE), MemoryState.TRANSITIONING
        result = action()
        self._states[role] = state
        self._switches += state is MemoryState.ON_DEVICE and not was_resident
        return result

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start
