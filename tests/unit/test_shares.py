"""However a batch is cut over steps, replicas and micro-batches, the loss is one formula over all of it."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mrl.algorithms.objective import AGGREGATIONS
from mrl.core.types import RankBatch, TrainBatch
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, partition_step, split
from parallel.dims import ParallelDims

many = settings(deadline=None, max_examples=60, derandomize=True)
LONGEST = 31  # tokens that a response may have
aggregations = st.sampled_from(AGGREGATIONS)


@dataclass(frozen=True)
class Case:
    """A batch, what each response token is worth, and a way to cut it."""

    batch: TrainBatch
    values: list[NDArray[np.float64]]  # by row, [tokens of its response]
    dims: ParallelDims
    packing: Packing

    def shares(self, aggregation: str, batch: TrainBatch | None = None) -> list[RankBatch]:
        return partition_step(batch or self.batch, self.dims, self.packing, aggregation, LONGEST).shares


@st.composite
def cases(draw) -> Case:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    groups = np.repeat(np.arange(len(sizes)), sizes)[draw(st.permutations(range(sum(sizes))))]  # in any order
    count = len(groups)
    prompts = np.array(draw(st.lists(st.integers(1, 12), min_size=len(sizes), max_size=len(sizes))))[groups]
    responses = np.array(draw(st.lists(st.integers(1, 20), min_size=count, max_size=count)))
    counted = draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True).map(sorted))
    rows = [row for row in counted if draw(st.booleans())] if draw(st.booleans()) else counted  # others: advantage 0
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    trained = np.isin(np.arange(count), rows)
    batch = TrainBatch(
        block=None,
        prompt_lengths=prompts,
        response_lengths=responses + draw(st.sampled_from([0, 5])),  # some tokens of a response may be a tool's
        sampled_lengths=responses,
        groups=groups if draw(st.booleans()) else None,
        rows=np.array(rows, np.int64),
        counted=np.array(counted, np.int64),
    )
    values = [rng.normal(size=length) * trained[row] for row, length in enumerate(responses)]
    packing = Packing(
        draw(st.integers(1, 120)), draw(st.booleans()), CostModel(1.0, draw(st.sampled_from([0.0, 0.01, 3.0])))
    )
    return Case(batch, values, draw(dims()), packing)


@st.composite
def dims(draw) -> ParallelDims:
    dp, tp, pp = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    ep = draw(st.sampled_from([n for n in range(1, dp * tp + 1) if dp * tp % n == 0]))
    return ParallelDims(tp=tp, pp=pp, vpp=vpp, dp=dp, ep=ep, etp=1)


def formula(case: Case, counted: NDArray[np.int64], aggregation: str) -> float:
    """The loss of rows `counted`, of which those that are not trained are worth 0."""
    if aggregation == "token_mean":
        return float(np.concatenate([case.values[row] for row in counted]).mean())
    if aggregation == "fixed_length":
        return float(np.mean([case.values[row].sum() / LONGEST for row in counted]))
    return float(np.mean([case.values[row].mean() for row in counted]))


def added_up(case: Case, shares: list[RankBatch]) -> float:
    return float(
        sum(
            (share.weights[row] * case.values[row]).sum()
            for share in shares
            for rows in share.micro_batches
            for row in rows.tolist()
        )
    )


def trained_rows(shares: list[RankBatch]) -> list[int]:
    return sorted(row for share in shares for rows in share.micro_batches for row in rows.tolist())


@many
@given(cases(), aggregations)
def test_each_trained_row_is_in_one_micro_batch_of_one_replica(case, aggregation):
    shares = case.shares(aggregation)
    assert len(shares) == case.dims.dp
    assert trained_rows(shares) == case.batch.rows.tolist()


@many
@given(cases(), aggregations)
def test_shares_add_up_to_the_loss_of_the_whole_batch(case, aggregation):
    found = added_up(case, case.shares(aggregation))
    assert found == pytest.approx(formula(case, case.batch.counted, aggregation), rel=1e-12, abs=1e-12)


@many
@given(cases(), aggregations, st.integers(1, 5))
def test_each_mini_batch_is_a_step_of_its_own(case, aggregation, count):
    parts = split(case.batch, count)
    assert 1 <= len(parts) <= count
    assert sorted(row for part in parts for row in part.rows.tolist()) == case.batch.rows.tolist()
    assert sorted(row for part in parts for row in part.counted.tolist()) == case.batch.counted.tolist()
    for part in parts:
        shares = case.shares(aggregation, part)
        assert trained_rows(shares) == part.rows.tolist() and set(part.rows) <= set(part.counted)
        expected = formula(case, part.counted, aggregation)
        assert added_up(case, shares) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@many
@given(cases(), st.integers(2, 5))
def test_mini_batches_hold_whole_groups_and_even_numbers_of_them(case, count):
    groups = np.arange(len(case.batch.prompt_lengths)) if case.batch.groups is None else case.batch.groups
    parts = [set(groups[part.counted].tolist()) for part in split(case.batch, count)]
    whole = set(groups[case.batch.counted].tolist())
    assert len(parts) == min(count, len(whole)), "as many steps as were asked for, where there are groups for them"
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@many
@given(cases(), aggregations)
def test_denominators_count_the_rows_that_are_skipped(case, aggregation):
    weights = case.shares(aggregation)[0].weights
    assert all(np.array_equal(share.weights, weights) for share in case.shares(aggregation))
    lengths, counted = case.batch.sampled_lengths, case.batch.counted
    # The weights of all that is counted add up to 1, whatever is trained of it; of a fixed length, to the part that is used.
    whole = lengths[counted].mean() / LONGEST if aggregation == "fixed_length" else 1.0
    assert (weights * lengths)[counted].sum() == pytest.approx(whole, rel=1e-12)
    others = np.setdiff1d(np.arange(len(lengths)), counted)
    assert not weights[others].any()


@many
@given(cases(), aggregations)
def test_micro_batches_keep_step_where_the_layout_needs_it(case, aggregation):
    counts = [len(share.micro_batches) for share in case.shares(aggregation)]
    assert len(set(counts)) == 1 or not case.dims.lockstep
    assert all(count % case.dims.pp == 0 for count in counts) or case.dims.vpp == 1


@many
@given(cases(), aggregations)
def test_packs_stay_within_the_budget_and_the_numbers_are_theirs(case, aggregation):
    step = partition_step(case.batch, case.dims, case.packing, aggregation, LONGEST)
    prompts, responses = case.batch.prompt_lengths, case.batch.response_lengths
    computed = 0
    for share in step.shares:
        shared = case.packing.share_prompts and case.batch.groups is not None
        assert (share.groups is not None) == shared
        for rows in share.micro_batches:
            tokens = int(responses[rows].sum())
            if shared:
                tokens += sum(int(prompts[rows][share.groups[rows] == group][0]) for group in set(share.groups[rows]))
            else:
                tokens += int(prompts[rows].sum())
            assert tokens <= case.packing.max_tokens or len(rows) == 1, "only a lone row may be larger"
            computed += tokens
    numbers = step.numbers
    assert all(np.isfinite(value) for value in numbers.values())
    assert numbers["batch/computed_tokens"] >= computed, "two pieces of one group may meet again in a pack"
    assert {share.step_tokens for share in step.shares} == {max(1, int(numbers["batch/computed_tokens"]))}
    assert numbers["batch/micro_batches"] == max(len(share.micro_batches) for share in step.shares)
    assert numbers["batch/imbalance"] >= 1.0 and 0 <= numbers["batch/skipped_tokens_fraction"] <= 1
