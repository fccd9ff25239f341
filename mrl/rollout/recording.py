"""Rollouts on disk: one file a step, so that a step can be trained again, under any layout."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mrl.types import TokenBlock


def _path(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step_{step:06d}.npz"


def write(folder: str | Path, step: int, block: TokenBlock, **columns: NDArray) -> None:
    """Write a step's tokens and control columns; the file appears when it is complete."""
    path = _path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, allow_pickle=False, **asdict(block), **columns)
    partial.rename(path)


def read(folder: str | Path, step: int) -> tuple[TokenBlock, dict[str, NDArray]]:
    """What `write` wrote; raises ValueError naming the missing file and the steps that are there."""
    path = _path(folder, step)
    if not path.is_file():
        there = sorted(p.name for p in Path(folder).glob("step_*.npz"))
        found = f"found {there[0]} to {there[-1]}" if there else "found none"
        raise ValueError(f"rollout.replay={folder}: {path.name} is missing; {found}. Record with rollout.record=true.")
    with np.load(path) as file:
        columns = dict(file)
    names = TokenBlock.__dataclass_fields__
    return TokenBlock(**{n: columns.pop(n) for n in names}), columns
