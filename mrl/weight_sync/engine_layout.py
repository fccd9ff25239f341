"""How SGLang stores the tensors of a Hugging Face checkpoint: which part of each a rank of an engine has, and where. Pure.

The family's table says along which axis a tensor is cut and what SGLang fuses; what follows from that for a rank is derived here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from models.architecture import Architecture, Family
from models.conversion.mapping import Box, Mapping, VocabMapping

VOCAB_PADDING = 64
"""SGLang pads the rows of embedding and output layer to a multiple of this, with zeros."""

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Topology:
    """The ranks of one engine."""

    tp: int = 1
    ep: int = 1  # groups of ranks among which whole experts are divided; the ranks of a group cut theirs
    dp: int = 1  # groups of ranks with attention of their own (data-parallel attention); the ranks of a group cut it

    def __post_init__(self) -> None:
        for name, size in (("ep_size", self.ep), ("dp_size", self.dp)):
            if self.tp % size:
                raise ValueError(f"sglang.{name}={size} does not divide rollout.engine_tp={self.tp}; use a divisor.")

    @classmethod
    def of(cls, info: dict[str, Any]) -> Topology:
        """Of an engine that answers, by its /server_info, which has a state for each data-parallel group."""
        dp = len(info["internal_states"]) if info["enable_dp_attention"] else 1
        return cls(int(info["tp_size"]), int(info["ep_size"]), dp)


@dataclass(frozen=True, slots=True)
class EngineShard:
    """A box of a Hugging Face tensor, and where it lies in a parameter of an engine's rank."""

    name: str  # Hugging Face
    box: Box
    param: str  # SGLang
    at: tuple[int, ...]  # first index in the parameter; one dim more than the box where experts are stacked

    def place(self, part: Box) -> Box:
        """Where in the parameter `part` of the box lies."""
        extra = len(self.at) - len(part.starts)
        moved = part.within(self.box)
        starts = tuple(a + s for a, s in zip(self.at, (0,) * extra + moved.starts, strict=True))
        return Box(starts, (1,) * extra + part.sizes)


def check_heads(arch: Architecture, topology: Topology) -> None:
    """Raise ValueError where the ranks of such an engine cannot share the model's heads."""
    heads, kv_heads = arch.transformer["num_attention_heads"], arch.transformer["num_query_groups"]
    ranks = topology.tp // topology.dp
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(
            f"rollout.engine_tp={topology.tp}: {ranks} ranks cannot share {heads} query heads and {kv_heads} key/value heads "
            "evenly; use a number that divides them."
        )


@dataclass(frozen=True)
class EngineLayout:
    """What every rank of an engine of this topology holds of one model."""

    rows: Sequence[Mapping]  # the family's table, written out for the model
    sizes: dict[str, int]
    fusions: dict[str, tuple[str, ...]]  # as Family.fusions
    topology: Topology
    kv_heads: int
    num_experts: int
    output_copy: bool = False  # tied embeddings, of which the engine keeps a copy as its output layer

    @classmethod
    def of(cls, family: Family, arch: Architecture, topology: Topology) -> EngineLayout:
        """The layout of `arch` in an engine."""
        check_heads(arch, topology)
        return cls(
            family.entries(arch),
            arch.sizes,
            family.fusions(arch),
            topology,
            arch.transformer["num_query_groups"],
            arch.num_experts,
        )

    def with_output_copy(self) -> EngineLayout:
        """The same for engines that keep tied embeddings twice."""
        return replace(self, output_copy=True)

    @cached_property
    def row_of(self) -> dict[str, Mapping]:
        """The table's row by Hugging Face name."""
        return {name: row for row in self.rows for name in row.hf}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every Hugging Face tensor."""
        return {name: shape for row in self.rows for name, shape in row.hf_shapes(self.sizes).items()}

    @cached_property
    def _fusion_of(self) -> dict[str, str]:
        """SGLang's suffix by each Hugging Face suffix that goes into it."""
        return {part: fused for fused, parts in self.fusions.items() for part in parts}

    @cached_property
    def engine_names(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Hugging Face name -> SGLang's parameter and the names of its parts in order (of one expert: its own)."""
        return {name: self._engine_name(name) for name in self.row_of}

    def _engine_name(self, name: str) -> tuple[str, tuple[str, ...]]:
        expert = self.row_of[name].expert
        path = name.split(".")
        if expert is not None:
            place = len(path) - 1 - path[::-1].index(str(expert))
            path[place] = "{expert}"
        for start in range(len(path)):  # the longest suffix: an expert's gate_proj is not the gate_proj of a plain MLP
            if found := self._fusion_of.get(".".join(path[start:])):
                stem = "".join(f"{part}." for part in path[:start])
                parts = tuple(stem + part.replace("{expert}", str(expert)) for part in self.fusions[found])
                return stem + found, parts
        return name, (name,)

    def rank(self, rank: int) -> tuple[EngineShard, ...]:
        """Everything that rank `rank` holds, in the table's order."""
        if rank not in self._known:
            self._known[rank] = tuple(self._all_held(rank))
        return self._known[rank]

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of rank `rank` that weights are sent to."""
        return self._shapes_by_rank[rank]

    @cached_property
    def _known(self) -> dict[int, tuple[EngineShard, ...]]:
        """What ranks hold, as it was asked for: seconds of work for many experts, and asked for again."""
        return {}

    @cached_property
    def _shapes_by_rank(self) -> list[dict[str, tuple[int, ...]]]:
        return [self._param_shapes(self.rank(rank)) for rank in range(self.topology.tp)]

    def _all_held(self, rank: int) -> list[EngineShard]:
        held = [part for row in self.rows for name in row.hf if (part := self._held(name, rank))]
        if self.output_copy:
            held += [replace(part, param=OUTPUT) for part in held if part.name == EMBEDDING]
        return held

    def _param_shapes(self, held_parts: Sequence[EngineShard]) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for held in held_parts:
            place = held.place(held.box)
            ends = tuple(start + size for start, size in zip(place.starts, place.sizes, strict=True))
            known = found.get(held.param, (0,) * len(ends))
            found[held.param] = tuple(map(max, known, ends))
            if isinstance(row := self.row_of[held.name], VocabMapping):  # a last rank's rows may be padding
                found[held.param] = (self._vocab_rows(held.name, self._cut_over(row)), *ends[1:])
        return found

    def _held(self, name: str, rank: int) -> EngineShard | None:
        row = self.row_of[name]
        if row.expert is not None and row.expert // self._local_experts != self._expert_group(rank):
            return None
        param, parts = self.engine_names[name]
        before = 0
        for part in parts:
            if part == name:
                break
            before += self._box(part, rank).sizes[0]
        box = self._box(name, rank)
        at = (before, *(0,) * (len(box.sizes) - 1))
        if row.expert is not None:
            at = (row.expert % self._local_experts, *at)
        return EngineShard(name, box, param, at)

    @property
    def _local_experts(self) -> int:
        return max(1, self.num_experts // self.topology.ep)

    def _expert_group(self, rank: int) -> int:
        return rank // (self.topology.tp // self.topology.ep)

    def _box(self, name: str, rank: int) -> Box:
        """What rank `rank` holds of `name`, were it a tensor alone."""
        row, whole = self.row_of[name], Box.whole(self._shapes[name])
        ranks = self._cut_over(row)
        rank %= ranks
        if row.axis is None:
            return whole
        if isinstance(row, VocabMapping):
            rows = self._vocab_rows(name, ranks)
            return whole.narrow(0, rank * rows, (rank + 1) * rows)
        if name.endswith(KEY_VALUE) and ranks > self.kv_heads:  # fewer heads than ranks: SGLang repeats them
            rank, ranks = rank // (ranks // self.kv_heads), self.kv_heads
        size = whole.sizes[row.axis]
        if size % ranks:
            raise ValueError(f"rollout.engine_tp={self.topology.tp} does not divide the {size} rows of {name}.")
        return whole.narrow(row.axis, rank * (size // ranks), (rank + 1) * (size // ranks))

    def _cut_over(self, row: Mapping) -> int:
        """How many ranks cut the tensors of this row among them."""
        if row.expert is not None:
            return self.topology.tp // self.topology.ep
        attends = ".self_attention." in row.megatron or row.hf == (EMBEDDING,)
        return self.topology.tp // self.topology.dp if attends else self.topology.tp

    def _vocab_rows(self, name: str, ranks: int) -> int:
        rows = self._shapes[name][0]
        padded = -(-rows // VOCAB_PADDING) * VOCAB_PADDING
        if padded % ranks:
            padded = -(-rows // (VOCAB_PADDING * ranks)) * VOCAB_PADDING * ranks
        return padded // ranks


KEY_VALUE = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")
