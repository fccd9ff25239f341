"""Megatron's distributed checkpoints of one model and its optimizer: written by one layout, read by any."""

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint import CheckpointException

from parallel import groups, optimizer_state, rng, stored
from parallel.agreement import together
from parallel.checked_pickle import check_checkpoint
from parallel.dims import ParallelDims
from parallel.disk import sync
from parallel.saving import Save, SaveError

_STEPS = "optimizer_steps"


def begin_save(
    folder: str | Path,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    dims: ParallelDims,
    asynchronous: bool,
) -> Save:
    """Start writing weights, optimizer state and random number generators into `folder`; every rank calls this.

    `folder` is a checkpoint once the save is finished, which the caller does. Before the first optimizer step, too.
    """
    weights = _weights(chunks)
    state = {**weights, "optimizer": optimizer_state.describe(optimizer, weights)}
    state[_STEPS] = optimizer_state.num_steps(optimizer)
    files = {rng.file_name(dist.get_rank()): rng.snapshot(dims)}
    return Save(Path(folder), state, files, asynchronous)


def save(
    folder: str | Path,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    dims: ParallelDims,
    timeout_s: float = 3600,
) -> None:
    """`begin_save` and its end; `folder` appears under its name only when it is complete."""
    partial = _partial(folder)
    begin_save(partial, chunks, optimizer, dims, asynchronous=False).finish(timeout_s)
    _rename(partial, Path(folder))


def save_weights(folder: str | Path, chunks: Sequence[GPTModel | DistributedDataParallel]) -> None:
    """`save` without an optimizer; `chunks` are wrapped or not."""
    partial = _partial(folder)
    Save(partial, _weights(chunks), {}, asynchronous=False).finish(timeout_s=0)
    _rename(partial, Path(folder))


def load_weights(folder: str | Path, chunks: Sequence[GPTModel | DistributedDataParallel]) -> None:
    """Restore weights alone from `folder`, with or without optimizer state in it; every rank calls this.

    `chunks` are this rank's virtual stages, wrapped or not; types are converted. What linear layers keep besides weights
    (statistics of FP8) stays as it is: a checkpoint of another device or format does not have it. An optimizer made before
    has copies of its own, which its `reload_model_params()` renews.

    Raises ValueError, before a weight is touched, when `folder` is no whole checkpoint of such a model.
    """
    modules = _unwrapped(chunks)
    state = {name: _tensors(described) for name, described in _weights(modules).items()}
    _check(state, Path(folder))
    loaded = _read(state, Path(folder))
    for number, module in enumerate(modules):
        missing, unknown = module.load_state_dict(loaded[f"model{number}"], strict=False)
        missing = [name for name in missing if not name.endswith("_extra_state")]
        assert not missing and not unknown, f"not loaded: {missing[:5]}, not known: {unknown[:5]}"


def load(
    folder: str | Path, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, dims: ParallelDims
) -> bool:
    """Restore weights and optimizer state from `folder`, and, under the layout that wrote it, random number generators.

    Every rank calls this. Returns whether generators were restored too. Settings of the optimizer (betas, weight decay) stay
    as they are. Raises ValueError, before a weight is touched, when `folder` is no whole checkpoint of such a model.
    """
    weights = _weights(chunks)
    state = {**weights, "optimizer": optimizer_state.request(optimizer, weights)}
    _check(state, Path(folder))
    with together(RuntimeError):
        generators = rng.read(folder, dims)
    loaded = _read(state, Path(folder))
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded[f"model{number}"])
    optimizer_state.restore(optimizer, loaded["optimizer"], loaded[_STEPS])
    if generators is not None:
        rng.restore(generators)
    return generators is not None


def _check(state: dict, folder: Path) -> None:
    asked: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(asked, stored.keys(state))
    with together(RuntimeError):
        stored.check(folder, state, set().union(*asked))
        check_checkpoint(folder)  # after their sizes: an object that is cut short has a better name


def _read(state: dict, folder: Path) -> dict:
    with together(lambda words: ValueError(f"checkpoint={folder}: not readable ({words}); copy or write it again.")):
        try:
            return dist_checkpointing.load(state, str(folder))
        except CheckpointException as error:  # torch's, no Exception; reads of one rank each
            cause, _ = next(iter(error.failures.values()))
            raise RuntimeError(cause) from error


def _weights(chunks: Sequence[GPTModel | DistributedDataParallel]) -> dict:
    """Each virtual stage's weights; the keys stay in this process, files name tensors by their place in the whole model."""
    metadata = {"dp_cp_group": groups.dp_cp_group(), "singleton_local_shards": False}
    return {f"model{n}": module.sharded_state_dict(metadata=metadata) for n, module in enumerate(_unwrapped(chunks))}


def _unwrapped(chunks: Sequence[GPTModel | DistributedDataParallel]) -> list[GPTModel]:
    return [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in chunks]


def _tensors(described: dict) -> dict:
    return {name: part for name, part in described.items() if not isinstance(part, ShardedObject)}


def _partial(folder: str | Path) -> Path:
    return Path(folder).with_name(Path(folder).name + ".partial")


def _rename(partial: Path, folder: Path) -> None:
    with together(SaveError):
        if dist.get_rank() == 0:
            partial.rename(folder)
            sync(folder.parent)
