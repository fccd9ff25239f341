"""Finds the structure of a decoder: its layers, their blocks and norms, and how blocks, norms and residual are connected.

models.derive.formulas explains the letters in shapes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
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

    mixer: Match | None = None  # attention; None: no probe has found it
    mlp: Match | None = None  # MLP or experts; None: no probe has found it
    # attention_norm and mlp_norm (before the blocks), after_attention and after_mlp -> name of the tensor
    norms: dict[str, str] = field(default_factory=dict)


@dataclass
class Structure:
    """The parts of a model, and the problems: one line for each operator that a family of `mrl family derive` cannot have."""

    outside_layers: dict[str, str] = field(default_factory=dict)  # embedding, final_norm, output -> name of the tensor
    layers: list[Layer] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    # largest difference between formula and recorded output, over norms and residuals, divided by the largest output
    error: float = 0.0

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
    """Probe all blocks of the model. The problems of the result name each block that no formula reproduces."""
    found = Structure()
    prefix = _layer_prefix(model)
    if prefix is None:
        found.add_problem(f"{type(model.model).__name__}: no list of {model.config.num_hidden_layers} layers was found")
        return found
    for index in range(model.config.num_hidden_layers):
        found.layers.append(_find_layer(model, prefix, index, found))
    _find_outside_layers(model, prefix, found)
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
    used = set(found.outside_layers.values())
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
    layer, norms = Layer(), dict[str, tuple[str, Call]]()
    mixer_call = mlp_call = None
    for child, names in _children(model, start).items():
        call = model.calls.get(start + child)
        if call is None:
            found.add_problem(f"module {prefix}.{{layer}}.{child}: it is not called with hidden states")
            continue
        tensors = {name: model.tensors[name] for name in names}
        if len(tensors) == 1 and tensors[names[0]].dim() == 1:
            norms[child] = (names[0], call)
        elif (match := _match_block(tensors, call, model)) is None:
            _add_unknown_block(model, start + child, tensors, prefix, found)
        elif match.kind in ("mlp", "moe"):
            layer.mlp, mlp_call = _with_pattern(match, prefix), call
        else:
            layer.mixer, mixer_call = _with_pattern(match, prefix), call
    if mixer_call is not None and mlp_call is not None:
        _Connections(model, prefix, model.calls[start[:-1]], mixer_call, mlp_call, found).find(norms, layer)
    return layer


def _children(model: TinyModel, start: str) -> dict[str, list[str]]:
    """Return for each child module of a layer the names of its tensors in the checkpoint."""
    children: dict[str, list[str]] = {}
    for name, owner in model.owners.items():
        if owner.startswith(start):
            children.setdefault(owner.removeprefix(start).partition(".")[0], []).append(name)
    return children


def _add_unknown_block(
    model: TinyModel, module: str, tensors: Mapping[str, Tensor], prefix: str, found: Structure
) -> None:
    shapes = {_pattern(name, prefix).rpartition("{layer}.")[2]: list(t.shape) for name, t in tensors.items()}
    kind, child = type(model.model.get_submodule(module)).__name__, module.rpartition(".")[2]
    found.add_problem(
        f"operator {kind} ({child}): no known formula gives its output; its tensors in the tiny model: "
        f"{', '.join(f'{name} {shape}' for name, shape in shapes.items())}"
    )


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


@dataclass
class _Connections:
    """Compares a layer that maps x to y with the formulas h = x + attention(norm(x)), y = h + mlp(norm(h)).

    The outputs of attention and of the MLP may have norms, too.
    """

    model: TinyModel
    prefix: str  # name of the list of layers
    whole: Call  # call of the layer
    mixer: Call  # call of attention
    mlp: Call  # call of the MLP or of the experts
    found: Structure  # gets the problems

    def find(self, norms: Mapping[str, tuple[str, Call]], layer: Layer) -> None:
        """Enter the norms in `layer.norms`, and add a problem for each connection that a derived family cannot have.

        `norms`: child module of the layer -> (name of the norm's tensor, its call).
        """
        calls: dict[str, Call] = {}
        for child, (name, call) in norms.items():
            module = f"{self.prefix}.{{layer}}.{child}"
            if not self._is_rms_norm(name, call, module):
                continue
            place = self._place(call)
            if place is None or place in layer.norms:
                problem = "neither before nor after a block; a derived family has no norm at this place"
                if place is not None:
                    problem = f"at the same place as {layer.norms[place]}; a derived family has one norm at each place"
                self.found.add_problem(f"norm {module}: it is {problem}")
                continue
            layer.norms[place], calls[place] = _pattern(name, self.prefix), call
            if place == "attention_norm" and difference(call.x, self.whole.x) > LIMIT:
                self.found.add_problem(f"norm {module}: it does not read the input of the layer")
        for place, block in (("attention_norm", "attention"), ("mlp_norm", "the MLP")):
            if place not in layer.norms:
                self.found.add_problem(f"norm: there is none directly before {block}")
        if ("after_attention" in calls) != ("after_mlp" in calls):
            self.found.add_problem("norm: only one of the outputs of attention and of the MLP has a norm")
        added = calls["after_attention"].y if "after_attention" in calls else self.mixer.y
        middle = calls["mlp_norm"].x if "mlp_norm" in calls else self.whole.x + added
        self._check_residual("attention", added, middle - self.whole.x)
        added = calls["after_mlp"].y if "after_mlp" in calls else self.mlp.y
        self._check_residual("the MLP", added, self.whole.y - middle)

    def _is_rms_norm(self, name: str, call: Call, module: str) -> bool:
        variant = match_norm(self.model.tensors[name], call, self.model.all_fields)
        if variant is None:
            self.found.add_problem(f"norm {module}: it is no RMSNorm")
            return False
        self._check_epsilon(name, call, module, variant["plus_one"])
        if variant["plus_one"]:
            self.found.add_problem(f"norm {module}: it multiplies by 1 + weight; a derived family multiplies by weight")
        self.found.error = max(self.found.error, variant["error"])
        return True

    def _check_epsilon(self, name: str, call: Call, module: str, plus_one: bool) -> None:
        """Check that epsilon is rms_norm_eps. The norm is called with small inputs, so that epsilon changes its output."""
        fields, small = self.model.all_fields, call.x * (1e-3 / call.x.square().mean().sqrt())
        with torch.no_grad():
            y = self.model.model.get_submodule(self.model.owners[name].rpartition(".")[0])(small)
        eps = fields.get("rms_norm_eps")
        if eps is None or difference(rms_norm(small, self.model.tensors[name], eps, plus_one), y) > LIMIT:
            self.found.add_problem(f"norm {module}: its epsilon is not rms_norm_eps={eps}")

    def _place(self, call: Call) -> str | None:
        places = dict(attention_norm=self.mixer.x, mlp_norm=self.mlp.x)
        before = next((place for place, x in places.items() if difference(call.y, x) <= LIMIT), None)
        outputs = dict(after_attention=self.mixer.y, after_mlp=self.mlp.y)
        return before or next((place for place, y in outputs.items() if difference(call.x, y) <= LIMIT), None)

    def _check_residual(self, block: str, output: Tensor, contribution: Tensor) -> None:
        factor = multiplier(output, contribution)
        if factor is None:
            self.found.add_problem(f"residual: the output of {block} is not added to the residual stream")
        elif factor != 1.0:
            fields = fields_with(self.model.all_fields, factor)
            self.found.add_problem(f"residual: the output of {block} is multiplied by {factor:.6g}{fields}")
        else:
            self.found.error = max(self.found.error, difference(output, contribution))


def multiplier(block: Tensor, contribution: Tensor) -> float | None:
    """Return the number by which `block` must be multiplied to give `contribution`, or None if there is no such number."""
    factor = ((block * contribution).sum() / block.square().sum()).item()
    if difference(block * factor, contribution) > 10 * LIMIT:
        return None
    return 1.0 if abs(factor - 1.0) < 10 * LIMIT else factor


def fields_with(fields: Mapping[str, Any], value: float) -> str:
    """Return a remark with the fields whose number x has `value` = x, 1 / x, sqrt(x) or 1 / sqrt(x); empty if there is none."""
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


def _find_outside_layers(model: TinyModel, prefix: str, found: Structure) -> None:
    """Find embedding, final norm and output layer, and check how they are connected with the layers."""
    vocab, hidden = model.config.vocab_size, model.config.hidden_size
    outside = {name: tensor for name, tensor in model.tensors.items() if not name.startswith(f"{prefix}.")}
    tables = [name for name, tensor in outside.items() if tuple(tensor.shape) == (vocab, hidden)]
    first = model.calls[f"{prefix}.0"].x
    factors = {name: multiplier(outside[name][model.tokens], first) for name in tables}
    embedding = next((name for name, factor in factors.items() if factor is not None), None)
    if embedding is None:
        found.add_problem("embedding: the input of the first layer is not the embedding of the tokens")
        return
    found.outside_layers["embedding"] = embedding
    if (factor := factors[embedding] or 1.0) != 1.0:
        found.add_problem(f"embedding: it is multiplied by {factor:.6g}{fields_with(model.all_fields, factor)}")
    output = next((name for name in tables if name != embedding), None)
    if output:
        found.outside_layers["output"] = output
    norms = {name: tensor for name, tensor in outside.items() if tuple(tensor.shape) == (hidden,)}
    _find_final_norm(
        model, model.calls[f"{prefix}.{len(found.layers) - 1}"].y, norms, outside[output or embedding], found
    )


def _find_final_norm(
    model: TinyModel, last: Tensor, norms: Mapping[str, Tensor], output: Tensor, found: Structure
) -> None:
    """Find the norm between the last layer, whose output is `last` [T, H], and the output matrix [V, H]."""
    for (name, weight), plus_one, eps in product(norms.items(), (False, True), eps_of(model.all_fields)):
        logits = rms_norm(last, weight, eps, plus_one) @ output.T
        remarks = _logits_remarks(model, logits)
        if remarks is None:
            continue
        found.outside_layers["final_norm"] = name
        for remark in remarks:
            found.add_problem(remark)
        if plus_one:
            found.add_problem(f"norm {name}: it multiplies by 1 + weight; a derived family multiplies by weight")
        return
    found.add_problem("output: the logits are not the product of a norm of the last layer and one matrix")


def _logits_remarks(model: TinyModel, logits: Tensor) -> list[str] | None:
    """Return how the model's logits differ from `logits`: one line for each difference, or None if the difference is unknown."""
    fields = model.all_fields
    factor = multiplier(logits, model.logits)
    if factor is not None:
        return [] if factor == 1.0 else [f"logits: they are multiplied by {factor:.6g}{fields_with(fields, factor)}"]
    cap = fields.get("final_logit_softcapping")
    if cap and difference(cap * torch.tanh(logits / cap), model.logits) <= LIMIT:
        return [f"logits: soft cap final_logit_softcapping={cap}"]
    return None
