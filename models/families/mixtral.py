"""Mixtral: MoE in every layer, with a softmax over the chosen experts; no query/key norms."""

from models.architecture import Architecture, Family
from models.families.decoder_blocks import (
    ATTENTION,
    DEFAULTS,
    EMBEDDINGS,
    ENGINE_FUSED_PARAMS,
    moe_fused_params,
    moe_mlp,
    read_decoder,
)
from models.hf_config import HFConfig


def translate(config: HFConfig) -> Architecture:
    """Translate a Mixtral config. Raises ValueError if a value is not supported."""
    config.expect(sliding_window=None, router_jitter_noise=0.0)
    return read_decoder(
        config,
        num_moe_experts=config.any_spelling("num_experts", "num_local_experts"),
        moe_ffn_hidden_size=config["intermediate_size"],
        moe_layer_freq=[1] * config["num_hidden_layers"],
        moe_router_topk=config["num_experts_per_tok"],
        moe_router_pre_softmax=False,
    )


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    translate=translate,
    table=(*EMBEDDINGS, *ATTENTION, *moe_mlp("block_sparse_moe", "w1", "w3", "w2")),
    engine_fused_params=ENGINE_FUSED_PARAMS | moe_fused_params("w1", "w3", "w2"),
    defaults=DEFAULTS
    | dict(
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        head_dim=None,
        num_key_value_heads=8,
        sliding_window=None,
        router_jitter_noise=0.0,
    ),
)
