"""Memory of a whole run: what each GPU holds at each moment of a step, against what it has. Pure.

A moment is one role at work: what it has then, and what the others of its pool leave on the GPU while they sleep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from mrl.config.schema import Config, HardwareConfig
from mrl.placement.resource_pools import Pool, Pools, gpus_of_nodes, slots_per_node
from mrl.planner.engine_memory import EngineMemory, engine_memory
from mrl.planner.model_shape import ModelShape
from mrl.planner.trainer_memory import SLOTS, RankMemory, TrainerMemory, TrainerSettings, trainer_memory
from mrl.planner.trainer_state_bytes import StateBytes, state_bytes
from mrl.weight_sync.engine_layout import Topology
from parallel.dims import ParallelDims

# FROM: What a run needs beside its GPUs: memory of the machines, and room on the disk.

GIB = 1 << 30
FRACTION = 0.8  # of a GPU, for an engine's weights and KV cache, unless sglang.mem_fraction_static is set
CPU_TOKENS = 65536  # of an engine's KV cache on a CPU, unless sglang.max_total_tokens is set


@dataclass(frozen=True)
class Model:
    """A role's model and its layout."""

    shape: ModelShape
    dims: ParallelDims
    settings: TrainerSettings
    context: int  # longest sequence, tokens


@dataclass(frozen=True)
class Moment:
    """One GPU of a pool while one role works."""

    pool: str
    role: str
    phase: str
    parts: Mapping[str, int]  # bytes, by what they are
    limit: int  # bytes of the GPU; 0: not known
    where: str = ""  # which rank it is that needs most

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return not self.limit or self.total <= self.limit


@dataclass(frozen=True)
class RunMemory:
    """Of all GPUs, machines and the disk."""

    moments: tuple[Moment, ...]
    engine: EngineMemory | None
    sequence: int  # tokens of the longest prompt and response that are expected
    host: HostMemory
    host_limit: int  # bytes of one machine; 0: not known
    nodes: int
    gpus: int  # that the run needs
    available: int  # that there are; 0: not known
    disk: int  # bytes of all checkpoints that are kept at once
    worst_experts: int  # bytes of activations more, were all tokens of a layer sent to one rank; 0 without experts

    @cached_property
    def problems(self) -> list[str]:
        """What does not fit, a line each."""
        return [*self._of_gpus(), *self._of_cache(), *self._of_machines(), *self._of_number()]

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def excess(self) -> int:
        """Bytes of a GPU that are missing in the worst moment; at most 0 where all fit."""
        return max((moment.total - moment.limit for moment in self.moments if moment.limit), default=0)

    def _of_gpus(self) -> Iterator[str]:
        for m in self.moments:
            if not m.fits:
                over = (m.total - m.limit) / GIB
                yield (
                    f"{m.role} during {m.phase}: {m.total / GIB:.1f} GiB of {m.limit / GIB:.1f} GiB, {over:.1f} GiB too much"
                )

    def _of_cache(self) -> Iterator[str]:
        if self.engine and self.engine.tokens < self.sequence:
            yield (
                f"engines: the KV cache holds {self.engine.tokens:,} tokens, one response and its prompt may have "
                f"{self.sequence:,}"
            )

    def _of_machines(self) -> Iterator[str]:
        if self.host_limit and self.host.total > self.host_limit:
            yield f"host memory: {self.host.total / GIB:.0f} GiB of {self.host_limit / GIB:.0f} GiB of a node"

    def _of_number(self) -> Iterator[str]:
        if self.available and self.gpus > self.available:
            yield f"the run needs {self.gpus} GPUs, the cluster has {self.available} (cluster.nodes)"

    def as_json(self) -> dict[str, Any]:
        """Plain values, bytes throughout."""
        moments = [asdict(moment) | dict(total=moment.total, fits=moment.fits) for moment in self.moments]
        engine = asdict(self.engine) | dict(tokens=self.engine.tokens) if self.engine else None
        return dict(
            fits=self.fits,
            problems=self.problems,
            moments=moments,
            engine=engine,
            host=asdict(self.host) | dict(total=self.host.total, limit=self.host_limit),
            nodes=self.nodes,
            gpus=self.gpus,
            available=self.available,
            checkpoints=self.disk,
            worst_experts=self.worst_experts,
        )


def run_memory(
    config: Config, models: Mapping[str, Model], topology: Topology | None, pools: Pools, reference: bool
) -> RunMemory:
    """Of the run that `config` describes. `topology`: of its engines, None where it has none of its own.

    `reference`: whether the actor keeps the weights that it started from.
    """
    hardware = config.cluster.hardware
    found = {role: trainer_memory(m.shape, m.dims, m.settings) for role, m in models.items()}
    engine = _engine(config, models["actor"], topology, pools) if topology else None
    moments = [m for pool in pools.pools for m in _moments(config, pool, found, engine)]
    actor = models["actor"]
    checkpoint = sum(
        checkpoint_bytes(model.shape, model.settings.itemsize) for model in models.values() if model.settings.trained
    )
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best + 1
    return RunMemory(
        moments=tuple(moments),
        engine=engine,
        sequence=sequence_tokens(config, actor.context),
        host=_host(config, models, found, pools, checkpoint if config.checkpoint.every else 0, reference),
        host_limit=int(hardware.host_memory_gb * GIB),
        nodes=ceil(pools.size / slots_per_node(config.cluster, pools)),
        gpus=pools.size,
        available=sum(gpus_of_nodes(config.cluster)) if config.cluster.nodes else 0,
        disk=checkpoint * kept,
        worst_experts=_worst(actor, found["actor"]) if actor.shape.experts and actor.dims.ep > 1 else 0,
    )


def _worst(actor: Model, found: TrainerMemory) -> int:
    """Activations that the busiest rank would have more, were all tokens of each layer sent to its experts."""
    worst = replace(actor.settings, imbalance=float(actor.dims.ep))
    return trainer_memory(actor.shape, actor.dims, worst).by_phase["update"] - found.by_phase["update"]


def trainer_settings(config: Config, context: int, **more: Any) -> TrainerSettings:
    """What a trainer's memory depends on beside model and layout. `context`: of the model, tokens; `more`: further fields."""
    return TrainerSettings.with_megatron(
        config.megatron,
        max_tokens=max(config.trainer.max_tokens_per_micro_batch, sequence_tokens(config, context)),
        itemsize=config.model.itemsize,
        logprob_chunk=config.trainer.logprob_chunk,
        keys_per_token=keys_per_token(config, context),
        imbalance=config.plan.expert_imbalance,
        bucket_bytes=config.weight_sync.bucket_bytes,
        **more,
    )


def sequence_tokens(config: Config, context: int) -> int:
    """A long response with its prompt, as far as the model's context holds it."""
    return _prompt(config, context) + config.rollout.max_response_tokens


def _prompt(config: Config, context: int) -> int:
    response = config.rollout.max_response_tokens
    return min(config.plan.prompt_tokens or config.data.max_prompt_tokens or response, max(1, context - response))


def keys_per_token(config: Config, context: int) -> float:
    """Keys that attention reads for each token of a pack whose responses share a prompt: each of them reads it anew."""
    if not config.trainer.share_prompts:
        return 1.0
    prompt, response, group = (
        _prompt(config, context),
        config.rollout.max_response_tokens,
        config.rollout.responses_per_prompt,
    )
    fit = max(1, min(group, (config.trainer.max_tokens_per_micro_batch - prompt) // response))
    return (prompt + fit * (prompt + response)) / (prompt + fit * response) if fit > 1 else 1.0


def _limit(hardware: HardwareConfig) -> int:
    return int(hardware.gpu_memory_gb * GIB)


def _reserve(config: Config) -> int:
    return int(config.plan.reserve_gb * GIB) if config.cluster.hardware.gpu_memory_gb else 0


def _engine(config: Config, actor: Model, topology: Topology, pools: Pools) -> EngineMemory:
    """A rank of an engine, which starts when the trainers that it shares its GPU with sleep."""
    itemsize = config.model.itemsize
    kv_itemsize = 1 if "fp8" in str(config.sglang.get("kv_cache_dtype", "auto")) else itemsize
    limit = _limit(config.cluster.hardware)
    free = limit - len(pools.roles["engines"].needs) * _reserve(config)
    fraction = config.sglang.get("mem_fraction_static") or FRACTION
    found = engine_memory(actor.shape, topology, itemsize, free, fraction, kv_itemsize)
    most = config.sglang.get("max_total_tokens") or (0 if limit else CPU_TOKENS)
    return (
        replace(found, kv_cache=min(most * found.token, found.kv_cache if limit else most * found.token))
        if most
        else found
    )


def _moments(
    config: Config, pool: Pool, found: Mapping[str, TrainerMemory], engine: EngineMemory | None
) -> Iterator[Moment]:
    limit, reserve = _limit(config.cluster.hardware), {"context": _reserve(config) * len(pool.needs)}
    shared = len(pool.needs) > 1
    slots = {"buckets": SLOTS * config.weight_sync.bucket_bytes} if engine and "actor" in pool.needs else {}
    for role in pool.needs:
        if role == "engines":
            assert engine is not None, "a pool has engines only where the run has"
            parts = {"weights": engine.weights, "kv cache": max(0, engine.kv_cache)}
            yield Moment(pool.name, role, "rollout", parts | slots | reserve, limit, "each")
            continue
        memory = found[role]
        for phase in memory.by_phase:
            if phase == "weight_sync" and (role != "actor" or (shared and "engines" in pool.needs)):
                continue
            rank = max(memory.stages, key=lambda stage: stage.phases()[phase])
            parts = _parts(rank, phase)
            yield Moment(pool.name, role, phase, parts | slots | reserve, limit, _where(memory, rank))
        if role == "actor" and engine and shared and "engines" in pool.needs:
            rank = max(memory.stages, key=lambda stage: stage.push)
            parts = {"weights": rank.state.weights, "engine's weights": engine.weights, "buckets": rank.buckets}
            yield Moment(pool.name, "actor, engines", "weight_sync", parts | reserve, limit, _where(memory, rank))


def _parts(rank: RankMemory, phase: str) -> dict[str, int]:
    state = dict(weights=rank.state.weights, gradients=rank.state.gradients, optimizer=rank.state.optimizer)
    work = {
        "update": {"activations": rank.saved, "working": rank.working},
        "score": {"working": rank.scoring},
        "weight_sync": {},
    }[phase]
    return {name: value for name, value in (state | work).items() if value}


def _where(memory: TrainerMemory, rank: RankMemory) -> str:
    return f"stage {rank.stage}" if len(memory.stages) > 1 else "each"


def _host(
    config: Config,
    models: Mapping[str, Model],
    found: Mapping[str, TrainerMemory],
    pools: Pools,
    checkpoint: int,
    reference: bool,
) -> HostMemory:
    """Of the busiest node: as many ranks of each role as it may hold."""
    per_node = slots_per_node(config.cluster, pools)
    on_node = {role: min(per_node, pool.needs[role].slots) for role, pool in pools.roles.items()}
    shared = {role for roles in pools.shared for role in roles}
    asleep = sum(
        on_node[role] * max(asleep(rank.state) for rank in memory.stages)
        for role, memory in found.items()
        if role in shared
    )
    actor, world = max(rank.state.weights for rank in found["actor"].stages), models["actor"].dims.world_size
    weights = models["actor"].shape.num_parameters * models["actor"].settings.itemsize
    rollout = config.rollout
    responses = rollout.prompts_per_step * rollout.responses_per_prompt
    return HostMemory(
        processes=PROCESS * (sum(on_node.values()) + 2),
        asleep=asleep,
        reference=on_node["actor"] * actor if reference else 0,
        checkpoint=checkpoint * on_node["actor"] // world,
        delta=weights * on_node["actor"] // world if config.weight_sync.delta else 0,
        rollouts=rollout_bytes(responses, sequence_tokens(config, models["actor"].context), 1 + rollout.staleness),
    )


PINNED_BLOCK = 1 << 26  # bytes; sleeping models take pinned memory in such blocks (parallel.offload)
PROCESS = 3 << 30  # bytes of a process with torch, CUDA and its libraries loaded; measured on no GPU machine
TOKEN = 24  # bytes of a sampled token in the object store: id, log-probability, mask, and columns that are added


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the machine of the busiest node."""

    processes: int
    asleep: int  # models that gave their GPU to others, in pinned memory
    reference: int  # weights that reinforcement started from
    checkpoint: int  # copy that a checkpoint is written from
    delta: int  # what was sent last, where the weight sync sends differences
    rollouts: int  # tokens of the steps on their way, in Ray's object store

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def asleep(state: StateBytes) -> int:
    """Bytes of pinned memory that a rank's model takes while it sleeps: gradients are dropped."""
    return sum(-(-part // PINNED_BLOCK) * PINNED_BLOCK for part in (state.weights, state.optimizer))


def checkpoint_bytes(shape: ModelShape, itemsize: int) -> int:
    """A checkpoint on the disk: weights, main weights and moments, without padding."""
    return shape.num_parameters * (itemsize + state_bytes(itemsize))


def rollout_bytes(responses: int, tokens: int, steps: int) -> int:
    """Of `responses` of so many tokens, prompts included, of each of `steps` steps that are on their way."""
    return responses * tokens * TOKEN * steps
