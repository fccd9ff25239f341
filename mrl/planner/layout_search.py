"""The quickest layout, placement and share of GPUs for a model on a cluster: exact over the space, deterministic. Pure.

Trainers' seconds depend on their layout and their GPUs, engines' on theirs; so each side is searched by itself for every share of
the GPUs, and shares are compared last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from mrl.config.schema import ASYNC_STALENESS
from mrl.planner import engine_time
from mrl.planner.engine_time import Engine, Sampling
from mrl.planner.layout_space import Layout, Machine, Space
from mrl.planner.model_shape import ModelShape
from mrl.planner.step_workload import Workload
from mrl.planner.trainer_memory import SLOTS, TrainerSettings, trainer_memory
from mrl.planner.trainer_time import PARTS, Array, Trainer

# FROM: Why an answer of the search is as quick as it is, and what others lose against it, in words. Pure.
# FROM: Whether a GPU's memory holds a trainer, as the search asks. Pure.

STALENESS = {"sync": 0, "one_step_off": 1, "async": ASYNC_STALENESS}

Fits = Callable[[Layout, int], bool]
"""Whether a GPU's memory holds a trainer of this layout with so many replicas; with more replicas it needs no more."""


@dataclass(frozen=True)
class Trainers:
    """A layout on a number of GPUs."""

    layout: Layout
    replicas: int
    seconds: float
    switch_s: float  # if the GPUs are engines' by turns

    @property
    def gpus(self) -> int:
        return self.layout.lane * self.replicas


@dataclass(frozen=True)
class Candidate:
    """A whole answer; seconds of a step and of its parts."""

    trainers: Trainers
    engine_tp: int
    num_engines: int
    placement: str  # colocated: trainers and engines use the same GPUs by turns
    mode: str
    sampling: Sampling
    push_s: float
    switch_s: float

    @cached_property
    def step_s(self) -> float:
        return self.sampling.step_s(self.trainers.seconds) + self.push_s + self.switch_s

    @property
    def rollout_s(self) -> float:
        """Of sampling, if trainers took no time."""
        return self.sampling.step_s(0.0)

    @property
    def engine_gpus(self) -> int:
        return self.num_engines * self.engine_tp

    @property
    def gpus(self) -> int:
        """That it needs."""
        both = (self.trainers.gpus, self.engine_gpus)
        return max(both) if self.placement == "colocated" else sum(both)

    @property
    def shape(self) -> tuple:
        """Equal for answers that differ in the shares of GPUs only."""
        return self.placement, self.mode, self.trainers.layout, self.engine_tp

    @property
    def order(self) -> tuple:
        """Quicker ones first, then those of fewer GPUs, then the simpler ones."""
        layout = self.trainers.layout
        sizes = (layout.recompute, layout.lane, layout.vpp, layout.cp, layout.pp, layout.tp, layout.etp, layout.ep)
        return self.step_s, self.gpus, sizes, self.placement, self.engine_tp, self.num_engines, self.mode


@dataclass(frozen=True)
class Found:
    """What a search has to say."""

    best: list[Candidate]  # quickest first, each of another shape
    of_each: list[Candidate]  # the quickest of each placement and mode
    looked_at: int  # layouts with a number of replicas, whose seconds were computed
    excluded: Counter[str]  # by reason


@dataclass(eq=False)
class Search:
    """One model on one machine."""

    space: Space
    work: Workload
    fits: Fits
    bucket_bytes: int = 64 * 2**20
    memory_fraction: float = 0.8
    most_running: int | None = None
    modes: Sequence[str] = tuple(STALENESS)
    staleness: int = STALENESS["async"]  # of mode async
    looked_at: int = 0

    def run(self, count: int) -> Found:
        """The best `count` answers. Raises ValueError where there is none."""
        answers = sorted(self._candidates(count), key=lambda answer: answer.order)
        if not answers:
            reasons = ", ".join(f"{reason} ({number})" for reason, number in self.space.excluded.most_common())
            raise ValueError(
                f"no layout fits on {self.space.machine.gpus} GPUs: {reasons or 'nothing is left open'}; "
                "use more nodes (cluster.nodes), GPUs with more memory, or leave more open (plan.fix)."
            )
        shapes: dict[tuple, Candidate] = {}
        each: dict[tuple, Candidate] = {}
        for answer in answers:
            shapes.setdefault(answer.shape, answer)
            each.setdefault((answer.placement, answer.mode), answer)
        return Found(list(shapes.values())[:count], list(each.values()), self.looked_at, +self.space.excluded)

    def _quickest(self, count: int) -> tuple[dict[int, list[Trainers]], dict[int, list[Trainers]]]:
        """The quickest few by their number of GPUs: where these are theirs alone, and where they are engines' by turns."""
        columns = list(self._timed())
        if not columns:
            return {}, {}
        layouts = [layout for layout, *_ in columns]
        which = np.repeat(np.arange(len(columns)), [len(replicas) for _, replicas, *_ in columns])
        replicas = np.concatenate([replicas for _, replicas, *_ in columns])
        seconds = np.concatenate([seconds for _, _, seconds, _ in columns])
        switch = np.concatenate([switch for *_, switch in columns])
        gpus = replicas * np.array([layout.lane for layout in layouts])[which]

        def first(by: NDArray[np.float64]) -> dict[int, list[Trainers]]:
            order = np.lexsort((which, by, gpus))
            starts = np.flatnonzero(np.diff(gpus[order], prepend=0))
            found: dict[int, list[Trainers]] = {}
            for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
                those = order[start : min(start + count, end)].tolist()
                found[int(gpus[those[0]])] = [
                    Trainers(layouts[which[n]], int(replicas[n]), float(seconds[n]), float(switch[n])) for n in those
                ]
            return found

        return first(seconds), first(seconds + switch)

    def _timed(self) -> Iterator[tuple[Layout, NDArray[np.int64], Array, Array]]:
        """(layout, numbers of replicas that fit, seconds with each, seconds of giving GPUs away and taking them again)."""
        for plain in self.space.layouts():
            replicas = self._replicas(plain)
            full = replace(plain, recompute=True)
            without = self._first_fit(plain, replicas)
            least = self._first_fit(full, replicas[:without])
            if least == without == len(replicas):
                self.space.excluded["trainer does not fit in memory"] += 1
            for layout, some in ((full, replicas[least:without]), (plain, replicas[without:])):
                if len(some):
                    self.looked_at += len(some)
                    trainer = self._trainer(layout)
                    switch = 2 * trainer.state_bytes(some) * (1 + self.work.critic) / self.space.machine.pcie_bytes
                    yield layout, some, trainer.times(some).total_s, switch

    def _trainer(self, layout: Layout) -> Trainer:
        return Trainer(self.space.sizes, layout, self.space.machine, self.work)

    def _replicas(self, layout: Layout) -> NDArray[np.int64]:
        """Numbers of replicas to look at: whole nodes, where there are several; a replica trains one response at least."""
        machine, fixed = self.space.machine, self.space.fixed.get("dp")
        most = min(machine.gpus // layout.lane, max(layout.expert_step, self.work.responses // self.work.mini_batches))
        replicas = np.arange(layout.expert_step, most + 1, layout.expert_step, dtype=np.int64)
        if machine.gpus > machine.per_node:
            replicas = replicas[replicas * layout.lane % machine.per_node == 0]
        return replicas if fixed is None else replicas[replicas == fixed]

    def _first_fit(self, layout: Layout, replicas: NDArray[np.int64]) -> int:
        """Place of the fewest replicas that fit; their number, where none do."""
        if not len(replicas) or not self.fits(layout, int(replicas[-1])):
            return len(replicas)
        if self.fits(layout, int(replicas[0])):
            return 0
        low, high = 1, len(replicas) - 1  # the last fits, the first does not
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(layout, int(replicas[middle])) else (middle + 1, high)
        return low

    def _candidates(self, count: int) -> Iterator[Candidate]:
        engines_of = self._engines()
        placement = self.space.fixed.get("placement")
        alone, by_turns = self._quickest(count)
        if placement != "disaggregated" and "sync" in self.modes:
            for those in by_turns.values():
                yield from self._by_turns(those, engines_of)
        if placement != "colocated":
            for gpus, those in alone.items():
                yield from self._apart(gpus, those, engines_of)

    def _engines(self) -> list[Engine]:
        found = []
        for tp in self.space.engine_tps():
            engine = self._engine(tp)
            if engine.max_running(self.work.lengths):
                found.append(engine)
            else:
                self.space.excluded["engine does not fit in memory"] += 1
        return found

    def _count(self, engine: Engine, gpus: int) -> int:
        """Engines on so many GPUs; 0: none, or not as many as the user wants."""
        count = min(gpus // engine.tp, self.work.responses)
        fixed = self.space.fixed.get("num_engines", count)
        return fixed if fixed <= count else 0

    def _by_turns(self, those: Sequence[Trainers], engines_of: Sequence[Engine]) -> Iterator[Candidate]:
        machine, sizes = self.space.machine, self.space.sizes
        for engine in engines_of:
            if not (count := self._count(engine, machine.gpus)):
                continue
            sampling = self._sampling(engine, count, "sync")
            for trainers in those:
                if machine.gpus <= machine.per_node:
                    push = engine_time.push_within_a_node_s(sizes, machine, trainers.gpus, engine.tp)
                else:
                    push = engine_time.push_s(sizes, machine, trainers.gpus, count, engine.tp, self.bucket_bytes)
                switch = trainers.switch_s
                yield Candidate(trainers, engine.tp, count, "colocated", "sync", sampling, push, switch)

    def _apart(self, gpus: int, those: Sequence[Trainers], engines_of: Sequence[Engine]) -> Iterator[Candidate]:
        machine, sizes = self.space.machine, self.space.sizes
        for engine in engines_of:
            if not (count := self._count(engine, machine.gpus - gpus)):
                continue
            push = engine_time.push_s(sizes, machine, gpus, count, engine.tp, self.bucket_bytes)
            for mode in self.modes:
                sampling = self._sampling(engine, count, mode)
                for trainers in those:
                    yield Candidate(trainers, engine.tp, count, "disaggregated", mode, sampling, push, 0.0)

    def _sampling(self, engine: Engine, count: int, mode: str) -> Sampling:
        ahead = self._ahead(mode)
        speeds = engine.speeds(self.work.lengths, -(-self.work.responses // count) * (ahead + 1))
        return Sampling.of(speeds, self.work, count, ahead)

    def _ahead(self, mode: str) -> int:
        return self.staleness if mode == "async" else STALENESS[mode]

    def load(self, answer: Candidate) -> tuple[int, int]:
        """(responses that run at one time at most, responses that it is asked for at one time) of an engine."""
        asked = -(-self.work.responses // answer.num_engines) * (self._ahead(answer.mode) + 1)
        return self._engine(answer.engine_tp).max_running(self.work.lengths), asked

    def _engine(self, tp: int) -> Engine:
        return Engine(self.space.sizes, self.space.machine, tp, self.memory_fraction, self.most_running)

    def parts(self, answer: Candidate) -> dict[str, float]:
        """Seconds of a step by where they go: PARTS of the trainers, rollout, push, switch."""
        trainers = answer.trainers
        found = self._trainer(trainers.layout).times(np.array([trainers.replicas])).at(0)
        rest = dict(rollout=answer.rollout_s, push=answer.push_s, switch=answer.switch_s)
        return {name: found[name] for name in PARTS} | rest


MEANING = dict(
    matmul="arithmetic of attention's projections, MLPs and the output layer",
    attention="arithmetic of attention",
    experts="arithmetic of experts, or reading their weights",
    tensor="tensor-parallel messages",
    context="gathering keys and values over context-parallel ranks",
    dispatch="tokens on their way to experts and back",
    pipeline="the pipeline's bubble, and messages between stages",
    gradients="summing gradients, gathering weights",
    optimizer="the optimizer's memory traffic",
    rollout="sampling",
    push="bringing weights to engines",
    switch="giving GPUs to each other",
)
"""Parts of a step's seconds, as Search.parts has them."""
NOTICED_S = 0.005  # share of a step below which a difference is not told


def limits(search: Search, answer: Candidate) -> list[str]:
    """What holds the best answer back, the largest first."""
    return [_balance(answer), _sampling(search, answer), _training(search, answer)]


def _balance(answer: Candidate) -> str:
    rollout, train = answer.rollout_s, answer.trainers.seconds
    if answer.mode == "sync":
        shares = f"sampling {rollout / answer.step_s:.0%}, training {train / answer.step_s:.0%}"
        rest = (answer.push_s + answer.switch_s) / answer.step_s
        return f"in turns: {shares}, weights and switches {rest:.0%} of the step"
    longer, shorter = ("sampling", "training") if rollout >= train else ("training", "sampling")
    waits = 1 - min(rollout, train) / max(rollout, train)
    return f"beside each other: {longer} takes longer, {shorter} waits {waits:.0%} of that time"


def _sampling(search: Search, answer: Candidate) -> str:
    running, asked = search.load(answer)
    if asked > running:
        return f"sampling: the KV cache of an engine holds {running:,} of {asked:,} responses at one time"
    longest = search.work.lengths.longest_of(search.work.responses)
    return (
        f"sampling: all {asked:,} responses of an engine run at once; the longest, {longest:,.0f} tokens, is waited for"
    )


def _training(search: Search, answer: Candidate) -> str:
    parts = search.parts(answer)
    named = sorted(((parts[name], name) for name in PARTS), reverse=True)[:3]
    total = answer.trainers.seconds
    return "training: " + ", ".join(f"{seconds / total:.0%} {MEANING[name]}" for seconds, name in named)


def losses(search: Search, best: Candidate, other: Candidate) -> str:
    """What another answer loses and wins against the best, the largest first."""
    mine, theirs = search.parts(best), search.parts(other)
    apart = sorted(((theirs[name] - mine[name], name) for name in mine), key=lambda pair: -abs(pair[0]))
    told = [f"{name} {seconds:+.3g} s" for seconds, name in apart if abs(seconds) > NOTICED_S * best.step_s][:4]
    return ", ".join([*_changes(best, other), *told]) or "as quick"


def _changes(best: Candidate, other: Candidate) -> Iterator[str]:
    if best.placement != other.placement:
        yield other.placement
    if best.mode != other.mode:
        yield other.mode


MEGATRON_PREFIX = "megatron."


def fits_of(shape: ModelShape, machine: Machine, settings: TrainerSettings) -> Callable[[Layout, int], bool]:
    """Whether the busiest phase of the busiest rank fits, by mrl.planner.memory, under a layout with so many replicas."""
    room = machine.memory_bytes - SLOTS * settings.bucket_bytes

    @cache
    def settings_of(last_layers: int, recompute: bool) -> TrainerSettings:
        keys = Layout(last_layers=last_layers, recompute=recompute).overrides(1, False)
        fields = {
            key.removeprefix(MEGATRON_PREFIX): value for key, value in keys.items() if key.startswith(MEGATRON_PREFIX)
        }
        found = TrainerSettings.with_megatron(fields)
        return replace(settings, recompute=found.recompute, uneven=found.uneven)

    def fits(layout: Layout, replicas: int) -> bool:
        asked = settings_of(layout.last_layers, layout.recompute)
        return max(trainer_memory(shape, layout.dims(replicas), asked).by_phase.values()) <= room

    return fits
