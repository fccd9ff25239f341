"""What a checkpoint may unpickle: its pickles are checked here before any library reads them.

A pickle can call whatever function it names, and torch's distributed checkpoints hold two kinds that are loaded without a
check: `.metadata`, and the objects beside the tensors. A checkpoint that names anything but the types below is refused.
Files are read as torch reads them (its own archive reader), so that both see the same pickle.
"""

import importlib
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

_DESCRIPTIONS = {
    "pathlib": ("PosixPath",),
    "torch": ("Size", "device"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch.serialization": ("_get_layout",),
}
"""Of `.metadata`: descriptions of tensors and of where they are. No type among them is a kind of dict: a pickle sets attributes
of instances, and an attribute `items` would hide from this check what is in one."""

_BUILTINS = ("bytearray", "complex", "frozenset", "set", "slice")
_VALUES = {
    "__builtin__": _BUILTINS,  # as pickles of protocol 2, which torch writes, name it
    "_codecs": ("encode",),  # numpy's bytes
    "_io": ("BytesIO",),
    "argparse": ("Namespace",),  # Megatron-LM keeps its arguments
    "builtins": _BUILTINS,
    "collections": ("OrderedDict", "defaultdict"),
    "datetime": ("timedelta",),
    "io": ("BytesIO",),
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "pathlib": ("PosixPath",),
    "signal": ("Signals",),
    "torch": ("Generator", "Size", "device"),
    "torch._utils": ("_rebuild_parameter", "_rebuild_tensor_v2"),
    "torch.storage": ("TypedStorage", "UntypedStorage"),
    "types": ("SimpleNamespace",),
    "megatron.core.enums": ("ModelType",),
    "megatron.core.optimizer.optimizer_config": ("OptimizerConfig",),
    "megatron.core.rerun_state_machine": ("RerunDiagnostic", "RerunMode", "RerunState"),
    "megatron.core.transformer.enums": ("AttnBackend", "CudaGraphScope"),
}
"""Of objects: numbers, arrays, random states and settings. None of them does anything but hold its arguments."""

_ARCHIVE = b"PK\x03\x04"  # how an archive of torch.save begins


class ForeignPickleError(ValueError):
    """A checkpoint's pickle names something that no checkpoint needs; nothing of it was executed."""


def check_checkpoint(folder: str | Path) -> Metadata | None:
    """Look at every pickle of a Megatron checkpoint; returns what its `.metadata` says, None where there is none.

    Nothing but the allowed types is imported or called. Raises ForeignPickleError naming the file and the global;
    ValueError where a file is damaged or lies outside the folder.
    """
    folder = Path(folder)
    metadata = None
    if (folder / ".metadata").is_file():
        metadata = read_metadata(folder / ".metadata")
        for path, offset, length in _objects(folder, metadata):
            _check_file(path, offset, length)
    for path in sorted(folder.glob("*.pt")):  # common.pt, of older Megatron
        _check_file(path, 0, path.stat().st_size)
    return metadata


def read_metadata(path: Path) -> Metadata:
    """What a `.metadata` says, from allowed types alone. Raises ForeignPickleError; ValueError where it is damaged."""
    with path.open("rb") as file:
        found = _read(_Checked(file, _allowed_description, str(path)), str(path))
    if not isinstance(found, Metadata):
        raise ValueError(f"{path}: holds a {type(found).__name__}, expected the Metadata of a distributed checkpoint.")
    for name in ("state_dict_metadata", "storage_data"):
        if type(table := getattr(found, name, None)) is not dict:
            raise ValueError(f"{path}: its {name} is a {type(table).__name__}, expected a plain dict. {_CURE}")
    return found


def _objects(folder: Path, metadata: Metadata) -> Iterator[tuple[Path, int, int]]:
    """(file, offset, length) of all that is no tensor; tensors are read with torch's own allow-list."""
    for index, info in metadata.storage_data.items():
        if type(info) is not _StorageInfo or type(info.relative_path) is not str:
            raise ValueError(f"{folder}/.metadata: {index} is at {info}, expected the name of a file. {_CURE}")
        path = folder / info.relative_path
        if path.parent != folder or path.is_symlink():
            raise ValueError(f"{folder}/.metadata: {index.fqn} is in {info.relative_path}, which is no file of it.")
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            if getattr(info, "transform_descriptors", None):
                raise ValueError(f"{path}: {index.fqn} is transformed ({info.transform_descriptors}), expected plain.")
            yield path, info.offset, info.length


def _check_file(path: Path, offset: int, length: int) -> None:
    """Check the archive of torch.save at this place of a file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing. Copy or write the checkpoint again.")
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if not data.startswith(_ARCHIVE):
        raise ValueError(f"{path}: no archive of torch.save at byte {offset}; write the checkpoint again.")
    try:
        archive = torch._C.PyTorchFileReader(io.BytesIO(data))
        text = archive.get_record("data.pkl")
    except RuntimeError as error:
        raise ValueError(f"{path}: damaged at byte {offset} ({error}); write the checkpoint again.") from None
    if archive.has_record("constants.pkl"):
        raise ForeignPickleError(f"{path}: holds a program (TorchScript), not data. {_CURE}")
    _read(_Checked(io.BytesIO(text), _stand_in, str(path)), str(path))


_CURE = "It was not written by a training run, or was changed since; do not load it, and ask where it came from."


class _Checked(pickle.Unpickler):
    """Finds globals by `find` alone, which returns None for those that are refused."""

    def __init__(self, file: Any, find: Callable[[str, str], Any], path: str) -> None:
        super().__init__(file)
        self._find, self._path = find, path

    def find_class(self, module: str, name: str) -> Any:
        found = self._find(module, name)
        if found is None:
            raise ForeignPickleError(f"{self._path}: its pickle names {module}.{name}. {_CURE}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage, which is no pickle."""
        return _Inert()


def _read(unpickler: _Checked, path: str) -> Any:
    try:
        return unpickler.load()
    except ForeignPickleError:
        raise
    except Exception as error:  # a broken pickle raises nearly anything
        raise ValueError(f"{path}: damaged ({error!r}); write the checkpoint again.") from None


def _allowed_description(module: str, name: str) -> Any:
    """The thing itself: descriptions are needed."""
    if name not in _DESCRIPTIONS.get(module, ()) and not _is_dtype(module, name):
        return None
    return getattr(importlib.import_module(module), name)


def _stand_in(module: str, name: str) -> Any:
    """Values are not needed: nothing of them is made."""
    storage = module == "torch" and name.endswith("Storage")
    return _Inert if name in _VALUES.get(module, ()) or storage or _is_dtype(module, name) else None


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


class _Inert:
    """In place of an allowed type: takes what a pickle does to it, and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...
    def add(self, value: Any) -> None: ...
