"""Finds the cause of a difference between an engine and the trainer from the tensors at the first trace point that differs.

A trace point is a point of the forward pass at which a tensor is recorded. All inputs of the first trace point that differs
agree on both sides, so the cause is in one operation. Each function tests hypotheses about one operation. Some functions
recompute the operation with NumPy under each hypothesis, and check which hypothesis reproduces the tensors of each side. The
other functions compare the tensors of the two sides directly. The module needs no engine and no model. In shapes, S is the
number of tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mrl.diagnostics.attention_causes import attention_cause, rope_cause
from mrl.diagnostics.engine_difference import (
    TINY,
    Cause,
    PointEvidence,
    Side,
    Weights,
    in_layer,
    is_close,
    ratio,
    weight_cause,
)

Check = Callable[[PointEvidence], Cause | None]


def find_cause(evidence: PointEvidence) -> Cause:
    """Return the first cause that explains the difference.

    Weights are compared before the operation of the trace point is checked, because weights explain most differences.
    """
    checks: list[Check] = [_not_finite, _weights, *_CHECKS.get(evidence.point, ()), _factor, _offset]
    for check in checks:
        if cause := check(evidence):
            return cause
    return Cause(
        evidence.point.replace("_", " "),
        "the inputs and the weights of this trace point agree, but the results differ in a way that no check explains",
        "compare the code of the two modules; the tensors of both sides are in the folder of the report",
    )


def _weights(evidence: PointEvidence) -> Cause | None:
    return weight_cause(
        evidence.point,
        evidence.layer,
        evidence.engine.weights,
        evidence.trainer.weights,
        evidence.facts.head_dim,
    )


def _not_finite(evidence: PointEvidence) -> Cause | None:
    for side, value in zip(evidence.sides, evidence.values, strict=True):
        if not np.isfinite(value).all():
            return Cause(
                "values that are not finite", f"the {side.name} computes NaN or infinity", "look for an overflow"
            )
    return None


def _factor(evidence: PointEvidence) -> Cause | None:
    engine, trainer = evidence.values
    factor = ratio(engine, trainer, evidence.fit_tolerance)
    if factor is None:
        return None
    name = evidence.point.replace("_", " ")
    return Cause(
        f"scale of the {name}", f"the engine's {name} is the trainer's times {factor:.6g}", "look for a factor"
    )


def _offset(evidence: PointEvidence) -> Cause | None:
    """Find a vector that one side adds to every token, such as a bias."""
    engine, trainer = evidence.values
    delta = engine - trainer
    if not is_close(delta, np.broadcast_to(delta[:1], delta.shape), evidence.fit_tolerance):
        return None
    for side, sign in ((evidence.engine, 1), (evidence.trainer, -1)):
        for name, tensor in side.weights.items():
            if tensor.ndim == 1 and tensor.shape == delta[0].shape and is_close(delta[0], sign * tensor, 1e-2):
                other = "trainer" if sign > 0 else "engine"
                return Cause("bias", f"the {other} does not add {name}", f"let the {other} add the bias")
    return Cause("bias", "both sides differ by the same vector for every token", "look for a bias that one side adds")


# Norms.


def _norm(evidence: PointEvidence) -> Cause | None:
    """Find out whether one side lacks the norm or its weight, or has another epsilon than the other side.

    The norm is w * x / sqrt(mean(x^2) + epsilon).
    """
    inputs = {"attention_norm": ["input"], "mlp_norm": ["mlp_input"], "final_norm": ["final_norm_input"]}
    sources = inputs.get(evidence.point, [evidence.point.removeprefix("normed_")])
    if not evidence.both_sides_have(sources[0]):
        return None
    found = []
    for side in evidence.sides:
        x, out = evidence.tensor_at(side, sources[0]), evidence.tensor_at(side, evidence.point)
        if evidence.point.startswith("normed_"):
            x, out = (each.reshape(-1, evidence.facts.head_dim) for each in (x, out))
        found.append(_norm_of(x, out, _norm_weight(evidence, side, out.shape[-1]), evidence.fit_tolerance))
    if found[0] == found[1]:
        return None
    (engine, engine_eps), (trainer, trainer_eps) = found
    name = {"normed_query": "q norm", "normed_key": "k norm"}.get(evidence.point, evidence.point.replace("_", " "))
    if engine != trainer:
        return Cause(name, f"the engine {engine}; the trainer {trainer}", "compare the norm modules of both sides")
    if math.isclose(engine_eps, trainer_eps, rel_tol=0.05, abs_tol=1e-9):
        return None
    text = f"the engine adds the epsilon {engine_eps:.2g} to the mean square, the trainer {trainer_eps:.2g}"
    return Cause(
        f"epsilon of the {name}", text, "compare rms_norm_eps in config.json with the trainer's layernorm_epsilon"
    )


def _norm_weight(evidence: PointEvidence, side: Side, size: int) -> NDArray | None:
    names = dict(
        attention_norm="input_layernorm",
        mlp_norm="post_attention_layernorm",
        final_norm="model.norm",
        normed_query="q_norm",
    )
    name = names.get(evidence.point, "k_norm")
    found = [w for key, w in side.weights.items() if f"{name}.weight" in key and in_layer(key, evidence.layer)]
    return found[0].astype(np.float64) if found and found[0].shape == (size,) else None


def _norm_of(x: NDArray, out: NDArray, weight: NDArray | None, tolerance: float) -> tuple[str, float]:
    """Return (what was computed, the epsilon) for the input x [n, d] and the output [n, d] of a norm."""
    if is_close(out, x, tolerance):
        return "applies no norm", 0.0
    square = np.square(x).mean(axis=-1, keepdims=True)
    for text, scale in (
        ("multiplies by the weight", weight),
        ("does not multiply by the weight", np.ones(x.shape[-1])),
        ("multiplies by 1 + the weight", None if weight is None else 1 + weight),
    ):
        if scale is None:
            continue
        scaled = x * scale  # out = factor * scaled, with factor = 1 / sqrt(mean(x^2) + epsilon)
        factors = (out * scaled).sum(-1, keepdims=True) / np.maximum(np.square(scaled).sum(-1, keepdims=True), TINY)
        if is_close(out, factors * scaled, tolerance):
            smallest = np.argsort(square[:, 0])[: max(1, len(x) // 4)]  # small inputs show the epsilon best
            eps = np.median((1 / np.maximum(np.square(factors), TINY) - square)[smallest])
            return text, float(eps)
    return "computes something other than an RMS norm of this input", 0.0


# Feed-forward layers.


def _silu(x: NDArray) -> NDArray:
    return x / (1 + np.exp(-x))


def _gelu(x: NDArray) -> NDArray:
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))


def _gelu_tanh(x: NDArray) -> NDArray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# Name of an activation in messages -> function of the outputs of the gate and up projections
ACTIVATIONS: dict[str, Callable[[NDArray, NDArray], NDArray]] = {
    "silu(gate) * up": lambda gate, up: _silu(gate) * up,
    "silu(up) * gate": lambda gate, up: _silu(up) * gate,
    "gelu(gate) * up": lambda gate, up: _gelu(gate) * up,
    "gelu_tanh(gate) * up": lambda gate, up: _gelu_tanh(gate) * up,
    "relu(gate) * up": lambda gate, up: np.maximum(gate, 0) * up,
    "sigmoid(gate) * up": lambda gate, up: up / (1 + np.exp(-gate)),
    "silu(gate)": lambda gate, up: _silu(gate),
    "gate * up": lambda gate, up: gate * up,
}


def _swapped(evidence: PointEvidence) -> Cause | None:
    if not evidence.both_sides_have("gate", "up"):
        return None
    engine, trainer = ([evidence.tensor_at(side, name) for name in ("gate", "up")] for side in evidence.sides)
    if is_close(engine[0], trainer[1], evidence.fit_tolerance) and is_close(
        engine[1], trainer[0], evidence.fit_tolerance
    ):
        return Cause("MLP gate and up", "gate and up are swapped on one side", "compare the order in the fused matrix")
    return None


def _activation(evidence: PointEvidence) -> Cause | None:
    if not evidence.both_sides_have("gate", "up"):
        return None
    names = []
    for side in evidence.sides:
        gate, up = (evidence.tensor_at(side, name)[:64] for name in ("gate", "up"))  # 64 tokens are enough
        out = evidence.tensor_at(side, "activation")[:64]
        names.append(_matching_name(out, {n: f(gate, up) for n, f in ACTIVATIONS.items()}, evidence.fit_tolerance))
    return _compare_names("activation of the MLP", names)


def _matching_name(out: NDArray, candidates: Mapping[str, NDArray], tolerance: float) -> str:
    return next((name for name, value in candidates.items() if is_close(out, value, tolerance)), "another function")


def _compare_names(part: str, names: Sequence[str]) -> Cause | None:
    engine, trainer = names
    if engine == trainer:
        return None
    return Cause(part, f"the engine computes {engine}, the trainer {trainer}", "compare the modules of both sides")


def _routing(evidence: PointEvidence) -> Cause | None:
    """Find out whether the sides choose different numbers of experts or different experts, or give them different weights.

    The tensors at this trace point are the weights of the experts [S, experts]. The weight of an expert that is not chosen is 0.
    """
    engine, trainer = evidence.values
    counts = [int((each > 0).sum(1).max()) for each in (engine, trainer)]
    if counts[0] != counts[1]:
        text = f"the engine sends each token to {counts[0]} experts, the trainer to {counts[1]}"
        return Cause("router: experts per token (top-k)", text, "compare num_experts_per_tok and moe_router_topk")
    if not np.array_equal(engine > 0, trainer > 0):
        return _choice_of_experts(evidence)
    if (factor := ratio(engine, trainer, evidence.fit_tolerance)) is not None:
        text = f"the engine's weights of the experts are the trainer's times {factor:.6g}"
        return Cause("router: scaling factor", text, "compare routed_scaling_factor and moe_router_topk_scaling_factor")
    per_expert = np.divide(engine, trainer, out=np.ones_like(engine), where=trainer > 0)
    low, high = np.where(trainer > 0, per_expert, np.inf).min(1), np.where(trainer > 0, per_expert, 0).max(1)
    if np.all(high - low <= evidence.fit_tolerance * 5 * high):
        sums = [each.sum(1) for each in (engine, trainer)]
        constant = [np.ptp(total) <= evidence.fit_tolerance * total.max() for total in sums]
        texts = [
            f"sum to {total[0]:.3g}" if c else "are not normalized" for total, c in zip(sums, constant, strict=True)
        ]
        text = f"the weights of a token's experts {texts[0]} in the engine, and {texts[1]} in the trainer"
        return Cause("router: normalization of the weights", text, "compare norm_topk_prob and moe_router_pre_softmax")
    text = "the ratios between the weights of a token's experts differ between engine and trainer"
    return Cause("router: score function", text, "compare softmax and sigmoid")


def _choice_of_experts(evidence: PointEvidence) -> Cause:
    """Find out by which scores each side chooses its experts."""
    names = []
    for side in evidence.sides:
        logits, chosen = evidence.tensor_at(side, "router_logits"), evidence.tensor_at(side, "routing") > 0
        bias = next(
            (w for n, w in side.weights.items() if "correction_bias" in n and in_layer(n, evidence.layer)), None
        )
        plain = 1 / (1 + np.exp(-logits))
        scores = {"without the correction bias": plain}
        if bias is not None:
            scores = {"with the correction bias": plain + bias, **scores}
        count, expert_groups = int(chosen.sum(1).max()), evidence.facts.expert_groups
        names.append(max(scores, key=lambda name: int((_top(scores[name], count, expert_groups) & chosen).sum())))
    if names[0] == names[1]:
        text = (
            f"both sides seem to choose experts {names[0]}, but they do not choose the same experts; their groups of experts or "
            "their scores may differ"
        )
    else:
        text = f"the engine chooses experts {names[0]}, the trainer {names[1]}"
    return Cause("router: choice of experts", text, "compare the correction bias, n_group and topk_group of both sides")


def _top(scores: NDArray, count: int, expert_groups: tuple[int, int]) -> NDArray[np.bool_]:
    """Return a mask [S, experts] of the `count` experts with the highest `scores` of each token. `expert_groups`: see ModelFacts.

    The score of a group is the sum of its experts' highest scores, as in DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section
    2.1.2).
    """
    num_groups, chosen_groups = expert_groups
    grouped = scores.reshape(len(scores), num_groups, -1)
    of_group = np.sort(grouped, axis=2)[:, :, -max(1, count // chosen_groups) :].sum(2)
    in_group = _highest(of_group, chosen_groups)
    return _highest(np.where(in_group[:, :, None], grouped, -np.inf).reshape(scores.shape), count)


def _highest(values: NDArray, count: int) -> NDArray[np.bool_]:
    """Return a mask of the `count` highest values of each row."""
    chosen = np.zeros(values.shape, bool)
    np.put_along_axis(chosen, np.argsort(-values, axis=1, kind="stable")[:, :count], True, axis=1)
    return chosen


def _experts(evidence: PointEvidence) -> Cause | None:
    """Find out whether the two sides have different activation functions in the experts, or one side omits shared experts."""
    if evidence.point == "routed_experts" and (cause := _expert_activation(evidence)):
        return cause
    for side, other in (evidence.sides, evidence.sides[::-1]):
        if evidence.full_name("shared_experts") not in side.trace:
            continue
        shared = evidence.tensor_at(side, "shared_experts")
        delta = evidence.tensor_at(side, evidence.point) - evidence.tensor_at(other, evidence.point)
        for missing, value in ((other, delta), (side, -delta)):
            if is_close(value, shared, evidence.fit_tolerance):
                text = f"the {missing.name} does not add the shared experts"
                return Cause("shared experts", text, "compare the MoE layers of both sides")
    return None


def _expert_activation(evidence: PointEvidence) -> Cause | None:
    if not evidence.both_sides_have("mlp_norm", "routing"):
        return None
    names = []
    for side in evidence.sides:
        x, routing = (evidence.tensor_at(side, name)[:64] for name in ("mlp_norm", "routing"))  # 64 tokens are enough
        matrices = [_expert_matrices(side.weights, evidence.layer, expert) for expert in range(routing.shape[1])]
        if any(found is None for found in matrices):
            return None
        projected = [(x @ gate.T, x @ up.T, down) for gate, up, down in filter(None, matrices)]
        outputs = {}
        for name, function in ACTIVATIONS.items():
            parts = [function(gate, up) @ down.T for gate, up, down in projected]
            outputs[name] = np.einsum("te,eth->th", routing, np.stack(parts))
        names.append(_matching_name(evidence.tensor_at(side, "routed_experts")[:64], outputs, evidence.fit_tolerance))
    return _compare_names("activation of the experts", names)


def _expert_matrices(weights: Weights, layer: int | None, expert: int) -> list[NDArray] | None:
    """Return the gate, up and down projections of an expert, or None if one of them is unknown."""
    spellings = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
    for names in spellings:
        found = [
            w for n in names for key, w in weights.items() if in_layer(key, layer) and f".experts.{expert}.{n}." in key
        ]
        if len(found) == 3:
            return found
    return None


# Residual stream and output.


def _residual(evidence: PointEvidence) -> Cause | None:
    """Find the side whose residual stream is not the previous stream plus the output of the preceding attention or MLP."""
    assert evidence.layer is not None, "a residual stream belongs to a layer"
    for side in evidence.sides:
        prefix = f"layers.{evidence.layer - 1}." if evidence.point == "input" else f"layers.{evidence.layer}."
        names = ("mlp_input", "mlp_output") if evidence.point == "input" else ("input", "attention_output")
        if not all(f"{prefix}{name}" in side.trace for name in names):
            continue
        before, block = (side.trace[f"{prefix}{name}"].astype(np.float64) for name in names)
        after = evidence.tensor_at(side, evidence.point)
        if not is_close(after, before + block, evidence.fit_tolerance):
            text = f"in the {side.name}, the residual stream is not the sum of its input and the output of the block"
            return Cause(
                "residual connection", text, "compare the residual connections, and multipliers of the residual"
            )
    return None


_NORM_CHECKS: tuple[Check, ...] = (_norm,)
_CHECKS: dict[str, tuple[Check, ...]] = {
    "input": (_residual,),
    "mlp_input": (_residual,),
    "attention_norm": _NORM_CHECKS,
    "mlp_norm": _NORM_CHECKS,
    "final_norm": _NORM_CHECKS,
    "normed_query": _NORM_CHECKS,
    "normed_key": _NORM_CHECKS,
    "rotated_query": (rope_cause,),
    "rotated_key": (rope_cause,),
    "attention": (attention_cause,),
    "gate": (_swapped,),
    "up": (_swapped,),
    "activation": (_activation,),
    "routing": (_routing,),
    "routed_experts": (_experts,),
    "shared_experts": (),
    "mlp_output": (_experts,),
}
