"""The trainer ranks of a weight sync, as one: what one of them learns, all know; what fails on one fails on all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mrl.weight_sync.errors import SyncError, WeightMismatchError

log = logging.getLogger(__name__)


class Team:
    """All ranks of the default group, over a gloo group of their own, whose patience is longer than every wait of a sync."""

    def __init__(self, timeout_s: float) -> None:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def first[T](self, call: Callable[[], T]) -> T:
        """What rank 0 makes of `call`, on every rank; its error too."""
        outcome: list[Any] = [_outcome(call) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        return _unpacked(outcome[0])

    def everyone[T](self, call: Callable[[], T]) -> list[T]:
        """What each rank makes of its own `call`, by rank, on every rank; the first rank's error that has one."""
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, _outcome(call), group=self._group)
        return [_unpacked(outcome) for outcome in outcomes]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except (SyncError, WeightMismatchError, ValueError) as error:
        return None, error
    except Exception as error:  # told to all ranks, which raise it: one that is left alone would wait for the others
        log.exception("weight sync")
        return None, SyncError(f"{type(error).__name__}: {error}")


def _unpacked(outcome: tuple[Any, Exception | None]) -> Any:
    result, error = outcome
    if error is not None:
        raise error
    return result
