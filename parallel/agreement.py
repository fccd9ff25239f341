"""Errors that all ranks share: a rank that raised alone would leave the others waiting in their next collective."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def together(otherwise: Callable[[str], Exception]) -> Iterator[None]:
    """Where a rank raises inside, every rank raises the first one's error; all ranks enter and leave.

    A ValueError, a user's mistake, stays one; any other error becomes `otherwise(its words)`.
    """
    mine: Exception | None = None
    try:
        yield
    except Exception as error:  # raised again below, on all ranks
        mine = error
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if mine is None else (isinstance(mine, ValueError), _words(mine)))
    failed = [rank for rank, error in enumerate(found) if error]
    if not failed:
        return
    refused, words = found[failed[0]]
    alone = found.count(found[failed[0]]) < len(found)
    kind = ValueError if refused else otherwise
    raise kind(f"rank {failed[0]}: {words}" if alone else words) from mine


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
