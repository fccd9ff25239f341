"""Seconds of sampling and of pushing weights to engines. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

from mrl.planner.engine_memory import MEM_FRACTION, EngineRankMemory, engine_memory, engine_weight_parts
from mrl.planner.engine_queue import EngineSpeeds
from mrl.planner.layout_space import GpuCluster
from mrl.planner.model_shape import ModelShape
from mrl.planner.step_workload import LengthDistribution, StepWorkload
from mrl.planner.trainer_time import WEIGHT_BYTES
from mrl.weight_sync.engine_layout import Topology


@dataclass(frozen=True)
class EngineTime:
    """Predicts the seconds of one engine on `tp` GPUs."""

    shape: ModelShape
    cluster: GpuCluster
    tp: int
    memory_fraction: float = MEM_FRACTION  # of a GPU's memory, for weights and KV cache
    max_requests: int | None = None  # requests that run at one time; None: as many as the KV cache holds
    kv_itemsize: int = WEIGHT_BYTES  # bytes of a cached element

    @cached_property
    def memory(self) -> EngineRankMemory:
        """Bytes on each of the engine's GPUs."""
        topology, free = Topology(self.tp), int(self.cluster.memory_bytes)
        return engine_memory(self.shape, topology, WEIGHT_BYTES, free, self.memory_fraction, self.kv_itemsize)

    def max_running(self, lengths: LengthDistribution) -> int:
        """Return the number of requests that run at one time; 0 if the longest sequence does not fit."""
        if self.memory.tokens < lengths.longest:
            return 0
        room = int(self.memory.tokens / (lengths.prompt_tokens + lengths.mean))
        return max(1, min(room, self.max_requests or room))

    def token_s(self, running: float, context: float) -> float:
        """Return the seconds of one decoding step of `running` requests with `context` tokens each.

        The step reads weights and KV cache, computes, and all-reduces.
        """
        shape, cluster = self.shape, self.cluster
        dense, experts = self._weight_parts
        chosen_share = 1 - (1 - shape.topk / shape.num_experts) ** running if shape.num_experts else 0.0
        read = dense + chosen_share * experts + running * context * self.memory.token
        return read / cluster.hbm_bytes + running * self._compute_s + self._all_reduce_s(running)

    @cached_property
    def _weight_parts(self) -> tuple[int, int]:
        """Bytes of one GPU's weights: (all but routed experts, routed experts)."""
        return engine_weight_parts(self.shape, Topology(self.tp), WEIGHT_BYTES)

    @property
    def _compute_s(self) -> float:
        """Seconds of one token in matrices."""
        return 2 * self.shape.token_macs / self.tp / self.cluster.matmul_flops

    def _all_reduce_s(self, tokens: float) -> float:
        """Return the seconds of two all-reduces per layer.

        Their latency is counted on one GPU, too: it stands for the time to launch the kernels of the layer.
        """
        size = 2 * tokens * self.shape.hidden * WEIGHT_BYTES * (self.tp - 1) / self.tp
        return 2 * self.shape.num_layers * (size / self.cluster.link_bytes(self.tp) + self.cluster.latency_s)

    def speeds(self, lengths: LengthDistribution, requests: int) -> EngineSpeeds:
        """Return the speeds that the rollout simulator takes, for an engine that has `requests` requests at one time.

        A decoding step is linear in the running requests: the line through one request and the most that run.
        """
        most = self.max_running(lengths)
        full = max(2, min(most, requests))
        one, many = self.token_s(1, lengths.mean_context), self.token_s(full, lengths.mean_context)
        request_s = (many - one) / (full - 1)
        size = 2 * 2 * self.shape.hidden * WEIGHT_BYTES * (self.tp - 1) / self.tp * self.shape.num_layers
        prefill_s = self._compute_s + size / self.cluster.link_bytes(self.tp)
        return EngineSpeeds(one - request_s, request_s, prefill_s, most)


@dataclass(frozen=True)
class RolloutTime:
    """Seconds that engines take to sample one step's responses, as a function of the trainers' seconds."""

    staleness: int  # K: steps that sampling is ahead of training
    tail_s: float  # of the decoding steps that the longest response needs if it has an engine for itself
    shared_s: float  # that all responses of an engine add to its steps, with prefill and with what pushes interrupt
    full_s: float  # of engines that always have as many responses as they can run

    @classmethod
    def of(cls, speeds: EngineSpeeds, work: StepWorkload, num_engines: int, staleness: int) -> RolloutTime:
        """Predict the seconds of `num_engines` engines that share a step's responses evenly."""
        lengths, most = work.lengths, speeds.max_running
        requests = -(-work.responses // num_engines)
        prompts = requests / work.responses_per_prompt * lengths.prompt_tokens
        interrupted = min(most, requests * staleness) * lengths.mean_context
        prefill_s = (prompts + requests + interrupted) * speeds.prefill_s
        shared = requests * lengths.mean * speeds.request_s + prefill_s
        full = shared + requests * lengths.mean / min(most, requests * (staleness + 1)) * speeds.step_s
        steps = decoding_steps(lengths, requests, work.responses, requests if staleness else most)
        return cls(staleness, steps * speeds.step_s, shared, full)

    def step_s(self, train_s: float) -> float:
        """Return the seconds of a step, without the push, if training takes `train_s`.

        The samples of step s are requested after step s - (K + 1) was trained, and training of step s waits for them. So sampling
        may take the time of K + 1 steps minus one training. The longest response takes the time of its decoding steps, which the
        other running responses make longer: tail / (1 - shared / step).
        """
        if not self.staleness:
            return train_s + self.tail_s + self.shared_s
        ahead, shared = self.staleness + 1, self.shared_s
        middle = ahead * shared + train_s + self.tail_s
        in_time = (middle + sqrt(middle**2 - 4 * ahead * train_s * shared)) / (2 * ahead)
        return max(train_s, self.full_s, in_time)


def decoding_steps(lengths: LengthDistribution, requests: int, responses: int, running: int) -> float:
    """Return the decoding steps until an engine has finished `requests` requests, of which `running` run at one time.

    A step waits for the longest of the `responses` of all engines.
    """
    longest = lengths.longest_of(responses)
    if requests <= running:
        return longest
    mean, largest = lengths.remaining_of(running)
    return max(longest, requests * lengths.mean / running - mean + largest)


def push_s(
    shape: ModelShape, cluster: GpuCluster, trainers: int, engines: int, engine_tp: int, bucket_bytes: int
) -> float:
    """Return the seconds of pushing weights from `trainers` GPUs to engines on other GPUs: those of the busier side.

    Trainers send equal shares, and every engine receives its own copy (mrl/weight_sync/transfer_plan.py).
    """
    weights = WEIGHT_BYTES * shape.num_weights
    sent, received = weights * engines / trainers, weights / engine_tp
    speed = cluster.link_bytes(trainers + engines * engine_tp)
    messages = max(1.0, weights / trainers / bucket_bytes) * engines
    return max(sent / speed + messages * cluster.message_s, received / speed)


def push_within_a_node_s(shape: ModelShape, cluster: GpuCluster, trainers: int, engine_tp: int) -> float:
    """Return the seconds of a push within one node, where engines read what the trainers have written once."""
    weights = WEIGHT_BYTES * shape.num_weights
    return max(weights / trainers, weights / engine_tp) / cluster.nvlink_bytes
