"""Cuts optimizer steps out of a batch, and each step over replicas and micro-batches: pure arithmetic on lengths."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.objective import token_weights
from mrl.core.types import RankBatch, TrainBatch
from mrl.data.batching import CostModel, Unit, make_units, plan
from parallel.dims import ParallelDims


@dataclass(frozen=True)
class Packing:
    """How rows become packs."""

    max_tokens: int  # in one pack
    share_prompts: bool = True  # compute a group's prompt once
    cost: CostModel = field(default_factory=CostModel)  # of a sequence, by its length


@dataclass(frozen=True)
class StepPartition:
    """One optimizer step: each replica's share, and what the plan saves and costs."""

    shares: list[RankBatch]  # by data-parallel rank
    numbers: dict[str, float]  # metrics


def split(batch: TrainBatch, mini_batches: int) -> list[TrainBatch]:
    """`mini_batches` optimizer steps over the batch, whole groups in each; fewer where there are fewer groups."""
    if mini_batches == 1:
        return [batch]
    groups = np.arange(len(batch.prompt_lengths)) if batch.groups is None else batch.groups
    parts = np.array_split(np.unique(groups[batch.counted]), mini_batches)
    steps = [
        replace(
            batch,
            rows=batch.rows[np.isin(groups[batch.rows], part)],
            counted=batch.counted[np.isin(groups[batch.counted], part)],
        )
        for part in parts
        if len(part)
    ]
    return steps or [batch]


def partition_step(
    batch: TrainBatch, dims: ParallelDims, packing: Packing, aggregation: str, longest: int | None = None
) -> StepPartition:
    """Give every trained row to one replica and one micro-batch; the loss's denominators are the whole step's.

    `longest`: tokens that a response may have, where the aggregation asks for it.
    """
    weights = _counted_weights(batch, aggregation, longest)
    shared = packing.share_prompts and batch.groups is not None
    groups = np.arange(len(weights)) if batch.groups is None else batch.groups
    units = make_units(
        batch.prompt_lengths,
        batch.response_lengths,
        groups,
        batch.rows,
        packing.cost,
        packing.max_tokens,
        dims.dp,
        shared,
    )
    replicas = plan(
        units,
        dims.dp,
        packing.max_tokens,
        equal_counts=dims.lockstep,
        multiple_of=dims.pp if dims.vpp > 1 else 1,
    )
    tokens = max(1, sum(unit.tokens for unit in units))
    shares = [RankBatch(micros, weights, groups if shared else None, tokens) for micros in replicas]
    return StepPartition(shares, _numbers(batch, units, replicas))


def step_weights(batch: TrainBatch, aggregation: str, longest: int | None = None) -> NDArray[np.float64]:
    """[B] what one token of each row of an optimizer step counts for in its loss; 0 of rows that are not trained."""
    weights = _counted_weights(batch, aggregation, longest)
    weights[np.setdiff1d(batch.counted, batch.rows)] = 0.0
    return weights


def _counted_weights(batch: TrainBatch, aggregation: str, longest: int | None) -> NDArray[np.float64]:
    """[B] what one token of each row counts for in the loss whose denominators are of all counted rows."""
    weights = np.zeros(len(batch.prompt_lengths))
    weights[batch.counted] = token_weights(batch.sampled_lengths[batch.counted], aggregation, longest)
    return weights


def merge_rank_batches(plan: StepPartition) -> RankBatch:
    """The same packs, all of them for one process."""
    micros = tuple(rows for share in plan.shares for rows in share.micro_batches)
    return replace(plan.shares[0], micro_batches=micros)


def _numbers(batch: TrainBatch, units: list[Unit], replicas: list[tuple[NDArray[np.int64], ...]]) -> dict[str, float]:
    lengths = batch.prompt_lengths + batch.response_lengths
    everything, trained = max(1, lengths[batch.counted].sum()), lengths[batch.rows].sum()
    computed = sum(unit.tokens for unit in units)
    place = {row: replica for replica, micros in enumerate(replicas) for rows in micros for row in rows.tolist()}
    loads = np.zeros(len(replicas))
    for unit in units:
        loads[place[unit.rows[0]]] += unit.cost
    return {
        "batch/computed_tokens": float(computed),
        "batch/skipped_tokens_fraction": float(1 - trained / everything),
        "batch/shared_tokens_fraction": float(1 - computed / trained) if trained else 0.0,
        "batch/imbalance": float(loads.max() / loads.mean()) if loads.any() else 1.0,
        "batch/micro_batches": float(max(len(micros) for micros in replicas)),
    }
