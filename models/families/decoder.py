"""What the families share: the reading of a plain decoder's config, and the rows of its table, piece by piece.

Pieces: RMSNorm, grouped-query attention, RoPE, gated SiLU MLPs. A family lists those it has.
"""

from typing import Any

from models.conversion.mapping import GatedMLPMapping, Mapping, QKVMapping, VocabMapping
from models.spec import Architecture, HFConfig

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
ENGINE_FUSIONS: dict[str, tuple[str, ...]] = {
    "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
}


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


def read_decoder(config: HFConfig, **transformer: Any) -> Architecture:
    """A decoder of these pieces; `transformer` adds to Megatron's fields. Raises ValueError at what is not implemented."""
    config.expect(hidden_act="silu", attention_dropout=0.0)
    rope = config.rope
    if rope["rope_type"] != "default":
        raise ValueError(f"{config.path}: rope_type={rope['rope_type']!r} is not supported; expected 'default'.")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.fields.get("head_dim") or config["hidden_size"] // heads
    return Architecture(
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rotary_base=rope["rope_theta"],
        tied_embeddings=config.tied_embeddings,
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
            add_bias_linear=False,
            add_qkv_bias=False,
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
        ),
    )
