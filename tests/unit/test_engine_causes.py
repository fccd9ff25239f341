"""The cause of a difference between an engine and the trainer is found from the tensors of both sides.

A decoder of one layer in numpy computes the tensors of each side. One side has a fault.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from mrl.core.types import TokenBlock
from mrl.diagnostics.attention_causes import attend
from mrl.diagnostics.engine_causes import ACTIVATIONS
from mrl.diagnostics.engine_check import (
    LOGPROBS,
    PointDifference,
    compare_logprobs,
    compare_points,
    diagnose,
    point_name,
)
from mrl.diagnostics.engine_difference import Cause, ModelFacts, Side, weight_cause
from mrl.rollout.engines.forward_recorder import halves

H, D, HEADS, GROUPS, FFN, VOCAB, EXPERTS = 16, 8, 4, 2, 24, 13, 4
FACTS = ModelFacts(D, GROUPS, D)
RNG = np.random.default_rng(0)
BLOCK = TokenBlock.from_lists([[1, 2, 3], [4, 5]], [[6, 7, 8, 9], [10, 11, 12]], [[0.0] * 4, [0.0] * 3])
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."


def _weights() -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, H),
        "lm_head.weight": (VOCAB, H),
        "model.norm.weight": (H,),
        "model.layers.0.input_layernorm.weight": (H,),
        "model.layers.0.post_attention_layernorm.weight": (H,),
        f"{ATTENTION}q_proj.weight": (HEADS * D, H),
        f"{ATTENTION}q_proj.bias": (HEADS * D,),
        f"{ATTENTION}k_proj.weight": (GROUPS * D, H),
        f"{ATTENTION}v_proj.weight": (GROUPS * D, H),
        f"{ATTENTION}q_norm.weight": (D,),
        f"{ATTENTION}k_norm.weight": (D,),
        f"{ATTENTION}o_proj.weight": (H, HEADS * D),
        f"{MLP}gate_proj.weight": (FFN, H),
        f"{MLP}up_proj.weight": (FFN, H),
        f"{MLP}down_proj.weight": (H, FFN),
    }
    return {name: (RNG.normal(size=shape) + ("norm" in name)).astype(np.float32) for name, shape in shapes.items()}


WEIGHTS = _weights()


@dataclass(frozen=True)
class Toy:
    """A decoder with one layer. A wrong value of any field is a fault."""

    weights: dict[str, np.ndarray] = field(default_factory=lambda: WEIGHTS)
    eps: float = 1e-6
    base: float = 1e4
    interleaved: bool = False
    amplitude: float = 1.0
    first_position: int = 0
    scale: float = D**-0.5
    tiled: bool = False
    activation: str = "silu(gate) * up"
    skipped: str = ""  # name of a norm that is not applied, or "bias"
    logit_scale: float = 1.0

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return the RMS norm of x [..., d]."""
        if name == self.skipped:
            return x
        prefix = "" if name == "model.norm" else "model.layers.0."
        full = f"{prefix}{'self_attn.' if name in ('q_norm', 'k_norm') else ''}{name}.weight"
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.eps) * self.weights[full]

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Rotate heads [S, heads, D]."""
        angles = np.outer(BLOCK.positions + self.first_position, self.base ** (-np.arange(0, D, 2) / D))[:, None]
        first, second = (x[..., 0::2], x[..., 1::2]) if self.interleaved else (x[..., : D // 2], x[..., D // 2 :])
        cos, sin = self.amplitude * np.cos(angles), self.amplitude * np.sin(angles)
        pair = first * cos - second * sin, second * cos + first * sin
        return np.stack(pair, -1).reshape(x.shape) if self.interleaved else np.concatenate(pair, -1)

    def side(self, name: str) -> Side:
        """Compute the tensors at all trace points, and return them as one side."""
        w, points = self.weights, {}
        points["embedding"] = points["layers.0.input"] = w["model.embed_tokens.weight"][BLOCK.tokens]
        layer: dict[str, Any] = dict(attention_norm=self.norm("input_layernorm", points["embedding"]))
        bias = 0 if self.skipped == "bias" else w[f"{ATTENTION}q_proj.bias"]
        layer["query"] = layer["attention_norm"] @ w[f"{ATTENTION}q_proj.weight"].T + bias
        layer["key"] = layer["attention_norm"] @ w[f"{ATTENTION}k_proj.weight"].T
        layer["value"] = layer["attention_norm"] @ w[f"{ATTENTION}v_proj.weight"].T
        heads = {}
        for kind in ("query", "key"):
            normed = self.norm(f"{kind[0]}_norm", layer[kind].reshape(len(BLOCK.tokens), -1, D))
            heads[kind] = self.rotate(normed)
            layer |= {f"normed_{kind}": normed, f"rotated_{kind}": heads[kind]}
        value = layer["value"].reshape(len(BLOCK.tokens), GROUPS, D)
        starts = BLOCK.cu_seqlens[:-1].tolist()
        layer["attention"] = attend(heads["query"], heads["key"], value, starts, self.scale, self.tiled)
        flat = {kind: array.reshape(len(BLOCK.tokens), -1) for kind, array in layer.items()}
        flat["attention_output"] = flat["attention"] @ w[f"{ATTENTION}o_proj.weight"].T
        flat["mlp_input"] = points["embedding"] + flat["attention_output"]
        flat["mlp_norm"] = self.norm("post_attention_layernorm", flat["mlp_input"])
        flat["gate"], flat["up"] = (flat["mlp_norm"] @ w[f"{MLP}{n}_proj.weight"].T for n in ("gate", "up"))
        flat["activation"] = ACTIVATIONS[self.activation](flat["gate"], flat["up"])
        flat["mlp_output"] = flat["activation"] @ w[f"{MLP}down_proj.weight"].T
        points |= {f"layers.0.{kind}": array for kind, array in flat.items()}
        points["final_norm_input"] = flat["mlp_input"] + flat["mlp_output"]
        points["final_norm"] = self.norm("model.norm", points["final_norm_input"])
        last = points["final_norm"][BLOCK.cu_seqlens[1:] - 1]
        points["last_logits"] = self.logit_scale * (last @ w["lm_head.weight"].T)
        return Side(name, {point: array.astype(np.float32) for point, array in points.items()}, w)


def changed(**weights: np.ndarray) -> dict[str, np.ndarray]:
    """Return the weights with some of them replaced. In the names of the arguments, `__` stands for a dot."""
    named = {name.replace("__", "."): array for name, array in weights.items()}
    return {name: named.get(name.removeprefix("model.layers.0."), array) for name, array in WEIGHTS.items()}


def weight(name: str) -> np.ndarray:
    return WEIGHTS.get(name, WEIGHTS.get(f"model.layers.0.{name}", np.empty(0)))


def compare(engine: Side, trainer: Side) -> tuple[str, Cause] | None:
    """Return the name of the first trace point that differs, and the cause. None if nothing differs."""
    differences, undecided = compare_points(engine.trace, trainer.trace, BLOCK, 1, 3e-5)
    assert not undecided.any()
    first = next((each for each in differences if not each.within), None)
    return None if first is None else (first.name, diagnose(first, engine, trainer, BLOCK, FACTS))


def test_equal_sides_have_no_difference():
    assert compare(Toy().side("engine"), Toy().side("trainer")) is None


FAULTS: dict[str, tuple[Toy, str, str, str]] = {
    "rope base": (Toy(base=5e5), "layer 0, rotated query", "RoPE base", "base 10000, the trainer's base 5e+05"),
    "rope layout": (Toy(interleaved=True), "layer 0, rotated query", "RoPE layout", "(2i, 2i + 1)"),
    "rope amplitude": (Toy(amplitude=1.2), "layer 0, rotated query", "RoPE amplitude", "by 1.2"),
    "rope positions": (Toy(first_position=1), "layer 0, rotated query", "RoPE positions", "is 0, the trainer's 1"),
    "epsilon": (Toy(eps=1e-3), "layer 0, attention norm", "epsilon of the attention norm", "1e-06 to the mean square"),
    "no q norm": (Toy(skipped="q_norm"), "layer 0, normed query", "q norm", "the trainer applies no norm"),
    "no k norm": (Toy(skipped="k_norm"), "layer 0, normed key", "k norm", "the trainer applies no norm"),
    "no final norm": (Toy(skipped="model.norm"), "final norm", "final norm", "the trainer applies no norm"),
    "no bias": (
        Toy(skipped="bias"),
        "layer 0, query",
        "bias",
        "the trainer does not add model.layers.0.self_attn.q_proj.bias",
    ),
    "attention scale": (Toy(scale=1 / D), "layer 0, attention", "attention scale", "by 0.3536, the trainer by 0.125"),
    "key/value groups": (Toy(tiled=True), "layer 0, attention", "grouping of key/value heads", "in consecutive groups"),
    "activation": (
        Toy(activation="gelu(gate) * up"),
        "layer 0, activation",
        "activation of the MLP",
        "trainer gelu(gate)",
    ),
    "logits": (Toy(logit_scale=0.5), "last logits", "scale of the last logits", "times 2"),
    "embedding": (
        Toy(changed(model__embed_tokens__weight=np.roll(weight("model.embed_tokens.weight"), 1, axis=0))),
        *("embedding", "embedding", "the rows are shifted by one"),
    ),
    "gate and up": (
        Toy(
            changed(
                mlp__gate_proj__weight=weight("mlp.up_proj.weight"), mlp__up_proj__weight=weight("mlp.gate_proj.weight")
            )
        ),
        *("layer 0, gate", "MLP gate and up", "gate and up are swapped"),
    ),
    "bias of zeros": (
        Toy(changed(self_attn__q_proj__bias=np.zeros(HEADS * D, np.float32))),
        *("layer 0, query", "attention bias", "q_proj.bias is zero in the trainer"),
    ),
    "stale": (
        Toy(changed(self_attn__o_proj__weight=weight("self_attn.o_proj.weight") * np.linspace(1, 1.01, HEADS * D))),
        *("layer 0, attention output", "stale weights", "o_proj.weight has other values"),
    ),
    "tied": (
        Toy(changed(lm_head__weight=weight("model.embed_tokens.weight"))),
        *("last logits", "tied output layer", "the trainer uses its embedding as the output layer"),
    ),
    "heads": (
        Toy(
            changed(
                self_attn__k_proj__weight=weight("self_attn.k_proj.weight").reshape(GROUPS, D, H)[::-1].reshape(-1, H)
            )
        ),
        *("layer 0, key", "attention projections", "the heads are in the opposite order"),
    ),
    "norm minus 1": (
        Toy(changed(post_attention_layernorm__weight=weight("post_attention_layernorm.weight") + 1)),
        *("layer 0, mlp norm", "MLP norm", "one side stores the weight minus 1"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_of_a_fault_is_named_with_its_layer(name):
    toy, point, part, text = FAULTS[name]
    found = compare(Toy().side("engine"), toy.side("trainer"))
    assert found is not None
    assert (found[0], found[1].part) == (point, part) and text in found[1].text, found


@pytest.mark.parametrize("size", [0.03, 0.1, 1.0])
def test_the_scales_of_small_scores_are_printed_exactly(size):
    """The tensors are in float32, so the fit of the scales is not exact."""
    names = ("q_norm", "k_norm")
    small = changed(**{f"self_attn__{name}__weight": size * weight(f"self_attn.{name}.weight") for name in names})
    sides = [Toy(small).side("engine"), Toy(small, scale=1 / D).side("trainer")]
    for side in sides:
        side.trace.update({point: tensor.astype(np.float32) for point, tensor in side.trace.items()})
    found = compare(*sides)
    assert found and found[1].text == "the engine multiplies the attention scores by 0.3536, the trainer by 0.125"


def test_the_fault_may_be_on_the_side_of_the_engine():
    found = compare(Toy(skipped="q_norm").side("engine"), Toy().side("trainer"))
    assert found and found[1].text == "the engine applies no norm; the trainer multiplies by the weight"


def moe_side(name: str, weights: np.ndarray, logits: np.ndarray, bias: np.ndarray | None = None) -> Side:
    """Return a side that has only the router of layer 0. `weights`: the routing weights [S, experts]."""
    tensors = {} if bias is None else {f"{MLP}gate.e_score_correction_bias": bias}
    return Side(name, {"layers.0.router_logits": logits, "layers.0.routing": weights}, tensors)


def routing(logits: np.ndarray, count: int = 2, normalized: bool = True, bias: np.ndarray | None = None) -> np.ndarray:
    """Return the routing weights [S, experts], which select the `count` experts with the largest sigmoid scores."""
    scores = 1 / (1 + np.exp(-logits))
    chosen = np.argsort(-(scores + (0 if bias is None else bias)), axis=1)[:, :count]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, np.take_along_axis(scores, chosen, 1), 1)
    return weights / weights.sum(1, keepdims=True) if normalized else weights


LOGITS = RNG.normal(size=(len(BLOCK.tokens), EXPERTS))
BIAS = np.array([0.9, -0.9, 0.5, -0.5])


@pytest.mark.parametrize(
    ("trainer", "part", "text"),
    [
        (routing(LOGITS, 1), "router: experts per token (top-k)", "to 2 experts, the trainer to 1"),
        (
            routing(LOGITS, normalized=False),
            "router: normalization of the weights",
            "sum to 1 in the engine, and are not",
        ),
        (routing(LOGITS) * 2.5, "router: scaling factor", "times 0.4"),
        (routing(LOGITS, bias=BIAS), "router: choice of experts", "without the correction bias, the trainer with"),
        (np.sqrt(routing(LOGITS)), "router: score function", "the ratios between"),
    ],
    ids=["topk", "normalization", "factor", "bias", "scores"],
)
def test_differences_of_a_router_are_told_apart(trainer, part, text):
    sides = moe_side("engine", routing(LOGITS), LOGITS, BIAS), moe_side("trainer", trainer, LOGITS, BIAS)
    found = compare(*sides)
    assert found and found[0] == "layer 0, routing" and found[1].part == part and text in found[1].text, found


def test_only_the_routing_of_tokens_that_round_off_sends_to_other_experts_is_not_compared():
    """All other trace points of these tokens are compared, because the trainer computes with the engine's routing weights."""
    logits = np.tile(np.array([1.0, 0.5, 0.499, 0.0]), (len(BLOCK.tokens), 1))
    flipped = logits.copy()
    flipped[4, 1:3] = 0.499, 0.5  # position 4 of row 0; later tokens of the row attend to it
    sides = [moe_side("engine", routing(logits), logits), moe_side("trainer", routing(flipped), logits)]
    differences, undecided = compare_points(sides[0].trace, sides[1].trace, BLOCK, 1, tolerance=0.1)
    assert all(each.within for each in differences) and np.flatnonzero(undecided).tolist() == [4, 5, 6]
    for side, value in zip(sides, (1.0, 2.0), strict=True):
        side.trace["layers.0.routed_experts"] = np.where(np.arange(len(logits)) == 4, value, 1.0)[:, None]
    found, _ = compare_points(sides[0].trace, sides[1].trace, BLOCK, 1, tolerance=0.1)
    assert [(each.point, each.within, each.token) for each in found][2:] == [("routed_experts", False, 4)]
    differences, undecided = compare_points(sides[0].trace, sides[1].trace, BLOCK, 1, tolerance=3e-5)
    assert [each.within for each in differences][:2] == [True, False] and not undecided.any(), "float32 decides"


def test_experts_in_another_order_and_layers_in_another_order_are_named():
    names = [f"{MLP}experts.{expert}.{matrix}.weight" for expert in range(2) for matrix in ("gate_proj", "down_proj")]
    engine = {name: RNG.normal(size=(3, 2)) for name in names}
    trainer = dict(engine)
    down = [name for name in names if "down" in name]
    trainer[down[0]], trainer[down[1]] = engine[down[1]], engine[down[0]]
    found = weight_cause("routed_experts", 0, engine, trainer, D)
    assert (
        found
        and found.part == "order of the experts (down_proj)"
        and "trainer's model.layers.0.mlp.experts.1" in found.text
    )

    norms = {f"model.layers.{layer}.input_layernorm.weight": RNG.normal(size=4) for layer in range(3)}
    order = dict(zip(norms, [*norms.values()][::-1], strict=True))
    found = weight_cause("attention_norm", 0, norms, order, D)
    assert found and found.text == "layer 0 of the engine has the weights of layer 2 of the trainer"


@pytest.mark.parametrize("recorded", [True, False], ids=["computed but not added", "not computed"])
@pytest.mark.parametrize("missing", ["engine", "trainer"])
def test_the_side_without_shared_experts_is_named(missing, recorded):
    shared, routed = RNG.normal(size=(2, len(BLOCK.tokens), H))
    full = {
        "layers.0.routed_experts": routed,
        "layers.0.shared_experts": shared,
        "layers.0.mlp_output": routed + shared,
    }
    wrong = {"layers.0.routed_experts": routed, "layers.0.mlp_output": routed}
    if recorded:
        wrong |= {"layers.0.shared_experts": shared, "layers.0.routed_experts": routed - shared}
    sides = [Side(name, wrong if name == missing else full, {}) for name in ("engine", "trainer")]
    found = compare(*sides)
    assert found and found[1].text == f"the {missing} does not add the shared experts"


def test_logprobs_alone_point_to_the_sampler():
    trainer = np.zeros(7)
    trainer[5] = 0.2
    found = compare_logprobs(BLOCK, trainer, np.zeros(len(BLOCK.tokens), bool), 1e-4)
    assert (found.point, found.absolute, found.token, found.within) == (LOGPROBS, 0.2, 10, False)
    empty = Side("engine", {}, {})
    cause = diagnose(found, empty, replace(empty, name="trainer"), BLOCK, FACTS)
    assert cause.part == "sampling" and "rollout.temperature" in cause.advice


def test_a_value_that_is_not_finite_is_a_difference():
    engine, trainer = Toy().side("engine"), Toy().side("trainer")
    broken = trainer.trace["layers.0.value"].copy()
    broken[3, 2] = np.nan
    found = compare(engine, replace(trainer, trace={**trainer.trace, "layers.0.value": broken}))
    assert found and found[0] == "layer 0, value" and found[1].text == "the trainer computes NaN or infinity"


def test_helpers():
    assert halves(np.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]
    assert point_name("query", 3) == "layers.3.query" and point_name("embedding", None) == "embedding"
    assert PointDifference("rotated_key", 3, 0.0, 0.0, 0, 1e-5).name == "layer 3, rotated key"
