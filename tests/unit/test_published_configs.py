"""Configs as their authors published them are accepted, and have the parameter counts that the authors state."""

from math import prod

import pytest
from published_dense_configs import (
    GEMMA3_1B,
    GLM4_9B,
    LLAMA31_8B,
    MINISTRAL3_8B,
    MISTRAL_7B_V03,
    NEMOTRON_H_8B,
    NEMOTRON_NANO_9B_V2,
    OLMO2_7B,
    OLMO3_7B,
    PHI4,
    PHI4_MINI,
    QWEN3_8B,
    QWEN25_7B,
    QWEN35_27B,
    SEED_OSS_36B,
    SMOLLM2_135M,
    SMOLLM3_3B,
    published,
)
from published_moe_configs import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM45_AIR,
    GLM_5,
    GPT_OSS_20B,
    KIMI_K2,
    MINIMAX_M2,
    MIXTRAL_8X7B,
    NEMOTRON_3_NANO_30B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
)

from models.families import family_of
from models.hf_config import HFConfig


@pytest.mark.parametrize(
    ("fields", "billions"),
    [
        (QWEN3_NEXT_80B, 80),
        (QWEN35_27B, 27),
        (NEMOTRON_H_8B, 8.1),
        (NEMOTRON_NANO_9B_V2, 8.9),
        (NEMOTRON_3_NANO_30B, 31.6),
    ],
    ids=["80B", "27B", "8B", "9B", "30B"],
)
def test_published_sizes_of_models_with_recurrent_layers(fields, billions):
    """The authors state rounded numbers. The configs have no value that SGLang is known to compute differently."""
    config = HFConfig("config.json", published(fields))
    family, arch = family_of(config), family_of(config).read(config)
    family.check_engine(config, arch)
    parameters = sum(prod(shape) for shape in family.hf_shapes(arch).values())
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        (LLAMA31_8B, 8_030_261_248),
        (SMOLLM2_135M, 134_515_008),
        (QWEN25_7B, 7_615_616_512),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_30B_A3B, 30_532_122_624),
        (MISTRAL_7B_V03, 7_248_023_552),
        (GEMMA3_1B, 999_885_952),
        (GPT_OSS_20B, 20_914_757_184),
        (MINIMAX_M2, 228_689_764_864),
        (KIMI_K2, 1_026_408_232_448),
        (OLMO2_7B, 7_298_617_344),
        (OLMO3_7B, 7_298_011_136),
        (PHI4, 14_659_507_200),
        (PHI4_MINI, 3_836_021_760),
        (SEED_OSS_36B, 36_151_104_512),
        (MIXTRAL_8X7B, 46_702_792_704),
        (GLM45_AIR, 106_852_251_264),  # multi-token prediction has 3_616_573_568 more parameters
        (DEEPSEEK_V3, 671_026_419_200),
        (DEEPSEEK_V32, 671_026_419_200 + 61 * 13_959_424),  # the latter are the weights of an indexer
        (GLM_5, 743_911_218_432),
        (GLM4_9B, 9_400_279_040),
        (MINISTRAL3_8B, 8_489_553_920),  # the vision tower and its projector have 0.4 billion more
        (SMOLLM3_3B, 3_075_098_624),
    ],
    ids=[
        *("Llama-3.1-8B", "SmolLM2-135M", "Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B"),
        *(
            "Mistral-7B-v0.3",
            "Gemma-3-1B",
            "gpt-oss-20b",
            "MiniMax-M2",
            "Kimi-K2",
            "OLMo-2-7B",
            "OLMo-3-7B",
            "Phi-4",
            "Phi-4-mini",
            "Seed-OSS-36B",
            "Mixtral-8x7B",
            "GLM-4.5-Air",
            "DeepSeek-V3",
            "DeepSeek-V3.2",
            "GLM-5",
        ),
        *("GLM-4-9B-0414", "Ministral-3-8B", "SmolLM3-3B"),
    ],
)
def test_a_published_config_is_accepted_and_has_the_published_number_of_parameters(fields, parameters):
    config = HFConfig("config.json", published(fields))
    family = family_of(config)
    assert sum(prod(shape) for shape in family.hf_shapes(family.read(config)).values()) == parameters


@pytest.mark.parametrize(
    ("fields", "billions"),
    [(QWEN3_30B_A3B, 3.3), (DEEPSEEK_V3, 37.0), (NEMOTRON_3_NANO_30B, 3.6)],
    ids=["A3B", "A37B", "A3.6B"],
)
def test_a_token_costs_the_published_number_of_active_parameters(fields, billions):
    config = HFConfig("config.json", published(fields))
    per_token, _ = family_of(config).read(config).multiply_adds()
    embedding = fields["vocab_size"] * fields["hidden_size"]
    assert (per_token + embedding) / 1e9 == pytest.approx(billions, rel=0.02)
