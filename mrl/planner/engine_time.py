"""Seconds of the engines' part of a step, of bringing weights to them, and of giving GPUs to each other by turns. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from mrl.planner.engine_queue import EngineSpeeds
from mrl.planner.layout_space import Machine
from mrl.planner.sizes import ModelSizes
from mrl.planner.step_workload import Lengths, Workload
from mrl.planner.trainer_time import WEIGHT


@dataclass(frozen=True)
class Engine:
    """One engine of a model, on `tp` GPUs."""

    sizes: ModelSizes
    machine: Machine
    tp: int
    memory_fraction: float = 0.8  # of a GPU's memory that weights and KV cache may have
    most_running: int | None = None  # requests at one time; None: as many as the KV cache holds

    @property
    def weight_bytes(self) -> float:
        """Of one GPU."""
        return WEIGHT * self.sizes.parameters / self.tp

    @property
    def kv_bytes(self) -> float:
        """Of one token on one GPU; heads that are fewer than the GPUs are kept several times."""
        return WEIGHT * self.sizes.layers * self.sizes.kv_width / min(self.tp, self.sizes.key_value_heads)

    @property
    def cached_tokens(self) -> int:
        """That the KV cache holds; below 1 the weights do not fit."""
        return int((self.machine.memory_bytes * self.memory_fraction - self.weight_bytes) / self.kv_bytes)

    def max_running(self, lengths: Lengths) -> int:
        """Requests at one time, whole ones; 0: the longest does not fit."""
        if self.cached_tokens < lengths.longest:
            return 0
        room = int(self.cached_tokens / (lengths.prompt_tokens + lengths.mean))
        return max(1, min(room, self.most_running or room))

    def token_s(self, running: float, context: float) -> float:
        """Seconds of a decoding step of so many requests with so many tokens each before: what is read, computed and sent."""
        sizes, machine, tp = self.sizes, self.machine, self.tp
        touched = 1 - (1 - sizes.topk / sizes.experts) ** running if sizes.experts else 0.0
        read = WEIGHT * (sizes.dense_parameters + touched * sizes.expert_parameters) / tp
        read += running * context * self.kv_bytes
        return read / machine.hbm_bytes + running * self._compute_s + self._messages_s(running)

    @property
    def _compute_s(self) -> float:
        """Of a token, in matrices."""
        return 2 * self.sizes.token_macs / self.tp / self.machine.matmul_flops

    def _messages_s(self, tokens: float) -> float:
        """Two all-reduces in every layer; a layer's kernels start no faster than one message."""
        size = 2 * tokens * self.sizes.hidden * WEIGHT * (self.tp - 1) / self.tp
        return 2 * self.sizes.layers * (size / self.machine.link(self.tp) + self.machine.latency_s)

    def speeds(self, lengths: Lengths, requests: int) -> EngineSpeeds:
        """As the simulator of rollouts takes them, for an engine that is asked for so many requests at one time.

        The line through a step of one request and one of as many as run at most.
        """
        most = self.max_running(lengths)
        full = max(2, min(most, requests))
        one, many = self.token_s(1, lengths.mean_context), self.token_s(full, lengths.mean_context)
        request_s = (many - one) / (full - 1)
        size = 2 * 2 * self.sizes.hidden * WEIGHT * (self.tp - 1) / self.tp * self.sizes.layers
        prefill_s = self._compute_s + size / self.machine.link(self.tp)
        return EngineSpeeds(one - request_s, request_s, prefill_s, most)


@dataclass(frozen=True)
class Sampling:
    """How long engines take for a step's responses, beside trainers of any speed."""

    staleness: int  # K: so many steps ahead engines sample
    tail_s: float  # steps that the longest response needs, if it had its engine for itself
    shared_s: float  # what all responses of an engine add to its steps, prompts and what pushes interrupt included
    full_s: float  # of engines that never run out of responses

    @classmethod
    def of(cls, speeds: EngineSpeeds, work: Workload, num_engines: int, staleness: int) -> Sampling:
        """Of engines that share a step's responses evenly."""
        lengths, most = work.lengths, speeds.max_running
        requests = -(-work.responses // num_engines)
        prompts = requests / work.responses_per_prompt * lengths.prompt_tokens
        interrupted = min(most, requests * staleness) * lengths.mean_context
        computed = (prompts + requests + interrupted) * speeds.prefill_s
        shared = requests * lengths.mean * speeds.request_s + computed
        full = shared + requests * lengths.mean / min(most, requests * (staleness + 1)) * speeds.step_s
        steps = decoding_steps(lengths, requests, work.responses, requests if staleness else most)
        return cls(staleness, steps * speeds.step_s, shared, full)

    def step_s(self, train_s: float) -> float:
        """Seconds of a step, without the push, with trainers that take so long.

        The samples of a step are asked for when the step K + 1 before it has been trained, and wait for no training but its
        own: they have (K + 1) steps less a training. The longest needs its own decoding steps, which what runs beside it makes
        longer: tail / (1 - shared / step).
        """
        if not self.staleness:
            return train_s + self.tail_s + self.shared_s
        ahead, shared = self.staleness + 1, self.shared_s
        middle = ahead * shared + train_s + self.tail_s
        in_time = (middle + sqrt(middle**2 - 4 * ahead * train_s * shared)) / (2 * ahead)
        return max(train_s, self.full_s, in_time)


def decoding_steps(lengths: Lengths, requests: int, everywhere: int, running: int) -> float:
    """Steps until an engine has decoded all its requests, `running` at one time; the longest of `everywhere` is waited for."""
    longest = lengths.longest_of(everywhere)
    if requests <= running:
        return longest
    mean, largest = lengths.left_of(running)
    return max(longest, requests * lengths.mean / running - mean + largest)


def push_s(
    sizes: ModelSizes, machine: Machine, trainers: int, engines: int, engine_tp: int, bucket_bytes: int
) -> float:
    """Seconds to bring weights from trainers to engines on other GPUs: the busier side's.

    Trainers send equal shares, each engine its own copy (mrl/weight_sync/transfer_plan.py).
    """
    weights = WEIGHT * sizes.parameters
    sent, received = weights * engines / trainers, weights / engine_tp
    speed = machine.link(trainers + engines * engine_tp)
    messages = max(1.0, weights / trainers / bucket_bytes) * engines
    return max(sent / speed + messages * machine.message_s, received / speed)


def push_within_a_node_s(sizes: ModelSizes, machine: Machine, trainers: int, engine_tp: int) -> float:
    """The same on one node, where engines read what trainers have written once."""
    weights = WEIGHT * sizes.parameters
    return max(weights / trainers, weights / engine_tp) / machine.nvlink_bytes
