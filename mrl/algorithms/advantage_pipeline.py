"""The advantage pipeline. It reads the rewards of a step and computes the columns for the losses.

It runs in the rollout worker, once for each call of Trainer.estimate: usually once per step, for all responses.
mrl.core.types explains the letters of array dimensions, such as B and R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.advantages import Advantage
from mrl.algorithms.filters import Resampling
from mrl.algorithms.inputs import (
    AdvantageColumns,
    AdvantageInputs,
    Advantages,
    ScoredBatch,
    broadcast_to_tokens,
    join_precomputed_columns,
    required_inputs_of,
    to_numbers,
)
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import Loss
from mrl.algorithms.objective import Objective
from mrl.core.code_locations import describe_plug_in
from mrl.core.types import Column


@dataclass(frozen=True)
class AdvantagePipeline:
    """Computes the columns that the losses need: advantages, returns, and precomputed columns of the loss and the correction.

    A column [R] has one number for each of the R sampled tokens. A precomputed column is a column that a loss or a correction
    computes from the whole step, before the step is divided into mini-batches (Loss.precomputed_columns).

    The pipeline subtracts the KL penalty from the rewards, estimates advantages, whitens them if `whiten` is set, and
    computes the precomputed columns. Responses without sampled tokens are ignored: the mean reward of a group does not include
    them.

    Offline rows (rows of data.offline.path) may have an advantage from the config (data.offline.advantage, passed in
    `ScoredBatch.offline_advantages`). This advantage replaces the estimated advantage after the whitening.

    After all columns are computed, `resampling` decides how many times each response counts in the loss. A response that counts
    0 times is excluded. A response with an offline advantage always counts once.

    With `mask_truncated`, truncated responses are excluded: they do not count in the loss, in the whitening and in the
    precomputed columns. An excluded response still counts in the statistics of its group, as in DAPO (Yu et al. 2025, 3.4).
    """

    advantage: Advantage
    loss: Loss  # the objective or a policy loss; only its `precomputed_columns` and `required_inputs` are used
    kl: KLPenalty | None = None  # penalty that is subtracted from the rewards
    whiten: bool = False  # normalize advantages to mean 0 and standard deviation 1 over the sampled tokens in the loss
    mask_truncated: bool = False  # exclude responses that the token limit or the turn limit ended (overlong filtering)
    resampling: Resampling | None = None  # None: each response counts once in the loss

    @property
    def required_inputs(self) -> frozenset[str]:
        """Names of the inputs that the estimator, the loss and the KL penalty read, as in AlgorithmParts.required_inputs.

        An input is a column, a teacher output, or "greedy_rewards": the reward of a greedy response to each prompt.
        """
        required_inputs = required_inputs_of(self.advantage) | required_inputs_of(self.loss)
        return required_inputs | self.kl.required_inputs | {"old_logprobs"} if self.kl else required_inputs

    def __call__(
        self, scored: ScoredBatch, columns: Mapping[str, Column], kl_coef: float, seed: Sequence[int]
    ) -> AdvantageColumns:
        """Return the columns [R] that the losses need, as float32.

        Args:
            scored: responses and rewards.
            columns: name -> column [R], for each column in `required_inputs`.
            kl_coef: coefficient of the KL penalty in the reward.
            seed: random seed for the precomputed columns of losses that select tokens at random, and for the resampling.
        """
        rewards, metrics = self._token_rewards(scored, columns, kl_coef)
        batch = _advantage_inputs(scored, rewards, columns)
        advantages, returns = self._estimate(batch)
        excluded = scored.truncated & self.mask_truncated
        in_loss = ~np.repeat(excluded, scored.lengths)  # [R] whether the token is in the loss
        if self.whiten:
            advantages = _whiten(advantages, in_loss)
        if scored.offline_advantages is not None:
            offline = np.repeat(scored.offline_advantages, scored.lengths)
            advantages = np.where(np.isnan(offline), advantages, offline)
        loss_columns = {"advantages": advantages.astype(np.float32)}
        if returns is not None:
            loss_columns["returns"] = returns.astype(np.float32)
        loss_columns |= self._precomputed_columns(
            batch, loss_columns["advantages"], in_loss, np.random.default_rng(seed)
        )
        rows = np.repeat(np.arange(len(scored.lengths)), scored.lengths)
        num_nonzero = np.bincount(rows, loss_columns["advantages"] != 0, minlength=len(scored.lengths))
        metrics |= _advantage_metrics(advantages[in_loss])
        counts = None
        if self.resampling:
            counts = self._draw(self.resampling, scored, ~excluded & (scored.lengths > 0), [*seed, 1])
            metrics["advantage/drawn_fraction"] = float((counts > 0).mean())
            excluded = excluded | (counts == 0)
        return AdvantageColumns(loss_columns, num_nonzero == 0, excluded, metrics, counts)

    @staticmethod
    def _draw(
        resampling: Resampling, scored: ScoredBatch, eligible: NDArray[np.bool_], seed: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return [B]: how often each response counts in the loss; 0 for a response that is not `eligible` [B].

        An eligible response with an offline advantage counts once. It is not drawn, because its reward does not matter, and may
        be unknown.
        """
        offline = scored.offline_advantages
        candidates = eligible if offline is None else eligible & np.isnan(offline)
        counts = (eligible & ~candidates).astype(np.int64)
        if not candidates.any():
            return counts
        drawn = resampling(scored.rewards[candidates], scored.groups[candidates], np.random.default_rng(seed))
        source = f"algorithm.resampling: {describe_plug_in(resampling)}"
        numbers = to_numbers(drawn, source)
        wrong = numbers[(numbers < 0) | (numbers % 1 != 0)]
        if numbers.shape != (candidates.sum(),) or wrong.size:
            example = f", which contains {wrong[0]}" if wrong.size else ""
            raise ValueError(
                f"{source} returned an array of shape {numbers.shape}{example}; expected {candidates.sum()} whole numbers, each "
                "0 or more."
            )
        counts[candidates] = numbers
        return counts

    def with_parts(self, advantage: Advantage | None, loss: Loss | None) -> AdvantagePipeline:
        """Return the pipeline with another estimator or another policy loss. None keeps the present estimator or loss.

        A policy loss replaces only the policy loss of the present objective. An Objective replaces the whole objective.
        """
        if loss is not None and isinstance(self.loss, Objective):
            loss = self.loss.with_loss(loss)
        return replace(self, advantage=advantage or self.advantage, loss=loss or self.loss)

    def for_selected_rows(
        self,
        rows: NDArray[np.bool_] | None,
        scored: ScoredBatch,
        columns: Mapping[str, Column],
        kl_coef: float,
        seed: Sequence[int],
    ) -> AdvantageColumns:
        """Return the columns [R] of the responses for which `rows` [B] is true, as if the step had only these responses.

        All other responses are excluded, and their tokens get 0. `rows=None` selects all responses.
        """
        if rows is None:
            return self(scored, columns, kl_coef, seed)
        tokens = np.repeat(rows, scored.lengths)
        part = self(scored.select(rows), {name: values[tokens] for name, values in columns.items()}, kl_coef, seed)
        expanded = {name: np.zeros(len(tokens), np.float32) for name in part.columns}
        for name, values in part.columns.items():
            expanded[name][tokens] = values
        zero, excluded = np.ones(len(rows), bool), np.ones(len(rows), bool)
        zero[rows], excluded[rows] = part.zero_advantage, part.excluded
        counts = None
        if part.counts is not None:
            counts = np.zeros(len(rows), np.int64)
            counts[rows] = part.counts
        return AdvantageColumns(expanded, zero, excluded, part.metrics, counts)

    def _estimate(self, batch: AdvantageInputs) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Call the advantage estimator. The result is (advantages [R], returns [R] or None).

        Raises ValueError if a result has a wrong shape or a number that is not finite.
        """
        result, source = self.advantage(batch), f"algorithm.advantage: {describe_plug_in(self.advantage)}"
        result = result if isinstance(result, Advantages) else Advantages(result)
        advantages = broadcast_to_tokens(to_numbers(result.advantages, source), batch, source).astype(np.float64)
        if result.returns is None:
            if "values" in required_inputs_of(self.advantage):
                raise ValueError(
                    f"{source} needs values, but returned no returns: return Advantages(advantages, returns)."
                )
            return advantages, None
        returns = to_numbers(result.returns, f"{source} (returns)")
        if returns.shape != batch.response_of_token.shape:
            raise ValueError(
                f"{source} returned returns of shape {returns.shape}; expected one number for each of the "
                f"{len(batch.response_of_token)} sampled tokens."
            )
        return advantages, returns

    def _token_rewards(
        self, scored: ScoredBatch, columns: Mapping[str, Column], kl_coef: float
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Return (token rewards [R] minus KL penalties, metrics)."""
        if scored.turn_rewards is None:
            rewards = np.zeros(scored.lengths.sum())
            nonempty = scored.lengths > 0
            rewards[np.cumsum(scored.lengths)[nonempty] - 1] = scored.rewards[nonempty]
        else:
            rewards = scored.turn_rewards.astype(np.float64)
        if self.kl is None:
            return rewards, {}
        kl = self.kl.values(columns["old_logprobs"], columns["ref_logprobs"])
        known = ~np.isnan(kl)  # an engine may report NaN as log-probability; such a token has no penalty
        return rewards - kl_coef * np.where(known, kl, 0.0), {
            "policy/kl_reward": float(kl[known].mean()) if known.any() else 0.0
        }

    def _precomputed_columns(
        self, batch: AdvantageInputs, advantages: Column, in_loss: NDArray[np.bool_], rng: np.random.Generator
    ) -> dict[str, Column]:
        """Return the precomputed columns [R] of the loss, from the tokens with `in_loss` true. All other tokens get 0."""
        selected, columns = _select_responses(batch, in_loss), {}
        for name, values in join_precomputed_columns([self.loss], selected, advantages[in_loss], rng).items():
            columns[name] = np.zeros(len(in_loss), np.float32)
            columns[name][in_loss] = values
        return columns


def _advantage_inputs(
    scored: ScoredBatch, token_rewards: NDArray[np.float64], columns: Mapping[str, Column]
) -> AdvantageInputs:
    """Return the input of the advantage estimator. Responses without sampled tokens are omitted."""
    nonempty = scored.lengths > 0
    greedy = scored.greedy_rewards
    return AdvantageInputs(
        token_rewards=token_rewards,
        groups=scored.groups[nonempty],
        lengths=scored.lengths[nonempty],
        columns=columns,
        greedy_rewards=None if greedy is None else greedy[nonempty],
        reward_parts={name: values[nonempty] for name, values in scored.reward_parts.items()},
    )


def _select_responses(batch: AdvantageInputs, selected: NDArray[np.bool_]) -> AdvantageInputs:
    """Return the responses whose tokens are `selected` [R]. `selected` has the same value for all tokens of a response."""
    rows = np.unique(batch.response_of_token[selected])  # indices of the selected responses
    return replace(
        batch,
        token_rewards=batch.token_rewards[selected],
        groups=batch.groups[rows],
        lengths=batch.lengths[rows],
        columns={name: values[selected] for name, values in batch.columns.items()},
        greedy_rewards=None if batch.greedy_rewards is None else batch.greedy_rewards[rows],
        reward_parts={name: values[rows] for name, values in batch.reward_parts.items()},
    )


def _whiten(advantages: NDArray[np.float64], in_loss: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return advantages [R], normalized with the mean and unbiased variance over the tokens for which `in_loss` [R] is true.

    As in verl and trl, 1e-8 is added to the variance. So advantages with a standard deviation far below 1e-4 stay near 0.
    """
    if not in_loss.any():
        return advantages
    shifted = advantages - advantages[in_loss][0]  # exactly 0 if all advantages are equal
    variance = shifted[in_loss].var(ddof=int(in_loss.sum() > 1))
    return (shifted - shifted[in_loss].mean()) / np.sqrt(variance + 1e-8)


def _advantage_metrics(advantages: NDArray[np.float64]) -> dict[str, float]:
    if not len(advantages):
        return {"advantage/mean": 0.0, "advantage/std": 0.0}
    return {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std())}
