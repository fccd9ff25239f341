"""Checks before any process starts: can SGLang compute a model on the devices of the engines, and in their dtype?"""

import re
from collections.abc import Mapping
from typing import Any

from models.architecture import Architecture, Family
from models.conversion.expert_stacks import is_stacked
from models.families import family_of
from models.hf_config import HFConfig
from mrl.config.process_schema import Transport
from mrl.config.schema import Config
from mrl.placement.resource_pools import gpus_of_nodes
from mrl.rollout.engines.server_args import BLOCK_FP8, compute_capability, default_device, has_cuda
from mrl.weight_sync.engine_layout import EngineLayout
from mrl.weight_sync.transfer_plan import scale_shards, trainer_shards
from parallel.dims import ParallelDims

KEYS_OF_BLOCK_FP8 = {"load_format", "json_model_override_args"}
"""Arguments that mrl sets so that an engine has block scales; see `block_fp8_args` in server_args.py."""
KERNEL_KEYS = ("fp8_gemm_runner_backend", "moe_runner_backend")
"""Arguments of SGLang that choose kernels for matrices in FP8."""
FIRST_FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with matrix products in FP8 (Ada)."""
_INDEX = re.compile(r"\.\d+\.")  # index of a layer or expert in the name of a parameter


def engine_dtype(config: Config) -> str:
    """Return the dtype in which the engines of a run compute."""
    return config.sglang.get("dtype") or config.model.dtype


def is_fp8(config: Config) -> bool:
    """Whether the engines store matrices in FP8 with block scales."""
    return config.sglang.get("quantization") == BLOCK_FP8


def check_fp8_engines(config: Config, arch: Architecture, layout: EngineLayout, dims: ParallelDims) -> None:
    """Raise ValueError if the run's engines cannot receive weights in FP8. `arch` and `dims` describe the actor."""
    prefix, sglang = f"sglang.quantization={BLOCK_FP8}", config.sglang
    if arch.vision is not None:
        raise ValueError(
            f"{prefix} with model.path={config.model.path}: engines in FP8 start with random weights, and trainers do not send "
            "the vision tower of an image model; leave sglang.quantization out, or use a language model."
        )
    if arch.has_recurrent_layers:
        raise ValueError(
            f"{prefix} with model.path={config.model.path}: trainers send the weights of recurrent layers only in model.dtype; "
            "leave sglang.quantization out."
        )
    if arch.has_sparse_attention:
        raise ValueError(
            f"{prefix} with model.path={config.model.path}: SGLang stores some matrices of the indexers of sparse attention in "
            "FP8, but trainers send these matrices only in model.dtype; leave sglang.quantization out."
        )
    if any(is_stacked(name) for row in layout.rows for name in row.hf):
        raise ValueError(
            f"{prefix} with model.path={config.model.path}: if checkpoints stack all experts of a layer in one tensor, trainers "
            "send the experts only in model.dtype; leave sglang.quantization out."
        )
    if config.weight_sync.transport == Transport.disk:
        raise ValueError(
            f"{prefix}: trainers send weights in FP8 only to engines that the run starts, and weight_sync.transport=disk writes "
            "weights in model.dtype; use weight_sync.transport=auto."
        )
    dtype = engine_dtype(config)
    if dtype != "bfloat16":
        raise ValueError(f"{prefix}: the engines must compute in bfloat16, not in {dtype}; set sglang.dtype=bfloat16.")
    for name in KEYS_OF_BLOCK_FP8 & sglang.keys():
        raise ValueError(f"sglang.{name}={sglang[name]!r} is set by mrl with {prefix}; leave it out.")
    for name in KERNEL_KEYS:
        if str(sglang.get(name, "")).startswith("flashinfer"):
            raise ValueError(
                f"sglang.{name}={sglang[name]}: its kernels reorder weights, which {prefix} forbids; use triton."
            )
    # scale_shards raises ValueError if the layout of the trainer splits a block of weights that has one scale. All layers, and
    # all experts, have tensors of equal shapes, so one row of each kind is enough. All rows are treated as rows of stage 0.
    rows = {_INDEX.sub(".#.", row.megatron): row for row in layout.rows}.values()
    scale_shards(trainer_shards(rows, layout.sizes, dims, lambda _: 0), rows, layout.sizes)


def check_fp8_device(server_args: Mapping[str, Any], arch: Architecture) -> None:
    """Raise ValueError if engines on this device cannot compute in FP8, or cannot receive weights in FP8."""
    if server_args.get("quantization") != BLOCK_FP8:
        return
    if server_args["device"] == "cpu" and arch.num_experts:
        raise ValueError(
            f"sglang.quantization={BLOCK_FP8} with sglang.device=cpu: engines on a CPU have no experts in FP8; leave "
            "sglang.quantization out, or use a model without experts."
        )
    found = compute_capability() if server_args["device"] == "cuda" else None
    if found and found < FIRST_FP8_CAPABILITY:
        raise ValueError(
            f"sglang.quantization={BLOCK_FP8} on GPUs of compute capability {found[0]}.{found[1]}: SGLang reorders weights for "
            "its Marlin kernels on GPUs below 8.9, so trainers cannot send new weights; leave sglang.quantization out."
        )


def check_engine_device(config: Config, family: Family, key: str = "model.path", *, advice: str = "use GPUs") -> None:
    """Raise ValueError if SGLang's servers would be on CPUs, but SGLang cannot compute models of this family there.

    `key`: config key that names the model, for the message. `advice`: what the user can do.
    """
    if family.engine_needs_gpu and engines_use_cpus(config):
        raise ValueError(f"{key}: SGLang 0.5.23 has no kernels for {family.architecture} on a CPU; {advice}.")


def check_engine_dtype(
    config: Config, hf: HFConfig, dtype: str, deterministic: bool, section: str = "rollout", key: str = "model.dtype"
) -> None:
    """Raise ValueError if SGLang cannot compute in the dtype of the engines: sglang.dtype, or `dtype` if this key is not set.

    `key`: config key that gave `dtype`. `deterministic`: value of the key `deterministic` in the section `section`. Some
    families refuse a dtype on every device. Otherwise, float32 is refused only with sglang.device=cuda or on a machine with
    GPUs. On a machine without GPUs, this check cannot know whether the engines will use GPUs, because the run may start on
    another machine.
    """
    if chosen := config.sglang.get("dtype"):
        dtype, key = chosen, "sglang.dtype"
    family_of(hf).check_engine_dtype(hf, dtype)
    device = config.sglang.get("device") or default_device()
    if dtype == "float32" and not deterministic and device == "cuda":
        raise ValueError(
            f"{key}=float32: on GPUs, SGLang 0.5.23 normalizes float32 only in deterministic inference; use {key}=bfloat16, "
            f"or set {section}.deterministic=true."
        )


def engines_use_cpus(config: Config) -> bool:
    """Whether the engines of the run are on CPUs. On an existing Ray cluster, they are assumed to be on GPUs."""
    cluster = config.cluster
    if config.sglang.get("device") == "cpu":
        return True
    if cluster.scheduler or cluster.hardware.name:
        return not max(gpus_of_nodes(cluster))
    return not (cluster.address or has_cuda())
