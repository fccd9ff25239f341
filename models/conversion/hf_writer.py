"""Writes Hugging Face folders one tensor at a time. A folder has a temporary name until it is complete."""

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from models.architecture import ENGINE_CLASSIFIER_BIAS
from models.conversion.expert_stacks import expert_slice_of, is_mxfp4, stored_name, stored_tensors
from models.conversion.hf_reader import (
    INDEX,
    ITEM_BYTES,
    TORCH_NAMES,
    TensorEntry,
    UnchangedMtpTensors,
    dtype_name,
    file_layout,
    torch_dtype,
)
from models.conversion.mapping import ParamMapping
from models.conversion.resumable_folder import ResumableFolder
from models.families import family_of
from models.hf_config import HFConfig

MAX_SHARD_BYTES = 2_000_000_000  # default limit for the size of a weight file
TensorSpec = tuple[str, tuple[int, ...]]  # (dtype in the spelling of safetensors, shape)
_COPIED_FILES = ("config.json", "generation_config.json", "chat_template.json", "*.jinja", "tokenizer*", "vocab*")
_COPIED_FILES += ("merges.txt", "*.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json")
_COPIED_FILES += ("*preprocessor_config.json", "processor_config.json")  # of image models


class HFFolderWriter:
    """Writes the safetensors files of a Hugging Face folder. Accepts the tensors in any order and keeps none in memory.

    The position of every tensor in its file is known in advance, and each tensor is written to its position. A file gets its
    final name when all its tensors are written. `write` takes each tensor under the name that Family.param_mappings gives it.
    Under these names, each expert has its own tensors. If the folder stacks the experts of a layer, each tensor of an expert is
    written to its slice of the stack (models/conversion/expert_stacks.py).
    """

    def __init__(
        self,
        partial: ResumableFolder,
        tensors: dict[str, TensorSpec],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        unchanged: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        """`tensors`: all tensors of the model, in file order. A tensor larger than `max_shard_bytes` gets a file of its own.

        `unchanged`: tensors that are copied from another folder byte for byte. They do not influence the dtype in config.json.
        """
        self._dtype = TORCH_NAMES[main_dtype(tensors)]
        tensors = {**tensors, **(unchanged or {})}
        self.partial, self.tensors = partial, tensors
        stored = stored_tensors(tensors)
        self._file_of_stored: dict[str, str] = {}
        # file name -> (bytes before the first tensor, tensor name -> header entry)
        self._layouts: dict[str, tuple[bytes, dict[str, TensorEntry]]] = {}
        shards = list(_assign_shards(stored, max_shard_bytes))
        for number, names in enumerate(shards, 1):
            file = "model.safetensors"
            if len(shards) > 1:
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._layouts[file] = file_layout({name: stored[name] for name in names})
            self._file_of_stored |= dict.fromkeys(names, file)
        self._file_of = {name: self._file_of_stored[stored_name(name)] for name in tensors}
        self._missing: dict[str, set[str]] = {file: set() for file in self._layouts}
        for name, file in self._file_of.items():
            self._missing[file].add(name)
        for file in partial.finished:
            self._missing[file].clear()
        self._open: dict[str, BinaryIO] = {}

    def needs(self, name: str) -> bool:
        """Whether the tensor is not written yet."""
        return name in self._missing[self._file_of[name]]

    def num_bytes(self, missing_only: bool = False) -> int:
        """Return the total bytes of all tensors; with `missing_only`, only of the tensors that are not written yet."""
        return sum(
            math.prod(shape) * ITEM_BYTES[dtype]
            for name, (dtype, shape) in self.tensors.items()
            if not missing_only or self.needs(name)
        )

    def write(self, name: str, tensor: Tensor) -> int:
        """Cast the tensor to its planned dtype and write it to its position. Returns the number of bytes."""
        file = self._file_of[name]
        prefix, entries = self._layouts[file]
        dtype, shape = self.tensors[name]
        assert self.needs(name) and tuple(tensor.shape) == shape, f"{name} {list(tensor.shape)}: expected {list(shape)}"
        if file not in self._open:
            self._open[file] = self.partial.unfinished(file).open("wb")
            self._open[file].write(prefix)
        expert_slice, start = expert_slice_of(name), entries[stored_name(name)].start
        if expert_slice is not None:
            tensor = expert_slice.oriented(tensor)
            start += expert_slice.index * math.prod(shape) * ITEM_BYTES[dtype]
        out = tensor.detach().to("cpu", torch_dtype(dtype)).contiguous()
        self._open[file].seek(start)
        # PyTorch cannot resize a storage that NumPy uses, and `out` may be the caller's tensor. So NumPy gets a second storage
        # over the same bytes.
        alias = torch.from_dlpack(out.reshape(-1).view(torch.uint8))
        self._open[file].write(alias.numpy().data)
        self._missing[file].remove(name)
        if not self._missing[file]:
            self._open.pop(file).close()
            self.partial.finish(file)
        return out.nbytes

    def complete(self, source: Path, extra_files: dict[str, str], fields: dict[str, Any] | None = None) -> None:
        """Write the index and `extra_files`, and copy the config and the tokenizer files from `source`. Then rename the folder.

        `extra_files` is file name -> text. If `fields` is given, config.json gets these fields instead of the fields in `source`.
        """
        missing = sorted(name for names in self._missing.values() for name in names)
        assert not missing, f"{len(missing)} tensors were not written, the first is {missing[0]}"
        folder = self.partial.folder
        if len(self._layouts) > 1:
            index = {"metadata": {"total_size": self.num_bytes()}, "weight_map": self._file_of_stored}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for pattern in _COPIED_FILES:
            for path in source.glob(pattern):
                shutil.copyfile(path, folder / path.name)
        config = dict(fields or json.loads((folder / "config.json").read_text()))
        _set_dtype(config, self._dtype)
        if is_mxfp4(config):  # the source is quantized, but the tensors of this folder are not
            del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name, text in extra_files.items():
            (folder / name).write_text(text + "\n")
        self.partial.complete()


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype in the fields of a config, and in those nested configs of an image model that have a field for it."""
    config.pop("torch_dtype", None)  # older versions of transformers use this name for the field dtype
    config["dtype"] = dtype
    for name in ("text_config", "vision_config"):
        nested = config.get(name)
        if isinstance(nested, dict) and nested.keys() & {"dtype", "torch_dtype"}:
            config[name] = {key: value for key, value in nested.items() if key != "torch_dtype"} | dict(dtype=dtype)


def write_export(
    tensors: Iterable[tuple[str, Tensor]],
    config: HFConfig,
    target: str | Path,
    extra_files: dict[str, str],
    copy_mtp: bool = True,
) -> None:
    """Write a Hugging Face folder with `tensors`, `config`, the tokenizer beside `config`, and `extra_files` (file name -> text).

    `tensors` are all tensors of a model with this config, in any order. Each is written before the next is taken. With
    `copy_mtp`, MTP layers that are not among `tensors` are copied byte for byte from the folder that contains `config`. `target`
    appears when it is complete. Raises FileExistsError if `target` exists.
    """
    target = Path(target)
    if target.exists():
        raise FileExistsError(f"{target} exists already; an export never replaces a folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    with ResumableFolder(target, folder, {}) as partial:
        try:
            unchanged_mtp = UnchangedMtpTensors.of(config) if copy_mtp else UnchangedMtpTensors(None, ())
            _export(partial, config, tensors, extra_files, unchanged_mtp)
        except BaseException:
            partial.discard()
            raise


def _export(
    partial: ResumableFolder,
    config: HFConfig,
    tensors: Iterable[tuple[str, Tensor]],
    extra_files: dict[str, str],
    unchanged_mtp: UnchangedMtpTensors,
) -> None:
    remaining = iter(tensors)
    first = next(remaining)
    family = family_of(config)
    arch, dtype = family.read(config), first[1].dtype
    rows = family.param_mappings(arch)
    specs = tensor_specs(rows, arch.sizes, dict.fromkeys(rows, dtype_name(dtype)))
    # SGLang's classifier has a bias that transformers does not have, and does not initialize it
    constants = (
        {ENGINE_CLASSIFIER_BIAS: torch.zeros(1, dtype=dtype)}
        if arch.is_reward_model and family.engine_classifier_has_bias
        else {}
    )
    specs |= {name: (dtype_name(dtype), tuple(tensor.shape)) for name, tensor in constants.items()}
    sources = family.mtp_duplicates(arch)
    specs |= {duplicate: specs[source] for duplicate, source in sources.items()}
    writer = HFFolderWriter(partial, specs, unchanged=unchanged_mtp.specs)
    partial.require_space(writer.num_bytes())
    for name, tensor in chain([first], remaining, constants.items(), unchanged_mtp):
        writer.write(name, tensor)
        for duplicate in (duplicate for duplicate, source in sources.items() if source == name):
            writer.write(duplicate, tensor)
    writer.complete(config.path.parent, extra_files, config.fields)


def tensor_specs(
    rows: Sequence[ParamMapping], sizes: dict[str, int], dtypes: dict[ParamMapping, str]
) -> dict[str, TensorSpec]:
    """Return name -> (dtype, shape) for the Hugging Face tensors of these rows. Buffers are always float32."""
    return {
        name: ("F32" if row.is_buffer else dtypes[row], shape)
        for row in rows
        for name, shape in row.hf_shapes(sizes).items()
    }


def main_dtype(tensors: dict[str, TensorSpec]) -> str:
    """Return the dtype that most elements of the tensors have."""
    num_elements: dict[str, int] = {}
    for dtype, shape in tensors.values():
        num_elements[dtype] = num_elements.get(dtype, 0) + math.prod(shape)
    return max(num_elements, key=lambda dtype: num_elements[dtype])


def _assign_shards(tensors: dict[str, TensorSpec], max_bytes: int) -> Iterator[list[str]]:
    """Yield the tensor names of each file. A file has at most `max_bytes` bytes of tensors, or one larger tensor."""
    names, size = [], 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        if names and size + nbytes > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names
