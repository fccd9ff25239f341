"""Engine layout: which part of each Hugging Face tensor each rank of an SGLang engine holds, and in which parameter.

The table of the model family (its ParamMappings) says along which dimension each tensor is sharded, and which tensors SGLang
fuses into one parameter. This module derives the shards of each rank from the table, without SGLang and without an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from models.architecture import EMBEDDING_WEIGHT, VISION_PREFIX, Architecture, Family
from models.conversion.fp8_blocks import BLOCK, FP8_DTYPE, SCALE_DTYPE, SCALE_SUFFIX, block_box, is_quantized
from models.conversion.mapping import Box, ParamMapping, VocabMapping
from models.conversion.mtp_mapping import MTP_PREFIX

VOCAB_PADDING = 64
"""SGLang appends rows of zeros to the embedding and to the output layer, up to a multiple of this number of rows."""

HF_EMBEDDING_WEIGHT, HF_OUTPUT_WEIGHT = "model.embed_tokens.weight", "lm_head.weight"
"""SGLang's names of the embedding and of the output layer. A Hugging Face folder of a language model has the same names."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
"""Dtype of an SGLang parameter, without "torch." -> bytes per element."""
KV_CACHE_SCALE_SUFFIXES = (".k_scale", ".v_scale")
"""Suffixes of parameters that an FP8 engine has for its KV cache. They are constants, and trainers do not send them."""


@dataclass(frozen=True)
class EngineParallelSizes:
    """Parallel sizes of one engine."""

    tp: int = 1  # number of ranks
    ep: int = 1  # number of expert-parallel groups; a group has num_experts / ep experts, sharded over tp / ep ranks
    dp: int = 1  # number of data-parallel attention groups; a group has all heads, sharded over tp / dp ranks

    def __post_init__(self) -> None:
        for name, size in (("ep_size", self.ep), ("dp_size", self.dp)):
            if self.tp % size:
                raise ValueError(f"sglang.{name}={size} does not divide rollout.engine_tp={self.tp}; use a divisor.")

    @classmethod
    def of(cls, info: dict[str, Any]) -> EngineParallelSizes:
        """Return the parallel sizes of a running engine; `info` is the engine's answer to /server_info.

        The answer has one internal state for each data-parallel group, so `dp` is the number of internal states.
        """
        dp = len(info["internal_states"]) if info["enable_dp_attention"] else 1
        return cls(int(info["tp_size"]), int(info["ep_size"]), dp)


@dataclass(frozen=True, slots=True)
class EngineShard:
    """A box of a Hugging Face tensor and its position in a parameter of one engine rank."""

    name: str  # name of the Hugging Face tensor
    box: Box  # part of the Hugging Face tensor
    param: str  # name of the SGLang parameter
    # Index of the shard's first element in the parameter. A parameter that stacks experts has one dimension more than `box`.
    start: tuple[int, ...]

    def box_in_param(self, part: Box) -> Box:
        """Return the part of the SGLang parameter that stores `part`, which lies in this shard's `box`."""
        stacked_dims = len(self.start) - len(part.starts)
        offset = part.within(self.box)
        starts = tuple(a + s for a, s in zip(self.start, (0,) * stacked_dims + offset.starts, strict=True))
        return Box(starts, (1,) * stacked_dims + part.sizes)


def check_heads(arch: Architecture, parallel_sizes: EngineParallelSizes) -> None:
    """Raise ValueError if the model's attention heads cannot be divided evenly over the ranks of an engine."""
    heads, kv_heads = arch.transformer["num_attention_heads"], arch.transformer["num_query_groups"]
    ranks = parallel_sizes.tp // parallel_sizes.dp
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(
            f"rollout.engine_tp={parallel_sizes.tp}: {ranks} ranks cannot share {heads} query heads and {kv_heads} key/value "
            "heads evenly; use a number of ranks that divides the query heads, and that divides the key/value heads or is a "
            "multiple of them."
        )
    for name, count in arch.recurrent_heads.items():
        if count % ranks:
            raise ValueError(
                f"rollout.engine_tp={parallel_sizes.tp}: {ranks} ranks cannot share {name}={count} evenly; use a number of "
                "ranks that divides it."
            )


def check_expert_biases(arch: Architecture, parallel_sizes: EngineParallelSizes) -> None:
    """Raise ValueError if several engine ranks would share an expert whose down projection has a bias.

    SGLang then sets the bias to zero on all but the first of these ranks.
    """
    ranks = parallel_sizes.tp // parallel_sizes.ep
    if "moe_bias" in arch.parts and ranks > 1:
        raise ValueError(
            f"rollout.engine_tp={parallel_sizes.tp} with sglang.ep_size={parallel_sizes.ep}: {ranks} engine ranks would share "
            "each expert. Only the first of them may add the bias of the down projection, but trainers send this bias to all "
            f"ranks; set sglang.ep_size={parallel_sizes.tp}, or weight_sync.transport=disk."
        )


@dataclass(frozen=True)
class EngineLayout:
    """The shards of one model on every rank of an engine. The vision tower of an image model has no shards, and is not sent."""

    rows: Sequence[ParamMapping]  # the family's table, expanded to all layers and experts of the model
    sizes: dict[str, int]  # sizes of the model by name, see Architecture.sizes
    # Suffix of an SGLang parameter -> suffixes of the Hugging Face tensors that are fused into this parameter
    fused_params: dict[str, tuple[str, ...]]
    parallel_sizes: EngineParallelSizes
    kv_heads: int  # number of key/value heads of the model
    num_experts: int
    float32_suffixes: tuple[str, ...] = ()  # suffixes of SGLang parameters that are float32 in every engine
    output_copy: bool = False  # whether the engine stores a copy of the embedding as its output layer
    block_scales: bool = False  # whether the engine stores matrices in FP8 with block scales
    prefixes: Mapping[str, str] = field(default_factory=dict)  # see Family.engine_prefixes
    renames: Mapping[str, str] = field(default_factory=dict)  # see Family.engine_renames
    # Rows of a trained MTP layer; `rows` has them only for engines with a draft model
    mtp_rows: Sequence[ParamMapping] = ()

    @classmethod
    def of(cls, family: Family, arch: Architecture, parallel_sizes: EngineParallelSizes) -> EngineLayout:
        """Return the layout of a model in an engine with these parallel sizes."""
        check_heads(arch, parallel_sizes)
        rows = family.param_mappings(arch)
        draft_prefixes = family.mtp.draft_prefixes(arch.num_layers) if family.mtp and arch.mtp_layers else {}
        return cls(
            [row for row in rows if not row.megatron.startswith((VISION_PREFIX, MTP_PREFIX))],
            arch.sizes,
            family.fused_params_of(arch),
            parallel_sizes,
            arch.transformer["num_query_groups"],
            arch.num_experts,
            family.engine_float32,
            prefixes={**draft_prefixes, **family.engine_prefixes},
            renames=family.engine_renames,
            mtp_rows=[row for row in rows if row.megatron.startswith(MTP_PREFIX)],
        )

    def with_draft(self) -> EngineLayout:
        """Return the layout of an engine whose draft model computes the trained MTP layer."""
        return replace(self, rows=[*self.rows, *self.mtp_rows])

    def with_output_copy(self) -> EngineLayout:
        """Return the layout of an engine that stores tied embeddings twice: as embedding and as output layer."""
        return replace(self, output_copy=True)

    def with_block_scales(self) -> EngineLayout:
        """Return the layout of an engine that stores matrices in FP8 with block scales."""
        return replace(self, block_scales=True)

    @cached_property
    def row_of(self) -> dict[str, ParamMapping]:
        """Name of a Hugging Face tensor -> its row of the table."""
        return {name: row for row in self.rows for name in row.hf}

    @cached_property
    def _hf_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for row in self.rows for name, shape in row.hf_shapes(self.sizes).items()}

    @cached_property
    def _fused_suffix_of(self) -> dict[str, str]:
        """Suffix of a Hugging Face tensor -> suffix of the SGLang parameter into which the tensor is fused."""
        return {part: fused for fused, parts in self.fused_params.items() for part in parts}

    @cached_property
    def engine_names(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Name of a Hugging Face tensor -> (SGLang parameter, Hugging Face tensors in this parameter, in order).

        If a parameter stacks experts, the list has only the tensors of the expert to which the named tensor belongs.
        """
        return {name: self._engine_name(name) for name in self.row_of}

    def _engine_name(self, name: str) -> tuple[str, tuple[str, ...]]:
        param, parts = self._fused_name(name)
        for part, own in self.renames.items():
            param = param.replace(part, own)
        for prefix, own in self.prefixes.items():
            if param.startswith(prefix):
                return own + param.removeprefix(prefix), parts
        return param, parts

    def _fused_name(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Return the pair that `engine_names` has for tensor `name`, before `renames` and `prefixes` change the parameter."""
        expert = self.row_of[name].expert
        path = name.split(".")
        if expert is not None:
            index = len(path) - 1 - path[::-1].index(str(expert))
            path[index] = "{expert}"
        # The longest suffix is tried first, to tell the gate_proj of an expert from the gate_proj of a dense MLP.
        for start in range(len(path)):
            if fused := self._fused_suffix_of.get(".".join(path[start:])):
                prefix = "".join(f"{part}." for part in path[:start])
                parts = tuple(prefix + part.replace("{expert}", str(expert)) for part in self.fused_params[fused])
                return prefix + fused, parts
        return name, (name,)

    def shards(self, rank: int) -> tuple[EngineShard, ...]:
        """Return all shards of tensor-parallel rank `rank`, in the order of the table."""
        if rank not in self._shards_by_rank:
            self._shards_by_rank[rank] = tuple(self._derive_shards(rank))
        return self._shards_by_rank[rank]

    def param_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter of rank `rank` that receives weights."""
        return self._param_shapes_by_rank[rank]

    def dtype_of(self, param: str, dtype: str) -> str:
        """Return the dtype of an SGLang parameter in an engine that computes in `dtype`. Dtypes are without "torch."."""
        return SCALE_DTYPE if param.endswith(SCALE_SUFFIX) else self._fixed_dtypes.get(param, dtype)

    @cached_property
    def _fixed_dtypes(self) -> dict[str, str]:
        """Parameter of SGLang -> its dtype, for the parameters whose dtype does not depend on the dtype of the engine."""
        fixed: dict[str, str] = {}
        for name, row in self.row_of.items():
            param = self.engine_names[name][0]
            if self.block_scales and is_quantized(row.megatron):
                fixed[param] = FP8_DTYPE
            elif row.is_buffer or param.endswith(self.float32_suffixes):
                fixed[param] = "float32"
        return fixed

    @cached_property
    def _shards_by_rank(self) -> dict[int, tuple[EngineShard, ...]]:
        """Cache of `shards`, because deriving the shards of a model with many experts takes seconds."""
        return {}

    @cached_property
    def _param_shapes_by_rank(self) -> list[dict[str, tuple[int, ...]]]:
        return [self._derive_param_shapes(self.shards(rank)) for rank in range(self.parallel_sizes.tp)]

    def _derive_shards(self, rank: int) -> list[EngineShard]:
        shards: list[EngineShard] = []
        for name, row in self.row_of.items():
            for shard in self._shards_of(name, rank):
                shards.append(shard)
                if self.block_scales and is_quantized(row.megatron):
                    shards.append(self._scale_shard(shard))
        if self.output_copy:
            shards += [replace(shard, param=HF_OUTPUT_WEIGHT) for shard in shards if shard.param == HF_EMBEDDING_WEIGHT]
        return shards

    def _derive_param_shapes(self, shards: Sequence[EngineShard]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for shard in shards:
            box = shard.box_in_param(shard.box)
            ends = tuple(start + size for start, size in zip(box.starts, box.sizes, strict=True))
            shapes[shard.param] = tuple(map(max, shapes.get(shard.param, (0,) * len(ends)), ends))
            # The last rows of a vocabulary may be padding, which no shard covers.
            if isinstance(row := self.row_of.get(shard.name), VocabMapping) and not row.replicated_in_engine:
                shapes[shard.param] = (self._padded_vocab_rows(shard.name, self._num_shards(row)), *ends[1:])
        return shapes

    def _shards_of(self, name: str, rank: int) -> list[EngineShard]:
        """Return the shards of tensor `name` on rank `rank`. Returns [] for experts that the rank does not have.

        A tensor has one shard, or one for each part that it concatenates (see ParamMapping.shapes).
        """
        row = self.row_of[name]
        if row.expert is not None and row.expert // self._experts_per_group != self._expert_group(rank):
            return []
        param, parts = self.engine_names[name]
        expert = () if row.expert is None else (row.expert % self._experts_per_group,)
        before = parts[: parts.index(name)]  # tensors that precede tensor `name` in a fused parameter
        first_row, shards = sum(box.sizes[0] for part in before for box in self._boxes(part, rank)), []
        for box in self._boxes(name, rank):
            shards.append(EngineShard(name, box, param, (*expert, first_row, *(0,) * (len(box.sizes) - 1))))
            first_row += box.sizes[0]
        return shards

    def _scale_shard(self, shard: EngineShard) -> EngineShard:
        """Return the shard of the block scales for `shard`, a part of a matrix.

        Raises ValueError if SGLang cannot store this part in blocks.
        """
        try:
            box = block_box(shard.box, self._hf_shapes[shard.name])
            rows_before, num_columns = shard.start[-2], shard.box.sizes[1]
            if rows_before % BLOCK:
                raise ValueError(f"{shard.param} has {rows_before} rows before this tensor, not a multiple of {BLOCK}")
            if num_columns % BLOCK:  # SGLang quantizes activations in groups of this size
                raise ValueError(f"an engine rank has {num_columns} columns, not a multiple of {BLOCK}")
        except ValueError as error:
            raise ValueError(
                f"sglang.quantization=fp8 with rollout.engine_tp={self.parallel_sizes.tp}: {shard.name} does not fit the "
                f"blocks of {BLOCK} x {BLOCK} weights: {error}; use a smaller rollout.engine_tp or engines without "
                "quantization."
            ) from None
        start = (*shard.start[:-2], rows_before // BLOCK, 0)
        return EngineShard(shard.name + SCALE_SUFFIX, box, shard.param + SCALE_SUFFIX, start)

    @property
    def _experts_per_group(self) -> int:
        return max(1, self.num_experts // self.parallel_sizes.ep)

    def _expert_group(self, rank: int) -> int:
        return rank // (self.parallel_sizes.tp // self.parallel_sizes.ep)

    def _boxes(self, name: str, rank: int) -> list[Box]:
        """Return what rank `rank` holds of each concatenated part of the Hugging Face tensor `name`."""
        row = self.row_of[name]
        concatenated = row.concatenated_boxes(self.sizes)[name]
        if row.axis is None or row.replicated_in_engine:
            return concatenated
        ranks = self._num_shards(row)
        rank %= ranks
        if isinstance(row, VocabMapping):
            rows = self._padded_vocab_rows(name, ranks)
            return [box.narrow(0, rank * rows, (rank + 1) * rows) for box in concatenated]
        boxes = []
        for index, box in enumerate(concatenated, start=row.first_shape_index(name)):
            part, parts = rank, ranks
            is_key_or_value = row.shapes[index][row.axis] == "kv"
            if is_key_or_value and ranks > self.kv_heads:  # several ranks then hold a copy of each head
                part, parts = rank // (ranks // self.kv_heads), self.kv_heads
            if (size := box.sizes[row.axis]) % parts:
                raise ValueError(
                    f"rollout.engine_tp={self.parallel_sizes.tp} does not divide the {size} rows of {name}."
                )
            boxes.append(row.rank_box(box, part, parts))
        return boxes

    def _num_shards(self, row: ParamMapping) -> int:
        """Return the number of ranks over which the tensors of this row are sharded. The embedding is sharded like attention."""
        if row.expert is not None:
            return self.parallel_sizes.tp // self.parallel_sizes.ep
        in_attention = ".self_attention." in row.megatron or row.megatron == EMBEDDING_WEIGHT
        return self.parallel_sizes.tp // self.parallel_sizes.dp if in_attention else self.parallel_sizes.tp

    def _padded_vocab_rows(self, name: str, ranks: int) -> int:
        """Return the number of vocabulary rows on one rank, including padding."""
        rows = self._hf_shapes[name][0]
        padded = -(-rows // VOCAB_PADDING) * VOCAB_PADDING
        if padded % ranks:
            padded = -(-rows // (VOCAB_PADDING * ranks)) * VOCAB_PADDING * ranks
        return padded // ranks


def check_engine_parameters(
    layout: EngineLayout, tp_rank: int, parameters: dict[str, tuple[tuple[int, ...], str]], engine_rank: str
) -> None:
    """Raise ValueError if names, shapes or dtypes of an engine rank's parameters differ from the layout.

    `parameters` maps the name of each parameter to the (shape, dtype) that the engine rank reported. Parameters of a vision tower
    are not compared. The dtype of the embedding is the dtype in which the engine computes. `engine_rank` names this rank in the
    error message.
    """
    shapes = layout.param_shapes(tp_rank)
    engine_dtype = parameters[HF_EMBEDDING_WEIGHT][1] if HF_EMBEDDING_WEIGHT in parameters else ""
    expected = {name: (shape, layout.dtype_of(name, engine_dtype)) for name, shape in shapes.items()}
    not_sent = KV_CACHE_SCALE_SUFFIXES if layout.block_scales else ()
    reported = {
        name: (tuple(shape), dtype)
        for name, (shape, dtype) in parameters.items()
        if not name.startswith(VISION_PREFIX) and not name.endswith(not_sent)
    }
    problems = [f"{name} {_describe(reported[name])} is not in the table" for name in reported.keys() - expected.keys()]
    problems += [f"{name} {_describe(expected[name])} is missing" for name in expected.keys() - reported.keys()]
    problems += [
        f"{name} is {_describe(reported[name])}, the table says {_describe(expected[name])}"
        for name in expected.keys() & reported.keys()
        if expected[name] != reported[name]
    ]
    if problems:
        remedy = (
            "Choose kernels that keep the form of the Hugging Face weights, such as sglang.fp8_gemm_runner_backend=triton."
            if layout.block_scales
            else "Use weight_sync.transport=disk, which needs no table."
        )
        raise ValueError(
            f"{engine_rank} stores {len(problems)} parameters differently from the family's table: "
            f"{'; '.join(sorted(problems)[:5])}. Nothing was sent. {remedy}"
        )


def _describe(parameter: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = parameter
    return f"{list(shape)} {dtype}".rstrip()
