"""Configs as their authors published them are accepted, and have the parameter counts that the authors state."""

from math import prod

import pytest

from models.families import family_of
from models.hf_config import HFConfig

ANY = dict(
    attention_dropout=0.0,
    hidden_act="silu",
    initializer_range=0.02,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.51.0",
    use_cache=True,
)
QWEN = dict(bos_token_id=151643, eos_token_id=151645, rms_norm_eps=1e-6, rope_theta=1e6, use_sliding_window=False)
LLAMA31_8B = dict(
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=131072,
    mlp_bias=False,
    model_type="llama",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    pretraining_tp=1,
    rms_norm_eps=1e-5,
    rope_scaling=dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
    rope_theta=500000.0,
    vocab_size=128256,
)
SMOLLM2_135M = dict(
    architectures=["LlamaForCausalLM"],
    attention_bias=False,
    bos_token_id=1,
    eos_token_id=2,
    hidden_size=576,
    initializer_range=0.041666666666666664,
    intermediate_size=1536,
    is_llama_config=True,
    max_position_embeddings=8192,
    mlp_bias=False,
    model_type="llama",
    num_attention_heads=9,
    num_hidden_layers=30,
    num_key_value_heads=3,
    pad_token_id=2,
    pretraining_tp=1,
    rms_norm_eps=1e-5,
    rope_interleaved=False,
    rope_scaling=None,
    rope_theta=100000,
    tie_word_embeddings=True,
    vocab_size=49152,
) | {"transformers.js_config": dict(kv_cache_dtype=dict(q4f16="float16", fp16="float16"))}
QWEN25_7B = QWEN | dict(
    architectures=["Qwen2ForCausalLM"],
    hidden_size=3584,
    intermediate_size=18944,
    max_position_embeddings=32768,
    max_window_layers=28,
    model_type="qwen2",
    num_attention_heads=28,
    num_hidden_layers=28,
    num_key_value_heads=4,
    sliding_window=131072,
    vocab_size=152064,
)
QWEN3_8B = QWEN | dict(
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=12288,
    max_position_embeddings=40960,
    max_window_layers=36,
    model_type="qwen3",
    num_attention_heads=32,
    num_hidden_layers=36,
    num_key_value_heads=8,
    rope_scaling=None,
    sliding_window=None,
    vocab_size=151936,
)
QWEN3_30B_A3B = QWEN | dict(
    architectures=["Qwen3MoeForCausalLM"],
    attention_bias=False,
    decoder_sparse_step=1,
    head_dim=128,
    hidden_size=2048,
    intermediate_size=6144,
    max_position_embeddings=40960,
    max_window_layers=48,
    mlp_only_layers=[],
    model_type="qwen3_moe",
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    output_router_logits=False,
    rope_scaling=None,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    vocab_size=151936,
)
MIXTRAL_8X7B = dict(
    architectures=["MixtralForCausalLM"],
    bos_token_id=1,
    eos_token_id=2,
    hidden_size=4096,
    intermediate_size=14336,
    max_position_embeddings=32768,
    model_type="mixtral",
    num_attention_heads=32,
    num_experts_per_tok=2,
    num_hidden_layers=32,
    num_key_value_heads=8,
    num_local_experts=8,
    output_router_logits=False,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    router_aux_loss_coef=0.02,
    sliding_window=None,
    vocab_size=32000,
)
GLM45_AIR = dict(
    architectures=["Glm4MoeForCausalLM"],
    attention_bias=True,
    eos_token_id=[151329, 151336, 151338],
    first_k_dense_replace=1,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=10944,
    max_position_embeddings=131072,
    model_type="glm4_moe",
    moe_intermediate_size=1408,
    n_group=1,
    n_routed_experts=128,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=96,
    num_experts_per_tok=8,
    num_hidden_layers=46,
    num_key_value_heads=8,
    num_nextn_predict_layers=1,
    pad_token_id=151329,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=1000000,
    routed_scaling_factor=1.0,
    topk_group=1,
    use_qk_norm=False,
    vocab_size=151552,
)
DEEPSEEK_V3 = dict(  # the published config without its quantization_config
    architectures=["DeepseekV3ForCausalLM"],
    attention_bias=False,
    auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    bos_token_id=0,
    eos_token_id=1,
    ep_size=1,
    first_k_dense_replace=3,
    hidden_size=7168,
    intermediate_size=18432,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    model_type="deepseek_v3",
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=128,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_key_value_heads=128,
    num_nextn_predict_layers=1,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-6,
    rope_scaling=dict(
        beta_fast=32,
        beta_slow=1,
        factor=40,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
        type="yarn",
    ),
    rope_theta=10000,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    topk_group=4,
    topk_method="noaux_tc",
    v_head_dim=128,
    vocab_size=129280,
)


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        (LLAMA31_8B, 8_030_261_248),
        (SMOLLM2_135M, 134_515_008),
        (QWEN25_7B, 7_615_616_512),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_30B_A3B, 30_532_122_624),
        (MIXTRAL_8X7B, 46_702_792_704),
        (GLM45_AIR, 106_852_251_264),  # multi-token prediction has 3_616_573_568 more parameters
        (DEEPSEEK_V3, 671_026_419_200),
    ],
    ids=[
        *("Llama-3.1-8B", "SmolLM2-135M", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B", "Mixtral-8x7B"),
        *("GLM-4.5-Air", "DeepSeek-V3"),
    ],
)
def test_a_published_config_is_accepted_and_has_the_published_number_of_parameters(fields, parameters):
    config = HFConfig("config.json", ANY | fields)
    family = family_of(config)
    assert sum(prod(shape) for shape in family.hf_shapes(family.read(config)).values()) == parameters


@pytest.mark.parametrize(("fields", "billions"), [(QWEN3_30B_A3B, 3.3), (DEEPSEEK_V3, 37.0)], ids=["A3B", "A37B"])
def test_a_token_costs_the_published_number_of_active_parameters(fields, billions):
    config = HFConfig("config.json", ANY | fields)
    per_token, _ = family_of(config).read(config).multiply_adds()
    embedding = fields["vocab_size"] * fields["hidden_size"]
    assert (per_token + embedding) / 1e9 == pytest.approx(billions, rel=0.02)
