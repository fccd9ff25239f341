"""Finds out, from the tensors of both sides, how RoPE or attention differs between an engine and the trainer.

The functions fit a rotation or a scale to the inputs and outputs of each side, and compare the fits. In shapes, S is the number
of tokens, and d is the number of channels per head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrl.diagnostics.engine_difference import TINY, Cause, PointEvidence, Side, in_layer

# Rotary embedding.


@dataclass(frozen=True)
class Rotation:
    """Properties of a RoPE, fitted to its inputs and outputs."""

    layout: str  # key of _LAYOUTS: the components that form a pair
    frequencies: NDArray[np.float64]  # [d/2] radians per position
    amplitude: float  # factor of the cosines and sines
    offset: float  # position of the first token

    @property
    def base(self) -> float | None:
        """The base if the frequencies are those of plain RoPE, else None."""
        pairs = np.arange(1, len(self.frequencies))
        usable = pairs[self.frequencies[1:] > 1e-4]
        if not len(usable):
            return None
        logs = -np.log(self.frequencies[usable]) * len(self.frequencies) / usable
        return float(np.exp(np.median(logs))) if np.ptp(logs) < 0.02 * max(1.0, np.median(logs)) else None


# Layout -> function that returns the pairs [..., d/2] as complex numbers. The name of a layout says which components form pair i.
_LAYOUTS: dict[str, Callable[[NDArray], NDArray]] = {
    "pairs (i, i + d/2)": lambda x: x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :],
    "pairs (2i, 2i + 1)": lambda x: x[..., 0::2] + 1j * x[..., 1::2],
}


def fit_rotation(before: NDArray, after: NDArray, positions: NDArray, tolerance: float) -> Rotation | None:
    """Return the rotation that maps `before` [S, heads, d] to `after`, or None if there is no such rotation of pairs.

    `before` and `after` contain only the d components of a head that RoPE rotates. `positions` [S]: position of each token in its
    row, which is a sequence of the batch.
    """
    for layout, pairs in _LAYOUTS.items():
        source, target = pairs(before), pairs(after)
        # [S, d/2] complex factor that turns each pair of `before` into the pair of `after`
        turn = (source.conj() * target).sum(1) / np.maximum(np.square(np.abs(source)).sum(1), TINY)
        difference = np.abs(turn[:, None] * source - target)
        if difference.max() <= tolerance * np.abs(target).max():
            zero = turn[positions == 0].mean(0)
            one = turn[positions == 1].mean(0) if (positions == 1).any() else zero
            frequencies = np.angle(one / np.where(np.abs(zero) > 0, zero, 1))
            offset = float(np.angle(zero[0]) / frequencies[0]) if frequencies[0] else 0.0
            return Rotation(layout, np.abs(frequencies), float(np.abs(turn).mean()), offset)
    return None


def rope_cause(evidence: PointEvidence) -> Cause | None:
    """Find out whether RoPE differs between the sides in its layout, amplitude, base, scaling or first position.

    `evidence.point`, the point of the forward pass at which the sides differ, is rotated_query or rotated_key. Returns None if
    a side has not recorded the tensor before RoPE, or if no difference is found.
    """
    name = evidence.point.removeprefix("rotated_")
    if not (evidence.both_sides_have(f"normed_{name}") or evidence.both_sides_have(name)):
        return None
    # number of components of a head, and number of those that RoPE rotates
    d, dim = evidence.facts.head_dim, evidence.facts.rope_dim
    found = []
    for side in evidence.sides:
        before, after = evidence.tensor_at(side, f"normed_{name}", name), evidence.tensor_at(side, evidence.point)
        width = dim if evidence.facts.latent_head_sizes else d
        source, target = (each.reshape(len(each), -1, width)[..., :dim] for each in (before, after))
        found.append(fit_rotation(source, target, evidence.positions, evidence.fit_tolerance))
    return _compare_rotations(*found)


def _compare_rotations(engine: Rotation | None, trainer: Rotation | None) -> Cause | None:
    advice = "compare rope_parameters in config.json with the rotary embedding that each side logs"
    if engine is None or trainer is None:
        if engine is trainer:
            return None
        side = "engine" if engine is None else "trainer"
        return Cause("RoPE", f"the {side} does not rotate pairs of components by an angle per position", advice)
    if engine.layout != trainer.layout:
        text = f"the engine rotates the {engine.layout}, the trainer the {trainer.layout}"
        return Cause("RoPE layout", text, "convert the rows of q_proj and k_proj, or set rotary_interleaved")
    if abs(engine.amplitude - trainer.amplitude) > 1e-3 * trainer.amplitude:
        text = (
            f"the engine multiplies cosines and sines by {engine.amplitude:.6g}, the trainer by {trainer.amplitude:.6g}"
        )
        return Cause("RoPE amplitude", text, advice)
    if not np.allclose(engine.frequencies, trainer.frequencies, rtol=1e-2, atol=1e-6):
        bases = [f"base {r.base:.5g}" if r.base else "scaled frequencies" for r in (engine, trainer)]
        text = f"the engine's RoPE has {bases[0]}, the trainer's {bases[1]}"
        return Cause("RoPE base" if engine.base and trainer.base else "RoPE scaling", text, advice)
    if abs(engine.offset - trainer.offset) > 0.1:
        text = f"the engine's first position is {engine.offset:.3g}, the trainer's {trainer.offset:.3g}"
        return Cause("RoPE positions", text, "compare the position ids of both sides")
    return None


# Attention.


def attend(query: NDArray, key: NDArray, value: NDArray, starts: Sequence[int], scale: float, tiled: bool) -> NDArray:
    """Return causal attention [S, heads, size of a value] of rows that begin at `starts`. A row is a sequence of the batch.

    The query is [S, heads, d], the key [S, groups, d] and the value [S, groups, size of a value]. A group is the query heads that
    share a key/value head. If `tiled` is false, these are consecutive heads. If `tiled` is true, query head i uses key/value head
    i mod groups.
    """
    heads, groups = query.shape[1], key.shape[1]
    source = np.arange(heads) % groups if tiled else np.arange(heads) // (heads // groups)
    key, value, out = key[:, source], value[:, source], []
    for start, end in zip(starts, [*starts[1:], len(query)], strict=True):
        scores = np.einsum("qhd,khd->hqk", query[start:end], key[start:end]) * scale
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value[start:end]))
    return np.concatenate(out)


def attention_cause(evidence: PointEvidence) -> Cause | None:
    """Find out whether the sides scale the attention scores differently, or assign query heads to key/value heads differently.

    Returns None if neither is found. If `attend` reproduces the output of only one side, the cause names the other side.
    """
    found = [_fit_attention(evidence, side) for side in evidence.sides]
    fits = [fit for fit in found if fit is not None]
    if len(fits) < len(found):
        wrong = [side.name for side, fit in zip(evidence.sides, found, strict=True) if fit is None]
        text = f"causal attention over the same queries, keys and values does not give the output of the {wrong[0]}"
        return (
            Cause("attention", text, "compare the mask and the attention kernels of both sides")
            if len(wrong) == 1
            else None
        )
    (engine, engine_tiled), (trainer, trainer_tiled) = fits
    if engine_tiled != trainer_tiled:
        texts = ["mod the number of key/value heads" if tiled else "in consecutive groups" for _, tiled in fits]
        text = f"the engine assigns query heads to key/value heads {texts[0]}, the trainer {texts[1]}"
        return Cause("grouping of key/value heads", text, "compare num_key_value_heads and the order of the heads")
    if abs(engine / trainer - 1) > 1e-3:
        # With small scores, the output hardly depends on the scale, so float32 tensors give at most four digits of the scale.
        text = f"the engine multiplies the attention scores by {engine:.4g}, the trainer by {trainer:.4g}"
        return Cause("attention scale", text, "compare the softmax scale: 1 / sqrt(head_dim), or the scale of YaRN")
    return None


def _fit_attention(evidence: PointEvidence, side: Side) -> tuple[float, bool] | None:
    """Return the (scale, tiled) with which `attend` reproduces the attention of one side, or None."""
    query, key, value = _heads(evidence, side)
    out = evidence.tensor_at(side, "attention").reshape(len(query), query.shape[1], -1)
    rows = np.flatnonzero(evidence.positions == 0)
    end = rows[4] if len(rows) > 4 else len(query)  # four rows are enough for the fit, and save time
    query, key, value, out = (each[:end] for each in (query, key, value, out))
    rows = rows[rows < end].tolist()

    for tiled in (False, True) if key.shape[1] < query.shape[1] else (False,):

        def error(log_scale: float, tiled: bool = tiled) -> float:
            return float(np.abs(attend(query, key, value, rows, math.exp(log_scale), tiled) - out).max())

        scale = _minimum(error, -0.5 * math.log(query.shape[-1]))
        if error(scale) <= evidence.fit_tolerance * np.abs(out).max():
            return math.exp(scale), tiled
    return None


def _minimum(error: Callable[[float], float], center: float) -> float:
    """Return the argument with the smallest error: the best of a grid around `center`, refined by golden-section search."""
    grid = center + np.linspace(-3, 3, 25)
    best = int(np.argmin([error(x) for x in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    for _ in range(40):
        left, right = high - 0.618 * (high - low), low + 0.618 * (high - low)
        low, high = (low, right) if error(left) < error(right) else (left, high)
    return (low + high) / 2


def _heads(evidence: PointEvidence, side: Side) -> tuple[NDArray, NDArray, NDArray]:
    """Return query, key and value of one side. Query and key are those after norm and RoPE.

    The shapes are [S, heads, d], [S, kv_heads, d] and [S, kv_heads, size of a value]. With latent attention, each head has its
    own key and value, and d is the size of a key.
    """
    rotated = [evidence.tensor_at(side, f"rotated_{name}") for name in ("query", "key")]
    tokens, d = len(rotated[0]), evidence.facts.head_dim
    if evidence.facts.latent_head_sizes is None:
        value = evidence.tensor_at(side, "value").reshape(tokens, evidence.facts.kv_heads, -1)
        return rotated[0].reshape(tokens, -1, d), rotated[1].reshape(tokens, -1, d), value
    # Latent attention: a key has a part without RoPE and a rotated part, and all heads share the rotated part. For each head,
    # `plain` is the size of the part without RoPE, and `width` the size of the value.
    plain, width = evidence.facts.latent_head_sizes
    rope = evidence.facts.rope_dim
    query = evidence.tensor_at(side, "query").reshape(tokens, -1, plain + rope)[..., :plain]
    up = next(w for name, w in side.weights.items() if "kv_b_proj" in name and in_layer(name, evidence.layer))
    pair = (evidence.tensor_at(side, "key_latent") @ up.T).reshape(tokens, -1, plain + width)
    shared = np.broadcast_to(rotated[1][:, None], (tokens, pair.shape[1], rope))
    rotated_query = rotated[0].reshape(tokens, -1, rope)
    key = np.concatenate([pair[..., :plain], shared], -1)
    return np.concatenate([query, rotated_query], -1), key, pair[..., plain:]
