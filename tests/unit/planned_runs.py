"""Configs for tests of `mrl plan`: published models, whose folders contain only a config.json."""

import json
from pathlib import Path

from published_dense_configs import NEMOTRON_NANO_9B_V2, QWEN, QWEN3_8B, QWEN35_27B, published
from published_moe_configs import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM45_AIR,
    GLM_5,
    NEMOTRON_3_NANO_30B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
)

from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.controller.memory_check import MemoryEstimator
from mrl.planner.run_memory import RunMemory

QWEN3_235B_A22B = QWEN3_30B_A3B | dict(
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_attention_heads=64,
    num_hidden_layers=94,
)
QWEN3_06B = QWEN3_8B | dict(
    hidden_size=1024,
    intermediate_size=3072,
    max_window_layers=28,
    num_attention_heads=16,
    num_hidden_layers=28,
    tie_word_embeddings=True,
)
QWEN3_4B = QWEN3_8B | dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)
MODELS = {
    "Qwen3-0.6B": QWEN3_06B,
    "Qwen3-4B": QWEN3_4B,
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen3-235B-A22B": QWEN3_235B_A22B,
    "DeepSeek-V3": DEEPSEEK_V3,
    "DeepSeek-V3.2": DEEPSEEK_V32,
    "GLM-5": GLM_5,
    "GLM-4.5-Air": GLM45_AIR,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT_80B,
    "Qwen3.5-27B": QWEN35_27B,
    "Nemotron-Nano-9B-v2": NEMOTRON_NANO_9B_V2,
    "Nemotron-3-Nano-30B-A3B": NEMOTRON_3_NANO_30B,
}
assert QWEN.items() <= QWEN3_235B_A22B.items(), "fields of the Qwen family"
FULL = [
    "megatron.recompute_granularity=full",
    "megatron.recompute_method=uniform",
    "megatron.recompute_num_layers=1",
]


def folder_of(model: str, folder: Path) -> Path:
    """Write a folder with the model's published config.json."""
    (folder / model).mkdir(exist_ok=True)
    (folder / model / "config.json").write_text(json.dumps(published(MODELS[model])))
    return folder / model


def config_of(model: str | None, folder: Path, *overrides: str, experiment: str = "gsm8k") -> Config:
    """Return the config of `mrl plan experiment=... model.path=... OVERRIDES`.

    With `model=None`, the model is that of the experiment.
    """
    keys = hydra_entry.check_overrides([f"experiment={experiment}", "run.dir=out", *overrides])
    path = [f"++model.path={folder_of(model, folder)}"] if model else []
    return hydra_entry.compose_config([*keys, *path])


def memory_of(config: Config) -> RunMemory:
    """Return the memory that `mrl plan memory` shows."""
    return MemoryEstimator.of(config).estimate(config)
