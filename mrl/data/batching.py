"""Cuts a batch over data-parallel replicas and micro-batches, by length alone: pure arithmetic."""

import heapq

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


def partition(lengths: NDArray[np.int64], rows: Rows, parts: int) -> list[Rows]:
    """Give each of `rows` to one of `parts` so that token counts are even: longest first, to the lightest part.

    Any number of rows and parts is allowed; with fewer rows than parts some parts are empty.
    """
    heap = [(0, part) for part in range(parts)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for row in sorted(rows.tolist(), key=lambda r: (-lengths[r], r)):
        load, part = heapq.heappop(heap)
        chosen[part].append(row)
        heapq.heappush(heap, (load + int(lengths[row]), part))
    return [np.array(sorted(part), dtype=np.int64) for part in chosen]


def micro_batches(lengths: NDArray[np.int64], rows: Rows, max_tokens: int) -> list[Rows]:
    """Cut `rows` into packs of at most `max_tokens`, rows of like length together; a longer row is a pack of its own.

    Rows come sorted by length, so that equal lengths are neighbours in a pack.
    """
    packs: list[list[int]] = []
    load = max_tokens + 1
    for row in sorted(rows.tolist(), key=lambda r: (lengths[r], r)):
        if load + lengths[row] > max_tokens:
            packs.append([])
            load = 0
        packs[-1].append(row)
        load += int(lengths[row])
    return [np.array(pack, dtype=np.int64) for pack in packs]
