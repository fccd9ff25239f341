"""Dataclasses that describe models: Architecture, Family and ModelSpec.

An Architecture is the content of one Hugging Face config, translated to Megatron's fields. A Family says how the
configs and weights of one Hugging Face architecture are converted. A ModelSpec has settings from which a worker group
builds a model. This module does not import Megatron, so the driver can use it.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from models.conversion.expert_stacks import is_mxfp4
from models.conversion.mapping import ParamMapping
from models.conversion.mtp_mapping import MTP_PREFIX, TWO_HIDDEN, MtpNames
from models.hf_config import HFConfig
from models.multiply_adds import (
    attention_multiply_adds,
    indexer_multiply_adds,
    latent_attention_multiply_adds,
    mlp_multiply_adds,
    recurrent_multiply_adds,
)
from parallel.dims import ParallelDims
from parallel.rope import LongRope, QueryScaling, Rope, YarnRope
from parallel.trainer_config import LoraConfig, OptimConfig

OUTPUT_WEIGHT = "output_layer.weight"  # Megatron's name of the output layer
EMBEDDING_WEIGHT = "embedding.word_embeddings.weight"  # Megatron's name of the embedding
VISION_PREFIX = "visual."  # begins the names of all parameters of the vision tower in Megatron
SCORE_HEAD_ROW = ParamMapping(OUTPUT_WEIGHT, ("score.weight",), (("one", "hidden"),))
"""Output layer of a reward model. Sequence classifiers of transformers call its weight `score.weight`."""
ENGINE_CLASSIFIER_BIAS = "score.bias"  # see Family.engine_classifier_has_bias
_ENGINE_INDEX_CHANNELS = 128  # channels of an indexer's key in SGLang
_SHARED_EXPERTS_WIDTH = "moe_shared_expert_intermediate_size"  # Megatron's field: width of all shared experts together
# Megatron's field: for each layer, 1 if it is recurrent, otherwise 0
_RECURRENT_LAYERS = "linear_attention_freq"
Block = Literal["attention", "recurrent", "dense", "moe"]
"""Part of a layer: attention or, in its place, a recurrence (gated delta net, Mamba-2); an MLP or, in its place, experts."""


@dataclass(frozen=True)
class VisionTower:
    """The vision tower of an image model (a module of transformers), and how the language model uses the tower's outputs."""

    model_type: str  # model type of the tower's config in transformers
    config: dict[str, Any]  # fields of the tower's config
    image_token: int  # id of the image token; an output of the tower replaces the embedding of each image token
    merge_size: int  # merge_size**2 patches give one output
    rope_axes: tuple[int, ...]  # see parallel.rope.rope_axes
    # "block" or "feature", a placeholder in the tower's table rows -> number of blocks or features of the tower. Feature i is a
    # further output of the tower, which is added to the output of decoder layer i (DeepStack, arXiv:2406.04334).
    repeats: dict[str, int]

    @property
    def num_features(self) -> int:
        """Number of decoder layers to whose outputs the tower adds features."""
        return self.repeats.get("feature", 0)


@dataclass(frozen=True)
class Architecture:
    """The content of a Hugging Face config, translated to Megatron's fields. `build_model` logs this object."""

    vocab_size: int
    max_position_embeddings: int
    rope: Rope | None  # None: attention has no rotary embedding
    tied_embeddings: bool
    transformer: dict[str, Any]  # keyword arguments of Megatron's TransformerConfig
    sizes: dict[str, int] = field(default_factory=dict)  # size of each dim that `ParamMapping.shapes` names
    # optional parts that this model has, such as "mlp_bias": the table has rows for parts (ParamMapping.part), model_builder.py
    # builds modules for them, and SGLang lacks some of them (Family.engine_unsupported_parts)
    parts: frozenset[str] = frozenset()
    # activation function of an MLP; if the MLP has a gate, activation function of the gate
    activation: Literal["silu", "gelu_tanh", "quick_gelu", "squared_relu"] = "silu"
    embedding_scale: float = 1.0  # factor of the embeddings, rounded to the dtype of the model
    window_rope: Rope | None = None  # rotary embedding of layers with a sliding window; None: `rope`
    # For each layer: whether it has an indexer. A layer without an indexer uses the keys that the nearest earlier indexer has
    # chosen. Empty: attention is not sparse.
    indexer_layers: tuple[bool, ...] = ()
    # whether the rotary embedding rotates the pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
    interleaved_rope: bool = False
    query_scaling: QueryScaling | None = None  # factors of the queries, which depend on the position; None: all are 1
    is_reward_model: bool = False  # the checkpoint has a score head in place of an output layer
    vision: VisionTower | None = None  # None: a language model
    # For each layer: its only block. Empty: each layer has attention or a recurrence, and then an MLP or experts
    only_blocks: tuple[Block, ...] = ()
    mtp_layers: int = 0  # number of MTP layers that are trained; MTP layers that are not trained are not loaded

    @property
    def num_layers(self) -> int:
        return self.transformer["num_layers"]

    @property
    def rotary_dim(self) -> int:
        """Number of channels of a head that have a rotary embedding."""
        return 0 if self.rope is None else self.rope.dim

    @property
    def num_experts(self) -> int:
        """Number of experts per layer; 0 for a dense model."""
        return self.transformer.get("num_moe_experts", 0)

    @property
    def has_latent_attention(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.transformer.get("multi_latent_attention", False)

    @property
    def has_sparse_attention(self) -> bool:
        """Whether tokens attend to the keys that an indexer chooses (parallel/sparse_attention.py)."""
        return bool(self.indexer_layers)

    def has_indexer(self, layer: int) -> bool:
        """Whether the layer has an indexer."""
        return self.has_sparse_attention and self.indexer_layers[layer]

    def check_first_layers_of_stages(self, first_layers: Iterable[int]) -> None:
        """Raise ValueError if a pipeline stage would begin with a layer that needs keys chosen in an earlier stage.

        `first_layers`: index of the first layer of each virtual stage.
        """
        if without := [layer for layer in first_layers if self.has_sparse_attention and not self.has_indexer(layer)]:
            possible = ", ".join(str(layer) for layer, has_indexer in enumerate(self.indexer_layers) if has_indexer)
            raise ValueError(
                f"a pipeline stage begins with layer {without[0]} (counted from 0), which has no indexer: it uses the keys that "
                "an earlier layer has chosen, and stages do not send each other these keys; choose parallel.pp, parallel.vpp and "
                f"the numbers of layers of uneven stages so that every stage begins with one of the layers {possible}."
            )

    @property
    def has_sinks(self) -> bool:
        """Whether attention has sinks (parallel/attention.py)."""
        return self.transformer.get("softmax_type") == "learnable"

    @property
    def window(self) -> int:
        """Number of tokens to which a token attends in layers with a sliding window, itself included; 0 without such layers."""
        return self.transformer["window_size"][0] + 1 if "window_size" in self.transformer else 0

    def has_window(self, layer: int) -> bool:
        """Whether the attention of the layer has a sliding window."""
        return self.window > 0 and bool(self.transformer["window_attn_skip_freq"][layer])

    def is_moe(self, layer: int) -> bool:
        """Whether the layer has experts instead of one MLP."""
        return bool(self.num_experts and self.transformer["moe_layer_freq"][layer])

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether some layers have a gated delta net or Mamba-2 in place of attention."""
        return _RECURRENT_LAYERS in self.transformer

    @property
    def has_mamba(self) -> bool:
        """Whether the recurrent layers are Mamba-2 layers."""
        return "mamba_num_heads" in self.transformer

    @property
    def recurrent_heads(self) -> dict[str, int]:
        """Config field -> number of heads, or of groups of heads, of a recurrent layer. Empty without recurrent layers.

        Each rank gets whole groups. So it has the keys and queries of its heads, and it normalizes whole groups.
        """
        if self.has_mamba:
            return dict(n_groups=self.transformer["mamba_num_groups"])
        names = ("linear_num_key_heads", "linear_num_value_heads") if self.has_recurrent_layers else ()
        return {name: self.transformer[name] for name in names}

    def is_recurrent(self, layer: int) -> bool:
        """Whether the layer has a gated delta net or Mamba-2 in place of attention."""
        return self.has_recurrent_layers and bool(self.transformer[_RECURRENT_LAYERS][layer])

    def blocks(self, layer: int) -> tuple[Block, ...]:
        """Return the blocks of the layer, in order."""
        if self.only_blocks:
            return (self.only_blocks[layer],)
        return "recurrent" if self.is_recurrent(layer) else "attention", "moe" if self.is_moe(layer) else "dense"

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layers have an MLP."""
        return any("dense" in self.blocks(layer) for layer in range(self.num_layers))

    def check_layout(self, dims: ParallelDims, uneven_stages: bool = False) -> None:
        """Raise ValueError if the layout cannot split this model. The message names the possible sizes.

        With `uneven_stages`, the user has set the number of layers of each pipeline stage, and the caller checks these numbers.
        """
        t = self.transformer
        per_stage = self.num_layers // (dims.pp * dims.vpp)
        if self.vision and not uneven_stages and self.vision.num_features > per_stage:
            raise ValueError(
                f"parallel.pp={dims.pp}, parallel.vpp={dims.vpp}: the features of the vision tower are added to the outputs of "
                f"the first {self.vision.num_features} layers, which must be in the first stage; use fewer stages."
            )
        heads = dict(num_attention_heads=t["num_attention_heads"], num_key_value_heads=t["num_query_groups"])
        dense = dict(intermediate_size=t["ffn_hidden_size"]) if self.has_dense_layers else {}
        shared = {} if not t.get(_SHARED_EXPERTS_WIDTH) else dict(shared_intermediate_size=t[_SHARED_EXPERTS_WIDTH])
        _check_divides("tp", dims.tp, heads | dense | shared | self.recurrent_heads)
        if dims.pp * dims.vpp > 1 and not uneven_stages:
            layers = dict(num_hidden_layers=self.num_layers)
            if dims.vpp > 1:
                _check_divides(
                    "pp x parallel.vpp", dims.pp * dims.vpp, layers, "choose pp and vpp whose product is one of"
                )
            else:
                _check_divides("pp", dims.pp, layers)
            self.check_first_layers_of_stages(range(0, self.num_layers, per_stage))
        if self.num_experts:
            _check_divides("ep", dims.ep, dict(num_experts=self.num_experts))
            _check_divides("etp", dims.expert_tp, dict(moe_intermediate_size=t["moe_ffn_hidden_size"]))
            if dims.tp > 1 and not dims.sequence_parallel:
                raise ValueError(
                    "parallel.sp=false: experts with parallel.tp > 1 need sequence parallelism; leave out parallel.sp."
                )
        elif dims.ep > 1:
            raise ValueError(f"parallel.ep={dims.ep}: this model has no experts; use 1.")
        elif dims.etp not in (None, dims.tp):
            raise ValueError(f"parallel.etp={dims.etp}: this model has no experts; leave it out.")

    def multiply_adds(self, num_outputs: int | None = None) -> tuple[float, float]:
        """Return (a, b): the forward pass of a causal sequence of n tokens has `a*n + b*n**2` multiply-adds.

        Matrix products count, and in recurrent layers also the convolution and the recurrence. Products of routers do not count.
        MTP layers count if they are trained. In layers with a sliding window, every token counts as if it attended to a whole
        window. So the result is an upper bound, and is close to the true number for sequences that are much longer than the
        window. In sparse attention, the products with all keys count, because trainers compute all of them, and the products of
        the indexer count, too. `num_outputs`: number of values that the output head computes for each token; None: one logit for
        each token of the vocabulary.
        """
        t = self.transformer
        width = t["hidden_size"]
        projections, per_pair = (
            latent_attention_multiply_adds(t) if self.has_latent_attention else attention_multiply_adds(t)
        )
        dense, experts = mlp_multiply_adds(t)
        of_block = dict(
            attention=projections,
            recurrent=recurrent_multiply_adds(t) if self.has_recurrent_layers else 0,
            dense=dense,
            moe=experts,
        )
        of_indexer, of_index_pair = indexer_multiply_adds(t) if self.has_sparse_attention else (0.0, 0.0)
        linear, num_full = 0.0, 0  # num_full: number of layers that have attention without a window
        for layer in range(self.num_layers):
            linear += sum(of_block[block] for block in self.blocks(layer)) + of_indexer * self.has_indexer(layer)
            if "attention" in self.blocks(layer):
                linear += per_pair * self.window if self.has_window(layer) else 0
                num_full += not self.has_window(layer)
        attended = 0.5  # fraction of a sequence that a token attends to, on average
        head = width * (self.vocab_size if num_outputs is None else num_outputs)
        mtp_layer = projections + of_block["moe" if self.num_experts else "dense"] + 2 * width**2 + head
        linear += head + self.mtp_layers * mtp_layer
        return linear, ((num_full + self.mtp_layers) * per_pair + sum(self.indexer_layers) * of_index_pair) * attended


def _check_divides(axis: str, size: int, dimensions: dict[str, int], advice: str = "use") -> None:
    for name, whole in dimensions.items():
        if whole % size:
            valid_sizes = ", ".join(str(n) for n in range(1, whole + 1) if all(w % n == 0 for w in dimensions.values()))
            raise ValueError(
                f"parallel.{axis}={size} does not divide {name}={whole} of this model; {advice} {valid_sizes}."
            )


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture: the translation of its config, and the table of its weights."""

    architecture: str  # name in `architectures` of config.json
    translate: Callable[[HFConfig], Architecture]  # must read every field of the config; `read` checks this
    # One row for each Megatron parameter. `param_mappings` repeats a row for each layer and for each expert.
    table: tuple[ParamMapping, ...]
    # For each SGLang parameter that concatenates Hugging Face tensors: suffix of the parameter's name -> suffixes of the tensors'
    # names, in order. {expert} stands for all experts in order.
    engine_fused_params: dict[str, tuple[str, ...]]
    defaults: dict[str, Any]  # the value that transformers uses for each field that a config may omit
    engine_required_fields: tuple[str, ...] = ()  # fields in `defaults` that SGLang requires in config.json
    supported_by_sglang: bool = True  # whether SGLang implements the architecture
    has_mtp_layers: bool = False  # checkpoints may have layers for multi-token prediction (MTP)
    mtp: MtpNames | None = None  # names of the tensors of MTP layers; None: MTP layers cannot be trained
    # suffixes of SGLang parameters that are float32 in an engine of any dtype; buffers are always float32 and are not listed
    engine_float32: tuple[str, ...] = ()
    engine_unsupported_parts: frozenset[str] = frozenset()  # parts (Architecture.parts) that SGLang silently ignores
    # beginning of the name of a Hugging Face tensor -> beginning of the name of its SGLang parameter, if they differ
    engine_prefixes: Mapping[str, str] = field(default_factory=dict)
    # beginning of the name of a Hugging Face tensor -> beginning of the name of its module in transformers 5, if they differ
    peft_prefixes: Mapping[str, str] = field(default_factory=dict)
    # the only dtype in which SGLang computes the architecture; None: every dtype
    engine_dtype: str | None = None
    engine_needs_gpu: bool = False  # whether SGLang's code for the architecture has no kernels for the CPU
    # whether SGLang stores some weights in the dtype of config.json instead of the dtype of the engine
    engine_reads_dtype: bool = False
    # arguments that a training run gives to its SGLang servers, unless the user sets these arguments
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    # whether SGLang's sequence classifier has a bias, which the classifier of transformers does not have; SGLang leaves this bias
    # uninitialized if a Hugging Face folder does not contain it
    engine_classifier_has_bias: bool = False
    # part of a Hugging Face name -> the part that SGLang's name has instead; applied to the names after `engine_fused_params`
    engine_renames: Mapping[str, str] = field(default_factory=dict)
    # field of config.json that is a list of names -> {name that transformers writes: name that SGLang needs, if it differs}
    engine_field_values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def read(self, config: HFConfig) -> Architecture:
        """Return the architecture that `config` describes.

        Raises:
            ValueError: a field is missing, is unknown to the family, or has an unsupported value.
        """
        reading = config.start_reading(self.defaults)
        arch = self.translate(reading)
        reading.check_all_fields_read()
        if config.train_mtp:
            arch = replace(
                arch,
                mtp_layers=self.count_mtp_layers(config, "model.train_mtp=true"),
                sizes=arch.sizes | {TWO_HIDDEN: 2 * arch.sizes["hidden"]},
            )
        if not config.is_reward_model:
            return arch
        config.check_one_output()
        return replace(arch, is_reward_model=True, sizes=arch.sizes | {"one": 1})

    def count_mtp_layers(self, config: HFConfig, key: str) -> int:
        """Return the number of MTP layers of the model. Raises ValueError, which names `key`, if mrl cannot use them."""
        if self.mtp is None:
            raise ValueError(
                f"{key}: mrl cannot train the MTP layers of {self.architecture}, nor draft with them; leave the key out."
            )
        found = [config.fields[name] for name in self.mtp.count_fields if config.fields.get(name) is not None]
        count = found[0] if found else self.mtp.default_count
        limit = self.mtp.max_count
        if not isinstance(count, int) or count < 1 or (limit is not None and count > limit):
            expected = f"1 to {limit}" if limit else "1 or more"
            raise ValueError(
                f"{key}: {config.path} says that the model has {count!r} MTP layers "
                f"({' or '.join(self.mtp.count_fields)}); expected {expected}. Leave the key out."
            )
        return count

    def mtp_names(self, config: HFConfig) -> list[str]:
        """Return the Hugging Face names of the tensors of the MTP layers, except duplicates (see `mtp_duplicates`)."""
        arch = self.read(replace(config, train_mtp=True))
        return [name for row in self.param_mappings(arch) if row.megatron.startswith(MTP_PREFIX) for name in row.hf]

    def check_engine(self, config: HFConfig, arch: Architecture) -> None:
        """Raise ValueError if SGLang 0.5.23 cannot read the config, or would compute other outputs than the trainer."""
        if not self.supported_by_sglang:
            raise ValueError(
                f"model.path: SGLang 0.5.23 does not implement {self.architecture}; train the model with mrl sft, or from "
                "recorded rollouts (rollout.replay)."
            )
        if missing := [name for name in self.engine_required_fields if name not in config.fields]:
            missing_settings = ", ".join(f'"{name}": {json.dumps(self.defaults[name])}' for name in missing)
            raise ValueError(f"{config.path}: SGLang requires fields that transformers omits; add {missing_settings}.")
        for name, spellings in self.engine_field_values.items():
            if unknown := sorted(spellings.keys() & set(config.fields.get(name) or ())):
                needed = ", ".join(f'"{spellings[value]}" in place of "{value}"' for value in unknown)
                raise ValueError(f"{config.path}: SGLang has other names for the values of {name}; write {needed}.")
        if unsupported := self.engine_unsupported_parts & arch.parts:
            raise ValueError(
                f"model.path: this {self.architecture} has {', '.join(sorted(unsupported))}, which SGLang silently "
                "ignores; train it with mrl sft, or from recorded rollouts (rollout.replay)."
            )
        if is_mxfp4(config.fields):
            raise ValueError(
                f"{config.path}: SGLang would keep the experts in MXFP4, and trainers do not send MXFP4; convert the folder "
                "with mrl convert to-megatron and then mrl convert to-hf, which writes bfloat16."
            )
        if (
            arch.has_sparse_attention
            and (channels := arch.transformer["dsa_indexer_head_dim"]) != _ENGINE_INDEX_CHANNELS
        ):
            raise ValueError(
                f"{config.path}: index_head_dim={channels}, but SGLang 0.5.23 caches keys of indexers only with "
                f"{_ENGINE_INDEX_CHANNELS} channels; train the model with mrl sft, or from recorded rollouts (rollout.replay)."
            )
        rope = arch.rope
        if isinstance(rope, YarnRope | LongRope) and rope.amplitude != rope.derived_amplitude:
            raise ValueError(
                f"model.path: SGLang ignores attention_factor={rope.attention_factor} of the rotary embedding and uses "
                f"{rope.derived_amplitude}; train the model with mrl sft, or from recorded rollouts "
                "(rollout.replay)."
            )

    def check_engine_dtype(self, config: HFConfig, dtype: str) -> None:
        """Raise ValueError if an SGLang engine cannot compute in this dtype, or would store some weights in another dtype."""
        if self.engine_dtype not in (None, dtype):
            raise ValueError(
                f"{config.path}: SGLang 0.5.23 computes {self.architecture} only in {self.engine_dtype}, not in {dtype}; set "
                f"sglang.dtype={self.engine_dtype}."
            )
        stored = config.fields.get("dtype") or config.fields.get("torch_dtype") or dtype
        if self.engine_reads_dtype and stored != dtype:
            raise ValueError(
                f"{config.path}: dtype is {stored}, but the engines compute in {dtype}; SGLang 0.5.23 stores weights of "
                f'{self.architecture} in the dtype of this file. Write "dtype": "{dtype}" there.'
            )

    def param_mappings(self, arch: Architecture) -> list[ParamMapping]:
        """Return one row for each Megatron parameter of this model: the table's rows, repeated for each layer and expert."""
        rows = self.rows(arch)
        expanded = [each for row in rows for each in _expand_row(row, arch)]
        if self.mtp is not None:
            expanded += self.mtp.rows(rows, arch.num_layers, arch.mtp_layers, arch.num_experts)
        return expanded

    def mtp_duplicates(self, arch: Architecture) -> dict[str, str]:
        """Return name of a duplicate -> name of its source (Hugging Face names), for all duplicates in trained MTP layers."""
        duplicates = self.mtp.duplicates_of(arch.num_layers, arch.mtp_layers) if self.mtp else {}
        names = {name for row in self.rows(arch) for name in row.hf}
        return {duplicate: source for duplicate, source in duplicates.items() if source in names}

    def fused_params_of(self, arch: Architecture) -> dict[str, tuple[str, ...]]:
        """Return the entries of `engine_fused_params` whose tensors this model has."""
        names = [name for row in self.rows(arch) for name in row.hf]
        return {
            fused: parts
            for fused, parts in self.engine_fused_params.items()
            if all(any(name.endswith(f".{part}") for name in names) for part in parts)
        }

    @property
    def engine_float32_tensors(self) -> tuple[str, ...]:
        """Suffixes of the names of the Hugging Face tensors that SGLang stores in float32 (see `engine_float32`)."""
        parts = [part for suffix in self.engine_float32 for part in self.engine_fused_params.get(suffix, (suffix,))]
        for name, renamed in self.engine_renames.items():
            parts += [part.removesuffix(renamed) + name for part in parts if part.endswith(renamed)]
        return tuple(parts)

    def is_in_mtp_layer(self, name: str, arch: Architecture) -> bool:
        """Whether the Hugging Face tensor `name` belongs to an MTP layer, trained or not."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        is_extra = name.startswith("mtp.") or (layer is not None and int(layer[1]) >= arch.num_layers)
        return self.has_mtp_layers and is_extra

    def rows(self, arch: Architecture) -> list[ParamMapping]:
        """Return the rows of the table that apply to this model, before they are repeated for layers and experts."""
        rows = [row for row in self.table if not (row.present_in == "untied_models" and arch.tied_embeddings)]
        if arch.is_reward_model:
            rows = [row for row in rows if row.megatron != OUTPUT_WEIGHT] + [SCORE_HEAD_ROW]
        return [row for row in rows if row.part is None or row.part in arch.parts]

    def hf_shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> shape for all tensors in the rows of `param_mappings`.

        A folder may stack the tensors of experts under other names (models/conversion/expert_stacks.py).
        """
        return {name: shape for row in self.param_mappings(arch) for name, shape in row.hf_shapes(arch.sizes).items()}


def _expand_row(row: ParamMapping, arch: Architecture) -> Iterator[ParamMapping]:
    for name, count in (arch.vision.repeats if arch.vision else {}).items():
        if f"{{{name}}}" in row.megatron:
            yield from (row.for_index(name, index) for index in range(count))
            return
    if "{layer}" not in row.megatron:
        yield row
        return
    block = row.present_in.removesuffix("_layers") if row.present_in.endswith("_layers") else None
    for layer in range(arch.num_layers):
        if block is None or block in arch.blocks(layer) or (block == "indexer" and arch.has_indexer(layer)):
            experts = range(arch.num_experts) if "{expert}" in row.megatron else [None]
            yield from (row.for_layer(layer, expert) for expert in experts)


@dataclass(frozen=True)
class ModelSpec:
    """Settings from which every trainer rank builds its part of a model."""

    model_path: str  # Hugging Face folder
    dims: ParallelDims
    dtype: str  # float32 or bfloat16
    optimizer: OptimConfig | None  # None: the model is never trained
    overrides: dict[str, Any]  # fields of Megatron's TransformerConfig
    share_prompts: bool = True  # whether a pack may compute a prompt only once for all its responses
    logprob_chunk: int = 1024  # largest number of rows of logits that are in memory at the same time
    # whether gradients are reduced during the backward pass; None: only on a GPU
    overlap_grad_reduce: bool | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)  # further fields of Megatron's DistributedDataParallelConfig
    # reference to a family outside models/families (see models.families.load_family); None: the built-in family
    family: str | None = None
    # adapters; if set, mrl trains only them. None: mrl trains all weights except frozen rows, and the vision tower only if
    # `train_vision` is true
    lora: LoraConfig | None = None
    seed: int = 0  # seed of the initial adapters
    train_vision: bool = False  # whether the vision tower of an image model is trained, too
    mtp_loss_coef: float | None = None  # coefficient of the loss of the MTP layers; None: MTP layers are not trained
