"""Experts as DeepSeek-V3 has them (arXiv:2412.19437, section 2.1.2), which other families took over.

A token's affinity to an expert is a sigmoid. A correction bias is added where experts are chosen, first the groups of experts
whose best two sum up highest, then the best experts of those groups; the weights of the chosen ones are their affinities
without the bias, normalised and scaled. Experts that every token goes to, the shared ones, are one MLP.
"""

from typing import Any

from models.conversion.mapping import GatedMLPMapping, Mapping
from models.families.decoder import moe_fusions, moe_mlp
from models.hf_config import HFConfig

_MLP, _SHARED = "model.layers.{layer}.mlp", "model.layers.{layer}.mlp.shared_experts"
_MMLP = "decoder.layers.{layer}.mlp"
_MATRICES = ("gate_proj", "up_proj", "down_proj")

SIGMOID_EXPERTS = (
    *moe_mlp("mlp", *_MATRICES),
    Mapping(
        f"{_MMLP}.router.expert_bias",
        (f"{_MLP}.gate.e_score_correction_bias",),
        (("experts",),),
        where="moe",
        is_buffer=True,
    ),
    GatedMLPMapping(
        f"{_MMLP}.shared_experts.linear_fc1.weight",
        (f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"),
        (("shared_ffn", "hidden"), ("shared_ffn", "hidden")),
        axis=0,
        where="moe",
        part="shared_experts",
    ),
    Mapping(
        f"{_MMLP}.shared_experts.linear_fc2.weight",
        (f"{_SHARED}.down_proj.weight",),
        (("hidden", "shared_ffn"),),
        axis=1,
        where="moe",
        part="shared_experts",
    ),
)
SIGMOID_EXPERTS_FUSIONS = moe_fusions(*_MATRICES)
SIGMOID_EXPERTS_DEFAULTS: dict[str, Any] = dict(n_shared_experts=1, norm_topk_prob=True)


def sigmoid_experts_parts(config: HFConfig) -> frozenset[str]:
    """The part "shared_experts", unless there are none."""
    return frozenset(["shared_experts"] if config["n_shared_experts"] else [])


def read_sigmoid_experts(config: HFConfig) -> dict[str, Any]:
    """Megatron's fields of such experts; raises ValueError at a flag whose meaning is not implemented."""
    config.expect(norm_topk_prob=True)
    config.asked.update(("num_nextn_predict_layers", "num_mtp_layers"))  # layers that are neither loaded nor exported
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    width = config["moe_intermediate_size"]
    return dict(
        num_moe_experts=config["n_routed_experts"],
        moe_ffn_hidden_size=width,
        moe_layer_freq=[int(layer >= dense) for layer in range(layers)],
        moe_router_topk=config["num_experts_per_tok"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=config["routed_scaling_factor"],
        moe_shared_expert_intermediate_size=width * (config["n_shared_experts"] or 0) or None,
        **_read_groups(config),
    )


def _read_groups(config: HFConfig) -> dict[str, int]:
    groups, chosen, topk = config["n_group"], config["topk_group"], config["num_experts_per_tok"]
    if topk < 2:
        raise ValueError(f"{config.path}: num_experts_per_tok={topk} is not supported; expected at least 2.")
    if groups == 1:
        return {}
    if topk // chosen != 2:  # Megatron 0.19 sums up the best topk // chosen of each group
        raise ValueError(
            f"{config.path}: num_experts_per_tok={topk} with n_group={groups} and topk_group={chosen} is not supported: "
            f"groups are ranked by their best two experts; expected {2 * chosen} or {2 * chosen + 1} experts per token."
        )
    return dict(moe_router_num_groups=groups, moe_router_group_topk=chosen)
