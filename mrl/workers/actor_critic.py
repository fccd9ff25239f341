"""The actor, the critic and the reward model on one trainer rank, and the computations for distillation.

The actor is a language model. The critic learns to predict returns. The reward model learns to score whole sequences. For
distillation, a teacher computes its outputs, and the actor computes the divergence of the policy from its teachers.

mrl.core.types explains the letters of array dimensions, such as B and R. MicroBatch (mrl.workers.micro_batch) explains
`local R`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.architecture import ModelSpec
from models.conversion.weight_bridge import read_output_weight
from models.hf_config import HFConfig
from models.model_builder import HeadKind
from mrl.algorithms import corrections
from mrl.algorithms.distillation import DIVERGENCE_OUTPUTS, Distillation
from mrl.algorithms.inputs import LossInputs
from mrl.algorithms.losses import Loss, ValueLossFunction
from mrl.algorithms.objective import check_token_values
from mrl.algorithms.preference import ScoreLoss
from mrl.core.metrics import logged_name
from mrl.core.types import OFFLINE, ReplicaBatch, TokenBlock
from mrl.workers.megatron_model import NONFINITE_LOSS_TOKENS, MegatronModel, MicroBatchStatistics
from mrl.workers.micro_batch import MicroBatch
from parallel import groups
from parallel.device import device
from parallel.distillation import divergence_of, linear_divergence, linear_top_k, linear_top_k_rest_logprobs
from parallel.logprobs import linear_logprobs
from parallel.megatron_layers import gather_sequence
from parallel.pipeline_schedule import LossFunction, OutputHead


@dataclass(frozen=True)
class DivergenceHead:
    """Computes the divergence of the policy from its teachers at the sampled tokens of a micro-batch."""

    distillation: Distillation
    temperature: float  # temperature of the policy's and of the teachers' distributions
    # teacher -> this rank's shard [V/tp, H_t] of the teacher's output layer; H_t: the teacher's hidden size. {} with top_k
    teacher_weights: Mapping[str, Tensor]
    vocab_size: int
    chunk_size: int  # largest number of rows of logits that exist at the same time

    def __call__(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> list[Tensor]:
        """Return the DIVERGENCE_OUTPUTS (mrl.algorithms.distillation), each [local R].

        `hidden` [local R, H]: hidden states that predict the sampled tokens. `weight` [V/tp, H]: this rank's shard of the
        policy's output layer. Without top_k, returns only `divergence`. A token for which no teacher has outputs gets 0.
        """
        return (self._top_k if self.distillation.top_k else self._whole_vocabulary)(hidden, weight, micro)

    def _whole_vocabulary(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> list[Tensor]:
        total = torch.zeros(len(hidden), device=hidden.device, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for teacher, teacher_weight in self.teacher_weights.items():
            if teacher in micro.teachers:
                index, outputs = micro.teachers[teacher].index, micro.teachers[teacher].outputs
                teacher_hidden = _as_bfloat16(outputs["hidden"])
            else:  # without tokens of this teacher, the rank must still take part in the reductions of gradients
                index, teacher_hidden = micro.predictor_index[:0], teacher_weight[:0]
            values = linear_divergence(
                _rows(hidden, index),
                weight,
                teacher_hidden.to(teacher_weight.dtype),
                teacher_weight,
                groups.tp_group(),
                self.vocab_size,
                self.distillation.divergence_settings(),
                self.temperature,
                self.chunk_size,
            )
            total = total.index_add(0, index, values)
        return [total]

    def _top_k(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> list[Tensor]:
        k, teachers = self.distillation.top_k, micro.teachers.values()
        assert k is not None, "the caller has checked it"
        index = torch.cat([micro.predictor_index[:0], *(each.index for each in teachers)])
        ids = torch.cat([index.new_empty(0, k), *(each.outputs["top_ids"].long() for each in teachers)])
        # log_t and log_s [n, k + 1]: log-probabilities under the teacher and under the policy. The last column has the
        # log-probability of all other tokens together
        log_t = torch.cat(
            [torch.empty(0, k + 1, device=hidden.device), *(each.outputs["top_logprobs"] for each in teachers)]
        )
        rows = _rows(hidden, index) if len(teachers) == 1 else hidden.index_select(0, index)
        log_s = linear_top_k_rest_logprobs(
            rows, weight, ids, groups.tp_group(), self.vocab_size, self.temperature, self.chunk_size
        )
        values = divergence_of(self.distillation.divergence_settings(), log_t, log_s)
        masses = [1 - logprobs[:, -1].detach().exp() for logprobs in (log_t, log_s)]
        return [each.new_zeros(len(hidden)).index_add(0, index, each) for each in (values, *masses)]


def _rows(hidden: Tensor, index: Tensor) -> Tensor:
    """Return the rows `index` of hidden states. `index` is ascending, so no copy is needed if it contains all rows."""
    return hidden if len(index) == len(hidden) else hidden.index_select(0, index)


def _as_bfloat16(values: Tensor) -> Tensor:
    """Return hidden states as floats. int16 hidden states are the bits of bfloat16 (see mrl.core.types.TeacherOutputs)."""
    return values.view(torch.bfloat16) if values.dtype == torch.int16 else values


def teacher_head(
    hidden: Tensor,  # [local R, H]
    weight: Tensor,  # [V/tp, H]
    top_k: int | None,
    vocab_size: int,
    temperature: float,
    chunk_size: int,
) -> Tensor:
    """Return what a teacher computes for each sampled token: [H, local R] hidden states, or [2k + 1, local R] with top_k.

    With top_k, the rows are k + 1 log-probabilities (see parallel.distillation.linear_top_k) and k token ids.
    """
    if top_k is None:
        return hidden.T
    logprobs, ids = linear_top_k(hidden, weight, groups.tp_group(), vocab_size, top_k, temperature, chunk_size)
    return torch.cat([logprobs, ids.to(logprobs.dtype)], 1).T  # float32 represents ids below 2^24 exactly


def as_teacher_outputs(output: Tensor, top_k: int | None) -> dict[str, NDArray]:
    """Convert the result [width, R] of `teacher_head`, for all R tokens, to TeacherOutputs on the host (mrl.core.types)."""
    values = output.T.contiguous().cpu()
    if top_k is None:
        return {"hidden": (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()}
    logprobs, ids = values.numpy()[:, : top_k + 1], values.numpy()[:, top_k + 1 :]
    return {"top_logprobs": np.ascontiguousarray(logprobs, np.float32), "top_ids": ids.astype(np.int32)}


class MegatronActor(MegatronModel):
    """One rank's part of a language model: of the policy, or of a frozen model, such as a teacher."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, head="vocabulary")
        self._teacher_weights: dict[str, Tensor] = {}  # teacher -> this rank's shard of its output layer, on the host

    def load_teacher_weights(self, folders: Mapping[str, str]) -> None:
        """Load this rank's shard of each teacher's output layer to the host, for distillation over the whole vocabulary.

        `folders`: teacher -> Hugging Face folder. Only ranks of the last pipeline stage load shards.
        """
        dtype = getattr(torch, self.spec.dtype)
        self._teacher_weights = {
            teacher: read_output_weight(folder, self.spec.family, groups.tp_group()).to(dtype)
            for teacher, folder in folders.items()
            if groups.is_last_stage()
        }

    def head_and_loss(
        self, loss: Loss, temperature: float = 1.0
    ) -> tuple[OutputHead, LossFunction[MicroBatchStatistics]]:
        """Return the head, which computes log-probabilities from logits / temperature, and the policy loss.

        If the block has no column old_logprobs, the policy loss uses the current log-probabilities instead. This is correct if
        the actor takes only one optimizer step on each rollout.
        """
        head = partial(self.head, temperature=temperature, entropy_gradient=loss.uses_entropy)
        if distillation := getattr(loss, "distillation", None):
            divergence = DivergenceHead(
                distillation,
                distillation.temperature or temperature,
                {teacher: weight.to(device()) for teacher, weight in self._teacher_weights.items()},
                self.vocab_size,
                self.spec.logprob_chunk,
            )
            differentiable = loss.uses_entropy or getattr(loss, "uses_logprobs", True)
            head = partial(
                self.distillation_head, temperature=temperature, divergence=divergence, differentiable=differentiable
            )
        policy = partial(policy_loss, loss=loss)
        if self.spec.mtp_loss_coef is None:
            return head, policy
        return partial(self.mtp_head, head=head), partial(with_mtp_loss, loss=policy, coef=self.spec.mtp_loss_coef)

    def compute_teacher_outputs(
        self, block: TokenBlock, batch: ReplicaBatch, temperature: float, top_k: int | None
    ) -> list[dict[str, NDArray]]:
        """Return, for the sampled tokens of each micro-batch, the outputs of this teacher that distillation needs.

        With `top_k`, these outputs are the most probable tokens under softmax(logits / temperature) and their log-probabilities.
        Without `top_k`, they are hidden states. Only the last pipeline stage returns them.
        """

        def head(
            hidden: Tensor, output_layer: torch.nn.Module, output_weight: Tensor | None, micro: MicroBatch
        ) -> Tensor:
            inputs = self._inputs_of_output_layer(hidden, output_layer, output_weight, micro)
            return teacher_head(*inputs, top_k, self.vocab_size, temperature, self.spec.logprob_chunk)

        return [as_teacher_outputs(output, top_k) for output in self.compute_outputs(block, batch, head)]

    def compute_columns(
        self, block: TokenBlock, batch: ReplicaBatch, temperature: float, names: Sequence[str]
    ) -> dict[str, list[Tensor]]:
        """Compute several columns in one forward pass. `names`: which outputs of `head` are computed.

        Returns name -> values [R] of the sampled tokens of each micro-batch. Only the last pipeline stage has them.
        """
        outputs = self.compute_outputs(block, batch, partial(self.head, temperature=temperature, names=names))
        return {name: [output[index] for output in outputs] for index, name in enumerate(names)}

    def compute_logprobs(self, block: TokenBlock, batch: ReplicaBatch, temperature: float = 1.0) -> list[Tensor]:
        """Return for each micro-batch the log-probabilities [R] of its sampled tokens. Only the last pipeline stage has them."""
        return self.compute_columns(block, batch, temperature, ["logprobs"])["logprobs"]

    def compute_reference_logprobs(
        self, block: TokenBlock, batch: ReplicaBatch, temperature: float = 1.0
    ) -> list[Tensor]:
        """Return the result of `compute_logprobs` with the weights of the reference."""
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
        inputs = self._inputs_of_output_layer(hidden, output_layer, output_weight, micro)
        outputs = self._token_outputs(*inputs, micro, temperature, names)
        if "entropies" in outputs and not entropy_gradient:
            outputs["entropies"] = outputs["entropies"].detach()
        return torch.stack(list(outputs.values()))

    def distillation_head(
        self,
        hidden: Tensor,  # [L, H]
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        micro: MicroBatch,
        temperature: float,
        divergence: DivergenceHead,
        differentiable: bool,
    ) -> Tensor:
        """Return the log-probabilities and entropies of `head`, and then the outputs of `divergence`: [3 or 5, local R].

        If `differentiable` is false, only the outputs of `divergence` have a gradient.
        """
        selected, weight = self._inputs_of_output_layer(hidden, output_layer, output_weight, micro)
        inputs = (selected, weight) if differentiable else (selected.detach(), weight.detach())
        outputs = self._token_outputs(*inputs, micro, temperature, ("logprobs", "entropies"))
        return torch.stack([*outputs.values(), *divergence(selected, weight, micro)])

    def mtp_head(
        self,
        hidden: Tensor,  # [L, H], or [L, (1 + MTP layers) * H] if the MTP layers run
        output_layer: torch.nn.Module,
        output_weight: Tensor | None,
        micro: MicroBatch,
        head: OutputHead,
    ) -> Any:
        """Return the output of `head`. If the MTP layers run, return (output of `head`, log-probabilities of all MTP targets).

        The log-probabilities have gradients with respect to the hidden states of the MTP layers only. They are
        computed from softmax(logits), without a temperature.
        """
        if not micro.mtp:
            return head(hidden, output_layer, output_weight, micro)
        own, *deeper = hidden.chunk(1 + len(micro.mtp), 1)
        weight = output_layer.get_parameter("weight") if output_weight is None else output_weight
        logprobs = []
        for states, mtp in zip(deeper, micro.mtp, strict=True):
            selected = gather_sequence(states.contiguous(), self.spec.dims.sequence_parallel).index_select(0, mtp.index)
            settings = (groups.tp_group(), self.vocab_size, 1.0, self.spec.logprob_chunk)
            logprobs.append(linear_logprobs(selected, weight.detach(), mtp.targets, *settings)[0])
        return head(own.contiguous(), output_layer, output_weight, micro), torch.cat(logprobs)

    def _token_outputs(
        self, selected: Tensor, weight: Tensor, micro: MicroBatch, temperature: float, names: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return the outputs `names` [local R] of `head` for hidden states [local R, H] and the output layer [V/tp, H]."""
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
        outputs = dict(logprobs=logprobs, entropies=entropies, sum_pi_squared=sum_pi_squared)
        return {name: outputs[name] for name in names}

    def _inputs_of_output_layer(
        self, hidden: Tensor, output_layer: torch.nn.Module, output_weight: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states [local R, H] that predict the sampled tokens, and the weight [V/tp, H] of the output layer."""
        gathered = gather_sequence(hidden, self.spec.dims.sequence_parallel)
        weight = output_layer.get_parameter("weight") if output_weight is None else output_weight
        return gathered.index_select(0, micro.predictor_index), weight


def policy_loss(output: Tensor, micro: MicroBatch, loss: Loss) -> tuple[Tensor, MicroBatchStatistics]:
    """Return the micro-batch's part of the loss, and the statistics of the micro-batch.

    `output` is the result of MegatronActor.head, or the result of MegatronActor.distillation_head, which has more rows.
    """
    logprobs, entropy, *divergences = output
    old_logprobs = micro.columns.get("old_logprobs", logprobs.detach())
    rollout_logprobs, is_offline = micro.rollout_logprobs, None
    if OFFLINE in micro.columns:
        is_offline = micro.columns[OFFLINE] > 0
        # An offline row without log-probabilities is treated as if the actor before this step had sampled it.
        rollout_logprobs = old_logprobs.where(is_offline & rollout_logprobs.isnan(), rollout_logprobs)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=micro.columns.get("advantages", torch.zeros_like(entropy)),
        entropy=entropy,
        rollout_logprobs=rollout_logprobs,
        responses=micro.responses,
        columns={
            **micro.columns,
            "rollout_logprobs": rollout_logprobs,
            **dict(zip(DIVERGENCE_OUTPUTS, divergences, strict=False)),
        },
    )
    per_token, loss_statistics = loss(inputs)
    loss_weights, nonfinite = _loss_weights(per_token, logprobs, micro)
    total = (per_token * loss_weights).sum()
    mismatch = (inputs.old_logprobs - micro.rollout_logprobs).abs()
    unknown = mismatch.isnan()  # no engine reported a log-probability of the token
    if is_offline is not None:
        unknown = unknown | is_offline
    nothing = float("-inf")
    largest_mismatch = mismatch.masked_fill(unknown, nothing).max() if len(mismatch) else mismatch.new_full((), nothing)
    sums = {
        "loss": total.detach(),
        "mismatch_abs": mismatch.masked_fill(unknown, 0.0).sum(),
        "entropy": entropy.detach().sum(),
        "tokens": torch.tensor(len(logprobs)),
        **corrections.mismatch_sums(inputs.old_logprobs, micro.rollout_logprobs, is_offline),
        "weight": loss_weights.sum(),
        NONFINITE_LOSS_TOKENS: nonfinite,
        **_weighted_sums(loss_statistics, loss_weights),
    }
    return total, MicroBatchStatistics(sums, {"mismatch_abs": largest_mismatch})


def with_mtp_loss(
    output: Any, micro: MicroBatch, loss: LossFunction[MicroBatchStatistics], coef: float
) -> tuple[Tensor, MicroBatchStatistics]:
    """Return the micro-batch's part of `loss` plus `coef` times the MTP loss, and the statistics of the micro-batch.

    The MTP loss is the mean of the losses of the MTP layers. The loss of a layer is the sum of -log P(target) over its targets,
    divided by the number of sampled tokens in the mini-batch (DeepSeek-V3, arXiv:2412.19437, equations 24 and 25; there, the
    denominator is the number of all tokens). `output` is the result of MegatronActor.mtp_head.
    """
    if not micro.mtp:
        return loss(output, micro)
    total, statistics = loss(output[0], micro)
    nll = -output[1].sum()
    sums = {"mtp_nll": nll.detach(), "mtp_tokens": torch.tensor(len(output[1]))}
    whole = total + coef * nll / (len(micro.mtp) * micro.num_sampled_in_mini_batch)
    return whole, replace(statistics, sums=statistics.sums | sums)


def _loss_weights(per_token: Tensor, outputs: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the token weight of each token [local R], and the number of broken tokens, as a scalar.

    A token is broken if its loss is not finite although the model's output for this token is finite. A broken token gets the
    weight NaN. This makes the gradient NaN, and the optimizer step raises NonFiniteGradientError. Raises ValueError if the loss
    does not depend on the outputs.
    """
    if outputs.requires_grad and not per_token.requires_grad:
        raise ValueError(
            "the loss has no gradient: it must be computed from inputs.logprobs (policy loss), values (value loss) or scores "
            "(loss of a reward model), without detach()."
        )
    broken = outputs.detach().isfinite() & ~per_token.detach().isfinite()
    return micro.weights.to(per_token.dtype).masked_fill(broken, float("nan")), broken.double().sum()


def _weighted_sums(metrics: Mapping[str, Tensor], loss_weights: Tensor) -> dict[str, Tensor]:
    """Return the weighted sums of the metrics [local R] of a loss, by the names under which they are logged."""
    return {logged_name(name): (values * loss_weights).sum() for name, values in metrics.items()}


class MegatronCritic(MegatronModel):
    """One rank's part of the critic: a decoder whose head predicts one number per token."""

    head_kind: ClassVar[HeadKind] = "value"
    grad_norm_key: ClassVar[str] = "critic/grad_norm"
    loss_key: ClassVar[str] = "critic.loss"

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, head=self.head_kind)

    def head_and_loss(
        self, loss: ValueLossFunction, temperature: float = 1.0
    ) -> tuple[OutputHead, LossFunction[MicroBatchStatistics]]:
        """Return the head and the value loss, whose target is the column `returns`. Values have no temperature."""
        return self.head, partial(value_loss, loss=loss)

    def compute_values(self, block: TokenBlock, batch: ReplicaBatch) -> list[Tensor]:
        """Return for each micro-batch the value before each sampled token: [R]. Only the last pipeline stage returns values."""
        return [output[0] for output in self.compute_outputs(block, batch, self.head)]

    def head(
        self, hidden: Tensor, output_layer: torch.nn.Module, output_weight: Tensor | None, micro: MicroBatch
    ) -> Tensor:
        """Compute the values [1, local R] from the hidden states [L, H]."""
        gathered = gather_sequence(hidden, self.spec.dims.sequence_parallel, replicated=True)
        return output_layer(gathered.index_select(0, micro.predictor_index))[None]


def value_loss(output: Tensor, micro: MicroBatch, loss: ValueLossFunction) -> tuple[Tensor, MicroBatchStatistics]:
    """Return the micro-batch's part of the loss, and the statistics of the micro-batch.

    `output` [1, local R] is the result of MegatronCritic.head. The column `values` has the old values, from the start of the
    step. Without this column, the current values are used as old values.
    """
    values, returns = output[0], micro.columns["returns"]
    result = loss(values, returns, micro.columns.get("values", values.detach()))
    per_token, _ = check_token_values((result, {}), values, "critic.loss", loss)
    loss_weights, nonfinite = _loss_weights(per_token, values, micro)
    total = (per_token * loss_weights).sum()
    sums = {"loss": total.detach(), "tokens": torch.tensor(len(values)), NONFINITE_LOSS_TOKENS: nonfinite}
    columns = {"values": values.detach(), "returns": returns, "errors": (returns - values).detach()}
    for name, column in columns.items():
        sums |= {name: column.sum(), f"{name}_squared": (column**2).sum()}
    return total, MicroBatchStatistics(sums)


class MegatronRewardModel(MegatronCritic):
    """One rank's part of a reward model: a critic whose value at the last token of a sequence is the sequence's score.

    In a block for a reward model, each row has one sampled token: the end mark, an end-of-sequence token that
    mrl.data.supervised_dataset appends to the sequence. The value of the end mark, which the model computes at the token before
    it, is the score. `export_hf` writes a sequence classification model of the library transformers.
    """

    head_kind: ClassVar[HeadKind] = "score"
    grad_norm_key: ClassVar[str] = "optim/grad_norm"
    loss_key: ClassVar[str] = "sft.objective"

    def head_and_loss(  # type: ignore[bad-override]  # it has another loss than a critic
        self, loss: ScoreLoss, temperature: float = 1.0
    ) -> tuple[OutputHead, LossFunction[MicroBatchStatistics]]:
        """Return the head and the loss of the scores. Scores have no temperature."""
        return self.head, partial(score_loss, loss=loss)

    @property
    def exported_config(self) -> HFConfig:
        return self.hf.as_reward_model()


def score_loss(output: Tensor, micro: MicroBatch, loss: ScoreLoss) -> tuple[Tensor, MicroBatchStatistics]:
    """Return the micro-batch's part of the loss, and the statistics of the micro-batch.

    `output` [1, local R] is the result of MegatronCritic.head.
    """
    scores = output[0]
    result = loss(scores, micro.responses, micro.columns)
    per_token, loss_statistics = check_token_values(result, scores, "sft.objective", loss)
    loss_weights, nonfinite = _loss_weights(per_token, scores, micro)
    total = (per_token * loss_weights).sum()
    sums = {
        "loss": total.detach(),
        "tokens": torch.tensor(len(per_token)),
        "weight": loss_weights.sum(),
        NONFINITE_LOSS_TOKENS: nonfinite,
        **_weighted_sums(loss_statistics, loss_weights),
    }
    return total, MicroBatchStatistics(sums)
