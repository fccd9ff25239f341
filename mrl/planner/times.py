"""Seconds of the trainers' part of a step under a layout: arithmetic, memory traffic, messages and the pipeline's bubble. Pure.

Every formula takes the numbers of replicas as an array, so that a search asks for all of them at once. Nothing overlaps but what
is stated to: mrl reduces gradients after the last backward pass, and gathers keys and values before attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrl.planner.machine import Machine
from mrl.planner.sizes import ModelSizes
from mrl.planner.workload import Workload
from parallel.dims import ParallelDims

Array = NDArray[np.float64]

PARTS = ("matmul", "attention", "experts", "tensor", "context", "dispatch", "pipeline", "gradients", "optimizer")
"""Where the trainers' seconds go. dispatch: experts' all-to-all; pipeline: bubble and messages between stages."""

BACKWARD = dict(matmul=2.0, attention=2.0, experts=2.0, tensor=1.5, context=2.0, dispatch=1.0, pipeline=1.0)
"""Seconds of a backward pass over those of a forward pass. tensor: inputs are gathered again for the weights' gradients."""

WEIGHT, GRADIENT = 2, 4  # bytes of a parameter in bfloat16, and of its summed gradient
STATE_TRAFFIC = 34  # bytes read and written for a parameter by AdamW: gradient, main weight and two moments, and the weight
STATE = 12  # bytes of a parameter's main weight and moments


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


@dataclass(frozen=True)
class TrainerTimes:
    """Seconds of a step's training, for each number of replicas."""

    update_s: Array  # forward and backward passes, gradients and optimizer
    score_s: Array  # forward passes for log-probabilities and values
    parts: Mapping[str, Array]  # both together, by PARTS

    @cached_property
    def total_s(self) -> Array:
        return self.update_s + self.score_s

    def at(self, place: int) -> dict[str, float]:
        """The parts of one number of replicas."""
        return {name: float(seconds[place]) for name, seconds in self.parts.items()}


def trainer_times(
    sizes: ModelSizes, layout: Layout, machine: Machine, work: Workload, replicas: NDArray[np.int64]
) -> TrainerTimes:
    """Seconds with each number of replicas; the layout must fit the model."""
    steps = work.mini_batches * work.epochs
    scoring = _passes(sizes, layout, machine, work, replicas, mini_batches=1, backward=False)
    updates = _passes(sizes, layout, machine, work, replicas, mini_batches=work.mini_batches, backward=True)
    ends = _optimizer_step(sizes, layout, machine, replicas)
    models = 1 + work.critic
    forwards = work.scoring_passes + work.critic
    parts = {name: forwards * seconds for name, seconds in scoring.items()}
    for name, seconds in (updates | ends).items():
        parts[name] = parts.get(name, 0.0) + models * steps * seconds
    score_s = np.asarray(forwards * sum(scoring.values()))
    return TrainerTimes(np.asarray(models * steps * sum((updates | ends).values())), score_s, parts)


def _passes(
    sizes: ModelSizes,
    layout: Layout,
    machine: Machine,
    work: Workload,
    replicas: NDArray[np.int64],
    *,
    mini_batches: int,
    backward: bool,
) -> dict[str, Array]:
    """Parts of one pass over a mini-batch through the pipeline, which its slowest stage paces."""
    share = np.maximum(work.tokens / (mini_batches * replicas), work.lengths.longest)  # a sequence stays in one replica
    count = np.ceil(share * work.packs / work.tokens)
    multiple = layout.pp if layout.vpp > 1 else 1
    count = np.ceil(count / multiple) * multiple
    slots = _slots(sizes, layout, machine, work, share / count, backward)
    totals = np.array([sum(slot.values()) for slot in slots])  # [stages, replicas]
    slowest = totals.argmax(axis=0)
    parts = {
        name: count * np.take_along_axis(np.array([slot[name] for slot in slots]), slowest[None], 0)[0]
        for name in slots[0]
    }
    parts["pipeline"] = parts["pipeline"] + (layout.pp - 1) / layout.vpp * totals.max(axis=0)
    return parts


def _slots(
    sizes: ModelSizes, layout: Layout, machine: Machine, work: Workload, tokens: Array, backward: bool
) -> list[dict[str, Array]]:
    """Parts of one micro-batch of so many tokens in each stage that differs from the others, all of its chunks together."""
    kinds = [(*counts, False) for counts in layout.stages(sizes.moe)]
    kinds[-1] = (*kinds[-1][:2], True)
    found = []
    for dense, moe, last in dict.fromkeys(kinds):
        parts = _forward(sizes, layout, machine, work, tokens, dense, moe, last)
        if backward:
            parts = {
                name: seconds * (1 + BACKWARD[name] + (layout.recompute and name != "pipeline"))
                for name, seconds in parts.items()
            }
        found.append(parts)
    return found


def _forward(
    sizes: ModelSizes,
    layout: Layout,
    machine: Machine,
    work: Workload,
    tokens: Array,
    dense: int,
    moe: int,
    last: bool,
) -> dict[str, Array]:
    """Parts of one micro-batch's forward pass in a stage of so many layers; `last` has the output layer."""
    tp, cp, layers = layout.tp, layout.cp, dense + moe
    own = tokens / (tp * cp)  # a GPU's share
    hidden_bytes = sizes.hidden * WEIGHT
    macs = dense * sizes.layer_parameters(False) + moe * sizes.layer_parameters(True) + last * sizes.output_macs
    squares = work.squares / work.tokens  # of a token
    held = sizes.experts / layout.ep * sizes.expert / layout.etp  # parameters of a layer's experts on one GPU
    chosen = sizes.topk * own  # tokens that come to a GPU's experts, if these are chosen evenly
    gather = _seconds(tokens / cp * hidden_bytes * (tp - 1) / tp, machine.link(tp), machine)
    cut = _seconds(chosen * hidden_bytes * (layout.etp - 1), machine.link(layout.etp), machine)
    kv_bytes = sizes.gathered_width / tp * WEIGHT
    zero = np.zeros_like(tokens)
    return dict(
        matmul=np.maximum(2 * macs * own / machine.matmul_flops, WEIGHT * macs / tp / machine.hbm_bytes),
        attention=2 * layers * sizes.pair_macs * squares * own / machine.attention_flops,
        experts=moe
        * np.maximum(2 * sizes.expert * chosen / machine.expert_flops, WEIGHT * held / machine.hbm_bytes),
        tensor=(4 * dense + (2 + 2 * sizes.has_shared) * moe) * gather * (tp > 1) + 2 * moe * cut * (layout.etp > 1),
        context=layers * _seconds(tokens * kv_bytes * (cp - 1) / cp, machine.link(tp * cp), machine) * (cp > 1),
        dispatch=2 * moe * _all_to_all(chosen * hidden_bytes, layout, machine) if layout.ep > 1 else zero,
        pipeline=layout.vpp * _seconds(own * hidden_bytes, machine.network_bytes, machine) * (layout.pp > 1),
    )


def _seconds(size: Array, speed: float, machine: Machine) -> Array:
    return size / speed + machine.latency_s


def _all_to_all(size: Array, layout: Layout, machine: Machine) -> Array:
    """Seconds in which every GPU of an expert-parallel group gives the others their parts of so many bytes."""
    near = min(layout.ep, max(1, machine.per_node // layout.etp))  # of its members, on one node
    within = size * (near - 1) / layout.ep / machine.nvlink_bytes
    across = size * (layout.ep - near) / layout.ep / machine.network_bytes
    return np.maximum(within, across) + machine.latency_s


def stage_parameters(sizes: ModelSizes, layout: Layout) -> tuple[float, float]:
    """Parameters on one GPU of the fullest stage: (of what every replica has, of experts)."""
    stages = layout.stages(sizes.moe)
    dense = [n * sizes.layer_parameters(False) + m * sizes.layer_parameters(True) for n, m in stages]
    dense[0] += sizes.embedding
    dense[-1] += sizes.output if layout.pp > 1 else sizes.output - sizes.tied * sizes.embedding
    experts = [m * sizes.experts * sizes.expert / (layout.ep * layout.etp) for _, m in stages]
    totals = [d / layout.tp + e for d, e in zip(dense, experts, strict=True)]
    fullest = totals.index(max(totals))
    return dense[fullest] / layout.tp, experts[fullest]


def state_bytes(sizes: ModelSizes, layout: Layout, replicas: NDArray[np.int64]) -> Array:
    """Weights and optimizer state of one GPU: what leaves it and comes back where it is shared by turns."""
    dense, experts = stage_parameters(sizes, layout)
    copies = layout.tp * layout.cp * replicas / (layout.ep * layout.etp)
    return WEIGHT * (dense + experts) + STATE * (dense / (replicas * layout.cp) + experts / copies)


def _optimizer_step(
    sizes: ModelSizes, layout: Layout, machine: Machine, replicas: NDArray[np.int64]
) -> dict[str, Array]:
    """Gradients are summed by shares, each share's weights are stepped, and gathered; not beside any other work."""
    dense, experts = stage_parameters(sizes, layout)
    ranks = layout.tp * layout.cp * replicas  # of a stage, which are neighbours
    speed = np.where(ranks <= machine.per_node, machine.nvlink_bytes, machine.network_bytes)
    gradients, share = np.zeros(len(replicas)), np.zeros(len(replicas))
    for parameters, copies in (
        (dense, replicas * layout.cp),
        (experts, ranks / (layout.ep * layout.etp)),
    ):
        sent = parameters * (GRADIENT + WEIGHT) * (copies - 1) / copies
        gradients = gradients + np.where(copies > 1, sent / speed + 2 * machine.latency_s, 0.0)
        share = share + parameters / copies
    return dict(gradients=gradients, optimizer=share * STATE_TRAFFIC / machine.hbm_bytes)
