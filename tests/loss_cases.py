"""Random batches in float64 for tests of losses, and gradients by central differences."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mrl.algorithms.inputs import LossInputs, Responses


@dataclass(frozen=True)
class Case:
    """A batch of B responses with R tokens in all. Arrays are [R] except `lengths`."""

    lengths: np.ndarray  # [B]
    logprobs: np.ndarray
    old: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    columns: dict = field(default_factory=dict)

    @property
    def rows(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def spans(self) -> list[slice]:
        ends = np.cumsum(self.lengths)
        return [slice(end - n, end) for end, n in zip(ends, self.lengths, strict=True)]

    def select(self, rows) -> "Case":
        """Return the batch of only these responses."""
        index = np.concatenate([np.arange(s.start, s.stop) for s in (self.spans()[r] for r in rows)]).astype(int)
        return replace(self.at(index), lengths=self.lengths[rows])

    def at(self, index) -> "Case":
        """Return only these tokens; `lengths` stays unchanged."""
        names = ("logprobs", "old", "rollout", "advantages")
        columns = {name: values[index] for name, values in self.columns.items()}
        return replace(self, **{name: getattr(self, name)[index] for name in names}, columns=columns)


def make_case(seed: int, lengths=(3, 1, 5, 2, 4), spread: float = 0.5, per_token: bool = False) -> Case:
    """Return a batch whose ratios pi / pi_old lie above and below 1 and whose advantages have both signs."""
    rng, lengths = np.random.default_rng(seed), np.array(lengths)
    total = int(lengths.sum())
    old = -rng.exponential(1.0, total) - 0.1
    advantages = rng.normal(size=total) if per_token else np.repeat(rng.normal(size=len(lengths)), lengths)
    columns = {
        "clip_cov": (rng.random(total) < 0.3).astype(float),
        "kl_cov": (rng.random(total) < 0.3).astype(float),
        "top_entropy": (np.random.default_rng([seed, 1]).random(total) < 0.5).astype(float),
        "ref_logprobs": old + rng.normal(scale=0.3, size=total),
    }
    shift, noise = rng.normal(scale=spread, size=total), rng.normal(scale=spread, size=total)
    return Case(lengths, old + shift, old, old + noise, advantages, columns)


def loss_inputs(case: Case, logprobs: torch.Tensor | None = None, index=None, reduce=None) -> LossInputs:
    """Return the inputs of a loss. `index`: index of the response of each token. `reduce`: function that sums over ranks."""
    tensor = lambda x: torch.tensor(np.asarray(x), dtype=torch.float64)  # noqa: E731
    own = torch.tensor(case.rows if index is None else index)
    lengths = torch.tensor(case.lengths)
    return LossInputs(
        logprobs=tensor(case.logprobs) if logprobs is None else logprobs,
        old_logprobs=tensor(case.old),
        advantages=tensor(case.advantages),
        entropy=torch.zeros(len(case.old), dtype=torch.float64),
        rollout_logprobs=tensor(case.rollout),
        responses=Responses(own, lengths, reduce) if reduce else Responses(own, lengths),
        columns={name: tensor(values) for name, values in case.columns.items()},
    )


def loss_and_gradient(loss, case: Case, weights: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the weighted sum of the token losses, and its gradient [R] with respect to the log-probabilities."""
    logprobs = torch.tensor(case.logprobs, requires_grad=True)
    per_token, _ = loss(loss_inputs(case, logprobs))
    total = (per_token * torch.tensor(weights)).sum()
    total.backward()
    return total.item(), logprobs.grad.numpy()


def slopes(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Return the gradient [R] of a function of an array, from central differences."""
    gradient = np.empty(len(at))
    for k in range(len(at)):
        up, down = at.copy(), at.copy()
        up[k] += step
        down[k] -= step
        gradient[k] = (function(up) - function(down)) / (2 * step)
    return gradient


def clip(x, low, high):
    return min(max(x, low), high)
