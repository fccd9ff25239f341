"""Describes the first trace point at which an engine and the trainer differ, and finds swapped, reordered or stale weights there.

A trace point is a point of the forward pass at which a tensor is recorded (mrl.workers.forward_trace). In shapes, S is the number
of tokens, and n is the number of channels of a trace point.

This module needs no engine and no model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Trace = Mapping[str, NDArray]  # full name of a trace point, such as layers.3.rotated_query -> tensor [S, n]
Weights = Mapping[str, NDArray]  # Hugging Face name -> tensor
TINY = float(np.finfo(np.float32).tiny)  # smallest divisor, so that no division is by 0

LAYER_IDENTITY = "input_layernorm.weight"
"""Suffix of the name of each layer's first norm weight. It shows whether the engine has the layers in another order."""

_NAME_PARTS_BY_POINT: dict[str, tuple[str, ...]] = {
    "embedding": ("model.embed_tokens.",),
    "attention_norm": (LAYER_IDENTITY,),
    "query_latent": ("q_a_proj.", "q_a_layernorm."),
    "key_latent": ("kv_a_proj", "kv_a_layernorm."),
    "query": (LAYER_IDENTITY, "q_a_layernorm.", "self_attn.q_proj.", "q_b_proj."),
    "key": ("self_attn.k_proj.",),
    "value": ("self_attn.v_proj.",),
    "normed_query": ("self_attn.q_norm.", "q_b_proj.", "self_attn.q_proj."),
    "normed_key": ("self_attn.k_norm.", "kv_a_proj"),
    "rotated_query": ("self_attn.q_norm.",),
    "rotated_key": ("self_attn.k_norm.",),
    "attention": ("self_attn.v_proj.", "kv_b_proj."),
    "attention_output": ("self_attn.o_proj.",),
    "mlp_norm": ("post_attention_layernorm.",),
    "gate": ("post_attention_layernorm.", ".gate_proj.", ".up_proj."),
    "up": (".gate_proj.", ".up_proj."),
    "router_logits": ("post_attention_layernorm.", "mlp.gate.weight", "block_sparse_moe.gate.weight"),
    "routing": ("e_score_correction_bias",),
    "routed_experts": (".experts.",),
    "shared_experts": (".shared_experts.",),
    "mlp_output": (".down_proj.", ".shared_experts."),
    "final_norm": ("model.norm.",),
    "last_logits": ("lm_head.",),
}
"""Trace point -> parts of the names of the tensors that may cause a difference there, in the order of their comparison."""


# A check recomputes the tensor of a trace point with an assumed cause, such as another RoPE base. If the relative error is at
# most _FIT_TOLERANCE, the cause explains the difference. The tolerance of bfloat16 is larger (PointEvidence.fit_tolerance).
_FIT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Cause:
    """Why two computations differ."""

    part: str  # short name of the cause, or of the part of the model, such as "stale weights" or "RoPE base"
    text: str  # what each side does
    advice: str  # what to do


@dataclass(frozen=True)
class Side:
    """Results and weights of the engine or of the trainer."""

    name: str  # "engine" or "trainer"
    trace: Trace
    weights: Weights  # Hugging Face name -> tensor; at least the weights of the layer that differs


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of the model that the checks of engine_causes and attention_causes need."""

    head_dim: int
    kv_heads: int
    rope_dim: int  # number of components of a head that RoPE rotates
    # latent attention: for each head, (size of the part of the key without RoPE, size of the value)
    latent_head_sizes: tuple[int, int] | None = None
    # number of groups of experts, and number of groups from which the router chooses the experts of a token
    expert_groups: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class PointEvidence:
    """The first trace point at which both sides differ, with everything that is known about both sides."""

    engine: Side
    trainer: Side
    point: str  # without the layer, such as "rotated_query"
    layer: int | None
    positions: NDArray[np.int64]  # [S] position of each token in its sequence
    facts: ModelFacts
    tolerance: float  # largest relative difference at which two tensors count as equal

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.engine, self.trainer

    def full_name(self, point: str) -> str:
        """Return the full name of a trace point in the layer that differs."""
        return point if self.layer is None else f"layers.{self.layer}.{point}"

    def tensor_at(self, side: Side, *points: str) -> NDArray:
        """Return the tensor of `side`, in float64, at the first of `points` that the side has in the layer that differs."""
        return next(side.trace[self.full_name(p)] for p in points if self.full_name(p) in side.trace).astype(np.float64)

    def both_sides_have(self, *points: str) -> bool:
        """Return whether both sides have all these trace points in the layer that differs."""
        return all(self.full_name(point) in side.trace for point in points for side in self.sides)

    @property
    def values(self) -> tuple[NDArray, NDArray]:
        """The tensors of the engine and of the trainer at this trace point, in float64."""
        return self.tensor_at(self.engine, self.point), self.tensor_at(self.trainer, self.point)

    @property
    def fit_tolerance(self) -> float:
        """Largest relative error with which a recomputed tensor counts as equal, see _FIT_TOLERANCE."""
        return max(_FIT_TOLERANCE, 2 * self.tolerance)


def is_close(first: NDArray, second: NDArray, tolerance: float) -> bool:
    """Return whether two arrays are finite, have the same shape and differ by at most `tolerance` x max(abs(second))."""
    if first.shape != second.shape or not (np.isfinite(first).all() and np.isfinite(second).all()):
        return False
    return bool(np.abs(first - second).max(initial=0.0) <= tolerance * max(np.abs(second).max(initial=0.0), 1e-30))


def ratio(numerator: NDArray, denominator: NDArray, tolerance: float) -> float | None:
    """Return the constant c with numerator = c * denominator, or None if there is no such constant."""
    total = float(np.square(denominator).sum())
    factor = float((numerator * denominator).sum()) / total if total else math.nan
    return factor if math.isfinite(factor) and is_close(numerator, factor * denominator, tolerance) else None


def in_layer(name: str, layer: int | None) -> bool:
    """Return whether a tensor belongs to a layer. If `layer` is None, return True."""
    return layer is None or name.startswith(f"model.layers.{layer}.")


def is_equal(first: NDArray, second: NDArray) -> bool:
    """Return whether two weights are exactly equal.

    No tolerance is needed, because both sides read the same files, or get the same bytes in a weight sync.
    """
    return first.shape == second.shape and bool(np.array_equal(first, second))


def weight_cause(point: str, layer: int | None, engine: Weights, trainer: Weights, head_dim: int) -> Cause | None:
    """Return why the weights of a trace point differ, or None if they are equal or unknown."""
    prefix = "" if layer is None else f"model.layers.{layer}."
    names = [
        name
        for part in _NAME_PARTS_BY_POINT.get(point, ())
        for name in dict.fromkeys([*trainer, *engine])
        if name.startswith(prefix) and part in name
    ]
    differing = [
        name for name in names if not (name in engine and name in trainer and is_equal(engine[name], trainer[name]))
    ]
    if not differing or not (set(names) & engine.keys()):
        return None
    if (other := _other_layer(layer, engine, trainer)) is not None:
        text = f"layer {layer} of the engine has the weights of layer {other} of the trainer"
        return Cause(
            "order of layers",
            text,
            "compare the layer numbers in the names of the tensors that the trainer exports with those that the engine loads",
        )
    return _describe(differing, engine, trainer, head_dim)


def _other_layer(layer: int | None, engine: Weights, trainer: Weights) -> int | None:
    identity = engine.get(f"model.layers.{layer}.{LAYER_IDENTITY}")
    own = trainer.get(f"model.layers.{layer}.{LAYER_IDENTITY}")
    if identity is None or own is None or is_equal(identity, own):
        return None
    candidates = [name for name, w in trainer.items() if name.endswith(LAYER_IDENTITY) and is_equal(identity, w)]
    return int(candidates[0].split(".")[2]) if len(candidates) == 1 else None


def _describe(names: list[str], engine: Weights, trainer: Weights, head_dim: int) -> Cause:
    """Describe the first of the differing tensors."""
    name = names[0]
    for side, weights in (("engine", engine), ("trainer", trainer)):
        if name not in weights:
            return Cause(
                part_of(name), f"the {side} has no tensor {name}", "compare the config.json that both sides read"
            )
    of_engine, of_trainer = engine[name], trainer[name]
    if of_engine.shape != of_trainer.shape:
        text = f"{name} is {list(of_engine.shape)} in the engine and {list(of_trainer.shape)} in the trainer"
        return Cause(part_of(name), text, "compare the config.json that both sides read")
    if cause := _exchanged(name, engine, trainer) or _changed(name, of_engine, of_trainer, head_dim):
        return cause
    largest = float(np.abs(of_engine - of_trainer).max())
    more = f", and {len(names) - 1} more tensors of this trace point" if len(names) > 1 else ""
    text = f"{name}{more} has other values in the engine than in the trainer (largest difference {largest:.2g})"
    return Cause(
        "stale weights", text, "push the weights again, or start the engine from the trainer's folder (model.path)"
    )


def _changed(name: str, of_engine: NDArray, of_trainer: NDArray, head_dim: int) -> Cause | None:
    """Find a change of the whole tensor that explains the difference."""
    part, advice = part_of(name), "compare the conversion of this tensor on both sides"
    for text, change in _reorderings(name, head_dim).items():
        if is_close(of_engine, change(of_trainer), 1e-4) or is_close(change(of_engine), of_trainer, 1e-4):
            return Cause(part, f"{name}: {text}", advice)
    for side, tensor in (("engine", of_engine), ("trainer", of_trainer)):
        if not tensor.any():
            return Cause(part, f"{name} is zero in the {side}", f"let the {side} load it")
    if (factor := ratio(of_engine, of_trainer, 1e-5)) is not None:
        return Cause(part, f"the engine's {name} is the trainer's times {factor:.6g}", advice)
    if _is_permutation(of_engine, of_trainer, head_dim):
        return Cause("order of heads", f"{name} has the same heads in another order", "compare the grouping of heads")
    return None


def _exchanged(name: str, engine: Weights, trainer: Weights) -> Cause | None:
    """Find out whether the engine's tensor equals a trainer tensor of another name, or only one side ties the output layer."""
    same = [
        other
        for other, w in trainer.items()
        if other != name and w.shape == engine[name].shape and is_equal(engine[name], w)
    ]
    if not same:
        embedding = "model.embed_tokens.weight"
        if name == "lm_head.weight" and embedding in engine and is_equal(trainer[name], engine[embedding]):
            text = (
                "the trainer uses its embedding as the output layer (tied), but the engine has a separate output layer"
            )
            return Cause("tied output layer", text, "compare tie_word_embeddings in config.json")
        return None
    other = same[0]
    if name == "lm_head.weight":
        text = "the engine uses its embedding as the output layer (tied), but the trainer has a separate output layer"
        return Cause("tied output layer", text, "compare tie_word_embeddings in config.json")
    text = f"the engine's {name} is the trainer's {other}"
    if ".experts." in name and name.split(".")[-2] == other.split(".")[-2]:
        matrices = [n for n in ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3") if f".{n}." in name]
        return Cause(
            f"order of the experts ({', '.join(matrices)})", text, "compare the assignment of experts to ranks"
        )
    if {name.split(".")[-2], other.split(".")[-2]} in ({"gate_proj", "up_proj"}, {"w1", "w3"}):
        return Cause("MLP gate and up", f"{text}: gate and up are swapped", "compare the order in the fused matrix")
    return Cause(part_of(name), text, "compare the conversion of this tensor on both sides")


def _reorderings(name: str, head_dim: int) -> dict[str, Callable[[NDArray], NDArray]]:
    """Return a dict: description of a change -> function that changes a whole tensor in this way."""
    changes: dict[str, Callable[[NDArray], NDArray]] = {
        "the rows are shifted by one": lambda w: np.roll(w, 1, axis=0),
        "the two sides have opposite signs": lambda w: -w,
    }
    if "norm" in name:
        changes["one side stores the weight minus 1"] = lambda w: w + 1
    if any(part in name for part in ("q_proj", "k_proj")):
        changes["the rows of each head have the order of another RoPE layout"] = lambda w: _interleaved(w, head_dim)
    if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
        changes["the heads are in the opposite order"] = lambda w: _head_blocks(w, head_dim)[::-1].reshape(w.shape)
    return changes


def _head_blocks(weight: NDArray, head_dim: int) -> NDArray:
    """Return the rows of a weight as heads [heads, head_dim, ...], or as one head if head_dim does not divide their number."""
    return weight.reshape(-1, head_dim, *weight.shape[1:]) if len(weight) % head_dim == 0 else weight[None]


def _interleaved(weight: NDArray, head_dim: int) -> NDArray:
    """Return the weight with the rows of each head in the order 0, d/2, 1, d/2 + 1, ... (d: head_dim)."""
    heads = _head_blocks(weight, head_dim)
    halves = heads.reshape(len(heads), 2, -1, *heads.shape[2:])
    return np.swapaxes(halves, 1, 2).reshape(weight.shape)


def _is_permutation(first: NDArray, second: NDArray, head_dim: int) -> bool:
    """Return whether both tensors seem to have the same blocks of `head_dim` rows. Only the sums of the blocks are compared."""
    heads = [_head_blocks(w, head_dim) for w in (first, second)]
    if not 1 < len(heads[0]) <= 512:
        return False
    first_key, second_key = (np.sort(blocks.reshape(len(blocks), -1).sum(axis=1)) for blocks in heads)
    return is_close(first_key, second_key, 1e-4)


# Part of a tensor's name -> part of the model
_MODEL_PART_BY_NAME_PART = {
    "input_layernorm": "attention norm",
    "post_attention_layernorm": "MLP norm",
    "q_norm": "q norm",
    "k_norm": "k norm",
    "o_proj": "attention output projection",
    "embed_tokens": "embedding",
    "lm_head": "output layer",
    "e_score_correction_bias": "router: correction bias",
    "shared_experts": "shared experts",
    ".experts.": "experts",
    "gate.weight": "router",
    "model.norm": "final norm",
    "gate_proj": "MLP gate and up",
    "up_proj": "MLP gate and up",
    "down_proj": "MLP down projection",
}


def part_of(name: str) -> str:
    """Return the part of the model to which a Hugging Face tensor belongs."""
    if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias")):
        return "attention bias"
    return next((part for key, part in _MODEL_PART_BY_NAME_PART.items() if key in name), "attention projections")
