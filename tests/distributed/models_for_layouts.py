"""Tiny random models in Hugging Face form, and a ragged batch of groups, for tests of layouts."""

import numpy as np
from numpy.typing import NDArray

from mrl.types import TokenBlock

VOCAB = 41  # a prime: every tensor-parallel size pads it
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    initializer_range=0.2,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
)


def make(kind: str, folder) -> None:
    """Write a model: dense, tied, moe (one dense layer among them) or mixtral."""
    import torch
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(1)
    if kind in ("dense", "tied"):
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=kind == "tied"))
    elif kind == "moe":
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, decoder_sparse_step=1, mlp_only_layers=[1]))
    else:
        model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)


def groups_of_responses(num_groups: int = 5, size: int = 4) -> tuple[TokenBlock, NDArray, NDArray]:
    """(block of num_groups * size sequences, [B] groups, [B] advantages); lengths divide by nothing."""
    rng = np.random.default_rng(0)
    prompts, responses = [], []
    for _ in range(num_groups):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 12)).tolist()
        prompts += [prompt] * size
        responses += [rng.integers(0, VOCAB, rng.integers(1, 14)).tolist() for _ in range(size)]
    logprobs = [rng.normal(-3.7, 1.0, len(response)).tolist() for response in responses]  # about log(1 / VOCAB)
    block = TokenBlock.from_lists(prompts, responses, logprobs)
    advantages = rng.normal(size=len(prompts)).astype(np.float32)
    return block, np.repeat(np.arange(num_groups), size), advantages
