"""The actor and the critic on one trainer rank: a language model, and a value model that is trained to predict returns."""

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from models.architecture import ModelSpec
from mrl.algorithms import corrections
from mrl.algorithms.inputs import LossInputs
from mrl.algorithms.losses import Loss, ValueLossFunction
from mrl.algorithms.objective import Objective, check_token_values
from mrl.core.types import RankBatch, TokenBlock, UpdateReport
from mrl.core.user_code import describe_plug_in
from mrl.workers.megatron_model import NONFINITE, MegatronModel, MicroBatchStatistics, reduce_statistics
from mrl.workers.micro_batch import MicroBatch
from parallel import groups
from parallel.logprobs import linear_logprobs
from parallel.megatron_layers import gather_sequence


class MegatronActor(MegatronModel):
    """One rank's part of the policy, or of the teacher, which is not trained."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, head="vocabulary")

    def update(
        self,
        block: TokenBlock,
        batches: Sequence[RankBatch],
        loss: Loss,
        lrs: Sequence[float],
        temperature: float = 1.0,
    ) -> list[UpdateReport]:
        """Run one optimizer step for each mini-batch, on this replica's rows. Gradients are summed over replicas.

        Log-probabilities are computed from logits / temperature. If the block has no column old_logprobs, the current
        log-probabilities replace this column. This is correct if a rollout has only one optimizer step. Raises
        NonFiniteGradientError if a gradient is not finite.
        """
        head = partial(self.head, temperature=temperature, entropy_gradient=loss.uses_entropy)
        source = loss.source if isinstance(loss, Objective) else describe_plug_in(loss)
        reports = []
        for index, (batch, lr) in enumerate(zip(batches, lrs, strict=True)):
            micros = self.micro_batches(block, batch)
            start = time.perf_counter()
            statistics = self.accumulate_gradients(micros, head, partial(policy_loss, loss=loss), batch)
            grad_norm = self.optimizer_step(lr, index, statistics, source)
            seconds = time.perf_counter() - start
            reports.append(reduce_statistics(statistics, {"optim/grad_norm": grad_norm, "seconds": seconds}))
        return reports

    def compute_columns(
        self, block: TokenBlock, batch: RankBatch, temperature: float, names: Sequence[str]
    ) -> dict[str, list[Tensor]]:
        """Compute several columns in one forward pass. `names`: names of outputs of `head`.

        Returns name -> values [R] of the sampled tokens of each micro-batch. Only the last pipeline stage has them.
        """
        outputs = self.compute_outputs(block, batch, partial(self.head, temperature=temperature, names=names))
        return {name: [output[index] for output in outputs] for index, name in enumerate(names)}

    def compute_logprobs(self, block: TokenBlock, batch: RankBatch, temperature: float = 1.0) -> list[Tensor]:
        """Return for each micro-batch the log-probabilities [R] of its sampled tokens. Only the last pipeline stage has them."""
        return self.compute_columns(block, batch, temperature, ["logprobs"])["logprobs"]

    def compute_reference_logprobs(self, block: TokenBlock, batch: RankBatch, temperature: float = 1.0) -> list[Tensor]:
        """Do the same as `compute_logprobs`, under the weights of the reference policy."""
        with self.reference_weights():
            return self.compute_logprobs(block, batch, temperature)

    def head(
        self,
        hidden: Tensor,  # [L, H]
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        micro: MicroBatch,
        temperature: float,
        entropy_gradient: bool = False,
        names: Sequence[str] = ("logprobs", "entropies"),
    ) -> Tensor:
        """Return [number of names, local R]: for each sampled token, the outputs that `names` selects.

            logprobs        log-probability of the token
            entropies       entropy, in nats, of the distribution that predicts the token
            sum_pi_squared  sum of the squared probabilities of this distribution; without gradient

        The distribution is softmax(logits / temperature).
        """
        selected = gather_sequence(hidden, self.spec.dims.sequence_parallel).index_select(0, micro.predictor_index)
        weight = output_layer.get_parameter("weight") if output_weight is None else output_weight
        logprobs, entropies, sum_pi_squared = linear_logprobs(
            selected,
            weight,
            micro.targets,
            groups.tp_group(),
            self.vocab_size,
            temperature,
            self.spec.logprob_chunk,
            needs_entropy="entropies" in names,
            needs_sum_pi_squared="sum_pi_squared" in names,
        )
        entropies = entropies if entropy_gradient else entropies.detach()
        outputs = dict(logprobs=logprobs, entropies=entropies, sum_pi_squared=sum_pi_squared)
        return torch.stack([outputs[name] for name in names])


def policy_loss(output: Tensor, micro: MicroBatch, loss: Loss) -> tuple[Tensor, MicroBatchStatistics]:
    """Return the micro-batch's part of the loss, and its statistics. `output` [2, local R] comes from MegatronActor.head."""
    logprobs, entropy = output
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=micro.columns.get("old_logprobs", logprobs.detach()),
        advantages=micro.columns.get("advantages", torch.zeros_like(entropy)),
        entropy=entropy,
        rollout_logprobs=micro.rollout_logprobs,
        responses=micro.responses,
        columns={**micro.columns, "rollout_logprobs": micro.rollout_logprobs},
    )
    per_token, loss_statistics = loss(inputs)
    loss_weights, nonfinite = _loss_weights(per_token, logprobs, micro)
    total = (per_token * loss_weights).sum()
    mismatch = (inputs.old_logprobs - micro.rollout_logprobs).abs()
    unknown = mismatch.isnan()  # no engine reported a log-probability of the token
    nothing = float("-inf")
    largest_mismatch = mismatch.masked_fill(unknown, nothing).max() if len(mismatch) else mismatch.new_full((), nothing)
    sums = {
        "loss": total.detach(),
        "mismatch_abs": mismatch.masked_fill(unknown, 0.0).sum(),
        "entropy": entropy.detach().sum(),
        "tokens": torch.tensor(len(logprobs)),
        **corrections.mismatch_sums(inputs.old_logprobs, micro.rollout_logprobs),
        "weight": loss_weights.sum(),
        NONFINITE: nonfinite,
        **{name: (value * loss_weights).sum() for name, value in loss_statistics.items()},
    }
    return total, MicroBatchStatistics(sums, {"mismatch_abs": largest_mismatch})


def _loss_weights(per_token: Tensor, outputs: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the loss weight of each token [local R], and the number of tokens whose loss is not finite, as a scalar.

    A token whose loss is not finite, although the model's output for it is, gets the weight NaN. Then the gradient is NaN too, so
    that the optimizer step is refused. Raises ValueError if the loss does not depend on the outputs.
    """
    if outputs.requires_grad and not per_token.requires_grad:
        raise ValueError(
            "the loss has no gradient: it must be computed from inputs.logprobs (policy loss) or values (value loss), without "
            "detach()."
        )
    broken = outputs.detach().isfinite() & ~per_token.detach().isfinite()
    return micro.weights.to(per_token.dtype).masked_fill(broken, float("nan")), broken.double().sum()


class MegatronCritic(MegatronModel):
    """One rank's part of the critic: a decoder whose head predicts one number per token."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, head="value")

    def update(
        self, block: TokenBlock, batches: Sequence[RankBatch], loss: ValueLossFunction, lrs: Sequence[float]
    ) -> list[UpdateReport]:
        """Run one optimizer step for each mini-batch, on this replica's rows. The target is the column `returns`.

        Raises NonFiniteGradientError if a gradient is not finite.
        """
        source = f"critic.loss: {describe_plug_in(loss)}"
        reports = []
        for index, (batch, lr) in enumerate(zip(batches, lrs, strict=True)):
            micros = self.micro_batches(block, batch)
            start = time.perf_counter()
            statistics = self.accumulate_gradients(micros, self.head, partial(value_loss, loss=loss), batch)
            grad_norm = self.optimizer_step(lr, index, statistics, source)
            seconds = time.perf_counter() - start
            reports.append(reduce_statistics(statistics, {"critic/grad_norm": grad_norm, "seconds": seconds}))
        return reports

    def compute_values(self, block: TokenBlock, batch: RankBatch) -> list[Tensor]:
        """Return for each micro-batch the value before each sampled token: [R]. Only the last pipeline stage returns them."""
        return [output[0] for output in self.compute_outputs(block, batch, self.head)]

    def head(
        self, hidden: Tensor, output_layer: torch.nn.Module, output_weight: Tensor | None, micro: MicroBatch
    ) -> Tensor:
        """Return the values [1, local R] that follow from hidden states [L, H]."""
        gathered = gather_sequence(hidden, self.spec.dims.sequence_parallel, replicated=True)
        return output_layer(gathered.index_select(0, micro.predictor_index))[None]


def value_loss(output: Tensor, micro: MicroBatch, loss: ValueLossFunction) -> tuple[Tensor, MicroBatchStatistics]:
    """Return the micro-batch's part of the loss, and its statistics. `output` [1, local R] comes from MegatronCritic.head."""
    values, returns = output[0], micro.columns["returns"]
    result = loss(values, returns, micro.columns.get("values", values.detach()))
    per_token, _ = check_token_values((result, {}), values, "critic.loss", loss)
    loss_weights, nonfinite = _loss_weights(per_token, values, micro)
    total = (per_token * loss_weights).sum()
    sums = {"loss": total.detach(), "tokens": torch.tensor(len(values)), NONFINITE: nonfinite}
    columns = {"values": values.detach(), "returns": returns, "errors": (returns - values).detach()}
    for name, column in columns.items():
        sums |= {name: column.sum(), f"{name}_squared": (column**2).sum()}
    return total, MicroBatchStatistics(sums)
