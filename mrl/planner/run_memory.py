"""Memory that a run needs and that its machines have: GPU memory in each phase of a step, host memory, and disk.

A GpuPhase is the memory of one GPU of a resource pool during one phase. It counts the memory of the role that works in this
phase, and the memory that the offloaded roles of the same pool keep on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from mrl.config.process_schema import HardwareConfig
from mrl.config.schema import Config
from mrl.placement.resource_pools import Pool, Pools, gpus_of_nodes, slots_per_node
from mrl.planner.model_shape import ModelShape, ParameterShape
from mrl.planner.trainer_memory import SENDER_BUCKETS, TrainerMemory, TrainerRankMemory, TrainerSettings, trainer_memory
from mrl.planner.trainer_state_bytes import BIAS_BYTES, checkpoint_bytes
from mrl.weight_sync.engine_layout import VOCAB_PADDING, Topology
from parallel.dims import ParallelDims

GIB = 1 << 30
CPU_KV_TOKENS = 65536  # size of an engine's KV cache on a CPU if sglang.max_total_tokens is not set
# Host memory of a process with torch, CUDA and its libraries. The number is assumed; it is not measured with GPUs.
PROCESS_BYTES = 3 << 30
ROLLOUT_TOKEN_BYTES = 24  # of a sampled token in Ray's object store: id, log-probability, mask, and columns added later


@dataclass(frozen=True)
class RoleModel:
    """The model of one role, and its layout."""

    shape: ModelShape
    dims: ParallelDims
    settings: TrainerSettings
    context: int  # tokens of the longest sequence that the model accepts


@dataclass(frozen=True)
class GpuPhase:
    """Memory of one GPU of a pool during one phase of a step."""

    pool: str
    role: str
    phase: str
    parts: Mapping[str, int]  # bytes by kind
    limit: int  # bytes of the GPU; 0: unknown
    where: str = ""  # rank that needs the most memory

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return not self.limit or self.total <= self.limit


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory on the busiest node."""

    processes: int
    offloaded: int  # offloaded models, in pinned memory
    reference: int  # weights of the reference model
    checkpoint: int  # copy that an asynchronous checkpoint is written from
    delta: int  # the last pushed version, if the weight sync sends differences
    rollouts: int  # tokens of the steps in flight, in Ray's object store

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class RunMemory:
    """Memory of all GPUs, nodes and the disk of a run."""

    phases: tuple[GpuPhase, ...]
    engine: EngineRankMemory | None
    sequence: int  # tokens of the longest expected prompt with its response
    host: HostMemory
    host_limit: int  # bytes of one node; 0: unknown
    nodes: int
    gpus: int  # that the run needs
    available: int  # GPUs of the cluster; 0: unknown
    disk: int  # bytes of all checkpoints that exist at one time
    worst_experts: int  # additional activation bytes if all tokens of each layer went to one rank; 0 without experts

    @cached_property
    def problems(self) -> list[str]:
        """One line for each part of the run that does not fit."""
        return [*self._gpu_problems(), *self._kv_cache_problems(), *self._host_problems(), *self._cluster_problems()]

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def excess(self) -> int:
        """Bytes by which the worst phase exceeds its GPU; 0 or less if all phases fit."""
        return max((phase.total - phase.limit for phase in self.phases if phase.limit), default=0)

    def _gpu_problems(self) -> Iterator[str]:
        for m in self.phases:
            if not m.fits:
                over = (m.total - m.limit) / GIB
                need = f"{m.total / GIB:.1f} GiB of {m.limit / GIB:.1f} GiB"
                yield f"{m.role} during {m.phase}: {need}, {over:.1f} GiB too much"

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
            yield f"the run needs {self.gpus} GPUs, the cluster has {self.cluster_gpus} (cluster.nodes)"

    def as_json(self) -> dict[str, Any]:
        """Return plain values; all sizes in bytes."""
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
    config: Config, models: Mapping[str, RoleModel], topology: Topology | None, pools: Pools, reference: bool
) -> RunMemory:
    """Count the memory of the run that `config` describes.

    `topology`: layout of an engine; None if the run starts no engine. `reference`: whether the actor keeps the reference weights.
    """
    trainers = {role: trainer_memory(m.shape, m.dims, m.settings) for role, m in models.items()}
    engine = _engine_rank(config, models["actor"], topology, pools) if topology else None
    phases = [m for pool in pools.pools for m in _gpu_phases(config, pool, trainers, engine)]
    actor = models["actor"]
    checkpoint = checkpoint_bytes((m.shape for m in models.values() if m.settings.trained), config.model.itemsize)
    return RunMemory(
        phases=tuple(phases),
        engine=engine,
        sequence=sequence_tokens(config, actor.context),
        host=_host_memory(config, models, trainers, pools, checkpoint if config.checkpoint.every else 0, reference),
        host_limit=int(config.cluster.hardware.host_memory_gb * GIB),
        nodes=ceil(pools.size / slots_per_node(config.cluster, pools)),
        gpus=pools.size,
        available=sum(gpus_of_nodes(config.cluster)) if config.cluster.nodes else 0,
        disk=checkpoint * max_checkpoints_on_disk(config),
        worst_experts=_worst_expert_bytes(actor, trainers["actor"]),
    )


def max_checkpoints_on_disk(config: Config) -> int:
    """Return the largest number of checkpoints on disk: the kept ones, and one that is being written.

    A run without periodic checkpoints (checkpoint.every=0) writes one at its end if trainer.save is set.
    """
    if not config.checkpoint.every:
        return int(config.trainer.save)
    return config.checkpoint.keep_last + config.checkpoint.keep_best + 1


def _worst_expert_bytes(actor: RoleModel, memory: TrainerMemory) -> int:
    """Return the additional activation bytes of the busiest rank if all tokens of each layer went to its experts."""
    if not actor.shape.num_experts or actor.dims.ep == 1:
        return 0
    worst = replace(actor.settings, imbalance=float(actor.dims.ep))
    return trainer_memory(actor.shape, actor.dims, worst).by_phase["update"] - memory.by_phase["update"]


def trainer_settings(config: Config, context: int, **fields: Any) -> TrainerSettings:
    """Read the settings of a trainer's memory from a config.

    `context`: tokens of the longest sequence that the model accepts. `fields`: further fields of TrainerSettings.
    """
    return TrainerSettings.with_megatron(
        config.megatron,
        max_tokens=max(config.trainer.max_tokens_per_micro_batch, sequence_tokens(config, context)),
        itemsize=config.model.itemsize,
        logprob_chunk=config.trainer.logprob_chunk,
        keys_per_token=keys_per_token(config, context),
        imbalance=config.plan.expert_imbalance,
        bucket_bytes=config.weight_sync.bucket_bytes,
        **fields,
    )


def sequence_tokens(config: Config, context: int) -> int:
    """Return the tokens of the longest response with its prompt, limited by the model's context."""
    return _prompt_tokens(config, context) + config.rollout.max_response_tokens


def _prompt_tokens(config: Config, context: int) -> int:
    response = config.rollout.max_response_tokens
    return min(config.plan.prompt_tokens or config.data.max_prompt_tokens or response, max(1, context - response))


def keys_per_token(config: Config, context: int) -> float:
    """Return the keys that attention reads per token of a pack. Responses that share a prompt each read its keys again."""
    if not config.trainer.share_prompts:
        return 1.0
    prompt, response = _prompt_tokens(config, context), config.rollout.max_response_tokens
    room = (config.trainer.max_tokens_per_micro_batch - prompt) // response
    sharing = max(1, min(config.rollout.responses_per_prompt, room))
    return (prompt + sharing * (prompt + response)) / (prompt + sharing * response) if sharing > 1 else 1.0


def _gpu_limit(hardware: HardwareConfig) -> int:
    return int(hardware.gpu_memory_gb * GIB)


def _reserve(config: Config) -> int:
    return int(config.plan.reserve_gb * GIB) if config.cluster.hardware.gpu_memory_gb else 0


def _engine_rank(config: Config, actor: RoleModel, topology: Topology, pools: Pools) -> EngineRankMemory:
    """Return the memory of an engine rank. The trainers that share its GPU are offloaded when it starts."""
    itemsize = config.model.itemsize
    limit = _gpu_limit(config.cluster.hardware)
    free = limit - len(pools.by_role["engines"].demands) * _reserve(config)
    fraction = config.sglang.get("mem_fraction_static") or DEFAULT_MEM_FRACTION
    rank = engine_memory(actor.shape, topology, itemsize, free, fraction, kv_itemsize(config, itemsize))
    max_tokens = config.sglang.get("max_total_tokens") or (0 if limit else CPU_KV_TOKENS)
    if not max_tokens:
        return rank
    most = max_tokens * rank.token_bytes
    return replace(rank, kv_cache=min(most, rank.kv_cache) if limit else most)


def kv_itemsize(config: Config, itemsize: int) -> int:
    """Return the bytes of one element of the KV cache. The default is `itemsize`, the bytes of one weight."""
    return 1 if "fp8" in str(config.sglang.get("kv_cache_dtype", "auto")) else itemsize


def _gpu_phases(
    config: Config, pool: Pool, trainers: Mapping[str, TrainerMemory], engine: EngineRankMemory | None
) -> Iterator[GpuPhase]:
    limit, reserve = _gpu_limit(config.cluster.hardware), {"context": _reserve(config) * len(pool.demands)}
    shared = len(pool.demands) > 1
    buckets = (
        {"buckets": SENDER_BUCKETS * config.weight_sync.bucket_bytes} if engine and "actor" in pool.demands else {}
    )
    for role in pool.demands:
        if role == "engines":
            assert engine is not None, "a pool has engines only if the run starts them"
            parts = {"weights": engine.weights, "kv cache": max(0, engine.kv_cache)}
            yield GpuPhase(pool.name, role, "rollout", parts | buckets | reserve, limit, "each")
            continue
        memory = trainers[role]
        for phase in memory.by_phase:
            if phase == "weight_sync" and (role != "actor" or (shared and "engines" in pool.demands)):
                continue
            rank = max(memory.stages, key=lambda stage: stage.phases()[phase])
            parts = _trainer_parts(rank, phase)
            yield GpuPhase(pool.name, role, phase, parts | buckets | reserve, limit, _rank_name(memory, rank))
        if role == "actor" and engine and shared and "engines" in pool.demands:
            rank = max(memory.stages, key=lambda stage: stage.push)
            parts = {"weights": rank.state.weights, "engine's weights": engine.weights, "buckets": rank.buckets}
            where = _rank_name(memory, rank)
            yield GpuPhase(pool.name, "actor, engines", "weight_sync", parts | reserve, limit, where)


def _trainer_parts(rank: TrainerRankMemory, phase: str) -> dict[str, int]:
    state = dict(weights=rank.state.weights, gradients=rank.state.gradients, optimizer=rank.state.optimizer)
    temporary = {
        "update": {"activations": rank.saved, "working": rank.working},
        "score": {"working": rank.scoring},
        "weight_sync": {},
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
) -> HostMemory:
    """Return the host memory of the busiest node, which has as many ranks of each role as a node can have."""
    per_node = slots_per_node(config.cluster, pools)
    on_node = {role: min(per_node, pool.demands[role].slots) for role, pool in pools.by_role.items()}
    shared = {role for roles in pools.colocated_roles for role in roles}
    offloaded = sum(
        on_node[role] * max(rank.state.offloaded for rank in memory.stages)
        for role, memory in trainers.items()
        if role in shared
    )
    rank_weights = max(rank.state.weights for rank in trainers["actor"].stages)
    actor, rollout = models["actor"], config.rollout
    weights, world_size = actor.shape.num_parameters * actor.settings.itemsize, actor.dims.world_size
    responses = rollout.prompts_per_step * rollout.responses_per_prompt
    tokens_in_flight = responses * sequence_tokens(config, actor.context) * (1 + rollout.staleness)
    return HostMemory(
        processes=PROCESS_BYTES * (sum(on_node.values()) + 2),
        offloaded=offloaded,
        reference=on_node["actor"] * rank_weights if reference else 0,
        checkpoint=checkpoint * on_node["actor"] // world_size,
        delta=weights * on_node["actor"] // world_size if config.weight_sync.delta else 0,
        rollouts=tokens_in_flight * ROLLOUT_TOKEN_BYTES,
    )


DEFAULT_MEM_FRACTION = (
    0.8  # share of GPU memory for an engine's weights and KV cache if sglang.mem_fraction_static is not set
)


@dataclass(frozen=True)
class EngineRankMemory:
    """Bytes of one engine rank on its GPU."""

    weights: int
    kv_cache: int  # bytes for keys and values; negative if the weights alone are too large
    token: int  # bytes of one token's keys and values

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds, over all running requests."""
        return max(0, self.kv_cache) // self.token

    @property
    def total(self) -> int:
        """Bytes that the rank allocates when it starts."""
        return self.weights + max(0, self.kv_cache)


def engine_memory(
    shape: ModelShape, topology: Topology, itemsize: int, free: int, fraction: float, kv_itemsize: int | None = None
) -> EngineRankMemory:
    """Return the memory of a rank that has `free` bytes on its GPU and uses a `fraction` of them for weights and KV cache.

    `fraction`: sglang.mem_fraction_static. The rest of the memory is for activations and CUDA graphs.
    """
    token = kv_bytes(shape, topology, kv_itemsize or itemsize)
    weights = engine_weights(shape, topology, itemsize)
    return EngineRankMemory(weights, int(free * fraction) - weights, token)


def kv_bytes(shape: ModelShape, topology: Topology, itemsize: int) -> int:
    """Return the bytes of one token's keys and values on one rank, over all layers.

    If there are fewer key/value heads than ranks, several ranks have the same head. Latent attention caches one compressed vector
    per token, and every rank has a full copy of it.
    """
    if shape.has_latent_attention:
        return shape.num_layers * (shape.kv_lora + shape.rotary_dim) * itemsize
    return shape.num_layers * 2 * _kv_heads(shape, topology) * shape.head_dim * itemsize


def engine_weights(shape: ModelShape, topology: Topology, itemsize: int) -> int:
    """Return the bytes of the weights of one rank; tied embeddings count once."""
    return sum(engine_weight_parts(shape, topology, itemsize))


def engine_weight_parts(shape: ModelShape, topology: Topology, itemsize: int) -> tuple[int, int]:
    """Return the bytes of the weights of one rank: (all but routed experts, routed experts)."""
    moe = sum(shape.moe)
    layers = {"always": shape.num_layers, "dense": shape.num_layers - moe, "moe": moe}
    dense, experts = moe * sum(p.numel for p in shape.buffers) * BIAS_BYTES, 0
    for p in shape.parameters:
        if p.location == "expert":
            local_experts = shape.num_experts // topology.ep
            experts += layers[p.present_in] * (p.numel // (topology.tp // topology.ep)) * local_experts * itemsize
        else:
            copies = layers[p.present_in] if p.location == "layer" else 1
            dense += copies * _rank_numel(shape, p, topology) * itemsize
    return dense, experts


def _rank_numel(shape: ModelShape, p: ParameterShape, topology: Topology) -> int:
    """Count the elements of a parameter on one rank. Data-parallel attention shards its parameters over fewer ranks."""
    if not p.is_sharded:
        return p.numel
    in_attention = p.name.startswith("self_attention.") or p.location == "first"
    ranks = topology.tp // topology.dp if in_attention else topology.tp
    if p.is_vocabulary:
        return _vocabulary_rows(p.shape[0], ranks) * p.shape[1]
    if p.name.startswith("self_attention.linear_qkv."):
        rows = (shape.num_heads // ranks + 2 * _kv_heads(shape, topology)) * shape.head_dim
        return rows * p.numel // p.shape[0]
    return p.numel // ranks


def _kv_heads(shape: ModelShape, topology: Topology) -> int:
    return max(1, shape.num_kv_heads // (topology.tp // topology.dp))


def _vocabulary_rows(rows: int, ranks: int) -> int:
    padded = -(-rows // VOCAB_PADDING) * VOCAB_PADDING
    if padded % ranks:
        padded = -(-rows // (VOCAB_PADDING * ranks)) * VOCAB_PADDING * ranks
    return padded // ranks
