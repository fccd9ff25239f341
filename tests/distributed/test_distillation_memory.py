"""Memory of distillation over the whole vocabulary and of a loss on sampled tokens, at the sizes of a large model.

The tests count the bytes of each tensor. The tensors are on torch's device "meta": they have no values, and no product is
computed. Temporary tensors inside a kernel are not counted; test_teacher_divergence.py measures them at small sizes.
"""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from mrl.algorithms.distillation import Distillation
from mrl.planner.micro_batch_shape import MicroBatchShape
from mrl.planner.trainer_memory import TrainerSettings, head_bytes
from parallel.dims import ParallelDims

TOKENS, ITEMSIZE = 8192, 2


class Shape(NamedTuple):
    """Sizes of the output layer of Qwen3-8B."""

    vocab: int = 151_936
    hidden: int = 4096


SHAPE = Shape()


class Head(NamedTuple):
    """What the head computes in a step."""

    kind: str | None = None  # divergence; None: no distillation
    teachers: int = 0
    sampled: bool = False  # whether the loss has a term for sampled tokens
    chunk: int = 1024


SAMPLED = Head(sampled=True)


def HeldBytes():
    """Return a torch dispatch mode. Its `peak` is the largest number of bytes, at any time, of the tensors created in it."""
    import weakref

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def storages(values) -> list:
        return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, torch.Tensor)]

    class Mode(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.held = self.peak = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = {storage._cdata for storage in storages((args, kwargs))}
            result = func(*args, **(kwargs or {}))
            for storage in storages(result):
                if storage._cdata not in given:
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes())
            return result

        def _add(self, nbytes: int) -> None:
            self.held += nbytes
            self.peak = max(self.peak, self.held)

    return Mode()


def peak_bytes(rank: int, heads: list[Head]) -> list[int]:
    """Return for each head the peak of the bytes that exist during a forward and a backward pass.

    The output layer and the hidden states of the teachers are counted, but not those of the policy.
    """
    return [peak_bytes_of(head) for head in heads]


def peak_bytes_of(head: Head) -> int:
    import torch

    from mrl.workers.actor_critic import DivergenceHead
    from parallel import groups
    from parallel.logprobs import linear_logprobs

    def empty(*shape: int, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    gathered, weight = empty(TOKENS, SHAPE.hidden).requires_grad_(), empty(*SHAPE).requires_grad_()
    index, targets = empty(TOKENS, dtype=torch.int64), empty(TOKENS, dtype=torch.int64)
    with HeldBytes() as held:
        teachers = {}
        for i in range(head.teachers):  # each teaches an equal part of the tokens
            part = index[: TOKENS // head.teachers]
            teachers[f"teacher {i}"] = SimpleNamespace(index=part, outputs={"hidden": empty(len(part), SHAPE.hidden)})
        hidden = gathered.index_select(0, index)
        inputs = (hidden, weight) if head.sampled else (hidden.detach(), weight.detach())
        logprobs, *_ = linear_logprobs(
            *inputs, targets, groups.tp_group(), SHAPE.vocab, chunk_size=head.chunk, needs_entropy=True
        )
        losses = [logprobs] if head.sampled else []
        if head.kind:
            layers = {teacher: empty(*SHAPE) for teacher in teachers}
            compute = DivergenceHead(Distillation(head.kind), 1.0, layers, SHAPE.vocab, head.chunk)
            losses += compute(hidden, weight, SimpleNamespace(predictor_index=index, teachers=teachers))
        sum(loss.sum() for loss in losses).backward()
    assert weight.grad is not None and weight.grad.shape == SHAPE
    return held.peak


@pytest.mark.extended
@pytest.mark.parametrize("chunk", [256, 1024])
def test_distillation_takes_at_most_1_2_times_the_memory_of_sampled_tokens(run_ranks, chunk):
    """The pack has 8,192 tokens, the vocabulary 151,936. The teacher has the same hidden size as the policy: 4,096."""
    heads = [Head(kind, teachers=1, chunk=chunk) for kind in ("forward_kl", "reverse_kl", "js")]
    ((*found, sampled),) = run_ranks(ParallelDims(), peak_bytes, [*heads, SAMPLED._replace(chunk=chunk)])
    layer = SHAPE.vocab * SHAPE.hidden * ITEMSIZE
    assert min(found) > 2 * layer, (
        "the output layer of the teacher, and the gradient of that of the policy, are counted"
    )
    assert sampled > 3 * layer, "the sum of the weight's gradients in float32, and its first part, are counted"
    assert max(found) <= 1.2 * sampled, (found, sampled)


@pytest.mark.parametrize("chunk", [256, 1024])
@pytest.mark.extended
def test_the_planned_bytes_of_the_head_are_those_of_its_tensors(run_ranks, chunk):
    kinds = [SAMPLED, *(Head("js", teachers, sampled) for teachers in (1, 2) for sampled in (False, True))]
    heads = [head._replace(chunk=chunk) for head in kinds]
    (peaks,) = run_ranks(ParallelDims(), peak_bytes, heads)
    batch = MicroBatchShape.of(ParallelDims(), TOKENS, ITEMSIZE)
    for head, found in zip(heads, peaks, strict=True):
        teachers = (SHAPE.hidden,) * head.teachers
        settings = TrainerSettings(
            logprob_chunk=head.chunk, teacher_hidden=teachers, has_sampled_token_gradient=head.sampled
        )
        planned = head_bytes(SHAPE, batch, settings, gradients=True)
        assert 0.95 * found <= planned <= 1.15 * found, (head, found, planned)
