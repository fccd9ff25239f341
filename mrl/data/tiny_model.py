"""Tiny Qwen3 models in Hugging Face form, random weights: something real to run where no download is wanted."""

from pathlib import Path
from typing import Any

SIZES = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=192,  # two of them are the dense model's MLP
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
KINDS: dict[str, dict[str, Any]] = {"qwen3": SIZES, "qwen3_moe": SIZES | EXPERTS}
"""Model types of Transformers that can be made, with their sizes: 0.8 M parameters dense, 2.6 M with experts."""


def make_tiny_model(
    folder: str | Path,
    tokenizer: Any,
    *,
    context: int,
    initializer_range: float,
    seed: int,
    kind: str = "qwen3",
) -> None:
    """Write config, random float32 weights and `tokenizer` to `folder`; the same bytes for the same seed.

    Raises ValueError when `kind` is none of `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"no tiny model of kind {kind!r}; choose from {', '.join(KINDS)}.")
    import torch  # seconds, and only needed when files are made
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    config = AutoConfig.for_model(
        kind,
        **KINDS[kind],
        vocab_size=len(tokenizer),
        head_dim=32,
        max_position_embeddings=context,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=None,  # a padding row would be zero, where RMSNorm has a gradient of 1 / sqrt(eps)
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    tokenizer.model_max_length = context
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
