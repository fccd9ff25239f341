"""Validates a torch_dist checkpoint before any library reads it: required files, file sizes, and safe pickles.

A pickle can call any function that it names. torch's distributed checkpoints contain two kinds of pickles that torch loads
without a check: `.metadata`, and the objects that are stored next to the tensors. For each kind, this module has a table of
allowed types, and it rejects a checkpoint with a pickle that names another type. Archives are read with torch's archive reader,
because this check must see the same pickle that torch loads later. This module does not import Megatron.
"""

import importlib
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

METADATA = ".metadata"  # torch's description of the tensors and of the files that contain them
BACKEND_CONFIG = "metadata.json"  # Megatron's file with the checkpoint format; Megatron writes no file after it

_METADATA_TYPES = {
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
"""Types allowed in `.metadata`: descriptions of tensors and their locations.

A plain dict needs no entry here. Subclasses of dict, such as OrderedDict, are not allowed: a pickle could set an attribute
`items` on an instance, which would hide entries of the dict from the checks of this module.
"""

_BUILTINS = ("bytearray", "complex", "frozenset", "set", "slice")
_OBJECT_TYPES = {
    "__builtin__": _BUILTINS,  # name of `builtins` in pickle protocol 2, which torch writes
    "_codecs": ("encode",),  # pickles of numpy arrays call it to make bytes
    "_io": ("BytesIO",),
    "argparse": ("Namespace",),  # Megatron-LM stores its command-line arguments as a Namespace
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
"""Types and functions allowed in stored objects: numbers, arrays, RNG states and settings.

None of them executes code from the pickle or opens a file. This module itself calls none of them (see _load_placeholder).
"""

_ARCHIVE_MAGIC = b"PK\x03\x04"  # the first bytes of a torch.save archive
_ADVICE = (
    "mrl and Megatron's own checkpoints contain no such object. Do not load the file unless you know who wrote it."
)


class ForeignPickleError(ValueError):
    """A pickle of a checkpoint names a type that is not allowed, or a file contains a TorchScript program.

    The type was neither imported nor called.
    """


def validate_checkpoint(folder: str | Path) -> Metadata:
    """Check that `folder` is a complete torch_dist checkpoint with safe pickles; return the content of its `.metadata`.

    The check imports and calls only the allowed types.

    Raises:
        ForeignPickleError: a pickle names a type that is not allowed, or a file contains a TorchScript program; the message
            names the file.
        ValueError: a file is missing, truncated or damaged, or lies outside the folder.
    """
    folder = Path(folder)
    _check_descriptions_exist(folder)
    metadata = read_metadata(folder / METADATA)
    _check_locations(folder, metadata)
    _check_file_sizes(folder, metadata)  # before the objects, so that the error for a truncated file says "truncated"
    for path, offset, length in _stored_objects(folder, metadata):
        _check_archive(path, offset, length)
    for path in sorted(folder.glob("*.pt")):  # older Megatron versions store some objects in common.pt
        _check_archive(path, 0, path.stat().st_size)
    return metadata


def read_metadata(path: Path) -> Metadata:
    """Read a `.metadata` file.

    Raises ForeignPickleError if the file names a type that is not allowed, and ValueError if the file is damaged.
    """
    with path.open("rb") as file:
        metadata = _unpickle(_CheckedUnpickler(file, _load_metadata_type, str(path)), str(path))
    if not isinstance(metadata, Metadata):
        raise ValueError(
            f"{path}: holds a {type(metadata).__name__}, expected the Metadata of a distributed checkpoint."
        )
    for name in ("state_dict_metadata", "storage_data"):
        if type(table := getattr(metadata, name, None)) is not dict:
            raise ValueError(f"{path}: its {name} is a {type(table).__name__}, expected a plain dict. {_ADVICE}")
    return metadata


def _check_descriptions_exist(folder: Path) -> None:
    missing = [name for name in (METADATA, BACKEND_CONFIG) if not (folder / name).is_file()]
    if missing:
        found = sorted(path.name for path in folder.iterdir())[:5] if folder.is_dir() else "no such folder"
        raise ValueError(
            f"checkpoint={folder}: {' and '.join(missing)} not there (found: {found or 'nothing'}); expected a complete "
            "checkpoint of Megatron's distributed checkpointing (torch_dist), such as "
            "RUN/checkpoints/step_000060/actor. Name another checkpoint."
        )


def _check_locations(folder: Path, metadata: Metadata) -> None:
    """Raise ValueError if a location in `metadata` is not a plain file directly in `folder`."""
    for index, info in metadata.storage_data.items():
        if type(info) is not _StorageInfo or type(info.relative_path) is not str:
            raise ValueError(f"{folder}/{METADATA}: the location of {index} is {info}, expected a file name. {_ADVICE}")
        path = folder / info.relative_path
        if path.parent != folder or path.is_symlink():
            raise ValueError(
                f"{folder}/{METADATA}: {index.fqn} is in {info.relative_path}, expected a file of the same folder. {_ADVICE}"
            )


def _check_file_sizes(folder: Path, metadata: Metadata) -> None:
    """Raise ValueError if a file is missing, or is too short for the content that `.metadata` describes."""
    needed: dict[str, int] = defaultdict(int)
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed[info.relative_path], info.offset + info.length)
    for name, size in sorted(needed.items()):
        path = folder / name
        actual_size = path.stat().st_size if path.is_file() else None
        if actual_size is None or actual_size < size:
            problem = (
                "is missing" if actual_size is None else f"has {actual_size} bytes, expected {size}: it is truncated"
            )
            raise ValueError(f"{path} {problem}. Copy or write the checkpoint again.")


def _stored_objects(folder: Path, metadata: Metadata) -> Iterator[tuple[Path, int, int]]:
    """Yield (file, offset, length in bytes) of every stored object that is not a tensor.

    Tensors need no check, because torch loads them with its own list of allowed types.
    """
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            path = folder / info.relative_path
            if transforms := getattr(info, "transform_descriptors", None):
                raise ValueError(
                    f"{path}: {index.fqn} is transformed ({transforms}), expected an untransformed object."
                )
            yield path, info.offset, info.length


def _check_archive(path: Path, offset: int, length: int) -> None:
    """Check the pickle inside a torch.save archive, which occupies the bytes [offset, offset + length) of the file `path`."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if not data.startswith(_ARCHIVE_MAGIC):
        raise ValueError(f"{path}: no archive of torch.save at byte {offset}; write the checkpoint again.")
    try:
        archive = torch._C.PyTorchFileReader(io.BytesIO(data))
        text = archive.get_record("data.pkl")
    except RuntimeError as error:
        raise ValueError(f"{path}: damaged at byte {offset} ({error}); write the checkpoint again.") from None
    if archive.has_record("constants.pkl"):
        raise ForeignPickleError(f"{path}: holds a program (TorchScript), not data. {_ADVICE}")
    _unpickle(_CheckedUnpickler(io.BytesIO(text), _load_placeholder, str(path)), str(path))


class _CheckedUnpickler(pickle.Unpickler):
    """Unpickler that gets all types from the function `load_type`, which returns None for a type that is not allowed."""

    def __init__(self, file: Any, load_type: Callable[[str, str], Any], path: str) -> None:
        super().__init__(file)
        self._load_type, self._path = load_type, path

    def find_class(self, module: str, name: str) -> Any:
        loaded_type = self._load_type(module, name)
        if loaded_type is None:
            raise ForeignPickleError(f"{self._path}: its pickle names {module}.{name}. {_ADVICE}")
        return loaded_type

    def persistent_load(self, pid: Any) -> Any:
        """Return a placeholder for the storage of a tensor; the storage contains raw bytes and no pickle."""
        return _Placeholder()


def _unpickle(unpickler: _CheckedUnpickler, path: str) -> Any:
    try:
        return unpickler.load()
    except ForeignPickleError:
        raise
    except Exception as error:  # a broken pickle may raise any exception
        raise ValueError(f"{path}: damaged ({error!r}); write the checkpoint again.") from None


def _load_metadata_type(module: str, name: str) -> Any:
    """Return the type itself, because the content of `.metadata` is used; return None if the type is not allowed."""
    if name not in _METADATA_TYPES.get(module, ()) and not _is_dtype(module, name):
        return None
    return getattr(importlib.import_module(module), name)


def _load_placeholder(module: str, name: str) -> Any:
    """Return a placeholder for an allowed type, because the object is not used; return None if the type is not allowed."""
    is_storage = module == "torch" and name.endswith("Storage")
    return _Placeholder if name in _OBJECT_TYPES.get(module, ()) or is_storage or _is_dtype(module, name) else None


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


class _Placeholder:
    """Takes the place of an allowed type. It accepts every operation of a pickle and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...
    def add(self, value: Any) -> None: ...
