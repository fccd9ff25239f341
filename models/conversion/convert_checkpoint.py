"""Converts checkpoints between Hugging Face and Megatron, checks that a conversion is exact, and converts GGUF files.

A conversion between Hugging Face and Megatron handles one tensor at a time. It needs no model in memory, no process group and no
GPU. Only `check_logits` builds models in memory. `from_gguf` dequantizes a GGUF file (the format of llama.cpp) and converts it to
a Hugging Face folder.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.architecture import Architecture
from models.conversion.hf_reader import HFWeights, UnchangedMtpTensors, check_tensors, dtype_name, torch_dtype
from models.conversion.hf_writer import MAX_SHARD_BYTES, HFFolderWriter, tensor_specs
from models.conversion.mapping import ParamMapping
from models.conversion.megatron_checkpoint import (
    MegatronReader,
    MegatronWriter,
    TensorLocation,
    TensorToWrite,
    contains_mtp,
    layers_share_keys,
    megatron_shape,
)
from models.conversion.resumable_folder import ByteProgress, ResumableFolder, fingerprint, refuse_existing
from models.families import family_of
from models.hf_config import HFConfig
from parallel.durable_files import apply_umask, atomic_folder

LOGITS_LIMIT = 1e-5
"""Limit of `check_logits`: the largest difference must not exceed LOGITS_LIMIT * max(1, largest logit)."""


def to_megatron(
    config: HFConfig,
    output: Path,
    progress: ByteProgress,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Convert the Hugging Face folder that contains `config` to a Megatron checkpoint, which any layout can load.

    All weights get the dtype `dtype` (None: their stored dtype), except the weights that Megatron always keeps in float32. If a
    conversion was interrupted, a second call resumes it.

    Raises:
        ValueError: the folder is not a complete model of a known family, Hugging Face tensors of one Megatron tensor have
            different dtypes, the output exists, an interrupted conversion had other inputs, or the disk has too little free
            space.
    """
    refuse_existing(output)
    weights = HFWeights(config.path.parent)
    check_tensors(config, weights)
    arch = family_of(config).read(config)
    items = _tensors_to_write(family_of(config).param_mappings(arch), arch, weights, dtype)
    options = dict(convert="to-megatron", dtype=str(dtype), max_shard_bytes=max_shard_bytes)
    with ResumableFolder.beside(output, options | {"files": fingerprint([config.path, *weights.files])}) as partial:
        writer = MegatronWriter(partial, items, max_shard_bytes)
        total = sum(item.nbytes for item in items)
        remaining_bytes = sum(item.nbytes for part in writer.missing.values() for item in part)
        partial.require_space(remaining_bytes)
        progress.begin(total, total - remaining_bytes)

        def tensor_of(item: TensorToWrite) -> Tensor:
            return item.row.to_megatron([weights[name] for name in item.row.hf], arch.sizes, 0, 1)

        def after_write(item: TensorToWrite) -> None:
            for name in item.row.hf:
                weights.release(name)
            progress.advance(item.nbytes)

        for file in writer.missing:
            writer.write(file, tensor_of, after_write)
        writer.complete()


def to_hf(
    checkpoint: Path,
    config: HFConfig,
    output: Path,
    progress: ByteProgress,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Convert a Megatron checkpoint to a Hugging Face folder, with the config and tokenizer from the folder of `config`.

    All weights get the dtype `dtype` (None: their stored dtype), except the weights that Megatron always keeps in float32. If
    the checkpoint has no MTP layers and the folder of `config` has weights, the MTP layers of this folder are copied in their
    own dtype. If a conversion was interrupted, a second call resumes it.

    Raises:
        ValueError: the checkpoint is incomplete or damaged or belongs to another model, the output exists, an interrupted
            conversion had other inputs, or the disk has too little free space.
    """
    refuse_existing(output)
    config = replace(config, train_mtp=contains_mtp(checkpoint))
    arch = family_of(config).read(config)
    rows = family_of(config).param_mappings(arch)
    reader = MegatronReader(checkpoint, arch, rows)
    specs = tensor_specs(rows, arch.sizes, {row: dtype_name(dtype or reader.dtype(row)) for row in rows})
    sources = family_of(config).mtp_duplicates(arch)
    specs |= {duplicate: specs[source] for duplicate, source in sources.items()}
    unchanged_mtp = UnchangedMtpTensors.of(config)
    options: dict[str, Any] = dict(convert="to-hf", dtype=str(dtype), max_shard_bytes=max_shard_bytes)
    options["files"] = fingerprint([config.path, *reader.files, *unchanged_mtp.files])
    with ResumableFolder.beside(output, options) as partial:
        writer = HFFolderWriter(partial, specs, max_shard_bytes, unchanged_mtp.specs)
        remaining_bytes = writer.num_bytes(missing_only=True)
        partial.require_space(remaining_bytes)
        progress.begin(writer.num_bytes(), writer.num_bytes() - remaining_bytes)
        for row in rows:
            duplicates = {
                name: [duplicate for duplicate, source in sources.items() if source == name] for name in row.hf
            }
            if any(writer.needs(each) for name in row.hf for each in (name, *duplicates[name])):
                for name, tensor in row.to_hf([reader.read(row)], arch.sizes).items():
                    for each in (each for each in (name, *duplicates[name]) if writer.needs(each)):
                        progress.advance(writer.write(each, tensor))
        for name, tensor in unchanged_mtp:
            if writer.needs(name):
                progress.advance(writer.write(name, tensor))
        writer.complete(config.path.parent, {})


def _tensors_to_write(
    rows: list[ParamMapping], arch: Architecture, weights: HFWeights, dtype: torch.dtype | None
) -> list[TensorToWrite]:
    """Return the tensors of the Megatron checkpoint. Raises ValueError if one of them would combine different dtypes."""
    share_keys = layers_share_keys(arch)
    items, first_of = [], dict[str, TensorToWrite]()
    for row in rows:
        location, shape = TensorLocation.of(row, arch, share_keys), megatron_shape(row, arch.sizes)
        item = TensorToWrite(row, location, shape, _megatron_dtype(row, weights, dtype))
        first = first_of.setdefault(location.key, item)
        if first.dtype != item.dtype:
            raise ValueError(
                f"{weights.folder}: Megatron stores {first.row.hf[0]} ({first.dtype}) and {row.hf[0]} ({item.dtype}) in one "
                "tensor; choose a common dtype with dtype=."
            )
        items.append(item)
    return items


def _megatron_dtype(row: ParamMapping, weights: HFWeights, dtype: torch.dtype | None) -> torch.dtype:
    if row.is_buffer:
        return torch.float32
    if dtype:
        return dtype
    dtypes = {name: weights.dtype_of(name) for name in row.hf}
    if len(set(dtypes.values())) > 1:
        raise ValueError(
            f"{weights.folder}: Megatron stores {dtypes} in one tensor; choose a common dtype with dtype=."
        )
    return torch_dtype(dtypes[row.hf[0]])


@dataclass(frozen=True)
class ConversionCheck:
    """Result of one check of a conversion."""

    name: str  # the two sides that were compared
    detail: str  # the result in words
    passed: bool


def check_round_trip(config: HFConfig) -> ConversionCheck:
    """Convert every tensor to Megatron and back, and compare the bytes. Raises ValueError if the folder is incomplete."""
    weights = HFWeights(config.path.parent)
    check_tensors(config, weights)
    arch = family_of(config).read(config)
    differing, count = [], 0
    for row in family_of(config).param_mappings(arch):
        tensors = [weights[name] for name in row.hf]
        converted_back = row.to_hf([row.to_megatron(tensors, arch.sizes, 0, 1)], arch.sizes)
        differing += [
            name for name, tensor in zip(row.hf, tensors, strict=True) if not is_bit_equal(converted_back[name], tensor)
        ]
        count += len(tensors)
        _release(weights, row.hf)
    return _tensor_check("Hugging Face -> Megatron -> Hugging Face", count, differing)


def check_against_checkpoint(config: HFConfig, checkpoint: Path) -> ConversionCheck:
    """Compare the bytes of every tensor in a Megatron checkpoint with the Hugging Face folder of `config`.

    The comparison uses the dtype of the checkpoint.

    Raises ValueError if the folder or the checkpoint is incomplete or damaged, or if the checkpoint belongs to another model.
    """
    config = replace(config, train_mtp=contains_mtp(checkpoint))
    weights = HFWeights(config.path.parent)
    check_tensors(config, weights)
    arch = family_of(config).read(config)
    rows = family_of(config).param_mappings(arch)
    reader = MegatronReader(checkpoint, arch, rows)
    differing, converted = [], set()
    for row in rows:
        expected = row.to_megatron([weights[name] for name in row.hf], arch.sizes, 0, 1)
        stored = reader.read(row)
        if stored.dtype != expected.dtype:
            converted.add(f"{expected.dtype} -> {stored.dtype}".replace("torch.", ""))
        if not is_bit_equal(stored, expected.to(stored.dtype)):
            differing.append(row.megatron)
        _release(weights, row.hf)
    note = f", after {' and '.join(sorted(converted))}" if converted else ""
    return _tensor_check(f"Megatron checkpoint / Hugging Face{note}", len(rows), differing)


def check_logits(config: HFConfig, num_tokens: int = 64) -> ConversionCheck:
    """Compare the logits of Megatron and of transformers for a sequence of random tokens, in float32 in this process.

    The model must not be a reward model. An image model gets no images. The check passes if no difference exceeds
    `LOGITS_LIMIT * max(1, largest logit)`. If this process has no process group, the check creates a process group and destroys
    it at the end.
    """
    arch = family_of(config).read(config)
    vocab, num_tokens = arch.vocab_size, min(num_tokens, arch.max_position_embeddings)
    tokens = torch.randint(vocab, (num_tokens,), generator=torch.Generator().manual_seed(0))
    expected = _transformers_logits(config, tokens)
    actual = _megatron_logits(config, tokens)[:, :vocab]
    largest = expected.abs().max().item()
    difference = (actual - expected).abs().max().item()
    detail = f"largest difference {difference:.1e}, largest logit {largest:.1f}, {num_tokens} tokens, float32"
    return ConversionCheck("logits / transformers", detail, difference <= LOGITS_LIMIT * max(1.0, largest))


@torch.no_grad()
def _transformers_logits(config: HFConfig, tokens: Tensor) -> Tensor:
    """Return the logits [tokens, vocabulary] of transformers in float32, for tokens without images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # only this check needs the slow import
    from transformers.utils import logging

    logging.disable_progress_bar()
    has_vision = family_of(config).read(config).vision is not None
    model_class = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    reference = model_class.from_pretrained(config.path.parent, dtype=torch.float32).eval()
    for module in reference.modules():  # docs/tutorials/model.md: only transformers limits the time steps of Nemotron-H
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
    return reference(tokens[None]).logits[0]


@torch.no_grad()
def _megatron_logits(config: HFConfig, tokens: Tensor) -> Tensor:
    """Return the logits [tokens, padded vocabulary] of the Megatron model in float32."""
    from parallel import device  # patch_megatron_for_cpu, below, must run before the first import from Megatron
    from parallel.dims import ParallelDims

    device.patch_megatron_for_cpu()
    from models.conversion.weight_bridge import WeightBridge
    from models.model_builder import build_model
    from parallel import groups
    from parallel.packing import Segment, pack

    with groups.one_process():
        (gpt,) = build_model(config, ParallelDims(), torch.float32)
        gpt = gpt.to(device.device()).eval()
        WeightBridge(config, [gpt], ParallelDims()).load(HFWeights(config.path.parent))
        packed = pack([Segment(len(tokens))], device.device())
        positions = packed.position_ids[None]
        return gpt(tokens[None].to(device.device()), positions, None, packed_seq_params=packed)[0].float().cpu()


def is_bit_equal(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and all bytes are equal. Unlike torch.equal, this also distinguishes NaNs and signs of zeros."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _release(weights: HFWeights, names: tuple[str, ...]) -> None:
    for name in names:
        weights.release(name)


def _tensor_check(name: str, count: int, differing: list[str]) -> ConversionCheck:
    if differing:
        return ConversionCheck(name, f"{len(differing)} of {count} tensors differ: {', '.join(differing[:3])}", False)
    return ConversionCheck(name, f"{count} tensors equal, byte for byte", True)


def from_gguf(source: Path, output: Path, dtype: torch.dtype) -> None:
    """Write model, tokenizer and chat template of the GGUF file `source` to the folder `output`. Weights get the dtype `dtype`.

    `output` appears when it is complete. Raises ValueError if `source` is not a GGUF file of a model that transformers can
    read, or if `output` exists.
    """
    from transformers import AutoTokenizer  # takes seconds to import

    if not source.is_file() or source.suffix != ".gguf":
        raise ValueError(f"gguf={source}: no such file; expected a file whose name ends with .gguf.")
    if output.exists():
        raise ValueError(f"output={output}: exists already; name another folder.")
    try:
        model = _read_model(source).to(dtype)
        tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except (
        ValueError,
        KeyError,
        OSError,
        RuntimeError,
        NotImplementedError,
    ) as error:  # unknown architecture or bad file
        raise ValueError(f"gguf={source}: transformers cannot read it: {error}") from error
    with atomic_folder(output) as partial:
        if partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            apply_umask(partial)


def _read_model(source: Path) -> Any:
    """Return the model of the GGUF file `source`, with float32 weights.

    `from_pretrained` with a GGUF file needs the package accelerate, so this function loads the tensors itself. Raises ValueError
    if the file lacks a weight, or has a weight that the model does not use.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    vars(config).pop("_model_name_or_path", None)  # name of the model in the GGUF file; config.json has no such field
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    if missing := [name for name in missing if name not in tied]:
        raise ValueError(f"it has no weights for {', '.join(missing[:3])}.")
    if unexpected:
        raise ValueError(f"it has weights that the model does not use: {', '.join(unexpected[:3])}.")
    return model
