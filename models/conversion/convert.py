"""Checkpoints from one form into the other, without a model, a process group or a GPU: one tensor at a time."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.conversion.hf_export import MAX_SHARD_BYTES, HFFolderWriter, kinds_of
from models.conversion.hf_io import HFWeights, check_tensors, dtype_name, torch_dtype
from models.conversion.mapping import Mapping
from models.conversion.megatron_io import (
    Item,
    MegatronReader,
    MegatronWriter,
    Place,
    layers_share_keys,
    merged_shape,
)
from models.conversion.partial_folder import PartialFolder, Progress, fingerprint, refuse_existing
from models.families import family_of
from models.hf_config import HFConfig
from models.spec import Architecture


def to_megatron(
    config: HFConfig,
    output: Path,
    progress: Progress,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the weights of the Hugging Face folder of `config` as a Megatron checkpoint that any layout loads.

    `dtype`: of all weights but those that Megatron holds in float32 anyway; default: as in the folder.
    An interrupted conversion is taken up where it stopped.

    Raises:
        ValueError: the folder is not a whole model of a known family, the output exists or was begun from something else,
            or the disk has no room for it.
    """
    refuse_existing(output)
    weights = HFWeights(config.path.parent)
    check_tensors(config, weights)
    arch = family_of(config).read(config)
    items = _items(family_of(config).entries(arch), arch, weights, dtype)
    options = dict(convert="to-megatron", dtype=str(dtype), max_shard_bytes=max_shard_bytes)
    with PartialFolder.beside(output, options | {"files": fingerprint([config.path, *weights.files])}) as partial:
        writer = MegatronWriter(partial, items, max_shard_bytes)
        total = sum(item.nbytes for item in items)
        left = sum(item.nbytes for part in writer.missing.values() for item in part)
        partial.require_space(left)
        progress.begin(total, total - left)

        def tensor_of(item: Item) -> Tensor:
            return item.row.to_megatron([weights[name] for name in item.row.hf], arch.sizes, 0, 1)

        def done_with(item: Item) -> None:
            for name in item.row.hf:
                weights.release(name)
            progress.advance(item.nbytes)

        for file in writer.missing:
            writer.write(file, tensor_of, done_with)
        writer.complete()


def to_hf(
    checkpoint: Path,
    config: HFConfig,
    output: Path,
    progress: Progress,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the weights of a Megatron checkpoint as a Hugging Face folder, with config and tokenizer of `config`'s.

    `dtype`: of all weights but those that Megatron holds in float32 anyway; default: as in the checkpoint.
    An interrupted conversion is taken up where it stopped.

    Raises:
        ValueError: the checkpoint is not one of this model, the output exists or was begun from something else, or the
            disk has no room for it.
    """
    refuse_existing(output)
    arch = family_of(config).read(config)
    rows = family_of(config).entries(arch)
    reader = MegatronReader(checkpoint, arch, rows)
    kinds = kinds_of(rows, arch.sizes, {row: dtype_name(dtype or reader.dtype(row)) for row in rows})
    options: dict[str, Any] = dict(convert="to-hf", dtype=str(dtype), max_shard_bytes=max_shard_bytes)
    with PartialFolder.beside(output, options | {"files": fingerprint([config.path, *reader.files])}) as partial:
        writer = HFFolderWriter(partial, kinds, max_shard_bytes)
        left = writer.num_bytes(missing_only=True)
        partial.require_space(left)
        progress.begin(writer.num_bytes(), writer.num_bytes() - left)
        for row in rows:
            if any(writer.needs(name) for name in row.hf):
                for name, tensor in row.to_hf([reader.read(row)], arch.sizes).items():
                    if writer.needs(name):
                        progress.advance(writer.write(name, tensor))
        writer.complete(config.path.parent, {})


def _items(rows: list[Mapping], arch: Architecture, weights: HFWeights, dtype: torch.dtype | None) -> list[Item]:
    """What the checkpoint will hold; raises ValueError where Megatron has one type and the folder several."""
    stacked = layers_share_keys(arch)
    items, first_of = [], dict[str, Item]()
    for row in rows:
        place, shape = Place.of(row, arch, stacked), merged_shape(row, arch.sizes)
        item = Item(row, place, shape, _megatron_dtype(row, weights, dtype))
        first = first_of.setdefault(place.key, item)
        if first.dtype != item.dtype:
            raise ValueError(
                f"{weights.folder}: Megatron holds {first.row.hf[0]} ({first.dtype}) and {row.hf[0]} ({item.dtype}) in one "
                "tensor of one type; choose it with dtype=."
            )
        items.append(item)
    return items


def _megatron_dtype(row: Mapping, weights: HFWeights, dtype: torch.dtype | None) -> torch.dtype:
    if row.is_buffer:
        return torch.float32
    if dtype:
        return dtype
    found = {name: weights.dtypes()[name] for name in row.hf}
    if len(set(found.values())) > 1:
        raise ValueError(f"{weights.folder}: Megatron holds {found} in one tensor of one type; choose it with dtype=.")
    return torch_dtype(found[row.hf[0]])
