"""Computations for distillation on a trainer rank: outputs of a teacher, and the divergence of the policy from its teachers.

mrl.core.types explains the letters of array dimensions, such as B and R. MicroBatch (mrl.workers.micro_batch) explains
`local R`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrl.algorithms.distillation import Distillation
from mrl.workers.micro_batch import MicroBatch
from parallel import groups
from parallel.distillation import divergence_of, linear_divergence, linear_top_k, linear_top_k_rest_logprobs


@dataclass(frozen=True)
class DivergenceHead:
    """Computes the divergence of the policy from its teachers at the sampled tokens of a micro-batch."""

    distillation: Distillation
    temperature: float  # temperature of the policy's and of the teachers' distributions
    # teacher -> this rank's shard [V/tp, H_t] of the teacher's output layer; H_t: the teacher's hidden size. Empty with top_k
    teacher_weights: Mapping[str, Tensor]
    vocab_size: int
    chunk_size: int  # largest number of rows of logits that exist at the same time

    def __call__(self, hidden: Tensor, weight: Tensor, micro: MicroBatch) -> list[Tensor]:
        """Return the DIVERGENCE_OUTPUTS (mrl.algorithms.distillation), each [local R].

        `hidden` [local R, H]: hidden states that predict the sampled tokens. `weight` [V/tp, H]: this rank's shard of the
        policy's output layer. Without top_k, returns only the first of the outputs. A token that no teacher teaches gets 0.
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
                self.distillation.formula(),
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
        log_t = torch.cat(
            [torch.empty(0, k + 1, device=hidden.device), *(each.outputs["top_logprobs"] for each in teachers)]
        )
        rows = _rows(hidden, index) if len(teachers) == 1 else hidden.index_select(0, index)
        log_s = linear_top_k_rest_logprobs(
            rows, weight, ids, groups.tp_group(), self.vocab_size, self.temperature, self.chunk_size
        )
        values = divergence_of(self.distillation.formula(), log_t, log_s)
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
