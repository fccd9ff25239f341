"""Is a conversion exact? Every tensor there and back byte for byte, and the logits of both implementations."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from models.conversion.hf_io import HFWeights, check_tensors
from models.conversion.megatron_io import MegatronReader
from models.families import family_of
from models.hf_config import HFConfig

LOGITS_LIMIT = 1e-5


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    what: str
    detail: str
    good: bool


def check_round_trip(config: HFConfig) -> Finding:
    """Hugging Face -> Megatron -> Hugging Face: every tensor's bytes. Raises ValueError at a folder that is not whole."""
    weights = HFWeights(config.path.parent)
    check_tensors(config, weights)
    arch = family_of(config).read(config)
    differ, count = [], 0
    for row in family_of(config).entries(arch):
        tensors = [weights[name] for name in row.hf]
        back = row.to_hf([row.to_megatron(tensors, arch.sizes, 0, 1)], arch.sizes)
        differ += [name for name, tensor in zip(row.hf, tensors, strict=True) if not same_bytes(back[name], tensor)]
        count += len(tensors)
        _release(weights, row.hf)
    return _finding("Hugging Face -> Megatron -> Hugging Face", count, differ)


def check_against_checkpoint(config: HFConfig, checkpoint: Path) -> Finding:
    """Every tensor of a Megatron checkpoint beside the folder's, in the checkpoint's type: every byte.

    Raises ValueError at a folder that is not whole, or a checkpoint of another model.
    """
    weights = HFWeights(config.path.parent)
    check_tensors(config, weights)
    arch = family_of(config).read(config)
    rows = family_of(config).entries(arch)
    reader = MegatronReader(checkpoint, arch, rows)
    differ, converted = [], set()
    for row in rows:
        expected = row.to_megatron([weights[name] for name in row.hf], arch.sizes, 0, 1)
        found = reader.read(row)
        if found.dtype != expected.dtype:
            converted.add(f"{expected.dtype} -> {found.dtype}".replace("torch.", ""))
        if not same_bytes(found, expected.to(found.dtype)):
            differ.append(row.megatron)
        _release(weights, row.hf)
    note = f", after {' and '.join(sorted(converted))}" if converted else ""
    return _finding(f"Megatron checkpoint / Hugging Face{note}", len(rows), differ)


def check_logits(config: HFConfig, num_tokens: int = 64) -> Finding:
    """Logits of random tokens by our Megatron model and by transformers, both in float32 in one process.

    The largest difference may be `LOGITS_LIMIT` times the largest logit (or times 1, where that is smaller). This makes a
    process group, so it needs a process without one.
    """
    vocab = family_of(config).read(config).vocab_size
    tokens = torch.randint(vocab, (num_tokens,), generator=torch.Generator().manual_seed(0))
    expected = _transformers_logits(config.path.parent, tokens)
    found = _megatron_logits(config, tokens)[:, :vocab]
    largest = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    detail = f"largest difference {difference:.1e}, largest logit {largest:.1f}, {num_tokens} tokens, float32"
    return Finding("logits / transformers", detail, difference <= LOGITS_LIMIT * max(1.0, largest))


@torch.no_grad()
def _transformers_logits(model: Path, tokens: Tensor) -> Tensor:
    """[tokens, vocabulary] float32."""
    from transformers import AutoModelForCausalLM  # seconds, and only needed here
    from transformers.utils import logging

    logging.disable_progress_bar()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return reference(tokens[None]).logits[0]


@torch.no_grad()
def _megatron_logits(config: HFConfig, tokens: Tensor) -> Tensor:
    """[tokens, vocabulary with padding] float32."""
    from parallel import device  # its stand-in comes before everything of Megatron's
    from parallel.dims import ParallelDims

    device.install()
    from models.build import build_model
    from models.conversion.bridge import Bridge
    from parallel import groups
    from parallel.packing import Segment, pack

    dims, alone = ParallelDims(), not dist.is_initialized()
    if alone:
        dist.init_process_group(device.backend(), store=dist.HashStore(), rank=0, world_size=1)
        groups.initialize(dims, seed=0)
    (gpt,) = build_model(config, dims, torch.float32)
    gpt = gpt.to(device.device()).eval()
    Bridge(config, [gpt], dims).load(HFWeights(config.path.parent))
    packed = pack([Segment(len(tokens))], device.device())
    positions = packed.position_ids[None]
    logits = gpt(tokens[None].to(device.device()), positions, None, packed_seq_params=packed)[0].float().cpu()
    if alone:
        dist.destroy_process_group()
    return logits


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether type, shape and all bytes are equal, whatever numbers they are."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _release(weights: HFWeights, names: tuple[str, ...]) -> None:
    for name in names:
        weights.release(name)


def _finding(what: str, count: int, differ: list[str]) -> Finding:
    if differ:
        return Finding(what, f"{len(differ)} of {count} tensors differ: {', '.join(differ[:3])}", False)
    return Finding(what, f"{count} tensors equal, byte for byte", True)
