"""Seconds of the trainers' part of a step under a layout: arithmetic, memory traffic, messages and the pipeline's bubble. Pure.

Every formula takes the numbers of replicas as an array, so that a search asks for all of them at once. Nothing overlaps but what
is stated to: mrl reduces gradients after the last backward pass, and gathers keys and values before attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mrl.planner.layout_space import Layout, Machine
from mrl.planner.sizes import ModelSizes
from mrl.planner.step_workload import Workload

Array = NDArray[np.float64]

PARTS = ("matmul", "attention", "experts", "tensor", "context", "dispatch", "pipeline", "gradients", "optimizer")
"""Where the trainers' seconds go. dispatch: experts' all-to-all; pipeline: bubble and messages between stages."""

BACKWARD = dict(matmul=2.0, attention=2.0, experts=2.0, tensor=1.5, context=2.0, dispatch=1.0, pipeline=1.0)
"""Seconds of a backward pass over those of a forward pass. tensor: inputs are gathered again for the weights' gradients."""

WEIGHT, GRADIENT = 2, 4  # bytes of a parameter in bfloat16, and of its summed gradient
STATE_TRAFFIC = (
    34  # bytes read and written for a parameter by AdamW: gradient, main weight and two moments, and the weight
)
STATE = 12  # bytes of a parameter's main weight and moments


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


@dataclass(frozen=True)
class Trainer:
    """One model under one layout; the layout must fit the model."""

    sizes: ModelSizes
    layout: Layout
    machine: Machine
    work: Workload

    def times(self, replicas: NDArray[np.int64]) -> TrainerTimes:
        """Seconds with each number of replicas."""
        work = self.work
        scoring = self._passes(replicas, mini_batches=1, backward=False)
        update = self._passes(replicas, mini_batches=work.mini_batches, backward=True) | self._optimizer_step(replicas)
        forwards = work.scoring_passes + work.critic
        steps = work.mini_batches * work.epochs * (1 + work.critic)
        parts = {name: forwards * scoring.get(name, 0.0) + steps * seconds for name, seconds in update.items()}
        update_s, score_s = (np.sum(list(found.values()), axis=0) for found in (update, scoring))
        return TrainerTimes(steps * update_s, forwards * score_s, parts)

    def _passes(self, replicas: NDArray[np.int64], *, mini_batches: int, backward: bool) -> dict[str, Array]:
        """Parts of one pass over a mini-batch through the pipeline, which its slowest stage paces."""
        work, layout = self.work, self.layout
        share = np.maximum(work.tokens / (mini_batches * replicas), work.lengths.longest)  # sequences stay whole
        multiple = layout.pp if layout.vpp > 1 else 1
        count = np.ceil(np.ceil(share * work.packs / work.tokens) / multiple) * multiple
        slots = self._slots(share / count, backward)
        totals = np.array([sum(slot.values()) for slot in slots])  # [stages, replicas]
        slowest = totals.argmax(axis=0)[None]
        parts = {
            name: count * np.take_along_axis(np.array([slot[name] for slot in slots]), slowest, 0)[0]
            for name in slots[0]
        }
        parts["pipeline"] = parts["pipeline"] + (layout.pp - 1) / layout.vpp * totals.max(axis=0)
        return parts

    def _slots(self, tokens: Array, backward: bool) -> list[dict[str, Array]]:
        """Parts of one micro-batch of so many tokens in each stage unlike the others, all of its chunks together."""
        kinds = [(*counts, False) for counts in self.layout.stages(self.sizes.moe)]
        kinds[-1] = (*kinds[-1][:2], True)
        found = [self._forward(tokens, *kind) for kind in dict.fromkeys(kinds)]
        if not backward:
            return found
        times = {name: 1 + factor + self.layout.recompute for name, factor in BACKWARD.items()}
        times["pipeline"] = 1 + BACKWARD["pipeline"]  # what is computed again is not sent again
        return [{name: seconds * times[name] for name, seconds in parts.items()} for parts in found]

    def _forward(self, tokens: Array, dense: int, moe: int, last: bool) -> dict[str, Array]:
        """Parts of one micro-batch's forward pass in a stage of so many layers; `last` has the output layer."""
        sizes, layout, machine = self.sizes, self.layout, self.machine
        tp, cp, layers = layout.tp, layout.cp, dense + moe
        own = tokens / (tp * cp)  # a GPU's share
        hidden_bytes = sizes.hidden * WEIGHT
        macs = dense * sizes.layer_parameters(False) + moe * sizes.layer_parameters(True) + last * sizes.output_macs
        squares = self.work.squares / self.work.tokens  # of a token
        held = sizes.experts / layout.ep * sizes.expert / layout.etp  # parameters of a layer's experts on one GPU
        chosen = sizes.topk * own  # tokens that come to a GPU's experts, if these are chosen evenly
        gather = self._message(tokens / cp * hidden_bytes * (tp - 1) / tp, tp)
        cut = self._message(chosen * hidden_bytes * (layout.etp - 1), layout.etp)
        keys_values = tokens * sizes.gathered_width / tp * WEIGHT * (cp - 1) / cp
        expert_s = np.maximum(2 * sizes.expert * chosen / machine.expert_flops, WEIGHT * held / machine.hbm_bytes)
        return dict(
            matmul=np.maximum(2 * macs * own / machine.matmul_flops, WEIGHT * macs / tp / machine.hbm_bytes),
            attention=2 * layers * sizes.pair_macs * squares * own / machine.attention_flops,
            experts=moe * expert_s,
            tensor=(4 * dense + (2 + 2 * sizes.has_shared) * moe) * gather + 2 * moe * cut,
            context=layers * self._message(keys_values, tp * cp) * (cp > 1),
            dispatch=2 * moe * self._all_to_all(chosen * hidden_bytes),
            pipeline=layout.vpp * self._message(own * hidden_bytes, machine.gpus) * (layout.pp > 1),
        )

    def _message(self, size: Array, span: int) -> Array:
        """Seconds of a collective of so many bytes of each of `span` neighbours; of one rank none."""
        return (size / self.machine.link(span) + self.machine.latency_s) * (span > 1)

    def _all_to_all(self, size: Array) -> Array:
        """Seconds in which every GPU of an expert-parallel group gives the others their parts of so many bytes."""
        ep, machine = self.layout.ep, self.machine
        near = min(ep, max(1, machine.per_node // self.layout.etp))  # of its members, on one node
        within, across = (near - 1) / ep / machine.nvlink_bytes, (ep - near) / ep / machine.network_bytes
        return (size * max(within, across) + machine.latency_s) * (ep > 1)

    @cached_property
    def stage_parameters(self) -> tuple[float, float]:
        """Parameters on one GPU of the fullest stage: (of what every replica has, of experts)."""
        sizes, layout = self.sizes, self.layout
        stages = layout.stages(sizes.moe)
        dense = [n * sizes.layer_parameters(False) + m * sizes.layer_parameters(True) for n, m in stages]
        dense[0] += sizes.embedding
        dense[-1] += sizes.output if layout.pp > 1 else sizes.output - sizes.tied * sizes.embedding
        experts = [m * sizes.experts * sizes.expert / (layout.ep * layout.etp) for _, m in stages]
        return max(((d / layout.tp, e) for d, e in zip(dense, experts, strict=True)), key=sum)

    def _copies(self, replicas: NDArray[np.int64]) -> tuple[Array, Array]:
        """Ranks that have the same part of (what every replica has, the experts)."""
        layout = self.layout
        ranks = replicas.astype(np.float64) * layout.cp
        return ranks, layout.tp * ranks / (layout.ep * layout.etp)

    def state_bytes(self, replicas: NDArray[np.int64]) -> Array:
        """Weights and optimizer state of one GPU: what leaves it and comes back where it is shared by turns."""
        parts = zip(self.stage_parameters, self._copies(replicas), strict=True)
        return np.sum([parameters * (WEIGHT + STATE / copies) for parameters, copies in parts], axis=0)

    def _optimizer_step(self, replicas: NDArray[np.int64]) -> dict[str, Array]:
        """Gradients are summed by shares, each share's weights are stepped, and gathered; not beside any other work."""
        machine, layout = self.machine, self.layout
        ranks = layout.tp * layout.cp * replicas  # of a stage, which are neighbours
        speed = np.where(ranks <= machine.per_node, machine.nvlink_bytes, machine.network_bytes)
        gradients, share = np.zeros(len(replicas)), np.zeros(len(replicas))
        for parameters, copies in zip(self.stage_parameters, self._copies(replicas), strict=True):
            sent = parameters * (GRADIENT + WEIGHT) * (copies - 1) / copies
            gradients = gradients + np.where(sent > 0, sent / speed + 2 * machine.latency_s, 0.0)
            share = share + parameters / copies
        return dict(gradients=gradients, optimizer=share * STATE_TRAFFIC / machine.hbm_bytes)
