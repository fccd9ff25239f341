"""Traces of one optimizer step, and their comparison between layouts; for `mrl certify`, `mrl replay` and the parity tests.

An activation sketch represents the hidden state of a token. It consists of the state's norm and its products with K random
vectors, which are the same everywhere. For the difference d of two states, the mean square of the products is about |d|^2
(Johnson and Lindenstrauss 1984). So sketches show the distance of two states, with K + 1 numbers instead of H.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from mrl.core.types import TokenBlock

Tensors = Mapping[str, NDArray]

NUM_PROJECTIONS = 8  # K
EMBEDDING, FINAL_NORM = 0, 10**6  # depths; a layer's depth is its number, from 1
OUTPUTS = "log-probabilities or values"
OUTPUTS_AFTER_STEP = "the same after the step"


class TensorFile(Mapping):
    """Tensors of a safetensors file by name, read one at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        with safe_open(self.path, "numpy") as file:
            self._names = tuple(file.keys())

    def __getitem__(self, name: str) -> NDArray:
        with safe_open(self.path, "numpy") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class ActivationSketch:
    """Sketches of the hidden states of n tokens at one depth of the model."""

    depth: int
    tokens: NDArray[np.int64]  # [n] indices in the block
    values: NDArray[np.float32]  # [n, 1 + K] norm, products

    @property
    def name(self) -> str:
        """The part of the model that computed the states; layers are counted from 0, as in Hugging Face names."""
        return {EMBEDDING: "embedding", FINAL_NORM: "final norm"}.get(self.depth, f"layer {self.depth - 1}")


def merge_sketches(sketches: Iterable[ActivationSketch]) -> tuple[ActivationSketch, ...]:
    """Merge all sketches of a depth into one; return them in the order of the forward pass."""
    by_depth: dict[int, list[ActivationSketch]] = {}
    for sketch in sketches:
        by_depth.setdefault(sketch.depth, []).append(sketch)
    return tuple(
        ActivationSketch(depth, np.concatenate([s.tokens for s in parts]), np.concatenate([s.values for s in parts]))
        for depth, parts in sorted(by_depth.items())
    )


@dataclass(frozen=True)
class StepTrace:
    """Trace of a step on one rank; `StepTrace.merge` merges the traces of all ranks."""

    loss: float = 0.0
    grad_norm: float = 0.0
    # Row of the block -> [R of the row] log-probabilities or values
    outputs: dict[int, NDArray] = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)  # by Hugging Face name, on rank 0
    weights: Tensors = field(default_factory=dict)  # after the step, on rank 0
    updates: Tensors = field(default_factory=dict)  # change of the weights in the step, on rank 0
    after: dict[int, NDArray] = field(default_factory=dict)  # outputs under the updated weights, from every replica
    sketches: tuple[ActivationSketch, ...] = ()  # of the hidden states on this rank

    @classmethod
    def merge(cls, traces: Sequence["StepTrace"]) -> "StepTrace":
        """Merge the traces of all ranks, rank 0's first, into the trace of the whole step."""
        outputs, after = ({k: v for t in traces for k, v in getattr(t, name).items()} for name in ("outputs", "after"))
        sketches = merge_sketches(sketch for trace in traces for sketch in trace.sketches)
        loss = sum(trace.loss for trace in traces)
        return replace(traces[0], loss=loss, outputs=outputs, after=after, sketches=sketches)

    def stored(self, folder: str | Path) -> "StepTrace":
        """Write rank 0's tensors to files in `folder`; return the trace with readers of those files, for another process."""
        tensors = [name for name in ("gradients", "weights", "updates") if getattr(self, name)]
        files = {}
        for name in tensors:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder) / f"{name}.safetensors"
            save_file(dict(getattr(self, name)), path)
            files[name] = TensorFile(path)
        return replace(self, **files)


@dataclass(frozen=True)
class Tolerances:
    """Largest differences that a layout may have from one process."""

    outputs: float  # largest absolute difference, in nats
    numbers: float  # relative difference of loss and gradient norm
    gradients: float  # relative to the largest element of each tensor
    weights: float  # relative to the largest element of each tensor
    updates: float  # as weights; large, because Adam normalises gradients and thereby amplifies their round-off
    layers: float  # distance of a token's hidden states, relative to their norm


TOLERANCES = {
    "float32": Tolerances(1e-5, 2e-5, 2e-5, 2e-5, 5e-2, 1e-5),
    # Round-off of 2**-8 propagates through every layer, and sometimes sends a token to another expert. bfloat16 and float32 in
    # one process differ by about as much.
    "bfloat16": Tolerances(0.3, 0.1, 0.4, 2e-3, float("inf"), 0.1),
}


@dataclass(frozen=True)
class ParityDifference:
    """One line of a parity report: the difference of two traces in one quantity."""

    name: str
    absolute: float  # largest difference of two elements
    relative: float  # the same, divided by the largest element of the reference
    tolerance: float  # of `absolute` for log-probabilities and values, of `relative` for everything else

    @property
    def within(self) -> bool:
        is_output = self.name in (OUTPUTS, OUTPUTS_AFTER_STEP)
        return (self.absolute if is_output else self.relative) <= self.tolerance


def compare_traces(
    reference: StepTrace, other: StepTrace, tolerances: Tolerances = TOLERANCES["float32"]
) -> list[ParityDifference]:
    """Compare whole steps, in the order of computation. The difference of a missing row or tensor is infinite."""
    return [
        *compare_gradients(reference, other, tolerances),
        *_compare_tensors("weight", reference.weights, other.weights, tolerances.weights),
        *_compare_tensors("update", reference.updates, other.updates, tolerances.updates),
        _difference(OUTPUTS_AFTER_STEP, _flat(reference.after), _flat(other.after), 5 * tolerances.outputs),
    ]


def compare_gradients(reference: StepTrace, other: StepTrace, tolerances: Tolerances) -> list[ParityDifference]:
    """Compare everything that precedes the optimizer step, as `compare_traces`."""
    return [
        _difference(OUTPUTS, _flat(reference.outputs), _flat(other.outputs), tolerances.outputs),
        _difference("loss", np.array([reference.loss]), np.array([other.loss]), tolerances.numbers),
        _difference("gradient norm", np.array([reference.grad_norm]), np.array([other.grad_norm]), tolerances.numbers),
        *_compare_tensors("gradient", reference.gradients, other.gradients, tolerances.gradients),
    ]


def _compare_tensors(kind: str, reference: Tensors, other: Tensors, tolerance: float) -> Iterator[ParityDifference]:
    missing = np.empty(0)
    for name in dict.fromkeys([*reference, *other]):
        yield _difference(f"{kind} {name}", reference.get(name, missing), other.get(name, missing), tolerance)


def _flat(rows: Mapping[int, NDArray]) -> NDArray:
    return np.concatenate([np.empty(0), *(rows[row] for row in sorted(rows))])


def _difference(name: str, reference: NDArray, other: NDArray, tolerance: float) -> ParityDifference:
    if reference.shape != other.shape or not np.isfinite(other).all():
        return ParityDifference(name, float("inf"), float("inf"), tolerance)
    absolute = float(np.abs(reference.astype(np.float64) - other).max(initial=0.0))
    scale = float(np.abs(reference).max(initial=0.0))
    return ParityDifference(name, absolute, absolute / scale if scale else float(absolute > 0), tolerance)


@dataclass(frozen=True)
class LayerDifference:
    """Difference of two layouts in the hidden states at one depth, or in the outputs."""

    name: str
    largest: (
        float  # largest distance of a token's states, relative to the reference's norm; of log-probabilities: in nats
    )
    token: int  # index in the block of the token with this distance; -1: none
    compared: int  # number of tokens that both layouts computed
    nonfinite: int  # first token that is not finite under the examined layout; -1: none
    reference_nonfinite: int  # the same under the reference
    tolerance: float

    @property
    def within(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def finite(self) -> bool:
        return self.nonfinite < 0 and self.reference_nonfinite < 0


def compare_sketches(
    reference: Sequence[ActivationSketch], other: Sequence[ActivationSketch], tolerance: float
) -> list[LayerDifference]:
    """Compare the sketches at each depth that either side has; the difference is infinite if one side lacks the depth."""
    no_tokens = np.empty(0, np.int64), np.empty((0, 1 + NUM_PROJECTIONS), np.float32)
    by_depth = [{sketch.depth: sketch for sketch in side} for side in (reference, other)]
    differences = []
    for depth in sorted(by_depth[0] | by_depth[1]):
        mine, theirs = (side.get(depth, ActivationSketch(depth, *no_tokens)) for side in by_depth)
        differences.append(_compare_sketch(mine, theirs, tolerance))
    return differences


def _compare_sketch(reference: ActivationSketch, other: ActivationSketch, tolerance: float) -> LayerDifference:
    tokens, mine, theirs = np.intersect1d(reference.tokens, other.tokens, return_indices=True)
    expected, actual = reference.values[mine].astype(np.float64), other.values[theirs].astype(np.float64)
    distance = np.sqrt(np.square(actual[:, 1:] - expected[:, 1:]).mean(axis=1))
    relative = distance / np.maximum(expected[:, 0], np.finfo(np.float32).tiny)
    nonfinite, reference_nonfinite = (first_nonfinite(s.tokens, s.values) for s in (other, reference))
    return layer_difference(reference.name, tokens, relative, (nonfinite, reference_nonfinite), tolerance)


def layer_difference(
    name: str, tokens: NDArray, differences: NDArray, nonfinite: tuple[int, int], tolerance: float
) -> LayerDifference:
    """Summarise `differences` [n] of `tokens` [n]. The largest is infinite if there are none, or if one is NaN."""
    sizes = np.where(np.isfinite(differences), differences, np.inf)
    index = int(sizes.argmax()) if len(sizes) else -1
    largest, token = (float(sizes[index]), int(tokens[index])) if len(sizes) else (float("inf"), -1)
    return LayerDifference(name, largest, token, len(tokens), *nonfinite, tolerance)


def first_nonfinite(tokens: NDArray, values: NDArray) -> int:
    """Return the first token with a value that is not finite, -1 if there is none; `values` [n, ...]."""
    wrong = tokens[~np.isfinite(values.reshape(len(tokens), -1)).all(axis=1)] if len(tokens) else tokens
    return int(wrong.min()) if len(wrong) else -1


def row_and_position(block: TokenBlock, token: int) -> tuple[int, int]:
    """Return (row, position in the row) of a token of the block."""
    row = int(np.searchsorted(block.cu_seqlens, token, side="right")) - 1
    return row, token - int(block.cu_seqlens[row])
