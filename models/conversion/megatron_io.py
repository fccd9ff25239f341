"""Megatron's distributed checkpoints (torch_dist) without Megatron: read and written one tensor at a time, by the table.

The format knows no layout: a key names a tensor of the whole model, stored in any number of pieces. Keys are the table's
names but for two rules of Megatron's, seen in checkpoints of live models: where all layers are alike they share a key, whose
first dim counts them; and the experts of a layer share one too. A tensor cut over tensor-parallel ranks is stored as one
process would hold it, so a row with one shard describes it; only vocabularies may have padding rows at their end.
"""

import io
import json
import math
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from models.conversion.mapping import Mapping, VocabMapping
from models.conversion.partial_folder import PartialFolder
from models.spec import Architecture
from parallel.checked_pickle import check_checkpoint
from parallel.disk import sync

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.*)")
_NOT_WEIGHTS = re.compile(r"^(optimizer|chained_\d+|rng_state|common_state|rerun_state|.*\._extra_state)\b")
_METADATA, _CONFIG = ".metadata", "metadata.json"


@dataclass(frozen=True)
class Place:
    """Where a row's tensor is in a checkpoint: under `key`, at `index` of leading dims that have `counts` places."""

    key: str
    index: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, row: Mapping, arch: Architecture, stacked: bool) -> "Place":
        """`stacked`: layers share keys."""
        key, index, counts = row.megatron, (), ()
        layer = _LAYER.fullmatch(key)
        if stacked and layer:
            key, index, counts = f"decoder.layers.{layer[2]}", (int(layer[1]),), (arch.num_layers,)
        if row.expert is not None:
            found = _EXPERT.fullmatch(key)
            assert found, f"{key} has no expert's number"
            key, index, counts = f"{found[1]}.experts.{found[2]}", (*index, row.expert), (*counts, arch.num_experts)
        return cls(key, index, counts)

    @property
    def extra_state(self) -> str | None:
        """The key under which Megatron keeps what a linear layer needs besides its weight (nothing, in full precision)."""
        if not re.search(r"\.linear_\w+\.weight$", self.key):
            return None
        name = self.key.removesuffix("weight") + "_extra_state"
        return f"{name}/shard_{'.'.join(map(str, self.index or (0,)))}_{'.'.join(map(str, self.counts or (1,)))}"


def layers_share_keys(arch: Architecture) -> bool:
    """Whether Megatron 0.19 stacks the layers of such a model: not where some may have experts and some not."""
    return not isinstance(arch.transformer.get("moe_layer_freq", 1), list)


def merged_shape(row: Mapping, sizes: dict[str, int]) -> tuple[int, ...]:
    """Shape of the row's tensor in one process, without padding."""
    whole = [torch.empty(shape, device="meta") for shape in row.hf_shapes(sizes).values()]
    return tuple(row.to_megatron(whole, sizes, 0, 1).shape)


class MegatronReader:
    """The weights of a checkpoint by row of the table, whichever layout wrote it."""

    def __init__(self, folder: str | Path, arch: Architecture, rows: Sequence[Mapping]) -> None:
        """Read the metadata of `folder`; raises ValueError unless it has the weights of such a model, all of them.

        Raises ForeignPickleError (a ValueError) where it would run code.
        """
        self.folder, self.arch = Path(folder), arch
        if not (self.folder / _METADATA).is_file() or not (self.folder / _CONFIG).is_file():
            raise ValueError(
                f"checkpoint={folder}: {_METADATA} and {_CONFIG} are not there; a folder written by Megatron's distributed "
                "checkpointing (torch_dist) is expected, such as the `checkpoint` of a run."
            )
        metadata = check_checkpoint(self.folder)
        assert metadata is not None, f"{self.folder / _METADATA} was there"
        described = metadata.state_dict_metadata.items()
        self._stored = {key: found for key, found in described if isinstance(found, TensorStorageMetadata)}
        self._where: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self.stacked = not any(re.match(r"decoder\.layers\.\d+\.", key) for key in self._stored)
        self._check(rows)
        self._check_files()

    @property
    def files(self) -> list[Path]:
        """The files that make the checkpoint."""
        names = {info.relative_path for info in self._where.values()}
        return [self.folder / _METADATA, *(self.folder / name for name in sorted(names))]

    def dtype(self, row: Mapping) -> torch.dtype:
        """The type the row's tensor is stored in."""
        return self._stored[self._place(row).key].properties.dtype

    def read(self, row: Mapping) -> Tensor:
        """The row's tensor as one process holds it, a new one; padding rows of a vocabulary are left out."""
        place, shape = self._place(row), merged_shape(row, self.arch.sizes)
        stored = self._stored[place.key]
        wanted = ChunkStorageMetadata(
            torch.Size([*place.index, *[0] * len(shape)]), torch.Size([*[1] * len(place.index), *shape])
        )
        out, found = None, 0
        for item in create_read_items_for_chunk_list(place.key, stored, [wanted]):
            piece = self._load(item.storage_index)
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dim, start, size)
            found += piece.numel()
            if piece.shape == wanted.sizes:  # all of it: no copy
                out = piece
                break
            out = torch.empty(wanted.sizes, dtype=stored.properties.dtype) if out is None else out
            target = out
            for dim, (start, size) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                target = target.narrow(dim, start, size)
            target.copy_(piece)
        if out is None or found != math.prod(shape):
            raise ValueError(f"{self.folder}: {found} of {math.prod(shape)} numbers of {place.key} are stored.")
        return out.reshape(shape)

    def _load(self, index: MetadataIndex) -> Tensor:
        info = self._where[index]
        with (self.folder / info.relative_path).open("rb") as file:
            view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
            return torch.load(view, map_location="cpu", weights_only=True)

    def _place(self, row: Mapping) -> Place:
        return Place.of(row, self.arch, self.stacked)

    def _check(self, rows: Sequence[Mapping]) -> None:
        tensors = {key: tuple(stored.size) for key, stored in self._stored.items()}
        problems, known = [], set()
        for row in rows:
            place, shape = self._place(row), merged_shape(row, self.arch.sizes)
            known.add(place.key)
            expected, found = (*place.counts, *shape), tensors.get(place.key)
            padded = isinstance(row, VocabMapping) and found and found[0] >= expected[0] and found[1:] == expected[1:]
            if found is None:
                problems.append(f"{place.key} is missing (expected {list(expected)})")
            elif found != expected and not padded:
                problems.append(f"{place.key} is {list(found)}, config.json says {list(expected)}")
        extra = [key for key in tensors if key not in known and not _NOT_WEIGHTS.match(key)]
        problems += [f"{key} {list(tensors[key])} is not in the table" for key in extra]
        if problems:
            shown = "; ".join(sorted(set(problems))[:5])
            raise ValueError(
                f"checkpoint={self.folder}: it is no checkpoint of this model, {len(set(problems))} tensors differ: "
                f"{shown}. Name the Hugging Face folder that it was trained from."
            )

    def _check_files(self) -> None:
        for path in self.files:
            needed = max((i.offset + i.length for i in self._where.values() if i.relative_path == path.name), default=0)
            size = path.stat().st_size if path.is_file() else None
            if size is None or size < needed:
                found = "is missing" if size is None else f"has {size} bytes, expected {needed}: it is cut short"
                raise ValueError(f"{path} {found}. Copy or write the checkpoint again.")


@dataclass(frozen=True)
class Item:
    """One tensor to be written: a row, its place and its type."""

    row: Mapping
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class MegatronWriter:
    """A weights-only checkpoint that any layout loads. No tensor is kept after it was written.

    torch's own FileSystemWriter keeps all tensors of a file until it is whole; the format is simple enough to write.
    """

    def __init__(self, partial: PartialFolder, items: Sequence[Item], max_file_bytes: int) -> None:
        self.partial, self.files = partial, _files(items, max_file_bytes)

    @property
    def missing(self) -> dict[str, list[Item]]:
        """What is still to be written, by file."""
        return {name: items for name, items in self.files.items() if name not in self.partial.finished}

    def write(self, name: str, tensor_of: Callable[[Item], Tensor], done_with: Callable[[Item], object]) -> None:
        """Write one of `missing`, asking for its tensors one after the other and saying when each is written."""
        lengths = []
        with self.partial.unfinished(name).open("wb") as file:
            for item in self.files[name]:
                start = file.tell()
                tensor = tensor_of(item)
                assert tuple(tensor.shape) == item.shape, f"{item.row.megatron}: {list(tensor.shape)}"
                save_tensor(tensor.to(item.dtype).view(*[1] * len(item.place.index), *item.shape), file)
                del tensor
                done_with(item)
                lengths.append(file.tell() - start)
        self.partial.finish(name, lengths)

    def complete(self) -> None:
        """Write what describes the tensors; the folder gets its name."""
        described: dict[str, TensorStorageMetadata] = {}
        where: dict[MetadataIndex, _StorageInfo] = {}
        for name, items in self.files.items():
            offset = 0
            for item, length in zip(items, self.partial.finished[name], strict=True):
                where[MetadataIndex(item.place.key, _describe(described, item))] = _StorageInfo(name, offset, length)
                offset += length
        objects = self._write_objects()
        stored = described | {index.fqn: BytesStorageMetadata() for index in objects}
        metadata = Metadata(stored, None, where | objects, StorageMeta(), CURRENT_DCP_VERSION)
        folder = self.partial.folder
        (folder / _METADATA).write_bytes(pickle.dumps(metadata))
        (folder / _CONFIG).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
        sync(folder / _METADATA)
        self.partial.complete()

    def _write_objects(self) -> dict[MetadataIndex, _StorageInfo]:
        """What is no tensor: a common state and the linear layers' extra states, all of them empty; returns their places."""
        where = {}
        name = f"__{len(self.files)}_0.distcp"
        states = [item.place.extra_state for items in self.files.values() for item in items]
        with (self.partial.folder / name).open("wb") as file:
            for key, value in [("common_state/shard_0_1", {}), *((state, None) for state in states if state)]:
                text = io.BytesIO()
                torch.save([value], text)
                where[MetadataIndex(key)] = _StorageInfo(name, file.tell(), text.tell())
                file.write(text.getbuffer())
        return where


def save_tensor(tensor: Tensor, file: IO[bytes]) -> None:
    """`torch.save`, whose archive cannot be closed after a failed write: what made it fail is raised, not that."""
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (KeyboardInterrupt, OSError)):
            cause = cause.__context__
        raise cause or error from None


def _files(items: Sequence[Item], max_bytes: int) -> dict[str, list[Item]]:
    files: list[list[Item]] = [[]]
    size = 0
    for item in items:
        if files[-1] and size + item.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(item)
        size += item.nbytes
    return {f"__{number}_0.distcp": members for number, members in enumerate(files)}


def _describe(described: dict[str, TensorStorageMetadata], item: Item) -> torch.Size:
    """Add the item to the description of its key; returns its offset there."""
    key, size = item.place.key, torch.Size([*item.place.counts, *item.shape])
    if key not in described:
        described[key] = TensorStorageMetadata(TensorProperties(dtype=item.dtype), size, [])
    offset = torch.Size([*item.place.index, *[0] * len(item.shape)])
    sizes = torch.Size([*[1] * len(item.place.index), *item.shape])
    described[key].chunks.append(ChunkStorageMetadata(offset, sizes))
    return offset
