"""Predicts the GPU memory (in each phase of a step), host memory and disk space of a run, and whether the memory suffices.

A GpuPhase describes the memory of one GPU of a pool during one phase. In most phases, one role is active, and the other roles
of the pool are offloaded. There are two exceptions: all roles that SGLang serves are active together, and the actor is active
together with the engines during a weight sync on shared GPUs. A GpuPhase includes the memory that the offloaded roles still
use on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from models.architecture import Architecture
from models.families import family_of
from models.hf_config import HFConfig
from mrl.config.process_schema import HardwareConfig, LoraSync
from mrl.config.schema import Config
from mrl.config.validate import token_budgets
from mrl.placement.resource_pools import Pool, Pools, gpus_of_nodes, pluralize, slots_per_node
from mrl.planner.engine_memory import (
    DEFAULT_MEM_FRACTION,
    EngineRankMemory,
    adapter_slot_bytes,
    engine_memory,
    with_states,
)
from mrl.planner.model_shape import ModelShape
from mrl.planner.trainer_memory import (
    FLOAT32_BYTES,
    SENDER_BUCKETS,
    TrainerMemory,
    TrainerRankMemory,
    TrainerSettings,
    trainer_memory,
)
from mrl.planner.trainer_state_bytes import GRADIENT_BYTES, checkpoint_bytes, pinned_bytes
from mrl.rollout.engines.server_args import adapter_slots
from mrl.weight_sync.engine_layout import EngineParallelSizes
from parallel.dims import ParallelDims

GIB = 1 << 30
CPU_KV_TOKENS = 65536  # size of an engine's KV cache on a CPU if sglang.max_total_tokens is not set
# Host memory of a process with torch, CUDA and other libraries. This is an assumption and not a measurement.
PROCESS_BYTES = 3 << 30
# Bytes of one sampled token in Ray's object store: its id, log-probability and mask, and the columns of the algorithm.
ROLLOUT_TOKEN_BYTES = 24


@dataclass(frozen=True)
class RoleModel:
    """The model of one role, with its layout and settings."""

    shape: ModelShape
    dims: ParallelDims
    settings: TrainerSettings
    context: int  # tokens of the longest sequence that the model accepts

    @property
    def trained_shape(self) -> ModelShape:
        """Sizes of the trained parameters: of the LoRA adapters, or of the whole model."""
        return self.settings.adapters or self.shape


@dataclass(frozen=True)
class GpuPhase:
    """Memory of one GPU of a pool during one phase of a step."""

    pool: str
    role: str  # the active roles, separated by commas
    phase: str
    parts: Mapping[str, int]  # kind of memory ("weights", "activations", ...) -> bytes
    limit: int  # bytes of GPU memory; 0: unknown
    rank: str = ""  # the rank that needs the most memory: "each" if all are equal, or "stage N" of the pipeline

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return not self.limit or self.total <= self.limit


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory on the busiest node."""

    processes: int  # the processes themselves, with their libraries
    offloaded: int  # models of offloaded roles, in pinned memory
    reference: int  # the reference's weights, and a copy of the actor's weights while the reference is on the GPU
    checkpoint: int  # copy of the state from which an asynchronous checkpoint is written
    delta: int  # copy of the weights of the previous push, if the weight sync sends only differences
    rollouts: int  # responses in Ray's object store on which no step has trained yet
    teachers: int  # output layers of teachers, and their hidden states for one step in Ray's object store
    # copies of the weights of offloaded engines (with weight_sync.lora=adapter or sglang.enable_weights_cpu_backup)
    engines: int = 0
    pixels: int = 0  # pixel values of prompts in Ray's object store, and in the packs of the actor's ranks

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class RunMemory:
    """Memory that a run needs on its GPUs, on its nodes and on disk."""

    phases: tuple[GpuPhase, ...]
    engine: EngineRankMemory | None  # None: the run starts no engines
    longest_sequence: int  # largest expected number of tokens in a prompt and its response together
    host: HostMemory
    host_limit: int  # bytes of host memory of one node; 0: unknown
    nodes: int  # number of nodes that the run needs
    gpus: int  # number of GPUs that the run needs
    cluster_gpus: int  # number of GPUs of the cluster; 0: unknown
    disk_bytes: int  # bytes of all checkpoints that exist at one time
    worst_expert_bytes: int  # additional activation bytes of a rank if its experts received all tokens

    @cached_property
    def problems(self) -> list[str]:
        """One message for each part of the run that does not fit in memory or on the cluster."""
        return [*self._gpu_problems(), *self._kv_cache_problems(), *self._host_problems(), *self._cluster_problems()]

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def excess(self) -> int:
        """Largest number of bytes by which a phase exceeds the memory of its GPU. It is 0 or less if all phases fit."""
        return max((phase.total - phase.limit for phase in self.phases if phase.limit), default=0)

    def _gpu_problems(self) -> Iterator[str]:
        for m in self.phases:
            if not m.fits:
                need, limit, excess = m.total / GIB, m.limit / GIB, (m.total - m.limit) / GIB
                yield f"{m.role} during {m.phase}: {need:.1f} GiB on a GPU with {limit:.1f} GiB, {excess:.1f} GiB too much"

    def _kv_cache_problems(self) -> Iterator[str]:
        if self.engine and self.engine.tokens < self.longest_sequence:
            yield (
                f"engines: the KV cache holds {self.engine.tokens:,} tokens, but one prompt with its response may have "
                f"{self.longest_sequence:,}"
            )

    def _host_problems(self) -> Iterator[str]:
        if self.host_limit and self.host.total > self.host_limit:
            need, limit = self.host.total / GIB, self.host_limit / GIB
            yield f"host memory: the run needs {need:.0f} GiB on a node that has {limit:.0f} GiB"

    def _cluster_problems(self) -> Iterator[str]:
        if self.cluster_gpus and self.gpus > self.cluster_gpus:
            yield f"the run needs {pluralize(self.gpus, 'GPU')}, but the cluster has {self.cluster_gpus} (cluster.nodes)"

    def as_json(self) -> dict[str, Any]:
        """Return the memory as plain values for JSON. All sizes are in bytes."""
        phases = [asdict(phase) | dict(total=phase.total, fits=phase.fits) for phase in self.phases]
        engine = asdict(self.engine) | dict(tokens=self.engine.tokens) if self.engine else None
        return dict(
            fits=self.fits,
            problems=self.problems,
            phases=phases,
            engine=engine,
            host=asdict(self.host) | dict(total=self.host.total, limit=self.host_limit),
            nodes=self.nodes,
            gpus=self.gpus,
            available=self.cluster_gpus,
            checkpoints=self.disk_bytes,
            worst_experts=self.worst_expert_bytes,
        )


def run_memory(
    config: Config,
    models: Mapping[str, RoleModel],
    parallel_sizes: EngineParallelSizes | None,
    pools: Pools,
    reference: bool,
) -> RunMemory:
    """Return the memory that the run of `config` needs.

    `parallel_sizes`: parallel sizes of an engine, or None if the run starts no engines. `reference`: whether the processes of
    the actor also store the weights of the reference.
    """
    trainers = {role: trainer_memory(m.shape, m.dims, m.settings) for role, m in models.items()}
    engine = _engine_rank(config, models["actor"], parallel_sizes, pools) if parallel_sizes else None
    phases = [m for pool in pools.pools for m in _gpu_phases(config, pool, trainers, engine)]
    actor = models["actor"]
    checkpoint = checkpoint_bytes(
        (m.trained_shape for m in models.values() if m.settings.trained), config.model.itemsize
    )
    return RunMemory(
        phases=tuple(phases),
        engine=engine,
        longest_sequence=sequence_tokens(config, actor.context),
        host=_host_memory(
            config, models, trainers, pools, checkpoint if config.checkpoint.every else 0, reference, engine
        ),
        host_limit=int(config.cluster.hardware.host_memory_gb * GIB),
        nodes=ceil(pools.size / slots_per_node(config.cluster, pools)),
        gpus=pools.size,
        cluster_gpus=sum(gpus_of_nodes(config.cluster)) if config.cluster.nodes else 0,
        disk_bytes=checkpoint_disk_bytes(
            config, {m: models[m].trained_shape for m in models if models[m].settings.trained}
        ),
        worst_expert_bytes=_worst_expert_bytes(actor, trainers["actor"]),
    )


def checkpoint_disk_bytes(config: Config, trained: Mapping[str, ModelShape]) -> int:
    """Return the bytes of all checkpoints that are on disk at one time, including one that is being written.

    `trained`: shapes of the models that checkpoints contain, by role. A run without periodic checkpoints (checkpoint.every=0)
    writes one checkpoint at its end if trainer.save is set.
    """
    checkpoint, total = config.checkpoint, 0
    for role, shape in trained.items():
        kept = checkpoint.keep_last_critic if role == "critic" else None
        count = (kept or checkpoint.keep_last) + checkpoint.keep_best + 1
        total += (count if checkpoint.every else int(config.trainer.save)) * checkpoint_bytes(
            [shape], config.model.itemsize
        )
    return total


def _worst_expert_bytes(actor: RoleModel, memory: TrainerMemory) -> int:
    """Return the additional activation bytes of a rank if its experts received all tokens of each layer."""
    if not actor.shape.num_experts or actor.dims.ep == 1:
        return 0
    worst = replace(actor.settings, imbalance=float(actor.dims.ep))
    return trainer_memory(actor.shape, actor.dims, worst).by_phase["update"] - memory.by_phase["update"]


def model_shape(config: Config, hf: HFConfig, arch: Architecture) -> ModelShape:
    """Return the tensor sizes of a model of a run. `hf`: config.json of the model. `arch`: its sizes and parts."""
    dropout = config.megatron.get("hidden_dropout", 0.0)
    return ModelShape.of(family_of(hf), arch, config.model.train_vision, hidden_dropout=dropout)


def trainer_settings(config: Config, context: int, role: str = "actor", **fields: Any) -> TrainerSettings:
    """Read from a config the settings that determine the memory of a trainer rank. `role`: role of the rank's model.

    `context`: number of tokens of the longest sequence that the model accepts. `fields`: further fields of TrainerSettings.
    """
    budgets, longest = token_budgets(config, role), sequence_tokens(config, context)
    ddp = config.trainer.ddp | (config.critic.ddp if role == "critic" else {})
    return TrainerSettings.with_megatron(
        config.megatron,
        max_tokens=max(budgets.train, longest),
        forward_tokens=max(budgets.forward, longest),
        itemsize=config.model.itemsize,
        gradient_bytes=GRADIENT_BYTES if ddp.get("grad_reduce_in_fp32", True) else config.model.itemsize,
        logprob_chunk=config.trainer.logprob_chunk,
        keys_per_token=keys_per_token(config, context, budgets.train),
        forward_keys_per_token=keys_per_token(config, context, budgets.forward),
        imbalance=config.plan.expert_imbalance,
        longest=longest,
        bucket_bytes=config.weight_sync.bucket_bytes,
        image_fraction=_prompt_tokens(config, context) / longest,
        **fields,
    )


def sequence_tokens(config: Config, context: int) -> int:
    """Return the largest number of tokens in a prompt and its response together, limited by the context of the model."""
    return _prompt_tokens(config, context) + config.rollout.max_response_tokens


def _prompt_tokens(config: Config, context: int) -> int:
    response = config.rollout.max_response_tokens
    return min(config.plan.prompt_tokens or config.data.max_prompt_tokens or response, max(1, context - response))


def keys_per_token(config: Config, context: int, max_tokens: int) -> float:
    """Return how many keys attention reads in a pack of `max_tokens` tokens, divided by the number of these tokens.

    Each of the responses that share a prompt reads the keys of the prompt again.
    """
    if not config.trainer.share_prompts:
        return 1.0
    prompt, response = _prompt_tokens(config, context), config.rollout.max_response_tokens
    room = (max_tokens - prompt) // response
    sharing = max(1, min(config.rollout.responses_per_prompt, room))
    return (prompt + sharing * (prompt + response)) / (prompt + sharing * response) if sharing > 1 else 1.0


def _gpu_limit(hardware: HardwareConfig) -> int:
    return int(hardware.gpu_memory_gb * GIB)


def _reserve(config: Config) -> int:
    return int(config.plan.reserve_gb * GIB) if config.cluster.hardware.gpu_memory_gb else 0


def _engine_rank(
    config: Config, actor: RoleModel, parallel_sizes: EngineParallelSizes, pools: Pools
) -> EngineRankMemory:
    """Return the memory of an engine rank. Trainers that share its GPU are offloaded before the engine starts."""
    itemsize = config.model.itemsize
    limit = _gpu_limit(config.cluster.hardware)
    free = limit - len(pools.by_role["engines"].demands) * _reserve(config)
    fraction = config.sglang.get("mem_fraction_static") or DEFAULT_MEM_FRACTION
    fp8 = config.sglang.get("quantization") == "fp8"
    rank = engine_memory(actor.shape, parallel_sizes, itemsize, free, fraction, kv_itemsize(config, itemsize), fp8)
    if config.weight_sync.lora == LoraSync.adapter and (adapters := actor.settings.adapters):
        matrices = {p.name.split(".")[-2] for p in adapters.parameters}
        slot = adapter_slot_bytes(actor.shape, parallel_sizes, itemsize, config.lora.rank, matrices)
        rank = rank.with_adapters(adapter_slots(config.rollout.staleness) * slot)
    rank = with_states(rank, actor.shape, parallel_sizes, config.sglang)
    max_tokens = config.sglang.get("max_total_tokens") or (0 if limit else CPU_KV_TOKENS)
    if not max_tokens:
        return rank
    most = max_tokens * rank.token_bytes + rank.states
    return replace(rank, kv_cache=min(most, rank.kv_cache) if limit else most)


def kv_itemsize(config: Config, itemsize: int) -> int:
    """Return the bytes of one element of the KV cache. The default is `itemsize`: the bytes of one element of a model weight."""
    return 1 if "fp8" in str(config.sglang.get("kv_cache_dtype", "auto")) else itemsize


def _gpu_phases(
    config: Config, pool: Pool, trainers: Mapping[str, TrainerMemory], engine: EngineRankMemory | None
) -> Iterator[GpuPhase]:
    limit, reserve = _gpu_limit(config.cluster.hardware), {"reserve": _reserve(config) * len(pool.demands)}
    shared = len(pool.demands) > 1
    buckets = (
        {"buckets": SENDER_BUCKETS * config.weight_sync.bucket_bytes} if engine and "actor" in pool.demands else {}
    )
    sharing = engine if shared and "engines" in pool.demands else None  # the engine, if other roles share its GPUs
    offloaded = {"engine's weights": sharing.adapters} if sharing and sharing.adapters else {}
    servers = [role for role in pool.demands if role not in trainers]  # engines, and models that SGLang serves
    for role in pool.demands:
        if role in servers:
            if role == servers[0]:  # one GpuPhase for all servers, because they are in memory at the same time
                parts = _server_parts(config, servers, engine, limit)
                own_buckets = buckets if "engines" in servers else {}
                yield GpuPhase(pool.name, ", ".join(servers), "rollout", parts | own_buckets | reserve, limit, "each")
            continue
        memory = trainers[role]
        for phase in memory.by_phase:
            if phase == "weight_sync" and (role != "actor" or sharing):
                continue
            rank = max(memory.stages, key=lambda stage: stage.phases()[phase])
            parts = _trainer_parts(rank, phase)
            yield GpuPhase(
                pool.name, role, phase, parts | offloaded | buckets | reserve, limit, _rank_name(memory, rank)
            )
        if role == "actor" and sharing:
            rank = max(memory.stages, key=lambda stage: stage.push)
            in_engine = sharing.weights + sharing.adapters
            parts = {"weights": rank.weights, "engine's weights": in_engine, "buckets": rank.buckets}
            parts |= {"working": rank.merged} if rank.merged else {}
            name = _rank_name(memory, rank)
            yield GpuPhase(pool.name, "actor, engines", "weight_sync", parts | reserve, limit, name)


def _server_parts(config: Config, servers: list[str], engine: EngineRankMemory | None, limit: int) -> dict[str, int]:
    """Return the bytes of each kind of memory on a GPU, for the SGLang servers of these roles. `limit`: memory of the GPU."""
    parts: dict[str, int] = {}
    for role in servers:
        if role == "engines":
            assert engine is not None, "a pool has engines only if the run starts them"
            parts |= {"weights": engine.weights + engine.adapters, "kv cache": max(0, engine.kv_cache)}
        else:
            fraction = config.roles[role].get("sglang", {}).get("mem_fraction_static") or DEFAULT_MEM_FRACTION
            parts[f"{role}: weights and kv cache"] = int(limit * fraction)
    return parts


def _trainer_parts(rank: TrainerRankMemory, phase: str) -> dict[str, int]:
    state = dict(weights=rank.weights, gradients=rank.state.gradients, optimizer=rank.state.optimizer)
    temporary = {
        "update": {"activations": rank.saved, "working": rank.working},
        "score": {"working": rank.scoring},
        "weight_sync": {"working": rank.merged},
    }[phase]
    return {name: value for name, value in (state | temporary).items() if value}


def _rank_name(memory: TrainerMemory, rank: TrainerRankMemory) -> str:
    return f"stage {rank.stage}" if len(memory.stages) > 1 else "each"


def _host_memory(
    config: Config,
    models: Mapping[str, RoleModel],
    trainers: Mapping[str, TrainerMemory],
    pools: Pools,
    checkpoint: int,
    reference: bool,
    engine: EngineRankMemory | None,
) -> HostMemory:
    """Return the host memory of the node that needs most: a node with as many ranks of each role as possible."""
    node_slots = slots_per_node(config.cluster, pools)
    on_node = {role: min(node_slots, pool.demands[role].slots) for role, pool in pools.by_role.items()}
    shared = {role for roles in pools.colocated_roles for role in roles}
    offloaded = sum(
        on_node[role] * max(rank.state.offloaded for rank in memory.stages)
        for role, memory in trainers.items()
        if role in shared
    )
    actor, rollout = models["actor"], config.rollout
    keeps_copy = config.weight_sync.lora == LoraSync.adapter or config.sglang.get("enable_weights_cpu_backup")
    rank_weights = max(_reference_copy_bytes(rank, actor.settings) for rank in trainers["actor"].stages)
    weights, world_size = actor.shape.num_parameters * actor.settings.itemsize, actor.dims.world_size
    responses = rollout.prompts_per_step * rollout.responses_per_prompt
    tokens_in_flight = responses * sequence_tokens(config, actor.context) * (1 + rollout.staleness)
    return HostMemory(
        processes=PROCESS_BYTES * (sum(on_node.values()) + 2),
        offloaded=offloaded,
        reference=2 * on_node["actor"] * pinned_bytes(rank_weights) if reference else 0,
        checkpoint=checkpoint * on_node["actor"] // world_size,
        delta=weights * on_node["actor"] // world_size if config.weight_sync.delta else 0,
        rollouts=tokens_in_flight * ROLLOUT_TOKEN_BYTES,
        teachers=_teacher_bytes(config, actor, on_node["actor"]),
        engines=on_node["engines"] * engine.weights if engine and "engines" in shared and keeps_copy else 0,
        pixels=_pixel_bytes(config, actor, on_node["actor"]),
    )


def _pixel_bytes(config: Config, actor: RoleModel, ranks: int) -> int:
    """Return the host memory of pixel values on a node with `ranks` actor ranks, as if all tokens of prompts were image tokens.

    Pixel values are float32. Ray's object store has the pixel values of each prompt once. Each rank has the pixel values of its
    replica's share of the prompts of a step.
    """
    if (tower := actor.shape.tower) is None:
        return 0
    prompt = _prompt_tokens(config, actor.context) * tower.patches * tower.values * FLOAT32_BYTES
    step = config.rollout.prompts_per_step * prompt
    return step * (1 + config.rollout.staleness) + ranks * step // actor.dims.dp


def _reference_copy_bytes(rank: TrainerRankMemory, settings: TrainerSettings) -> int:
    """Return the bytes of the weights that the reference overwrites on the GPU. With LoRA, these are only the adapters."""
    if settings.adapters is None:
        return rank.state.weights
    return rank.state.gradients // settings.gradient_bytes * settings.itemsize


def _teacher_bytes(config: Config, actor: RoleModel, ranks: int) -> int:
    """Return the host memory that distillation over the whole vocabulary needs on a node with `ranks` actor ranks.

    An actor rank with a vocabulary shard of the output layer also keeps the same shard of each teacher's output layer. The
    teachers compute hidden states for all sampled tokens of a step.
    """
    if not (sizes := actor.settings.teacher_hidden):
        return 0
    rollout, dims = config.rollout, actor.dims
    rows = min(ranks, dims.world_size // dims.pp) * ceil(actor.shape.vocab / dims.tp)
    tokens = rollout.prompts_per_step * rollout.responses_per_prompt * rollout.max_response_tokens
    return (rows * sum(sizes) + tokens * ranks // dims.world_size * max(sizes)) * actor.settings.itemsize
