"""Text models of Qwen3.5 with experts: Qwen3.5 with routed experts and a shared expert that has a gate, in every layer.

`mrl family derive` wrote this file.
"""

from models.architecture import Architecture, Family
from models.families.decoder_blocks import (
    EMBEDDINGS,
    moe_mlp,
)
from models.families.qwen3_next import (
    GATED_ATTENTION,
    GATED_DELTA_NET,
    RECURRENT_ENGINE,
    SHARED_EXPERT,
    read_recurrent_decoder,
)
from models.hf_config import HFConfig


def translate(config: HFConfig) -> Architecture:
    """Translate a config of Qwen3_5MoeForCausalLM. Raises ValueError if a value is not supported."""
    num_layers = config["num_hidden_layers"]
    return read_recurrent_decoder(
        config,
        parts=frozenset(["shared_experts"]),
        num_moe_experts=config.any_spelling("num_experts", "num_local_experts"),
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_layer_freq=[1] * num_layers,
        moe_router_topk=config["num_experts_per_tok"],
        moe_router_pre_softmax=False,
        moe_shared_expert_intermediate_size=config["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True,
    )


QWEN3_5_MOE = Family(
    architecture="Qwen3_5MoeForCausalLM",
    translate=translate,
    table=(
        *EMBEDDINGS,
        *GATED_ATTENTION,
        *GATED_DELTA_NET,
        *moe_mlp("mlp", "gate_proj", "up_proj", "down_proj"),
        *SHARED_EXPERT,
    ),
    engine_fusions={
        "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        "qkv_proj.bias": ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
        "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
        "in_proj_qkvz.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
        "in_proj_ba.weight": ("in_proj_b.weight", "in_proj_a.weight"),
        "experts.w13_weight": ("experts.{expert}.gate_proj.weight", "experts.{expert}.up_proj.weight"),
        "experts.w2_weight": ("experts.{expert}.down_proj.weight",),
    },
    defaults=dict(
        hidden_act="silu",
        attention_dropout=0.0,
        initializer_range=0.02,
        rms_norm_eps=1e-06,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        tie_encoder_decoder=False,
        is_encoder_decoder=False,
        use_sliding_window=False,
        layer_types=None,
        head_dim=256,
        attention_bias=False,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        attn_output_gate=True,
        output_gate_type=None,
        num_key_value_heads=2,
        shared_expert_intermediate_size=512,
    ),
    **RECURRENT_ENGINE,
    has_mtp_layers=True,
)
