"""Searches for the layout, the placement and the division of GPUs that have the shortest predicted training step.

The seconds of the trainers depend only on the layout and the number of GPUs of the trainers. The seconds of the engines depend
only on the layout and the number of GPUs of the engines. So the search evaluates trainers and engines separately for every number
of GPUs. Then the search compares all divisions of the GPUs between trainers and engines.

The search is deterministic. It finds the shortest predicted step among the candidates with these properties:

- The run has as many engines as fit. If trainers and engines share GPUs, the engines use the GPUs of the trainers. Otherwise
  they use the other GPUs. The run has no more engines than a step has responses. plan.fix can set a smaller number of engines.
- On several nodes, the replicas of the trained model fill whole nodes.
- Trainers recompute activations only if they do not fit in memory otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from mrl.config.schema import ASYNC_STALENESS
from mrl.placement.resource_pools import pluralize
from mrl.planner.engine_time import EngineTime, RolloutTime, push_s, push_within_a_node_s
from mrl.planner.layout_space import GpuCluster, LayoutSpace, ReplicaLayout
from mrl.planner.model_shape import ModelShape
from mrl.planner.run_memory import DEFAULT_MEM_FRACTION
from mrl.planner.step_workload import StepWorkload
from mrl.planner.trainer_memory import SENDER_BUCKETS, TrainerSettings, trainer_memory
from mrl.planner.trainer_time import PARTS, WEIGHT_BYTES, FloatArray, IntArray, TrainerTime

STALENESS = {"sync": 0, "one_step_off": 1, "async": ASYNC_STALENESS}
"""rollout.mode -> number of training steps that sampling may be ahead of training."""

FitsInMemory = Callable[[ReplicaLayout, int], bool]
"""Function (layout, number of replicas) -> whether a trainer rank fits in a GPU's memory.

If a layout fits with some number of replicas, it also fits with every larger number of replicas.
"""


def memory_check(shape: ModelShape, cluster: GpuCluster, *models: TrainerSettings) -> FitsInMemory:
    """Return a function that tells whether the rank that needs the most memory fits on its GPU in every phase of a step.

    `models`: settings of the models that have this shape and layout: the actor, and the critic if the run has one.

    The returned function differs from `mrl plan memory`. In every phase, it subtracts the buckets of the weight sync from
    `cluster.memory_bytes`, although the bytes of the weight sync already include the buckets. `cluster.memory_bytes` is the
    memory of a GPU minus 2 x plan.reserve_gb (for a trainer rank and an engine rank), whichever roles share the GPU.
    """
    available_bytes = cluster.memory_bytes - SENDER_BUCKETS * models[0].bucket_bytes

    @cache
    def settings_for(last_layers: int, recompute: bool) -> list[TrainerSettings]:
        layout = ReplicaLayout(last_layers=last_layers, recompute=recompute)
        from_layout = TrainerSettings.with_megatron(layout.megatron())
        return [replace(each, recompute=from_layout.recompute, uneven=from_layout.uneven) for each in models]

    def fits(layout: ReplicaLayout, replicas: int) -> bool:
        dims, all_settings = layout.dims(replicas), settings_for(layout.last_layers, layout.recompute)
        needed = [max(trainer_memory(shape, dims, settings).by_phase.values()) for settings in all_settings]
        return max(needed) <= available_bytes

    return fits


@dataclass(frozen=True)
class TrainerCandidate:
    """A layout and a number of replicas of the trained model, with the predicted seconds."""

    layout: ReplicaLayout
    replicas: int
    train_s: float  # seconds of training in a step
    # seconds of offloading and loading models in a step, if trainers share their GPUs with engines
    offload_and_load_s: float

    @property
    def gpus(self) -> int:
        return self.layout.gpus * self.replicas

    @property
    def layout_without_vpp(self) -> ReplicaLayout:
        """The layout without virtual pipeline stages."""
        return replace(self.layout, vpp=1)


@dataclass(frozen=True)
class RunCandidate:
    """A complete configuration of trainers and engines, with the predicted seconds of a step."""

    trainers: TrainerCandidate
    engine_tp: int
    num_engines: int
    placement: str  # colocated (trainers and engines time-share GPUs) or disaggregated
    mode: str  # rollout.mode
    rollout: RolloutTime  # predicts the seconds of sampling
    push_s: float  # seconds of the weight push
    offload_and_load_s: float  # see TrainerCandidate; 0 if disaggregated

    @cached_property
    def step_s(self) -> float:
        return self.rollout.step_s(self.trainers.train_s) + self.push_s + self.offload_and_load_s

    @property
    def rollout_s(self) -> float:
        """Seconds of sampling in a step, as if training, weight push and offloading took no time."""
        return self.rollout.step_s(0.0)

    @property
    def engine_gpus(self) -> int:
        return self.num_engines * self.engine_tp

    @property
    def gpus(self) -> int:
        """Number of GPUs of the run."""
        both = (self.trainers.gpus, self.engine_gpus)
        return max(both) if self.placement == "colocated" else sum(both)

    @property
    def kind(self) -> tuple:
        """Key that is the same for candidates that differ only in the numbers of replicas and of engines."""
        return self.placement, self.mode, self.trainers.layout, self.engine_tp

    @property
    def placement_and_layout(self) -> tuple:
        """Key that is the same for candidates with the same placement and trainer layout.

        The candidates may differ in virtual pipeline stages, in the number of replicas, in the engines and in the mode.
        """
        return self.placement, self.trainers.layout_without_vpp

    @property
    def order(self) -> tuple:
        """Sort key: shorter steps first; of equally long steps, fewer GPUs first, then simpler layouts."""
        layout = self.trainers.layout
        sizes = (layout.recompute, layout.gpus, layout.vpp, layout.cp, layout.pp, layout.tp, layout.etp, layout.ep)
        return self.step_s, self.gpus, sizes, self.placement, self.engine_tp, self.num_engines, self.mode


@dataclass(frozen=True)
class SearchResult:
    """The best candidates, how many trainer candidates were evaluated, and why layouts and sizes were excluded."""

    # Fastest first. The candidates differ in `placement_and_layout`. If there are too few of them, the list also has the fastest
    # of the other candidates, and all candidates of the list differ in `kind`.
    best: list[RunCandidate]
    best_of_each_placement_and_mode: list[RunCandidate]  # the fastest candidate of each pair (placement, mode)
    evaluated: int  # number of pairs (trainer layout, number of replicas) for which the search predicted seconds
    # reason -> number of layouts and sizes (such as values of cp) that were excluded for this reason
    excluded: Counter[str]


@dataclass(eq=False)
class LayoutSearch:
    """Searches for the configuration of one model, one workload and one cluster that has the shortest predicted step."""

    space: LayoutSpace
    work: StepWorkload
    fits: FitsInMemory
    bucket_bytes: int = 64 * 2**20  # bytes of a bucket of the weight sync: weight_sync.bucket_bytes
    memory_fraction: float = DEFAULT_MEM_FRACTION
    max_requests: int | None = None  # largest number of running requests of one engine: sglang.max_running_requests
    kv_itemsize: int = WEIGHT_BYTES  # bytes of one element of the KV cache
    modes: Sequence[str] = tuple(STALENESS)  # values of rollout.mode that the search considers
    staleness: int = STALENESS["async"]  # largest staleness of mode async
    evaluated: int = 0  # see SearchResult

    def run(self, count: int) -> SearchResult:
        """Return the `count` best candidates. Raises ValueError if no layout fits."""
        candidates = sorted(self._candidates(count), key=lambda candidate: candidate.order)
        if not candidates:
            reasons = ", ".join(f"{reason} ({number})" for reason, number in self.space.excluded.most_common())
            raise ValueError(
                f"no layout fits on {pluralize(self.space.cluster.gpus, 'GPU')}: {reasons or 'plan.fix excludes all layouts'}; "
                "use more nodes (cluster.nodes), GPUs with more memory, or fix fewer keys (plan.fix)."
            )
        by_kind: dict[tuple, RunCandidate] = {}
        by_placement_and_mode: dict[tuple, RunCandidate] = {}
        for candidate in candidates:
            by_kind.setdefault(candidate.kind, candidate)
            by_placement_and_mode.setdefault((candidate.placement, candidate.mode), candidate)
        by_layout: dict[tuple, RunCandidate] = {}
        for candidate in candidates:
            by_layout.setdefault(candidate.placement_and_layout, candidate)
        chosen = list(by_layout.values())[:count]
        others = [candidate for candidate in by_kind.values() if candidate not in chosen]
        best = sorted([*chosen, *others[: count - len(chosen)]], key=lambda candidate: candidate.order)
        return SearchResult(best, list(by_placement_and_mode.values()), self.evaluated, +self.space.excluded)

    def _fastest_trainers(
        self, count: int
    ) -> tuple[dict[int, list[TrainerCandidate]], dict[int, list[TrainerCandidate]]]:
        """Return two mappings from a number of GPUs to the `count` fastest trainer candidates on this number of GPUs.

        Candidates on the same number of GPUs differ in `layout_without_vpp`. The first mapping is for trainers on GPUs of
        their own. The second mapping is for trainers that share GPUs with engines.
        """
        timed = list(self._timed_layouts())
        if not timed:
            return {}, {}
        layouts = [layout for layout, *_ in timed]
        index = np.repeat(np.arange(len(timed)), [len(replicas) for _, replicas, *_ in timed])
        replicas = np.concatenate([replicas for _, replicas, *_ in timed])
        seconds = np.concatenate([seconds for _, _, seconds, _ in timed])
        offload_s = np.concatenate([each for *_, each in timed])
        gpus = replicas * np.array([layout.gpus for layout in layouts])[index]

        def fastest_by(key: FloatArray) -> dict[int, list[TrainerCandidate]]:
            order = np.lexsort((index, key, gpus))
            starts = np.flatnonzero(np.diff(gpus[order], prepend=0))
            fastest: dict[int, list[TrainerCandidate]] = {}
            for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
                by_layout: dict[ReplicaLayout, TrainerCandidate] = {}
                for n in order[start:end].tolist():
                    each = TrainerCandidate(layouts[index[n]], int(replicas[n]), float(seconds[n]), float(offload_s[n]))
                    by_layout.setdefault(each.layout_without_vpp, each)
                    if len(by_layout) == count:
                        break
                fastest[int(gpus[order[start]])] = list(by_layout.values())
            return fastest

        return fastest_by(seconds), fastest_by(seconds + offload_s)

    def _timed_layouts(self) -> Iterator[tuple[ReplicaLayout, IntArray, FloatArray, FloatArray]]:
        """Yield (layout, numbers of replicas that fit, seconds of training, seconds of offloading and loading).

        The last three results are arrays with one element for each number of replicas. Layouts with recomputation are used only
        for numbers of replicas that do not fit without recomputation.
        """
        for plain in self.space.layouts():
            replicas = self._replicas(plain)
            if not len(replicas):
                self.space.excluded["no possible number of replicas"] += 1
                continue
            recomputing = replace(plain, recompute=True)
            first_plain = self._first_that_fits(plain, replicas)
            first_recomputing = self._first_that_fits(recomputing, replicas[:first_plain])
            if first_recomputing == first_plain == len(replicas):
                self.space.excluded["trainer does not fit in memory"] += 1
            with_recomputation = (recomputing, replicas[first_recomputing:first_plain])
            for layout, fitting in (with_recomputation, (plain, replicas[first_plain:])):
                if len(fitting):
                    self.evaluated += len(fitting)
                    trainer = self._trainer_time(layout)
                    state = trainer.state_bytes(fitting) * (1 + self.work.critic)
                    offload_s = 2 * state / self.space.cluster.pcie_bytes_per_s
                    yield layout, fitting, trainer.times(fitting).total_s, offload_s

    def _trainer_time(self, layout: ReplicaLayout) -> TrainerTime:
        return TrainerTime(self.space.shape, layout, self.space.cluster, self.work)

    def _replicas(self, layout: ReplicaLayout) -> IntArray:
        """Return the numbers of replicas to evaluate.

        They are multiples of `layout.replica_multiple`. No number except the smallest multiple is larger than the number of
        responses of a mini-batch, so that each replica gets at least one response. On more than one node, the replicas must
        fill whole nodes. plan.fix may fix the number.
        """
        cluster, fixed = self.space.cluster, self.space.fixed.get("dp")
        responses = self.work.responses // self.work.mini_batches
        most = min(cluster.gpus // layout.gpus, max(layout.replica_multiple, responses))
        replicas = np.arange(layout.replica_multiple, most + 1, layout.replica_multiple, dtype=np.int64)
        if cluster.gpus > cluster.gpus_per_node:
            replicas = replicas[replicas * layout.gpus % cluster.gpus_per_node == 0]
        return replicas if fixed is None else replicas[replicas == fixed]

    def _first_that_fits(self, layout: ReplicaLayout, replicas: IntArray) -> int:
        """Return the index of the smallest number of replicas that fits in memory, or len(replicas) if none fits."""
        if not len(replicas) or not self.fits(layout, int(replicas[-1])):
            return len(replicas)
        if self.fits(layout, int(replicas[0])):
            return 0
        low, high = 1, len(replicas) - 1  # bisection: the last number fits, the first number does not
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(layout, int(replicas[middle])) else (middle + 1, high)
        return low

    def _candidates(self, count: int) -> Iterator[RunCandidate]:
        engines = self._fitting_engines()
        placement = self.space.fixed.get("placement")
        disaggregated, colocated = self._fastest_trainers(count)
        if placement != "disaggregated" and "sync" in self.modes:
            for gpus, trainers in colocated.items():
                yield from self._colocated(gpus, trainers, engines)
        if placement != "colocated":
            for gpus, trainers in disaggregated.items():
                yield from self._disaggregated(gpus, trainers, engines)

    def _fitting_engines(self) -> list[EngineTime]:
        engines = []
        for tp in self.space.engine_tps():
            engine = self._engine_time(tp)
            if engine.max_running(self.work.lengths):
                engines.append(engine)
            else:
                self.space.excluded["engine does not fit in memory"] += 1
        return engines

    def _num_engines(self, engine: EngineTime, gpus: int) -> int:
        """Return the number of engines on `gpus` GPUs, or 0 if fewer engines fit than plan.fix requires."""
        count = min(gpus // engine.tp, self.work.responses)
        fixed = self.space.fixed.get("num_engines", count)
        return fixed if fixed <= count else 0

    def _colocated(
        self, gpus: int, trainers: Sequence[TrainerCandidate], engines: Sequence[EngineTime]
    ) -> Iterator[RunCandidate]:
        """Yield candidates whose engines use only GPUs of the trainers, and get their weights by weight_sync.transport=cuda_ipc.

        With this transport, every engine rank must share its GPU with a trainer rank. On one node, the weight push is predicted
        for links within the node. On several nodes, the push is predicted as for weight_sync.transport=process_group, because the
        trainer ranks first send the weights between nodes. The time to copy weights on each GPU is neglected.
        """
        cluster, shape = self.space.cluster, self.space.shape
        for engine in engines:
            if not (count := self._num_engines(engine, gpus)):
                continue
            rollout = self._rollout_time(engine, count, STALENESS["sync"])
            for trainer in trainers:
                if cluster.gpus <= cluster.gpus_per_node:
                    push = push_within_a_node_s(shape, cluster, trainer.gpus, engine.tp)
                else:
                    push = push_s(shape, cluster, trainer.gpus, count, engine.tp, self.bucket_bytes)
                yield RunCandidate(
                    trainer, engine.tp, count, "colocated", "sync", rollout, push, trainer.offload_and_load_s
                )

    def _disaggregated(
        self, gpus: int, trainers: Sequence[TrainerCandidate], engines: Sequence[EngineTime]
    ) -> Iterator[RunCandidate]:
        cluster, shape = self.space.cluster, self.space.shape
        for engine in engines:
            if not (count := self._num_engines(engine, cluster.gpus - gpus)):
                continue
            push = push_s(shape, cluster, gpus, count, engine.tp, self.bucket_bytes)
            for mode in self.modes:
                times = [self._rollout_time(engine, count, staleness) for staleness in self._staleness_of(mode)]
                for trainer in trainers:
                    rollout = min(times, key=lambda each: each.step_s(trainer.train_s))
                    yield RunCandidate(trainer, engine.tp, count, "disaggregated", mode, rollout, push, 0.0)

    def _rollout_time(self, engine: EngineTime, num_engines: int, staleness: int) -> RolloutTime:
        speeds = engine.speeds(self.work.lengths, self._requests_per_engine(num_engines, staleness))
        return RolloutTime.of(speeds, self.work, num_engines, staleness)

    def _requests_per_engine(self, num_engines: int, staleness: int) -> int:
        return -(-self.work.responses // num_engines) * (staleness + 1)

    def _staleness_of(self, mode: str) -> Sequence[int]:
        """Return the values of staleness to evaluate. The search uses the fastest of them.

        With a larger staleness, an engine has more running responses, and prefills all of them again after each weight push. So a
        larger staleness may be slower.
        """
        return range(min(1, self.staleness), self.staleness + 1) if mode == "async" else (STALENESS[mode],)

    def _engine_time(self, tp: int) -> EngineTime:
        space = self.space
        return EngineTime(space.shape, space.cluster, tp, self.memory_fraction, self.max_requests, self.kv_itemsize)

    def engine_load(self, candidate: RunCandidate) -> tuple[int, int]:
        """Return (number of responses that one engine can run together, number of responses that one engine gets)."""
        requested = self._requests_per_engine(candidate.num_engines, candidate.rollout.staleness)
        return self._engine_time(candidate.engine_tp).max_running(self.work.lengths), requested

    def parts(self, candidate: RunCandidate) -> dict[str, float]:
        """Return the seconds of each part of a step: of the PARTS of training, and of rollout, push and switch."""
        trainers = candidate.trainers
        trainer_parts = self._trainer_time(trainers.layout).times(np.array([trainers.replicas])).at(0)
        others = dict(rollout=candidate.rollout_s, push=candidate.push_s, switch=candidate.offload_and_load_s)
        return {name: trainer_parts[name] for name in PARTS} | others


PART_MEANING = dict(
    matmul="matrix multiplications of attention projections, MLPs and the output layer",
    attention="attention scores and their products with values",
    experts="matrix multiplications of experts, or reading their weights",
    tensor="tensor-parallel communication",
    context="gathering keys and values over context-parallel ranks",
    dispatch="sending tokens to experts and back (all-to-all)",
    pipeline="the pipeline bubble, and messages between stages",
    gradients="reducing gradients and gathering weights",
    optimizer="memory traffic of the optimizer",
    rollout="sampling",
    push="pushing weights to engines",
    switch="offloading and loading models on shared GPUs",
)
"""Explanation of each part of `LayoutSearch.parts`."""
MIN_REPORTED_FRACTION = 0.005  # a part is reported if its difference is larger than this fraction of a step


def explain_limits(search: LayoutSearch, best: RunCandidate) -> list[str]:
    """Return three lines: how sampling and training share the step, what limits sampling, and what takes the time of training."""
    return [_balance(best), _sampling_limit(search, best), _training_limit(search, best)]


def _balance(best: RunCandidate) -> str:
    rollout, train = best.rollout_s, best.trainers.train_s
    if best.mode == "sync":
        sampling, training = (
            f"sampling takes {rollout / best.step_s:.0%} of a step",
            f"training {train / best.step_s:.0%}",
        )
        rest = f"pushing weights and offloading {(best.push_s + best.offload_and_load_s) / best.step_s:.0%}"
        return f"sampling and training alternate: {sampling}, {training}, {rest}"
    longer, shorter = ("sampling", "training") if rollout >= train else ("training", "sampling")
    idle = 1 - min(rollout, train) / max(rollout, train)
    return f"sampling and training run in parallel: {longer} takes longer, and {shorter} is idle for {idle:.0%} of that time"


def _sampling_limit(search: LayoutSearch, best: RunCandidate) -> str:
    running, requested = search.engine_load(best)
    if requested > running:
        return (
            f"sampling: an engine runs only {running:,} of its {requested:,} responses at one time (KV cache, or "
            "sglang.max_running_requests)"
        )
    longest = search.work.lengths.longest_response_of(search.work.responses)
    return (
        f"sampling: all {requested:,} responses of an engine run at one time; the step waits for the longest response, "
        f"which has {longest:,.0f} tokens"
    )


def _training_limit(search: LayoutSearch, best: RunCandidate) -> str:
    parts = search.parts(best)
    largest = sorted(((parts[name], name) for name in PARTS), reverse=True)[:3]
    total = best.trainers.train_s
    return "training: " + ", ".join(f"{seconds / total:.0%} {PART_MEANING[name]}" for seconds, name in largest)


def describe_difference(search: LayoutSearch, best: RunCandidate, other: RunCandidate) -> str:
    """Describe in which parts of a step `other` is slower (+) or faster (-) than `best`. The largest differences come first."""
    best_parts, other_parts = search.parts(best), search.parts(other)
    differences = sorted(
        ((other_parts[name] - best_parts[name], name) for name in best_parts), key=lambda pair: -abs(pair[0])
    )
    shown = [f"{name} {s:+.3g} s" for s, name in differences if abs(s) > MIN_REPORTED_FRACTION * best.step_s][:4]
    changed = [other.placement] if best.placement != other.placement else []
    changed += [other.mode] if best.mode != other.mode else []
    return ", ".join([*changed, *shown]) or "equally fast"
