"""Cuts a batch over data-parallel replicas and micro-batches, by length alone: pure arithmetic.

    units   rows that are packed together: one response, or responses that share one computed prompt
    parts   one per data-parallel replica, even by cost
    packs   the micro-batches of a part, each within a token budget, even by cost

The same three steps make parts, packs and the pieces of a large group: place the units greedily (`_place`), then move and
swap them while the heaviest part grows lighter (`_improve`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]

UNBOUNDED = np.inf
EVEN_ENOUGH = 1.0005  # heaviest over mean at which the search stops
CANDIDATES = (256, 4096)  # at most so many units of the heaviest part against so many others: bounds memory
# what a group may cost uncut, of the mean cost per part; above 1 because cuts repeat prompts that the mean counts once
GROUP_LIMITS = (1.5, 1.25, 1.0, 0.75, 0.5, 0.35, 0.25)


@dataclass(frozen=True)
class CostModel:
    """Cost of a causal sequence of L tokens, in any unit: linear * L + quadratic * L**2."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __call__(self, tokens: int) -> float:
        return self.linear * tokens + self.quadratic * tokens**2


@dataclass(frozen=True)
class Unit:
    """Rows that are packed together: one response, or several responses that share one computed prompt."""

    rows: tuple[int, ...]
    tokens: int  # that a pack holds: all of a lone sequence; or the shared prompt once, and the responses
    cost: float
    group: int = -1  # whose prompt is shared; -1: not shared


def make_units(  # noqa: PLR0913 - three columns of the batch, and what decides over cuts
    prompt_lengths: NDArray[np.int64],
    response_lengths: NDArray[np.int64],
    groups: NDArray[np.int64],
    rows: Rows,
    cost: CostModel,
    max_tokens: int,
    parts: int,
    share_prompts: bool,
) -> list[Unit]:
    """The units of `rows`; lengths (tokens) and groups are [B], indexed by row.

    With `share_prompts` a group is one unit, of P + sum R_i tokens. It is cut, and its prompt computed once per piece, where
    it is larger than `max_tokens`; and where it costs too much of a part's mean for the parts to be even. As a cut repeats a
    prompt, the coarsest of GROUP_LIMITS is taken that makes the heaviest part as light as any does.
    """
    lengths = prompt_lengths + response_lengths
    if not share_prompts:
        return [Unit((row,), int(lengths[row]), cost(int(lengths[row]))) for row in rows.tolist()]
    members: dict[int, list[int]] = {}
    for row in sorted(rows.tolist(), key=lambda r: (response_lengths[r], r)):
        members.setdefault(int(groups[row]), []).append(row)

    def cut(limit: float) -> list[Unit]:
        return [
            _shared_unit(piece, group, prompt_lengths, response_lengths, cost)
            for group, of_group in sorted(members.items())
            for piece in _pieces(of_group, int(prompt_lengths[of_group[0]]), response_lengths, cost, max_tokens, limit)
        ]

    whole = cut(UNBOUNDED)
    mean = _total_cost(whole) / parts
    if _heaviest(whole, parts) <= EVEN_ENOUGH * mean:  # no cut can do better: cuts add cost
        return whole
    choices = [whole, *(cut(mean * share) for share in GROUP_LIMITS)]
    heaviest = [_heaviest(units, parts) for units in choices]
    return next(units for units, load in zip(choices, heaviest, strict=True) if load <= EVEN_ENOUGH * min(heaviest))


def partition(units: Sequence[Unit], parts: int) -> list[list[Unit]]:
    """Give each unit to one of `parts`, even by cost; any number of both, so that some parts may be empty."""
    costs = np.array([unit.cost for unit in units], dtype=np.float64)
    home = _spread(costs, np.zeros(len(units), np.int64), parts, UNBOUNDED)
    assert home is not None, f"{len(units)} units did not fit into {parts} parts of any size"
    return _gather(units, home, parts)


def micro_batches(units: Sequence[Unit], max_tokens: int, count: int | None = None) -> list[list[Unit]]:
    """Cut units into packs of at most `max_tokens`, even by cost; a larger unit is a pack of its own.

    Without `count` there are as few packs as first-fit-decreasing needs; with it exactly so many, some perhaps empty.

    Raises:
        ValueError: `count` packs do not hold the units.
    """
    if count is None:
        count = _packs_needed(units, max_tokens)
    costs = np.array([unit.cost for unit in units], dtype=np.float64)
    tokens = np.array([unit.tokens for unit in units], dtype=np.int64)
    home = _spread(costs, tokens, count, max_tokens)
    if home is None:
        needed = _packs_needed(units, max_tokens)
        raise ValueError(
            f"{tokens.sum()} tokens need {needed} micro-batches of {max_tokens}, not {count}; raise one of them"
        )
    return _gather(units, home, count)


def plan(
    units: Sequence[Unit], parts: int, max_tokens: int, *, equal_counts: bool, multiple_of: int
) -> list[tuple[Rows, ...]]:
    """The micro-batches, as rows, of each of `parts` data-parallel replicas; each row of `units` is in exactly one.

    Args:
        equal_counts: every replica has as many micro-batches as the one that needs most.
        multiple_of: counts are rounded up to a multiple of it (a virtual pipeline needs that); zero stays zero.

    Micro-batches that only make up the number are empty.
    """
    replicas = partition(units, parts)
    counts = [_packs_needed(replica, max_tokens) for replica in replicas]
    if equal_counts:
        counts = [max(counts)] * parts
    counts = [-(-count // multiple_of) * multiple_of for count in counts]
    return [
        tuple(_in_order(pack) for pack in micro_batches(replica, max_tokens, count))
        for replica, count in zip(replicas, counts, strict=True)
    ]


def _shared_unit(
    rows: list[int],
    group: int,
    prompt_lengths: NDArray[np.int64],
    response_lengths: NDArray[np.int64],
    cost: CostModel,
) -> Unit:
    """The unit of rows that share one prompt; a response attends to the prompt and to itself."""
    prompt, responses = int(prompt_lengths[rows[0]]), [int(response_lengths[row]) for row in rows]
    assert (prompt_lengths[rows] == prompt).all(), f"group {group} has prompts of {set(prompt_lengths[rows])} tokens"
    return Unit(
        tuple(rows),
        prompt + sum(responses),
        cost(prompt) + sum(cost(prompt + r) - cost(prompt) for r in responses),
        group,
    )


def _pieces(
    rows: list[int], prompt: int, response_lengths: NDArray[np.int64], cost: CostModel, max_tokens: int, limit: float
) -> list[list[int]]:
    """Cut a group into the fewest even pieces within `max_tokens` and a cost of `limit`.

    A row that alone exceeds either is a piece. A piece is not cut for its cost once half of it is the prompt: that is
    what a cut repeats.
    """
    large = [[row] for row in rows if prompt + response_lengths[row] > max_tokens]
    rows = [row for row in rows if prompt + response_lengths[row] <= max_tokens]
    tokens = response_lengths[rows]
    costs = np.array([cost(prompt + int(r)) - cost(prompt) for r in tokens], dtype=np.float64)
    limit = max(limit - cost(prompt), cost(prompt))
    fewest = max(1, -(-int(tokens.sum()) // max(1, max_tokens - prompt)))
    for count in range(fewest, len(rows) + 1):
        home = _spread(costs, tokens, count, max_tokens - prompt)
        if home is None:
            continue
        pieces = _gather(range(len(rows)), home, count)
        if all(len(piece) == 1 or costs[piece].sum() <= limit for piece in pieces):
            return large + [[rows[i] for i in piece] for piece in pieces if piece]
    assert not rows, f"rows {rows} of at most {max_tokens} tokens with their prompt of {prompt} found no piece"
    return large


def _spread(costs: NDArray[np.float64], tokens: NDArray[np.int64], parts: int, capacity: float) -> Rows | None:
    """[U] which part each unit goes to, even by cost, within `capacity` tokens per part; None where that is not found.

    Costliest first to the lightest part; where room runs out, first-fit by tokens instead, which needs least of it.
    """
    home = _place(np.argsort(-costs, kind="stable"), costs, tokens, parts, capacity)
    if home is None:
        home = _place(np.argsort(-tokens, kind="stable"), np.zeros(len(costs)), tokens, parts, capacity)
    return None if home is None else _improve(home, costs, tokens, parts, capacity)


def _place(
    order: Rows, costs: NDArray[np.float64], tokens: NDArray[np.int64], parts: int, capacity: float
) -> Rows | None:
    """[U] homes: each unit in turn to the lightest part with room (the first of equals); None if one finds no room."""
    loads, full = np.zeros(parts), np.zeros(parts, np.int64)
    home = np.zeros(len(order), np.int64)
    for unit in order.tolist():
        room = (full + tokens[unit] <= capacity) | (full == 0)
        if not room.any():
            return None
        part = np.where(room, loads, np.inf).argmin()
        home[unit] = part
        loads[part] += costs[unit]
        full[part] += tokens[unit]
    return home


def _improve(home: Rows, costs: NDArray[np.float64], tokens: NDArray[np.int64], parts: int, capacity: float) -> Rows:
    """[U] homes after moves and swaps between the heaviest part and any other, best first, while the heaviest falls."""
    home, count = home.copy(), len(home)
    # one empty unit per part, after the real ones: a swap with it is a move
    costs, tokens = np.append(costs, np.zeros(parts)), np.append(tokens, np.zeros(parts, np.int64))
    for _ in range(2 * (count + parts)):
        at = np.append(home, np.arange(parts))
        loads, full = np.bincount(at, costs, parts), np.bincount(at, tokens, parts)
        heavy = loads.argmax()
        if loads[heavy] <= EVEN_ENOUGH * loads.mean():
            break
        ours, theirs = _thin(at == heavy, count, CANDIDATES[0]), _thin(at != heavy, count, CANDIDATES[1])
        moved = costs[ours, None] - costs[theirs]  # [ours, theirs] cost that leaves the heaviest
        shifted = tokens[ours, None] - tokens[theirs]
        highest = np.maximum(loads[heavy] - moved, loads[at[theirs]] + moved)
        highest[(full[heavy] - shifted > capacity) | (full[at[theirs]] + shifted > capacity)] = np.inf
        best = np.unravel_index(highest.argmin(), highest.shape)
        if highest[best] > loads[heavy] * (1 - 1e-9):
            break
        mine, other = ours[best[0]], theirs[best[1]]
        at[mine], at[other] = at[other], heavy
        home = at[:count]
    return home


def _thin(chosen: NDArray[np.bool_], count: int, most: int) -> Rows:
    """Indices that are chosen: of the first `count` about `most`, evenly spaced, and all that follow."""
    units = np.flatnonzero(chosen[:count])
    return np.append(units[:: len(units) // most + 1], count + np.flatnonzero(chosen[count:]))


def _packs_needed(units: Sequence[Unit], max_tokens: int) -> int:
    """Packs that first-fit-decreasing opens; at most 2 T / max_tokens + 1, as neighbours together exceed one pack."""
    tokens = np.array([unit.tokens for unit in units], dtype=np.int64)
    most = min(len(units), 2 * int(tokens.sum()) // max_tokens + 1)
    home = _place(np.argsort(-tokens, kind="stable"), np.zeros(len(units)), tokens, most, max_tokens)
    assert home is not None, f"first fit of {tokens.sum()} tokens into packs of {max_tokens} exceeded {most}"
    return int(home.max(initial=-1)) + 1


def _gather[T](items: Sequence[T], home: Rows, parts: int) -> list[list[T]]:
    """Items by the part they are at home in, in the order given."""
    gathered: list[list[T]] = [[] for _ in range(parts)]
    for item, part in zip(items, home.tolist(), strict=True):
        gathered[part].append(item)
    return gathered


def _in_order(pack: Sequence[Unit]) -> Rows:
    """Rows of a micro-batch: pieces of one group side by side, shortest first, so that equal lengths are neighbours."""
    shortest: dict[int, int] = {}
    for unit in pack:
        shortest[unit.group] = min(unit.tokens, shortest.get(unit.group, unit.tokens))

    def place(unit: Unit) -> tuple[int, int, int, tuple[int, ...]]:
        return (unit.tokens if unit.group < 0 else shortest[unit.group], unit.group, unit.tokens, unit.rows)

    return np.array([row for unit in sorted(pack, key=place) for row in unit.rows], dtype=np.int64)


def _total_cost(units: Iterable[Unit]) -> float:
    """Cost of units together."""
    return sum(unit.cost for unit in units)


def _heaviest(units: Sequence[Unit], parts: int) -> float:
    """Cost of the heaviest part of a partition."""
    return max(_total_cost(part) for part in partition(units, parts))
