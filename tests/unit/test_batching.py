"""A balanced batch contains every row once, stays within its token budgets, and has even loads."""

from dataclasses import dataclass
from time import process_time

import numpy as np
import pytest
from numpy.typing import NDArray

from mrl.core.types import TokenBlock
from mrl.data import batching
from mrl.data.batching import CostModel, PackingUnit, make_units, pack_units, partition_units, plan_micro_batches

SEVEN_B = CostModel(4.24e10, 6.02e5)  # FLOPs of training a 7B-like model
SEEDS = range(60)


@dataclass(frozen=True)
class Ragged:
    """A random batch with random settings of the planner. SEEDS cover all kinds of batches and of settings."""

    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    groups: NDArray[np.int64]
    rows: NDArray[np.int64]
    cost: CostModel
    max_tokens: int
    num_replicas: int
    share_prompts: bool

    @classmethod
    def of(cls, seed: int) -> "Ragged":
        draw = np.random.default_rng(seed)
        size, of_groups = int(draw.choice([0, 1, 2, 7, 40, 150])), int(draw.integers(1, 30))
        groups = draw.integers(0, of_groups, size)
        longest = int(draw.choice([1, 8, 300]))
        return cls(
            prompt_lengths=draw.integers(1, longest + 1, of_groups)[groups],
            response_lengths=draw.integers(0, longest + 1, size),
            groups=groups,
            rows=np.flatnonzero(draw.random(size) < draw.choice([0.1, 0.8, 1.0])),
            cost=CostModel(1.0, float(draw.choice([0.0, 0.01, 3.0]))),
            max_tokens=int(draw.choice([1, 20, 400, 5000])),
            num_replicas=int(draw.choice([1, 2, 3, 8, 64])),
            share_prompts=bool(draw.integers(2)),
        )

    def units(self) -> list[PackingUnit]:
        return make_units(**vars(self))

    def computed(self, rows: tuple[int, ...]) -> list[int]:
        """Return the position (from 1) of each token that is computed for rows in one pack. The prompt is computed once."""
        prompt = int(self.prompt_lengths[rows[0]])
        responses = [range(prompt + 1, prompt + int(self.response_lengths[row]) + 1) for row in rows]
        return list(range(1, prompt + 1)) + [position for response in responses for position in response]


def rows_of(units):
    return sorted(row for unit in units for row in unit.rows)


def costs_of(parts):
    return np.array([sum(unit.cost for unit in part) for part in parts])


def lone(lengths, cost=SEVEN_B):
    return [PackingUnit((row,), int(length), cost(int(length))) for row, length in enumerate(lengths)]


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_row_is_in_one_unit_of_one_group(seed):
    batch = Ragged.of(seed)
    units = batch.units()
    assert rows_of(units) == batch.rows.tolist()
    assert all(len(set(batch.groups[list(unit.rows)])) == 1 for unit in units)
    assert batch.share_prompts or all(len(unit.rows) == 1 for unit in units)


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_and_cost_of_a_unit_are_those_of_the_tokens_it_computes(seed):
    batch = Ragged.of(seed)
    for unit in batch.units():
        positions = np.array(batch.computed(unit.rows))
        assert unit.tokens == len(positions)
        each = batch.cost.linear + batch.cost.quadratic * (2 * positions - 1)  # 1 + 3 + ... + (2L - 1) is L^2
        assert unit.cost == pytest.approx(each.sum())


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_holds_every_row_once_within_the_budget(seed):
    batch = Ragged.of(seed)
    packs = [
        pack
        for equal, multiple in [(True, 1), (False, 4)]
        for replica in plan_micro_batches(
            batch.units(), batch.num_replicas, batch.max_tokens, equal_counts=equal, multiple_of=multiple
        )
        for pack in replica
    ]
    assert all(pack.dtype == np.int64 for pack in packs)
    assert sorted(row for pack in packs for row in pack.tolist()) == sorted(2 * batch.rows.tolist())
    tokens_of = {unit.rows: unit.tokens for unit in batch.units()}
    home = {row: rows for rows in tokens_of for row in rows}
    for pack in packs:
        units = {home[row] for row in pack.tolist()}
        assert sum(len(unit) for unit in units) == len(pack)  # no unit is divided
        assert sum(tokens_of[unit] for unit in units) <= batch.max_tokens or len(units) == 1
    assert all(len(rows) == 1 for rows, tokens in tokens_of.items() if tokens > batch.max_tokens)


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_has_the_required_numbers_of_micro_batches(seed):
    batch = Ragged.of(seed)
    units = batch.units()

    def counts(equal_counts, multiple_of):
        replicas = plan_micro_batches(
            units, batch.num_replicas, batch.max_tokens, equal_counts=equal_counts, multiple_of=multiple_of
        )
        return [len(replica) for replica in replicas]

    needed = [len(pack_units(part, batch.max_tokens)) for part in partition_units(units, batch.num_replicas)]
    assert counts(False, 1) == needed
    assert counts(True, 1) == [max(needed)] * batch.num_replicas
    assert counts(False, 4) == [4 * -(-count // 4) for count in needed]
    assert counts(True, 4) == [4 * -(-max(needed) // 4)] * batch.num_replicas


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_a_group_are_neighbors_and_others_are_sorted_by_length(seed):
    batch = Ragged.of(seed)
    lengths = batch.prompt_lengths + batch.response_lengths
    for replica in plan_micro_batches(
        batch.units(), batch.num_replicas, batch.max_tokens, equal_counts=False, multiple_of=1
    ):
        for pack in replica:
            if batch.share_prompts:
                groups = batch.groups[pack]
                assert (np.diff(groups) != 0).sum() + 1 == len(set(groups))
            else:
                assert (np.diff(lengths[pack]) >= 0).all()


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_batch_is_planned_identically(seed):
    first, second = (
        plan_micro_batches(
            Ragged.of(seed).units(),
            Ragged.of(seed).num_replicas,
            Ragged.of(seed).max_tokens,
            equal_counts=True,
            multiple_of=2,
        )
        for _ in range(2)
    )
    assert [[pack.tolist() for pack in replica] for replica in first] == [
        [pack.tolist() for pack in replica] for replica in second
    ]


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("seed", SEEDS)
def test_sharing_prompts_never_makes_the_heaviest_part_heavier_than_sharing_them_without_cuts(seed):
    batch = Ragged.of(seed)
    uncut = make_units(**{**vars(batch), "num_replicas": 1, "share_prompts": True})
    cut = make_units(**{**vars(batch), "share_prompts": True})
    heaviest, before = (costs_of(partition_units(units, batch.num_replicas)).max() for units in (cut, uncut))
    assert heaviest <= before * (1 + 1e-9)
    assert len(cut) >= len(uncut)


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_requested_number_of_packs_is_returned_exactly(seed, extra):
    batch = Ragged.of(seed)
    units = batch.units()
    least = len(pack_units(units, batch.max_tokens))
    packs = pack_units(units, batch.max_tokens, least + extra)
    assert len(packs) == least + extra
    assert rows_of([unit for pack in packs for unit in pack]) == batch.rows.tolist()
    assert all(sum(unit.tokens for unit in pack) <= batch.max_tokens or len(pack) == 1 for pack in packs)


def group_of(prompt, responses, max_tokens, parts, cost=None):
    size = len(responses)
    return make_units(
        np.full(size, prompt),
        np.array(responses),
        np.zeros(size, np.int64),
        np.arange(size),
        cost or CostModel(),
        max_tokens,
        parts,
        True,
    )


def test_a_group_within_the_budget_is_one_unit():
    assert [unit.rows for unit in group_of(10, [5, 1, 3], 19, 1)] == [(1, 2, 0)]


def test_a_group_over_the_budget_is_cut_into_the_fewest_even_pieces():
    units = group_of(10, [10] * 8, 50, 1)
    assert [(len(unit.rows), unit.tokens) for unit in units] == [(4, 50), (4, 50)]
    units = group_of(10, [10] * 8, 49, 1)
    assert sorted(len(unit.rows) for unit in units) == [2, 3, 3]


def test_a_row_over_the_budget_is_a_unit_and_the_others_share():
    assert [unit.rows for unit in group_of(10, [5, 100, 3], 50, 1)] == [(1,), (2, 0)]


def test_a_group_is_cut_for_parts_that_would_be_empty_but_no_finer_than_helps():
    units = group_of(10, [100] * 8, 10_000, 4)
    assert [len(unit.rows) for unit in units] == [2, 2, 2, 2]
    loads = costs_of(partition_units(units, 4))
    assert loads.max() == loads.min() == 210


def test_a_group_that_is_mostly_prompt_is_not_cut_for_its_cost():
    assert len(group_of(1000, [10] * 8, 10_000, 8)) == 1


def test_even_groups_that_fill_the_parts_are_not_cut():
    units = make_units(
        np.full(64, 20), np.full(64, 100), np.arange(64) // 8, np.arange(64), CostModel(), 10_000, 8, True
    )
    assert [len(unit.rows) for unit in units] == [8] * 8


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 64])
def test_partition_units_puts_every_unit_into_one_part(parts):
    units = lone(np.random.default_rng(0).integers(1, 50, 37))
    cut = partition_units(units, parts)
    assert len(cut) == parts
    assert rows_of([unit for part in cut for unit in part]) == list(range(37))


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.3])
@pytest.mark.parametrize("cost", [CostModel(), SEVEN_B], ids=["tokens", "flops"])
@pytest.mark.parametrize("parts", [8, 64])
def test_parts_are_within_two_percent_of_the_best_that_the_longest_sequence_permits(parts, cost, sigma, seed):
    lengths = np.random.default_rng(seed).lognormal(np.log(2048), sigma, 512).clip(512, 32768).astype(np.int64)
    units = lone(lengths, cost)
    start = process_time()
    loads = costs_of(partition_units(units, parts))
    assert process_time() - start < 1
    assert loads.max() <= 1.02 * max(loads.mean(), max(unit.cost for unit in units))


def test_micro_batches_are_even_by_cost_where_the_budget_leaves_room():
    lengths = np.random.default_rng(0).lognormal(np.log(2048), 0.8, 64).clip(512, 8192).astype(np.int64)
    loads = costs_of(pack_units(lone(lengths), 32768, 6))
    assert loads.max() <= 1.02 * loads.mean()


def test_too_few_micro_batches_are_an_error_with_the_number_needed():
    with pytest.raises(ValueError, match="30 tokens need 3 micro-batches of 10 tokens, but only 2"):
        pack_units(lone([10, 10, 10]), 10, 2)


def test_without_rows_there_are_no_micro_batches():
    none = np.array([], dtype=np.int64)
    units = make_units(none, none, none, none, CostModel(), 10, 2, True)
    assert units == pack_units(units, 10) == []
    assert plan_micro_batches(units, 2, 10, equal_counts=True, multiple_of=4) == [(), ()]
    assert pack_units(units, 10, 2) == [[], []]


def test_a_replica_without_rows_gets_empty_micro_batches_only_where_counts_are_equal():
    units = lone([5, 5])
    assert [len(replica) for replica in plan_micro_batches(units, 3, 10, equal_counts=False, multiple_of=2)] == [
        2,
        2,
        0,
    ]
    filled = plan_micro_batches(units, 3, 10, equal_counts=True, multiple_of=2)
    assert [[len(pack) for pack in replica] for replica in filled] == [[1, 0], [1, 0], [0, 0]]


def test_a_block_keeps_every_token_and_selects_rows():
    prompts, responses = [[1, 2], [3], [4, 5, 6]], [[10], [11, 12], [13]]
    block = TokenBlock.from_lists(prompts, responses, [[-0.1], [-0.2, -0.3], [-0.4]])
    assert block.tokens.tolist() == [1, 2, 10, 3, 11, 12, 4, 5, 6, 13]
    part = block.select(np.array([2, 1]))
    assert [part.prompt(i).tolist() for i in range(2)] == [[4, 5, 6], [3]]
    assert [part.response(i).tolist() for i in range(2)] == [[13], [11, 12]]
    np.testing.assert_allclose(part.rollout_logprobs, [-0.4, -0.2, -0.3])
    assert len(block.tokens) == sum(map(len, prompts + responses))  # no padding


def test_the_constants_of_the_search_are_pinned():
    """With another value, other rows share a micro-batch, which changes the rounding in every run."""
    assert (batching.EVEN_ENOUGH, batching.CANDIDATES) == (1.0005, (256, 4096))
    assert batching.GROUP_LIMITS == (1.5, 1.25, 1.0, 0.75, 0.5, 0.35, 0.25)
    assert vars(CostModel()) == {"linear": 1.0, "quadratic": 0.0}
    assert PackingUnit((0,), 1, 1.0).group == -1


@pytest.mark.parametrize(
    ("units", "loads"),  # (tokens, cost) of each unit; expected costs of three packs of at most 10 tokens
    [
        ([(1, 6), (9, 8), (1, 5), (8, 9), (4, 3)], [9, 9, 13]),
        ([(5, 1), (1, 1), (5, 2), (5, 6), (5, 9), (9, 1)], [2, 8, 10]),
    ],
)
def test_a_swap_may_fill_a_pack_exactly(units, loads):
    """The best division has a pack of exactly `max_tokens`: the heaviest pack, or the pack that takes a unit from this pack."""
    packs = pack_units([PackingUnit((row,), tokens, cost) for row, (tokens, cost) in enumerate(units)], 10, 3)
    assert sorted(sum(unit.cost for unit in pack) for pack in packs) == loads


@pytest.mark.parametrize(("selected", "most", "step"), [(200, 256, 1), (255, 256, 1), (256, 256, 2), (600, 256, 3)])
def test_a_search_step_compares_evenly_spaced_items_and_all_empty_ones(selected, most, step):
    flags = np.ones(selected + 2, bool)
    expected = [*range(0, selected, step), selected, selected + 1]
    assert batching._sample_items(flags, selected, most).tolist() == expected
