"""Reads Hugging Face checkpoints: validates the headers of all files without torch, then memory-maps the tensors.

A safetensors file consists of three parts: the length of the header (8 bytes, little-endian), the header (JSON), and the bytes of
the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from models.architecture import ENGINE_CLASSIFIER_BIAS
from models.conversion.expert_stacks import (
    BLOCK,
    DEQUANTIZED_DTYPE,
    NAN_SCALE,
    PACKED_DTYPE,
    SCALES_SUFFIX,
    ExpertSlice,
    dequantize_mxfp4,
    expert_slice_of,
    mxfp4_names,
    mxfp4_shapes,
    stored_tensors,
)
from models.families import family_of
from models.hf_config import HFConfig
from parallel.durable_files import check_folder

if TYPE_CHECKING:  # the driver reads headers without importing torch
    import torch
    from torch import Tensor

INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Supported dtypes of weights in the spelling of safetensors -> bytes per element."""
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Supported dtypes of weights in the spelling of safetensors -> names of torch's dtypes."""
_SINGLE_FILE = "model.safetensors"
_LENGTH_BYTES = 8  # number of bytes at the beginning of a file that contain the length of the header
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_NUM_SAMPLES, _SAMPLE_BYTES = 16, 4096  # samples of each weight file for a fingerprint, and the size of a sample
_MAP_NORESERVE = 0x4000  # Linux flag: a private mapping may be larger than the free memory


@dataclass(frozen=True)
class TensorEntry:
    """Header entry of one tensor in a safetensors file."""

    dtype: str  # spelling of safetensors: F32, BF16, ...
    shape: tuple[int, ...]
    start: int  # offset in bytes from the beginning of the file
    nbytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return tensor name -> header entry. Raises ValueError if the file is truncated or is not a safetensors file."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if file_bytes < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
            raise _damaged(
                path, f"it has {file_bytes} bytes, but its first bytes say that its header has {length} bytes"
            )
        text = file.read(length)
    try:
        fields = json.loads(text)
        fields.pop("__metadata__", None)
        header_end = _LENGTH_BYTES + length
        entries = {name: _entry(field, header_end) for name, field in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its header cannot be read ({error!r})") from None
    end = max((entry.start + entry.nbytes for entry in entries.values()), default=header_end)
    if end > file_bytes:
        truncated = next(name for name, entry in entries.items() if entry.start + entry.nbytes > file_bytes)
        raise _damaged(
            path,
            f"it has {file_bytes} bytes, but its header says {end} bytes; the first truncated tensor is {truncated}",
        )
    for name, entry in entries.items():
        _check_bytes(path, name, entry)
    return entries


def _entry(field: dict, header_end: int) -> TensorEntry:
    begin, end = field["data_offsets"]
    return TensorEntry(field["dtype"], tuple(map(int, field["shape"])), header_end + begin, end - begin)


def _check_bytes(path: Path, name: str, entry: TensorEntry) -> None:
    if entry.dtype in ITEM_BYTES and entry.nbytes != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
        raise _damaged(
            path, f"{name} has {entry.nbytes} bytes, which does not match shape {list(entry.shape)} in {entry.dtype}"
        )


def _damaged(path: Path, problem: str) -> ValueError:
    return ValueError(f"{path}: the file is damaged or incomplete: {problem}. Download or write it again.")


def file_layout(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return (bytes before the first tensor, name -> header entry) of a file with these tensors in this order.

    `tensors` is name -> (dtype, shape).
    """
    fields: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor begins at a multiple of 8 bytes
    prefix = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    del fields["__metadata__"]
    return prefix, {name: _entry(field, len(prefix)) for name, field in fields.items()}


class HFWeights:
    """The tensors of a Hugging Face folder by name. The files are memory-mapped, so a page is read when it is first used.

    If a folder stacks experts, the tensors of one expert can be read by their names in the family's table (see
    models/conversion/expert_stacks.py).
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the headers of all weight files in `folder`.

        Raises:
            ValueError: there are no safetensors files, a file is damaged or missing, or files and index disagree.
        """
        self.folder = Path(folder)
        self._entries: dict[str, TensorEntry] = {}
        self._file_of: dict[str, Path] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        index = _read_index(self.folder)
        for path in _weight_files(self.folder, index):
            for name, entry in read_header(path).items():
                if name in self._file_of:
                    raise ValueError(f"{path}: {name} is also in {self._file_of[name].name}; remove one of the files.")
                self._entries[name], self._file_of[name] = entry, path
        if index is not None:
            self._check_index(index)

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            if name not in self._file_of or self._file_of[name].name != file:
                actual = f"it is in {self._file_of[name].name}" if name in self._file_of else "no file contains it"
                raise ValueError(
                    f"{self.folder / INDEX}: {name} should be in {file}, but {actual}. Download index and files again."
                )
        extra = sorted(self._file_of.keys() - index.keys())
        if extra:
            raise ValueError(
                f"{self.folder / INDEX}: {len(extra)} tensors in the files are not in the index; the first is "
                f"{extra[0]} in {self._file_of[extra[0]].name}. Download index and files again."
            )

    @property
    def files(self) -> list[Path]:
        """Files that contain the tensors."""
        return sorted(set(self._file_of.values()))

    def file_of(self, name: str) -> Path:
        """Return the file that contains the tensor."""
        return self._file_of[name]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, from the file headers."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def dtypes(self) -> dict[str, str]:
        """Return the dtype of every tensor in the spelling of safetensors (F32, BF16, ...), from the file headers."""
        return {name: entry.dtype for name, entry in self._entries.items()}

    def dtype_of(self, name: str) -> str:
        """Return the dtype of a tensor in the spelling of safetensors. Tensors in MXFP4 are read as bfloat16."""
        _, stored = self._locate(name)
        return DEQUANTIZED_DTYPE if len(stored) > 1 else self._entries[stored[0]].dtype

    def __contains__(self, name: str) -> bool:
        return all(stored in self._entries for stored in self._locate(name)[1])

    def _locate(self, name: str) -> tuple[ExpertSlice | None, tuple[str, ...]]:
        """Return (which slice of which stack the tensor `name` is, names of the stored tensors that contain this tensor).

        The first element is None if the folder stores a tensor of this name, or if no slice of a stack can have this name.
        """
        expert_slice = None if name in self._entries else expert_slice_of(name)
        if expert_slice is None:
            return None, (name,)
        quantized = mxfp4_names(expert_slice.stack)
        is_quantized = expert_slice.stack not in self._entries and quantized[0] in self._entries
        return expert_slice, quantized if is_quantized else (expert_slice.stack,)

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor, which shares memory with the mapped file. Changes to the tensor are not written to the file.

        A tensor in MXFP4 is dequantized to bfloat16.
        """
        tensors = self._parts(name)
        return dequantize_mxfp4(*tensors) if len(tensors) > 1 else tensors[0]

    def _parts(self, name: str) -> list[Tensor]:
        """Return [the tensor], or, for a tensor in MXFP4, [its blocks, its scales]."""
        expert_slice, stored = self._locate(name)
        tensors = [self._mapped(each) for each in stored]
        if expert_slice is None:
            return tensors
        parts = [tensor[expert_slice.index] for tensor in tensors]
        return parts if len(parts) > 1 else [expert_slice.oriented(parts[0])]

    def _mapped(self, name: str) -> Tensor:
        import torch  # only processes that read tensors import it

        entry = self._entries[name]
        dtype = torch.uint8 if entry.dtype == PACKED_DTYPE else torch_dtype(entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        raw = torch.frombuffer(
            self._map(self._file_of[name]), dtype=torch.uint8, count=entry.nbytes, offset=entry.start
        )
        if entry.start % dtype.itemsize:  # the file format allows unaligned tensors, but torch does not
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def read(self, name: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a copy of the slice that begins at `starts` and has shape `sizes`. Reads only the pages of the slice.

        If the tensor is in MXFP4, only the blocks that contain values of the slice are dequantized.
        """
        parts = self._parts(name)
        packed = len(parts) > 1
        shape = (parts[1].size(0), parts[1].size(1) * BLOCK) if packed else tuple(parts[0].shape)
        fits = len(starts) == len(sizes) == len(shape) and all(
            start >= 0 and start + size <= whole for start, size, whole in zip(starts, sizes, shape, strict=True)
        )
        assert fits, f"{name} has shape {shape}: no slice of shape {tuple(sizes)} begins at {tuple(starts)}"
        if packed:
            (row, column), (rows, columns) = starts, sizes
            first, end = column // BLOCK, -(-(column + columns) // BLOCK)
            values = dequantize_mxfp4(*(part[row : row + rows, first:end] for part in parts))
            return values.narrow(1, column - first * BLOCK, columns).clone()
        part = parts[0]
        for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            part = part.narrow(dim, start, size)
        return part.clone()

    def check_scales(self, name: str) -> None:
        """Raise ValueError if the tensor `name`, which has scales of MXFP4 blocks, has a scale that is NaN."""
        entry, path = self._entries[name], self._file_of[name]
        found = self._map(path).find(bytes([NAN_SCALE]), entry.start, entry.start + entry.nbytes)
        if found < 0:
            return
        offset, position = found - entry.start, []
        for size in reversed(entry.shape):
            offset, index = divmod(offset, size)
            position.insert(0, index)
        raise ValueError(
            f"{path}: {name}{position} is {NAN_SCALE}, which stands for NaN in MXFP4 (OCP Microscaling Formats, version 1.0); "
            f"expected a scale below {NAN_SCALE}. Download the file again."
        )

    def release(self, name: str) -> None:
        """Free the memory of the tensor's pages. The next use reads them from disk again."""
        expert_slice, stored = self._locate(name)
        for each in stored:
            entry, page = self._entries[each], mmap.ALLOCATIONGRANULARITY
            size = entry.nbytes if expert_slice is None else entry.nbytes // entry.shape[0]
            start = entry.start if expert_slice is None else entry.start + expert_slice.index * size
            first = start // page * page
            if size:
                self._map(self._file_of[each]).madvise(mmap.MADV_DONTNEED, first, start + size - first)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                self._maps[path] = mmap.mmap(file.fileno(), 0, flags=flags, prot=prot)
        return self._maps[path]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a dtype in the spelling of safetensors."""
    import torch  # only processes that read tensors import it

    return getattr(torch, TORCH_NAMES[name])


def dtype_name(dtype: torch.dtype) -> str:
    """Return the spelling of safetensors for a supported dtype of torch."""
    return next(name for name, torch_name in TORCH_NAMES.items() if torch_name == str(dtype).removeprefix("torch."))


def _read_index(folder: Path) -> dict[str, str] | None:
    """Read the index file, which has the file name of each tensor. Returns None if the folder has no index."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the index cannot be read ({error!r}). Download it again.") from None


def has_weights(folder: Path) -> bool:
    """Whether a Hugging Face folder has files with weights."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def _weight_files(folder: Path, index: dict[str, str] | None) -> list[Path]:
    """Return the files that the index names. Without an index, return `model.safetensors`, or else all safetensors files."""
    if index is not None:
        for name, file in index.items():
            if not (folder / file).is_file():
                num_tensors = sum(other == file for other in index.values())
                raise ValueError(
                    f"{folder / file} is missing; {INDEX} says that it contains {num_tensors} tensors, the first is {name}. "
                    "Download the file again."
                )
        return [folder / file for file in sorted(set(index.values()))]
    files = [folder / _SINGLE_FILE] if (folder / _SINGLE_FILE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model.path={folder}: no *.safetensors found; expected a Hugging Face model folder.")
    return files


def weights_fingerprint(folder: str | Path) -> str:
    """Return a hash of samples from the weight files of a folder. Models that differ in all weights have different hashes.

    The samples of a file are evenly spaced, and the first one contains the beginning of the header. Only the samples are read.
    If the files are the same and unchanged since the last call in this process, they are not read again.
    """
    folder = Path(folder)
    stats = [(path, path.stat()) for path in _weight_files(folder, _read_index(folder))]
    return _hash_samples(tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats))


@lru_cache(maxsize=1)
def _hash_samples(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Return a hash of samples from these files. `files`: (path, number of bytes, time of the last change) of each file."""
    digest = xxhash.xxh3_128()
    for path, size, _ in files:
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_NUM_SAMPLES):
                file.seek(size * sample // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check_hf_folder(folder: str | Path, family: str | None = None, train_mtp: bool = False) -> HFConfig:
    """Check that the config of a Hugging Face folder matches the headers of its tensors. Returns the config.

    No weights are loaded. If mrl wrote the folder, all its files are read and compared with their hashes. `family` is a
    reference to a family that is not in models/families (see models.families.load_family). With `train_mtp`, the folder must have
    the MTP layers of the config.

    Raises:
        ValueError: a file is damaged or missing, or a tensor is missing, is unknown to the family, has an unsupported
            dtype, or has a shape that does not match the config.
    """
    config = HFConfig.load(folder, family, train_mtp)
    check_tensors(config, HFWeights(folder))
    return config


@dataclass(frozen=True)
class UnchangedMtpTensors:
    """Tensors that exports copy unchanged from the input folder: the MTP layers, unless they are trained."""

    weights: HFWeights | None  # None: there are no such tensors
    names: tuple[str, ...]

    @classmethod
    def of(cls, config: HFConfig) -> UnchangedMtpTensors:
        """Return the tensors to copy from the folder of `config`: none for a reward model or for a folder without weights."""
        folder, family = config.path.parent, family_of(config)
        if not family.has_mtp_layers or config.is_reward_model or not has_weights(folder):
            return cls(None, ())
        weights, arch = HFWeights(folder), family.read(config)
        trained = family.hf_shapes(arch).keys() | family.mtp_duplicates(arch)
        names = (name for name in weights.shapes() if family.is_in_mtp_layer(name, arch) and name not in trained)
        return cls(weights, tuple(names))

    @property
    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype in the spelling of safetensors, shape)."""
        if self.weights is None:
            return {}
        dtypes, shapes = self.weights.dtypes(), self.weights.shapes()
        return {name: (dtypes[name], shapes[name]) for name in self.names}

    @property
    def files(self) -> list[Path]:
        """Files that contain the tensors."""
        return sorted({self.weights.file_of(name) for name in self.names}) if self.weights else []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor). The memory of a tensor is freed when the next one is read."""
        for name in self.names:
            assert self.weights is not None, "there are names only if there are weights"
            yield name, self.weights[name]
            self.weights.release(name)


def check_tensors(config: HFConfig, weights: HFWeights) -> None:
    """Raise ValueError if the tensors in `weights` are not exactly the tensors of a model with this config.

    If experts are in MXFP4, all their scales are read, and none may be NaN. If mrl wrote the folder, all its files are read and
    compared with their hashes.
    """
    family = family_of(config)
    arch = family.read(config)
    shapes, dtypes = weights.shapes(), weights.dtypes()
    expected, packed = _expected_tensors(family.hf_shapes(arch), shapes)
    other_mtp = {name for name in shapes if family.is_in_mtp_layer(name, arch) and name not in expected}
    shapes = {name: shape for name, shape in shapes.items() if name not in other_mtp}
    if arch.tied_embeddings:
        shapes.pop("lm_head.weight", None)  # some writers store the tied embedding twice
    if arch.is_reward_model and family.engine_classifier_has_bias:
        shapes.pop(ENGINE_CLASSIFIER_BIAS, None)  # mrl writes a bias of 0 for SGLang
    problems = [f"{name} is missing (expected {list(expected[name])})" for name in expected.keys() - shapes.keys()]
    problems += [
        f"{name} of an MTP layer is {dtypes[name]}, expected {', '.join(ITEM_BYTES)}"
        for name in other_mtp
        if dtypes[name] not in ITEM_BYTES
    ]
    for name, shape in shapes.items():
        title = f"{name} in {weights.file_of(name).name}"
        if name not in expected:
            problems.append(f"{title} {list(shape)} is not in the table of {family.architecture}")
        elif shape != expected[name]:
            problems.append(f"{title} is {list(shape)}, config.json says {list(expected[name])}")
        elif dtypes[name] not in ITEM_BYTES and not (dtypes[name] == PACKED_DTYPE and name in packed):
            problems.append(f"{title} is {dtypes[name]}, expected {', '.join(ITEM_BYTES)}")
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        raise ValueError(
            f"{weights.folder}: config.json and weights disagree in {len(problems)} tensors: {shown}. "
            "Use the config that belongs to the weights, or download the folder again."
        )
    for name in sorted(packed):
        if name.endswith(SCALES_SUFFIX):
            weights.check_scales(name)
    check_folder(weights.folder)


def _expected_tensors(
    shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return (name -> shape of each tensor that a folder must have, names of the tensors with blocks or scales of MXFP4).

    `shapes`: shapes of the tensors of the table. `found`: shapes of the tensors in the folder, where experts may be in MXFP4.
    """
    expected: dict[str, tuple[int, ...]] = {}
    packed: set[str] = set()
    for name, (_, shape) in stored_tensors({name: ("", shape) for name, shape in shapes.items()}).items():
        if name in found or mxfp4_names(name)[0] not in found:
            expected[name] = shape
        else:
            of_blocks = mxfp4_shapes(name, shape)
            expected |= of_blocks
            packed |= of_blocks.keys()
    return expected, packed
