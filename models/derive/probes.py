"""Probes: each finds which tensors of a block play which part, by comparing a formula with the recorded output of the block.

A probe tries all assignments of tensors whose shapes fit, and all known variants of the formula, from plain to special. The first
assignment whose output differs by at most LIMIT from the recorded output is the result.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor

from models.derive.formulas import (
    ACTIVATIONS,
    AttentionOptions,
    Routing,
    attend,
    difference,
    gated_mlp,
    rms_norm,
    rotate,
    route,
)
from models.derive.tiny_model import Call

LIMIT = 2e-5  # largest difference, divided by the largest output
Rotary = list[tuple[Tensor, Tensor]]  # (cosines, sines), [T, rotated components] each


@dataclass(frozen=True)
class Match:
    """Tensors of a block by their part in the formula, the variant of the formula, and the evidence."""

    kind: str  # attention, latent_attention, mlp, moe or norm
    slots: dict[str, str]  # part in the formula, such as "q" -> name of the tensor in the checkpoint, without the layer
    options: dict[str, Any] = field(default_factory=dict)  # differences from the plain formula
    error: float = 0.0  # largest difference of the outputs, divided by the largest output


def eps_of(fields: Mapping[str, Any]) -> list[float]:
    """Return the epsilons that a norm may have: the values of fields such as rms_norm_eps, and transformers' constants."""
    own = [value for name, value in fields.items() if "eps" in name and isinstance(value, float)]
    return list(dict.fromkeys([*own, 1e-6, 1e-5]))


def match_norm(weight: Tensor, call: Call, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the variant of a norm, {"eps": ..., "plus_one": ...}, or None if the module is no RMSNorm."""
    for plus_one, eps in product((False, True), eps_of(fields)):
        error = difference(rms_norm(call.x, weight, eps, plus_one), call.y)
        if error <= LIMIT:
            return dict(eps=eps, plus_one=plus_one, error=error)
    return None


def _matrices(tensors: Mapping[str, Tensor], rows: int | None = None, columns: int | None = None) -> list[str]:
    return [
        name
        for name, t in tensors.items()
        if t.dim() == 2 and rows in (None, t.shape[0]) and columns in (None, t.shape[1])
    ]


def _bias(tensors: Mapping[str, Tensor], name: str) -> Tensor | float:
    return tensors.get(_bias_name(name), 0.0)


def _bias_name(name: str) -> str:
    return name.removesuffix("weight") + "bias"


def _bias_slots(tensors: Mapping[str, Tensor], slots: Mapping[str, str]) -> dict[str, str]:
    """Return the slots of the biases of the matrices in `slots`, such as q_bias."""
    found = {f"{slot}_bias": _bias_name(name) for slot, name in slots.items() if name.endswith("weight")}
    return {slot: name for slot, name in found.items() if name in tensors}


def _attention_options(fields: Mapping[str, Any], norm: str, has_rope: bool) -> Iterator[AttentionOptions]:
    windows = [None, *([fields["sliding_window"]] if isinstance(fields.get("sliding_window"), int) else [])]
    caps = [None, *([cap] if (cap := fields.get("attn_logit_softcapping")) else [])]
    scales: list[float | None] = [None]
    if scalar := fields.get("query_pre_attn_scalar"):
        scales.append(scalar**-0.5)
    if multiplier := fields.get("attention_multiplier"):
        scales.append(multiplier)
    norms = ["none"] if norm == "none" else ([norm] if norm == "whole" else ["before", "after"])
    ropes = ("half", "interleaved", "none") if has_rope else ("none",)
    for plus_one, window, cap, scale, order, rope in product(
        (False, True) if norm != "none" else (False,), windows, caps, scales, norms, ropes
    ):
        yield AttentionOptions(rope, scale, window, cap, order, plus_one)


def match_attention(
    tensors: Mapping[str, Tensor], call: Call, fields: Mapping[str, Any], heads: int, rotary: Rotary
) -> Match | None:
    """Find queries, keys, values and output of grouped-query attention, their biases and norms, sinks, and the rotary style."""
    hidden = call.x.shape[-1]
    matrices = _matrices(tensors)
    if len(matrices) != 4:
        return None
    for out, q, k, v in permutations(matrices):
        shapes = [tensors[name].shape for name in (out, q, k, v)]
        fits = shapes[0] == (hidden, shapes[1][0]) and shapes[1][1] == shapes[2][1] == hidden and shapes[2] == shapes[3]
        if not fits or shapes[1][0] % heads or shapes[2][0] % (shapes[1][0] // heads):
            continue
        slots = dict(q=q, k=k, v=v, o=out)
        if match := _match_attention_slots(tensors, call, fields, heads, rotary, slots):
            return match
    return None


def _match_attention_slots(tensors, call, fields, heads, rotary, slots) -> Match | None:
    size = tensors[slots["q"]].shape[0] // heads
    biases = _bias_slots(tensors, slots)
    extra = [name for name in tensors if name not in (*slots.values(), *biases.values())]
    for norms, sinks in _norms_and_sinks(tensors, extra, slots, size, heads):
        kind = "none" if not norms else ("head" if tensors[norms["q_norm"]].shape[0] == size else "whole")
        for options in _attention_options(fields, kind, bool(rotary)):
            epsilons = eps_of(fields) if norms else [0.0]
            for cos_sin, eps in product(rotary if options.rope != "none" else [None], epsilons):
                found = _attention(tensors, slots | norms, call.x, size, options, cos_sin, eps, sinks)
                error = difference(found, call.y)
                if error <= LIMIT:
                    all_slots = slots | biases | norms | ({"sinks": sinks} if sinks else {})
                    rotated = cos_sin[0].shape[-1] if cos_sin is not None else 0
                    return Match("attention", all_slots, dict(attention=options, rotated=rotated, head_dim=size), error)
    return None


def _norms_and_sinks(tensors, extra, slots, size, heads) -> Iterator[tuple[dict[str, str], str | None]]:
    """Yield the ways to use the vectors that are neither matrices nor their biases: two norms, and one sink for each head."""
    sinks = [name for name in extra if tensors[name].shape == (heads,) and heads != size]
    rest = [name for name in extra if name not in sinks]
    sink = sinks[0] if len(sinks) == 1 else None
    if not rest and len(sinks) <= 1:
        yield {}, sink
    if len(rest) == 2 and all(tensors[name].dim() == 1 for name in rest):
        widths = (tensors[slots["q"]].shape[0], tensors[slots["k"]].shape[0])
        for q_norm, k_norm in permutations(rest):
            if (tensors[q_norm].shape[0], tensors[k_norm].shape[0]) in ((size, size), widths):
                yield dict(q_norm=q_norm, k_norm=k_norm), sink


def _attention(tensors, slots, x, size, options, cos_sin, eps, sinks) -> Tensor:  # noqa: PLR0913
    def project(slot: str) -> Tensor:
        states = x @ tensors[slots[slot]].T + _bias(tensors, slots[slot])
        norm = slots.get(f"{slot}_norm")
        if norm and options.norm == "whole":
            states = rms_norm(states, tensors[norm], eps, options.plus_one)
        states = states.unflatten(-1, (-1, size))
        if norm and options.norm == "before":
            states = rms_norm(states, tensors[norm], eps, options.plus_one)
        if slot != "v" and cos_sin is not None:
            states = rotate(states, *cos_sin, options.rope)
        return rms_norm(states, tensors[norm], eps, options.plus_one) if norm and options.norm == "after" else states

    mixed = attend(project("q"), project("k"), project("v"), options, tensors[sinks] if sinks else None)
    return mixed @ tensors[slots["o"]].T + _bias(tensors, slots["o"])


def match_latent_attention(
    tensors: Mapping[str, Tensor], call: Call, fields: Mapping[str, Any], heads: int, rotary: Rotary
) -> Match | None:
    """Find the matrices of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    if fields.get("kv_lora_rank") is None or not rotary:
        return None
    hidden, kv_lora, q_lora = call.x.shape[-1], fields["kv_lora_rank"], fields.get("q_lora_rank")
    nope, rope, value = (fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_size = heads * (nope + rope)
    shapes = dict(kv_a=(kv_lora + rope, hidden), kv_norm=(kv_lora,), kv_b=(heads * (nope + value), kv_lora))
    shapes |= dict(o=(hidden, heads * value))
    shapes |= dict(q_a=(q_lora, hidden), q_norm=(q_lora,), q_b=(q_size, q_lora)) if q_lora else dict(q=(q_size, hidden))
    slots = {}
    for slot, shape in shapes.items():
        names = [name for name, t in tensors.items() if tuple(t.shape) == shape]
        if len(names) != 1:
            return None
        slots[slot] = names[0]
    if len(slots) != len(tensors):
        return None
    scales: list[float | None] = [None, *_yarn_scales(fields, nope + rope)]
    for style, scale, eps, (cos, sin) in product(("half", "interleaved"), scales, eps_of(fields), rotary):
        options = AttentionOptions(style, scale)
        found = _latent_attention(
            {s: tensors[n] for s, n in slots.items()}, call.x, heads, options, (cos, sin), eps, nope
        )
        error = difference(found, call.y)
        if error <= LIMIT:
            return Match("latent_attention", slots, dict(attention=options, rotated=rope, eps=eps), error)
    return None


def _yarn_scales(fields: Mapping[str, Any], size: int) -> list[float]:
    """Return the factor of the scores that DeepSeek uses with YaRN: mscale**2 / sqrt(size)."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    factor, weight = parameters.get("factor"), parameters.get("mscale_all_dim")
    if not factor or factor <= 1 or not weight:
        return []
    return [(0.1 * weight * math.log(factor) + 1.0) ** 2 * size**-0.5]


def _latent_attention(parts, x, heads, options, cos_sin, eps, nope) -> Tensor:
    queries = x @ parts["q"].T if "q" in parts else rms_norm(x @ parts["q_a"].T, parts["q_norm"], eps) @ parts["q_b"].T
    queries = queries.unflatten(-1, (heads, -1))
    rank = parts["kv_norm"].shape[0]
    latent, shared = (x @ parts["kv_a"].T).tensor_split([rank], -1)
    both = (rms_norm(latent, parts["kv_norm"], eps) @ parts["kv_b"].T).unflatten(-1, (heads, -1))
    shared = rotate(shared[:, None], *cos_sin, options.rope).expand(-1, heads, -1)
    q = torch.cat([queries[..., :nope], rotate(queries[..., nope:], *cos_sin, options.rope)], -1)
    k = torch.cat([both[..., :nope], shared], -1)
    return attend(q, k, both[..., nope:], options) @ parts["o"].T


def match_mlp(tensors: Mapping[str, Tensor], call: Call) -> Match | None:
    """Find gate, up and down of a gated MLP and its activation, or the two matrices of a plain MLP (slots up and down)."""
    hidden = call.x.shape[-1]
    matrices = _matrices(tensors)
    for names in permutations(matrices):
        if len(names) not in (2, 3):
            return None
        slots = dict(zip(("gate", "up", "down") if len(names) == 3 else ("up", "down"), names, strict=True))
        shape = tensors[slots["up"]].shape
        if tensors[slots["down"]].shape != shape[::-1] or shape[1] != hidden:
            continue
        if "gate" in slots and tensors[slots["gate"]].shape != shape:
            continue
        for name, activation in ACTIVATIONS.items():
            inner = call.x @ tensors[slots["up"]].T + _bias(tensors, slots["up"])
            if "gate" in slots:
                inner = inner * activation(call.x @ tensors[slots["gate"]].T + _bias(tensors, slots["gate"]))
            else:
                inner = activation(inner)
            error = difference(inner @ tensors[slots["down"]].T + _bias(tensors, slots["down"]), call.y)
            if error <= LIMIT:
                return Match("mlp", slots | _bias_slots(tensors, slots), dict(activation=name), error)
    return None


def match_moe(tensors: Mapping[str, Tensor], call: Call, fields: Mapping[str, Any], experts: int) -> Match | None:
    """Find the router, the matrices of the experts ({expert} in their names), the shared experts, and the routing."""
    hidden = call.x.shape[-1]
    of_expert = {re.sub(r"(?<=experts\.)0\.", "{expert}.", name) for name in tensors if "experts.0." in name}
    others = {name: t for name, t in tensors.items() if "experts." not in name.replace("shared_experts.", "")}
    routers = [name for name, t in others.items() if tuple(t.shape) == (experts, hidden)]
    biases = [name for name, t in others.items() if tuple(t.shape) == (experts,)]
    shared = {name: t for name, t in others.items() if name not in (*routers, *biases)}
    if len(of_expert) != 3 or len(routers) != 1 or len(biases) > 1:
        return None
    logits = call.x @ tensors[routers[0]].T
    bias = tensors[biases[0]] if biases else None
    routings = [(r, route(logits, fields["num_experts_per_tok"], r, bias)) for r in _routings(fields, experts)]
    for names in permutations(sorted(of_expert)):
        outputs = _expert_outputs(tensors, names, call.x, experts)
        if outputs is None:
            continue
        for shared_slots, addend in _shared_outputs(shared, call.x):
            for routing, weights in routings:
                error = difference(torch.einsum("te,eth->th", weights, outputs) + addend, call.y)
                if error <= LIMIT:
                    slots = dict(router=routers[0]) | dict(zip(("gate", "up", "down"), names, strict=True))
                    slots |= ({"correction": biases[0]} if biases else {}) | shared_slots
                    return Match("moe", slots, dict(activation="silu", routing=routing), error)
    return None


def _routings(fields: Mapping[str, Any], experts: int) -> Iterator[Routing]:
    groups, chosen = fields.get("n_group") or 1, fields.get("topk_group") or 1
    factors = list(dict.fromkeys([1.0, *([f] if (f := fields.get("routed_scaling_factor")) else [])]))
    for score, normalized, factor in product(("softmax", "sigmoid"), (True, False), factors):
        plain = Routing(score, normalized, factor)
        yield plain
        if groups > 1 and experts % groups == 0:
            yield replace(plain, groups=groups, chosen_groups=chosen)


def _expert_outputs(tensors, names, x, experts) -> Tensor | None:
    """Return the outputs [E, T, H] of all experts if the shapes of gate, up and down fit; otherwise None."""
    gate, up, down = ([tensors[name.replace("{expert}", str(e))] for e in range(experts)] for name in names)
    if gate[0].shape != up[0].shape or down[0].shape != up[0].shape[::-1] or up[0].shape[1] != x.shape[-1]:
        return None
    return torch.stack([gated_mlp(x, g, u, d, "silu") for g, u, d in zip(gate, up, down, strict=True)])


def _shared_outputs(shared: Mapping[str, Tensor], x: Tensor) -> Iterator[tuple[dict[str, str], Tensor]]:
    """Yield the possible slots of the shared experts, with their output [T, H]."""
    if not shared:
        yield {}, torch.zeros(())
    if len(shared) != 3:
        return
    for names in permutations(shared):
        gate, up, down = (shared[name] for name in names)
        if gate.shape == up.shape == down.shape[::-1] and up.shape[1] == x.shape[-1]:
            slots = dict(zip(("shared_gate", "shared_up", "shared_down"), names, strict=True))
            yield slots, gated_mlp(x, gate, up, down, "silu")
