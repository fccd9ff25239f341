"""Hashes of the tensors an engine should hold, computed by the sender of Hugging Face-named tensors.

SGLang hashes its own tensors, which are not Hugging Face's: projections are fused, and with tensor parallelism each rank has a
shard. What is fused and how it is cut is data (`EngineLayout`); a family states its fusions. The hash is SGLang 0.5.23's
(`sglang.srt.managers.mm_utils.tensor_hash`): SHA-256 cut to 8 bytes on a CPU, a Triton kernel on a GPU. So sender and engine
must hold the tensors on the same kind of device, in the same dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

VOCAB_PADDING = 64
"""SGLang pads the rows of embedding and output layer to a multiple of this, with zeros."""

MAX_NAMES = 8
"""Tensors named in an error."""


class WeightMismatchError(RuntimeError):
    """An engine does not hold the weights that were sent to it."""


@dataclass(frozen=True)
class EngineLayout:
    """How one engine stores the tensors of a Hugging Face checkpoint. Names are suffixes after the module's path.

    Experts are one more fusion, see `expand_experts`: SGLang's [E, 2 * ffn, hidden] is gate and up of each expert in turn.
    """

    fusions: Mapping[str, tuple[str, ...]]  # engine's suffix <- Hugging Face suffixes, concatenated along axis 0
    tp_size: int = 1
    num_kv_heads: int | None = None  # needed only when tp_size exceeds it: SGLang then repeats key and value heads
    row_parallel: tuple[str, ...] = ("o_proj.weight", "down_proj.weight")  # cut along axis 1
    vocab_parallel: tuple[str, ...] = ("embed_tokens.weight", "lm_head.weight")  # padded, then cut along axis 0
    kv: tuple[str, ...] = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")
    experts: tuple[str, ...] = ("experts.w13_weight", "experts.w2_weight")  # engine's suffixes
    ep_size: int = 1  # groups of ranks among which whole experts are divided; the ranks of a group cut theirs

    def engine_name(self, name: str) -> tuple[str, tuple[str, ...]]:
        """The engine's tensor that holds Hugging Face's `name`, and the Hugging Face names of all its parts in order."""
        path = name.split(".")
        for start in range(len(path)):  # the longest suffix: an expert's gate_proj is not the gate_proj of a plain MLP
            if found := self._fusion_of.get(".".join(path[start:])):
                stem = "".join(f"{part}." for part in path[:start])
                return stem + found, _prefixed(stem, self.fusions[found])
        return name, (name,)

    @cached_property
    def _fusion_of(self) -> dict[str, str]:
        """Engine's suffix by each Hugging Face suffix that goes into it."""
        return {part: fused for fused, parts in self.fusions.items() for part in parts}

    def pieces(self, target: str, parts: Mapping[str, Tensor], rank: int) -> list[Tensor]:
        """What rank `rank` holds of the engine's tensor `target`, made of `parts` (Hugging Face name -> tensor, in order)."""
        if self.ep_size > 1 and target.endswith(self.experts):
            group, rank = divmod(rank, self.tp_size // self.ep_size)
            count = len(parts) // self.ep_size
            mine = dict(list(parts.items())[group * count : (group + 1) * count])
            return replace(self, tp_size=self.tp_size // self.ep_size, ep_size=1).pieces(target, mine, rank)
        return [self.shard(name, tensor, rank, fused=len(parts) > 1) for name, tensor in parts.items()]

    def shard(self, name: str, tensor: Tensor, rank: int, *, fused: bool) -> Tensor:
        """What rank `rank` of the engine holds of Hugging Face's tensor `name`."""
        if name.endswith(self.vocab_parallel):
            return _rows_padded(tensor, rank, self.tp_size)
        if self.tp_size == 1:
            return tensor
        if name.endswith(self.row_parallel):
            return tensor.chunk(self.tp_size, dim=1)[rank]
        if fused:
            copies = max(1, self.tp_size // (self.num_kv_heads or self.tp_size)) if name.endswith(self.kv) else 1
            pieces = self.tp_size // copies
            if tensor.size(0) % pieces:
                raise ValueError(
                    f"cannot tell how {name} with {tensor.size(0)} rows is cut over engine tp_size={self.tp_size}; "
                    f"pass num_kv_heads, or turn the checksum off with weight_sync.verify=false."
                )
            return tensor.chunk(pieces, dim=0)[rank // copies]
        return tensor  # norms and the like: whole on every rank


def expand_experts(fusions: Mapping[str, tuple[str, ...]], num_experts: int) -> dict[str, tuple[str, ...]]:
    """`fusions` with every part that says "{expert}" written out: all parts of expert 0, then of expert 1, and so on.

        {"experts.w13_weight": ("experts.{expert}.gate_proj.weight", "experts.{expert}.up_proj.weight")}

    for two experts has the parts experts.0.gate_proj, experts.0.up_proj, experts.1.gate_proj, experts.1.up_proj.
    """
    return {
        fused: tuple(part.replace("{expert}", str(e)) for e in range(num_experts) for part in parts)
        if any("{expert}" in part for part in parts)
        else parts
        for fused, parts in fusions.items()
    }


@lru_cache(maxsize=8)
def _prefixed(stem: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    """Kept, as each of a layer's many experts asks for the same."""
    return tuple(stem + part for part in parts)


def _rows_padded(tensor: Tensor, rank: int, tp_size: int) -> Tensor:
    """Rows of one rank of a vocabulary padded with zeros: `[padded / tp_size, hidden]`."""
    rows = -(-tensor.size(0) // VOCAB_PADDING) * VOCAB_PADDING // tp_size
    mine = tensor[rank * rows : (rank + 1) * rows]
    return mine if mine.size(0) == rows else torch.cat([mine, mine.new_zeros(rows - mine.size(0), *mine.shape[1:])])


@dataclass
class ExpectedChecksums:
    """Hashes that every engine of this layout should report, built up tensor by tensor."""

    layout: EngineLayout
    ranks: list[dict[str, str]] = field(init=False)
    _waiting: dict[str, dict[str, Tensor]] = field(init=False, default_factory=dict)  # fused tensors with parts missing

    def __post_init__(self) -> None:
        self.ranks = [{} for _ in range(self.layout.tp_size)]

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one Hugging Face tensor, in the engine's dtype. Parts of a fused tensor are kept until all are there."""
        target, parts = self.layout.engine_name(name)
        have = self._waiting.setdefault(target, {})
        have[name] = tensor
        if len(have) < len(parts):
            return
        del self._waiting[target]
        for rank, checksums in enumerate(self.ranks):
            checksums[target] = tensor_checksum(self.layout.pieces(target, {p: have[p] for p in parts}, rank))

    def compare(self, reported: Sequence[Mapping[str, str]], engine: str) -> None:
        """Raise WeightMismatchError when the engine's ranks report anything else, naming the tensors."""
        if self._waiting:
            raise WeightMismatchError(
                f"incomplete weights for {engine}: {_names(self._waiting)} lack a part; fusions are {dict(self.layout.fusions)}."
            )
        if len(reported) != len(self.ranks):
            raise WeightMismatchError(f"{engine} reports {len(reported)} ranks, expected tp_size={len(self.ranks)}.")
        for rank, (mine, theirs) in enumerate(zip(self.ranks, reported, strict=True)):
            groups = {
                "differ": [n for n in mine if n in theirs and mine[n] != theirs[n]],
                "were sent but are unknown to the engine": mine.keys() - theirs.keys(),
                "are in the engine but were not sent": theirs.keys() - mine.keys(),
            }
            wrong = [f"{len(names)} {what} ({_names(names)})" for what, names in groups.items() if names]
            if wrong:
                raise WeightMismatchError(
                    f"weights of {engine} rank {rank} are not those sent: tensors that {'; that '.join(wrong)}; "
                    f"{len(mine)} were expected. The engine must not be sampled from."
                )


def _names(names: Sequence[str] | Mapping[str, object] | set[str]) -> str:
    shown = sorted(names)[:MAX_NAMES]
    return ", ".join(shown) + (", ..." if len(names) > MAX_NAMES else "")


def tensor_checksum(pieces: Sequence[Tensor]) -> str:
    """SGLang's hash of the concatenation of `pieces` along axis 0, as 16 hexadecimal digits."""
    if pieces[0].is_cuda:
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash  # heavy, and needs Triton on a GPU

        whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        return f"{gpu_tensor_hash(whole.detach().contiguous()):016x}"
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(memoryview(piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()[:16]
