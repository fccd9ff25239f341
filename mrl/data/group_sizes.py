"""Group sizes: how many responses each prompt gets. `rollout.group_sizes` names a function that chooses these numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrl.data.samplers import PromptTable

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
        """Return the sizes, [n]. Raises ValueError if the mean size is not between `least` and `most`."""
        if not self.least <= inputs.size <= self.most:
            raise ValueError(
                f"rollout.group_sizes: least={self.least}, most={self.most}, but rollout.responses_per_prompt={inputs.size}; "
                "expected a mean size between them."
            )
        rewards = inputs.prompts.column(self.column)[inputs.rows] if self.column else inputs.mean_reward
        rates = np.clip((rewards - self.worst) / (self.best - self.worst), 0, 1)
        rates = np.where(np.isnan(rates), 0.5, rates)
        return apportion(len(rates) * inputs.size, rates * (1 - rates), self.least, self.most)


def apportion(total: int, weights: NDArray[np.float64], least: int, most: int) -> NDArray[np.int64]:
    """Divide `total` into n whole numbers [n] between `least` and `most`.

    Each number is `least` plus a share of the rest in proportion to `weights`, rounded. If a number would exceed `most`, the
    excess is divided among the other numbers. If all weights are 0, the shares are equal. Among equal remainders, the first
    numbers are rounded up.
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
