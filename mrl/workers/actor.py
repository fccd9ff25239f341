"""The policy being trained: one rank's part of it."""

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mrl.algorithms import corrections
from mrl.algorithms.inputs import LossInputs
from mrl.algorithms.losses import Loss
from mrl.core.types import RankBatch, TokenBlock, UpdateReport
from mrl.workers.megatron_model import MegatronModel, largest, summarise
from mrl.workers.micro_batch import MicroBatch
from mrl.workers.model_spec import ModelSpec
from parallel import groups
from parallel.logprobs import linear_logprobs
from parallel.megatron_layers import gather_sequence
from parallel.schedule import Report


class MegatronActor(MegatronModel):
    """A language model trained with a policy loss, or with cross-entropy."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, head="vocabulary")

    def update(
        self, block: TokenBlock, shares: Sequence[RankBatch], loss: Loss, lrs: Sequence[float], temperature: float = 1.0
    ) -> list[UpdateReport]:
        """An optimizer step on this replica's share of each mini-batch; gradients are summed over replicas.

        Log-probabilities are those of logits / temperature. Without a column old_logprobs they are their own old ones, as is
        right for a rollout's only step. Raises NonFiniteGradientError when a gradient is not finite.
        """
        head = partial(self.head, temperature=temperature, entropy_gradient=loss.uses_entropy)
        reports = []
        for number, (share, lr) in enumerate(zip(shares, lrs, strict=True)):
            micros = self.micro_batches(block, share)
            start = time.perf_counter()
            found = self.accumulate(micros, head, partial(policy_loss, loss=loss), share)
            grad_norm = self.step(lr, number)
            seconds = time.perf_counter() - start
            reports.append(summarise(found, {"optim/grad_norm": grad_norm, "seconds": seconds}))
        return reports

    def compute_logprobs(self, block: TokenBlock, share: RankBatch, temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities [R] of the sampled tokens of each micro-batch; empty except on the last pipeline stage."""
        return self.score(block, share, partial(self.head, temperature=temperature))

    def compute_reference_logprobs(self, block: TokenBlock, share: RankBatch, temperature: float = 1.0) -> list[Tensor]:
        """The same under the weights that `keep_reference` kept."""
        with self.reference():
            return self.compute_logprobs(block, share, temperature)

    def head(
        self,
        hidden: Tensor,  # [L, H]
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        micro: MicroBatch,
        temperature: float,
        entropy_gradient: bool = False,
    ) -> Tensor:
        """[2, R here] log-probabilities of the response tokens, and entropies where they are predicted."""
        chosen = gather_sequence(hidden, self.spec.dims.sequence_parallel).index_select(0, micro.predict)
        weight = output_layer.get_parameter("weight") if output_weight is None else output_weight
        logprobs, entropies = linear_logprobs(
            chosen,
            weight,
            micro.targets,
            groups.tp_group(),
            self.vocab_size,
            temperature,
            self.spec.logprob_chunk,
            needs_entropy=True,
        )
        return torch.stack([logprobs, entropies if entropy_gradient else entropies.detach()])


def policy_loss(output: Tensor, micro: MicroBatch, loss: Loss) -> tuple[Tensor, Report]:
    """The micro-batch's part of the loss, and what is reported of it; `output` [2, R here] is the actor's head's."""
    logprobs, entropy = output
    inputs = LossInputs(
        logprobs,
        micro.columns.get("old_logprobs", logprobs.detach()),
        micro.columns.get("advantages", torch.zeros_like(entropy)),
        entropy,
        micro.rollout_logprobs,
        micro.responses,
        micro.columns,
    )
    per_token, extra = loss(inputs)
    weights = micro.weights.to(per_token.dtype)
    total = (per_token * weights).sum()
    gap = (inputs.old_logprobs - micro.rollout_logprobs).abs()  # NaN where nothing was sampled
    report = {
        "sum:loss": total.detach(),
        "max:gap": largest(gap),
        "sum:gap": gap.sum(),
        "sum:entropy": entropy.detach().sum(),
        "sum:tokens": torch.tensor(len(gap)),
    }
    distance = corrections.mismatch_sums(inputs.old_logprobs, micro.rollout_logprobs)
    report |= {f"sum:{name}": value for name, value in distance.items()}
    report["sum:weight"] = weights.sum()
    return total, report | {f"sum:{name}": (value * weights).sum() for name, value in extra.items()}
