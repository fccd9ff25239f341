"""Published models on imaginary clusters, for tests of the search and of its predictions."""

import json
from functools import cache
from pathlib import Path

from test_published_configs import ANY, DEEPSEEK_V3, QWEN3_8B, QWEN3_30B_A3B

from models.families import family_of
from models.hf_config import HFConfig
from models.spec import Architecture
from mrl.config import HardwareConfig, PlanConfig
from mrl.planner.machine import Machine
from mrl.planner.sizes import ModelSizes

QWEN3_235B_A22B = QWEN3_30B_A3B | dict(
    hidden_size=4096,
    intermediate_size=12288,
    max_window_layers=94,
    moe_intermediate_size=1536,
    num_attention_heads=64,
    num_hidden_layers=94,
)
H100 = dict(
    name="h100",
    gpu_memory_gb=79.6,
    gpus_per_node=8,
    tflops_bf16=989,
    hbm_gb_per_s=3350,
    nvlink_gb_per_s=900,
    network_gb_per_s=50,
    host_memory_gb=2000,
)
__all__ = ["DEEPSEEK_V3", "H100", "QWEN3_8B", "QWEN3_30B_A3B", "QWEN3_235B_A22B", "machine_of", "model_of"]


def model_of(fields: dict) -> tuple[Architecture, ModelSizes]:
    """Of the contents of a config.json."""
    return _model_of(json.dumps(fields))


@cache
def _model_of(fields: str) -> tuple[Architecture, ModelSizes]:
    config = HFConfig(Path("config.json"), ANY | json.loads(fields))
    family = family_of(config)
    arch = family.read(config)
    return arch, ModelSizes.of(family, arch)


def machine_of(nodes: int, **changes) -> Machine:
    """So many nodes of H100."""
    return Machine.of(HardwareConfig(**H100 | changes, nodes=nodes), PlanConfig())
