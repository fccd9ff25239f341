"""Probe of gated delta nets, the recurrent layers of Qwen3.5 (Yang et al. 2024, arXiv:2412.06464, equation 10).

In the shapes of this module, T is the number of tokens, H is the hidden size, N is the number of value heads, K and V are the
numbers of components of the keys and of the values of all heads, and C is the number of tokens that the convolution reads.
"""

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.derive.formulas import difference, rms_norm
from models.derive.probes import LIMIT, Match, eps_of
from models.derive.tiny_model import Call

_NORM_EPSILON = 1e-6  # added to the squared lengths of queries and keys


def match_gated_delta_net(tensors: Mapping[str, Tensor], call: Call, fields: Mapping[str, Any]) -> Match | None:
    """Find the matrices, the convolution, the decay and the norm of a gated delta net."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    if any(not fields.get(name) for name in names):
        return None
    key_heads, value_heads, key_dim, value_dim = (fields[name] for name in names)
    hidden, keys, values = call.x.shape[-1], key_heads * key_dim, value_heads * value_dim
    shapes = dict(qkv=(2 * keys + values, hidden), z=(values, hidden), out=(hidden, values), norm=(value_dim,))
    shapes |= dict(conv=(2 * keys + values, 1, fields["linear_conv_kernel_dim"]))
    slots: dict[str, str] = {}
    for slot, shape in shapes.items():
        found = [name for name, tensor in tensors.items() if tuple(tensor.shape) == shape]
        if len(found) != 1:
            return None
        slots[slot] = found[0]
    of_heads = [
        [name for name, tensor in tensors.items() if tuple(tensor.shape) == shape]
        for shape in ((value_heads, hidden), (value_heads,))
    ]
    if [len(found) for found in of_heads] != [2, 2] or len(tensors) != len(slots) + 4:
        return None
    for beta, alpha in permutations(of_heads[0]):
        for bias, decay in permutations(of_heads[1]):
            whole = slots | dict(beta=beta, alpha=alpha, dt_bias=bias, A_log=decay)
            parts = {slot: tensors[name] for slot, name in whole.items()}
            for eps in eps_of(fields):
                error = difference(_gated_delta_net(parts, call.x, key_heads, value_heads, eps), call.y)
                if error <= LIMIT:
                    return Match("recurrent", whole, dict(eps=eps), error)
    return None


def _gated_delta_net(parts: Mapping[str, Tensor], x: Tensor, key_heads: int, value_heads: int, eps: float) -> Tensor:
    """Return the output [T, H] of a gated delta net for x [T, H]. The shapes of `parts` are in match_gated_delta_net."""
    kernel = parts["conv"]  # [2 K + V, 1, C]
    mixed = F.pad((x @ parts["qkv"].T).T, (kernel.shape[-1] - 1, 0))
    mixed = F.silu(F.conv1d(mixed[None], kernel, groups=len(kernel))[0].T)  # [T, 2 K + V]
    values = parts["z"].shape[0]
    keys = (mixed.shape[1] - values) // 2
    q, k, v = mixed.split([keys, keys, values], 1)
    repeats = value_heads // key_heads
    q, k = (_unit(part.unflatten(1, (key_heads, -1))).repeat_interleave(repeats, 1) for part in (q, k))
    v = v.unflatten(1, (value_heads, -1))
    beta = (x @ parts["beta"].T).sigmoid()  # [T, N]
    decay = (-parts["A_log"].exp() * F.softplus(x @ parts["alpha"].T + parts["dt_bias"])).exp()  # [T, N]
    state = x.new_zeros(value_heads, q.shape[-1], v.shape[-1])
    outputs = []
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        correction = (v[t] - torch.einsum("nk,nkv->nv", k[t], state)) * beta[t][:, None]
        state = state + torch.einsum("nk,nv->nkv", k[t], correction)
        outputs.append(torch.einsum("nk,nkv->nv", q[t], state) * q.shape[-1] ** -0.5)
    normed = rms_norm(torch.stack(outputs), parts["norm"], eps)
    gate = F.silu(x @ parts["z"].T).unflatten(1, (value_heads, -1))
    return (normed * gate).flatten(1) @ parts["out"].T


def _unit(x: Tensor) -> Tensor:
    """Divide vectors by their length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPSILON)
