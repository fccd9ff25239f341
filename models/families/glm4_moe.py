"""GLM-4.5: grouped-query attention, RoPE on a part of each head; dense layers, then MoE layers with sigmoid routing.

The MoE layers also have shared experts. decoder_blocks.py explains sigmoid routing.
"""

from dataclasses import replace

from models.architecture import Architecture, Family
from models.conversion.mtp_mapping import NUMBERED_LAYERS
from models.families.decoder_blocks import (
    ATTENTION,
    DEFAULTS,
    DENSE_MLP,
    EMBEDDINGS,
    ENGINE_FUSED_PARAMS,
    QK_NORMS,
    QKV_BIAS,
    SIGMOID_ROUTED_MOE,
    SIGMOID_ROUTED_MOE_DEFAULTS,
    SIGMOID_ROUTED_MOE_FUSED_PARAMS,
    read_decoder,
    read_sigmoid_routed_moe,
    sigmoid_routed_moe_parts,
)
from models.hf_config import HFConfig


def translate(config: HFConfig) -> Architecture:
    """Translate a GLM-4.5 config. Raises ValueError if a value is not supported."""
    optional_parts = dict(qkv_bias=config["attention_bias"], qk_norms=config["use_qk_norm"])
    return read_decoder(
        config,
        parts=sigmoid_routed_moe_parts(config) | {part for part, is_present in optional_parts.items() if is_present},
        rope=config.rope(config["head_dim"] or config["hidden_size"] // config["num_attention_heads"], partial=True),
        qk_layernorm=config["use_qk_norm"],
        **read_sigmoid_routed_moe(config),
    )


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    translate=translate,
    table=(
        *EMBEDDINGS,
        *(*ATTENTION, *QKV_BIAS, *(replace(row, part="qk_norms") for row in QK_NORMS)),
        *(*DENSE_MLP, *SIGMOID_ROUTED_MOE),
    ),
    engine_fused_params=ENGINE_FUSED_PARAMS | SIGMOID_ROUTED_MOE_FUSED_PARAMS,
    defaults=DEFAULTS
    | SIGMOID_ROUTED_MOE_DEFAULTS
    | dict(
        rms_norm_eps=1e-5,
        head_dim=None,
        partial_rotary_factor=0.5,
        attention_bias=False,
        use_qk_norm=False,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    engine_float32=("mlp.gate.weight",),  # the router
    has_mtp_layers=True,
    mtp=NUMBERED_LAYERS,
)
