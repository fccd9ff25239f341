"""From the rewards of a whole batch to the columns that losses need; done once for a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.advantages import Advantage
from mrl.algorithms.inputs import AdvantageInputs, Advantages, Estimated, Scored, per_token
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import Loss, PolicyLoss
from mrl.core.types import Column


@dataclass(frozen=True)
class Estimator:
    """Rewards of a batch -> the columns that losses need.

    A response without sampled tokens takes no part, nor does its reward in its group's mean. A rejected one takes part in its
    group (DAPO, Yu et al. 2025, 3.4, leaves it out of the loss only), but not in whitening, nor in what the loss selects.
    """

    advantage: Advantage
    loss: Loss  # for extra_columns
    kl: KLPenalty | None = None  # in the reward
    whiten: bool = False  # advantages to mean 0 and standard deviation 1 over the sampled tokens in the loss
    mask_truncated: bool = False  # responses cut at the token limit are left out of the loss (overlong filtering)

    @property
    def needs(self) -> frozenset[str]:
        """Columns that must be given, and greedy_rewards where the advantage wants these."""
        found = getattr(self.advantage, "needs", frozenset()) | getattr(self.loss, "needs", frozenset())
        return found | self.kl.needs | {"old_logprobs"} if self.kl else found

    def __call__(self, scored: Scored, columns: Mapping[str, Column], kl_coef: float, seed: Sequence[int]) -> Estimated:
        """Columns [R] of what `needs` names -> columns [R] of float32. `seed`: for losses that select tokens at random."""
        rewards, numbers = self._token_rewards(scored, columns, kl_coef)
        batch = _batch(scored, rewards, columns)
        found = self.advantage(batch)
        found = found if isinstance(found, Advantages) else Advantages(found)
        advantages = per_token(found.advantages, batch).astype(np.float64)
        rejected = scored.truncated & self.mask_truncated
        kept = ~np.repeat(rejected, scored.lengths)  # [R]
        if self.whiten:
            advantages = _whitened(advantages, kept)
        made = {"advantages": advantages.astype(np.float32)}
        if found.returns is not None:
            made["returns"] = found.returns.astype(np.float32)
        made |= self._extra_columns(batch, made["advantages"], kept, np.random.default_rng(seed))
        rows = np.repeat(np.arange(len(scored.lengths)), scored.lengths)
        nonzero = np.bincount(rows, made["advantages"] != 0, minlength=len(scored.lengths))
        return Estimated(made, nonzero == 0, rejected, numbers | _moments(advantages[kept]))

    def _token_rewards(
        self, scored: Scored, columns: Mapping[str, Column], kl_coef: float
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """[R] rewards at the tokens that earned them, less KL penalties."""
        if scored.turn_rewards is None:
            rewards = np.zeros(scored.lengths.sum())
            some = scored.lengths > 0
            rewards[np.cumsum(scored.lengths)[some] - 1] = scored.rewards[some]
        else:
            rewards = scored.turn_rewards.astype(np.float64)
        if self.kl is None:
            return rewards, {}
        kl = self.kl.values(columns["old_logprobs"], columns["ref_logprobs"])
        return rewards - kl_coef * kl, {"policy/kl_reward": float(kl.mean()) if len(kl) else 0.0}

    def _extra_columns(
        self, batch: AdvantageInputs, advantages: Column, kept: NDArray[np.bool_], rng: np.random.Generator
    ) -> dict[str, Column]:
        """Those of the loss, made from the tokens that it will see; 0 for the others."""
        make = getattr(self.loss, "extra_columns", PolicyLoss().extra_columns)
        found = {}
        for name, values in make(_select(batch, kept), advantages[kept], rng).items():
            found[name] = np.zeros(len(kept), np.float32)
            found[name][kept] = values
        return found


def _batch(scored: Scored, token_rewards: NDArray[np.float64], columns: Mapping[str, Column]) -> AdvantageInputs:
    """The responses that have tokens."""
    some = scored.lengths > 0
    greedy = scored.greedy_rewards
    return AdvantageInputs(
        token_rewards=token_rewards,
        groups=scored.groups[some],
        lengths=scored.lengths[some],
        columns=columns,
        greedy_rewards=None if greedy is None else greedy[some],
        parts={name: values[some] for name, values in scored.parts.items()},
    )


def _select(batch: AdvantageInputs, kept: NDArray[np.bool_]) -> AdvantageInputs:
    """The responses, all or none of whose tokens are `kept` [R], that are."""
    rows = np.unique(batch.rows[kept])
    return replace(
        batch,
        token_rewards=batch.token_rewards[kept],
        groups=batch.groups[rows],
        lengths=batch.lengths[rows],
        columns={name: values[kept] for name, values in batch.columns.items()},
        greedy_rewards=None if batch.greedy_rewards is None else batch.greedy_rewards[rows],
        parts={name: values[rows] for name, values in batch.parts.items()},
    )


def _whitened(advantages: NDArray[np.float64], kept: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[R] by the mean and standard deviation of those that are kept."""
    if not kept.any():
        return advantages
    shifted = advantages - advantages[kept][0]  # exactly 0 where all are the same
    return (shifted - shifted[kept].mean()) / (shifted[kept].std() + 1e-8)


def _moments(advantages: NDArray[np.float64]) -> dict[str, float]:
    if not len(advantages):
        return {"advantage/mean": 0.0, "advantage/std": 0.0}
    return {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std())}
