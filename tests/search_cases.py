"""Published models on imaginary clusters, for tests of the layout search and of its predictions."""

import json
from functools import cache
from pathlib import Path

from published_dense_configs import ANY, QWEN3_8B
from published_moe_configs import DEEPSEEK_V3, QWEN3_30B_A3B

from models.architecture import Architecture
from models.families import family_of
from models.hf_config import HFConfig
from mrl.config.process_schema import ClusterConfig, HardwareConfig
from mrl.config.schema import PlanConfig
from mrl.planner.layout_search import STALENESS, FitsInMemory, LayoutSearch, memory_check
from mrl.planner.layout_space import GpuCluster, LayoutSpace
from mrl.planner.model_shape import ModelShape
from mrl.planner.step_workload import LengthDistribution, StepWorkload
from mrl.planner.trainer_memory import TrainerSettings

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
    tflops_bf16=989,
    hbm_gb_per_s=3350,
    nvlink_gb_per_s=900,
    network_gb_per_s=50,
    host_memory_gb=2000,
)
__all__ = ["DEEPSEEK_V3", "H100", "QWEN3_8B", "QWEN3_30B_A3B", "QWEN3_235B_A22B"]


def model_of(fields: dict) -> tuple[Architecture, ModelShape]:
    """Read a model from the contents of a config.json."""
    return _model_of(json.dumps(fields))


@cache
def _model_of(fields: str) -> tuple[Architecture, ModelShape]:
    config = HFConfig(Path("config.json"), ANY | json.loads(fields))
    family = family_of(config)
    arch = family.read(config)
    return arch, ModelShape.of(family, arch)


def cluster_of(nodes: int, gpus_per_node: int = 8, **changes) -> GpuCluster:
    """Return a cluster with H100 GPUs; `changes` replaces fields of the hardware."""
    hardware = HardwareConfig(**H100 | changes)
    return GpuCluster.of(ClusterConfig(nodes=nodes, gpus_per_node=gpus_per_node, hardware=hardware), PlanConfig())


def small_moe() -> dict:
    """Return the config of a mixture of experts with four layers, whose sizes are divisible by many parallel sizes."""
    sizes = dict(
        num_hidden_layers=4, num_experts=8, num_experts_per_tok=2, num_attention_heads=8, num_key_value_heads=4
    )
    return ANY | QWEN3_30B_A3B | sizes | dict(vocab_size=32_768)


def search_of(  # noqa: PLR0913 - a search has many settings
    fields: dict,
    nodes: int,
    *,
    prompts: int = 128,
    responses: int = 16,
    max_tokens: int = 16_384,
    fits: FitsInMemory | None = None,
    fixed: dict | None = None,
    modes: tuple[str, ...] = tuple(STALENESS),
    **hardware,
) -> LayoutSearch:
    """Return a layout search for a workload with responses of up to 16,384 tokens."""
    arch, shape = model_of(fields)
    cluster = cluster_of(nodes, **hardware)
    work = StepWorkload(
        LengthDistribution.log_normal(512, 4000, 0.8, 16_384), prompts, responses, max_tokens, scoring_passes=1
    )
    if fits is None:
        settings = TrainerSettings(max_tokens=max(max_tokens, int(work.lengths.longest)))
        fits = memory_check(shape, cluster, settings)
    return LayoutSearch(LayoutSpace(arch, shape, cluster, work.lengths.longest, fixed or {}), work, fits, modes=modes)


def write_model(folder: Path, fields: dict) -> Path:
    """Write a model folder that contains only a config.json."""
    (folder / "config.json").write_text(json.dumps(ANY | fields))
    return folder
