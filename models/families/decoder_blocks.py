"""Building blocks that families share: the translation of a plain decoder's config, and table rows for each block.

The blocks are RMSNorm, grouped-query attention, RoPE, gated SiLU MLPs, and MoE layers. The table of a family contains the rows of
the blocks that its models have.
"""

from typing import Any

from models.architecture import Architecture
from models.conversion.mapping import GatedMLPMapping, ParamMapping, QKVMapping, VocabMapping
from models.hf_config import HFConfig
from parallel.rope import QueryScaling, Rope

_HIDDEN, _HEAD_DIM = ("hidden",), ("head_dim",)  # shapes, as keys of Architecture.sizes
_MEGATRON_LAYER, _HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_HF_ATTENTION, _HF_MLP = f"{_HF_LAYER}.self_attn", f"{_HF_LAYER}.mlp"
_MEGATRON_ATTENTION, _MEGATRON_MLP = f"{_MEGATRON_LAYER}.self_attention", f"{_MEGATRON_LAYER}.mlp"
_MEGATRON_EXPERT = f"{_MEGATRON_MLP}.experts.{{expert}}"
_HF_SHARED_EXPERTS = f"{_HF_MLP}.shared_experts"
_EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")

EMBEDDINGS = (
    VocabMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (("vocab", "hidden"),), 0),
    ParamMapping("decoder.final_layernorm.weight", ("model.norm.weight",), (_HIDDEN,)),
    VocabMapping("output_layer.weight", ("lm_head.weight",), (("vocab", "hidden"),), 0, present_in="untied_models"),
)
ATTENTION = (
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.linear_qkv.layer_norm_weight", (f"{_HF_LAYER}.input_layernorm.weight",), (_HIDDEN,)
    ),
    QKVMapping(
        f"{_MEGATRON_ATTENTION}.linear_qkv.weight",
        (f"{_HF_ATTENTION}.q_proj.weight", f"{_HF_ATTENTION}.k_proj.weight", f"{_HF_ATTENTION}.v_proj.weight"),
        (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
        axis=0,
    ),
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.linear_proj.weight", (f"{_HF_ATTENTION}.o_proj.weight",), (("hidden", "q"),), axis=1
    ),
)
QKV_BIAS = (
    QKVMapping(
        f"{_MEGATRON_ATTENTION}.linear_qkv.bias",
        (f"{_HF_ATTENTION}.q_proj.bias", f"{_HF_ATTENTION}.k_proj.bias", f"{_HF_ATTENTION}.v_proj.bias"),
        (("q",), ("kv",), ("kv",)),
        axis=0,
        part="qkv_bias",
    ),
)
OUTPUT_PROJECTION_BIAS = (
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.linear_proj.bias", (f"{_HF_ATTENTION}.o_proj.bias",), (_HIDDEN,), part="proj_bias"
    ),
)
QK_NORMS = (
    ParamMapping(f"{_MEGATRON_ATTENTION}.q_layernorm.weight", (f"{_HF_ATTENTION}.q_norm.weight",), (_HEAD_DIM,)),
    ParamMapping(f"{_MEGATRON_ATTENTION}.k_layernorm.weight", (f"{_HF_ATTENTION}.k_norm.weight",), (_HEAD_DIM,)),
)
# norm before the MLP or the experts; in families with POST_NORMS: norm of the output of the attention
_POST_NORM = (f"{_HF_LAYER}.post_attention_layernorm.weight",)
PROJECTION_NORMS = (  # one norm for the queries of all heads together, and one for the keys
    ParamMapping(f"{_MEGATRON_ATTENTION}.q_projection_norm.weight", (f"{_HF_ATTENTION}.q_norm.weight",), (("q",),), 0),
    ParamMapping(f"{_MEGATRON_ATTENTION}.k_projection_norm.weight", (f"{_HF_ATTENTION}.k_norm.weight",), (("kv",),), 0),
)
POST_NORMS = (  # norms of the outputs of the attention and of the MLP
    ParamMapping(f"{_MEGATRON_LAYER}.post_self_attn_layernorm.weight", _POST_NORM, (_HIDDEN,)),
    ParamMapping(
        f"{_MEGATRON_LAYER}.post_mlp_layernorm.weight", (f"{_HF_LAYER}.post_feedforward_layernorm.weight",), (_HIDDEN,)
    ),
)
DENSE_MLP = (
    ParamMapping(f"{_MEGATRON_MLP}.linear_fc1.layer_norm_weight", _POST_NORM, (_HIDDEN,), present_in="dense_layers"),
    GatedMLPMapping(
        f"{_MEGATRON_MLP}.linear_fc1.weight",
        (f"{_HF_MLP}.gate_proj.weight", f"{_HF_MLP}.up_proj.weight"),
        (("ffn", "hidden"), ("ffn", "hidden")),
        axis=0,
        present_in="dense_layers",
    ),
    ParamMapping(
        f"{_MEGATRON_MLP}.linear_fc2.weight",
        (f"{_HF_MLP}.down_proj.weight",),
        (("hidden", "ffn"),),
        axis=1,
        present_in="dense_layers",
    ),
)
MOE_NORM = ParamMapping(  # the norm before the router and the experts
    f"{_MEGATRON_LAYER}.pre_mlp_layernorm.weight", _POST_NORM, (_HIDDEN,), present_in="moe_layers"
)
DENSE_MLP_BIAS = (
    GatedMLPMapping(
        f"{_MEGATRON_MLP}.linear_fc1.bias",
        (f"{_HF_MLP}.gate_proj.bias", f"{_HF_MLP}.up_proj.bias"),
        (("ffn",), ("ffn",)),
        axis=0,
        present_in="dense_layers",
        part="mlp_bias",
    ),
    ParamMapping(
        f"{_MEGATRON_MLP}.linear_fc2.bias",
        (f"{_HF_MLP}.down_proj.bias",),
        (_HIDDEN,),
        present_in="dense_layers",
        part="mlp_bias",
    ),
)
ENGINE_FUSED_PARAMS: dict[str, tuple[str, ...]] = {
    "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "qkv_proj.bias": ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
}
DEFAULTS: dict[str, Any] = dict(
    hidden_act="silu",
    attention_dropout=0.0,
    initializer_range=0.02,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=False,
    tie_encoder_decoder=False,
    is_encoder_decoder=False,
)
"""Defaults of transformers for fields that many families have and that a config may omit.

A family adds the defaults of the sizes that its configs may omit, such as `head_dim`. All other sizes must be in the config.
"""
FULL_ATTENTION_DEFAULTS: dict[str, Any] = dict(use_sliding_window=False, layer_types=None)
"""Defaults of transformers for the fields that `check_full_attention` reads."""


def moe_mlp(block: str, gate: str, up: str, down: str) -> tuple[ParamMapping, ...]:
    """Return the rows of an MoE layer. The arguments are the Hugging Face names of the block and of an expert's matrices."""
    prefix = f"{_HF_LAYER}.{block}"
    expert = f"{prefix}.experts.{{expert}}"
    return (
        MOE_NORM,
        ParamMapping(
            f"{_MEGATRON_MLP}.router.weight",
            (f"{prefix}.gate.weight",),
            (("experts", "hidden"),),
            present_in="moe_layers",
        ),
        GatedMLPMapping(
            f"{_MEGATRON_EXPERT}.linear_fc1.weight",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            (("moe_ffn", "hidden"), ("moe_ffn", "hidden")),
            axis=0,
            present_in="moe_layers",
        ),
        ParamMapping(
            f"{_MEGATRON_EXPERT}.linear_fc2.weight",
            (f"{expert}.{down}.weight",),
            (("hidden", "moe_ffn"),),
            axis=1,
            present_in="moe_layers",
        ),
    )


def moe_fused_params(gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """Return the `engine_fused_params` of an MoE layer. The arguments are the Hugging Face names of an expert's matrices.

    SGLang stacks the matrices of all experts of a layer in two parameters: one for gate and up projections, and one for down
    projections.
    """
    return {
        "experts.w13_weight": (f"experts.{{expert}}.{gate}.weight", f"experts.{{expert}}.{up}.weight"),
        "experts.w2_weight": (f"experts.{{expert}}.{down}.weight",),
    }


def check_full_attention(config: HFConfig) -> None:
    """Raise ValueError if a layer does not have full attention."""
    config.expect(use_sliding_window=False)
    config.read_fields.update(("sliding_window", "max_window_layers"))  # have no effect without sliding windows
    layers = config["layer_types"]
    if layers is not None and layers != ["full_attention"] * config["num_hidden_layers"]:
        raise ValueError(
            f"{config.path}: layer_types={layers!r} is not supported; expected 'full_attention' for each of the "
            f"{config['num_hidden_layers']} layers."
        )


def without_pre_norms(*rows: ParamMapping) -> tuple[ParamMapping, ...]:
    """Return the rows without the norms before the attention and before the MLP."""
    return tuple(row for row in rows if not row.megatron.endswith(".layer_norm_weight"))


def read_windows(config: HFConfig, full_attention_every: int) -> dict[str, Any]:
    """Return Megatron's fields for layers with a sliding window. The dict is empty if no layer has a window.

    A token of such a layer attends to itself and to the `sliding_window - 1` tokens before it. If the config does not list the
    kinds of the layers, every layer whose number is a multiple of `full_attention_every`, counted from 1, has full attention.
    """
    window, kinds, count = config["sliding_window"], config["layer_types"], config["num_hidden_layers"]
    known = ("sliding_attention", "full_attention")
    if kinds is None:
        kinds = [known[(number + 1) % full_attention_every == 0] for number in range(count)]
    if len(kinds) != count or not set(kinds) <= set(known):
        raise ValueError(
            f"{config.path}: layer_types={kinds!r} is not supported; expected {' or '.join(known)} for each of the {count} "
            "layers."
        )
    if "sliding_attention" not in kinds:
        return {}
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"{config.path}: sliding_window={window!r} is not supported; expected a number of tokens.")
    return dict(window_size=(window - 1, 0), window_attn_skip_freq=[int(kind == known[0]) for kind in kinds])


def read_layers_without_rope(config: HFConfig) -> dict[str, Any]:
    """Return Megatron's field for layers whose queries and keys are not rotated. The dict is empty if all layers have RoPE.

    `no_rope_layers` has a 1 for each layer with RoPE. Without this field, every layer whose number is a multiple of
    `no_rope_layer_interval`, counted from 1, has no RoPE. Raises ValueError if the list does not fit the layers.
    """
    with_rope, every, count = config["no_rope_layers"], config["no_rope_layer_interval"], config["num_hidden_layers"]
    if with_rope is None:
        with_rope = [int((number + 1) % every != 0) for number in range(count)]
    if len(with_rope) != count or not set(with_rope) <= {0, 1}:
        raise ValueError(
            f"{config.path}: no_rope_layers={with_rope!r} is not supported; expected 0 or 1 for each of the {count} layers."
        )
    return {} if all(with_rope) else dict(no_rope_freq=[int(not has_rope) for has_rope in with_rope])


def read_query_scaling(config: HFConfig) -> QueryScaling:
    """Return the factors of the queries that the rotary parameters describe. Raises ValueError if they describe none."""
    parameters = config.rope_parameters()
    beta, period = parameters.get("llama_4_scaling_beta"), parameters.get("original_max_position_embeddings")
    if not isinstance(beta, int | float) or not isinstance(period, int) or period < 1:
        raise ValueError(
            f"{config.path}: rope_parameters={parameters!r} is not supported; expected numbers in llama_4_scaling_beta and in "
            "original_max_position_embeddings."
        )
    return QueryScaling(beta, period)


def check_no_window(config: HFConfig) -> None:
    """Raise ValueError if attention has a sliding window that is shorter than max_position_embeddings."""
    window, context = config["sliding_window"], config["max_position_embeddings"]
    if window is not None and window < context:
        raise ValueError(
            f"{config.path}: sliding_window={window!r} is not supported; expected null, or at least "
            f"max_position_embeddings={context}."
        )


def attention_parts(config: HFConfig) -> frozenset[str]:
    """Return the parts "qkv_bias" and "proj_bias" if the attention projections have biases."""
    return frozenset(("qkv_bias", "proj_bias") if config["attention_bias"] else ())


def read_decoder(
    config: HFConfig, *, parts: frozenset[str] = frozenset(), rope: Rope | None = None, **transformer: Any
) -> Architecture:
    """Translate the config of a decoder with the blocks in this file. Raises ValueError if a value is not supported.

    `parts` are the optional parts of this model. `rope` is the model's rotary embedding (None: RoPE over all components of a
    head). `transformer` contains further fields of Megatron's config.
    """
    config.expect(hidden_act="silu", attention_dropout=0.0, is_encoder_decoder=False, tie_encoder_decoder=False)
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"] or heads
    head_dim = config["head_dim"] or config["hidden_size"] // heads
    rope = rope or config.rope(head_dim)
    return Architecture(
        vocab_size=config["vocab_size"],
        max_position_embeddings=rope.longest_sequence(config["max_position_embeddings"]),
        rope=rope,
        tied_embeddings=config["tie_word_embeddings"],
        transformer=dict(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=groups,
            kv_channels=head_dim,
            layernorm_epsilon=config["rms_norm_eps"],
            init_method_std=config["initializer_range"],
            normalization="RMSNorm",
            gated_linear_unit=True,
            # Megatron has one setting for all matrices; model_builder.py adds the biases in `parts`
            add_bias_linear=False,
            add_qkv_bias="qkv_bias" in parts,
            **transformer,
        ),
        sizes=dict(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            q=heads * head_dim,
            kv=groups * head_dim,
            head_dim=head_dim,
            experts=transformer.get("num_moe_experts", 0),
            moe_ffn=transformer.get("moe_ffn_hidden_size", 0),
            shared_ffn=transformer.get("moe_shared_expert_intermediate_size") or 0,
        ),
        parts=parts,
    )


# MoE layers with sigmoid routing, as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2). The affinity of a token to an expert is
# the sigmoid of a logit of the router. The score of an expert is its affinity plus a correction bias. The router first chooses
# the groups of experts whose two best scores have the largest sum, and then the experts with the best scores in these groups. The
# weight of a chosen expert is its affinity (not its score), divided by the sum of the affinities of all chosen experts and
# multiplied by a constant. Shared experts process every token and form one MLP.
SIGMOID_ROUTED_MOE = (
    *moe_mlp("mlp", *_EXPERT_MATRICES),
    ParamMapping(
        f"{_MEGATRON_MLP}.router.expert_bias",
        (f"{_HF_MLP}.gate.e_score_correction_bias",),
        (("experts",),),
        present_in="moe_layers",
        is_buffer=True,
    ),
    GatedMLPMapping(
        f"{_MEGATRON_MLP}.shared_experts.linear_fc1.weight",
        (f"{_HF_SHARED_EXPERTS}.gate_proj.weight", f"{_HF_SHARED_EXPERTS}.up_proj.weight"),
        (("shared_ffn", "hidden"), ("shared_ffn", "hidden")),
        axis=0,
        present_in="moe_layers",
        part="shared_experts",
    ),
    ParamMapping(
        f"{_MEGATRON_MLP}.shared_experts.linear_fc2.weight",
        (f"{_HF_SHARED_EXPERTS}.down_proj.weight",),
        (("hidden", "shared_ffn"),),
        axis=1,
        present_in="moe_layers",
        part="shared_experts",
    ),
)
SIGMOID_ROUTED_MOE_FUSED_PARAMS = moe_fused_params(*_EXPERT_MATRICES)
SIGMOID_ROUTED_MOE_DEFAULTS: dict[str, Any] = dict(n_shared_experts=1, norm_topk_prob=True)


def sigmoid_routed_moe_parts(config: HFConfig) -> frozenset[str]:
    """Return the part "shared_experts" if the model has shared experts."""
    return frozenset(["shared_experts"] if config["n_shared_experts"] else [])


def read_sigmoid_routed_moe(config: HFConfig) -> dict[str, Any]:
    """Return Megatron's fields for MoE layers with sigmoid routing. Raises ValueError if a value is not supported."""
    # These fields describe MTP layers (models/conversion/mtp_mapping.py).
    config.read_fields.update(("num_nextn_predict_layers", "num_mtp_layers"))
    num_layers, num_dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    width = config["moe_intermediate_size"]
    return dict(
        moe_ffn_hidden_size=width,
        moe_layer_freq=[int(layer >= num_dense) for layer in range(num_layers)],
        moe_shared_expert_intermediate_size=width * (config["n_shared_experts"] or 0) or None,
        **read_sigmoid_router(config),
    )


def read_sigmoid_router(config: HFConfig) -> dict[str, Any]:
    """Return Megatron's fields for routers with sigmoid routing. Raises ValueError if a value is not supported."""
    config.expect(norm_topk_prob=True)
    return dict(
        num_moe_experts=config["n_routed_experts"],
        moe_router_topk=config["num_experts_per_tok"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=config["routed_scaling_factor"],
        **_read_expert_groups(config),
    )


def _read_expert_groups(config: HFConfig) -> dict[str, int]:
    groups, chosen, topk = config["n_group"], config["topk_group"], config["num_experts_per_tok"]
    for name, value in dict(n_group=groups, topk_group=chosen, num_experts_per_tok=topk).items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{config.path}: {name}={value!r} is not supported; expected a number of 1 or more.")
    if topk < 2:
        raise ValueError(f"{config.path}: num_experts_per_tok={topk} is not supported; expected at least 2.")
    if groups == 1:
        return {}
    if topk // chosen != 2:  # Megatron 0.19 ranks groups by the total score of their best topk // chosen experts
        raise ValueError(
            f"{config.path}: num_experts_per_tok={topk} with n_group={groups} and topk_group={chosen} is not supported: "
            f"groups of experts are ranked by their best two experts; expected {2 * chosen} or {2 * chosen + 1} experts "
            "per token."
        )
    return dict(moe_router_num_groups=groups, moe_router_group_topk=chosen)
