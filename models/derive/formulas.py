"""Formulas of the blocks of a decoder in plain torch. A probe compares each formula with the recorded output of a block.

In the shapes of this package, T is the number of tokens, H is the hidden size, A is the number of heads, G is the number of
key/value groups, D is the size of a head, R is the number of rotated components of a head, E is the number of experts, F is the
intermediate size of an MLP, and V is the size of the vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.rope import QueryScaling

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
"""Name of an activation, as in the field `hidden_act` of transformers -> function."""


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference, divided by the largest absolute value of `expected`; infinity if shapes differ."""
    if found.shape != expected.shape:
        return math.inf
    scale = expected.abs().max().item() or 1.0
    result = (found - expected).abs().max().item() / scale
    return result if math.isfinite(result) else math.inf


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """Return the RMSNorm over the last dim. With `plus_one`, it multiplies by 1 + weight instead of weight."""
    scale = weight + 1.0 if plus_one else weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


@dataclass(frozen=True)
class AttentionOptions:
    """How attention differs from softmax(q k / sqrt(D)) v."""

    rope: str = "half"  # half: pairs (i, i + R/2); interleaved: pairs (2i, 2i + 1); none
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(D)
    window: int | None = None  # number of tokens to which a token attends, itself included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    scaling: QueryScaling | None = None  # factors of the queries; None: 1
    norm: str = "none"  # norm of queries and keys: none, before (the rotary embedding), after, whole (over all heads)
    plus_one: bool = False  # whether these norms multiply by 1 + weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotate the first R components of each head. x: [T, heads, D]; cos, sin: [T, R], each with two equal halves.

    `style`: see AttentionOptions.rope.
    """
    if style == "none":
        return x
    size = cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    half = size // 2
    c, s = cos[:, None, :half], sin[:, None, :half]
    if style == "half":
        a, b = rotated[..., :half], rotated[..., half:]
        return torch.cat([a * c - b * s, b * c + a * s, rest], -1)
    a, b = rotated[..., 0::2], rotated[..., 1::2]
    pairs = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    return torch.cat([pairs, rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, sinks: Tensor | None = None) -> Tensor:
    """Return the output [T, A * D of values] of causal attention. q: [T, A, D], k: [T, G, D], v: [T, G, D of values].

    `sinks` [A]: logits that are only in the denominators of the softmax.
    """
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = torch.einsum("tad,sad->ats", q, k) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    hidden = distance < 0
    if options.window is not None:
        hidden = hidden | (distance >= options.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("ats,sad->tad", weights, v).flatten(1)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Return the output of a gated MLP without biases: down(activation(gate x) * up x)."""
    return (ACTIVATIONS[activation](x @ gate.T) * (x @ up.T)) @ down.T


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts and computes their weights."""

    score: str  # softmax or sigmoid
    normalized: bool  # whether the weights of the chosen experts sum to 1
    scale: float = 1.0  # factor of the weights
    groups: int = 1  # number of groups of experts; 1: any expert can be chosen
    chosen_groups: int = 1  # number of groups that the router chooses first; only their experts can be chosen


def route(logits: Tensor, topk: int, routing: Routing, bias: Tensor | None = None) -> Tensor:
    """Return the weights [T, E] of the experts, 0 for experts that are not chosen.

    logits: [T, E]; bias: [E], which changes the choice of the experts, but not their weights.
    """
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(2, -1)[0].sum(-1).topk(routing.chosen_groups, -1)[1]
        is_chosen = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~is_chosen[..., None], -torch.inf).flatten(-2)
    index = choice.topk(topk, -1)[1]
    weights = scores.gather(-1, index)
    if routing.normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter(-1, index, weights * routing.scale)
