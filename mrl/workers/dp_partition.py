"""Splits a batch into mini-batches, and divides each mini-batch among replicas and micro-batches.

The partition needs only the lengths of the sequences, so the driver, which has no tokens, can compute it.
mrl.core.types explains the letters of array dimensions, such as B and R.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.objective import TokenWeighting
from mrl.core.types import ReplicaBatch, TrainBatch
from mrl.data.batching import CostModel, PackingUnit, make_units, make_whole_units, plan_micro_batches
from parallel.dims import ParallelDims

MEAN_OVER_TOKENS = TokenWeighting()


@dataclass(frozen=True)
class Packing:
    """How rows are packed into micro-batches."""

    max_tokens: int  # token budget of one micro-batch
    share_prompts: bool = True  # whether a prompt is computed only once for all its responses in a micro-batch
    cost: CostModel = field(default_factory=CostModel)  # estimates the compute cost of a sequence from its length
    forward_max_tokens: int | None = None  # token budget of a pass without gradients; None: max_tokens

    def for_forward_pass(self) -> "Packing":
        """Return the packing of passes without gradients."""
        return replace(self, max_tokens=self.forward_max_tokens or self.max_tokens)


@dataclass(frozen=True)
class StepPartition:
    """The rows of one optimizer step, divided among the replicas."""

    replica_batches: list[ReplicaBatch]  # by data-parallel rank
    metrics: dict[str, float]  # metrics batch/... of this optimizer step


def split_mini_batches(batch: TrainBatch, num_mini_batches: int) -> list[TrainBatch]:
    """Split a batch into mini-batches of whole groups. Returns at most one mini-batch per group."""
    if num_mini_batches == 1:
        return [batch]
    groups = _groups(batch)
    parts = np.array_split(np.unique(groups[batch.denominator_rows]), num_mini_batches)
    steps = [
        replace(
            batch,
            rows=batch.rows[np.isin(groups[batch.rows], part)],
            denominator_rows=batch.denominator_rows[np.isin(groups[batch.denominator_rows], part)],
        )
        for part in parts
        if len(part)
    ]
    return steps or [batch]


def partition_step(
    batch: TrainBatch, dims: ParallelDims, packing: Packing, weighting: TokenWeighting = MEAN_OVER_TOKENS
) -> StepPartition:
    """Assign every trained row of a mini-batch to one replica and one micro-batch.

    `weighting` computes the token weights, which are normalized over the whole mini-batch.
    """
    weights = _row_weights(batch, weighting)
    shared, groups = packing.share_prompts and batch.groups is not None, _groups(batch)
    columns = (batch.prompt_lengths, batch.response_lengths, groups, batch.rows, packing.cost)
    if batch.whole_groups:
        units = make_whole_units(*columns, shared)
    else:
        units = make_units(*columns, packing.max_tokens, dims.dp, shared)
    replicas = plan_micro_batches(
        units,
        dims.dp,
        packing.max_tokens,
        equal_counts=dims.equal_micro_batch_counts,
        multiple_of=dims.pp if dims.vpp > 1 else 1,  # a virtual pipeline requires a multiple of pp micro-batches
    )
    step_tokens = max(1, sum(unit.tokens for unit in units))
    sampled_tokens = max(1, int(batch.sampled_lengths[batch.rows].sum()))
    batches = [
        ReplicaBatch(micros, weights, groups if shared else None, step_tokens, sampled_tokens) for micros in replicas
    ]
    return StepPartition(batches, _metrics(batch, units, replicas))


def step_weights(batch: TrainBatch, weighting: TokenWeighting) -> NDArray[np.float64]:
    """Return [B]: for each row, the token weight of its sampled tokens in an optimizer step; 0 for untrained rows."""
    weights = _row_weights(batch, weighting)
    weights[np.setdiff1d(batch.denominator_rows, batch.rows)] = 0.0
    return weights


def _row_weights(batch: TrainBatch, weighting: TokenWeighting) -> NDArray[np.float64]:
    """Return [B]: for each row, the token weight of its sampled tokens. The loss is normalized over `denominator_rows`.

    A row that occurs n times in `denominator_rows` gets the total weight of n rows. If the row occurs several times in `rows`,
    each occurrence gets an equal part of this weight.
    """
    weights, rows = np.zeros(len(batch.prompt_lengths)), batch.denominator_rows
    np.add.at(weights, rows, weighting(batch.sampled_lengths[rows], _groups(batch)[rows]))
    return weights / np.maximum(np.bincount(batch.rows, minlength=len(weights)), 1)


def _groups(batch: TrainBatch) -> NDArray[np.int64]:
    """Return [B]: for each row, the index of its prompt. If the prompts are unknown, each row gets an index of its own."""
    return np.arange(len(batch.prompt_lengths)) if batch.groups is None else batch.groups


def merge_replica_batches(partition: StepPartition) -> ReplicaBatch:
    """Return a batch with the micro-batches of all replicas, as if there were only one replica."""
    micros = tuple(rows for batch in partition.replica_batches for rows in batch.micro_batches)
    return replace(partition.replica_batches[0], micro_batches=micros)


def _metrics(
    batch: TrainBatch, units: list[PackingUnit], replicas: list[tuple[NDArray[np.int64], ...]]
) -> dict[str, float]:
    lengths = batch.prompt_lengths + batch.response_lengths
    denominator_tokens, trained = max(1, lengths[np.unique(batch.denominator_rows)].sum()), lengths[batch.rows].sum()
    computed = sum(unit.tokens for unit in units)
    replica_of = {row: replica for replica, micros in enumerate(replicas) for rows in micros for row in rows.tolist()}
    loads = np.zeros(len(replicas))
    for unit in units:
        loads[replica_of[unit.rows[0]]] += unit.cost
    return {
        "batch/computed_tokens": float(computed),
        "batch/skipped_tokens_fraction": float(1 - trained / denominator_tokens),
        "batch/shared_tokens_fraction": float(1 - computed / trained) if trained else 0.0,
        "batch/imbalance": float(loads.max() / loads.mean()) if loads.any() else 1.0,
        "batch/micro_batches": float(max(len(micros) for micros in replicas)),
    }
