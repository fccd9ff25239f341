"""Input of the layout search: the speeds of a GPU cluster, and the layouts of a model that the search considers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from models.architecture import Architecture
from mrl.config.process_schema import ClusterConfig
from mrl.config.schema import PlanConfig
from mrl.planner.model_shape import ModelShape
from mrl.planner.run_memory import GIB
from mrl.planner.trainer_memory import cached_pipeline_stages
from parallel.dims import ParallelDims

PROCESSES_PER_GPU = 2  # a trainer rank and an engine rank; plan.reserve_gb of GPU memory is subtracted for each of them
# Smallest number of tokens on a context-parallel rank that the search considers. With fewer tokens, communication takes longer
# than the saved computation.
MIN_CP_TOKENS = 1024


@dataclass(frozen=True)
class GpuCluster:
    """Number of GPUs, and the memory and the attained speeds of one GPU and its links."""

    gpus: int
    gpus_per_node: int
    memory_bytes: float  # memory of a GPU that a trainer rank or an engine rank can use
    matmul_flops_per_s: float
    attention_flops_per_s: float
    expert_flops_per_s: float
    hbm_bytes_per_s: float  # between a GPU and its own memory
    nvlink_bytes_per_s: float  # of one GPU in each direction
    network_bytes_per_s: float  # of one GPU in each direction
    pcie_bytes_per_s: float  # between one GPU and its host in each direction
    latency_s: float  # fixed seconds of a collective
    message_s: float  # fixed seconds of a message of the weight sync

    @classmethod
    def of(cls, cluster: ClusterConfig, plan: PlanConfig) -> GpuCluster:
        """Return the cluster of a config. Its speeds are the vendor's speeds, multiplied by the efficiencies in `plan`.

        `plan` also contains pcie_bytes_per_s and the latencies, which are not multiplied.

        Raises ValueError if the config lacks a speed or the number of GPUs.
        """
        hardware, nodes, gpus_per_node = cluster.hardware, cluster.nodes, cluster.gpus_per_node
        for name in ("gpu_memory_gb", "tflops_bf16", "hbm_gb_per_s", "nvlink_gb_per_s"):
            if not getattr(hardware, name):
                raise ValueError(
                    f"cluster.hardware.{name}=0: the search needs the memory and the speeds of the GPUs; cluster=h100 (or a100, "
                    "h200, b200) sets them."
                )
        if not nodes or not gpus_per_node:
            raise ValueError(
                f"cluster.nodes={nodes}, cluster.gpus_per_node={gpus_per_node}: the search needs the number of GPUs; set both "
                "keys."
            )
        if not hardware.network_gb_per_s and nodes > 1:
            raise ValueError(
                "cluster.hardware.network_gb_per_s=0: the search needs the speed of the network between nodes, in GB/s."
            )
        efficiency = plan.efficiency
        flops = hardware.tflops_bf16 * 1e12
        nvlink = hardware.nvlink_gb_per_s / 2 * 1e9 * efficiency["bandwidth"]
        return cls(
            gpus=nodes * gpus_per_node,
            gpus_per_node=gpus_per_node,
            memory_bytes=(hardware.gpu_memory_gb - PROCESSES_PER_GPU * plan.reserve_gb) * GIB,
            matmul_flops_per_s=flops * efficiency["matmul"],
            attention_flops_per_s=flops * efficiency["attention"],
            expert_flops_per_s=flops * efficiency["experts"],
            hbm_bytes_per_s=hardware.hbm_gb_per_s * 1e9 * efficiency["bandwidth"],
            nvlink_bytes_per_s=nvlink,
            network_bytes_per_s=hardware.network_gb_per_s * 1e9 * efficiency["bandwidth"] or nvlink,
            pcie_bytes_per_s=plan.pcie_gb_per_s * 1e9,
            latency_s=plan.latency_us * 1e-6,
            message_s=plan.message_us * 1e-6,
        )

    def link_bytes_per_s(self, num_gpus: int) -> float:
        """Return the speed at which a GPU sends to other GPUs of its group. The group has `num_gpus` neighboring GPUs.

        The group uses NVLink if it fits on one node, else the network.
        """
        return self.nvlink_bytes_per_s if num_gpus <= self.gpus_per_node else self.network_bytes_per_s


@dataclass(frozen=True)
class ReplicaLayout:
    """Layout of one replica of a trained model. Methods get the number of replicas as the argument `dp`.

    If the layers do not divide evenly over the pipeline stages, the last stage has fewer layers than every other stage.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    last_layers: int = 0  # number of layers of the last stage; 0: as many as every other stage
    recompute: bool = False  # whether the backward pass recomputes the activations of all layers

    @property
    def gpus(self) -> int:
        """Number of GPUs of one replica."""
        return self.tp * self.pp * self.cp

    @property
    def replica_multiple(self) -> int:
        """The number of replicas must be a multiple of this number.

        A pipeline stage has tp x cp ranks for each replica. These ranks must form whole groups of ep x etp ranks for experts.
        """
        expert_ranks = self.ep * self.etp
        return expert_ranks // gcd(expert_ranks, self.tp * self.cp)

    @property
    def uneven(self) -> tuple[tuple[str, int], ...]:
        """Megatron's fields that give the last pipeline stage fewer layers. Empty if all stages have equally many layers."""
        return (("num_layers_in_last_pipeline_stage", self.last_layers),) if self.last_layers else ()

    def dims(self, dp: int) -> ParallelDims:
        """Return the parallel sizes of a model with `dp` replicas of this layout."""
        etp = None if self.etp == self.tp else self.etp
        return ParallelDims(self.tp, self.pp, self.vpp, self.cp, dp, self.ep, etp)

    def megatron(self) -> dict[str, Any]:
        """Return the fields of the config's section `megatron` that select this layout."""
        fields: dict[str, Any] = dict(self.uneven)
        if self.recompute:
            fields |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        return fields

    def overrides(self, dp: int, has_experts: bool) -> dict[str, Any]:
        """Return the config keys that select this layout with `dp` replicas."""
        sizes = dict(tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, dp=dp, ep=self.ep)
        keys: dict[str, Any] = {
            f"parallel.{name}": size for name, size in sizes.items() if size > 1 or name in ("tp", "dp")
        }
        if has_experts and self.etp != self.tp:
            keys["parallel.etp"] = self.etp
        return keys | {f"megatron.{name}": value for name, value in self.megatron().items()}

    def stages(self, moe: tuple[bool, ...]) -> list[tuple[int, int]]:
        """Return (number of dense layers, number of layers with experts) of each pipeline stage.

        `moe`: [layers] whether the layer has experts.
        """
        stages = cached_pipeline_stages(len(moe), self.pp, self.vpp, self.uneven)
        counts = [(sum(v.layers for v in stage), sum(v.moe_layers(moe) for v in stage)) for stage in stages]
        return [(layers - with_experts, with_experts) for layers, with_experts in counts]

    def __str__(self) -> str:
        sizes = dict(tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, ep=self.ep)
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        words += [f"etp{self.etp}"] if self.ep * self.etp > 1 and self.etp != self.tp else []
        return " ".join(words + ["recompute"] * self.recompute) or "one GPU"


@dataclass
class LayoutSpace:
    """The layouts of one model on one cluster that the search considers: cp is a power of 2, and etp is 1 or tp."""

    arch: Architecture
    shape: ModelShape
    cluster: GpuCluster
    longest: float  # tokens of the longest sequence
    fixed: Mapping[str, Any] = field(default_factory=dict)  # plan.fix: "tp", "mode", ... -> the only allowed value
    excluded: Counter[str] = field(default_factory=Counter)  # reason -> number of excluded layouts and sizes

    def layouts(self) -> Iterator[ReplicaLayout]:
        """Yield the layouts without recomputation, in a fixed order. Also updates `excluded`."""
        for tp in self._tensor_sizes():
            for pp, vpp, last in self._pipeline_sizes():
                if self._features > -(
                    -self.shape.num_layers // (pp * vpp)
                ):  # in an uneven layout, the last stage has fewer layers
                    self.excluded["features of the vision tower for several pipeline stages"] += 1
                    continue
                if not all(self.arch.indexer_layers[:: -(-self.shape.num_layers // (pp * vpp))]):
                    self.excluded["a pipeline stage whose first layer has no indexer"] += 1
                    continue
                for cp in self._context_sizes():
                    for ep, etp in self._expert_sizes(tp):
                        layout = ReplicaLayout(tp, pp, vpp, cp, ep, etp, last)
                        if layout.gpus * layout.replica_multiple > self.cluster.gpus:
                            self.excluded["needs more GPUs than there are"] += 1
                        else:
                            yield layout

    @property
    def _features(self) -> int:
        """Number of layers that get features of the vision tower. These first layers of the model must be in the first stage."""
        return self.arch.vision.num_features if self.arch.vision else 0

    def engine_tps(self) -> list[int]:
        """Return the possible numbers of GPUs of one engine.

        An engine uses whole nodes, or one of several equal parts of a node. Further rules come from
        mrl/weight_sync/engine_layout.py.
        """
        t, gpus_per_node = self.arch.transformer, self.cluster.gpus_per_node
        heads = t["num_attention_heads"]
        groups = heads if self.arch.has_latent_attention else t["num_query_groups"]
        return [
            tp
            for tp in self._allowed("engine_tp", _divisors(heads))
            if tp <= self.cluster.gpus
            and (groups % tp == 0 or tp % groups == 0)
            and all(width % tp == 0 for width in (*self._mlp_widths(), *self.arch.recurrent_heads.values()))
            and (gpus_per_node % tp == 0 or tp % gpus_per_node == 0)
        ]

    def _mlp_widths(self) -> list[int]:
        """Return the widths of MLPs and experts. An engine shards each of these widths over all its GPUs."""
        t = self.arch.transformer
        moe = [t["moe_ffn_hidden_size"]] if self.arch.num_experts else []
        return self._dense_widths() + moe + self._shared_widths()

    def _dense_widths(self) -> list[int]:
        return [self.arch.transformer["ffn_hidden_size"]] if self.shape.has_dense_layers else []

    def _shared_widths(self) -> list[int]:
        return [w] if (w := self.arch.transformer.get("moe_shared_expert_intermediate_size")) else []

    def _tensor_sizes(self) -> Iterator[int]:
        t = self.arch.transformer
        widths = (*self._dense_widths(), *self._shared_widths(), *self.arch.recurrent_heads.values())
        common = gcd(t["num_attention_heads"], t["num_query_groups"], *widths)
        for tp in self._allowed("tp", _divisors(common)):
            if tp > self.cluster.gpus_per_node or self.cluster.gpus_per_node % tp:
                self.excluded["tensor parallelism over more than one node"] += 1
            else:
                yield tp

    def _pipeline_sizes(self) -> Iterator[tuple[int, int, int]]:
        """Yield (pp, vpp, last_layers); see ReplicaLayout."""
        layers = self.shape.num_layers
        for pp in self._allowed("pp", range(1, min(layers, self.cluster.gpus) + 1)):
            per_stage = -(-layers // pp)
            last = layers - per_stage * (pp - 1)
            if last < 1:
                self.excluded["more pipeline stages than the layers fill"] += 1
            elif last != per_stage:
                if self.fixed.get("vpp", 1) == 1:
                    yield pp, 1, last
            else:
                for vpp in self._allowed("vpp", _divisors(per_stage) if pp > 1 else [1]):
                    yield pp, vpp, 0

    def _context_sizes(self) -> Iterator[int]:
        most = max(1.0, self.longest / MIN_CP_TOKENS)
        for cp in self._allowed("cp", [2**n for n in range(self.cluster.gpus.bit_length())]):
            if cp <= most or "cp" in self.fixed:
                yield cp
            else:
                self.excluded["sequences too short for context parallelism"] += 1

    def _expert_sizes(self, tp: int) -> Iterator[tuple[int, int]]:
        """Yield (ep, etp). An expert is sharded over as many ranks as other weights (etp = tp), or not sharded (etp = 1)."""
        if not self.arch.num_experts:
            yield 1, tp
            return
        for etp in self._allowed("etp", sorted({1, tp})):
            if self.arch.transformer["moe_ffn_hidden_size"] % etp == 0:
                for ep in self._allowed("ep", _divisors(self.arch.num_experts)):
                    yield ep, etp
            else:
                self.excluded["etp does not divide the width of the experts"] += 1

    def _allowed(self, name: str, sizes: Iterable[int]) -> list[int]:
        """Return the sizes that `fixed` allows."""
        return [size for size in sizes if self.fixed.get(name, size) == size]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
