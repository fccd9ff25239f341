"""Policy losses with one ratio or penalty per response. They return one loss per token.

Symbols in the formulas:

    y                  a response
    |y|                number of tokens of y
    pi(y), pi          probability of a response, or of a token, under the current model weights
    pi_old(y), pi_old  the same probabilities before the first optimizer step of the training step
    A                  advantage
    r                  the ratio pi / pi_old of a token
    sg                 stop-gradient

In the papers of GSPO, GSPOToken and GMPO, the loss of a response is the mean over its tokens: use
`algorithm.aggregation=sequence_mean`. In the papers of OPMD and TOPR, it is the sum over its tokens: use
`algorithm.aggregation=sequence_sum`, or `fixed_length`, which differs only by a constant factor. Context parallelism may divide a
response over ranks; `inputs.responses` sums over the tokens on all these ranks. docs/concepts/algorithms.md lists the papers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mrl.algorithms.inputs import MAX_LOG_RATIO, LossInputs, bounded_exp
from mrl.algorithms.losses import PolicyLoss, clipped_loss

if TYPE_CHECKING:  # the driver builds and checks losses without torch
    from torch import Tensor


@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """PPO's clipped loss with one ratio per response, s = (pi(y) / pi_old(y))^(1 / |y|) (Zheng et al. 2025, eq. 5-7).

    The loss of each token is -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A). The mean of these losses over a response
    is the loss that the paper defines for the response.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses = inputs.responses
        ratio = responses.to_tokens(bounded_exp(responses.mean(inputs.logprobs - inputs.old_logprobs)))
        return clipped_loss(ratio, inputs.advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class GSPOToken(PolicyLoss):
    """GSPO for one advantage per token. The ratio of a token is sg(s) pi / sg(pi) (Zheng et al. 2025, eq. 13-17).

    s is the ratio of the response, as in GSPO. If all tokens of a response have the same advantage, this class and GSPO
    give the same loss and gradient.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses, detached = inputs.responses, inputs.logprobs.detach()
        sequence_ratio = responses.to_tokens(bounded_exp(responses.mean(detached - inputs.old_logprobs)))
        ratio = sequence_ratio * (inputs.logprobs - detached).exp()
        return clipped_loss(ratio, inputs.advantages, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class GMPO(PolicyLoss):
    """Loss -A times the geometric mean of the clipped token ratios of a response (Zhao et al. 2025, eq. 4).

    log r is clipped to [-clip_low, clip_high]. With the defaults, r is clipped to [e^-0.4, e^0.4], as in the paper. If A > 0,
    only the upper bound is used; if A < 0, only the lower bound is used. All tokens of a response should have the
    same advantage.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio, responses = inputs.logprobs - inputs.old_logprobs, inputs.responses
        above, below = log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low)
        clipped = above.where(inputs.advantages > 0, below)
        loss = -inputs.advantages * responses.to_tokens(bounded_exp(responses.mean(clipped)))
        bound = (log_ratio != clipped) & (inputs.advantages != 0)
        return loss, {"loss/clip_fraction": bound.float()}


@dataclass(frozen=True)
class OPMD(PolicyLoss):
    """Online policy mirror descent (Kimi k1.5 2025, 2.3.2): squared error between A and tau log(pi(y) / pi_old(y)).

    Let D = log(pi(y) / pi_old(y)). Then (A - tau D)^2 / (2 tau) = A^2 / (2 tau) - A D + tau D^2 / 2. The first term is
    constant. The other two terms have the gradient of the paper, -(A - tau D) grad log pi(y) (eq. 3).

    The loss of a token is -A log r + tau D^2 / (2 |y|). The sum over a response is the loss of the response. With
    `algorithm.aggregation=fixed_length`, this sum is multiplied by the same constant for all responses. sequence_mean divides
    this sum by |y|, so it does not give the loss of the paper.

    A should be the reward minus the mean reward of the group (GRPO with `scale_rewards=none`), as the authors do in practice,
    or the reward minus tau log Z, where Z is the mean of exp(reward / tau) over the group. The advantage estimator LogMeanExp
    computes this difference. A response with advantage 0 also has a gradient, towards the old policy.
    """

    zero_at_zero_advantage: ClassVar[bool] = False
    tau: float = 0.1  # a larger tau keeps the policy closer to the old policy

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio, responses = inputs.logprobs - inputs.old_logprobs, inputs.responses
        square = responses.sum(log_ratio) ** 2 / responses.lengths.clamp(min=1)
        return -inputs.advantages * log_ratio + self.tau / 2 * responses.to_tokens(square), {}


@dataclass(frozen=True)
class VESPO(PolicyLoss):
    """Policy gradient with a smooth weight per response: the loss is -sg(phi(w)) A log pi (Shen et al. 2026).

    w is the ratio of the whole response, pi(y) / pi_old(y), and phi(w) = w^k exp(lambda (1 - w)). phi is 1 for on-policy
    samples, and falls towards 0 as the response becomes much less or much more probable. A larger k makes phi fall faster for
    w < 1, and a larger lambda makes phi fall faster for w > 1.

    With `algorithm.old_logprobs=rollout`, w also contains the difference between the trainer and the engine. Raises ValueError
    for a k or lambda below 0.
    """

    k_positive: float = 2.0  # k of responses with A >= 0
    lambda_positive: float = 3.0
    k_negative: float = 3.0  # k of responses with A < 0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"{name}={value}: must be 0 or more.")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses, negative = inputs.responses, inputs.advantages < 0
        log_ratio = responses.sum(inputs.logprobs.detach() - inputs.old_logprobs)
        log_w = responses.to_tokens(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        k = log_w.new_full(log_w.shape, self.k_positive).masked_fill(negative, self.k_negative)
        scale = log_w.new_full(log_w.shape, self.lambda_positive).masked_fill(negative, self.lambda_negative)
        phi = (k * log_w + scale * (1 - log_w.exp())).exp()
        return -phi * inputs.advantages * inputs.logprobs, {"loss/response_weight": phi}


@dataclass(frozen=True)
class TOPR(PolicyLoss):
    """Tapered off-policy REINFORCE: the loss is -w A log pi with a weight w per response (Le Roux et al. 2025, eq. 8).

    w is 1 if A >= 0, and min(1, pi(y) / pi_old(y)) if A < 0. So if a response with A < 0 becomes less probable, its w
    falls. w has no gradient. The metric `loss/clip_fraction` is the fraction of tokens with A < 0 and
    pi(y) / pi_old(y) > 1.
    """

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses, negative = inputs.responses, inputs.advantages < 0
        log_ratio = responses.to_tokens(responses.sum(inputs.logprobs.detach() - inputs.old_logprobs))
        weight = log_ratio.clamp(max=0).masked_fill(~negative, 0.0).exp()
        return -weight * inputs.advantages * inputs.logprobs, {
            "loss/clip_fraction": (negative & (log_ratio > 0)).float()
        }
