"""Two training steps with which `trainer._target_` may replace `Trainer.train_step`: best_of_n and by_source.

B is the number of responses of the step, and R is the number of their sampled tokens (mrl.core.types).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.advantages import Advantage, GroupStatistics
from mrl.algorithms.inputs import required_inputs_of
from mrl.algorithms.losses import CrossEntropy, Loss
from mrl.algorithms.objective import Objective
from mrl.controller.trainer import Trainer


def best_of_n(trainer: Trainer, keep: int = 1, min_reward: float = float("-inf")) -> None:
    """Train with cross-entropy on the `keep` best responses of each group, if their reward is above `min_reward`.

    This is rejection-sampling fine-tuning (RAFT, Dong et al. 2023, algorithm 1). It needs no advantages, no old
    log-probabilities and no reference.
    """
    rollouts = trainer.generate()
    best = ranks_in_groups(rollouts.rewards, rollouts.groups) < keep
    # An Objective replaces the whole objective, so the correction, KL penalty and entropy bonus of the config do not apply.
    loss = Objective(CrossEntropy())  # type: ignore[bad-argument-type]  # class variables implement properties of Loss
    trainer.update(rollouts, None, rows=best & (rollouts.rewards > min_reward), loss=loss)
    trainer.push()


def ranks_in_groups(rewards: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rank [B] of each response in its group: 0 for the largest reward. Equal rewards keep the order of the batch."""
    order = np.lexsort((np.arange(len(rewards)), -rewards, groups))
    sizes = GroupStatistics(groups[order]).sizes  # [B] size of the group of each response
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    ranks = np.empty(len(rewards), np.int64)
    ranks[order] = np.arange(len(rewards)) - np.repeat(starts, sizes[starts])
    return ranks


@dataclass(frozen=True)
class SourceAlgorithm:
    """The algorithm for the responses of one data source."""

    advantage: Advantage
    loss: Loss

    @property
    def required_inputs(self) -> frozenset[str]:
        """Names of the columns [R] that the advantage estimator and the loss read."""
        return required_inputs_of(self.advantage) | required_inputs_of(self.loss)


def check_sources(algorithms: Mapping[str, SourceAlgorithm], sources: Iterable[str]) -> None:
    """Raise ValueError if `algorithms` has no algorithm for one of the data sources."""
    if unknown := sorted(set(sources) - set(algorithms)):
        raise ValueError(f"trainer.arguments.algorithms: no algorithm for the data source {unknown[0]!r}.")


def by_source(trainer: Trainer, algorithms: Mapping[str, SourceAlgorithm]) -> None:
    """Train on the responses of each data source with the algorithm of this data source, in separate optimizer steps.

    `algorithms`: name of a data source -> its algorithm. Raises ValueError for a row whose data source is not in `algorithms`.
    """
    rollouts = trainer.generate()
    sources = trainer.data_sources(rollouts)
    check_sources(algorithms, sources.tolist())
    columns = trainer.score(rollouts)
    for source, parts in algorithms.items():
        rows = sources == source
        if rows.any():
            estimates = trainer.estimate(columns, rows=rows, advantage=parts.advantage, loss=parts.loss)
            trainer.update(rollouts, estimates, rows=rows, loss=parts.loss)
    trainer.push()
