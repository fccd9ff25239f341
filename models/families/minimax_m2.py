"""MiniMax-M2: MoE in every layer with sigmoid routing, one norm for the queries of all heads and one for the keys, partial RoPE.

decoder_blocks.py explains sigmoid routing.
"""

from dataclasses import replace

from models.architecture import Architecture, Family
from models.conversion.mapping import ParamMapping
from models.families.decoder_blocks import (
    ATTENTION,
    DEFAULTS,
    EMBEDDINGS,
    ENGINE_FUSED_PARAMS,
    PROJECTION_NORMS,
    moe_fused_params,
    moe_mlp,
    read_decoder,
)
from models.hf_config import HFConfig

# names of the MoE block, and of the matrices gate, up and down of an expert
_BLOCK, _MATRICES = "block_sparse_moe", ("w1", "w3", "w2")
_FRACTION = "partial_rotary_factor"  # SGLang reads only rotary_dim, the number of rotated components

_WITHOUT_EFFECT = dict(  # fields that transformers and SGLang ignore -> the only value that mrl accepts
    sliding_window=None,
    attn_window_size=None,
    max_model_len=None,
    layernorm_full_attention_beta=1.0,
    layernorm_linear_attention_beta=1.0,
    layernorm_mlp_beta=1.0,
)


def translate(config: HFConfig) -> Architecture:
    """Translate a MiniMax-M2 config. Raises ValueError if a value is not supported."""
    config.expect(use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True, scoring_func="sigmoid")
    config.expect(router_jitter_noise=0.0, shared_intermediate_size=0)
    config.expect(attn_type_list=(None, [1] * config["num_hidden_layers"]))  # 1: full attention
    config.expect(**_WITHOUT_EFFECT)
    config.read_fields.update(("use_mtp", "num_mtp_modules", "mtp_transformer_layers"))  # MTP layers are not trained
    # These fields describe dense MLPs, shared experts and layers with a sliding window, which no MiniMax-M2 model has.
    config.read_fields.update(("mlp_intermediate_size", "shared_moe_mode", "swa_rope_theta"))
    topk, head_dim, rotated = config["num_experts_per_tok"], config["head_dim"], config["rotary_dim"]
    if topk < 2:
        raise ValueError(f"{config.path}: num_experts_per_tok={topk} is not supported; expected at least 2.")
    fraction = 1.0 if rotated is None else rotated / head_dim
    rope = replace(config, defaults={**config.defaults, _FRACTION: fraction}).rope(head_dim, partial=True)
    parts = {"projection_norms"} | ({_FRACTION} if rope.dim != (rotated or head_dim) else set())
    return read_decoder(
        config,
        parts=frozenset(parts),
        rope=rope,
        num_moe_experts=config.any_spelling("num_experts", "num_local_experts"),
        moe_ffn_hidden_size=config["intermediate_size"],
        moe_layer_freq=[1] * config["num_hidden_layers"],
        moe_router_topk=topk,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )


MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    translate=translate,
    table=(
        *(*EMBEDDINGS, *ATTENTION, *PROJECTION_NORMS),
        *moe_mlp(_BLOCK, *_MATRICES),
        ParamMapping(
            "decoder.layers.{layer}.mlp.router.expert_bias",
            (f"model.layers.{{layer}}.{_BLOCK}.e_score_correction_bias",),
            (("experts",),),
            present_in="moe_layers",
            is_buffer=True,
        ),
    ),
    engine_fused_params=ENGINE_FUSED_PARAMS | moe_fused_params(*_MATRICES),
    defaults=DEFAULTS
    | _WITHOUT_EFFECT
    | dict(
        head_dim=128,
        num_key_value_heads=8,
        rope_theta=5e6,
        rotary_dim=None,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        use_routing_bias=True,
        scoring_func="sigmoid",
        router_jitter_noise=0.0,
        shared_intermediate_size=0,
        attn_type_list=None,
    ),
    engine_float32=(f"{_BLOCK}.gate.weight",),  # the router
    engine_required_fields=("use_qk_norm", "use_routing_bias", "scoring_func"),
    engine_unsupported_parts=frozenset([_FRACTION]),
    engine_needs_gpu=True,  # because of the norms of queries and keys
    has_mtp_layers=True,
)
