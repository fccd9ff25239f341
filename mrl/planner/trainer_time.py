"""Predicts the seconds of training in a step: arithmetic, memory traffic, communication and the pipeline bubble.

All formulas take an array [R] that contains R different numbers of replicas. So the layout search evaluates all these numbers
in one call. Elsewhere in mrl, R is the number of sampled tokens.
The prediction assumes that communication does not overlap with computation. For example, mrl gathers keys and values before
attention. Only the reduction of gradients overlaps with the backward pass on GPUs (trainer.overlap_grad_reduce). The prediction
does not include the time that this overlap saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mrl.planner.layout_space import GpuCluster, ReplicaLayout
from mrl.planner.model_shape import ModelShape
from mrl.planner.step_workload import StepWorkload
from mrl.planner.trainer_memory import cached_pipeline_stages
from mrl.planner.trainer_state_bytes import GRADIENT_BYTES, buffer_numel, optimizer_bytes_per_parameter

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PARTS = ("matmul", "attention", "experts", "tensor", "context", "dispatch", "pipeline", "gradients", "optimizer")
"""Parts of the seconds of training. mrl.planner.layout_search.PART_MEANING explains each part."""

BACKWARD_RATIO = dict(matmul=2.0, attention=2.0, experts=2.0, tensor=1.5, context=2.0, dispatch=1.0, pipeline=1.0)
"""Part -> seconds in a backward pass divided by seconds in a forward pass.

The ratio of `tensor` is above 1 because a backward pass gathers inputs again, for the gradients of the weights.
"""

WEIGHT_BYTES = 2  # bytes of one element of a bfloat16 weight or activation
# Bytes that an AdamW step reads and writes per parameter: 4 for the gradient, 8 for the main weight, 16 for the two moments, and
# 6 to copy the main weight to the bfloat16 weight.
ADAMW_TRAFFIC_BYTES = 34


@dataclass(frozen=True)
class TrainingSeconds:
    """Seconds of training in a step, for each number of replicas."""

    update_s: FloatArray  # [R] seconds of forward and backward passes, gradient reduction and optimizer
    score_s: FloatArray  # [R] seconds of separate forward passes for log-probabilities and values
    parts: Mapping[str, FloatArray]  # part (see PARTS) -> [R] seconds of update and scoring together

    @cached_property
    def total_s(self) -> FloatArray:
        return self.update_s + self.score_s

    def at(self, index: int) -> dict[str, float]:
        """Return part -> seconds for the number of replicas at `index` of the arrays."""
        return {name: float(seconds[index]) for name, seconds in self.parts.items()}


@dataclass(frozen=True)
class TrainerTime:
    """Predicts the seconds of training with one layout: of the actor and, if `work` has a critic, of a critic of the same size.

    The layout must be valid for the model.
    """

    shape: ModelShape
    layout: ReplicaLayout
    cluster: GpuCluster
    work: StepWorkload

    def times(self, replicas: IntArray) -> TrainingSeconds:
        """Return the seconds of training in a step for each number of replicas. `replicas`: [R]."""
        work = self.work
        seconds = [self._model_times(work, work.scoring_passes, replicas)]
        if work.critic:
            seconds.append(self._model_times(work.of_critic, 1, replicas))
        parts = {name: np.sum([each.parts[name] for each in seconds], axis=0) for name in seconds[0].parts}
        update_s, score_s = (
            np.sum([each.update_s for each in seconds], axis=0),
            np.sum([each.score_s for each in seconds], axis=0),
        )
        return TrainingSeconds(update_s, score_s, parts)

    def _model_times(self, work: StepWorkload, forwards: int, replicas: IntArray) -> TrainingSeconds:
        """Return the seconds of one model in a step. `forwards`: number of separate forward passes."""
        scoring = self._passes(work.without_gradients, replicas, mini_batches=1, backward=False)
        update = self._passes(work, replicas, mini_batches=work.mini_batches, backward=True)
        update |= self._optimizer_step(replicas)
        steps = work.mini_batches * work.epochs
        parts = {name: forwards * scoring.get(name, 0.0) + steps * seconds for name, seconds in update.items()}
        update_s, score_s = (np.sum(list(seconds.values()), axis=0) for seconds in (update, scoring))
        return TrainingSeconds(steps * update_s, forwards * score_s, parts)

    def _passes(
        self, work: StepWorkload, replicas: IntArray, *, mini_batches: int, backward: bool
    ) -> dict[str, FloatArray]:
        """Return part -> seconds [R] of one pipelined pass over a mini-batch: the seconds of the slowest pipeline stage."""
        layout = self.layout
        # A replica trains on at least one whole sequence, because a sequence is not divided over replicas.
        tokens = np.maximum(work.tokens / (mini_batches * replicas), work.lengths.longest)
        multiple = layout.pp if layout.vpp > 1 else 1  # the interleaved schedule needs a multiple of pp micro-batches
        count = np.ceil(np.ceil(tokens * work.packs / work.tokens) / multiple) * multiple
        stages = self._micro_batch(tokens / count, work.sum_of_squared_lengths / work.tokens, backward)
        totals = np.array([sum(stage.values()) for stage in stages])  # [stages, R]
        slowest = totals.argmax(axis=0)[None]
        parts = {
            name: count * np.take_along_axis(np.array([stage[name] for stage in stages]), slowest, 0)[0]
            for name in stages[0]
        }
        parts["pipeline"] = parts["pipeline"] + (layout.pp - 1) / layout.vpp * totals.max(axis=0)
        return parts

    def _micro_batch(
        self, tokens: FloatArray, squared_length_per_token: float, backward: bool
    ) -> list[dict[str, FloatArray]]:
        """Return part -> seconds [R] of one micro-batch with `tokens` [R] tokens, for each stage.

        `squared_length_per_token`: sum of the squared lengths of all sequences, divided by their tokens.

        Pipeline stages with the same layers are returned only once. A stage includes all its virtual stages.
        """
        stages = [(*counts, False) for counts in self.layout.stages(self.shape.moe)]
        # MTP layers compute only in passes with gradients.
        mtp = self.shape.mtp_layers if backward else 0
        dense, moe, _ = stages[-1]
        stages[-1] = (dense + mtp * (not self.shape.mtp_kind.experts), moe + mtp * self.shape.mtp_kind.experts, True)
        forward = [self._forward(tokens, squared_length_per_token, *stage, mtp) for stage in dict.fromkeys(stages)]
        if not backward:
            return forward
        times = {name: 1 + factor + self.layout.recompute for name, factor in BACKWARD_RATIO.items()}
        times["pipeline"] = 1 + BACKWARD_RATIO["pipeline"]  # recomputed activations are not sent again
        return [{name: seconds * times[name] for name, seconds in parts.items()} for parts in forward]

    def _forward(
        self, tokens: FloatArray, squared_length_per_token: float, dense: int, moe: int, is_last: bool, mtp: int
    ) -> dict[str, FloatArray]:
        """Return part -> seconds [R] of the forward pass of one micro-batch in one pipeline stage.

        `dense`: number of dense layers of the stage. `moe`: number of layers of the stage that have experts. `is_last`: the
        stage has the output layer and `mtp` MTP layers. The counts `dense` and `moe` include these MTP layers.
        """
        shape, layout, cluster = self.shape, self.layout, self.cluster
        tp, cp, layers = layout.tp, layout.cp, dense + moe
        gpu_tokens = tokens / (tp * cp)
        hidden_bytes = shape.hidden * WEIGHT_BYTES
        macs = dense * shape.layer_weights(False) + moe * shape.layer_weights(True)
        macs += is_last * ((1 + mtp) * shape.output_macs + mtp * 2 * shape.hidden**2)
        expert = shape.parameters_per_expert
        # parameters of a layer's experts on one GPU
        local_experts = shape.num_experts / layout.ep * expert / layout.etp
        expert_tokens = shape.topk * gpu_tokens  # tokens that reach a GPU's experts if the router balances perfectly
        gather = self._message(tokens / cp * hidden_bytes * (tp - 1) / tp, tp)
        expert_gather = self._message(expert_tokens * hidden_bytes * (layout.etp - 1), layout.etp)
        # fractions of the layers that have attention, and that are recurrent
        attention, recurrent = (n / shape.num_layers for n in (shape.num_attention_layers, shape.num_recurrent_layers))
        # of one recurrent layer for one token: multiply-adds of the recurrence, and elements that context-parallel ranks gather
        rule, gathered = (shape.recurrence.macs, shape.recurrence.gathered_width) if shape.recurrence else (0, 0)
        width = attention * shape.gathered_kv_width + recurrent * gathered
        keys_values = tokens * width / tp * WEIGHT_BYTES * (cp - 1) / cp
        expert_s = np.maximum(
            2 * expert * expert_tokens / cluster.expert_flops_per_s,
            WEIGHT_BYTES * local_experts / cluster.hbm_bytes_per_s,
        )
        # two gathers for each block, except for routed experts, which are not split over tensor-parallel ranks
        gathers = 2 * shape.blocks_per_layer * dense + 2 * (shape.blocks_per_layer - 1 + (shape.shared_ffn > 0)) * moe
        return dict(
            matmul=np.maximum(
                2 * macs * gpu_tokens / cluster.matmul_flops_per_s, WEIGHT_BYTES * macs / tp / cluster.hbm_bytes_per_s
            ),
            # every context-parallel rank computes the recurrences of all tokens
            attention=2
            * layers
            * (
                attention * shape.attention_macs * shape.limit_to_windows(squared_length_per_token)
                + recurrent * rule * cp
            )
            * gpu_tokens
            / cluster.attention_flops_per_s,
            experts=moe * expert_s,
            tensor=gathers * gather + 2 * moe * expert_gather,
            context=layers * self._message(keys_values, tp * cp) * (cp > 1),
            dispatch=2 * moe * self._all_to_all(expert_tokens * hidden_bytes),
            pipeline=layout.vpp * self._message(gpu_tokens * hidden_bytes, cluster.gpus) * (layout.pp > 1),
        )

    def _message(self, size: FloatArray, ranks: int) -> FloatArray:
        """Return the seconds of a collective in which each of `ranks` neighboring GPUs sends `size` bytes. One rank needs 0 s."""
        return (size / self.cluster.link_bytes_per_s(ranks) + self.cluster.latency_s) * (ranks > 1)

    def _all_to_all(self, size: FloatArray) -> FloatArray:
        """Return the seconds of an all-to-all over an expert-parallel group in which each GPU distributes `size` bytes."""
        ep, cluster = self.layout.ep, self.cluster
        on_node = min(ep, max(1, cluster.gpus_per_node // self.layout.etp))  # members of the group on one node
        within, across = (
            (on_node - 1) / ep / cluster.nvlink_bytes_per_s,
            (ep - on_node) / ep / cluster.network_bytes_per_s,
        )
        return (size * max(within, across) + cluster.latency_s) * (ep > 1)

    @cached_property
    def stage_parameters(self) -> tuple[int, int]:
        """Number of elements in the flat buffers of a GPU, for the pipeline stage with the most elements: (dense, experts)."""
        shape, layout = self.shape, self.layout
        stages = cached_pipeline_stages(shape.num_layers, layout.pp, layout.vpp, layout.uneven)
        return max((self._buffer_numel(stage) for stage in stages), key=sum)

    def _buffer_numel(self, stage: list) -> tuple[int, int]:
        layout = self.layout
        numels = [buffer_numel(self.shape, virtual, layout.tp, layout.ep, layout.etp) for virtual in stage]
        return sum(dense for dense, _ in numels), sum(experts for _, experts in numels)

    def _ranks_per_shard(self, replicas: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return the number of ranks that hold the same parameters: (for dense parameters [R], for experts [R])."""
        layout = self.layout
        ranks = replicas.astype(np.float64) * layout.cp
        return ranks, layout.tp * ranks / (layout.ep * layout.etp)

    def state_bytes(self, replicas: IntArray) -> FloatArray:
        """Return the bytes [R] of weights and optimizer state on one GPU, which trainers on shared GPUs offload and load."""
        optimizer = optimizer_bytes_per_parameter(WEIGHT_BYTES)
        parts = zip(self.stage_parameters, self._ranks_per_shard(replicas), strict=True)
        return np.sum(
            [parameters * (WEIGHT_BYTES + optimizer / ranks_per_shard) for parameters, ranks_per_shard in parts],
            axis=0,
        )

    def _optimizer_step(self, replicas: IntArray) -> dict[str, FloatArray]:
        """Return part -> seconds [R] of an optimizer step: reduce-scatter gradients, update each shard, all-gather weights."""
        cluster, layout = self.cluster, self.layout
        ranks = layout.tp * layout.cp * replicas  # number of ranks of a pipeline stage; the ranks are neighbors
        speed = np.where(ranks <= cluster.gpus_per_node, cluster.nvlink_bytes_per_s, cluster.network_bytes_per_s)
        gradients_s, shard = np.zeros(len(replicas)), np.zeros(len(replicas))
        for parameters, ranks_per_shard in zip(self.stage_parameters, self._ranks_per_shard(replicas), strict=True):
            sent = parameters * (GRADIENT_BYTES + WEIGHT_BYTES) * (ranks_per_shard - 1) / ranks_per_shard
            gradients_s = gradients_s + np.where(sent > 0, sent / speed + 2 * cluster.latency_s, 0.0)
            shard = shard + parameters / ranks_per_shard
        return dict(gradients=gradients_s, optimizer=shard * ADAMW_TRAFFIC_BYTES / cluster.hbm_bytes_per_s)
