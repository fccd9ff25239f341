"""The advantage pipeline: computes the columns of the losses from the rewards of a whole batch, once per rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.advantages import Advantage
from mrl.algorithms.inputs import AdvantageColumns, AdvantageInputs, Advantages, ScoredBatch, broadcast_to_tokens
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import Loss, PolicyLoss
from mrl.core.types import Column


@dataclass(frozen=True)
class AdvantagePipeline:
    """Computes the loss columns of a batch from its rewards: KL penalty, advantages, whitening, extra columns of the loss.

    A response without sampled tokens is ignored; it does not count in the mean reward of its group either. A rejected
    response counts in the statistics of its group, because DAPO excludes it from the loss only (Yu et al. 2025, 3.4).
    It is also excluded from whitening and from the extra columns of the loss.
    """

    advantage: Advantage
    loss: Loss  # for its extra_columns
    kl: KLPenalty | None = None  # subtracted from the rewards
    whiten: bool = False  # scale advantages to mean 0 and standard deviation 1 over the sampled tokens in the loss
    mask_truncated: bool = False  # reject responses cut at the token limit (overlong filtering)

    @property
    def needs(self) -> frozenset[str]:
        """Names of the columns that the caller must pass, and greedy_rewards if the advantage reads them."""
        needs = getattr(self.advantage, "needs", frozenset()) | getattr(self.loss, "needs", frozenset())
        return needs | self.kl.needs | {"old_logprobs"} if self.kl else needs

    def __call__(
        self, scored: ScoredBatch, columns: Mapping[str, Column], kl_coef: float, seed: Sequence[int]
    ) -> AdvantageColumns:
        """Return the loss columns [R], float32. `columns` has a column [R] for each name in `needs`.

        `kl_coef` is the coefficient of the KL penalty in the reward. Losses that select tokens at random use `seed`.
        """
        rewards, metrics = self._token_rewards(scored, columns, kl_coef)
        batch = _advantage_inputs(scored, rewards, columns)
        result = self.advantage(batch)
        result = result if isinstance(result, Advantages) else Advantages(result)
        advantages = broadcast_to_tokens(result.advantages, batch).astype(np.float64)
        rejected = scored.truncated & self.mask_truncated
        kept = ~np.repeat(rejected, scored.lengths)  # [R]
        if self.whiten:
            advantages = _whiten(advantages, kept)
        loss_columns = {"advantages": advantages.astype(np.float32)}
        if result.returns is not None:
            loss_columns["returns"] = result.returns.astype(np.float32)
        loss_columns |= self._extra_columns(batch, loss_columns["advantages"], kept, np.random.default_rng(seed))
        rows = np.repeat(np.arange(len(scored.lengths)), scored.lengths)
        nonzero = np.bincount(rows, loss_columns["advantages"] != 0, minlength=len(scored.lengths))
        return AdvantageColumns(loss_columns, nonzero == 0, rejected, metrics | _moments(advantages[kept]))

    def _token_rewards(
        self, scored: ScoredBatch, columns: Mapping[str, Column], kl_coef: float
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Return the reward of each token [R] minus its KL penalty, and metrics."""
        if scored.turn_rewards is None:
            rewards = np.zeros(scored.lengths.sum())
            nonempty = scored.lengths > 0
            rewards[np.cumsum(scored.lengths)[nonempty] - 1] = scored.rewards[nonempty]
        else:
            rewards = scored.turn_rewards.astype(np.float64)
        if self.kl is None:
            return rewards, {}
        kl = self.kl.values(columns["old_logprobs"], columns["ref_logprobs"])
        return rewards - kl_coef * kl, {"policy/kl_reward": float(kl.mean()) if len(kl) else 0.0}

    def _extra_columns(
        self, batch: AdvantageInputs, advantages: Column, kept: NDArray[np.bool_], rng: np.random.Generator
    ) -> dict[str, Column]:
        """Return the extra columns [R] of the loss, computed from the tokens in the loss (`kept` [R]); 0 for other tokens."""
        make = getattr(self.loss, "extra_columns", PolicyLoss().extra_columns)
        columns = {}
        for name, values in make(_select_responses(batch, kept), advantages[kept], rng).items():
            columns[name] = np.zeros(len(kept), np.float32)
            columns[name][kept] = values
        return columns


def _advantage_inputs(
    scored: ScoredBatch, token_rewards: NDArray[np.float64], columns: Mapping[str, Column]
) -> AdvantageInputs:
    """Return the input of the advantage, without responses that have no sampled tokens."""
    nonempty = scored.lengths > 0
    greedy = scored.greedy_rewards
    return AdvantageInputs(
        token_rewards=token_rewards,
        groups=scored.groups[nonempty],
        lengths=scored.lengths[nonempty],
        columns=columns,
        greedy_rewards=None if greedy is None else greedy[nonempty],
        parts={name: values[nonempty] for name, values in scored.parts.items()},
    )


def _select_responses(batch: AdvantageInputs, kept: NDArray[np.bool_]) -> AdvantageInputs:
    """Return the responses whose tokens are `kept` [R]. Either all tokens of a response are kept or none."""
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


def _whiten(advantages: NDArray[np.float64], kept: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return advantages [R] shifted and scaled by the mean and standard deviation of the `kept` tokens."""
    if not kept.any():
        return advantages
    shifted = advantages - advantages[kept][0]  # exactly 0 if all are equal
    return (shifted - shifted[kept].mean()) / (shifted[kept].std() + 1e-8)


def _moments(advantages: NDArray[np.float64]) -> dict[str, float]:
    if not len(advantages):
        return {"advantage/mean": 0.0, "advantage/std": 0.0}
    return {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std())}
