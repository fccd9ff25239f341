"""Policy losses with one ratio or penalty per response. They return one loss per token.

In the formulas, y is a response, |y| its number of tokens, and pi(y) its probability under the weights that are trained.
A is the advantage, pi the probability of a token, r the ratio pi / pi_old of a token, and sg the stop-gradient.

With `algorithm.aggregation=sequence_mean`, each response has the same weight as in the papers. Context parallelism may
divide a response over ranks; `inputs.responses` sums over all its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mrl.algorithms.inputs import LossInputs
from mrl.algorithms.losses import PolicyLoss

if TYPE_CHECKING:  # the driver builds and checks losses without torch
    from torch import Tensor


@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """PPO's clip of one ratio per response, s = (pi(y) / pi_old(y))^(1 / |y|) (Zheng et al. 2025, eq. 5-7).

    The loss of each token is -min(s A, clip(s, 1 - low, 1 + high) A). The mean over the tokens of a response is the
    paper's loss of the response.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses = inputs.responses
        ratio = responses.to_tokens(responses.mean(inputs.logprobs - inputs.old_logprobs).exp())
        return _clipped_loss(ratio, inputs.advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class GSPOToken(PolicyLoss):
    """GSPO for one advantage per token. The ratio of a token is sg(s) pi / sg(pi) (Zheng et al. 2025, eq. 13-17).

    If all tokens of a response have the same advantage, loss and gradient are equal to those of GSPO.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses, detached = inputs.responses, inputs.logprobs.detach()
        sequence_ratio = responses.to_tokens(responses.mean(detached - inputs.old_logprobs).exp())
        ratio = sequence_ratio * (inputs.logprobs - detached).exp()
        return _clipped_loss(ratio, inputs.advantages, self.clip_low, self.clip_high)


def _clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    clipped = ratio.clamp(1 - low, 1 + high)
    return -(ratio * advantages).minimum(clipped * advantages), {"loss/clip_fraction": (ratio != clipped).float()}


@dataclass(frozen=True)
class GMPO(PolicyLoss):
    """-A times the geometric mean of the clipped token ratios of a response (Zhao et al. 2025, eq. 4).

    `clip_low` and `clip_high` are bounds of log r: with the defaults, r is clipped to (e^-0.4, e^0.4), as in the paper. If
    A > 0, only the upper bound is used; if A < 0, only the lower bound is used. All tokens of a response should have the
    same advantage.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio, responses = inputs.logprobs - inputs.old_logprobs, inputs.responses
        above, below = log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low)
        clipped = above.where(inputs.advantages > 0, below)
        loss = -inputs.advantages * responses.to_tokens(responses.mean(clipped).exp())
        return loss, {"loss/clip_fraction": (log_ratio != clipped).float()}


@dataclass(frozen=True)
class OPMD(PolicyLoss):
    """Online policy mirror descent (Kimi k1.5 2025, 2.3.2): squared error between A and tau log(pi(y) / pi_old(y)).

    Let D = log(pi(y) / pi_old(y)). Then (A - tau D)^2 / (2 tau) = A^2 / (2 tau) - A D + tau D^2 / 2. The first term is
    constant. The other two terms have the gradient of the paper, -(A - tau D) grad log pi(y) (eq. 3).

    The loss of a token is -A log r + tau D^2 / (2 |y|). Its sum over a response is the loss of the response. With
    `algorithm.aggregation=fixed_length` the weights of the tokens keep this sum; sequence_mean divides it by |y|.

    A should be the reward minus the mean of the group (GRPO with `normalize_std=False`), as the authors do in practice,
    or the reward minus tau log Z (LogMeanExp). A response with advantage 0 also has a gradient, towards the old policy.
    """

    zero_without_advantage: ClassVar[bool] = False
    tau: float = 0.1

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio, responses = inputs.logprobs - inputs.old_logprobs, inputs.responses
        square = responses.sum(log_ratio) ** 2 / responses.lengths.clamp(min=1)
        return -inputs.advantages * log_ratio + self.tau / 2 * responses.to_tokens(square), {}


@dataclass(frozen=True)
class TOPR(PolicyLoss):
    """Tapered off-policy REINFORCE: the loss is -w A log pi with a weight w per response (Le Roux et al. 2025, eq. 8).

    w is 1 if A >= 0, and min(1, pi(y) / pi_old(y)) if A < 0. So a response with A < 0 loses weight as it becomes less
    probable. The weight has no gradient. The metric `loss/clip_fraction` is the fraction of tokens with A < 0 and
    pi(y) / pi_old(y) > 1.
    """

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses, negative = inputs.responses, inputs.advantages < 0
        log_ratio = responses.to_tokens(responses.sum(inputs.logprobs.detach() - inputs.old_logprobs))
        weight = log_ratio.clamp(max=0).masked_fill(~negative, 0.0).exp()
        return -weight * inputs.advantages * inputs.logprobs, {
            "loss/clip_fraction": (negative & (log_ratio > 0)).float()
        }
