"""The loss of a batch does not depend on how its rows are distributed over steps, replicas and micro-batches."""

import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mrl.algorithms.objective import AGGREGATIONS, TokenWeighting
from mrl.core.types import ReplicaBatch, TrainBatch
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import (
    Packing,
    StepPartition,
    merge_replica_batches,
    partition_step,
    split_mini_batches,
    step_weights,
)
from parallel.dims import ParallelDims

many = settings(max_examples=60)
MAX_RESPONSE_TOKENS = 31
aggregations = st.sampled_from(list(AGGREGATIONS))


@dataclass(frozen=True)
class Case:
    """A batch, the value of each response token, and a way to partition the batch."""

    batch: TrainBatch
    values: list[NDArray[np.float64]]  # for each row, one value for each token of the response
    dims: ParallelDims
    packing: Packing

    def replica_batches(self, aggregation: str, batch: TrainBatch | None = None) -> list[ReplicaBatch]:
        return self.partition(aggregation, batch).replica_batches

    def partition(self, aggregation: str, batch: TrainBatch | None = None) -> StepPartition:
        weighting = TokenWeighting(AGGREGATIONS[aggregation], MAX_RESPONSE_TOKENS)
        return partition_step(batch or self.batch, self.dims, self.packing, weighting)


@st.composite
def cases(draw) -> Case:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    groups = np.repeat(np.arange(len(sizes)), sizes)[draw(st.permutations(range(sum(sizes))))]  # rows in random order
    count = len(groups)
    prompts = np.array(draw(st.lists(st.integers(1, 12), min_size=len(sizes), max_size=len(sizes))))[groups]
    responses = np.array(draw(st.lists(st.integers(1, 20), min_size=count, max_size=count)))
    denominator_rows = draw(
        st.lists(st.integers(0, count - 1), min_size=1).map(sorted)
    )  # some rows count several times
    different = sorted(set(denominator_rows))
    rows = [row for row in different if draw(st.booleans())] if draw(st.booleans()) else different
    # Rows of `different` that are not in `rows` have advantage 0.
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    trained = np.isin(np.arange(count), rows)
    batch = TrainBatch(
        block=None,
        prompt_lengths=prompts,
        response_lengths=responses + draw(st.sampled_from([0, 5])),  # a response may contain tokens of tool results
        sampled_lengths=responses,
        groups=groups if draw(st.booleans()) else None,
        rows=np.array(rows, np.int64),
        denominator_rows=np.array(denominator_rows, np.int64),
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


def formula(case: Case, denominator_rows: NDArray[np.int64], aggregation: str) -> float:
    """Return the loss, normalized over `denominator_rows`. Rows that are not trained contribute 0."""
    if aggregation == "token_mean":
        return float(np.concatenate([case.values[row] for row in denominator_rows]).mean())
    if aggregation in ("fixed_length", "sequence_sum"):
        divisor = MAX_RESPONSE_TOKENS if aggregation == "fixed_length" else 1
        return float(np.mean([case.values[row].sum() / divisor for row in denominator_rows]))
    if aggregation == "token_sum":
        return float(sum(case.values[row].sum() for row in denominator_rows))
    return float(np.mean([case.values[row].mean() for row in denominator_rows]))


def weighted_sum(case: Case, batches: list[ReplicaBatch]) -> float:
    return float(
        sum(
            (batch.weights[row] * case.values[row]).sum()
            for batch in batches
            for rows in batch.micro_batches
            for row in rows.tolist()
        )
    )


def trained_rows(batches: list[ReplicaBatch]) -> list[int]:
    return sorted(row for batch in batches for rows in batch.micro_batches for row in rows.tolist())


@many
@given(cases(), aggregations)
def test_each_trained_row_is_in_one_micro_batch_of_one_replica(case, aggregation):
    batches = case.replica_batches(aggregation)
    assert len(batches) == case.dims.dp
    assert trained_rows(batches) == case.batch.rows.tolist()


@pytest.mark.extended
@many
@given(cases(), aggregations)
def test_the_batches_of_all_ranks_sum_to_the_loss_of_the_whole_batch(case, aggregation):
    total = weighted_sum(case, case.replica_batches(aggregation))
    assert total == pytest.approx(formula(case, case.batch.denominator_rows, aggregation), rel=1e-12, abs=1e-12)


@many
@given(cases(), aggregations, st.integers(1, 5))
def test_each_mini_batch_has_its_own_loss(case, aggregation, count):
    parts = split_mini_batches(case.batch, count)
    assert 1 <= len(parts) <= count
    assert sorted(row for part in parts for row in part.rows.tolist()) == case.batch.rows.tolist()
    assert (
        sorted(row for part in parts for row in part.denominator_rows.tolist()) == case.batch.denominator_rows.tolist()
    )
    for part in parts:
        batches = case.replica_batches(aggregation, part)
        assert trained_rows(batches) == part.rows.tolist() and set(part.rows) <= set(part.denominator_rows)
        expected = formula(case, part.denominator_rows, aggregation)
        assert weighted_sum(case, batches) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@many
@given(cases(), st.integers(2, 5))
def test_mini_batches_hold_whole_groups_and_differ_by_at_most_one_group(case, count):
    groups = np.arange(len(case.batch.prompt_lengths)) if case.batch.groups is None else case.batch.groups
    parts = [set(groups[part.denominator_rows].tolist()) for part in split_mini_batches(case.batch, count)]
    whole = set(groups[case.batch.denominator_rows].tolist())
    assert len(parts) == min(count, len(whole)), "there are as many steps as asked for, if there are enough groups"
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@many
@given(cases(), aggregations)
def test_the_loss_is_normalized_over_skipped_rows_too(case, aggregation):
    weights = case.replica_batches(aggregation)[0].weights
    assert all(np.array_equal(batch.weights, weights) for batch in case.replica_batches(aggregation))
    lengths, denominator_rows = case.batch.sampled_lengths, case.batch.denominator_rows
    mean = lengths[denominator_rows].mean()
    # Over all `denominator_rows`, the token weights sum to 1, except for three aggregations.
    sums = dict(fixed_length=mean / MAX_RESPONSE_TOKENS, sequence_sum=mean, token_sum=lengths[denominator_rows].sum())
    whole = sums.get(aggregation, 1.0)
    assert (weights * lengths).sum() == pytest.approx(whole, rel=1e-12)
    others = np.setdiff1d(np.arange(len(lengths)), denominator_rows)
    assert not weights[others].any()


def weights_by_group(inputs):
    """Give every group the same weight: 1 / (number of groups * number of tokens of the group)."""
    _, index = np.unique(inputs.groups, return_inverse=True)
    tokens = np.bincount(index, inputs.lengths)
    return 1.0 / (len(tokens) * tokens[index])


@many
@given(cases())
def test_an_aggregation_of_the_user_gets_the_groups_of_the_mini_batch(case):
    weighting = TokenWeighting(pickle.loads(pickle.dumps(weights_by_group)), MAX_RESPONSE_TOKENS)
    groups = np.arange(len(case.values)) if case.batch.groups is None else case.batch.groups
    for part in split_mini_batches(case.batch, 2):
        counted = part.denominator_rows
        members = [counted[groups[counted] == group] for group in np.unique(groups[counted])]
        expected = np.mean([np.concatenate([case.values[row] for row in rows]).mean() for rows in members])
        batches = partition_step(part, case.dims, case.packing, weighting).replica_batches
        assert weighted_sum(case, batches) == pytest.approx(expected, rel=1e-12, abs=1e-12)
        in_ledger = step_weights(part, weighting)
        np.testing.assert_array_equal(in_ledger[part.rows], batches[0].weights[part.rows])
        assert not in_ledger[np.setdiff1d(np.arange(len(groups)), part.rows)].any()


@many
@given(cases(), aggregations)
def test_replicas_have_equal_metrics_of_micro_batches_if_the_layout_needs_it(case, aggregation):
    counts = [len(batch.micro_batches) for batch in case.replica_batches(aggregation)]
    assert len(set(counts)) == 1 or not case.dims.equal_micro_batch_counts
    assert all(count % case.dims.pp == 0 for count in counts) or case.dims.vpp == 1


@many
@given(cases(), aggregations)
def test_micro_batches_stay_within_the_token_budget_and_the_metrics_describe_them(case, aggregation):
    step = case.partition(aggregation)
    prompts, responses = case.batch.prompt_lengths, case.batch.response_lengths
    computed = 0
    for batch in step.replica_batches:
        shared = case.packing.share_prompts and case.batch.groups is not None
        assert (batch.groups is not None) == shared
        for rows in batch.micro_batches:
            tokens = int(responses[rows].sum())
            if shared:
                tokens += sum(int(prompts[rows][batch.groups[rows] == group][0]) for group in set(batch.groups[rows]))
            else:
                tokens += int(prompts[rows].sum())
            assert tokens <= case.packing.max_tokens or len(rows) == 1, "only a single row may be larger"
            computed += tokens
    metrics = step.metrics
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["batch/computed_tokens"] >= computed, "two parts of a group may end up in one micro-batch"
    assert {batch.step_tokens for batch in step.replica_batches} == {max(1, int(metrics["batch/computed_tokens"]))}
    assert metrics["batch/micro_batches"] == max(len(batch.micro_batches) for batch in step.replica_batches)
    assert metrics["batch/imbalance"] >= 1.0 and 0 <= metrics["batch/skipped_tokens_fraction"] <= 1


def small_batch(rows, prompts=(4, 4, 4, 4), responses=(2, 3, 5, 1)) -> TrainBatch:
    """Return a batch of two groups with two rows each."""
    return TrainBatch(
        block=None,
        prompt_lengths=np.array(prompts),
        response_lengths=np.array(responses),
        sampled_lengths=np.array(responses),
        groups=np.array([0, 0, 1, 1]),
        rows=np.array(rows, np.int64),
        denominator_rows=np.arange(4),
    )


def test_the_metrics_of_a_partition_equal_those_computed_by_hand():
    """The rows have 27 tokens. The group of rows 0 and 1 has 13 tokens, and 9 if the prompt is shared."""
    packing = Packing(100, True, CostModel(1.0, 0.0))
    whole = partition_step(small_batch([0, 1, 2, 3]), ParallelDims(dp=2), packing).metrics
    assert whole == {
        "batch/computed_tokens": 19.0,
        "batch/skipped_tokens_fraction": 0.0,
        "batch/shared_tokens_fraction": pytest.approx(8 / 27),
        "batch/imbalance": pytest.approx(10 / 9.5),
        "batch/micro_batches": 1.0,
    }
    part = partition_step(small_batch([0, 1]), ParallelDims(dp=1), packing).metrics
    assert part["batch/computed_tokens"] == 9.0
    assert part["batch/skipped_tokens_fraction"] == pytest.approx(14 / 27)
    assert part["batch/shared_tokens_fraction"] == pytest.approx(4 / 13)
    nothing = partition_step(small_batch([]), ParallelDims(dp=2), packing).metrics
    assert nothing["batch/shared_tokens_fraction"] == 0.0 and nothing["batch/skipped_tokens_fraction"] == 1.0
    assert nothing["batch/imbalance"] == 1.0


def test_a_row_that_counts_twice_has_the_weight_of_two_rows():
    batch = replace(small_batch([0, 1, 3]), denominator_rows=np.array([0, 1, 1, 3]))
    packing = Packing(100, True, CostModel(1.0, 0.0))
    expected = {
        "token_mean": np.array([1, 2, 0, 1]) / (2 + 3 + 3 + 1),
        "sequence_mean": np.array([1 / 2, 2 / 3, 0, 1]) / 4,
        "fixed_length": np.array([1, 2, 0, 1]) / (4 * 20),
        "sequence_sum": np.array([1, 2, 0, 1]) / 4,
        "token_sum": np.array([1, 2, 0, 1]),
    }
    for aggregation, weights in expected.items():
        step = partition_step(batch, ParallelDims(dp=2), packing, TokenWeighting(AGGREGATIONS[aggregation], 20))
        np.testing.assert_allclose(step.replica_batches[0].weights, weights, rtol=1e-12)
    assert step.metrics["batch/skipped_tokens_fraction"] == 0.0, "rows that count twice are computed once"
    parts = split_mini_batches(batch, 2)
    assert [part.denominator_rows.tolist() for part in parts] == [[0, 1, 1], [3]]


def test_a_row_that_is_trained_twice_has_the_weight_of_two_rows_in_total():
    """A batch of supervised training may contain a row twice, if an epoch ends within the batch."""
    rows = np.array([0, 1, 1, 3])
    batch = replace(small_batch(rows.tolist()), denominator_rows=rows)
    expected = {"token_mean": 1 / (2 + 3 + 3 + 1), "sequence_mean": np.array([1 / 2, 1 / 3, 1 / 3, 1]) / 4}
    for aggregation, weights in expected.items():
        step = partition_step(batch, ParallelDims(dp=2), Packing(100, True), TokenWeighting(AGGREGATIONS[aggregation]))
        assert trained_rows(step.replica_batches) == rows.tolist()
        np.testing.assert_allclose(step.replica_batches[0].weights[rows], weights, rtol=1e-12)


def test_merged_batches_have_the_micro_batches_of_all_replicas_in_order():
    batch = small_batch([0, 1, 2, 3])
    step = partition_step(batch, ParallelDims(dp=2), Packing(8, False, CostModel(1.0, 0.0)))
    merged = merge_replica_batches(step)
    expected = [rows.tolist() for one in step.replica_batches for rows in one.micro_batches]
    assert [rows.tolist() for rows in merged.micro_batches] == expected and len(expected) > 1
    assert merged.weights is step.replica_batches[0].weights
