"""Functions that call the divergences of verl and trl. They run in the process that `peer_functions.install` prepares.

Hidden states and output layers are arrays with the shapes of parallel.distillation. T is the number of positions, and V the
number of tokens in the vocabulary.
"""

from types import SimpleNamespace
from typing import NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor


class Models(NamedTuple):
    """Inputs and weights of the output layers of a policy and of its teacher."""

    hidden: NDArray  # [T, H]
    weight: NDArray  # [V, H]
    teacher_hidden: NDArray  # [T, H_t]
    teacher_weight: NDArray  # [V, H_t]


class Found(NamedTuple):
    """Divergences, and the gradients of their weighted sum. The weight of position i is `slopes[i]`."""

    values: NDArray  # [T]
    d_hidden: NDArray  # [T, H]
    d_weight: NDArray  # [V, H]


def tensors(models: Models, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arrays as tensors; those of the policy require a gradient."""
    hidden, weight, *teacher = (torch.tensor(array, dtype=dtype) for array in models)
    return hidden.requires_grad_(), weight.requires_grad_(), *teacher


def found(values: Tensor, slopes: NDArray, hidden: Tensor, weight: Tensor) -> Found:
    """Return the values, and the gradients of their weighted sum."""
    (values * torch.tensor(slopes, dtype=values.dtype)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return Found(*(tensor.detach().double().numpy() for tensor in (values, hidden.grad, weight.grad)))


def events(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities [T, k + 1] of the tokens `ids` [T, k] and of the event "any other token"."""
    logprobs = logits.log_softmax(-1)
    others = logprobs.scatter(1, ids, float("-inf")).logsumexp(1, keepdim=True)
    return torch.cat([logprobs.gather(1, ids), others], 1)


def trl_divergence(
    models: Models, slopes: NDArray, beta: float, temperature: float, ids: NDArray | None = None
) -> Found:
    """Return what trl's GKDTrainer computes in float64: for all tokens, or with `ids` [T, k] for the k + 1 events of `events`."""
    from trl.experimental.gkd import GKDTrainer

    hidden, weight, teacher_hidden, teacher_weight = tensors(models)
    logits, settings = (hidden @ weight.T, teacher_hidden @ teacher_weight.T), {"temperature": temperature}
    if ids is not None:
        logits, settings = tuple(events(each / temperature, torch.tensor(ids)) for each in logits), {}
    terms = GKDTrainer.generalized_jsd_loss(*logits, beta=beta, reduction="none", **settings)
    return found(terms.sum(-1), slopes, hidden, weight)


def trl_chunked_divergence(models: Models, slopes: NDArray, beta: float, temperature: float) -> Found:
    """Return what trl's DistillationTrainer computes from hidden states. trl computes in float32."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    hidden, weight, teacher_hidden, teacher_weight = tensors(models, torch.float32)
    inputs = hidden, weight, None, teacher_hidden, teacher_weight, None
    values, _ = ChunkedDivergenceFunction.apply(*inputs, beta, temperature)
    return found(values, slopes, hidden, weight)


def verl_forward_kl_topk(
    models: Models, slopes: NDArray, ids: NDArray, clamp: float | None = None
) -> tuple[Found, NDArray, NDArray]:
    """Return verl's divergences of the tokens `ids` [T, k], and the probabilities [T] that teacher and policy give to them.

    verl computes the divergences in float32. `clamp`: least log-probability (`log_prob_min_clamp`).
    """
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

    hidden, weight, teacher_hidden, teacher_weight = tensors(models)
    chosen = torch.tensor(ids)
    log_t = (teacher_hidden @ teacher_weight.T).log_softmax(-1).gather(1, chosen)
    nested = (torch.nested.as_nested_tensor([each], layout=torch.jagged) for each in (log_t, chosen))
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp, use_chunked_topk=False))
    result = compute_forward_kl_topk((hidden @ weight.T)[None], *nested, config, "thd")
    masses = (result[name][0].detach().numpy() for name in ("teacher_mass", "student_mass"))
    return found(result["distillation_losses"][0], slopes, hidden, weight), *masses
