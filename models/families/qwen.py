"""Qwen2, Qwen2.5 and Qwen3: RMSNorm, grouped-query attention, gated SiLU MLP, RoPE.

In Qwen2 and Qwen2.5, the query, key and value projections have biases. Qwen3 has query/key norms. Qwen3 has dense and MoE models.
In Qwen3-MoE, the config says which layers are MoE layers, and whether the router's weights for the chosen experts sum to 1
(`norm_topk_prob`).
"""

from models.architecture import Architecture, Family
from models.families.decoder_blocks import (
    ATTENTION,
    DEFAULTS,
    DENSE_MLP,
    EMBEDDINGS,
    ENGINE_FUSED_PARAMS,
    FULL_ATTENTION_DEFAULTS,
    OUTPUT_PROJECTION_BIAS,
    QK_NORMS,
    QKV_BIAS,
    attention_parts,
    check_full_attention,
    moe_fused_params,
    moe_mlp,
    read_decoder,
)
from models.hf_config import HFConfig


def translate_qwen3(config: HFConfig) -> Architecture:
    """Translate a Qwen3 config. Raises ValueError if a value is not supported."""
    check_full_attention(config)
    return read_decoder(config, parts=attention_parts(config), qk_layernorm=True)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    translate=translate_qwen3,
    table=(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *OUTPUT_PROJECTION_BIAS, *QK_NORMS, *DENSE_MLP),
    engine_fused_params=ENGINE_FUSED_PARAMS,
    defaults=DEFAULTS | FULL_ATTENTION_DEFAULTS | dict(attention_bias=False, head_dim=128, num_key_value_heads=32),
    engine_classifier_has_bias=True,
)


def translate_moe(config: HFConfig) -> Architecture:
    """Translate a Qwen3-MoE config. Raises ValueError if a value is not supported."""
    check_full_attention(config)
    dense, step = config["mlp_only_layers"] or [], config["decoder_sparse_step"]
    return read_decoder(
        config,
        parts=attention_parts(config),
        qk_layernorm=True,
        num_moe_experts=config.any_spelling("num_experts", "num_local_experts"),
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_layer_freq=[int(n not in dense and (n + 1) % step == 0) for n in range(config["num_hidden_layers"])],
        moe_router_topk=config["num_experts_per_tok"],
        # True: the softmax is over all experts; False: it is over the chosen experts
        moe_router_pre_softmax=not config["norm_topk_prob"],
    )


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    translate=translate_moe,
    table=(
        *EMBEDDINGS,
        *(*ATTENTION, *QKV_BIAS, *OUTPUT_PROJECTION_BIAS, *QK_NORMS),
        *(*DENSE_MLP, *moe_mlp("mlp", "gate_proj", "up_proj", "down_proj")),
    ),
    engine_fused_params=ENGINE_FUSED_PARAMS | moe_fused_params("gate_proj", "up_proj", "down_proj"),
    defaults=DEFAULTS
    | FULL_ATTENTION_DEFAULTS
    | dict(
        attention_bias=False,
        head_dim=None,
        num_key_value_heads=4,
        mlp_only_layers=None,
        decoder_sparse_step=1,
        norm_topk_prob=False,
    ),
)


def translate_qwen2(config: HFConfig) -> Architecture:
    """Translate a Qwen2 config. Raises ValueError if a value is not supported."""
    check_full_attention(config)
    config.expect(use_mrope=False)  # only multimodal models use this field; configs of text models have the value False
    return read_decoder(config, parts=frozenset(["qkv_bias"]))


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    translate=translate_qwen2,
    table=(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *DENSE_MLP),
    engine_fused_params=ENGINE_FUSED_PARAMS,
    defaults=DEFAULTS | FULL_ATTENTION_DEFAULTS | dict(head_dim=None, num_key_value_heads=32, use_mrope=False),
    engine_classifier_has_bias=True,
)
