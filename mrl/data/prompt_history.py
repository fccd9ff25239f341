"""What a run remembers about its training prompts: how often each was drawn, and the rewards of its responses."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 4  # number of groups over which the rewards of a prompt are averaged


class PromptHistory:
    """Counts and mean rewards of all rows of a data set. All arrays have the shape [rows].

    `mean_reward` is the mean over the first WINDOW groups of a row. After that, each group counts 1 / WINDOW and the earlier mean
    counts 1 - 1 / WINDOW, because the policy changes.
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

    def draw(self, rows: NDArray[np.int64]) -> None:
        """Count rows that were drawn."""
        np.add.at(self.times_drawn, rows, 1)

    def learn(self, rewards: Iterable[tuple[int, float]]) -> None:
        """Add groups: (row, mean reward of the responses of one group)."""
        for row, reward in rewards:
            self.num_groups[row] += 1
            earlier = self.mean_reward[row] if self.num_groups[row] > 1 else reward
            self.mean_reward[row] = earlier + (reward - earlier) / min(int(self.num_groups[row]), WINDOW)
            self.latest[row] = self._num_rewards
            self._num_rewards += 1

    def latest_rewards(self, rows: range, count: int) -> NDArray[np.float64]:
        """Return `mean_reward` of the `count` rows in this range whose groups are the latest, the latest first."""
        latest = self.latest[rows.start : rows.stop]
        order = np.argsort(-latest, kind="stable")[:count]
        return self.mean_reward[rows.start : rows.stop][order[latest[order] >= 0]]

    def state_dict(self) -> dict[str, Any]:
        """Return the rows that were drawn or have a reward, as lists and numbers."""
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
