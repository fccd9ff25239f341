"""Megatron's distributed checkpoints of one model and its optimizer: written by one layout, read by any."""

import queue
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from parallel import groups


def _weights(chunks: list[DistributedDataParallel]) -> dict:
    """Each virtual stage's weights; the keys stay in this process, files name tensors by their place in the whole model."""
    metadata = {"dp_cp_group": groups.dp_cp_group()}
    return {f"model{n}": chunk.module.sharded_state_dict(metadata=metadata) for n, chunk in enumerate(chunks)}


def _state(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, is_loading: bool) -> dict:
    metadata = {
        "dp_cp_group": groups.dp_cp_group(),
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }
    weights = _weights(chunks)
    described = weights if len(chunks) > 1 else weights["model0"]
    return {
        **weights,
        "optimizer": optimizer.sharded_state_dict(described, is_loading=is_loading, metadata=metadata),
    }


def save(folder: str | Path, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Write to `folder`, which appears under its name only when it is complete; every rank calls this."""
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        partial.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    # A synchronous save writes from this process: a thread queue serves where Megatron would spawn a manager process,
    # which imports torch again (seconds) and outlives a killed worker.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(_state(chunks, optimizer, is_loading=False), str(partial))
    if dist.get_rank() == 0:
        partial.rename(folder)
    dist.barrier()


def load(folder: str | Path, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Restore weights and optimizer state from `folder`; every rank calls this."""
    state = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), str(folder))
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state[f"model{number}"])
    with torch.no_grad():
        optimizer.load_state_dict(state["optimizer"])
