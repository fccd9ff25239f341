"""Qwen3 (dense): RMSNorm, grouped-query attention with query/key norms, gated SiLU MLP, RoPE."""

from models.conversion.mapping import GatedMLPMapping, Mapping, QKVMapping, VocabMapping
from models.spec import Architecture, Family, HFConfig


def read(config: HFConfig) -> Architecture:
    """Translate a Qwen3 config; raises ValueError at a flag whose meaning this family does not implement."""
    config.expect(hidden_act="silu", attention_bias=False, use_sliding_window=False, attention_dropout=0.0)
    rope = config.rope
    if rope["rope_type"] != "default":
        raise ValueError(f"{config.path}: rope_type={rope['rope_type']!r} is not supported; expected 'default'.")
    heads, groups, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
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
            qk_layernorm=True,
        ),
        sizes=dict(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            q=heads * head_dim,
            kv=groups * head_dim,
            head_dim=head_dim,
        ),
    )


_H, _D = ("hidden",), ("head_dim",)
_MLAYER, _LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_ATTN, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
_MATTN, _MMLP = f"{_MLAYER}.self_attention", f"{_MLAYER}.mlp"

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    read=read,
    table=(
        VocabMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (("vocab", "hidden"),), 0),
        Mapping(f"{_MATTN}.linear_qkv.layer_norm_weight", (f"{_LAYER}.input_layernorm.weight",), (_H,)),
        QKVMapping(
            f"{_MATTN}.linear_qkv.weight",
            (f"{_ATTN}.q_proj.weight", f"{_ATTN}.k_proj.weight", f"{_ATTN}.v_proj.weight"),
            (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
            axis=0,
        ),
        Mapping(f"{_MATTN}.q_layernorm.weight", (f"{_ATTN}.q_norm.weight",), (_D,)),
        Mapping(f"{_MATTN}.k_layernorm.weight", (f"{_ATTN}.k_norm.weight",), (_D,)),
        Mapping(f"{_MATTN}.linear_proj.weight", (f"{_ATTN}.o_proj.weight",), (("hidden", "q"),), axis=1),
        Mapping(f"{_MMLP}.linear_fc1.layer_norm_weight", (f"{_LAYER}.post_attention_layernorm.weight",), (_H,)),
        GatedMLPMapping(
            f"{_MMLP}.linear_fc1.weight",
            (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
            (("ffn", "hidden"), ("ffn", "hidden")),
            axis=0,
        ),
        Mapping(f"{_MMLP}.linear_fc2.weight", (f"{_MLP}.down_proj.weight",), (("hidden", "ffn"),), axis=1),
        Mapping("decoder.final_layernorm.weight", ("model.norm.weight",), (_H,)),
        VocabMapping("output_layer.weight", ("lm_head.weight",), (("vocab", "hidden"),), 0, untied_only=True),
    ),
    engine_fusions={
        "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
    },
)
