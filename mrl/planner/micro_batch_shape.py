"""Sizes of one micro-batch on one trainer rank, and the settings that determine which of its tensors are saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallel.dims import ParallelDims

# FP8 numbers for each byte of scales: mxfp8 has one byte for 32 numbers, blockwise four bytes for 128
NUMBERS_PER_SCALE_BYTE = 32


@dataclass(frozen=True)
class Kernels:
    """Properties of a machine's kernels. These properties determine which tensors are saved."""

    fused_norm: bool = True  # a norm saves only its input; torch on a CPU also saves the normalized values
    fused_mlp: bool = True  # one kernel computes the gated activation, and saves only its input
    grouped_attention: bool = True  # one kernel call handles all sequences, without copies of keys for each query head


GPU_KERNELS = Kernels()
CPU_KERNELS = Kernels(fused_norm=False, fused_mlp=False, grouped_attention=False)


@dataclass(frozen=True)
class Recompute:
    """Megatron's settings for activation recomputation.

    `num_layers` has two meanings. With `method` uniform, it is the number of layers that are recomputed from one saved input.
    With `method` block, only the first `num_layers` layers of each virtual stage are recomputed.
    """

    granularity: str | None = None  # "full" recomputes whole layers, "selective" some modules; None: no recomputation
    method: str | None = None  # if granularity is full: "uniform" (all layers) or "block" (some layers)
    num_layers: int = 1
    modules: frozenset[str] = frozenset()  # Megatron's names of the modules that "selective" recomputes
    distributed: bool = False  # whether the saved inputs of layers are sharded over tensor-parallel ranks

    @classmethod
    def of(cls, megatron: Mapping[str, Any]) -> Recompute:
        """Read the config's section `megatron`."""
        return cls(
            granularity=megatron.get("recompute_granularity"),
            method=megatron.get("recompute_method"),
            num_layers=megatron.get("recompute_num_layers") or 1,
            modules=frozenset(megatron.get("recompute_modules") or ["core_attn"]),
            distributed=bool(megatron.get("distribute_saved_activations")),
        )

    def __str__(self) -> str:
        if self.granularity == "selective":
            return f"selective ({', '.join(sorted(self.modules))})"
        return "none" if self.granularity is None else f"full ({self.method}, {self.num_layers})"


@dataclass(frozen=True)
class MicroBatchShape:
    """Sizes of one micro-batch on one trainer rank."""

    tokens: int  # s: tokens on this context-parallel rank
    itemsize: int  # bytes of one element of an activation
    tp: int = 1
    etp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    keys_per_token: float = (
        1.0  # keys that attention reads, divided by tokens; above 1 if responses share a prompt, whose keys are copied
    )
    imbalance: float = 1.0  # tokens that reach the rank's experts, divided by the mean of all ranks
    images: int = 0  # number of image tokens in the whole pack, because every context-parallel rank computes all images
    kernels: Kernels = GPU_KERNELS
    longest: int = 0  # tokens of the longest sequence; 0: one sequence may have all tokens of the pack
    fp8: str = ""  # recipe with which inputs of linear layers are saved in FP8; "": they are saved without FP8

    @classmethod
    def of(cls, dims: ParallelDims, tokens: int, itemsize: int, **fields: Any) -> MicroBatchShape:
        """Return the sizes of one rank's part of a pack. `tokens`: tokens of the whole pack, over all context-parallel ranks."""
        layout = dict(tp=dims.tp, etp=dims.expert_tp, cp=dims.cp, sequence_parallel=dims.sequence_parallel)
        return cls(-(-tokens // dims.cp), itemsize, **layout, **fields)

    @property
    def residual_tokens(self) -> int:
        """r: number of tokens whose residual stream this rank holds: `tokens` / tp with sequence parallelism, else `tokens`."""
        return -(-self.tokens // self.tp) if self.sequence_parallel else self.tokens

    @property
    def is_gathered(self) -> bool:
        """Whether attention reads copies of keys and values, because ranks gather them (cp > 1) or responses share a prompt."""
        return self.cp > 1 or self.keys_per_token > 1

    @property
    def key_rows(self) -> int:
        """Number of rows of keys that attention reads.

        Context parallelism cuts a sequence into 2 cp chunks. Rank i has two chunks: the queries of one read i + 1 chunks of
        keys, and the queries of the other read 2 cp - i chunks. The sum is 2 cp + 1. A key counts twice if the queries of both
        chunks read it.
        """
        read_ratio = 1 + 1 / (2 * self.cp) if self.cp > 1 else 1  # chunks of keys that are read / (2 cp)
        return int(self.tokens * self.cp * self.keys_per_token * read_ratio)

    @property
    def pairs(self) -> int:
        """Upper bound for the number of pairs (query of this rank, key), summed over all attention calls on this rank.

        As in `key_rows`, the queries of a rank read (2 cp + 1) / (4 cp) of the keys of their sequence, on average.
        """
        fraction = (2 * self.cp + 1) / (4 * self.cp) if self.cp > 1 else 1
        return int(self.tokens * self.longest_sequence * fraction)

    @property
    def longest_sequence(self) -> int:
        """Largest number of tokens of a sequence, over all context-parallel ranks."""
        whole = self.tokens * self.cp
        return min(self.longest or whole, whole)

    def input_bytes(self, numel: int) -> int:
        """Return the bytes of a linear layer's saved input with `numel` elements, if no other operation saves this input."""
        if not self.fp8:
            return numel * self.itemsize
        return numel + (0 if self.fp8 == "tensorwise" else -(-numel // NUMBERS_PER_SCALE_BYTE))

    def expert_rows(self, topk: int) -> int:
        """Return the number of rows that reach the rank's experts if the router chooses `topk` experts for each token."""
        return int(self.residual_tokens * topk * self.etp * self.imbalance)
