"""Tiny random Hugging Face models and a batch of groups with different lengths, for tests of parallel layouts."""

import numpy as np
from numpy.typing import NDArray
from tiny_families import SIZES, make_family

from mrl.core.types import TokenBlock

VOCAB = SIZES["vocab_size"]
# A gated delta net normalizes its outputs, and an output of a tiny model is sometimes close to zero. With the default epsilon of
# 1e-6, this norm multiplies the round-off of float32 until log-probabilities of equal computations differ by 5e-5. With this
# epsilon, the round-off is as large as in models with attention only. With experts, the epsilon must be larger.
LARGE_EPSILON = dict(rms_norm_eps=1e-2)
KINDS = {
    "dense": ("qwen3", {}),
    "tied": ("qwen3", dict(tie_word_embeddings=True)),
    "moe": ("qwen3_moe", {}),  # with one dense layer
    "mixtral": ("mixtral", {}),
    "biased": ("llama_biased", {}),
    "qkv_biased": ("qwen2", {}),
    "mistral": ("mistral", {}),
    "gemma": ("gemma3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "minimax": ("minimax_m2", {}),
    "olmo2": ("olmo2_biased", {}),
    "olmo3": ("olmo3", {}),
    "phi": ("phi3_long", {}),
    "recurrent": ("qwen3_5", LARGE_EPSILON),
    "recurrent_biased": ("qwen3_5_biased", LARGE_EPSILON),
    "recurrent_moe": ("qwen3_next", dict(rms_norm_eps=3e-2)),
    "mamba": ("nemotron_h", {}),
    "mamba_moe": ("nemotron_h_moe", {}),
    "seed": ("seed_oss", {}),
    "glm": ("glm4_moe", {}),
    "deepseek": ("deepseek_v3", {}),
    "sparse": ("deepseek_v32", dict(initializer_range=0.15)),
    "shared_sparse": ("glm_moe_dsa", {}),  # layers 1 and 3 use the keys of layers 0 and 2
    "glm_dense": ("glm4", {}),
    "ministral": ("ministral3", {}),
    "smollm": ("smollm3", {}),
    "recurrent_moe_3_5": ("qwen3_5_moe", dict(rms_norm_eps=3e-2)),
}


def make(kind: str, folder) -> None:
    """Write a model of KINDS with four layers."""
    name, overrides = KINDS[kind]
    make_family(name, folder, num_hidden_layers=4, **overrides)


def groups_of_responses(num_groups: int = 5, size: int = 4) -> tuple[TokenBlock, NDArray]:
    """Return (block of num_groups * size sequences with advantages and returns, groups [B]); the lengths are irregular."""
    rng = np.random.default_rng(0)
    prompts, responses = [], []
    for _ in range(num_groups):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 12)).tolist()
        prompts += [prompt] * size
        responses += [rng.integers(0, VOCAB, rng.integers(1, 14)).tolist() for _ in range(size)]
    logprobs = [rng.normal(-3.7, 1.0, len(response)).tolist() for response in responses]  # about log(1 / VOCAB)
    block = TokenBlock.from_lists(prompts, responses, logprobs)
    advantages = rng.normal(size=len(prompts)).astype(np.float32)
    column = advantages.repeat(block.sampled_lengths)
    return block.with_columns(advantages=column, returns=column), np.repeat(np.arange(num_groups), size)
