"""The driver's side of weight sync: push each version, and put new engines in place of those that fail on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from mrl.core.types import SyncReport
from mrl.weight_sync.errors import WeightSyncError

log = logging.getLogger(__name__)


@dataclass
class WeightSyncer:
    """Brings the trainer's weights to all engines; no engine serves anything but the version that was pushed last."""

    push_weights: Callable[[int], Sequence[SyncReport]]  # on all trainer ranks; their reports, rank 0's first
    connect: Callable[[Sequence[str]], dict[str, str]]  # all trainer ranks to these engines; those that failed, and why
    replace_engines: Callable[[Sequence[str]], Sequence[str]]  # start others in place of these; all engines' URLs
    tries: int = 3
    held: Callable[[], AbstractContextManager[object]] = nullcontext  # while engines are paused for a push
    version: int = field(default=-1, init=False)  # that every engine serves

    def push(self, version: int) -> dict[str, float]:
        """Push until every engine serves `version`; raises WeightSyncError after `tries` attempts, and what a push raises."""
        numbers = self._bring(version, {})
        self.version = version
        return numbers

    def again(self) -> None:
        """Push the version of all once more, to engines that had given the memory of their weights back."""
        self.restore({})

    def restore(self, failed: Mapping[str, str]) -> None:
        """Put others in the place of engines that failed at their work (URL -> why), and bring them the version of all.

        The trainer must still have the weights of that version. Raises as `push`.
        """
        assert self.version >= 0, "engines are asked for nothing before the first push"
        self._bring(self.version, dict(failed))

    def _bring(self, version: int, failed: dict[str, str]) -> dict[str, float]:
        replaced, why = 0, "differences did not arrive as they were sent"
        for attempt in range(1, self.tries + 1):
            if failed:
                log.warning("engines that failed are replaced, and brought version %d: %s", version, failed)
                replaced, why = replaced + len(failed), str(failed)
                if failed := self.connect(self.replace_engines(list(failed))):
                    continue
            with self.held():
                reports = self.push_weights(version)
            failed = reports[0].failed
            if not failed and not reports[0].again:
                return self._numbers(reports, version, replaced, attempt)
        raise WeightSyncError(
            f"version {version} did not reach every engine in {self.tries} attempts: {failed or why}", failed
        )

    @staticmethod
    def _numbers(reports: Sequence[SyncReport], version: int, replaced: int, attempts: int) -> dict[str, float]:
        """Metrics of one push, over all senders."""
        sent, raw = sum(r.bytes for r in reports), sum(r.raw_bytes for r in reports)
        return {
            "weight_sync/version": float(version),
            "spent/sync_engine_s": reports[0].engine_seconds,
            "weight_sync/bytes": float(sent),
            "weight_sync/compressed_fraction": sent / raw if raw else 1.0,
            "weight_sync/senders": float(sum(r.bytes > 0 for r in reports)),
            "weight_sync/buckets": float(sum(r.buckets for r in reports)),
            "weight_sync/attempts": float(attempts),
            "weight_sync/replaced_engines": float(replaced),
        }
