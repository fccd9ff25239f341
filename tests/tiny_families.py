"""Tiny random models of every family in Hugging Face format. Norm weights and biases are random, too."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

SIZES = dict(
    vocab_size=41,  # a prime number: every tensor-parallel size needs padding
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,  # makes logits of the order of 1
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=5000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,  # one RoPE wavelength is between 16 / 4 and 16 / 1, the others are longer
)
YARN_ROPE = dict(rope_type="yarn", rope_theta=5000.0, factor=4.0, original_max_position_embeddings=16)

# in Olmo3; the rotary embeddings of layers with and without a window differ in base and scaling
WINDOWED = dict(
    num_hidden_layers=4,
    sliding_window=9,
    rope_parameters=dict(full_attention=YARN_ROPE, sliding_attention=dict(rope_type="default", rope_theta=300.0)),
)
GEMMA = dict(
    head_dim=16,
    query_pre_attn_scalar=24,
    sliding_window=9,
    sliding_window_pattern=2,
    rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=2.0),
        sliding_attention=dict(rope_type="default", rope_theta=300.0),
    ),
)
MINIMAX = dict(
    head_dim=16,
    rotary_dim=8,
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=24,
    use_qk_norm=True,
    use_routing_bias=True,
    scoring_func="sigmoid",
)
# the limit is so small that it clamps some gates and up projections; layer 0 has a window, and layer 1 has none
GPT_OSS = dict(
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=24,
    sliding_window=9,
    swiglu_limit=1.5,
    rope_parameters=YARN_ROPE | dict(truncate=False),
)
# short and long factors of the three pairs that phi3_long rotates; the tests have at most 48 tokens in a sequence
LONG_ROPE = dict(
    rope_parameters=dict(
        rope_type="longrope", rope_theta=5000.0, short_factor=[1.0, 1.3, 2.1], long_factor=[1.5, 4.0, 9.0]
    ),
    original_max_position_embeddings=48,
)
# two value heads for each key head; keys and values have different numbers of channels; every second layer has attention
RECURRENT = dict(
    head_dim=16,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=4,
    full_attention_interval=2,
    rope_parameters=dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=0.5),
)
# two groups for each of two ranks, and two heads in each group; keys and values have different numbers of channels. The steps of
# all heads are far from zero: transformers raises smaller steps than time_step_min, but mrl and SGLang do not.
MAMBA = dict(
    num_hidden_layers=4,
    layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
    head_dim=16,
    mamba_num_heads=8,
    mamba_head_dim=6,
    ssm_state_size=10,
    n_groups=4,
    conv_kernel=4,
    time_step_min=1e-30,
    time_step_max=1.0,
    time_step_floor=0.3,
    rescale_prenorm_residual=False,
)
NO_TOKENS = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)  # the defaults are not in the vocabulary

SIGMOID_ROUTED_MOE = dict(
    n_routed_experts=12,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    moe_intermediate_size=12,
    routed_scaling_factor=1.7,
    norm_topk_prob=True,
    first_k_dense_replace=1,
)
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14
)
LATENT |= dict(moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid")  # SGLang needs these
DEEPSEEK_ROPE = dict(
    YARN_ROPE, factor=40.0, beta_fast=2, beta_slow=1, mscale=1.0, mscale_all_dim=0.707, rope_theta=500.0
)
# so many heads that the index scores of two keys are never both zero, where transformers would choose one in no fixed order
INDEXER = dict(index_topk=7, index_n_heads=32, index_head_dim=128)  # SGLang needs 128

MINISTRAL_ROPE = YARN_ROPE | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1, max_position_embeddings=64)

# name -> (prefix of the class names in transformers, config fields in addition to SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(head_dim=16)),
    "llama_tied_multi_head": ("Llama", dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama_biased": ("Llama", dict(attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE)),
    "llama_attention_biased": ("Llama", dict(attention_bias=True, rope_parameters=YARN_ROPE)),
    "llama_mlp_biased": ("Llama", dict(mlp_bias=True)),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied_multi_head": ("Qwen2", dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3_biased": (
        "Qwen3",
        dict(head_dim=16, attention_bias=True, tie_word_embeddings=True, rope_parameters=YARN_ROPE),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[1],
        ),
    ),
    "qwen3_moe_biased": (
        "Qwen3Moe",
        dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, attention_bias=True),
    ),
    "glm4_moe": ("Glm4Moe", SIGMOID_ROUTED_MOE | dict(head_dim=16, attention_bias=True, use_qk_norm=True)),
    "glm4_moe_plain": (
        "Glm4Moe",
        SIGMOID_ROUTED_MOE | dict(n_routed_experts=6, n_group=1, topk_group=1, num_experts_per_tok=3),
    ),
    "deepseek_v3": ("DeepseekV3", SIGMOID_ROUTED_MOE | LATENT | dict(rope_parameters=DEEPSEEK_ROPE)),
    "deepseek_v3_plain": ("DeepseekV3", SIGMOID_ROUTED_MOE | LATENT | dict(q_lora_rank=None, n_shared_experts=1)),
    "deepseek_v32": ("DeepseekV32", SIGMOID_ROUTED_MOE | LATENT | INDEXER | dict(rope_parameters=DEEPSEEK_ROPE)),
    # every second layer uses the keys that the layer before it has chosen
    "glm_moe_dsa": (
        "GlmMoeDsa",
        SIGMOID_ROUTED_MOE
        | LATENT
        | INDEXER
        | dict(n_group=1, topk_group=1, rms_norm_eps=1e-6, index_topk_freq=2, index_skip_topk_offset=1)
        | dict(indexer_rope_interleave=True),
    ),
    "gemma3": ("Gemma3", NO_TOKENS | GEMMA),
    "gemma3_biased": (
        "Gemma3",
        NO_TOKENS | GEMMA | dict(attention_bias=True, tie_word_embeddings=False, num_key_value_heads=4),
    ),
    "gpt_oss": ("GptOss", NO_TOKENS | GPT_OSS),
    "gpt_oss_plain": (
        "GptOss",
        NO_TOKENS | GPT_OSS | dict(attention_bias=False, num_key_value_heads=4, tie_word_embeddings=True),
    ),
    "minimax_m2": ("MiniMaxM2", NO_TOKENS | MINIMAX),
    "nemotron_h": ("NemotronH", NO_TOKENS | MAMBA),
    "nemotron_h_moe": (
        "NemotronH",
        NO_TOKENS
        | MAMBA
        | dict(
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"], use_conv_bias=False, conv_kernel=3
        )
        | dict(n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, routed_scaling_factor=1.7)
        | dict(moe_shared_expert_intermediate_size=20, mamba_num_heads=4, num_key_value_heads=4),
    ),
    "olmo2": ("Olmo2", NO_TOKENS),
    "olmo2_biased": ("Olmo2", NO_TOKENS | dict(attention_bias=True, num_key_value_heads=4, tie_word_embeddings=True)),
    "olmo3": ("Olmo3", NO_TOKENS | WINDOWED),  # layers 0 to 2 have a window
    "phi3": ("Phi3", NO_TOKENS),
    "phi3_long": ("Phi3", NO_TOKENS | dict(partial_rotary_factor=0.75, tie_word_embeddings=True) | LONG_ROPE),
    "qwen3_5": ("Qwen3_5", RECURRENT),
    "qwen3_5_biased": (
        "Qwen3_5",
        RECURRENT
        | dict(attention_bias=True, linear_num_value_heads=4, linear_conv_kernel_dim=3, tie_word_embeddings=True)
        | dict(num_key_value_heads=4),
    ),
    "qwen3_next": (
        "Qwen3Next",
        RECURRENT
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20),
    ),
    "seed_oss": ("SeedOss", NO_TOKENS | dict(head_dim=16, attention_out_bias=True, attention_dropout=0.1)),
    "seed_oss_plain": ("SeedOss", NO_TOKENS | dict(head_dim=16, attention_bias=False, mlp_bias=True)),
    "mistral": ("Mistral", dict(head_dim=16, sliding_window=None)),
    "mixtral": ("Mixtral", dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
    "glm4": ("Glm4", NO_TOKENS | dict(head_dim=16)),
    "glm4_plain": ("Glm4", NO_TOKENS | dict(head_dim=16, attention_bias=False, tie_word_embeddings=True)),
    "ministral3": ("Ministral3", NO_TOKENS | dict(head_dim=16, rope_parameters=MINISTRAL_ROPE)),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        RECURRENT
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20),
    ),
    "smollm3": ("SmolLM3", NO_TOKENS | dict(no_rope_layer_interval=2, mlp_bias=True)),
    "smollm3_biased": (  # without RoPE, the gradient of the biases of keys would be zero
        "SmolLM3",
        NO_TOKENS
        | dict(no_rope_layer_interval=9, attention_bias=True, tie_word_embeddings=False, num_key_value_heads=4),
    ),
}


def config_class(prefix: str) -> Any:
    """Return the config class of a language model. Without "Text", those of Gemma 3 and Qwen3.5 are for models with images."""
    import transformers

    return getattr(transformers, f"{prefix}{'Text' * (prefix in ('Gemma3', 'Qwen3_5', 'Qwen3_5Moe'))}Config")


def make_family(name: str, folder: str | Path, **overrides: Any) -> Path:
    """Write a model of FAMILIES to `folder`, and return `folder`. `overrides`: config fields. Equal calls write equal weights."""
    import torch
    import transformers

    prefix, fields = FAMILIES[name]
    torch.manual_seed(1)
    config = config_class(prefix)(
        **deepcopy(SIZES | fields | overrides)
    )  # a copy, because some config classes change the fields
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in tensor_name or "bias" in tensor_name or tensor_name.endswith(".D"):
                tensor.add_(torch.randn_like(tensor) * (0.05 if "correction" in tensor_name else 0.2))
    model.save_pretrained(folder)
    return Path(folder)


IMAGE_TOKEN = 40  # the last token of the vocabulary
_TOWER = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=24,
    num_heads=2,
    patch_size=4,
    out_hidden_size=32,
    initializer_range=0.2,
)
# name -> (prefix of the class names in transformers, fields of text_config in addition to SIZES, fields of vision_config)
IMAGE_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        dict(rope_parameters=SIZES["rope_parameters"] | dict(mrope_section=[1, 1, 2])),
        _TOWER | dict(window_size=16, fullatt_block_indexes=[1]),  # block 0 attends within windows of 4 x 4 patches
    ),
    "qwen3_vl": (
        "Qwen3VL",
        dict(
            head_dim=16,
            rope_parameters=SIZES["rope_parameters"] | dict(mrope_section=[4, 2, 2], mrope_interleaved=True),
        ),
        _TOWER | dict(num_position_embeddings=16, deepstack_visual_indexes=[0]),
    ),
}


def image_config(name: str, **overrides: Any) -> Any:
    """Return the transformers config of a model of IMAGE_FAMILIES. `overrides`: fields of the config, except the nested ones."""
    import transformers

    prefix, text, tower = deepcopy(IMAGE_FAMILIES[name])
    return getattr(transformers, f"{prefix}Config")(
        architectures=[f"{prefix}ForConditionalGeneration"],
        text_config=deepcopy(SIZES) | text | dict(num_hidden_layers=overrides.pop("num_hidden_layers", 2)),
        vision_config=tower,
        image_token_id=IMAGE_TOKEN,
        video_token_id=39,
        vision_start_token_id=37,
        vision_end_token_id=38,
        **overrides,
    )


def make_image_family(name: str, folder: str | Path, **overrides: Any) -> Path:
    """Write a model of IMAGE_FAMILIES to `folder`, and return `folder`. Equal calls write equal weights."""
    import torch
    import transformers

    torch.manual_seed(1)
    config = image_config(name, **overrides)
    model = getattr(transformers, config.architectures[0])(config)
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if any(part in tensor_name for part in ("norm", "bias", "ln_q", "pos_embed")):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return Path(folder)


def prompts_with_images() -> tuple[list[list[int]], list[Any]]:
    """Return token ids and ImageInputs of four prompts: one image, two images with text between them, no image, one image."""
    import numpy as np

    from mrl.core.types import ImageInputs

    rng = np.random.default_rng(3)
    prompts, images = [], []
    for grids in ([(1, 4, 8)], [(1, 4, 4), (1, 6, 2)], [], [(1, 8, 6)]):
        prompt = rng.integers(0, 37, 3).tolist()
        for frames, height, width in grids:
            prompt += [37, *[IMAGE_TOKEN] * (frames * height * width // 4), 38, *rng.integers(0, 37, 2).tolist()]
        prompts.append(prompt)
        patches = sum(frames * height * width for frames, height, width in grids)
        pixels = rng.normal(size=(patches, 3 * 2 * 4 * 4)).astype(np.float32)
        images.append(ImageInputs(pixels, np.array(grids, np.int64)) if grids else None)
    return prompts, images


def add_mtp_layers(folder: str | Path, count: int = 1) -> dict[str, Any]:
    """Add MTP layers with random weights to a folder of `make_family`. Returns the added tensors by name.

    The tensors have the names and shapes of the published models: DeepSeek-V3 and GLM-4.5 store an MTP layer as a further decoder
    layer, with copies of the embedding and the output layer; Qwen3-Next and Qwen3.5 use the prefix `mtp`.
    """
    import torch
    from safetensors.torch import load_file, save_file

    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    dtype, width = tensors["model.norm.weight"].dtype, len(tensors["model.norm.weight"])
    layers = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    source = max(n for n in layers if any(name.startswith(f"model.layers.{n}.self_attn.") for name in tensors))
    is_qwen = any(".linear_attn." in name for name in tensors)
    generator = torch.Generator().manual_seed(7)
    added: dict[str, Any] = {}

    def add(name: str, shape: tuple[int, ...], kind: torch.dtype = dtype) -> None:
        offset = 1.0 if "norm" in name and not is_qwen else 0.0
        added[name] = (offset + 0.2 * torch.randn(shape, generator=generator)).to(kind)

    for depth in range(count):
        layer = f"mtp.layers.{depth}" if is_qwen else f"model.layers.{len(layers) + depth}"
        prefix = "mtp" if is_qwen else layer
        norms = (
            ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
            if is_qwen
            else ("enorm", "hnorm", "shared_head.norm")
        )
        for name in norms:
            add(f"{prefix}.{name}.weight", (width,))
        add(f"{prefix}.{'fc' if is_qwen else 'eh_proj'}.weight", (width, 2 * width))
        for name, tensor in tensors.items():
            if name.startswith(f"model.layers.{source}."):
                add(name.replace(f"model.layers.{source}", layer), tuple(tensor.shape), tensor.dtype)
        if not is_qwen:
            added[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            added[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | added, path, {"format": "pt"})
    config = json.loads((Path(folder) / "config.json").read_text())
    if config["model_type"] != "qwen3_next":  # its configs do not mention MTP layers
        config["mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers"] = count
        (Path(folder) / "config.json").write_text(json.dumps(config))
    return added
