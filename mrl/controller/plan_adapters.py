"""Weight sync that sends only LoRA adapters (weight_sync.lora=adapter): checks, server arguments, bytes of a push.

The checks raise ValueError for a mistake in the config. No function starts a process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from models.conversion.lora_mapping import adapter_shapes, matrix_name
from models.families import family_of
from mrl.config.process_schema import LoraSync, PauseMode, Transport
from mrl.config.schema import Config
from mrl.controller.colocation import ENGINES, ColocatedRoles
from mrl.controller.plan_engine_dtype import is_fp8
from mrl.controller.plan_models import ModelPlan
from mrl.rollout.engines.server_args import adapter_args, adapter_slots

KEY = "weight_sync.lora=adapter"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
_JOINED_BY_SGLANG = (("k_proj", "q_proj"), ("v_proj", "q_proj"), ("q_proj", "v_proj"), ("up_proj", "gate_proj"))
"""(matrix, other matrix): SGLang (0.5.23, LoRAAdapter) joins the adapters of `matrix` with the adapters of `other matrix`.

So if `matrix` has adapters, `other matrix` must have adapters, too.
"""


def syncs_adapters(config: Config) -> bool:
    """Return whether the weight sync sends only adapters."""
    return config.weight_sync.lora == LoraSync.adapter


def adapted(config: Config, actor: ModelPlan) -> list[str]:
    """Return the names of the matrices with adapters, such as q_proj."""
    shapes = adapter_shapes(config.lora, family_of(actor.hf), actor.arch)
    return sorted({matrix_name(name.rpartition(".lora_")[0]) for name in shapes})


def check_adapter_sync(config: Config, actor: ModelPlan) -> None:
    """Raise ValueError if weight_sync.lora=adapter is set, but another key or the model does not allow it."""
    if not syncs_adapters(config):
        return
    if not config.lora.rank:
        raise ValueError(f"{KEY}: lora.rank=0, so there are no adapters; set lora.rank, or leave weight_sync.lora out.")
    for key, reason in _conflicts(config):
        raise ValueError(f"{KEY} with {key}: {reason}; leave one of the two keys out.")
    kinds = {
        "image models": actor.arch.vision is not None,
        "models with recurrent layers": actor.arch.has_recurrent_layers,
        "models with latent attention": actor.arch.has_latent_attention,
    }
    for kind in [kind for kind, is_kind in kinds.items() if is_kind]:
        raise ValueError(
            f"{KEY} with model.path={config.model.path}: mrl sends no adapters to engines of {kind}; use weight_sync.lora=merged."
        )
    served = ATTENTION if actor.arch.num_experts else (*ATTENTION, *MLP)
    matrices = adapted(config, actor)
    if unserved := [name for name in matrices if name not in served]:
        of_experts = " of a mixture of experts" if actor.arch.num_experts else ""
        raise ValueError(
            f"{KEY}: the engines cannot apply adapters of {', '.join(unserved)}{of_experts}; set lora.targets to names from "
            f"{', '.join(served)}, or use weight_sync.lora=merged."
        )
    for name, other in _JOINED_BY_SGLANG:
        if name in matrices and other not in matrices:
            raise ValueError(
                f"{KEY}: the engines apply adapters of {name} only together with adapters of {other}; add {other} to "
                "lora.targets."
            )


def _conflicts(config: Config) -> Iterator[tuple[str, str]]:
    """Yield ("key=value", reason) for each setting that cannot work, or has no effect, if a push sends only adapters."""
    sync, urls = config.weight_sync, config.rollout.engine_urls
    if config.lora.experts:
        yield "lora.experts=true", "mrl does not send adapters of routed experts to the engines"
    if urls:
        yield (
            f"rollout.engine_urls={urls}",
            "the engines must be started with the adapters' rank and matrices, so mrl starts them",
        )
    if sync.transport != Transport.auto:
        yield f"weight_sync.transport={sync.transport}", "adapters always travel through a folder in run.dir"
    if sync.delta:
        yield "weight_sync.delta=true", "each push sends the whole adapters"
    if sync.pause_mode != PauseMode.retract:
        yield f"weight_sync.pause_mode={sync.pause_mode}", "a push does not pause requests, which keep their adapters"
    if is_fp8(config):
        yield "sglang.quantization=fp8", "engines in FP8 start with random weights, and a push sends only adapters"
    if config.sglang.get("enable_dp_attention"):
        yield "sglang.enable_dp_attention=true", "SGLang then loads no adapters while it runs"


def check_shared_devices(config: Config, colocated_roles: ColocatedRoles) -> None:
    """Raise ValueError if engines that get only adapters share devices with trainers, and other settings do not allow this."""
    if not syncs_adapters(config) or not any(ENGINES in roles for roles in colocated_roles):
        return
    backup = "enable_weights_cpu_backup"
    if config.sglang.get(backup) is False:
        raise ValueError(
            f"{KEY} with sglang.{backup}=false: colocated engines lose their weights when they are offloaded, and a push sends "
            "only adapters; leave one of the two keys out."
        )
    # A push waits until no request uses the old adapters that it unloads. An offloaded engine cannot finish such requests, so
    # the push would wait in vain.
    rollout = config.rollout
    if rollout.staleness or rollout.over_sample_rate:
        raise ValueError(
            f"{KEY} with rollout.mode={rollout.mode} and rollout.over_sample_rate={rollout.over_sample_rate:g} on colocated "
            "engines: requests would still use old adapters while the engines are offloaded; use rollout.mode=sync without "
            "over_sample_rate, weight_sync.lora=merged, or a pool of their own for the engines."
        )


def adapter_server_args(config: Config, actor: ModelPlan) -> dict[str, Any]:
    """Return the server arguments with which engines apply adapters; {} if the weight sync sends all weights."""
    if not syncs_adapters(config):
        return {}
    # number of weight versions of the adapters that an engine can apply at the same time
    slots = adapter_slots(config.rollout.staleness)
    return adapter_args(config.lora.rank, adapted(config, actor), slots, config.sglang.get("device"))


@dataclass(frozen=True)
class AdapterPush:
    """What a push of adapters sends: trainer rank 0 writes all matrices A and B once, and every engine rank reads them."""

    num_matrices: int  # number of matrices A and B
    nbytes: int  # bytes of all matrices
    num_readers: int  # number of engine ranks


def plan_adapter_push(config: Config, actor: ModelPlan) -> AdapterPush:
    """Return what a push of this run's adapters sends."""
    shapes = adapter_shapes(config.lora, family_of(actor.hf), actor.arch)
    nbytes = config.model.itemsize * sum(map(prod, shapes.values()))
    return AdapterPush(len(shapes), nbytes, config.rollout.num_engines * config.rollout.engine_tp)
