"""Predicts the seconds of sampling and of weight pushes, and simulates one engine with continuous batching (EngineQueue)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from math import inf, sqrt

from mrl.config.process_schema import PauseMode
from mrl.planner.engine_memory import DEFAULT_MEM_FRACTION, EngineRankMemory, engine_memory, engine_weight_parts
from mrl.planner.layout_space import GpuCluster
from mrl.planner.model_shape import ModelShape
from mrl.planner.step_workload import LengthDistribution, StepWorkload
from mrl.planner.trainer_time import WEIGHT_BYTES
from mrl.weight_sync.engine_layout import EngineParallelSizes


@dataclass(frozen=True)
class EngineTime:
    """Predicts the seconds that one engine on `tp` GPUs takes to decode."""

    shape: ModelShape
    cluster: GpuCluster
    tp: int
    memory_fraction: float = DEFAULT_MEM_FRACTION  # part of GpuCluster.memory_bytes for model weights and KV cache
    max_requests: int | None = None  # largest number of requests that run together; None: as many as the KV cache holds
    kv_itemsize: int = WEIGHT_BYTES  # bytes of one element of the KV cache

    @cached_property
    def memory(self) -> EngineRankMemory:
        """Bytes of model weights and KV cache on each GPU of the engine."""
        parallel_sizes, free = EngineParallelSizes(self.tp), int(self.cluster.memory_bytes)
        return engine_memory(self.shape, parallel_sizes, WEIGHT_BYTES, free, self.memory_fraction, self.kv_itemsize)

    def max_running(self, lengths: LengthDistribution) -> int:
        """Return the number of requests that can run together, or 0 if the longest sequence does not fit in the KV cache."""
        if self.memory.tokens < lengths.longest:
            return 0
        room = int(self.memory.tokens / (lengths.prompt_tokens + lengths.mean))
        return max(1, min(room, self.max_requests or room))

    def decoding_step_s(self, running: float, context: float) -> float:
        """Return the seconds of one decoding step of `running` requests, each with `context` tokens.

        In a decoding step, the engine samples one token for each running request. The engine reads the model weights and the KV
        cache from GPU memory, computes, and sums the partial results of its GPUs (all-reduce).
        """
        shape, cluster = self.shape, self.cluster
        dense, experts = self._weight_parts
        # Expected fraction of the experts that at least one request chooses. The engine reads only the weights of these experts.
        chosen_fraction = 1 - (1 - shape.topk / shape.num_experts) ** running if shape.num_experts else 0.0
        read_bytes = dense + chosen_fraction * experts + running * context * self.memory.token_bytes
        return read_bytes / cluster.hbm_bytes_per_s + running * self._compute_s + self._all_reduce_s(running)

    @cached_property
    def _weight_parts(self) -> tuple[int, int]:
        """Bytes of model weights on one GPU: (all weights except those of routed experts, weights of routed experts)."""
        return engine_weight_parts(self.shape, EngineParallelSizes(self.tp), WEIGHT_BYTES)

    @property
    def _compute_s(self) -> float:
        """Seconds of the matrix multiplications of one token."""
        return 2 * self.shape.token_macs / self.tp / self.cluster.matmul_flops_per_s

    @property
    def _num_all_reduces(self) -> int:
        """Number of all-reduces of one forward pass: one after each block, such as attention or an MLP."""
        return self.shape.num_layers * self.shape.blocks_per_layer

    def _all_reduce_s(self, tokens: float) -> float:
        """Return the seconds of the all-reduces in one decoding step with `tokens` tokens: one after each block.

        The result includes the latency even for an engine on one GPU. For such an engine, the latency is an estimate of the
        time to launch the kernels of a block.
        """
        size = 2 * tokens * self.shape.hidden * WEIGHT_BYTES * (self.tp - 1) / self.tp
        return self._num_all_reduces * (size / self.cluster.link_bytes_per_s(self.tp) + self.cluster.latency_s)

    def speeds(self, lengths: LengthDistribution, requests: int) -> EngineSpeeds:
        """Return the speeds of an engine that gets `requests` requests, in the form that the rollout simulator needs.

        EngineSpeeds has the seconds of a decoding step as a linear function of the number of running requests. The linear
        function equals `decoding_step_s` for one running request and for the largest number of running requests.
        """
        most = self.max_running(lengths)
        largest = max(2, min(most, requests))  # largest number of requests that run together
        one, many = self.decoding_step_s(1, lengths.mean_context), self.decoding_step_s(largest, lengths.mean_context)
        request_s = (many - one) / (largest - 1)
        size = 2 * self.shape.hidden * WEIGHT_BYTES * (self.tp - 1) / self.tp * self._num_all_reduces
        prefill_s = self._compute_s + size / self.cluster.link_bytes_per_s(self.tp)
        return EngineSpeeds(one - request_s, request_s, prefill_s, most)


@dataclass(frozen=True)
class RolloutTime:
    """Predicts the seconds of a training step from the speeds of the engines and the seconds of the trainers."""

    staleness: int  # K: number of training steps that sampling may be ahead of training
    # EngineSpeeds.fixed_step_s, times the decoding steps until the last response is finished
    fixed_decoding_work_s: float
    response_work_s: float  # seconds of decoding and prefill that grow with the number of responses of an engine
    throughput_bound_s: float  # seconds of a training step if the engines always run as many responses as possible

    @classmethod
    def of(cls, speeds: EngineSpeeds, work: StepWorkload, num_engines: int, staleness: int) -> RolloutTime:
        """Combine the speeds of an engine with the workload. The engines share the responses of a training step evenly."""
        lengths, most = work.lengths, speeds.max_running
        requests = -(-work.responses // num_engines)
        # The first request of a group prefills the prompt. Each request prefills one more token: see EngineQueue._start_waiting.
        prompts = requests / work.responses_per_prompt * lengths.prompt_tokens
        # Tokens of the requests that run when weights are pushed; after the push, the engine prefills these tokens again.
        prefilled_again = min(most, requests * staleness) * lengths.mean_context
        prefill_s = (prompts + requests + prefilled_again) * speeds.prefill_s
        response_work_s = requests * lengths.mean * speeds.request_s + prefill_s
        decoding_steps_if_saturated = requests * lengths.mean / min(most, requests * (staleness + 1))
        throughput_bound_s = response_work_s + decoding_steps_if_saturated * speeds.fixed_step_s
        steps = decoding_steps(lengths, requests, work.responses, requests if staleness else most)
        return cls(staleness, steps * speeds.fixed_step_s, response_work_s, throughput_bound_s)

    def step_s(self, train_s: float) -> float:
        """Return the seconds of a training step without the weight push, if training takes `train_s` of these seconds.

        The prompts of step n are dispatched after the training of step n - (K + 1), and the training of step n waits for their
        responses. Each training takes `train_s` seconds, and ends `step_s` seconds after the previous training. So the responses
        must be sampled within (K + 1) * step_s - train_s seconds. An engine spends the fraction response_work_s / step_s of
        its time on work that grows with the number of responses, and has the remaining fraction for the fixed part of the
        decoding steps. So the longest response takes fixed_decoding_work_s / (1 - response_work_s / step_s) seconds.
        `longest_response_step_s` is the step_s for which the available seconds equal the seconds of the longest response (the
        larger root of a quadratic equation). In shorter steps, the longest response would not be finished in time.
        """
        if not self.staleness:
            return train_s + self.fixed_decoding_work_s + self.response_work_s
        steps, response_work_s = self.staleness + 1, self.response_work_s
        linear = steps * response_work_s + train_s + self.fixed_decoding_work_s
        longest_response_step_s = (linear + sqrt(linear**2 - 4 * steps * train_s * response_work_s)) / (2 * steps)
        return max(train_s, self.throughput_bound_s, longest_response_step_s)


def decoding_steps(lengths: LengthDistribution, requests: int, responses: int, running: int) -> float:
    """Return the number of decoding steps until an engine has finished `requests` requests.

    `running`: largest number of requests that run together. `responses`: number of responses of a training step, over all
    engines. The training step waits for the longest of these responses.
    """
    longest = lengths.longest_response_of(responses)
    if requests <= running:
        return longest
    mean, largest = lengths.remaining_of(running)
    return max(longest, requests * lengths.mean / running - mean + largest)


def push_s(
    shape: ModelShape, cluster: GpuCluster, trainers: int, engines: int, engine_tp: int, bucket_bytes: int
) -> float:
    """Return the seconds of a weight push with weight_sync.transport=process_group: `trainers` GPUs send to `engines` engines.

    All trainer GPUs send the same number of bytes, and every engine receives a full copy of the weights
    (mrl/weight_sync/transfer_plan.py). The push takes the longer of two times: the time that a trainer GPU needs to send, and the
    time that an engine GPU needs to receive.
    """
    weights = WEIGHT_BYTES * shape.num_weights
    sent, received = weights * engines / trainers, weights / engine_tp
    speed = cluster.link_bytes_per_s(trainers + engines * engine_tp)
    messages = max(1.0, weights / trainers / bucket_bytes) * engines
    return max(sent / speed + messages * cluster.message_s, received / speed)


def push_within_a_node_s(shape: ModelShape, cluster: GpuCluster, trainers: int, engine_tp: int) -> float:
    """Return the seconds of a weight push between trainers and engines on the same GPUs of one node.

    All trainers together send the weights once over NVLink, and every engine receives all weights.
    """
    weights = WEIGHT_BYTES * shape.num_weights
    return max(weights / trainers, weights / engine_tp) / cluster.nvlink_bytes_per_s


@dataclass(frozen=True)
class EngineSpeeds:
    """Speeds of one engine. A decoding step of b running requests takes `fixed_step_s + b * request_s`."""

    fixed_step_s: float  # seconds of a decoding step that do not depend on the number of running requests
    request_s: float  # additional seconds of a decoding step for each running request
    prefill_s: float  # seconds for each prefilled token; no request decodes during prefill
    max_running: int  # largest number of requests that run together; further requests wait in a queue

    def decoding_step_s(self, running: int) -> float:
        """Return the seconds of one decoding step of `running` requests."""
        return self.fixed_step_s + running * self.request_s


@dataclass(eq=False)
class SimulatedRequest:
    """A request for one response, with the progress of the decoding.

    A request starts when the engine moves it from the queue to the running batch. After a pause, it may start again.
    """

    key: Hashable  # identifies the request for the caller
    # Identifies the prompt. Of several requests with the same prompt, the first one prefills the prompt. The others find all
    # tokens of the prompt, except for the last token, in the prefix cache.
    prompt: Hashable
    prompt_tokens: int
    response_tokens: int
    decoded: float = 0.0  # number of decoded tokens when the request last left the running batch
    cached_tokens: int = 0  # prompt tokens that were in the prefix cache at the first start
    started: bool = False  # whether the request has started at least once
    _start_step: float = 0.0  # number of decoding steps that the engine had run at the last start of the request


@dataclass(eq=False)
class EngineQueue:
    """Simulation of one engine. Requests start in order of arrival, and at most `speeds.max_running` of them run together.

    A pause with mode `retract` moves the running requests to the end of the queue, as SGLang does. The requests keep their
    decoded tokens, but the engine prefills these tokens again when the requests start again.
    """

    speeds: EngineSpeeds
    now: float = 0.0  # current time in seconds
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    paused: bool = False
    busy_s: float = 0.0  # seconds in which at least one request ran
    request_seconds: float = 0.0  # integral of the number of running requests over time
    prefilled_tokens: int = 0
    # Heap of (decoding step at which the request finishes, serial number of the start, request)
    _running: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list)
    _steps: float = 0.0  # decoding steps so far
    _prefill_left_s: float = 0.0  # seconds of prefill that must pass before decoding continues
    _cached: set[Hashable] = field(default_factory=set)  # prompts in the prefix cache
    _start_serials: count = field(default_factory=count)

    @property
    def running(self) -> list[SimulatedRequest]:
        """Running requests in the order in which they started."""
        return [request for _, _, request in sorted(self._running, key=lambda entry: entry[1])]

    @property
    def pending(self) -> int:
        """Number of requests that are not finished."""
        return len(self._running) + len(self.waiting)

    def next_finish(self) -> float:
        """Return the time at which the next request finishes if no call changes the queue.

        Returns infinity if no request runs or the engine is paused.
        """
        if self.paused or not self._running:
            return inf
        return self.now + self._prefill_left_s + self._steps_left() * self.speeds.decoding_step_s(len(self._running))

    def advance(self, now: float) -> list[SimulatedRequest]:
        """Move the time forward to `now`. Returns the requests that have finished by then, in the order of finishing."""
        finished: list[SimulatedRequest] = []
        while (finish_time := self.next_finish()) <= now:
            self._count_busy(finish_time - self.now)
            self.now, self._prefill_left_s, self._steps = max(self.now, finish_time), 0.0, self._running[0][0]
            while self._running and self._running[0][0] <= self._steps:
                _, _, request = heapq.heappop(self._running)
                request.decoded = float(request.response_tokens)
                finished.append(request)
            self._start_waiting()
        self._decode(now - self.now)
        self.now = max(self.now, now)
        return finished

    def decoded(self, request: SimulatedRequest) -> int:
        """Return the number of whole tokens that a request has decoded so far."""
        running = any(other is request for _, _, other in self._running)
        return int(request.decoded + (self._steps - request._start_step if running else 0.0) + 1e-9)

    def add(self, request: SimulatedRequest) -> None:
        """Add a request at the current time. Call `advance` first."""
        self.waiting.append(request)
        self._start_waiting()

    def pause(self, mode: PauseMode) -> list[SimulatedRequest]:
        """Stop decoding until `resume` is called. With mode `abort`, removes and returns all requests; otherwise returns []."""
        self.paused = True
        aborted = self.abort(lambda _: True) if mode is PauseMode.abort else []
        if mode is PauseMode.retract:
            self.waiting.extend(self._remove_running(self.running))
            self._prefill_left_s = 0.0
        return aborted

    def resume(self) -> None:
        """Continue after a pause."""
        self.paused = False
        self._start_waiting()

    def flush(self) -> None:
        """Empty the prefix cache."""
        self._cached.clear()

    def abort(self, should_abort: Callable[[SimulatedRequest], bool]) -> list[SimulatedRequest]:
        """Remove and return the requests for which `should_abort` is true. Also updates their field `decoded`."""
        aborted = [request for request in [*self.running, *self.waiting] if should_abort(request)]
        self._remove_running(aborted)
        ids = {id(request) for request in aborted}
        self.waiting = deque(request for request in self.waiting if id(request) not in ids)
        self._start_waiting()
        return aborted

    def _steps_left(self) -> float:
        """Return the number of decoding steps until the next request finishes."""
        return self._running[0][0] - self._steps

    def _decode(self, seconds: float) -> None:
        """Prefill and decode for `seconds`. The caller ensures that no request finishes in this time."""
        if self.paused or not self._running or seconds <= 0:
            return
        self._count_busy(seconds)
        prefill_s = min(seconds, self._prefill_left_s)
        self._prefill_left_s -= prefill_s
        self._steps += (seconds - prefill_s) / self.speeds.decoding_step_s(len(self._running))

    def _count_busy(self, seconds: float) -> None:
        self.busy_s += seconds
        self.request_seconds += seconds * len(self._running)

    def _start_waiting(self) -> None:
        """Start waiting requests until the running batch is full.

        When a request starts, the engine prefills the tokens that the request decoded earlier. It also prefills the prompt,
        except for the tokens that are in the prefix cache.
        """
        while self.waiting and not self.paused and len(self._running) < self.speeds.max_running:
            request = self.waiting.popleft()
            cached = request.prompt_tokens - 1 if request.prompt in self._cached else 0
            tokens = request.prompt_tokens - cached + int(request.decoded)
            if not request.started:
                request.started, request.cached_tokens = True, cached
            self._cached.add(request.prompt)
            self._prefill_left_s += tokens * self.speeds.prefill_s
            self.prefilled_tokens += tokens
            request._start_step = self._steps
            end = self._steps + request.response_tokens - request.decoded
            heapq.heappush(self._running, (end, next(self._start_serials), request))

    def _remove_running(self, requests: list[SimulatedRequest]) -> list[SimulatedRequest]:
        """Remove these requests from the running batch, and update their field `decoded`. Returns `requests`."""
        removed = {id(request) for request in requests}
        for _, _, request in self._running:
            if id(request) in removed:
                request.decoded += self._steps - request._start_step
        self._running = [entry for entry in self._running if id(entry[2]) not in removed]
        heapq.heapify(self._running)
        return requests
