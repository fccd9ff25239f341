"""Losses of whole responses: each token is given its share of a number that all tokens of the response make together.

Averaged with `algorithm.aggregation=sequence_mean`, a response counts for what its paper says. A response may be cut over
the ranks of context parallelism; `inputs.responses` adds up its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mrl.algorithms.inputs import LossInputs
from mrl.algorithms.losses import PolicyLoss

if TYPE_CHECKING:  # losses are named and checked in the driver, which needs no torch
    from torch import Tensor


@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """PPO's clip on the ratio of whole responses, s = (pi(y) / pi_old(y))^(1 / |y|) (Zheng et al. 2025, eq. 5-7).

    Every token's loss is -min(s A, clip(s, 1 - low, 1 + high) A): the mean over a response is the response's.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses = inputs.responses
        ratio = responses.spread(responses.mean(inputs.logprobs - inputs.old_logprobs).exp())
        return _clipped(ratio, inputs.advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class GSPOToken(PolicyLoss):
    """GSPO for advantages of single tokens: the ratio is sg(s) pi_t / sg(pi_t) (Zheng et al. 2025, eq. 13-17).

    Where all tokens of a response have the same advantage, loss and gradient are GSPO's.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses, frozen = inputs.responses, inputs.logprobs.detach()
        whole = responses.spread(responses.mean(frozen - inputs.old_logprobs).exp())
        ratio = whole * (inputs.logprobs - frozen).exp()
        return _clipped(ratio, inputs.advantages, self.clip_low, self.clip_high)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    clipped = ratio.clamp(1 - low, 1 + high)
    return -(ratio * advantages).minimum(clipped * advantages), {"loss/clip_fraction": (ratio != clipped).float()}


@dataclass(frozen=True)
class GMPO(PolicyLoss):
    """Geometric mean over a response of its tokens' clipped ratios, times -A (Zhao et al. 2025, eq. 4).

    The clip is wide and in nats, of log r: the paper's bounds are (e^-0.4, e^0.4). As in PPO it only bounds what would
    profit: from above where A > 0, from below where A < 0. Meant for one advantage per response.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio, responses = inputs.logprobs - inputs.old_logprobs, inputs.responses
        above, below = log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low)
        clipped = above.where(inputs.advantages > 0, below)
        loss = -inputs.advantages * responses.spread(responses.mean(clipped).exp())
        return loss, {"loss/clip_fraction": (log_ratio != clipped).float()}


@dataclass(frozen=True)
class OPMD(PolicyLoss):
    """Online policy mirror descent (Kimi k1.5 2025, 2.3.2): squared error of the advantage A by tau log(pi(y) / pi_old(y)).

    With R = log(pi(y) / pi_old(y)) of a whole response, (A - tau R)^2 / (2 tau) = A^2 / (2 tau) - A R + tau R^2 / 2. The first
    term is constant; the other two have the paper's gradient -(A - tau R) grad log pi(y) (eq. 3). A token's share is
    -A log r + tau R^2 / (2 |y|), which adds up to a response's loss: aggregation fixed_length keeps it so; sequence_mean
    divides it by the response's length. A is r less the group's mean (GRPO with normalize_std=False, as in the paper's practice)
    or less tau log Z (LogMeanExp). A response of advantage 0 is still drawn to the old policy.
    """

    zero_without_advantage: ClassVar[bool] = False
    tau: float = 0.1

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio, responses = inputs.logprobs - inputs.old_logprobs, inputs.responses
        square = responses.sum(log_ratio) ** 2 / responses.lengths.clamp(min=1)
        return -inputs.advantages * log_ratio + self.tau / 2 * responses.spread(square), {}


@dataclass(frozen=True)
class TOPR(PolicyLoss):
    """Tapered off-policy REINFORCE, -A log pi, times min(1, pi(y) / pi_old(y)) where A < 0 (Le Roux et al. 2025, eq. 8).

    Good responses are learnt whoever sampled them, bad ones only as far as the policy would still sample them. The weight
    carries no gradient. `clip_fraction` counts tokens of bad responses whose ratio was above 1.
    """

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses, negative = inputs.responses, inputs.advantages < 0
        log_ratio = responses.spread(responses.sum(inputs.logprobs.detach() - inputs.old_logprobs))
        weight = log_ratio.clamp(max=0).masked_fill(~negative, 0.0).exp()
        return -weight * inputs.advantages * inputs.logprobs, {
            "loss/clip_fraction": (negative & (log_ratio > 0)).float()
        }
