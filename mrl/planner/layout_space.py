"""GPUs and the links between them in plain units, as they are counted with: the vendor's numbers times a share of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from models.spec import Architecture
from mrl.config.schema import ClusterConfig, PlanConfig
from mrl.planner.run_memory import GIB
from mrl.planner.sizes import ModelSizes
from parallel.dims import ParallelDims

# FROM: Every layout that a model and a number of GPUs allow, by the rules' closed forms; and how many each rule excludes. Pure.

SHARING = 2  # processes that keep plan.reserve_gb on a GPU besides: a trainer's and an engine's


@dataclass(frozen=True)
class Machine:
    """What one GPU does in a second, and how many there are."""

    gpus: int
    per_node: int
    memory_bytes: float  # of a GPU, for trainer or engine
    matmul_flops: float
    attention_flops: float
    expert_flops: float
    hbm_bytes: float
    nvlink_bytes: float  # each direction
    network_bytes: float  # each direction
    pcie_bytes: float
    latency_s: float  # of a collective, besides its bytes
    message_s: float  # of a message of the weight sync, besides its bytes

    @classmethod
    def of(cls, cluster: ClusterConfig, plan: PlanConfig) -> Machine:
        """Raises ValueError where the hardware is not known, or has no number of nodes."""
        hardware, nodes, per_node = cluster.hardware, cluster.nodes, cluster.gpus_per_node
        for name in ("gpu_memory_gb", "tflops_bf16", "hbm_gb_per_s", "nvlink_gb_per_s"):
            if not getattr(hardware, name):
                raise ValueError(
                    f"cluster.hardware.{name}=0: a layout is searched for known machines; cluster=h100 (or a100, h200, b200) "
                    "fills it in."
                )
        if not nodes or not per_node:
            raise ValueError(
                f"cluster.nodes={nodes}, cluster.gpus_per_node={per_node}: a layout is searched for so many GPUs; set both."
            )
        if not hardware.network_gb_per_s and nodes > 1:
            raise ValueError("cluster.hardware.network_gb_per_s=0: more than one node needs a network; set its GB/s.")
        share = plan.bandwidth_efficiency
        flops = hardware.tflops_bf16 * 1e12
        nvlink = hardware.nvlink_gb_per_s / 2 * 1e9 * share
        return cls(
            gpus=nodes * per_node,
            per_node=per_node,
            memory_bytes=(hardware.gpu_memory_gb - SHARING * plan.reserve_gb) * GIB,
            matmul_flops=flops * plan.matmul_efficiency,
            attention_flops=flops * plan.attention_efficiency,
            expert_flops=flops * plan.expert_efficiency,
            hbm_bytes=hardware.hbm_gb_per_s * 1e9 * share,
            nvlink_bytes=nvlink,
            network_bytes=hardware.network_gb_per_s * 1e9 * share or nvlink,
            pcie_bytes=plan.pcie_gb_per_s * 1e9,
            latency_s=plan.latency_us * 1e-6,
            message_s=plan.message_us * 1e-6,
        )

    def link(self, span: int) -> float:
        """Bytes a second of each of `span` neighbouring GPUs to the others: NVLink within a node, else the network."""
        return self.nvlink_bytes if span <= self.per_node else self.network_bytes


@dataclass(frozen=True)
class Layout:
    """How one replica is cut; `dims` adds the replicas."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    last_layers: int = 0  # of the last pipeline stage, the others have equally many; 0: all have
    recompute: bool = False  # every layer's activations are computed again in the backward pass

    @property
    def lane(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp * self.cp

    @property
    def expert_step(self) -> int:
        """Replicas come in multiples of this: experts are spread over whole copies."""
        need = self.ep * self.etp
        return need // gcd(need, self.tp * self.cp)

    def dims(self, dp: int) -> ParallelDims:
        """With `dp` replicas."""
        etp = None if self.etp == self.tp else self.etp
        return ParallelDims(self.tp, self.pp, self.vpp, self.cp, dp, self.ep, etp)

    def overrides(self, dp: int, has_experts: bool) -> dict[str, Any]:
        """The keys of a config that ask for it."""
        sizes = dict(tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, dp=dp, ep=self.ep)
        keys: dict[str, Any] = {
            f"parallel.{name}": size for name, size in sizes.items() if size > 1 or name in ("tp", "dp")
        }
        if has_experts and self.etp != self.tp:
            keys["parallel.etp"] = self.etp
        if self.last_layers:
            keys["megatron.num_layers_in_last_pipeline_stage"] = self.last_layers
        if self.recompute:
            keys |= {"megatron.recompute_granularity": "full", "megatron.recompute_method": "uniform"}
            keys["megatron.recompute_num_layers"] = 1
        return keys

    def stages(self, moe: tuple[bool, ...]) -> list[tuple[int, int]]:
        """(dense layers, layers with experts) of each pipeline stage."""
        if self.last_layers:
            each = (len(moe) - self.last_layers) // (self.pp - 1)
            parts = [moe[at * each : (at + 1) * each] for at in range(self.pp - 1)] + [moe[-self.last_layers :]]
        else:
            each = len(moe) // (self.pp * self.vpp)
            chunks = [moe[at * each : (at + 1) * each] for at in range(self.pp * self.vpp)]
            parts = [sum(chunks[at :: self.pp], ()) for at in range(self.pp)]
        return [(len(part) - sum(part), sum(part)) for part in parts]

    def __str__(self) -> str:
        sizes = dict(tp=self.tp, pp=self.pp, vpp=self.vpp, cp=self.cp, ep=self.ep)
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        words += [f"etp{self.etp}"] if self.ep * self.etp > 1 and self.etp != self.tp else []
        return " ".join(words + ["recompute"] * self.recompute) or "no cut"


LEAST_TOKENS = 1024  # of the longest sequence on a context-parallel rank; shorter parts are not worth their messages
FIXABLE = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "engine_tp", "num_engines", "mode", "placement")


@dataclass
class Space:
    """Layouts of one model on one machine."""

    arch: Architecture
    sizes: ModelSizes
    machine: Machine
    longest: float  # tokens of the longest sequence
    fixed: Mapping[str, Any] = field(default_factory=dict)  # of FIXABLE: the only value that is looked at
    excluded: Counter[str] = field(default_factory=Counter)  # by reason: layouts of one replica

    def layouts(self) -> Iterator[Layout]:
        """All of them, without recomputation, in one order; counts what it leaves out."""
        for tp in self._tensor():
            for pp, vpp, last in self._pipeline():
                for cp in self._context():
                    for ep, etp in self._experts(tp):
                        layout = Layout(tp, pp, vpp, cp, ep, etp, last)
                        if layout.lane * layout.expert_step > self.machine.gpus:
                            self.excluded["needs more GPUs than there are"] += 1
                        else:
                            yield layout

    def engine_tps(self) -> list[int]:
        """GPUs that one engine can have (mrl/weight_sync/engine_layout.py), in whole nodes or dividing one."""
        t, per_node = self.arch.transformer, self.machine.per_node
        heads = t["num_attention_heads"]
        groups = heads if self.arch.is_latent else t["num_query_groups"]
        return [
            tp
            for tp in self._kept("engine_tp", _divisors(heads))
            if tp <= self.machine.gpus
            and (groups % tp == 0 or tp % groups == 0)
            and all(width % tp == 0 for width in self._widths())
            and (per_node % tp == 0 or tp % per_node == 0)
        ]

    def _widths(self) -> list[int]:
        """Of MLPs, which engines cut over all of their GPUs."""
        t = self.arch.transformer
        dense = [] if all(self.sizes.moe) else [t["ffn_hidden_size"]]
        moe = [t["moe_ffn_hidden_size"]] if self.arch.num_experts else []
        return dense + moe + self._shared()

    def _shared(self) -> list[int]:
        return [w] if (w := self.arch.transformer.get("moe_shared_expert_intermediate_size")) else []

    def _tensor(self) -> Iterator[int]:
        t = self.arch.transformer
        dense = [] if all(self.sizes.moe) else [t["ffn_hidden_size"]]
        common = gcd(t["num_attention_heads"], t["num_query_groups"], *dense, *self._shared())
        for tp in self._kept("tp", _divisors(common)):
            if tp > self.machine.per_node or self.machine.per_node % tp:
                self.excluded["tensor parallelism beyond a node"] += 1
            else:
                yield tp

    def _pipeline(self) -> Iterator[tuple[int, int, int]]:
        """(pp, vpp, layers of the last stage, where it has others than the rest)."""
        layers = self.sizes.layers
        for pp in self._kept("pp", range(1, min(layers, self.machine.gpus) + 1)):
            each = -(-layers // pp)
            last = layers - each * (pp - 1)
            if last < 1:
                self.excluded["layers do not divide into so many stages"] += 1
            elif last != each:
                if self.fixed.get("vpp", 1) == 1:
                    yield pp, 1, last
            else:
                for vpp in self._kept("vpp", _divisors(each) if pp > 1 else [1]):
                    yield pp, vpp, 0

    def _context(self) -> Iterator[int]:
        most = max(1.0, self.longest / LEAST_TOKENS)
        for cp in self._kept("cp", [2**n for n in range(self.machine.gpus.bit_length())]):
            if cp <= most or "cp" in self.fixed:
                yield cp
            else:
                self.excluded["sequences too short to cut"] += 1

    def _experts(self, tp: int) -> Iterator[tuple[int, int]]:
        """(ep, etp): experts are cut as all else is, or not at all."""
        if not self.arch.num_experts:
            yield 1, tp
            return
        for etp in self._kept("etp", sorted({1, tp})):
            if self.arch.transformer["moe_ffn_hidden_size"] % etp == 0:
                for ep in self._kept("ep", _divisors(self.arch.num_experts)):
                    yield ep, etp
            else:
                self.excluded["experts' width does not divide"] += 1

    def _kept(self, name: str, sizes: Iterable[int]) -> list[int]:
        """Those sizes that the user has left open."""
        return [size for size in sizes if self.fixed.get(name, size) == size]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
