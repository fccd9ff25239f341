"""Rollouts on disk: one file a step, so that a step can be trained again, under any layout."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mrl.core.types import TokenBlock


def _path(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step_{step:06d}.npz"


def write(folder: str | Path, step: int, block: TokenBlock, **columns: NDArray) -> None:
    """Write a step's tokens and control columns; the file appears when it is complete."""
    path = _path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    present = {name: column for name, column in vars(block).items() if isinstance(column, np.ndarray)}
    np.savez(partial, allow_pickle=False, **present, **columns)
    partial.rename(path)


def read(folder: str | Path, step: int) -> tuple[TokenBlock, dict[str, NDArray]]:
    """What `write` wrote."""
    path = _path(folder, step)
    with np.load(path) as file:
        columns = dict(file)
    names = TokenBlock.__dataclass_fields__.keys() & columns.keys()
    return TokenBlock(**{n: columns.pop(n) for n in names}), columns


def check(folder: str | Path, num_steps: int, *, routing: bool = False) -> None:
    """Raise ValueError unless the first `num_steps` steps are there, with `routing` if it is asked for."""
    for step in range(num_steps):
        if not _path(folder, step).is_file():
            count = len(list(Path(folder).glob("step_*.npz")))
            raise ValueError(
                f"rollout.replay={folder}: {_path(folder, step).name} is missing ({count} recorded steps, trainer.max_steps="
                f"{num_steps}); record with rollout.record=true, or lower trainer.max_steps."
            )
        with np.load(_path(folder, step)) as file:
            if routing and "routed_experts" not in file.files:
                raise ValueError(
                    f"rollout.routing_replay=true: {_path(folder, step)} has no routing; record with "
                    "rollout.routing_replay=true, or turn it off."
                )
