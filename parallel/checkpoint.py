"""Saves and loads Megatron's distributed checkpoints (torch_dist).

A checkpoint does not depend on the parallel layout: a model with any layout can load it. The checkpoint of a model with LoRA
adapters contains only the adapters and their optimizer state.
"""

import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_arrays
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from parallel import groups
from parallel.checkpoint_validation import validate_checkpoint
from parallel.checkpoint_writer import CheckpointSave, CheckpointSaveError
from parallel.collectives import raise_on_all_ranks
from parallel.device import has_cuda
from parallel.dims import ParallelDims
from parallel.durable_files import rename_durably
from parallel.lora import has_adapters, is_adapter, sharded_adapters
from parallel.optimizer import (
    num_optimizer_steps,
    restore_optimizer_state,
    sharded_state_to_load,
    sharded_state_to_save,
)

logger = logging.getLogger(__name__)
_NUM_STEPS_KEY = "optimizer_steps"  # a checkpoint stores under this key how many optimizer steps came before the save
_OPTIMIZER_PREFIX = "optimizer.state."  # in a checkpoint, every key of optimizer state starts with this prefix
_EXTRA_STATE = "_extra_state"  # Transformer Engine's layers store FP8 statistics and recipes; their keys contain this
_TRACKER_PREFIX = "tracked."  # in an RNG file, the name of each state of Megatron's RNG tracker starts with this prefix
# A stored vocabulary may have more rows than the vocabulary of the model. The difference must be smaller than this number.
_MAX_VOCAB_PADDING = 1024


def begin_save(
    folder: str | Path,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    dims: ParallelDims,
    asynchronous: bool,
) -> CheckpointSave:
    """Start to write weights, optimizer state and RNG states into `folder`. Every rank calls this.

    The caller must call `finish` of the returned object. After that call, `folder` is a valid checkpoint.
    """
    weights = _sharded_weights(chunks)
    state = {**weights, "optimizer": sharded_state_to_save(optimizer, weights)}
    state[_NUM_STEPS_KEY] = num_optimizer_steps(optimizer)
    files = {rng_file_name(dist.get_rank()): rng_snapshot(dims)}
    return CheckpointSave(Path(folder), state, files, asynchronous)


def save(
    folder: str | Path,
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    dims: ParallelDims,
    timeout_s: float = 3600,
) -> None:
    """Save weights, optimizer state and RNG states synchronously. `folder` appears when the checkpoint is complete."""
    partial = _partial_folder(folder)
    begin_save(partial, chunks, optimizer, dims, asynchronous=False).finish(timeout_s)
    _rename_on_rank_0(partial, Path(folder))


def save_weights(folder: str | Path, chunks: Sequence[GPTModel | DistributedDataParallel]) -> None:
    """Save only the weights, synchronously. `folder` appears when the checkpoint is complete.

    `chunks` are this rank's virtual stages, with or without a DistributedDataParallel wrapper.
    """
    partial = _partial_folder(folder)
    CheckpointSave(partial, _sharded_weights(chunks), {}, asynchronous=False).finish(timeout_s=0)
    _rename_on_rank_0(partial, Path(folder))


def load_weights(folder: str | Path, chunks: Sequence[GPTModel | DistributedDataParallel]) -> None:
    """Load the weights of the checkpoint `folder`, which may also contain optimizer state. Every rank calls this.

    `chunks` are this rank's virtual stages, with or without a DistributedDataParallel wrapper. Weights are cast to the model's
    dtype. Extra states of linear layers (FP8 statistics) stay unchanged, because a checkpoint of another device or precision
    does not contain them. If there is an optimizer, it has its own copies of the weights. The caller must update these copies
    by calling the optimizer's `reload_model_params()`.

    Raises ValueError, before any weight is changed, if `folder` is not a complete checkpoint of this model.
    """
    modules = _unwrapped(chunks)
    state = {name: _without_objects(described) for name, described in _sharded_weights(modules).items()}
    _validate(state, Path(folder))
    loaded = _read(state, Path(folder))
    for number, module in enumerate(modules):
        _assign(module, loaded[f"model{number}"])


def _assign(module: GPTModel, loaded: dict) -> None:
    """Load the state dict `loaded` into `module`.

    Only extra states, and the frozen weights of a model with adapters, may be missing in `loaded`. They then stay unchanged.
    """
    missing, unknown = module.load_state_dict(loaded, strict=False)
    adapters_only = has_adapters(module)
    missing = [name for name in missing if _EXTRA_STATE not in name and (is_adapter(name) or not adapters_only)]
    assert not missing and not unknown, f"not loaded: {missing[:5]}, not known: {unknown[:5]}"


def load(
    folder: str | Path, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, dims: ParallelDims
) -> bool:
    """Load weights and optimizer state from `folder`, and the RNG states if they fit.

    The RNG states fit if the checkpoint was saved with the same layout on the same kind of device (GPU or CPU). Every rank calls
    this function. It returns True if the RNG states were loaded. Hyperparameters of the optimizer (betas, weight decay)
    keep their current values. Extra states (FP8 statistics) that the checkpoint lacks keep their current values, too. For
    example, a run without Transformer Engine writes no extra states. Raises ValueError, before any weight is changed, if
    `folder` is not a complete checkpoint of this model.
    """
    weights = _sharded_weights(chunks)
    state = {**weights, "optimizer": sharded_state_to_load(optimizer, weights)}
    stored = _validate(state, Path(folder))
    for number in range(len(chunks)):
        state[f"model{number}"] = _without_absent_extra_states(state[f"model{number}"], stored)
    with raise_on_all_ranks(RuntimeError):
        rng_states = read_rng(folder, dims)
    loaded = _read(state, Path(folder))
    for number, chunk in enumerate(chunks):
        _assign(chunk.module, loaded[f"model{number}"])
    restore_optimizer_state(optimizer, loaded["optimizer"], loaded[_NUM_STEPS_KEY])
    if rng_states is not None:
        restore_rng(rng_states)
    return rng_states is not None


def _read(state: dict, folder: Path) -> dict:
    with raise_on_all_ranks(
        lambda message: ValueError(f"checkpoint={folder}: not readable ({message}); copy or write it again.")
    ):
        try:
            return dist_checkpointing.load(state, str(folder))
        except CheckpointException as error:  # no subclass of Exception; `failures`: rank -> (error, traceback)
            cause, _ = next(iter(error.failures.values()))
            raise RuntimeError(cause) from error


def _validate(state: dict, folder: Path) -> dict:
    """Check the checkpoint `folder`. Return a description of each tensor and object in the checkpoint, by key.

    Raises ValueError on all ranks if `folder` is incomplete, or if its tensors are not the tensors that the ranks load.
    """
    own_keys = {part.key for part in _sharded_parts(state) if isinstance(part, ShardedTensor)}
    keys_of_ranks: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(keys_of_ranks, own_keys)
    with raise_on_all_ranks(RuntimeError):
        metadata = validate_checkpoint(folder)
        _check_tensors(folder, metadata.state_dict_metadata, state, set().union(*keys_of_ranks))
    return metadata.state_dict_metadata


def _check_tensors(folder: Path, stored: dict, state: dict, needed: set[str]) -> None:
    """Raise ValueError if the stored tensors do not match the model.

    `state` contains the tensors that this rank loads. `needed` contains the keys of the tensors that all ranks together load.
    """
    if not any(key.startswith(_OPTIMIZER_PREFIX) for key in stored) and "optimizer" in state:
        raise ValueError(
            f"checkpoint={folder}: it has weights but no optimizer state; expected a checkpoint of a run. To start a run from "
            "these weights, convert them with `mrl convert to-hf` and set model.path to the converted folder."
        )
    problems = {problem for part in _sharded_parts(state) if (problem := _describe_mismatch(part, stored))}
    tensors = {key for key, found in stored.items() if isinstance(found, TensorStorageMetadata)}
    extra = {key for key in tensors - needed if "optimizer" in state or not key.startswith(_OPTIMIZER_PREFIX)}
    problems |= {f"{key} {list(stored[key].size)} is not in this model" for key in extra}
    if problems:
        raise ValueError(
            f"checkpoint={folder}: it is a checkpoint of another model, {len(problems)} tensors differ: "
            f"{'; '.join(sorted(problems)[:5])}. Name a checkpoint of this model, or the model of this checkpoint."
        )


def _sharded_parts(state: dict) -> list[ShardedBase]:
    parts = []
    for part in nested_values(state):
        built = part.build() if isinstance(part, ShardedTensorFactory) else part
        parts += nested_values(built) if isinstance(built, dict | list) else [built]
    return parts


def _describe_mismatch(part: ShardedBase, stored: dict) -> str | None:
    """Describe how the stored tensor differs from the tensor that this rank needs; return None if they match."""
    if isinstance(part, ShardedObject):
        return None if part.unique_key in stored or _EXTRA_STATE in part.key else f"{part.unique_key} is missing"
    stored_tensor = stored.get(part.key)
    if not isinstance(stored_tensor, TensorStorageMetadata):
        return f"{part.key} is missing (expected {list(part.global_shape)})"
    if tuple(stored_tensor.size) != tuple(part.global_shape) and not _differs_in_padding_only(
        part, tuple(stored_tensor.size)
    ):
        return f"{part.key} is {list(stored_tensor.size)}, expected {list(part.global_shape)}"
    return None


def _differs_in_padding_only(part: ShardedBase, stored_shape: tuple[int, ...]) -> bool:
    """Whether `stored_shape` and the shape of `part` differ only in the number of padding rows of the vocabulary."""
    assert isinstance(part, ShardedTensor)
    rows, *rest = part.global_shape
    min_rows = rows - groups.tp_group().size() + 1  # the current layout adds fewer than tp padding rows
    return (
        part.allow_shape_mismatch
        and list(stored_shape[1:]) == rest
        and min_rows <= stored_shape[0] < rows + _MAX_VOCAB_PADDING
    )


def _sharded_weights(chunks: Sequence[GPTModel | DistributedDataParallel]) -> dict:
    """Return the sharded state dict of each virtual stage, under the keys `model0`, `model1`, ...

    These keys are not in the files of a checkpoint. There, the key of a tensor does not depend on the layout. Megatron may stack
    a parameter of all layers in one tensor. If the model has adapters, only the adapters are in a checkpoint, because all other
    weights are frozen.
    """
    metadata = {"dp_cp_group": groups.dp_cp_group(), "singleton_local_shards": False}
    return {
        f"model{n}": sharded_adapters(module) if has_adapters(module) else module.sharded_state_dict(metadata=metadata)
        for n, module in enumerate(_unwrapped(chunks))
    }


def _unwrapped(chunks: Sequence[GPTModel | DistributedDataParallel]) -> list[GPTModel]:
    return [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in chunks]


def _without_objects(described: dict) -> dict:
    return {name: part for name, part in described.items() if not isinstance(part, ShardedObject)}


def _without_absent_extra_states(described: dict, stored: dict) -> dict:
    return {
        name: part
        for name, part in described.items()
        if not (isinstance(part, ShardedObject) and _EXTRA_STATE in part.key and part.unique_key not in stored)
    }


def _partial_folder(folder: str | Path) -> Path:
    return Path(folder).with_name(Path(folder).name + ".partial")


def _rename_on_rank_0(partial: Path, folder: Path) -> None:
    with raise_on_all_ranks(CheckpointSaveError):
        if dist.get_rank() == 0:
            rename_durably(partial, folder)


def rng_file_name(rank: int) -> str:
    """Return the name of the file that contains the RNG states of `rank`."""
    return f"rng_{rank:05d}.safetensors"


def rng_snapshot(dims: ParallelDims) -> bytes:
    """Return the content of this rank's RNG file: all current RNG states, the rank and the layout."""
    return save_arrays(_rng_states(), {"rank": str(dist.get_rank()), "layout": _rng_layout(dims)})


def read_rng(folder: str | Path, dims: ParallelDims) -> dict[str, NDArray] | None:
    """Read this rank's RNG states from `folder`, for `restore_rng`.

    Returns None if the checkpoint was saved with another layout, or on another kind of device (GPU or CPU); rank 0 then logs a
    warning. Raises ValueError if an RNG file is missing or damaged.
    """
    header, _ = _read_rng_file(Path(folder) / rng_file_name(0))
    if header["layout"] != _rng_layout(dims):
        if dist.get_rank() == 0:
            logger.warning(
                "%s was saved with another layout or device; random number generators start from the seed.", folder
            )
        return None
    path = Path(folder) / rng_file_name(dist.get_rank())
    header, states = _read_rng_file(path)
    if header["rank"] != str(dist.get_rank()):
        raise ValueError(
            f"{path}: it contains the RNG states of rank {header['rank']}, expected rank {dist.get_rank()}; "
            "copy the checkpoint again."
        )
    return states


def _rng_layout(dims: ParallelDims) -> str:
    names = ("tp", "pp", "vpp", "cp", "dp", "ep", "expert_tp", "sequence_parallel")
    return json.dumps({name: getattr(dims, name) for name in names} | {"cuda": has_cuda()})


def _rng_states() -> dict[str, NDArray]:
    _, keys, position, has_gauss, gauss = np.random.get_state()
    _, words, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state().numpy(),
        "numpy": np.asarray(keys),
        "numpy_rest": np.array([position, has_gauss, gauss], np.float64),
        "python": np.array(words, np.uint32),
        "python_gauss": np.array([] if next_gauss is None else [next_gauss], np.float64),
    }
    if has_cuda():
        states["cuda"] = torch.cuda.get_rng_state().numpy()
    tracked = get_cuda_rng_tracker().get_states()
    return states | {_TRACKER_PREFIX + name: state.numpy() for name, state in tracked.items()}


def restore_rng(states: dict[str, NDArray]) -> None:
    """Set every random number generator to its saved state."""
    position, has_gauss, gauss = states["numpy_rest"].tolist()
    np.random.set_state(("MT19937", states["numpy"], int(position), int(has_gauss), gauss))
    next_gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), next_gauss[0] if next_gauss else None))
    torch.set_rng_state(torch.from_numpy(states["torch"]))
    if has_cuda():
        torch.cuda.set_rng_state(torch.from_numpy(states["cuda"]))
    tracked = {
        name.removeprefix(_TRACKER_PREFIX): state for name, state in states.items() if name.startswith(_TRACKER_PREFIX)
    }
    get_cuda_rng_tracker().set_states({name: torch.from_numpy(state) for name, state in tracked.items()})


def _read_rng_file(path: Path) -> tuple[dict[str, str], dict[str, NDArray]]:
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path}: not readable ({error}). A checkpoint has one such file for each rank; copy the checkpoint again."
        ) from None
