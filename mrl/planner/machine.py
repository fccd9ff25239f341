"""GPUs and the links between them in plain units, as they are counted with: the vendor's numbers times a share of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.config.schema import ClusterConfig, PlanConfig
from mrl.planner.memory.run import GIB

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
