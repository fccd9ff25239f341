"""Balances a batch over data-parallel replicas and divides the rows of each replica into micro-batches.

    unit   the rows that must go into the same pack. Normally, a unit is one row. With shared prompts, it is a group (all
           responses to one prompt) or a piece of a group, with one copy of the prompt. If the loss compares the responses of a
           group, it is the whole group
    part   the units of one data-parallel replica; all parts have nearly equal cost
    pack   the units of one micro-batch, within a token budget; all packs of a part have nearly equal cost

Only the lengths of the sequences are needed. One search (`_assign`) serves three purposes: it assigns units to parts, units to
packs, and the rows of a large group to the pieces into which the group is cut. In the search, an item is the unit or the row that
is assigned, and a bin is the part, the pack or the piece that gets the item. First the search assigns each item to the lightest
bin (`_assign_greedily`). Then it moves and swaps items while this makes the heaviest bin lighter (`_rebalance`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

UNBOUNDED = np.inf  # value of a limit (of tokens or of cost) that allows everything
EVEN_ENOUGH = 1.0005  # the search stops when the heaviest bin costs at most this factor times the mean
# A search step compares at most about CANDIDATES[0] items of the heaviest bin with at most about CANDIDATES[1] items of all
# other bins. This limits the memory of the search.
CANDIDATES = (256, 4096)
# Limits for the cost of a group, relative to the mean cost of a part. make_units tries each limit and cuts the groups above it.
# Each piece computes the prompt again, so many small pieces can make the heaviest part heavier. Limits above 1 cut fewer groups.
GROUP_LIMITS = (1.5, 1.25, 1.0, 0.75, 0.5, 0.35, 0.25)


@dataclass(frozen=True)
class CostModel:
    """Cost of computing a causal sequence of L tokens: linear * L + quadratic * L**2. Only ratios of costs matter."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __call__(self, tokens: int) -> float:
        return self.linear * tokens + self.quadratic * tokens**2


@dataclass(frozen=True)
class PackingUnit:
    """Rows that must go into the same pack: a single row, rows of a group that share one copy of the prompt, or a whole group."""

    rows: tuple[int, ...]  # indices of responses in the batch
    tokens: int  # tokens in the pack: the prompt (only once if it is shared), and all responses
    cost: float
    group: int = -1  # the group whose prompt is shared; -1: no prompt is shared


def make_units(  # noqa: PLR0913 - three columns of the batch, and the settings of the packing
    prompt_lengths: NDArray[np.int64],
    response_lengths: NDArray[np.int64],
    groups: NDArray[np.int64],
    rows: Ints,
    cost: CostModel,
    max_tokens: int,
    num_replicas: int,
    share_prompts: bool,
) -> list[PackingUnit]:
    """Return the units of `rows`.

    `prompt_lengths`, `response_lengths` and `groups` have one number for each response of the whole batch.

    Without `share_prompts`, every row is a unit. With `share_prompts`, every group is a unit, which contains the prompt once. A
    group is cut into several units if it has more than `max_tokens` tokens, or if its cost would make the costs of the replicas
    uneven. Each of these units computes the prompt again, so cuts add cost. So the function tries several choices: to cut only
    for `max_tokens`, and to cut at each of the GROUP_LIMITS. Let c be the lowest cost of the heaviest part over all choices.
    Among the choices whose heaviest part costs at most EVEN_ENOUGH * c, the function takes the choice with the largest limit.
    """
    lengths = prompt_lengths + response_lengths
    if not share_prompts:
        return [PackingUnit((row,), int(lengths[row]), cost(int(lengths[row]))) for row in rows.tolist()]
    members: dict[int, list[int]] = {}
    for row in sorted(rows.tolist(), key=lambda r: (response_lengths[r], r)):
        members.setdefault(int(groups[row]), []).append(row)

    def cut(limit: float) -> list[PackingUnit]:
        return [
            _shared_unit(piece, group, prompt_lengths, response_lengths, cost)
            for group, group_rows in sorted(members.items())
            for piece in _split_group(
                group_rows, int(prompt_lengths[group_rows[0]]), response_lengths, cost, max_tokens, limit
            )
        ]

    uncut = cut(UNBOUNDED)
    mean = _total_cost(uncut) / num_replicas
    if _heaviest_cost(uncut, num_replicas) <= EVEN_ENOUGH * mean:  # cuts add cost, so they cannot help
        return uncut
    choices = [uncut, *(cut(mean * limit) for limit in GROUP_LIMITS)]
    heaviest = [_heaviest_cost(units, num_replicas) for units in choices]
    return next(units for units, load in zip(choices, heaviest, strict=True) if load <= EVEN_ENOUGH * min(heaviest))


def make_whole_units(
    prompt_lengths: NDArray[np.int64],
    response_lengths: NDArray[np.int64],
    groups: NDArray[np.int64],
    rows: Ints,
    cost: CostModel,
    share_prompts: bool,
) -> list[PackingUnit]:
    """Return a unit for each group, with its rows in ascending order. A group is never cut, whatever its size.

    Losses that compare the responses of a group, such as the pairs of DPO, need these units (TrainBatch.whole_groups).

    A group whose rows occur n times in `rows` gets n units. `prompt_lengths`, `response_lengths` and `groups` have one number
    for each response of the whole batch. With `share_prompts`, a unit contains the prompt once.
    """
    members: dict[tuple[int, int], list[int]] = {}  # (group, how often its rows occurred before) -> rows
    occurrences: dict[int, int] = {}
    for row in sorted(rows.tolist()):
        earlier = occurrences.get(row, 0)
        occurrences[row] = earlier + 1
        members.setdefault((int(groups[row]), earlier), []).append(row)
    if share_prompts:
        return [
            _shared_unit(unit, group, prompt_lengths, response_lengths, cost)
            for (group, _), unit in sorted(members.items())
        ]
    lengths = prompt_lengths + response_lengths
    return [
        PackingUnit(tuple(unit), int(lengths[unit].sum()), sum(cost(int(lengths[row])) for row in unit))
        for _, unit in sorted(members.items())
    ]


def partition_units(units: Sequence[PackingUnit], parts: int) -> list[list[PackingUnit]]:
    """Distribute units over `parts` parts of nearly equal cost. If there are fewer units than parts, some parts are empty."""
    costs = np.array([unit.cost for unit in units], dtype=np.float64)
    assignment = _assign(costs, np.zeros(len(units), np.int64), parts, UNBOUNDED)
    assert assignment is not None, f"{len(units)} units did not fit into {parts} parts of any size"
    return _collect(units, assignment, parts)


def pack_units(units: Sequence[PackingUnit], max_tokens: int, count: int | None = None) -> list[list[PackingUnit]]:
    """Distribute units over packs of at most `max_tokens` tokens and nearly equal cost.

    A unit with more than `max_tokens` tokens gets a pack of its own. Without `count`, first-fit-decreasing decides the number
    of packs. With `count`, exactly `count` packs are returned, and some may be empty.

    Raises:
        ValueError: the units do not fit into `count` packs.
    """
    if count is None:
        count = _count_packs(units, max_tokens)
    costs = np.array([unit.cost for unit in units], dtype=np.float64)
    tokens = np.array([unit.tokens for unit in units], dtype=np.int64)
    assignment = _assign(costs, tokens, count, max_tokens)
    if assignment is None:
        needed = _count_packs(units, max_tokens)
        raise ValueError(
            f"{tokens.sum()} tokens need {needed} micro-batches of {max_tokens} tokens, but only {count} are "
            "allowed; raise the number of micro-batches or the token budget."
        )
    return _collect(units, assignment, count)


def plan_micro_batches(
    units: Sequence[PackingUnit], num_replicas: int, max_tokens: int, *, equal_counts: bool, multiple_of: int
) -> list[tuple[Ints, ...]]:
    """Return a tuple of micro-batches for each of the data-parallel replicas. A micro-batch is an array of rows.

    Every unit is in exactly one micro-batch.

    Args:
        equal_counts: give every replica as many micro-batches as the replica that needs the most micro-batches.
        multiple_of: round the number of micro-batches of each replica up to a multiple of this number, as a virtual
            pipeline requires.

    If `equal_counts` or `multiple_of` adds micro-batches, the units of a replica are spread over all its micro-batches, of which
    some may be empty.
    """
    replicas = partition_units(units, num_replicas)
    counts = [_count_packs(replica, max_tokens) for replica in replicas]
    if equal_counts:
        counts = [max(counts)] * num_replicas
    counts = [-(-count // multiple_of) * multiple_of for count in counts]
    return [
        tuple(_ordered_rows(pack) for pack in pack_units(replica, max_tokens, count))
        for replica, count in zip(replicas, counts, strict=True)
    ]


def _shared_unit(
    rows: list[int],
    group: int,
    prompt_lengths: NDArray[np.int64],
    response_lengths: NDArray[np.int64],
    cost: CostModel,
) -> PackingUnit:
    """Return the unit of rows that share one prompt. Each response attends to the prompt and to itself."""
    prompt, responses = int(prompt_lengths[rows[0]]), [int(response_lengths[row]) for row in rows]
    assert (prompt_lengths[rows] == prompt).all(), f"group {group} has prompts of {set(prompt_lengths[rows])} tokens"
    return PackingUnit(
        tuple(rows),
        prompt + sum(responses),
        cost(prompt) + sum(cost(prompt + r) - cost(prompt) for r in responses),
        group,
    )


def _split_group(
    rows: list[int], prompt: int, response_lengths: NDArray[np.int64], cost: CostModel, max_tokens: int, limit: float
) -> list[list[int]]:
    """Split a group into as few pieces as possible. A piece has at most `max_tokens` tokens and a cost of at most `limit`.

    All pieces have nearly equal cost. A row that alone exceeds `max_tokens` or `limit` becomes its own piece. The responses of a
    piece may always cost as much as its prompt, even if the piece then exceeds `limit`: smaller pieces would spend more on the
    prompt than on responses.
    """
    too_long = [[row] for row in rows if prompt + response_lengths[row] > max_tokens]
    rows = [row for row in rows if prompt + response_lengths[row] <= max_tokens]
    tokens = response_lengths[rows]
    costs = np.array([cost(prompt + int(r)) - cost(prompt) for r in tokens], dtype=np.float64)
    limit = max(limit - cost(prompt), cost(prompt))
    fewest = max(1, -(-int(tokens.sum()) // max(1, max_tokens - prompt)))
    for count in range(fewest, len(rows) + 1):
        assignment = _assign(costs, tokens, count, max_tokens - prompt)
        if assignment is None:
            continue
        pieces = _collect(range(len(rows)), assignment, count)
        if all(len(piece) == 1 or costs[piece].sum() <= limit for piece in pieces):
            return too_long + [[rows[i] for i in piece] for piece in pieces if piece]
    assert not rows, f"rows {rows} are in no piece (max_tokens={max_tokens}, prompt of {prompt} tokens)"
    return too_long


def _assign(costs: NDArray[np.float64], tokens: NDArray[np.int64], num_bins: int, capacity: float) -> Ints | None:
    """Return the index of the bin of each item: [number of items].

    The bins have nearly equal cost, and at most `capacity` tokens each.

    Items are assigned in order of decreasing cost, each to the lightest bin. If the last items do not fit, all items are assigned
    again in order of decreasing tokens, each to the first bin with room. This can fit more items. Returns None if this also
    fails.
    """
    assignment = _assign_greedily(np.argsort(-costs, kind="stable"), costs, tokens, num_bins, capacity)
    if assignment is None:
        no_costs = np.zeros(len(costs))
        assignment = _assign_greedily(np.argsort(-tokens, kind="stable"), no_costs, tokens, num_bins, capacity)
    return None if assignment is None else _rebalance(assignment, costs, tokens, num_bins, capacity)


def _assign_greedily(
    order: Ints, costs: NDArray[np.float64], tokens: NDArray[np.int64], num_bins: int, capacity: float
) -> Ints | None:
    """Assign the items, in `order`, each to the lightest bin that has room.

    Returns the index of the bin of each item, [number of items], or None if an item does not fit into any bin. If several bins
    are equally light, the first one is used. An empty bin has room for an item of any size.
    """
    loads, used = np.zeros(num_bins), np.zeros(num_bins, np.int64)
    assignment = np.zeros(len(order), np.int64)
    for item in order.tolist():
        room = (used + tokens[item] <= capacity) | (used == 0)
        if not room.any():
            return None
        lightest = np.where(room, loads, np.inf).argmin()
        assignment[item] = lightest
        loads[lightest] += costs[item]
        used[lightest] += tokens[item]
    return assignment


def _rebalance(
    assignment: Ints, costs: NDArray[np.float64], tokens: NDArray[np.int64], num_bins: int, capacity: float
) -> Ints:
    """Return the index of the bin of each item, [number of items], after moves and swaps that made the heaviest bin lighter."""
    assignment, count = assignment.copy(), len(assignment)
    # One empty item per bin is appended to the real items. A swap with an empty item is a move.
    costs, tokens = np.append(costs, np.zeros(num_bins)), np.append(tokens, np.zeros(num_bins, np.int64))
    for _ in range(2 * (count + num_bins)):
        bin_of = np.append(assignment, np.arange(num_bins))
        loads, used = np.bincount(bin_of, costs, num_bins), np.bincount(bin_of, tokens, num_bins)
        heavy = loads.argmax()
        if loads[heavy] <= EVEN_ENOUGH * loads.mean():
            break
        ours, theirs = (
            _sample_items(bin_of == heavy, count, CANDIDATES[0]),
            _sample_items(bin_of != heavy, count, CANDIDATES[1]),
        )
        # Compare all swaps of one of our items (of the heaviest bin) with one of their items (of other bins).
        moved = costs[ours, None] - costs[theirs]  # [ours, theirs] cost that a swap takes from the heaviest bin
        shifted = tokens[ours, None] - tokens[theirs]  # the same for tokens
        highest = np.maximum(loads[heavy] - moved, loads[bin_of[theirs]] + moved)
        highest[(used[heavy] - shifted > capacity) | (used[bin_of[theirs]] + shifted > capacity)] = np.inf
        best = np.unravel_index(highest.argmin(), highest.shape)
        if highest[best] > loads[heavy] * (1 - 1e-9):
            break
        mine, other = ours[best[0]], theirs[best[1]]
        bin_of[mine], bin_of[other] = bin_of[other], heavy
        assignment = bin_of[:count]
    return assignment


def _sample_items(selected: NDArray[np.bool_], count: int, most: int) -> Ints:
    """Return the indices of some of the selected items.

    Indices below `count` are real items: at most `most` of them are returned, evenly spaced. Indices from `count` on are empty
    items: all selected empty items are returned.
    """
    items = np.flatnonzero(selected[:count])
    return np.append(items[:: len(items) // most + 1], count + np.flatnonzero(selected[count:]))


def _count_packs(units: Sequence[PackingUnit], max_tokens: int) -> int:
    """Return the number of packs that first-fit-decreasing needs.

    For T tokens, the number is at most 2 T / max_tokens + 1, because two successive packs together have more than `max_tokens`
    tokens.
    """
    tokens = np.array([unit.tokens for unit in units], dtype=np.int64)
    most = min(len(units), 2 * int(tokens.sum()) // max_tokens + 1)
    assignment = _assign_greedily(np.argsort(-tokens, kind="stable"), np.zeros(len(units)), tokens, most, max_tokens)
    assert assignment is not None, f"first fit of {tokens.sum()} tokens into packs of {max_tokens} exceeded {most}"
    return int(assignment.max(initial=-1)) + 1


def _collect[T](items: Sequence[T], assignment: Ints, num_bins: int) -> list[list[T]]:
    """Return the items of each bin, in the order of `items`. `assignment`: index of the bin of each item."""
    collected: list[list[T]] = [[] for _ in range(num_bins)]
    for item, number in zip(items, assignment.tolist(), strict=True):
        collected[number].append(item)
    return collected


def _ordered_rows(pack: Sequence[PackingUnit]) -> Ints:
    """Return the rows of a micro-batch. Short units come first, and the pieces of a group are next to each other."""
    shortest: dict[int, int] = {}
    for unit in pack:
        shortest[unit.group] = min(unit.tokens, shortest.get(unit.group, unit.tokens))

    def sort_key(unit: PackingUnit) -> tuple[int, int, int, tuple[int, ...]]:
        return (unit.tokens if unit.group < 0 else shortest[unit.group], unit.group, unit.tokens, unit.rows)

    return np.array([row for unit in sorted(pack, key=sort_key) for row in unit.rows], dtype=np.int64)


def _total_cost(units: Iterable[PackingUnit]) -> float:
    """Return the summed cost of units."""
    return sum(unit.cost for unit in units)


def _heaviest_cost(units: Sequence[PackingUnit], parts: int) -> float:
    """Return the cost of the heaviest part if `partition_units` distributes the units over `parts` parts."""
    return max(map(_total_cost, partition_units(units, parts)))
