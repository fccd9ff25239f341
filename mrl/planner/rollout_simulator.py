"""What a run would take in another shape: its rollouts, training and weight pushes, event by event, without a process or a clock.

Groups are admitted, chosen and dealt to engines by the very code that runs use, and engines are queues of
mrl.planner.engine_queue; so what is predicted is the schedule, given how long tokens take.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mrl.planner.engine_queue import Decoding, EngineSpeeds, Request
from mrl.rollout.dealing import apart, together
from mrl.rollout.lengths import Lengths
from mrl.rollout.window import Chosen, Ticket, Window

# FROM: The same work in other shapes: a table of what steps would take, and a picture of it.


@dataclass(frozen=True)
class Speeds:
    """Seconds of a run's parts."""

    engine: EngineSpeeds
    train_s: float  # of a step's training, whatever its size
    train_token_s: float  # for each token of prompts and responses
    push_s: float  # of bringing weights to the engines, which are paused meanwhile

    def training(self, tokens: float, scale: float) -> float:
        """Seconds to train so many tokens, with trainers that take `scale` as long for a token."""
        return self.train_s + self.train_token_s * tokens * scale


@dataclass(frozen=True)
class Setup:
    """The shape of a run."""

    prompts_per_step: int  # N
    num_engines: int
    staleness: int  # K: 0 synchronous, 1 one step off
    in_order: bool = False  # train groups in the order of drawing
    extra: int = 0  # groups in the making beyond what steps need: over-sampling
    train_scale: float = 1.0  # seconds that a token's training takes, over those of the speeds: replicas then / now
    colocated: bool = False  # engines and trainers have the same GPUs, by turns


@dataclass(frozen=True)
class Groups:
    """Lengths of the groups that a run draws, by ticket; beyond the last they are drawn again, at random."""

    responses: NDArray[np.int64]  # [T, G] tokens
    prompts: NDArray[np.int64]  # [T] tokens
    rows: NDArray[np.int64] | None = None  # [T] of the data set; None: all different
    seed: int = 0  # of what is drawn again

    def __post_init__(self) -> None:
        assert len(self.responses) == len(self.prompts) > 0, (
            f"{len(self.responses)} groups, {len(self.prompts)} prompts"
        )

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @cached_property
    def _places(self) -> list[int]:
        return list(range(len(self.prompts)))

    def of(self, ticket: int) -> tuple[int, list[int]]:
        """(prompt tokens, response tokens [G]) of a ticket."""
        while len(self._places) <= ticket:
            self._places.append(int(self._random.integers(len(self.prompts))))
        place = self._places[ticket]
        return int(self.prompts[place]), self.responses[place].tolist()

    def row(self, ticket: int) -> int:
        """Of the data set; those drawn again are rows that nobody has seen."""
        return int(self.rows[ticket]) if self.rows is not None and ticket < len(self.rows) else -1 - ticket


@dataclass(frozen=True)
class Prediction:
    """What a simulated run does."""

    step_s: NDArray[np.float64]  # [steps]
    tokens: NDArray[np.int64]  # [steps] response tokens that were trained
    best_possible_s: float  # of a mean step: what engines that are always full, or trainers that never wait, would take
    engine_idle_fraction: float  # of the engines' time: nothing runs
    occupancy: float  # mean of running requests over the most there can be
    ages: dict[int, int]  # weight versions from admission to training -> groups
    selection_ratio: float  # mean length of trained responses over that of all that were drawn
    dropped: int  # groups given up by over-sampling

    def seconds(self, skip: int = 0) -> float:
        """Of a mean step, without the first ones."""
        return float(self.step_s[skip:].mean())

    def tokens_per_s(self, skip: int = 0) -> float:
        """Trained response tokens, without those of the first steps."""
        return float(self.tokens[skip:].sum() / self.step_s[skip:].sum())


def simulate(groups: Groups, speeds: Speeds, setup: Setup, steps: int) -> Prediction:
    """Run so many steps."""
    return _Run(groups, speeds, setup).run(steps)


def best_possible_s(tokens: float, train_s: float, speeds: Speeds, setup: Setup) -> float:
    """Seconds that steps of so many response tokens and seconds of training take at least: engines always full, or trainers
    always at work, each but for one push. In turns, where they share GPUs, both."""
    full = speeds.engine.max_running
    engine_s = tokens * speeds.engine.token_s(full) / (full * setup.num_engines)
    both = (engine_s, train_s)
    return (sum(both) if setup.colocated else max(both)) + speeds.push_s


@dataclass
class _Done:
    """What happened so far."""

    ends: list[float] = field(default_factory=list)  # of steps, s
    tokens: list[int] = field(default_factory=list)  # response tokens of steps
    ages: Counter[int] = field(default_factory=Counter)
    train_s: float = 0.0
    dropped: int = 0


@dataclass(eq=False)
class _Asked:
    """One request: groups that are whole at one time."""

    place: int  # of its engine
    work: float  # that the engine is expected to have with it
    numbers: list[int]  # its tickets
    left: int  # responses


@dataclass(eq=False)
class _Run:
    """The driver of a simulated run, step by step as mrl.controller.trainer has them."""

    groups: Groups
    speeds: Speeds
    setup: Setup
    now: float = 0.0
    _ready: int = 0  # groups finished and not trained
    _asked: dict[Hashable, _Asked] = field(default_factory=dict)  # ticket -> its request, until that is done
    _born: dict[int, int] = field(default_factory=dict)  # ticket -> version
    _lengths: dict[int, tuple[int, int]] = field(default_factory=dict)  # ticket -> tokens of (prompts, responses)

    def __post_init__(self) -> None:
        setup = self.setup
        self.window: Window[None] = Window(setup.prompts_per_step, setup.staleness, setup.extra, setup.in_order)
        self.engines = [Decoding(self.speeds.engine) for _ in range(setup.num_engines)]
        self._next = [inf] * len(self.engines)  # second of each engine's next response
        self._work = [0.0] * len(self.engines)  # expected of each engine
        self._expected = Lengths(float(self.groups.responses.mean()))
        self._rows = count()

    def run(self, steps: int) -> Prediction:
        """Wait, train, push."""
        done = _Done()
        for step in range(steps):
            chosen = self._collect(step)
            self._drop(chosen.dropped)
            prompts, responses = np.sum([self._lengths[number] for number in chosen.numbers], axis=0)
            seconds = self.speeds.training(prompts + responses, self.setup.train_scale)
            self._train(seconds)
            self._push()
            done.ends.append(self.now)
            done.tokens.append(int(responses))
            done.ages.update(step - self._born[number] for number in chosen.numbers)
            done.train_s += seconds
            done.dropped += len(chosen.dropped)
        return self._prediction(done)

    def _collect(self, step: int) -> Chosen[None]:
        """Wait for the groups of a step."""
        while True:
            if room := self.window.room():
                self._admit(self.window.admit([next(self._rows) for _ in range(room)], step))
            if self._ready >= self.window.size and (chosen := self.window.choose(step)) is not None:
                self._ready -= len(chosen.numbers)
                return chosen
            self._pass_until_ready()

    def _pass_until_ready(self) -> None:
        """Go on until another group is finished."""
        ready = self._ready
        while self._ready == ready:
            assert min(self._next) < inf, "a step waits, and nothing is in the making"
            self._pass(min(self._next))

    def _admit(self, tickets: Sequence[Ticket]) -> None:
        """Ask for these groups, each request of the engine that has least to do."""
        for ticket in tickets:
            prompt, responses = self.groups.of(ticket.number)
            self._born[ticket.number] = ticket.born
            self._lengths[ticket.number] = (prompt * len(responses), sum(responses))
        for numbers, work in self._requests([ticket.number for ticket in tickets]):
            place = self._work.index(min(self._work))
            self._work[place] += work
            asked = _Asked(place, work, numbers, sum(len(self.groups.of(number)[1]) for number in numbers))
            self._asked |= dict.fromkeys(numbers, asked)
            self.engines[place].advance(self.now)
            for number in numbers:
                prompt, responses = self.groups.of(number)
                for tokens in responses:
                    self.engines[place].add(Request(number, number, prompt, tokens))
        self._look()

    def _requests(self, tickets: Sequence[int]) -> Iterator[tuple[list[int], float]]:
        """(tickets, expected work) of each request."""
        if self.setup.staleness or self.setup.extra:
            for number in apart(tickets, lambda number: self._expected.expected(self.groups.row(number))):
                _, responses = self.groups.of(number)
                yield [number], len(responses) * self._expected.expected(self.groups.row(number))
        else:
            size = self.groups.responses.shape[1]
            for numbers in together(tickets, len(self.engines), size):
                yield numbers, float(len(numbers) * size)

    def _pass(self, until: float) -> None:
        """Go on until then; what is finished is told in its order."""
        while (then := min(self._next)) <= until:
            place = self._next.index(then)
            engine = self.engines[place]
            for request in engine.advance(then):
                self._finished(request)
            self._next[place] = engine.next_finish()
        self.now = max(self.now, until)

    def _finished(self, request: Request) -> None:
        """A response is done; with the last of its request its groups are whole."""
        asked = self._asked[request.key]
        asked.left -= 1
        if not asked.left:
            self._work[asked.place] -= asked.work
            for number in asked.numbers:
                del self._asked[number]
                self.window.finish(number, None, kept=True)
                self._expected.learn(self.groups.row(number), self.groups.of(number)[1])
            self._ready += len(asked.numbers)

    def _train(self, seconds: float) -> None:
        if self.setup.colocated:
            self._all(lambda engine: engine.pause("in_place"))
        self._pass(self.now + seconds)

    def _push(self) -> None:
        """As a push does it: retract, new weights, an empty cache, go on."""
        self._all(lambda engine: engine.pause("retract"))
        self._all(Decoding.flush)
        self.now += self.speeds.push_s
        self._all(Decoding.resume)

    def _drop(self, numbers: Sequence[int]) -> None:
        """Give groups up, whole or in the making."""
        gone = {number for number in numbers if number in self._asked}
        self._ready -= len(numbers) - len(gone)
        for number in gone:
            asked = self._asked.pop(number)
            self._work[asked.place] -= asked.work
        if gone:
            self._all(lambda engine: engine.abort(lambda request: request.key in gone))

    def _all(self, act: Callable[[Decoding], object]) -> None:
        """Do something with every engine, now."""
        for engine in self.engines:
            for request in engine.advance(self.now):
                self._finished(request)
            act(engine)
        self._look()

    def _look(self) -> None:
        self._next = [engine.next_finish() for engine in self.engines]

    def _prediction(self, done: _Done) -> Prediction:
        full_s = self.now * len(self.engines)
        lengths = np.array([responses for _, responses in self._lengths.values()])
        steps = len(done.ends)
        return Prediction(
            step_s=np.diff(done.ends, prepend=0.0),
            tokens=np.array(done.tokens),
            best_possible_s=best_possible_s(sum(done.tokens) / steps, done.train_s / steps, self.speeds, self.setup),
            engine_idle_fraction=1 - sum(engine.busy_s for engine in self.engines) / full_s,
            occupancy=sum(engine.request_seconds for engine in self.engines)
            / (full_s * self.speeds.engine.max_running),
            ages=dict(sorted(done.ages.items())),
            selection_ratio=sum(done.tokens) / done.ages.total() / float(lengths.mean()),
            dropped=done.dropped,
        )


STALENESSES = (0, 1, 2, 4, 8)
OVER_SAMPLINGS = (0.25, 0.5)  # shares of a step's groups
MOST_SPLITS = 7


@dataclass(frozen=True)
class Gpus:
    """What a run has."""

    engine: int  # of each engine
    trainer: int

    def total(self, engines: int) -> int:
        """GPUs of so many engines and the trainer."""
        return engines * self.engine + self.trainer


@dataclass(frozen=True)
class Row:
    """A shape of the run and what it would do."""

    name: str
    setup: Setup
    found: Prediction
    skip: int  # first steps, in which the window fills, and what is then ahead is used up

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.found.seconds(self.skip)

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens."""
        return self.found.tokens_per_s(self.skip)

    @property
    def of_best(self) -> float:
        """Share of what engines that are always full, or trainers that never wait, would do; of the whole run.

        What was sampled in the first steps may be trained in later ones, which may then be quicker than both.
        """
        return self.found.best_possible_s / self.found.seconds()


def what_if(groups: Groups, speeds: Speeds, setup: Setup, gpus: Gpus, steps: int) -> list[Row]:
    """The run as it is first, then with one thing changed in each row."""
    skip = steps // 2
    named = [("as it is", setup), *_stale(setup), *_over_sampled(setup), *_split(setup, gpus)]
    return [Row(name, shape, simulate(groups, speeds, shape, steps), skip) for name, shape in named]


def _stale(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """By turns nothing is sampled while something is trained."""
    for staleness in () if setup.colocated else STALENESSES:
        ordered = setup.in_order if setup.staleness > 1 else staleness < 2
        changed = replace(setup, staleness=staleness, in_order=ordered and not setup.extra)
        if changed != setup:
            yield f"staleness {staleness}{', as drawn' if changed.in_order and staleness else ''}", changed


def _over_sampled(setup: Setup) -> Iterator[tuple[str, Setup]]:
    for share in OVER_SAMPLINGS:
        changed = replace(setup, extra=round(share * setup.prompts_per_step), in_order=False)
        if changed != setup:
            yield f"over-sampling {share:g}", changed


def _split(setup: Setup, gpus: Gpus) -> Iterator[tuple[str, Setup]]:
    """Other shares of the same GPUs; a trainer of other size takes a token's time in proportion."""
    apart = gpus.total(setup.num_engines)
    total = max(gpus.trainer, apart - gpus.trainer) if setup.colocated else apart
    possible = [count for count in range(1, total) if total - count * gpus.engine > 0]
    every = -(-len(possible) // MOST_SPLITS) if possible else 1
    for engines in possible[::every]:
        left = total - engines * gpus.engine
        changed = replace(setup, num_engines=engines, train_scale=gpus.trainer / left, colocated=False)
        if changed != setup:
            yield f"{engines} engines, {left} GPUs to train", changed
    if not setup.colocated and total >= gpus.engine:
        shared = replace(setup, num_engines=total // gpus.engine, train_scale=gpus.trainer / total, colocated=True)
        yield f"by turns on {total} GPUs, synchronous", replace(shared, staleness=0, in_order=not setup.extra)


def draw(path: Path, rows: Sequence[Row], *, title: str) -> None:
    """Seconds of a step in each shape, and the least they could be. Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.32 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(rows))
    colours = ["#E45756" if not place else "#4C78A8" for place in places]
    axes.barh(places, [row.seconds for row in rows], color=colours, label="predicted")
    best = [row.found.best_possible_s for row in rows]
    axes.plot(best, places, "|", color="black", markersize=12, markeredgewidth=2, label="best possible")
    axes.set_yticks(places, [row.name for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a step")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    unfinished = path.with_suffix(".part.png")
    figure.savefig(unfinished)
    unfinished.replace(path)
