"""What the families share: the reading of a plain decoder's config, and the rows of its table, piece by piece.

Pieces: RMSNorm, grouped-query attention, RoPE, gated SiLU MLPs. A family lists those it has.
"""

from typing import Any

from models.conversion.mapping import GatedMLPMapping, Mapping, QKVMapping, VocabMapping
from models.hf_config import HFConfig
from models.spec import Architecture
from parallel.rope import Rope

_H, _D = ("hidden",), ("head_dim",)
_MLAYER, _LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_ATTN, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
_MATTN, _MMLP = f"{_MLAYER}.self_attention", f"{_MLAYER}.mlp"
_MEXPERT = f"{_MMLP}.experts.{{expert}}"

EMBEDDINGS = (
    VocabMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (("vocab", "hidden"),), 0),
    Mapping("decoder.final_layernorm.weight", ("model.norm.weight",), (_H,)),
    VocabMapping("output_layer.weight", ("lm_head.weight",), (("vocab", "hidden"),), 0, where="untied"),
)
ATTENTION = (
    Mapping(f"{_MATTN}.linear_qkv.layer_norm_weight", (f"{_LAYER}.input_layernorm.weight",), (_H,)),
    QKVMapping(
        f"{_MATTN}.linear_qkv.weight",
        (f"{_ATTN}.q_proj.weight", f"{_ATTN}.k_proj.weight", f"{_ATTN}.v_proj.weight"),
        (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
        axis=0,
    ),
    Mapping(f"{_MATTN}.linear_proj.weight", (f"{_ATTN}.o_proj.weight",), (("hidden", "q"),), axis=1),
)
QKV_BIAS = (
    QKVMapping(
        f"{_MATTN}.linear_qkv.bias",
        (f"{_ATTN}.q_proj.bias", f"{_ATTN}.k_proj.bias", f"{_ATTN}.v_proj.bias"),
        (("q",), ("kv",), ("kv",)),
        axis=0,
        part="qkv_bias",
    ),
)
PROJ_BIAS = (Mapping(f"{_MATTN}.linear_proj.bias", (f"{_ATTN}.o_proj.bias",), (_H,), part="proj_bias"),)
QK_NORMS = (
    Mapping(f"{_MATTN}.q_layernorm.weight", (f"{_ATTN}.q_norm.weight",), (_D,)),
    Mapping(f"{_MATTN}.k_layernorm.weight", (f"{_ATTN}.k_norm.weight",), (_D,)),
)
_POST_NORM = (f"{_LAYER}.post_attention_layernorm.weight",)
DENSE_MLP = (
    Mapping(f"{_MMLP}.linear_fc1.layer_norm_weight", _POST_NORM, (_H,), where="dense"),
    GatedMLPMapping(
        f"{_MMLP}.linear_fc1.weight",
        (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
        (("ffn", "hidden"), ("ffn", "hidden")),
        axis=0,
        where="dense",
    ),
    Mapping(f"{_MMLP}.linear_fc2.weight", (f"{_MLP}.down_proj.weight",), (("hidden", "ffn"),), axis=1, where="dense"),
)
DENSE_MLP_BIAS = (
    GatedMLPMapping(
        f"{_MMLP}.linear_fc1.bias",
        (f"{_MLP}.gate_proj.bias", f"{_MLP}.up_proj.bias"),
        (("ffn",), ("ffn",)),
        axis=0,
        where="dense",
        part="mlp_bias",
    ),
    Mapping(f"{_MMLP}.linear_fc2.bias", (f"{_MLP}.down_proj.bias",), (_H,), where="dense", part="mlp_bias"),
)
ENGINE_FUSIONS: dict[str, tuple[str, ...]] = {
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
"""What transformers takes for a field that a config leaves out, alike in many families. Sizes are never left out."""
FULL_ATTENTION_DEFAULTS: dict[str, Any] = dict(use_sliding_window=False, layer_types=None)


def moe_mlp(block: str, gate: str, up: str, down: str) -> tuple[Mapping, ...]:
    """Rows of a layer with experts, under the names that the family gives to them inside a layer."""
    prefix = f"{_LAYER}.{block}"
    expert = f"{prefix}.experts.{{expert}}"
    return (
        Mapping(f"{_MLAYER}.pre_mlp_layernorm.weight", _POST_NORM, (_H,), where="moe"),
        Mapping(f"{_MMLP}.router.weight", (f"{prefix}.gate.weight",), (("experts", "hidden"),), where="moe"),
        GatedMLPMapping(
            f"{_MEXPERT}.linear_fc1.weight",
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            (("moe_ffn", "hidden"), ("moe_ffn", "hidden")),
            axis=0,
            where="moe",
        ),
        Mapping(
            f"{_MEXPERT}.linear_fc2.weight",
            (f"{expert}.{down}.weight",),
            (("hidden", "moe_ffn"),),
            axis=1,
            where="moe",
        ),
    )


def moe_fusions(gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """How SGLang stacks the experts of a layer, under the names that the family gives to their matrices."""
    return {
        "experts.w13_weight": (f"experts.{{expert}}.{gate}.weight", f"experts.{{expert}}.{up}.weight"),
        "experts.w2_weight": (f"experts.{{expert}}.{down}.weight",),
    }


def check_full_attention(config: HFConfig) -> None:
    """Raise ValueError unless every token sees all before it: the window is off, whatever its size would be."""
    config.expect(use_sliding_window=False)
    config.asked.update(("sliding_window", "max_window_layers"))
    layers = config["layer_types"]
    if layers is not None and layers != ["full_attention"] * config["num_hidden_layers"]:
        raise ValueError(
            f"{config.path}: layer_types={layers!r} is not supported; expected 'full_attention' for each of the "
            f"{config['num_hidden_layers']} layers."
        )


def attention_parts(config: HFConfig) -> frozenset[str]:
    """Biases of all four projections, or of none, by the field `attention_bias`."""
    return frozenset(("qkv_bias", "proj_bias") if config["attention_bias"] else ())


def read_decoder(
    config: HFConfig, *, parts: frozenset[str] = frozenset(), rope: Rope | None = None, **transformer: Any
) -> Architecture:
    """A decoder of these pieces; `transformer` adds to Megatron's fields. Raises ValueError at what is not implemented.

    `rope`: where not all components of all heads are rotated alike.
    """
    config.expect(hidden_act="silu", attention_dropout=0.0, is_encoder_decoder=False, tie_encoder_decoder=False)
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"] or heads
    head_dim = config["head_dim"] or config["hidden_size"] // heads
    return Architecture(
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rope=rope or config.rope(head_dim),
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
            add_bias_linear=False,  # one switch for all matrices; models/build.py has one for each, from `parts`
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
