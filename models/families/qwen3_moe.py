"""Qwen3-MoE: Qwen3 with experts in most layers, the chosen ones' weights normalised to sum to 1 (or not, by a flag)."""

from models.families.decoder import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDINGS,
    ENGINE_FUSIONS,
    QK_NORMS,
    moe_fusions,
    moe_mlp,
    read_decoder,
)
from models.spec import Architecture, Family, HFConfig


def read(config: HFConfig) -> Architecture:
    """Translate a Qwen3-MoE config; raises ValueError at a flag whose meaning this family does not implement."""
    config.expect(attention_bias=False, use_sliding_window=False)
    dense, step = config.fields.get("mlp_only_layers") or [], config["decoder_sparse_step"]
    return read_decoder(
        config,
        qk_layernorm=True,
        num_moe_experts=config.either("num_experts", "num_local_experts"),
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_layer_freq=[int(n not in dense and (n + 1) % step == 0) for n in range(config["num_hidden_layers"])],
        moe_router_topk=config["num_experts_per_tok"],
        moe_router_pre_softmax=not config["norm_topk_prob"],  # softmax over all experts, or over the chosen ones
    )


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    read=read,
    table=(*EMBEDDINGS, *ATTENTION, *QK_NORMS, *DENSE_MLP, *moe_mlp("mlp", "gate_proj", "up_proj", "down_proj")),
    engine_fusions=ENGINE_FUSIONS | moe_fusions("gate_proj", "up_proj", "down_proj"),
)
