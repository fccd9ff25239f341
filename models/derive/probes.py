"""Probes. A probe finds which tensor of a block has which slot in a formula, such as "q" in the formula of attention.

A probe compares the formula with the recorded output of the block. It tries all assignments of tensors whose shapes fit, and all
known variants of the formula, from plain to special. The result is the first assignment and variant whose output differs by at
most LIMIT from the recorded output. models.derive.formulas explains the letters in shapes.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
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
from parallel.rope import QueryScaling

LIMIT = 2e-5  # largest difference, divided by the largest output
Rotary = list[tuple[Tensor, Tensor]]  # (cosines, sines), [T, rotated components] each


@dataclass(frozen=True)
class Match:
    """Tensors of a block by their slots in the formula, the variant of the formula, and the evidence."""

    kind: str  # attention, latent_attention, mlp or moe
    # slot -> name of the tensor in the checkpoint. models.derive.structure replaces the index of the layer by {layer}.
    slots: dict[str, str]
    # variant of the formula, with the keys attention (AttentionOptions), rotated (number of rotated components of a head),
    # head_dim, eps, activation and routing (Routing)
    options: dict[str, Any] = field(default_factory=dict)
    error: float = 0.0  # largest difference of the outputs, divided by the largest output


def eps_of(fields: Mapping[str, Any]) -> list[float]:
    """Return the epsilons that a norm may have: values of fields such as rms_norm_eps, and usual constants in transformers."""
    own = [value for name, value in fields.items() if "eps" in name and isinstance(value, float)]
    return list(dict.fromkeys([*own, 1e-6, 1e-5]))


def match_norm(weight: Tensor, call: Call, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the variant of a norm and its evidence, {"eps": ..., "plus_one": ..., "error": ...}; None: it is no RMSNorm."""
    for plus_one, eps in product((False, True), eps_of(fields)):
        error = difference(rms_norm(call.x, weight, eps, plus_one), call.y)
        if error <= LIMIT:
            return dict(eps=eps, plus_one=plus_one, error=error)
    return None


def _matrices(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.dim() == 2]


def _bias(tensors: Mapping[str, Tensor], name: str) -> Tensor | float:
    return tensors.get(_bias_name(name), 0.0)


def _bias_name(name: str) -> str:
    return name.removesuffix("weight") + "bias"


def _bias_slots(tensors: Mapping[str, Tensor], slots: Mapping[str, str]) -> dict[str, str]:
    """Return the slots of the biases of the matrices in `slots`, such as q_bias."""
    found = {f"{slot}_bias": _bias_name(name) for slot, name in slots.items() if name.endswith("weight")}
    return {slot: name for slot, name in found.items() if name in tensors}


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
        probe = _AttentionProbe(tensors, call, fields, heads, rotary, dict(q=q, k=k, v=v, o=out))
        if match := probe.run():
            return match
    return None


@dataclass(frozen=True)
class _AttentionProbe:
    """Grouped-query attention with a given assignment of the four matrices."""

    tensors: Mapping[str, Tensor]
    call: Call
    fields: Mapping[str, Any]
    heads: int
    rotary: Rotary
    slots: dict[str, str]

    @property
    def size(self) -> int:
        """Size of a head."""
        return self.tensors[self.slots["q"]].shape[0] // self.heads

    def run(self) -> Match | None:
        """Return the first variant that gives the recorded output."""
        for norms, sinks in self._norms_and_sinks():
            per_head = norms and self.tensors[norms["q_norm"]].shape[0] == self.size
            orders = ("before", "after") if per_head else (("whole",) if norms else ("none",))
            for options in self._options(orders):
                rotary = self.rotary if options.rope != "none" else [None]
                for cos_sin, eps in product(rotary, eps_of(self.fields) if norms else [0.0]):
                    error = difference(self._output(norms, sinks, options, cos_sin, eps), self.call.y)
                    if error <= LIMIT:
                        rotated = cos_sin[0].shape[-1] if cos_sin is not None else 0
                        found = dict(attention=options, rotated=rotated, head_dim=self.size)
                        kind = "projection_norm" if options.norm == "whole" else "norm"
                        slots = self.slots | _bias_slots(self.tensors, self.slots)
                        slots |= {slot.replace("norm", kind): name for slot, name in norms.items()}
                        return Match("attention", slots | ({"sinks": sinks} if sinks else {}), found, error)
        return None

    def _options(self, orders: Sequence[str]) -> Iterator[AttentionOptions]:
        window, cap = self.fields.get("sliding_window"), self.fields.get("attn_logit_softcapping")
        scales: list[float | None] = [None]
        if scalar := self.fields.get("query_pre_attn_scalar"):
            scales.append(scalar**-0.5)
        if factor := self.fields.get("attention_multiplier"):
            scales.append(factor)
        scaling = query_scaling(self.fields)
        for plus_one, w, c, scale, query, order, rope in product(
            (False,) if orders == ("none",) else (False, True),
            [None, window] if isinstance(window, int) else [None],
            [None, cap] if cap else [None],
            scales,
            [None, scaling] if scaling else [None],
            orders,
            ("half", "interleaved", "none") if self.rotary else ("none",),
        ):
            yield AttentionOptions(rope, scale, w, c, query, order, plus_one)

    def _norms_and_sinks(self) -> Iterator[tuple[dict[str, str], str | None]]:
        """Yield each assignment of the vectors that are not biases of matrices: (slots of the two norms, name of the sinks)."""
        used = {*self.slots.values(), *_bias_slots(self.tensors, self.slots).values()}
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items() if name not in used}
        sinks = [name for name, shape in shapes.items() if shape == (self.heads,) != (self.size,)]
        rest = [name for name in shapes if name not in sinks]
        sink = sinks[0] if len(sinks) == 1 else None
        if not rest and len(sinks) <= 1:
            yield {}, sink
        widths = [tuple(self.tensors[self.slots[slot]].shape[:1]) for slot in "qk"]
        for q_norm, k_norm in permutations(rest) if len(rest) == 2 else ():
            if [shapes[q_norm], shapes[k_norm]] in ([(self.size,)] * 2, widths):
                yield dict(q_norm=q_norm, k_norm=k_norm), sink

    def _output(
        self,
        norms: Mapping[str, str],
        sinks: str | None,
        options: AttentionOptions,
        cos_sin: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor:
        def normalize(states: Tensor, slot: str, place: str) -> Tensor:
            name = norms.get(f"{slot}_norm")
            if name is None or options.norm != place:
                return states
            return rms_norm(states, self.tensors[name], eps, options.plus_one)

        def project(slot: str) -> Tensor:
            states = normalize(self._linear(slot, self.call.x), slot, "whole")
            states = normalize(states.unflatten(-1, (-1, self.size)), slot, "before")
            if slot != "v" and cos_sin is not None:
                states = rotate(states, *cos_sin, options.rope)
            if slot == "q" and options.scaling is not None:
                states = states * options.scaling.factors(torch.arange(len(states)))[:, None, None]
            return normalize(states, slot, "after")

        bias = self.tensors[sinks] if sinks else None
        return self._linear("o", attend(project("q"), project("k"), project("v"), options, bias))

    def _linear(self, slot: str, x: Tensor) -> Tensor:
        return x @ self.tensors[self.slots[slot]].T + _bias(self.tensors, self.slots[slot])


def query_scaling(fields: Mapping[str, Any]) -> QueryScaling | None:
    """Return the factors of the queries that the rotary fields describe, or None if they describe none."""
    parameters = fields.get("rope_parameters") or {}
    beta, period = parameters.get("llama_4_scaling_beta"), parameters.get("original_max_position_embeddings")
    return QueryScaling(beta, period) if beta and period else None


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
    """Return the factor of the scores that DeepSeek uses with YaRN, mscale**2 / sqrt(size); an empty list without YaRN."""
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    factor, weight = parameters.get("factor"), parameters.get("mscale_all_dim")
    if not factor or factor <= 1 or not weight:
        return []
    return [(0.1 * weight * math.log(factor) + 1.0) ** 2 * size**-0.5]


def _latent_attention(
    parts: Mapping[str, Tensor],
    x: Tensor,
    heads: int,
    options: AttentionOptions,
    cos_sin: tuple[Tensor, Tensor],
    eps: float,
    nope: int,
) -> Tensor:
    """Return the output [T, H] of latent attention. `nope`: number of components of a query or key that are not rotated."""
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
    """Find the activation and the slots of an MLP.

    A gated MLP has the slots gate, up and down, or gate_up and down if gate and up are one matrix. A plain MLP has the slots up
    and down.
    """
    hidden = call.x.shape[-1]
    matrices = _matrices(tensors)
    if len(matrices) == 2 and (match := _match_fused_mlp(tensors, call)):
        return match
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


def _match_fused_mlp(tensors: Mapping[str, Tensor], call: Call) -> Match | None:
    """Find gate_up [2 F, H] and down [H, F] of a gated MLP without biases. The rows of the gate come before those of up."""
    for names in permutations(_matrices(tensors)) if len(tensors) == 2 else ():
        fused, down = (tensors[name] for name in names)
        if fused.shape != (2 * down.shape[1], call.x.shape[-1]) or down.shape[0] != call.x.shape[-1]:
            continue
        gate, up = fused.chunk(2)
        for activation in ACTIVATIONS:
            error = difference(gated_mlp(call.x, gate, up, down, activation), call.y)
            if error <= LIMIT:
                slots = dict(zip(("gate_up", "down"), names, strict=True))
                return Match("mlp", slots, dict(activation=activation), error)
    return None


def match_moe(tensors: Mapping[str, Tensor], call: Call, fields: Mapping[str, Any], experts: int) -> Match | None:
    """Find the routing, the router, the shared experts, and the matrices of the routed experts, whose names contain {expert}."""
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


def _expert_outputs(tensors: Mapping[str, Tensor], names: Sequence[str], x: Tensor, experts: int) -> Tensor | None:
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
            slots = dict(zip(("shared_gate_proj", "shared_up_proj", "shared_down_proj"), names, strict=True))
            yield slots, gated_mlp(x, gate, up, down, "silu")
