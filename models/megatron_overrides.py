"""Checks the config section `megatron`, which sets fields of Megatron's TransformerConfig."""

import difflib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any

from parallel.dims import ParallelDims
from parallel.trainer_config import annotations_of, settings_key_of

FIELDS_SET_BY_MRL = frozenset(
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
        "moe_router_score_function",
        "moe_router_enable_expert_bias",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_shared_expert_intermediate_size",
        "mtp_num_layers",
        "multi_latent_attention",
        "window_size",
        "softmax_scale",
        "softmax_type",
        "activation_func_clamp_value",
        "glu_linear_offset",
        "layernorm_zero_centered_gamma",
        "window_attn_skip_freq",
        "attention_output_gate",
        "experimental_attention_variant",
        "linear_attention_freq",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "mamba_state_dim",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "moe_shared_expert_gate",
        "dsa_indexer_n_heads",
        "dsa_indexer_head_dim",
        "dsa_indexer_topk",
        "dsa_indexer_rope_interleaved",
        "no_rope_freq",
        # mrl has its own sparse attention, which ignores the other fields of Megatron's sparse attention
        "dsa_indexer_topk_freq",
        "dsa_indexer_skip_topk_offset",
        "dsa_indexer_loss_coeff",
        "dsa_indexer_use_sparse_loss",
        "dsa_indexer_rotate_activation",
        "dsa_indexer_scoring_relu",
        "dsa_indexer_k_norm_epsilon",
        "dsa_indexer_k_norm_fp32",
        "dsa_kernel_backend",
    ]
)
"""Fields that mrl derives from the model, the layout or the machine. A user cannot set them."""

UNEVEN_STAGE_FIELDS = frozenset(
    [
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ]
)
"""Fields that give pipeline stages different numbers of layers."""

LAYOUT_FIELDS = UNEVEN_STAGE_FIELDS | {"moe_token_dispatcher_type", "microbatch_group_size_per_vp_stage"}
"""Fields that depend on the parallel layout, and that have no meaning for a single process."""


FP8_RECIPES = ("tensorwise", "blockwise", "mxfp8")
"""Supported values of fp8_recipe. With them, a rank computes scales alone, or with the ranks of its tensor-parallel group."""

FP8_MULTIPLE = 32
"""With FP8, the tokens of a pack are padded to a multiple of this. mxfp8 needs 32, other recipes 16 (get_fp8_align_size)."""


@cache
def transformer_config_fields() -> frozenset[str]:
    """Return every field of Megatron's TransformerConfig, including inherited ones."""
    own = annotations_of("transformer/transformer_config.py", "TransformerConfig")
    return frozenset(own) | annotations_of("model_parallel_config.py", "ModelParallelConfig").keys()


def check_load_balancing(kinds: str | list[str], dims: ParallelDims) -> None:
    """Raise ValueError if a loss in `kinds`, the value of moe_router_load_balancing_type, does not work with packs."""
    key = f"megatron.moe_router_load_balancing_type={kinds}"
    if "seq_aux_loss" in kinds:
        raise ValueError(
            f"{key}: the router treats a pack as one sequence, so seq_aux_loss equals aux_loss; use aux_loss."
        )
    if "global_aux_loss" in kinds and dims.dp > 1:
        raise ValueError(
            f"{key}: this loss needs the same number of packs on all replicas, and depends on the order of the packs; with "
            f"dp={dims.dp} use aux_loss."
        )


def check_fp8_recipe(overrides: Mapping[str, Any]) -> None:
    """Raise ValueError if FP8 would use a recipe that is not in FP8_RECIPES.

    With the recipe `delayed`, which is Megatron's default, Transformer Engine reduces the largest absolute values (amax) over
    ranks in each forward and backward pass. If a rank has fewer micro-batches than another rank, the other rank waits forever.
    """
    recipe = overrides.get("fp8_recipe")
    if not overrides.get("fp8") or recipe in FP8_RECIPES:
        return
    found = (
        f"megatron.fp8_recipe={recipe}" if recipe else "megatron.fp8_recipe is unset, and Megatron's default is delayed"
    )
    why = (
        "this recipe reduces statistics over ranks in each forward and backward pass, so a run hangs when replicas have "
        "different numbers of micro-batches"
        if recipe in (None, "delayed")
        else "mrl does not support this recipe"
    )
    raise ValueError(f"{found}: {why}; set megatron.fp8_recipe to {', '.join(FP8_RECIPES[:-1])} or {FP8_RECIPES[-1]}.")


def check_megatron_overrides(overrides: Mapping[str, Any], derived: AbstractSet[str] = frozenset()) -> None:
    """Raise ValueError if a user cannot set one of the fields in `overrides`.

    There are seven reasons: TransformerConfig does not have the field, mrl derives the field (`derived`), the field needs packs
    of a fixed size, the field needs padded packs (`fp4`), the field changes the dtype of the stored weights, the field needs a
    library that cannot be used, or FP8 has a recipe that is not in FP8_RECIPES.
    """
    check_fp8_recipe(overrides)
    known = transformer_config_fields()
    for name in overrides:
        if name in derived:
            raise ValueError(
                f"megatron.{name} is derived from the model, from model.dtype or from the section parallel; set it there."
            )
        if name.startswith("tp_comm_overlap") and overrides[name]:
            raise ValueError(
                f"megatron.{name}={overrides[name]}: its buffers have a fixed size, but packs do not; leave the key out."
            )
        if name == "fp4" and overrides[name]:
            raise ValueError(
                f"megatron.fp4={overrides[name]} is not supported, because mrl pads packs only for FP8; use megatron.fp8."
            )
        if name in ("fp8_param", "fp4_param") and overrides[name]:
            raise ValueError(
                f"megatron.{name}={overrides[name]}: checkpoints, offloading and the push of weights to engines need weights in "
                "model.dtype; leave the key out. megatron.fp8 alone computes in FP8 with weights in model.dtype."
            )
        if name not in known:
            matches = difflib.get_close_matches(name, known, n=1)
            other = settings_key_of(name)
            hint = f"; use {other}" if other else f"; did you mean megatron.{matches[0]}?" if matches else ""
            raise ValueError(f"megatron.{name} is not a field of Megatron's TransformerConfig{hint}")
    check_transformer_engine(overrides)


def check_transformer_engine(overrides: Mapping[str, Any]) -> None:
    """Raise ValueError if one of these fields needs Transformer Engine, and this process cannot use it.

    A driver without a GPU cannot import Transformer Engine, and only knows whether it is installed. So each trainer rank calls
    this function, too, before it joins the process group.
    """
    for name in overrides:
        needs_library = name.startswith("fp8") or name == "moe_grouped_gemm"
        if needs_library and overrides[name] and not _can_use_transformer_engine():
            raise ValueError(
                f"megatron.{name}={overrides[name]}: needs Transformer Engine, which is not installed or cannot be imported; "
                "leave the key out, or run `make setup LOCK=requirements-gpu.txt`."
            )


def _can_use_transformer_engine() -> bool:
    from parallel.device import can_use_transformer_engine  # imports torch, which most plans do not need

    return can_use_transformer_engine()
