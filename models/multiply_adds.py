"""Counts the multiply-adds of the blocks of a layer. `t`: fields of Megatron's TransformerConfig that a model family sets."""

from typing import Any


def attention_multiply_adds(t: dict[str, Any]) -> tuple[float, float]:
    """Return (multiply-adds of the projections per token, multiply-adds of the attention per query-key pair) of one layer."""
    d, heads = t["kv_channels"], t["num_attention_heads"]
    gates = heads * t.get("attention_output_gate", False)
    return t["hidden_size"] * (2 * (heads + t["num_query_groups"]) + gates) * d, 2 * heads * d


def recurrent_multiply_adds(t: dict[str, Any]) -> float:
    """Return the multiply-adds of a recurrent layer per token: matrices, convolution and recurrence.

    The state of each head of Mamba-2 or each value head of a gated delta net is a matrix [components of a key, components of a
    value]. For each token, Mamba-2 uses all elements of this matrix twice: it updates the state, and reads the output. A gated
    delta net uses them a third time, to compute the value that the state predicts.
    """
    width, values = t["hidden_size"], recurrent_value_width(t)
    if "mamba_num_heads" in t:
        keys = t["mamba_num_groups"] * t["mamba_state_dim"]
        matrices = width * (3 * values + 2 * keys + t["mamba_num_heads"])
        return matrices + (values + 2 * keys) * t["linear_conv_kernel_dim"] + 2 * values * t["mamba_state_dim"]
    keys = t["linear_num_key_heads"] * t["linear_key_head_dim"]
    matrices = width * (2 * keys + 3 * values + 2 * t["linear_num_value_heads"])
    convolution = (2 * keys + values) * t["linear_conv_kernel_dim"]
    return matrices + convolution + 3 * values * t["linear_key_head_dim"]


def recurrent_value_width(t: dict[str, Any]) -> int:
    """Return the number of components that the values of all heads of a recurrent layer have together, per token."""
    if "mamba_num_heads" in t:
        return t["mamba_num_heads"] * t["mamba_head_dim"]
    return t["linear_num_value_heads"] * t["linear_value_head_dim"]


def latent_attention_multiply_adds(t: dict[str, Any]) -> tuple[float, float]:
    """Return for latent attention the two numbers that `attention_multiply_adds` returns for grouped-query attention."""
    # `shared`: size of the part of the key that all heads share; `key`, `value`: sizes of the key and the value of one head
    width, heads, shared, value = t["hidden_size"], t["num_attention_heads"], t["qk_pos_emb_head_dim"], t["v_head_dim"]
    key = t["qk_head_dim"] + shared
    queries = (t["q_lora_rank"] or width) * heads * key + width * (t["q_lora_rank"] or 0)
    keys = width * (t["kv_lora_rank"] + shared) + t["kv_lora_rank"] * heads * (t["qk_head_dim"] + value)
    return queries + keys + heads * value * width, heads * (key + value)


def indexer_multiply_adds(t: dict[str, Any]) -> tuple[float, float]:
    """Return the two numbers of `attention_multiply_adds` for the indexer of a layer with sparse attention."""
    heads, channels = t["dsa_indexer_n_heads"], t["dsa_indexer_head_dim"]
    return t["q_lora_rank"] * heads * channels + t["hidden_size"] * (channels + heads), heads * (channels + 1)


def mlp_multiply_adds(t: dict[str, Any]) -> tuple[float, float]:
    """Return (multiply-adds per token of an MLP, multiply-adds per token of the experts that replace an MLP).

    Each token passes through the experts that its router chooses, and through the shared experts. An MLP without a gate has two
    matrices instead of three.
    """
    per_channel = (3 if t["gated_linear_unit"] else 2) * t["hidden_size"]
    routed = t.get("moe_router_topk", 0) * t.get("moe_ffn_hidden_size", 0)
    shared = t.get("moe_shared_expert_intermediate_size") or 0
    return per_channel * t["ffn_hidden_size"], per_channel * (routed + shared)
