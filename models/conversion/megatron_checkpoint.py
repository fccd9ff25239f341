"""Reads and writes Megatron's distributed checkpoints (torch_dist) without Megatron, one tensor at a time.

The format is independent of the layout: each key names a tensor of the whole model, and the tensor is stored in one or several
chunks. The keys are the Megatron names in the family's table, with three exceptions. In models without experts and without
recurrent layers, the layers are stacked (see layers_share_keys): they share one key, and the first dim of the stored tensor is
the layer. The experts of a layer share one key in the same way. In an MTP layer, the keys have `transformer_layer` in place of
`mtp_model_layer`. A stored tensor has the shape that it has in a single process. Only a tensor with one row per token of the
vocabulary may have padding rows, at the end.
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

from models.architecture import Architecture
from models.conversion.mapping import ParamMapping, VocabMapping
from models.conversion.mtp_mapping import MTP_PREFIX
from models.conversion.resumable_folder import ResumableFolder
from parallel.checkpoint_validation import BACKEND_CONFIG, METADATA, validate_checkpoint
from parallel.durable_files import check_folder, fsync_path

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
# name of the decoder layer of an MTP layer: in the model, and in the keys of a checkpoint
_MTP_DECODER = (".mtp_model_layer.", ".transformer_layer.")
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(.*)")
# keys of a checkpoint that do not name weights
_NOT_WEIGHTS = re.compile(r"^(optimizer|chained_\d+|rng_state|common_state|rerun_state|.*\._extra_state)\b")


@dataclass(frozen=True)
class TensorLocation:
    """Location of one Megatron tensor in a checkpoint: the entry `index` of the stored tensor with the name `key`.

    `index` selects an entry in each leading dim. `leading_sizes` are the sizes of these dims: the numbers of stacked layers and
    experts.
    """

    key: str
    index: tuple[int, ...]
    leading_sizes: tuple[int, ...]

    @classmethod
    def of(cls, row: ParamMapping, arch: Architecture, share_keys: bool) -> "TensorLocation":
        """Return the location of the tensor of `row`. With `share_keys`, all layers share one key."""
        key, index, leading_sizes = row.megatron.replace(*_MTP_DECODER), (), ()
        layer = _LAYER.fullmatch(key)
        if share_keys and layer:
            key, index, leading_sizes = f"decoder.layers.{layer[2]}", (int(layer[1]),), (arch.num_layers,)
        if row.expert is not None:
            match = _EXPERT.fullmatch(key)
            assert match, f"{key} has no expert index"
            key, index = f"{match[1]}.experts.{match[2]}", (*index, row.expert)
            leading_sizes = (*leading_sizes, arch.num_experts)
        return cls(key, index, leading_sizes)

    @property
    def extra_state(self) -> str | None:
        """Key of the extra state that Megatron stores with a linear layer (FP8 statistics); None if there is no extra state."""
        if not re.search(r"^decoder\..*\.linear_\w+\.weight$", self.key):
            return None
        name = self.key.removesuffix("weight") + "_extra_state"
        return f"{name}/shard_{'.'.join(map(str, self.index or (0,)))}_{'.'.join(map(str, self.leading_sizes or (1,)))}"


def layers_share_keys(arch: Architecture) -> bool:
    """Whether Megatron 0.19 stacks the layers of this model, so that they share keys.

    It stacks no layers if moe_layer_freq or linear_attention_freq has one entry per layer.
    """
    return not any(
        isinstance(arch.transformer.get(name, 1), list) for name in ("moe_layer_freq", "linear_attention_freq")
    )


def contains_mtp(folder: str | Path) -> bool:
    """Whether the checkpoint has MTP layers. A run saves them only if it trains them.

    Raises ValueError if `folder` is no checkpoint.
    """
    return any(key.startswith(MTP_PREFIX) for key in validate_checkpoint(Path(folder)).state_dict_metadata)


def megatron_shape(row: ParamMapping, sizes: dict[str, int]) -> tuple[int, ...]:
    """Return the shape of the row's Megatron tensor in a single process, without padding."""
    hf_tensors = [torch.empty(shape, device="meta") for shape in row.hf_shapes(sizes).values()]
    return tuple(row.to_megatron(hf_tensors, sizes, 0, 1).shape)


class MegatronReader:
    """Reads the weights of a checkpoint of any layout, one row of the family's table at a time."""

    def __init__(self, folder: str | Path, arch: Architecture, rows: Sequence[ParamMapping]) -> None:
        """Validate `folder` and read its metadata.

        Raises ValueError if `folder` is not a complete checkpoint of this model, or if a file differs from its hash. Raises
        ForeignPickleError (a ValueError) if one of the checkpoint's pickles names a type that is not allowed, or if a file
        contains a TorchScript program.
        """
        self.folder, self.arch = Path(folder), arch
        metadata = validate_checkpoint(self.folder)
        check_folder(self.folder)
        described = metadata.state_dict_metadata.items()
        self._stored = {key: found for key, found in described if isinstance(found, TensorStorageMetadata)}
        self._storage: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self.layers_share_keys = not any(re.match(r"decoder\.layers\.\d+\.", key) for key in self._stored)
        self._check_tensors(rows)

    @property
    def files(self) -> list[Path]:
        """The metadata file, and the files whose contents it lists."""
        names = {info.relative_path for info in self._storage.values()}
        return [self.folder / METADATA, *(self.folder / name for name in sorted(names))]

    def dtype(self, row: ParamMapping) -> torch.dtype:
        """Return the dtype in which the row's tensor is stored."""
        return self._stored[self._locate(row).key].properties.dtype

    def read(self, row: ParamMapping) -> Tensor:
        """Read the row's Megatron tensor into a new tensor, in its single-process shape and without padding rows."""
        location, shape = self._locate(row), megatron_shape(row, self.arch.sizes)
        stored = self._stored[location.key]
        requested = ChunkStorageMetadata(
            torch.Size([*location.index, *[0] * len(shape)]), torch.Size([*[1] * len(location.index), *shape])
        )
        out, num_read = None, 0
        for item in create_read_items_for_chunk_list(location.key, stored, [requested]):
            piece = self._load(item.storage_index)
            for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                piece = piece.narrow(dim, start, size)
            num_read += piece.numel()
            if piece.shape == requested.sizes:  # the chunk is the whole tensor, so no copy is needed
                out = piece
                break
            out = torch.empty(requested.sizes, dtype=stored.properties.dtype) if out is None else out
            target = out
            for dim, (start, size) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                target = target.narrow(dim, start, size)
            target.copy_(piece)
        if out is None or num_read != math.prod(shape):
            raise ValueError(
                f"{self.folder}: only {num_read} of {math.prod(shape)} elements of {location.key} are stored; write the "
                "checkpoint again."
            )
        return out.reshape(shape)

    def _load(self, index: MetadataIndex) -> Tensor:
        info = self._storage[index]
        with (self.folder / info.relative_path).open("rb") as file:
            view = cast(IO[bytes], _create_file_view(file, info.offset, info.length))
            return torch.load(view, map_location="cpu", weights_only=True)

    def _locate(self, row: ParamMapping) -> TensorLocation:
        return TensorLocation.of(row, self.arch, self.layers_share_keys)

    def _check_tensors(self, rows: Sequence[ParamMapping]) -> None:
        tensors = {key: tuple(stored.size) for key, stored in self._stored.items()}
        if any(".lora." in key for key in tensors):
            raise ValueError(
                f"checkpoint={self.folder}: it has only LoRA adapters, not the weights of the model; use an exported folder of "
                "the run, such as hf/, which has the merged weights."
            )
        problems, known = [], set()
        for row in rows:
            location, shape = self._locate(row), megatron_shape(row, self.arch.sizes)
            known.add(location.key)
            expected, stored_shape = (*location.leading_sizes, *shape), tensors.get(location.key)
            padded = (
                isinstance(row, VocabMapping)
                and stored_shape
                and stored_shape[0] >= expected[0]
                and stored_shape[1:] == expected[1:]
            )
            if stored_shape is None:
                problems.append(f"{location.key} is missing (expected {list(expected)})")
            elif stored_shape != expected and not padded:
                problems.append(f"{location.key} is {list(stored_shape)}, config.json says {list(expected)}")
        extra = [key for key in tensors if key not in known and not _NOT_WEIGHTS.match(key)]
        problems += [f"{key} {list(tensors[key])} is not in the table" for key in extra]
        if problems:
            shown = "; ".join(sorted(set(problems))[:5])
            raise ValueError(
                f"checkpoint={self.folder}: it is a checkpoint of another model, {len(set(problems))} tensors differ: "
                f"{shown}. Name the Hugging Face folder of the model that this checkpoint belongs to."
            )


@dataclass(frozen=True)
class TensorToWrite:
    """A Megatron tensor to write: its row, its location, and the shape and dtype in which the checkpoint stores it."""

    row: ParamMapping
    location: TensorLocation
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class MegatronWriter:
    """Writes a checkpoint that any layout can load, without optimizer state. At most one tensor is in memory.

    (torch's own FileSystemWriter keeps all tensors of a file in memory until the file is complete.)
    """

    def __init__(self, partial: ResumableFolder, items: Sequence[TensorToWrite], max_file_bytes: int) -> None:
        self.partial, self.files = partial, _assign_files(items, max_file_bytes)

    @property
    def missing(self) -> dict[str, list[TensorToWrite]]:
        """The files that are not written yet: file name -> tensors of the file."""
        return {name: items for name, items in self.files.items() if name not in self.partial.finished}

    def write(
        self, name: str, tensor_of: Callable[[TensorToWrite], Tensor], after_write: Callable[[TensorToWrite], object]
    ) -> None:
        """Write the file `name`. `tensor_of` returns the tensor to write; `after_write` is called after each written tensor."""
        lengths = []
        with self.partial.unfinished(name).open("wb") as file:
            for item in self.files[name]:
                start = file.tell()
                tensor = tensor_of(item)
                assert tuple(tensor.shape) == item.shape, f"{item.row.megatron}: {list(tensor.shape)}"
                torch_save_tensor(tensor.to(item.dtype).view(*[1] * len(item.location.index), *item.shape), file)
                del tensor
                after_write(item)
                lengths.append(file.tell() - start)
        self.partial.finish(name, lengths)

    def complete(self) -> None:
        """Write the files that describe the tensors, then rename the folder to its final name."""
        described: dict[str, TensorStorageMetadata] = {}
        locations: dict[MetadataIndex, _StorageInfo] = {}
        for name, items in self.files.items():
            offset = 0
            for item, length in zip(items, self.partial.finished[name], strict=True):
                locations[MetadataIndex(item.location.key, _add_description(described, item))] = _StorageInfo(
                    name, offset, length
                )
                offset += length
        objects = self._write_objects()
        stored = described | {index.fqn: BytesStorageMetadata() for index in objects}
        metadata = Metadata(stored, None, locations | objects, StorageMeta(), CURRENT_DCP_VERSION)
        folder = self.partial.folder
        (folder / METADATA).write_bytes(pickle.dumps(metadata))
        (folder / BACKEND_CONFIG).write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )
        fsync_path(folder / METADATA)
        self.partial.complete()

    def _write_objects(self) -> dict[MetadataIndex, _StorageInfo]:
        """Write the objects that Megatron expects, and return their locations.

        These objects are an empty common state, and an empty extra state for each linear layer.
        """
        locations = {}
        name = f"__{len(self.files)}_0.distcp"
        states = [item.location.extra_state for items in self.files.values() for item in items]
        with (self.partial.folder / name).open("wb") as file:
            for key, value in [("common_state/shard_0_1", {}), *((state, None) for state in states if state)]:
                content = io.BytesIO()
                torch.save([value], content)
                locations[MetadataIndex(key)] = _StorageInfo(name, file.tell(), content.tell())
                file.write(content.getbuffer())
        return locations


def torch_save_tensor(tensor: Tensor, file: IO[bytes]) -> None:
    """Call torch.save. If the write fails, raise the OSError of the write, and not torch's later error about the archive."""
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (KeyboardInterrupt, OSError)):
            cause = cause.__context__
        raise cause or error from None


def _assign_files(items: Sequence[TensorToWrite], max_bytes: int) -> dict[str, list[TensorToWrite]]:
    files: list[list[TensorToWrite]] = [[]]
    size = 0
    for item in items:
        if files[-1] and size + item.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(item)
        size += item.nbytes
    return {f"__{number}_0.distcp": members for number, members in enumerate(files)}


def _add_description(described: dict[str, TensorStorageMetadata], item: TensorToWrite) -> torch.Size:
    """Add the tensor `item` to the description of its key. Returns the offset of `item` in the whole tensor of this key."""
    key, size = item.location.key, torch.Size([*item.location.leading_sizes, *item.shape])
    if key not in described:
        described[key] = TensorStorageMetadata(TensorProperties(dtype=item.dtype), size, [])
    offset = torch.Size([*item.location.index, *[0] * len(item.shape)])
    sizes = torch.Size([*[1] * len(item.location.index), *item.shape])
    described[key].chunks.append(ChunkStorageMetadata(offset, sizes))
    return offset
