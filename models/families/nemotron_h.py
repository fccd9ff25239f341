"""Nemotron-H: each layer has one norm and one block (Mamba-2, attention without a rotary embedding, an MLP, or experts).

MLPs and experts have no gate, and their activation function is the square of ReLU. Layers with experts have sigmoid routing
(decoder_blocks.py explains it) and a shared expert. MTP layers are not trained; exports copy them unchanged.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from models.architecture import Architecture, Block, Family
from models.conversion.mapping import ParamMapping, QKVMapping, RecurrentGroupsMapping, VocabMapping
from models.families.decoder_blocks import ENGINE_FUSED_PARAMS, read_sigmoid_router
from models.hf_config import HFConfig

# letter of hybrid_override_pattern -> block
_PATTERN: dict[str, Block] = {"M": "recurrent", "*": "attention", "-": "dense", "E": "moe"}
# Value in layers_block_type -> block. transformers 5 writes the first two values in place of `mamba` and `attention`.
_NAMES: dict[str, Block] = {
    "linear_attention": "recurrent",
    "full_attention": "attention",
    "mamba": "recurrent",
    "attention": "attention",
    "mlp": "dense",
    "moe": "moe",
}
_CONV_BIAS = "conv_bias"
_OTHER_GROUPS = "n_groups other than 8, and no field mamba_n_groups with the same value"

_LAYER, _HF_LAYER = "decoder.layers.{layer}", "backbone.layers.{layer}"
_MIXER, _HF = f"{_LAYER}.self_attention", f"{_HF_LAYER}.mixer"
_MLP, _EXPERT, _SHARED = f"{_LAYER}.mlp", f"{_LAYER}.mlp.experts.{{expert}}", f"{_LAYER}.mlp.shared_experts"
# Sizes in the shapes of a Mamba-2 layer:
#   values: values of all heads
#   states: keys, or queries, of all groups
#   mamba_heads: number of heads
#   kernel: tokens that the convolution reads
#   one: 1
# RecurrentGroupsMapping also needs the size head_groups, the number of groups of heads.
_VALUES, _STATES, _HEADS = ("values", "hidden"), ("states", "hidden"), ("mamba_heads",)
_KERNEL = ("one", "kernel")


def _norm(megatron: str, block: Block) -> ParamMapping:
    """Return the row of the norm before a block."""
    return ParamMapping(megatron, (f"{_HF_LAYER}.norm.weight",), (("hidden",),), present_in=f"{block}_layers")  # type: ignore[bad-argument-type]


_MAMBA = tuple(
    replace(row, present_in="recurrent_layers")
    for row in (
        RecurrentGroupsMapping(
            f"{_MIXER}.conv_weight",
            (f"{_HF}.conv1d.weight",),
            (("values", *_KERNEL), ("states", *_KERNEL), ("states", *_KERNEL)),
            axis=0,
        ),
        RecurrentGroupsMapping(
            f"{_MIXER}.conv_bias",
            (f"{_HF}.conv1d.bias",),
            (("values",), ("states",), ("states",)),
            axis=0,
            part=_CONV_BIAS,
        ),
        ParamMapping(f"{_MIXER}.dt_bias", (f"{_HF}.dt_bias",), (_HEADS,), axis=0),
        ParamMapping(f"{_MIXER}.A_log", (f"{_HF}.A_log",), (_HEADS,), axis=0, negative_exp_in_engine=True),
        ParamMapping(f"{_MIXER}.D", (f"{_HF}.D",), (_HEADS,), axis=0),
        ParamMapping(f"{_MIXER}.norm_weight", (f"{_HF}.norm.weight",), (("values",),), axis=0),
        ParamMapping(f"{_MIXER}.linear_proj.weight", (f"{_HF}.out_proj.weight",), (("hidden", "values"),), axis=1),
        RecurrentGroupsMapping(
            f"{_MIXER}.linear_in.weight",
            (f"{_HF}.in_proj.weight",),
            (_VALUES, _VALUES, _STATES, _STATES, (*_HEADS, "hidden")),
            axis=0,
        ),
    )
)
_ATTENTION = tuple(
    replace(row, present_in="attention_layers")
    for row in (
        QKVMapping(
            f"{_MIXER}.linear_qkv.weight",
            (f"{_HF}.q_proj.weight", f"{_HF}.k_proj.weight", f"{_HF}.v_proj.weight"),
            (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
            axis=0,
        ),
        ParamMapping(f"{_MIXER}.linear_proj.weight", (f"{_HF}.o_proj.weight",), (("hidden", "q"),), axis=1),
    )
)


def _mlp(megatron: str, hf: str, width: str, block: Block) -> tuple[ParamMapping, ParamMapping]:
    """Return the rows of an MLP without a gate. `width`: name of its intermediate size in Architecture.sizes."""
    present: dict[str, Any] = dict(present_in=f"{block}_layers")
    return (
        ParamMapping(
            f"{megatron}.linear_fc1.weight", (f"{hf}.up_proj.weight",), ((width, "hidden"),), axis=0, **present
        ),
        ParamMapping(
            f"{megatron}.linear_fc2.weight", (f"{hf}.down_proj.weight",), (("hidden", width),), axis=1, **present
        ),
    )


_MOE = (
    ParamMapping(f"{_MLP}.router.weight", (f"{_HF}.gate.weight",), (("experts", "hidden"),), present_in="moe_layers"),
    ParamMapping(
        f"{_MLP}.router.expert_bias",
        (f"{_HF}.gate.e_score_correction_bias",),
        (("experts",),),
        present_in="moe_layers",
        is_buffer=True,
    ),
    *_mlp(_EXPERT, f"{_HF}.experts.{{expert}}", "moe_ffn", "moe"),
    *_mlp(_SHARED, f"{_HF}.shared_experts", "shared_ffn", "moe"),
)


def _blocks(config: HFConfig) -> tuple[Block, ...]:
    """Return the block of each layer, from `layers_block_type` or `hybrid_override_pattern`.

    Raises ValueError if a block is unknown, or if the fields differ.
    """
    names, pattern, count = (
        config[name] for name in ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers")
    )
    fields = dict(layers_block_type=(names, _NAMES), hybrid_override_pattern=(pattern, _PATTERN))
    found: dict[str, tuple[Block, ...]] = {}
    for field, (kinds, known) in fields.items():
        if kinds is None:
            continue
        if not isinstance(kinds, list | str) or not kinds or not set(kinds) <= known.keys():
            raise ValueError(
                f"{config.path}: {field}={kinds!r} is not supported; expected {' or '.join(known)} for each layer."
            )
        found[field] = tuple(known[kind] for kind in kinds)
    default: tuple[Block, ...] = ("recurrent", "moe", "attention", "dense")  # of transformers
    blocks = next(iter(found.values()), default)
    if any(other != blocks for other in found.values()) or count not in (None, len(blocks)):
        raise ValueError(
            f"{config.path}: layers_block_type={names!r}, hybrid_override_pattern={pattern!r} and num_hidden_layers={count!r} "
            "differ; remove all but one of these fields."
        )
    return blocks


def _check_fields(config: HFConfig) -> None:
    """Raise ValueError if a field has a value that mrl, transformers or SGLang does not support."""
    config.expect(
        mlp_hidden_act="relu2",
        mamba_hidden_act="silu",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attention_bias=False,  # neither transformers nor SGLang reads it
        mlp_bias=False,  # SGLang has no such biases in shared experts
        use_bias=False,
        mamba_proj_bias=False,
        residual_in_fp32=False,
        tie_word_embeddings=False,  # transformers does not tie the weights, but SGLang does
        sliding_window=None,  # transformers ignores this field, but SGLang does not
        attention_head_dim=(None, config["head_dim"]),  # an old name, which transformers ignores
        rms_norm_eps=(None, config["layer_norm_epsilon"]),
        norm_eps=(None, config["layer_norm_epsilon"]),
    )
    limits = [
        math.inf if isinstance(limit, Mapping) and limit.get("__float__") == "Infinity" else limit
        for limit in config["time_step_limit"]
    ]
    if limits != [0.0, math.inf]:
        raise ValueError(
            f"{config.path}: time_step_limit={config['time_step_limit']!r} is not supported; expected [0.0, Infinity]."
        )
    # These fields describe initial weights, kernels, the dtype of states in engines, generation, and MTP layers. Neither
    # transformers nor SGLang uses `expand`. transformers raises the time steps of Mamba-2 to at least `time_step_min`. The models
    # were trained without this limit, and SGLang has no such limit, so mrl has none.
    config.read_fields.update(
        ("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "expand")
    )
    config.read_fields.update(("use_mamba_kernels", "chunk_size", "moe_shared_expert_overlap", "mamba_ssm_cache_dtype"))
    config.read_fields.update(("num_logits_to_keep", "num_nextn_predict_layers", "mtp_layers_block_type"))
    config.read_fields.add("mtp_hybrid_override_pattern")
    # Published configs have these fields, but the attention has no rotary embedding.
    config.read_fields.update(("rope_theta", "partial_rotary_factor", "rope_parameters", "rope_scaling"))


def _read_moe(config: HFConfig, blocks: tuple[Block, ...]) -> dict[str, Any]:
    """Return Megatron's fields of the layers with experts; {} if no layer has experts."""
    if "moe" not in blocks:
        config.read_fields.update(_MOE_DEFAULTS)
        return {}
    # SGLang multiplies the width of the shared expert by n_shared_experts, and transformers ignores this field.
    config.expect(moe_latent_size=None, n_shared_experts=1)
    return dict(
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_layer_freq=[int(block == "moe") for block in blocks],
        moe_shared_expert_intermediate_size=config["moe_shared_expert_intermediate_size"],
        **read_sigmoid_router(config),
    )


def translate(config: HFConfig) -> Architecture:
    """Translate a Nemotron-H config. Raises ValueError if a value is not supported."""
    _check_fields(config)
    blocks = _blocks(config)
    moe = _read_moe(config, blocks)
    heads, head_dim, width = config["num_attention_heads"], config["head_dim"], config["hidden_size"]
    query_groups = config["num_key_value_heads"] or heads
    mamba_heads, groups = config["mamba_num_heads"], config.any_spelling("n_groups", "mamba_n_groups")
    if mamba_heads % groups:
        raise ValueError(
            f"{config.path}: mamba_num_heads={mamba_heads} is not supported; expected a multiple of n_groups={groups}."
        )
    parts = {_CONV_BIAS: config["use_conv_bias"], _OTHER_GROUPS: groups != 8 and "mamba_n_groups" not in config.fields}
    return Architecture(
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rope=None,
        tied_embeddings=False,
        activation="squared_relu",
        only_blocks=blocks,
        transformer=dict(
            num_layers=len(blocks),
            hidden_size=width,
            ffn_hidden_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=query_groups,
            kv_channels=head_dim,
            layernorm_epsilon=config["layer_norm_epsilon"],
            init_method_std=config["initializer_range"],
            normalization="RMSNorm",
            gated_linear_unit=False,
            add_bias_linear=False,
            linear_attention_freq=[int(block == "recurrent") for block in blocks],
            linear_conv_kernel_dim=config["conv_kernel"],
            mamba_state_dim=config["ssm_state_size"],
            mamba_head_dim=config["mamba_head_dim"],
            mamba_num_groups=groups,
            mamba_num_heads=mamba_heads,
            **moe,
        ),
        sizes=dict(
            vocab=config["vocab_size"],
            hidden=width,
            ffn=config["intermediate_size"],
            q=heads * head_dim,
            kv=query_groups * head_dim,
            head_dim=head_dim,
            values=mamba_heads * config["mamba_head_dim"],
            states=groups * config["ssm_state_size"],
            mamba_heads=mamba_heads,
            kernel=config["conv_kernel"],
            head_groups=groups,
            one=1,
            experts=moe.get("num_moe_experts", 0),
            moe_ffn=moe.get("moe_ffn_hidden_size", 0),
            shared_ffn=moe.get("moe_shared_expert_intermediate_size", 0),
        ),
        parts=frozenset(part for part, is_present in parts.items() if is_present),
    )


_MOE_DEFAULTS: dict[str, Any] = dict(
    n_routed_experts=8,
    n_shared_experts=1,
    moe_intermediate_size=7688,
    moe_shared_expert_intermediate_size=7688,
    moe_latent_size=None,
    num_experts_per_tok=2,
    routed_scaling_factor=1.0,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
)
NEMOTRON_H = Family(
    architecture="NemotronHForCausalLM",
    translate=translate,
    table=(
        VocabMapping("embedding.word_embeddings.weight", ("backbone.embeddings.weight",), (("vocab", "hidden"),), 0),
        ParamMapping("decoder.final_layernorm.weight", ("backbone.norm_f.weight",), (("hidden",),)),
        VocabMapping("output_layer.weight", ("lm_head.weight",), (("vocab", "hidden"),), 0),
        *(_norm(f"{_MIXER}.linear_in.layer_norm_weight", "recurrent"), *_MAMBA),
        *(_norm(f"{_MIXER}.linear_qkv.layer_norm_weight", "attention"), *_ATTENTION),
        *(_norm(f"{_MLP}.linear_fc1.layer_norm_weight", "dense"), *_mlp(_MLP, _HF, "ffn", "dense")),
        *(_norm(f"{_LAYER}.pre_mlp_layernorm.weight", "moe"), *_MOE),
    ),
    engine_fused_params={
        "qkv_proj.weight": ENGINE_FUSED_PARAMS["qkv_proj.weight"],
        "experts.w13_weight": ("experts.{expert}.up_proj.weight",),
        "experts.w2_weight": ("experts.{expert}.down_proj.weight",),
    },
    defaults=_MOE_DEFAULTS
    | dict(
        layers_block_type=None,
        hybrid_override_pattern=None,
        num_hidden_layers=None,
        head_dim=128,
        attention_head_dim=None,
        num_key_value_heads=8,
        attention_bias=False,
        attention_dropout=0.0,
        sliding_window=None,
        mlp_hidden_act="relu2",
        mlp_bias=False,
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
        use_conv_bias=True,
        mamba_hidden_act="silu",
        mamba_proj_bias=False,
        time_step_limit=(0.0, math.inf),
        use_bias=False,
        residual_in_fp32=False,
        hidden_dropout=0.0,
        tie_word_embeddings=False,
        initializer_range=0.02,
        layer_norm_epsilon=1e-5,
        rms_norm_eps=None,
        norm_eps=None,
    ),
    engine_required_fields=("n_groups",),
    engine_unsupported_parts=frozenset([_OTHER_GROUPS]),
    engine_float32=(".mixer.A",),
    engine_prefixes={"backbone.embeddings.": "model.embed_tokens.", "backbone.": "model."},
    engine_renames={".A_log": ".A"},
    engine_field_values=dict(layers_block_type={"linear_attention": "mamba", "full_attention": "attention"}),
    peft_prefixes={"backbone.": "model."},
    engine_needs_gpu=True,
    # Otherwise, on some GPUs, SGLang would choose kernels that need the weights of experts in another order.
    engine_args=dict(moe_runner_backend="triton"),
    has_mtp_layers=True,
)
