"""States of all random number generators of a rank, stored in one file per rank in a checkpoint folder."""

import json
import logging
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from parallel.device import has_cuda
from parallel.dims import ParallelDims

_TRACKED = "tracked."  # Megatron's generators, named by their purpose: tensor-parallel, expert-parallel, data-parallel
logger = logging.getLogger(__name__)


def file_name(rank: int) -> str:
    """Return the name of the file with the states of `rank`."""
    return f"rng_{rank:05d}.safetensors"


def snapshot(dims: ParallelDims) -> bytes:
    """Return the content of this rank's file: all current states, the rank and the layout."""
    return save(_states(), {"rank": str(dist.get_rank()), "layout": _layout(dims)})


def read(folder: str | Path, dims: ParallelDims) -> dict[str, NDArray] | None:
    """Read this rank's states from `folder` for `restore`.

    Returns None if another layout saved the checkpoint; rank 0 then logs a warning. Raises ValueError if a file is missing or
    damaged.
    """
    header, _ = _read(Path(folder) / file_name(0))
    if header["layout"] != _layout(dims):
        if dist.get_rank() == 0:
            logger.warning("%s: saved by another layout; random number generators start from the seed.", folder)
        return None
    path = Path(folder) / file_name(dist.get_rank())
    header, states = _read(path)
    if header["rank"] != str(dist.get_rank()):
        raise ValueError(
            f"{path}: RNG states of rank {header['rank']}, expected {dist.get_rank()}; copy the checkpoint again."
        )
    return states


def _layout(dims: ParallelDims) -> str:
    names = ("tp", "pp", "vpp", "cp", "dp", "ep", "expert_tp", "sequence_parallel")
    return json.dumps({name: getattr(dims, name) for name in names} | {"cuda": has_cuda()})


def _states() -> dict[str, NDArray]:
    _, keys, place, has_gauss, gauss = np.random.get_state()
    _, words, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state().numpy(),
        "numpy": np.asarray(keys),
        "numpy_rest": np.array([place, has_gauss, gauss], np.float64),
        "python": np.array(words, np.uint32),
        "python_gauss": np.array([] if next_gauss is None else [next_gauss], np.float64),
    }
    if has_cuda():
        states["cuda"] = torch.cuda.get_rng_state().numpy()
    tracked = get_cuda_rng_tracker().get_states()
    return states | {_TRACKED + name: state.numpy() for name, state in tracked.items()}


def restore(states: dict[str, NDArray]) -> None:
    """Set every generator to its saved state."""
    place, has_gauss, gauss = states["numpy_rest"].tolist()
    np.random.set_state(("MT19937", states["numpy"], int(place), int(has_gauss), gauss))
    next_gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), next_gauss[0] if next_gauss else None))
    torch.set_rng_state(torch.from_numpy(states["torch"]))
    if has_cuda():
        torch.cuda.set_rng_state(torch.from_numpy(states["cuda"]))
    tracked = {name.removeprefix(_TRACKED): state for name, state in states.items() if name.startswith(_TRACKED)}
    get_cuda_rng_tracker().set_states({name: torch.from_numpy(state) for name, state in tracked.items()})


def _read(path: Path) -> tuple[dict[str, str], dict[str, NDArray]]:
    try:
        with safe_open(path, "numpy") as file:
            return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path}: not readable ({error}); every rank of a checkpoint has such a file: copy the checkpoint again."
        ) from None
