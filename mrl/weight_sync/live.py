"""Live weight sync: every trainer rank sends what the plan says, straight to the engine ranks that need it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence

from mrl.config.schema import WeightSyncConfig
from mrl.core.types import SyncReport
from mrl.weight_sync.coordinator import Coordinator
from mrl.weight_sync.errors import WeightMismatchError
from mrl.weight_sync.opening import LayoutOf, Weights, open_session
from mrl.weight_sync.sender import Sender

log = logging.getLogger(__name__)


class LiveSync:
    """One trainer rank's end. Every rank makes one, and calls `push` with the same version; rank 0 talks with the engines."""

    def __init__(self, urls: Sequence[str], weights: Weights, layout_of: LayoutOf, settings: WeightSyncConfig) -> None:
        """Reach the engines, compile the plan, open the wires; raises SyncError or ValueError, the same on all ranks."""
        self._weights, self._delta = weights, settings.delta
        self.session = open_session(urls, weights, layout_of, settings)
        self.sender = Sender(self.session.channel, self.session.outlet, self.session.buckets, settings.delta)
        self._num_tensors = len({piece.name for bucket in self.session.buckets for piece in bucket.pieces})
        self._base: str | None = None  # the last push that every engine holds, checked
        self._version = -1

    def push(self, version: int, released: bool = False) -> SyncReport:
        """Bring the current weights to every engine, which then serves them as `version`.

        `released`: engines had given the memory of their weights back, and stay paused until they have all of it again.
        What this rank sent; and which engines failed on the way (they are out of service; a new LiveSync over those that are
        left and their successors brings them in). Raises WeightMismatchError on all ranks.
        """
        assert version >= self._version, f"versions only grow: {version} after {self._version}"
        team, base, start = self.session.team, None, time.perf_counter()
        if self._delta and not released:
            base = self._base
        push = team.first(lambda: self._begin(version, base))
        begun = time.perf_counter()
        read = self._weights.reader()
        sent = self.sender.push(push, lambda piece: read(piece.name, piece.box), full=base is None)
        sending = time.perf_counter()
        failed, again = team.first(lambda: self._finish(push, version, base is not None, not released))
        done = time.perf_counter()
        self._version, self._base = version, None if failed or again else push
        return SyncReport(
            bytes=sent.payload_bytes,
            raw_bytes=sent.raw_bytes,
            tensors=self._num_tensors,
            buckets=sent.messages,
            seconds=done - start,
            engine_seconds=begun - start + sent.waited_s + done - sending,
            failed=failed,
            again=again,
        )

    def _begin(self, version: int, base: str | None) -> str:
        """Rank 0: name the push and have the engines wait for it."""
        push = f"push/{version}/{uuid.uuid4().hex[:8]}"
        self._coordinator.begin(push, base)
        return push

    def _finish(self, push: str, version: int, delta: bool, go_on: bool) -> tuple[dict[str, str], bool]:
        """Rank 0: have the engines serve; which failed, and whether a difference did not arrive as it was meant."""
        coordinator, again = self._coordinator, False
        try:
            coordinator.finish(push)
            coordinator.serve(push, version, go_on)
        except WeightMismatchError as error:
            if not delta:
                raise
            log.warning("version %d is sent again in full: %s", version, error)
            again = True
        return coordinator.failures, again

    def close(self) -> None:
        """Let the engines go; those that are gone already do not matter."""
        self.session.close()

    @property
    def _coordinator(self) -> Coordinator:
        assert self.session.coordinator is not None, "only rank 0 talks with the engines"
        return self.session.coordinator
