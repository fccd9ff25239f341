"""Finds the structure of a decoder: its layers, what each layer consists of, and how residual, norms and blocks are connected."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from models.derive.formulas import difference, rms_norm
from models.derive.probes import (
    LIMIT,
    Match,
    eps_of,
    match_attention,
    match_latent_attention,
    match_mlp,
    match_moe,
    match_norm,
)
from models.derive.tiny_config import EXPERT_COUNTS
from models.derive.tiny_model import Call, TinyModel


@dataclass
class Layer:
    """What one layer consists of. Names of tensors contain {layer}, and {expert} for the tensors of experts."""

    mixer: Match | None = None  # attention
    mlp: Match | None = None  # MLP or experts
    norms: dict[str, str] = field(default_factory=dict)  # attention_norm and mlp_norm -> name of the tensor


@dataclass
class Structure:
    """The parts of a model, and the problems: one line for each operator that mrl does not know."""

    top: dict[str, str] = field(default_factory=dict)  # embedding, final_norm and output -> name of the tensor
    layers: list[Layer] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    error: float = 0.0  # largest difference of a connection between blocks

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the layers with experts."""
        return [n for n, layer in enumerate(self.layers) if layer.mlp is not None and layer.mlp.kind == "moe"]

    def matches(self, kind: str) -> list[Match]:
        """Return the matches of one kind, from the first to the last layer."""
        return [m for layer in self.layers for m in (layer.mixer, layer.mlp) if m is not None and m.kind == kind]

    def add_problem(self, text: str) -> None:
        """Add a line, unless another layer has the same problem."""
        if text not in self.problems:
            self.problems.append(text)


def find_structure(model: TinyModel) -> Structure:
    """Probe all blocks of the model. The result names each block that no formula reproduces."""
    found = Structure()
    prefix = _layer_prefix(model)
    if prefix is None:
        found.add_problem(f"{type(model.model).__name__}: no list of {model.config.num_hidden_layers} layers was found")
        return found
    for index in range(model.config.num_hidden_layers):
        found.layers.append(_find_layer(model, prefix, index, found))
    _find_top(model, prefix, found)
    unused = set(model.tensors) - _used_names(found, model)
    for name in sorted({_pattern(name, prefix) for name in unused}):
        found.add_problem(f"tensor {name}: no known operator uses it")
    return found


def _layer_prefix(model: TinyModel) -> str | None:
    """Return the name of the list of layers, such as model.layers."""
    last = model.config.num_hidden_layers - 1
    names = [name.removesuffix(f".{last}") for name in model.calls if name.endswith(f".{last}")]
    lists = [n for n in names if f"{n}.{last + 1}" not in model.calls and f"{n}.0" in model.calls]
    return min(lists, key=lambda n: n.count("."), default=None)


def _pattern(name: str, prefix: str) -> str:
    name = re.sub(rf"^{re.escape(prefix)}\.\d+\.", f"{prefix}.{{layer}}.", name)
    return re.sub(r"(?<=experts\.)\d+\.", "{expert}.", name)


def _used_names(found: Structure, model: TinyModel) -> set[str]:
    used = set(found.top.values())
    for index, layer in enumerate(found.layers):
        matches = [match for match in (layer.mixer, layer.mlp) if match is not None]
        for name in [*layer.norms.values(), *(n for match in matches for n in match.slots.values())]:
            name = name.replace("{layer}", str(index))
            used |= {name.replace("{expert}", str(e)) for e in range(num_experts(model.all_fields))} | {name}
    return used & set(model.tensors)


def num_experts(fields: Mapping[str, Any]) -> int:
    """Return the number of experts of a config, 0 for a dense model."""
    return next((fields[name] for name in EXPERT_COUNTS if fields.get(name)), 0)


def _find_layer(model: TinyModel, prefix: str, index: int, found: Structure) -> Layer:
    start = f"{prefix}.{index}."
    children: dict[str, dict[str, str]] = {}  # child module of the layer -> {name in the child: name in the checkpoint}
    for name, owner in model.owners.items():
        if owner.startswith(start):
            child, _, rest = owner.removeprefix(start).partition(".")
            children.setdefault(child, {})[name] = rest
    layer, norms = Layer(), {}
    for child, names in children.items():
        call = model.calls.get(start + child)
        if call is None:
            found.add_problem(f"module {prefix}.{{layer}}.{child}: it is not called with hidden states")
            continue
        tensors = {name: model.tensors[name] for name in names}
        if len(tensors) == 1 and next(iter(tensors.values())).dim() == 1:
            norms[child] = (next(iter(tensors)), call)
        elif (match := _match_block(tensors, call, model)) is None:
            module = type(model.model.get_submodule(start + child)).__name__
            shapes = ", ".join(
                f"{_pattern(n, prefix).rpartition('{layer}.')[2]} {list(t.shape)}"
                for n, t in tensors.items()
                if "experts." not in n or "experts.0." in n
            )
            found.add_problem(f"operator {module} ({child}): no known formula gives its output; its tensors: {shapes}")
        elif match.kind in ("mlp", "moe"):
            layer.mlp = _with_pattern(match, prefix)
            mlp_call = call
        else:
            layer.mixer = _with_pattern(match, prefix)
            mixer_call = call
    if layer.mixer is not None and layer.mlp is not None:
        _connect(model, (model.calls[start[:-1]], mixer_call, mlp_call), norms, layer, found, prefix)
    return layer


def _with_pattern(match: Match, prefix: str) -> Match:
    return replace(match, slots={slot: _pattern(name, prefix) for slot, name in match.slots.items()})


def _match_block(tensors: Mapping[str, Tensor], call: Call, model: TinyModel) -> Match | None:
    fields = model.all_fields
    heads = fields["num_attention_heads"]
    if any(re.search(r"\bexperts\.\d+\.", name) for name in tensors):
        return match_moe(tensors, call, fields, num_experts(fields))
    return (
        match_latent_attention(tensors, call, fields, heads, model.rotary)
        or match_attention(tensors, call, fields, heads, model.rotary)
        or match_mlp(tensors, call)
    )


def _connect(model, calls, norms, layer, found, prefix) -> None:
    """Check that the layer computes h = x + attention(norm(x)) and y = h + mlp(norm(h)), and name its two norms."""
    whole, mixer, mlp = calls
    middle = whole.x + mixer.y
    expected = dict(attention_norm=(whole.x, mixer.x), mlp_norm=(middle, mlp.x))
    for child, (name, call) in norms.items():
        module = f"{prefix}.{{layer}}.{child}"
        variant = match_norm(model.tensors[name], call, model.all_fields)
        if variant is None:
            found.add_problem(
                f"operator {type(model.model.get_submodule(name.rpartition('.')[0])).__name__} ({child}): no RMSNorm"
            )
            continue
        if variant["plus_one"]:
            found.add_problem(f"norm {module}: it multiplies by 1 + weight; mrl's decoder multiplies by weight")
        place = next(
            (p for p, (x, y) in expected.items() if difference(call.x, x) <= LIMIT and difference(call.y, y) <= LIMIT),
            None,
        )
        if place is None:
            found.add_problem(f"norm {module}: it is not between the residual stream and a block, as in mrl's decoder")
        else:
            layer.norms[place] = _pattern(name, prefix)
            found.error = max(found.error, variant["error"])
    _check_residuals(model, whole, mixer, mlp, layer, found)


def _check_residuals(model, whole, mixer, mlp, layer, found) -> None:
    if "attention_norm" not in layer.norms or "mlp_norm" not in layer.norms:
        for name, block, rest in (("attention", mixer.y, None), ("MLP", mlp.y, whole.y - whole.x)):
            if rest is not None and (factor := multiplier(block, rest - mixer.y)) not in (None, 1.0):
                found.add_problem(
                    f"residual: the output of the {name} is multiplied by {factor:.6g}{fields_with(model.all_fields, factor)}"
                )
    error = difference(whole.x + mixer.y + mlp.y, whole.y)
    found.error = max(found.error, error if error <= LIMIT else 0.0)
    if error > LIMIT:
        factor = multiplier(mixer.y + mlp.y, whole.y - whole.x)
        detail = (
            f"; the sum of attention and MLP is multiplied by {factor:.6g}{fields_with(model.all_fields, factor)}"
            if factor
            else ""
        )
        found.add_problem(f"residual: a layer does not return x + attention + MLP{detail}")


def multiplier(block: Tensor, contribution: Tensor) -> float | None:
    """Return the number by which `block` must be multiplied to give `contribution`, or None if there is no such number."""
    factor = ((block * contribution).sum() / block.square().sum()).item()
    return round(factor, 6) if difference(block * factor, contribution) <= 10 * LIMIT else None


def fields_with(fields: Mapping[str, Any], value: float) -> str:
    """Return a remark that names the config fields with this value."""
    names = [
        name
        for name, found in fields.items()
        if isinstance(found, int | float)
        and not isinstance(found, bool)
        and found != 1
        and any(abs(value - power) <= 1e-4 * abs(value) for power in _powers(found))
    ]
    return f" (config: {', '.join(names)})" if names else ""


def _powers(number: float) -> list[float]:
    if number <= 0:
        return [number]
    return [number, 1 / number, number**0.5, number**-0.5]


def _find_top(model: TinyModel, prefix: str, found: Structure) -> None:
    """Find embedding, final norm and output layer, and check how they are connected with the layers."""
    vocab, hidden = model.config.vocab_size, model.config.hidden_size
    tables = [
        n for n, t in model.tensors.items() if tuple(t.shape) == (vocab, hidden) and not n.startswith(f"{prefix}.")
    ]
    first = model.calls[f"{prefix}.0"].x
    last = model.calls[f"{prefix}.{model.config.num_hidden_layers - 1}"].y
    for name in tables:
        factor = multiplier(model.tensors[name][model.tokens], first)
        if factor is not None and "embedding" not in found.top:
            found.top["embedding"] = name
            if factor != 1.0:
                found.add_problem(f"embedding: it is multiplied by {factor:.6g}{fields_with(model.all_fields, factor)}")
    norms = [n for n, t in model.tensors.items() if tuple(t.shape) == (hidden,) and not n.startswith(f"{prefix}.")]
    output = next((n for n in tables if n != found.top.get("embedding")), None)
    for name in norms:
        for plus_one, eps in ((p, e) for p in (False, True) for e in eps_of(model.all_fields)):
            states = rms_norm(last, model.tensors[name], eps, plus_one)
            if _logits_problem(model, states, output, found.top.get("embedding")) != "output":
                found.top["final_norm"] = name
                problem = _logits_problem(model, states, output, found.top.get("embedding"))
                if problem:
                    found.add_problem(problem)
                if plus_one:
                    found.add_problem(f"norm {name}: it multiplies by 1 + weight; mrl's decoder multiplies by weight")
                if output:
                    found.top["output"] = output
                return
    found.add_problem("output: the logits are not the product of a norm of the last layer and one matrix")


def _logits_problem(model: TinyModel, states: Tensor, output: str | None, embedding: str | None) -> str | None:
    """Return None if the logits are those of the plain decoder, a line for a known variant, and "output" otherwise."""
    weight = model.tensors.get(output or embedding or "")
    if weight is None:
        return "output"
    logits = states @ weight.T
    factor = multiplier(logits, model.logits)
    if factor is not None:
        return (
            None
            if factor == 1.0
            else f"logits: they are multiplied by {factor:.6g}{fields_with(model.all_fields, factor)}"
        )
    cap = model.all_fields.get("final_logit_softcapping")
    if cap and difference(cap * torch.tanh(logits / cap), model.logits) <= LIMIT:
        return f"logits: soft cap final_logit_softcapping={cap}"
    return "output"
