"""Names of Megatron's config fields, read from its source: importing Megatron would cost the driver seconds."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

DECIDED = frozenset(
    [
        "params_dtype",
        "pipeline_dtype",
        "bf16",
        "fp16",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "virtual_pipeline_model_parallel_size",
        "activation_func",
        "calculate_per_token_loss",
        "variable_seq_lengths",
        "perform_initialization",
        "use_cpu_initialization",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "deallocate_pipeline_outputs",
        "apply_rope_fusion",
        "finalize_model_grads_func",
        "grad_scale_func",
        "moe_grad_scale_func",
        "moe_enable_routing_replay",
        "num_moe_experts",
        "moe_layer_freq",
        "moe_ffn_hidden_size",
        "moe_router_topk",
        "moe_router_pre_softmax",
        "moe_shared_expert_intermediate_size",
        "mtp_num_layers",
        "multi_latent_attention",
    ]
)
"""Fields that follow from the model, the layout or the machine; a user cannot set them apart from those."""

UNEVEN = frozenset(
    [
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ]
)
"""Fields by which a user gives pipeline stages different numbers of layers."""

OF_LAYOUT = UNEVEN | {"moe_token_dispatcher_type", "microbatch_group_size_per_vp_stage"}
"""Fields that mean something under the layout they were written for, and nothing in one process."""

_FILES = ("transformer/transformer_config.py", "model_parallel_config.py")
_CLASSES = ("TransformerConfig", "ModelParallelConfig")


@cache
def transformer_fields() -> frozenset[str]:
    """Every field of TransformerConfig, inherited ones included."""
    spec = find_spec("megatron")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    names: set[str] = set()
    for path in (Path(root) / "core" / file for root in roots for file in _FILES):
        for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
            if isinstance(node, ast.ClassDef) and node.name in _CLASSES:
                names |= {
                    s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
                }
    assert "num_layers" in names, "Megatron's source has another layout than models/megatron_fields.py expects"
    return frozenset(names)
