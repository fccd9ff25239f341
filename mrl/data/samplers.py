"""Samplers, which choose the training prompts that a run draws next, and group sizes: how many responses each prompt gets.

`data.sampler` names one of these samplers, or a sampler of the user. A sampler is a function of SamplerInputs and has no state of
its own. SamplerInputs contains everything that the sampler needs to remember. A checkpoint contains this data, so a resumed run
draws the same prompts as a run that was never interrupted.

`rollout.group_sizes` names a function that chooses the numbers of responses.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mrl.data.columns import PromptExample

Rows = NDArray[np.int64]  # indices of rows of the data set

_RANDOM_STREAM = 1 << 31
"""Last element of the seeds of SamplerInputs.rng_of. The seeds of PromptTable.order end with the index of a source instead."""

WINDOW = 4  # the mean reward of a prompt is an exponential average over about this number of groups


@dataclass(frozen=True)
class MixtureSource:
    """A source in the mixture of a data set."""

    name: str  # PromptSource.name
    rows: int  # number of usable rows
    weight: float = 1.0  # number of rows that are drawn from this source, relative to other sources


@dataclass(frozen=True, eq=False)
class PromptTable:
    """The training prompts: the rows of all sources, one source after another."""

    sources: tuple[MixtureSource, ...]  # in the order of their rows
    examples: Sequence[PromptExample] = ()  # [rows]

    @property
    def num_rows(self) -> int:
        """Number of rows of all sources."""
        return sum(source.rows for source in self.sources)

    @cached_property
    def ends(self) -> Rows:
        """[sources] index of the row after the last row of each source."""
        return np.cumsum([source.rows for source in self.sources])

    def rows_of(self, source: int) -> range:
        """Return the rows of the source with this index."""
        end = int(self.ends[source])
        return range(end - self.sources[source].rows, end)

    def sources_of(self, rows: Rows) -> NDArray[np.int64]:
        """Return, for each of these rows, the index of its source."""
        return np.searchsorted(self.ends, rows, side="right")

    def order(self, source: int, seed: int, epoch: int) -> Rows:
        """Return the rows of a source, as indices within this source, in the random order of an epoch."""
        if self._orders.get(source, (-1, -1))[:2] != (seed, epoch):
            order = np.random.default_rng([seed, epoch, source]).permutation(self.sources[source].rows)
            self._orders[source] = (seed, epoch, order)
        return self._orders[source][2]

    @cached_property
    def _orders(self) -> dict[int, tuple[int, int, Rows]]:
        """Index of a source -> (seed, epoch, order of its rows): the last order that was computed for the source."""
        return {}

    @cached_property
    def _columns(self) -> dict[str, NDArray]:
        return {}

    def column(self, name: str) -> NDArray:
        """Return the value of the column `name` for each row, [rows].

        `name` is `data_source`, `ability`, `style` or a field of `extra_info`.

        A dotted name means a field inside a field. Raises ValueError if a row lacks the value, or if the values are neither all
        finite numbers nor all texts.
        """
        if name not in self._columns:
            values = [_value(example, name, row) for row, example in enumerate(self.examples)]
            numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
            if not (numbers and np.isfinite(values).all()) and not all(isinstance(value, str) for value in values):
                raise ValueError(
                    f"the column {name} of the training prompts: expected only finite numbers or only texts."
                )
            self._columns[name] = np.array(values)
        return self._columns[name]


def _value(example: PromptExample, name: str, row: int) -> Any:
    if name in ("data_source", "ability", "style"):
        return getattr(example, name)
    value: Any = example.extra_info
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(
                f"row {row} of the training prompts has no {name} in extra_info; name the column of your file in "
                "data.columns.extra_info."
            )
        value = value[part]
    return value


class PromptHistory:
    """Counts and mean rewards of all rows of a data set. All arrays have the shape [rows].

    While a row has at most WINDOW groups, `mean_reward` is the mean of all its groups. Each later group has the weight
    1 / WINDOW, and the earlier mean has the weight 1 - 1 / WINDOW, because the policy changes.
    """

    def __init__(self, num_rows: int) -> None:
        self.times_drawn = np.zeros(num_rows, np.int64)
        self.num_groups = np.zeros(num_rows, np.int64)  # sampled groups with a reward
        self.mean_reward = np.full(num_rows, np.nan)  # NaN: no group has a reward yet
        self.latest = np.full(num_rows, -1)  # serial number, from 0, of the latest reward; -1: there is none
        self._num_rewards = 0  # serial number of the next reward

    @property
    def num_rows(self) -> int:
        """Number of rows of the data set."""
        return len(self.times_drawn)

    def count_drawn(self, rows: NDArray[np.int64]) -> None:
        """Count rows that were drawn."""
        np.add.at(self.times_drawn, rows, 1)

    def record_rewards(self, rewards: Iterable[tuple[int, float]]) -> None:
        """Add groups: (row, mean reward of the responses of one group)."""
        for row, reward in rewards:
            self.num_groups[row] += 1
            earlier = self.mean_reward[row] if self.num_groups[row] > 1 else reward
            self.mean_reward[row] = earlier + (reward - earlier) / min(int(self.num_groups[row]), WINDOW)
            self.latest[row] = self._num_rewards
            self._num_rewards += 1

    def latest_rewards(self, rows: range, count: int) -> NDArray[np.float64]:
        """Return the `mean_reward` of the `count` rows in this range that got a reward most recently, the most recent first."""
        latest = self.latest[rows.start : rows.stop]
        order = np.argsort(-latest, kind="stable")[:count]
        return self.mean_reward[rows.start : rows.stop][order[latest[order] >= 0]]

    def state_dict(self) -> dict[str, Any]:
        """Return the history of the rows that were drawn or have a reward, as lists and numbers."""
        rows = np.flatnonzero((self.times_drawn > 0) | (self.num_groups > 0))
        means = [None if np.isnan(mean) else mean for mean in self.mean_reward[rows].tolist()]
        arrays = {name: getattr(self, name)[rows].tolist() for name in ("times_drawn", "num_groups", "latest")}
        return dict(rows=rows.tolist(), mean_reward=means, **arrays, num_rewards=self._num_rewards)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of a history with the same number of rows."""
        self.__init__(self.num_rows)
        rows = np.array(state["rows"], np.int64)
        self.mean_reward[rows] = [np.nan if mean is None else mean for mean in state["mean_reward"]]
        for name in ("times_drawn", "num_groups", "latest"):
            getattr(self, name)[rows] = state[name]
        self._num_rewards = state["num_rewards"]


@dataclass(frozen=True, eq=False)
class SamplerInputs:
    """Inputs of a sampler, which chooses the next `count` rows."""

    prompts: PromptTable
    count: int  # number of rows to choose
    seed: int  # run.seed
    drawn: Sequence[int]  # [sources] number of rows that have been drawn from each source since the run began
    history: PromptHistory  # how often each row was drawn, and the rewards of its responses
    # What the sampler stores from one call to the next, as JSON: lists, texts, numbers and dicts with texts as keys. The sampler
    # may change this dict. A checkpoint contains it.
    state: dict[str, Any]

    @property
    def num_drawn(self) -> int:
        """Number of rows that have been drawn since the run began."""
        return sum(self.drawn)

    @cached_property
    def rng(self) -> np.random.Generator:
        """Random numbers that depend only on the seed and on the number of drawn rows."""
        return self.rng_of(0)

    def rng_of(self, index: int) -> np.random.Generator:
        """Return random numbers for choice number `index` (from 0) of this call. They do not depend on `count`.

        So the chosen rows are reproducible, even if `count` depends on the speed of engines, for example with rollout.filter.
        """
        return np.random.default_rng([self.seed, self.num_drawn + index, _RANDOM_STREAM])

    def next_of(self, sources: NDArray[np.int64], shuffle: bool = True) -> Rows:
        """Return n rows [n]: for each element of `sources`, the next row of this source. Each source has its own epochs.

        `sources`: [n] indices of sources. With `shuffle`, each epoch has an order of its own.
        """
        batch = np.empty(len(sources), np.int64)
        for source, num_drawn in enumerate(self.drawn):
            is_from_source, rows = sources == source, self.prompts.rows_of(source)
            position, missing = num_drawn, int(is_from_source.sum())
            parts = [np.empty(0, np.int64)]
            while missing:
                epoch, start = divmod(position, len(rows))
                order = self.prompts.order(source, self.seed, epoch) if shuffle else np.arange(len(rows))
                parts.append(order[start : start + missing])
                position, missing = position + len(parts[-1]), missing - len(parts[-1])
            batch[is_from_source] = np.concatenate(parts) + rows.start
        return batch


type Sampler = Callable[[SamplerInputs], Sequence[int] | Rows]
"""Returns the next `inputs.count` rows. It may return a row several times.

The sampler may be an object with the attribute `uses_rewards` (default: true). If this attribute is false, the run keeps no
history of rewards for the sampler.
"""


@dataclass(frozen=True)
class Shuffled:
    """The default sampler. It draws each row of a source once per epoch, and draws from sources in proportion to their weights.

    If a source has the fraction w of the total weight of all sources, it contributes on average `w * n` of the first n rows, and
    always fewer than `w * n + 1`. Each source has its own epochs. The order of rows within an epoch depends only on the seed, the
    epoch and the source. The choice of the next source depends only on the number of rows that have been drawn from each source.
    """

    uses_rewards: ClassVar[bool] = False
    shuffle: bool = True  # whether each epoch has a new random order; false: the order of the files

    def __call__(self, inputs: SamplerInputs) -> Rows:
        """Return the next rows."""
        return inputs.next_of(self._next_sources(inputs), self.shuffle)

    def _next_sources(self, inputs: SamplerInputs) -> NDArray[np.int64]:
        """Return, for each of the next rows, the index of its source: [count].

        Row n of the run, from 1, comes from the source with the largest `weight / total_weight * n - drawn`.
        """
        sources = np.zeros(inputs.count, np.int64)
        if len(inputs.drawn) == 1:
            return sources
        total = sum(source.weight for source in inputs.prompts.sources)
        weights = [source.weight / total for source in inputs.prompts.sources]
        drawn, next_count = list(inputs.drawn), inputs.num_drawn + 1
        for index in range(inputs.count):
            missing = [
                weight * (next_count + index) - num_drawn for weight, num_drawn in zip(weights, drawn, strict=True)
            ]
            chosen = missing.index(max(missing))
            sources[index] = chosen
            drawn[chosen] += 1
        return sources


@dataclass(frozen=True)
class Curriculum:
    """Draws rows in stages, from easy to hard (curriculum learning, Bengio et al. 2009).

    The rows are sorted by `column` and cut into `stages` parts of nearly equal size. A run passes `epochs_per_stage` times over
    the first part, then over the second part, and so on. After the last part it passes over all rows. Each pass has a new random
    order. The sources of data.mixture must have equal weights, because the rows of all sources are sorted together.
    """

    uses_rewards: ClassVar[bool] = False
    column: str  # a number or a text of each row that says how hard it is (see PromptTable.column)
    stages: int = 3
    epochs_per_stage: int = 1  # passes over the rows of a stage
    descending: bool = False  # whether the largest value is the easiest, as with a pass rate

    def __post_init__(self) -> None:
        for name in ("stages", "epochs_per_stage"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number, 1 or more.")

    def __call__(self, inputs: SamplerInputs) -> Rows:
        """Return the next rows. Raises ValueError if sources have different weights, or if there are fewer rows than stages."""
        prompts = inputs.prompts
        if len({source.weight for source in prompts.sources}) > 1:
            raise ValueError("a curriculum sorts the rows of all sources together; remove the weights in data.mixture.")
        if prompts.num_rows < self.stages:
            raise ValueError(f"stages={self.stages}: the training data has only {prompts.num_rows} rows.")
        ranked = np.argsort(prompts.column(self.column), kind="stable")
        parts = np.array_split(ranked[::-1] if self.descending else ranked, self.stages)
        passes = [part for part in parts for _ in range(self.epochs_per_stage)]
        position, index, missing = inputs.num_drawn, 0, inputs.count
        chosen = [np.empty(0, np.int64)]
        while missing:
            rows = passes[index] if index < len(passes) else ranked
            if position < len(rows):
                order = rows[np.random.default_rng([inputs.seed, index]).permutation(len(rows))]
                chosen.append(order[position : position + missing])
                position, missing = position + len(chosen[-1]), missing - len(chosen[-1])
            position, index = position - len(rows), index + 1
        return np.concatenate(chosen)


@dataclass(frozen=True)
class DifficultyMixture:
    """Draws more rows from the sources that are neither solved nor too hard.

    p is the pass rate of a source: the mean reward of the `window` prompts of the source with the most recent rewards, scaled so
    that `worst` is 0 and `best` is 1. The probability of a source is proportional to weight * max(floor, 4 p (1 - p)), where
    weight is the source's weight in data.mixture. The factor 4 p (1 - p) is largest at p = 1/2. If rewards are 0 or 1, the
    rewards of a group differ most at this pass rate. A source without rewards counts as p = 1/2. Each source has its own epochs,
    in random order.
    """

    uses_rewards: ClassVar[bool] = True
    worst: float = 0.0  # reward of a wrong response
    best: float = 1.0  # reward of a right response
    floor: float = 0.1  # smallest factor of a weight, so that a solved source is still drawn sometimes
    window: int = 128  # number of prompts

    def __post_init__(self) -> None:
        if not self.worst < self.best:
            raise ValueError(f"worst={self.worst}, best={self.best}: expected worst < best.")
        if not 0 < self.floor <= 1:
            raise ValueError(f"floor={self.floor}: expected a number above 0 and at most 1.")
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window={self.window!r}: expected a whole number, 1 or more.")

    def __call__(self, inputs: SamplerInputs) -> Rows:
        """Return the next rows."""
        probabilities = self.probabilities(inputs)
        chosen = [inputs.rng_of(index).choice(len(probabilities), p=probabilities) for index in range(inputs.count)]
        return inputs.next_of(np.array(chosen, np.int64))

    def probabilities(self, inputs: SamplerInputs) -> NDArray[np.float64]:
        """Return the probability of each source, [sources]."""
        sources = inputs.prompts.sources
        weights = np.array([source.weight for source in sources])
        for index in range(len(sources)):
            rewards = inputs.history.latest_rewards(inputs.prompts.rows_of(index), self.window)
            if len(rewards):
                rate = np.clip((rewards.mean() - self.worst) / (self.best - self.worst), 0, 1)
                weights[index] *= max(self.floor, 4 * rate * (1 - rate))
        return weights / weights.sum()


MAX_GROUP_FACTOR = 8  # default of the largest group size, as a multiple of rollout.responses_per_prompt


@dataclass(frozen=True, eq=False)
class GroupSizeInputs:
    """Inputs of a function that decides the sizes of n groups."""

    rows: NDArray[np.int64]  # [n] rows of the prompts
    size: int  # rollout.responses_per_prompt: the mean of the sizes
    mean_reward: NDArray[np.float64]  # [n] mean reward of earlier responses to each prompt; NaN: there are none
    prompts: PromptTable


type GroupSizes = Callable[[GroupSizeInputs], Sequence[int] | NDArray[np.int64]]
"""Returns the sizes of n groups, [n]. Each size is 1 or more, and the sum of the sizes is n * size.

The function may be an object with the attribute `most`, which is the largest size. Without this attribute, the largest size is
MAX_GROUP_FACTOR * rollout.responses_per_prompt.
"""


def largest_size(group_sizes: GroupSizes | None, size: int) -> int:
    """Return the largest number of responses that a prompt can get. `size`: rollout.responses_per_prompt."""
    return size if group_sizes is None else getattr(group_sizes, "most", None) or MAX_GROUP_FACTOR * size


def check_sizes(sizes: Sequence[int] | NDArray[np.int64], count: int, size: int, most: int) -> list[int]:
    """Return the sizes of `count` groups as a list. Raises ValueError if they are invalid."""
    found = np.asarray(sizes)
    if found.shape != (count,) or (count and found.dtype.kind not in "iu"):
        raise ValueError(f"rollout.group_sizes returned {sizes!r:.80}; expected {count} whole numbers.")
    if count and not (found.min() >= 1 and found.max() <= most):
        raise ValueError(
            f"rollout.group_sizes returned sizes from {found.min()} to {found.max()}; expected 1 to {most} responses."
        )
    if found.sum() != count * size:
        raise ValueError(
            f"rollout.group_sizes returned {found.sum()} responses for {count} prompts; expected {count * size}, because "
            f"rollout.responses_per_prompt={size} is their mean."
        )
    return found.tolist()


@dataclass(frozen=True)
class ByDifficulty:
    """Gives more responses to prompts that are neither solved nor too hard, and fewer responses to other prompts.

    p is the pass rate of a prompt: its mean reward, scaled so that `worst` is 0 and `best` is 1. A prompt without rewards counts
    as p = 1/2. Each prompt gets `least` responses. The other responses are divided among the prompts in proportion to p (1 - p),
    but no prompt gets more than `most`. If rewards are 0 or 1, p (1 - p) is the variance of the prompt's rewards. A group without
    variance gives no gradient.
    """

    least: int = 2
    most: int = 32
    worst: float = 0.0  # reward of a wrong response
    best: float = 1.0  # reward of a right response
    # Column with the pass rate of each row, in place of earlier rewards (see PromptTable.column)
    column: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"least={self.least}, most={self.most}: expected 1 <= least <= most.")
        if not self.worst < self.best:
            raise ValueError(f"worst={self.worst}, best={self.best}: expected worst < best.")

    def __call__(self, inputs: GroupSizeInputs) -> NDArray[np.int64]:
        """Return the sizes, [n].

        Raises ValueError if the mean size is not between `least` and `most`, or if the column contains texts.
        """
        if not self.least <= inputs.size <= self.most:
            raise ValueError(
                f"rollout.group_sizes: least={self.least}, most={self.most}, but rollout.responses_per_prompt={inputs.size}; "
                "expected a mean size between them."
            )
        rewards = _pass_rates(inputs.prompts, self.column)[inputs.rows] if self.column else inputs.mean_reward
        rates = np.clip((rewards - self.worst) / (self.best - self.worst), 0, 1)
        rates = np.where(np.isnan(rates), 0.5, rates)
        return apportion(len(rates) * inputs.size, rates * (1 - rates), self.least, self.most)


def _pass_rates(prompts: PromptTable, column: str) -> NDArray[np.float64]:
    values = prompts.column(column)
    if values.dtype.kind == "U":
        raise ValueError(
            f"rollout.group_sizes.column={column}: the column contains texts; expected the pass rate of each row, a number."
        )
    return values


def apportion(total: int, weights: NDArray[np.float64], least: int, most: int) -> NDArray[np.int64]:
    """Divide `total` into n whole numbers [n] between `least` and `most`.

    Each number is `least` plus a share of the rest in proportion to `weights`, rounded. If a number would exceed `most`, the
    excess is divided among the other numbers. If all weights are 0, the shares are equal. If only some of several equal shares
    can be rounded up, the first ones are.
    """
    sizes = np.full(len(weights), least, np.int64)
    while (missing := total - int(sizes.sum())) > 0:
        open_weights = np.where(sizes < most, np.maximum(weights, 0), 0.0)
        if not open_weights.sum():
            open_weights = (sizes < most).astype(np.float64)
        shares = missing * open_weights / open_weights.sum()
        whole = np.minimum(np.floor(shares).astype(np.int64), most - sizes)
        if not whole.sum():  # only remainders are left
            for index in np.argsort(-shares, kind="stable")[:missing]:
                whole[index] = sizes[index] < most
        sizes += whole
    return sizes
