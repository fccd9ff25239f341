"""Whether a folder is a whole checkpoint of this model, found out before anything of the model is touched."""

from collections import defaultdict
from pathlib import Path

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from parallel import groups
from parallel.checked_pickle import read_metadata

_METADATA, _CONFIG = ".metadata", "metadata.json"
_OPTIMIZER = "optimizer.state."
_MOST_PADDING = 1024  # rows that another layout may have added to a vocabulary


def keys(state: dict) -> set[str]:
    """Names of the tensors that this rank asks for with the sharded state dict `state`."""
    return {part.key for part in _parts(state) if isinstance(part, ShardedTensor)}


def check(folder: Path, state: dict, asked: set[str]) -> None:
    """Raises ValueError unless `folder` has all that this rank asks for, and nothing more than `asked` by any rank."""
    metadata = _metadata(folder)
    _check_files(folder, metadata)
    stored = metadata.state_dict_metadata
    if not any(key.startswith(_OPTIMIZER) for key in stored) and "optimizer" in state:
        raise ValueError(
            f"checkpoint={folder}: it has weights and no optimizer state; expected a checkpoint of a run. Weights alone "
            "are where a run starts: convert them with `mrl convert to-hf`, and set model.path to that folder."
        )
    problems = {problem for part in _parts(state) if (problem := _problem(part, stored))}
    tensors = {key for key, found in stored.items() if isinstance(found, TensorStorageMetadata)}
    extra = {key for key in tensors - asked if "optimizer" in state or not key.startswith(_OPTIMIZER)}
    problems |= {f"{key} {list(stored[key].size)} is not in this model" for key in extra}
    if problems:
        raise ValueError(
            f"checkpoint={folder}: it is no checkpoint of this model, {len(problems)} tensors differ: "
            f"{'; '.join(sorted(problems)[:5])}. Name a checkpoint of this model, or the model it was written from."
        )


def _metadata(folder: Path) -> Metadata:
    absent = [name for name in (_METADATA, _CONFIG) if not (folder / name).is_file()]
    if absent:
        found = sorted(path.name for path in folder.iterdir())[:5] if folder.is_dir() else "no such folder"
        raise ValueError(
            f"checkpoint={folder}: {' and '.join(absent)} not there (found: {found or 'nothing'}); expected a folder that a "
            "save has finished. Name another checkpoint."
        )
    return read_metadata(folder / _METADATA)


def _check_files(folder: Path, metadata: Metadata) -> None:
    needed: dict[str, int] = defaultdict(int)
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed[info.relative_path], info.offset + info.length)
    for name, size in sorted(needed.items()):
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found is None or found < size:
            what = "is missing" if found is None else f"has {found} bytes, expected {size}: it is cut short"
            raise ValueError(f"{path} {what}. Copy or write the checkpoint again.")


def _parts(state: dict) -> list[ShardedBase]:
    parts = []
    for part in nested_values(state):
        built = part.build() if isinstance(part, ShardedTensorFactory) else part
        parts += nested_values(built) if isinstance(built, dict | list) else [built]
    return parts


def _problem(part: ShardedBase, stored: dict) -> str | None:
    if isinstance(part, ShardedObject):
        return None if part.unique_key in stored else f"{part.unique_key} is missing"
    found = stored.get(part.key)
    if not isinstance(found, TensorStorageMetadata):
        return f"{part.key} is missing (expected {list(part.global_shape)})"
    if tuple(found.size) != tuple(part.global_shape) and not _padded(part, tuple(found.size)):
        return f"{part.key} is {list(found.size)}, expected {list(part.global_shape)}"
    return None


def _padded(part: ShardedBase, found: tuple[int, ...]) -> bool:
    """Whether only padding rows of a vocabulary differ: this layout has fewer than tp of them."""
    assert isinstance(part, ShardedTensor)
    rows, *rest = part.global_shape
    fewest = rows - groups.tp_group().size() + 1
    return part.allow_shape_mismatch and list(found[1:]) == rest and fewest <= found[0] < rows + _MOST_PADDING
