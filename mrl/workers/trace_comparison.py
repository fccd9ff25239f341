"""Stores traces of one optimizer step (loss, outputs, gradients, weights, sketches), and compares the traces of two layouts.

`mrl certify`, `mrl replay` and the parity tests use this module. A trace may contain activation sketches. A sketch represents
the hidden state of one token by K + 1 numbers instead of H: the norm of the state, and its products with K random vectors. The
vectors are the same for all tokens, ranks and layouts. For the difference d of two hidden states, the mean square of the K
products is about |d|^2 (Johnson and Lindenstrauss 1984). So the distance of two hidden states can be estimated from their
sketches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from mrl.core.types import TokenBlock
from parallel.durable_files import apply_umask

Tensors = Mapping[str, NDArray]
Outputs = Mapping[int, NDArray]  # row of a TokenBlock -> [number of its sampled tokens]

NUM_PROJECTIONS = 8  # K, the number of random vectors
EMBEDDING, FINAL_NORM = 0, 10**6  # depths of these modules; the depth of layer n is n, counted from 1
# Values of ParityDifference.name for outputs: log-probabilities of a policy, or values of a critic
OUTPUTS = "log-probabilities or values"
OUTPUTS_AFTER_STEP = "log-probabilities or values after the step"


class TensorFile(Mapping):
    """Name -> tensor of a safetensors file. Each access reads one tensor from the file.

    The names keep the order in which they are given. The file itself sorts them.
    """

    def __init__(self, path: str | Path, names: Iterable[str]) -> None:
        self.path = str(path)
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> NDArray:
        if name not in self._names:
            raise KeyError(name)
        with safe_open(self.path, "numpy") as file:
            return file.get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class ActivationSketch:
    """Sketches of the hidden states of n tokens at one depth of the model, see the docstring of the module."""

    depth: int  # EMBEDDING, index of a layer from 1, or FINAL_NORM
    tokens: NDArray[np.int64]  # [n] index of each token in the block
    values: NDArray[np.float32]  # [n, 1 + K] column 0: norm; columns 1 to K: products

    @property
    def name(self) -> str:
        """Name of the module that computed the hidden states. Layers are counted from 0, as in Hugging Face names."""
        return {EMBEDDING: "embedding", FINAL_NORM: "final norm"}.get(self.depth, f"layer {self.depth - 1}")


def merge_sketches(sketches: Iterable[ActivationSketch]) -> tuple[ActivationSketch, ...]:
    """Merge all sketches of each depth into one. Returns one sketch for each depth, in the order of the forward pass."""
    by_depth: dict[int, list[ActivationSketch]] = {}
    for sketch in sketches:
        by_depth.setdefault(sketch.depth, []).append(sketch)
    return tuple(
        ActivationSketch(depth, np.concatenate([s.tokens for s in parts]), np.concatenate([s.values for s in parts]))
        for depth, parts in sorted(by_depth.items())
    )


@dataclass(frozen=True)
class StepTrace:
    """Trace of one optimizer step on one rank. `StepTrace.merge` merges the traces of all ranks."""

    loss: float = 0.0
    grad_norm: float = 0.0
    # row of the TokenBlock -> log-probabilities (policy) or values (critic) of the sampled tokens of the row
    outputs: dict[int, NDArray] = field(default_factory=dict)
    # Only rank 0 has gradients, weights and updates: name of a Hugging Face tensor -> array.
    gradients: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)  # weights after the step
    updates: Tensors = field(default_factory=dict)  # weights after the step minus weights before it
    outputs_after_step: dict[int, NDArray] = field(default_factory=dict)  # like `outputs`, but with the new weights
    sketches: tuple[ActivationSketch, ...] = ()  # sketches of the hidden states on this rank

    @classmethod
    def merge(cls, traces: Sequence["StepTrace"]) -> "StepTrace":
        """Merge the traces of all ranks into the trace of the whole step. The first trace is the trace of rank 0."""
        outputs = {row: values for trace in traces for row, values in trace.outputs.items()}
        outputs_after_step = {row: values for trace in traces for row, values in trace.outputs_after_step.items()}
        sketches = merge_sketches(sketch for trace in traces for sketch in trace.sketches)
        loss = sum(trace.loss for trace in traces)
        return replace(traces[0], loss=loss, outputs=outputs, outputs_after_step=outputs_after_step, sketches=sketches)

    def store(self, folder: str | Path) -> "StepTrace":
        """Write the tensors to files in `folder`, and return the trace with a TensorFile in place of each dict of tensors.

        The returned trace is small, so it can be sent to another process.
        """
        tensors = [name for name in ("gradients", "weights", "updates") if getattr(self, name)]
        files = {}
        for name in tensors:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder) / f"{name}.safetensors"
            arrays = dict(getattr(self, name))
            save_file(arrays, path)
            apply_umask(path)
            files[name] = TensorFile(path, arrays)
        return replace(self, **files)


@dataclass(frozen=True)
class Tolerances:
    """Largest differences that a step under a layout may have from the same step in one process."""

    # Absolute difference of log-probabilities (in nats) or values. After the optimizer step, it may be 5 times as large.
    outputs: float
    scalars: float  # relative difference of the loss, and of the gradient norm
    gradients: float  # difference of two elements, relative to the largest element of the tensor
    weights: float  # difference of two elements, relative to the largest element of the tensor
    # Difference of two elements, relative to the largest element of the tensor. This tolerance is larger than `weights`, because
    # Adam normalizes gradients and thereby amplifies their round-off.
    updates: float
    layers: float  # distance of two hidden states of a token, relative to the norm of the reference's state


TOLERANCES = {
    # Round-off depends on the instructions of the CPU: the same correct layout differs up to twice as much with AVX-512 as with
    # AVX2, or the other way round. So these tolerances are larger than the differences on one CPU.
    "float32": Tolerances(outputs=2e-5, scalars=2e-5, gradients=5e-5, weights=2e-5, updates=5e-2, layers=1e-5),
    # A relative round-off of 2**-8 propagates through all layers, and sometimes routes a token to another expert. These
    # tolerances are approximately as large as the differences between a bfloat16 step and a float32 step in one process.
    "bfloat16": Tolerances(outputs=0.3, scalars=0.1, gradients=0.4, weights=2e-3, updates=float("inf"), layers=0.1),
}


@dataclass(frozen=True)
class ParityDifference:
    """Difference of two traces in one quantity, such as one tensor. It is one line of a parity report."""

    name: str  # name of the quantity
    absolute: float  # largest absolute difference of two elements
    # `absolute`, divided by the largest absolute value in the reference. If the reference is 0 everywhere: 0 if `absolute` is 0,
    # and otherwise 1.
    relative: float
    tolerance: float  # limit of `absolute` for log-probabilities and values, limit of `relative` for everything else

    @property
    def within(self) -> bool:
        """Whether the difference is within its tolerance."""
        is_output = self.name in (OUTPUTS, OUTPUTS_AFTER_STEP)
        return (self.absolute if is_output else self.relative) <= self.tolerance


def compare_traces(
    reference: StepTrace, other: StepTrace, tolerances: Tolerances = TOLERANCES["float32"]
) -> list[ParityDifference]:
    """Compare whole steps, in the order of computation.

    If only one trace has a tensor or the outputs of a row, the difference is infinite.
    """
    return [
        *compare_gradients(reference, other, tolerances),
        *_compare_tensors("weight", reference.weights, other.weights, tolerances.weights),
        *_compare_tensors("update", reference.updates, other.updates, tolerances.updates),
        _compare_outputs(
            OUTPUTS_AFTER_STEP, reference.outputs_after_step, other.outputs_after_step, 5 * tolerances.outputs
        ),
    ]


def compare_gradients(reference: StepTrace, other: StepTrace, tolerances: Tolerances) -> list[ParityDifference]:
    """Compare everything that precedes the optimizer step, in the same way as `compare_traces`."""
    return [
        _compare_outputs(OUTPUTS, reference.outputs, other.outputs, tolerances.outputs),
        _difference("loss", np.array([reference.loss]), np.array([other.loss]), tolerances.scalars),
        _difference("gradient norm", np.array([reference.grad_norm]), np.array([other.grad_norm]), tolerances.scalars),
        *_compare_tensors("gradient", reference.gradients, other.gradients, tolerances.gradients),
    ]


def _compare_tensors(kind: str, reference: Tensors, other: Tensors, tolerance: float) -> Iterator[ParityDifference]:
    missing = np.empty(0)
    for name in dict.fromkeys([*reference, *other]):
        yield _difference(f"{kind} {name}", reference.get(name, missing), other.get(name, missing), tolerance)


def _compare_outputs(name: str, reference: Outputs, other: Outputs, tolerance: float) -> ParityDifference:
    if reference.keys() != other.keys():
        return ParityDifference(name, float("inf"), float("inf"), tolerance)
    first, second = (np.concatenate([np.empty(0), *(rows[row] for row in reference)]) for rows in (reference, other))
    return _difference(name, first, second, tolerance)


def _difference(name: str, reference: NDArray, other: NDArray, tolerance: float) -> ParityDifference:
    if reference.shape != other.shape or not np.isfinite(other).all():
        return ParityDifference(name, float("inf"), float("inf"), tolerance)
    absolute = float(np.abs(reference.astype(np.float64) - other).max(initial=0.0))
    scale = float(np.abs(reference).max(initial=0.0))
    return ParityDifference(name, absolute, absolute / scale if scale else float(absolute > 0), tolerance)


@dataclass(frozen=True)
class LayerDifference:
    """Difference of two layouts in the hidden states at one depth, or in the log-probabilities of the tokens."""

    name: str  # name of the module, or of the output
    # Largest difference over all tokens. For hidden states, it is |other - reference| / |reference|. For log-probabilities, it is
    # the absolute difference in nats.
    largest: float
    token: int  # token with the largest difference, as its index in the block; -1: no token was compared
    compared: int  # number of tokens that both layouts computed
    nonfinite: int  # first token whose values are not finite under the examined layout; -1: all are finite
    reference_nonfinite: int  # first token whose values are not finite under the reference layout; -1: all are finite
    tolerance: float  # limit of `largest`

    @property
    def within(self) -> bool:
        """Whether the difference is within its tolerance."""
        return self.largest <= self.tolerance

    @property
    def finite(self) -> bool:
        """Whether all values are finite under both layouts."""
        return self.nonfinite < 0 and self.reference_nonfinite < 0


def compare_sketches(
    reference: Sequence[ActivationSketch], other: Sequence[ActivationSketch], tolerance: float
) -> list[LayerDifference]:
    """Compare the sketches of two layouts at each depth. If only one layout has a depth, the difference is infinite."""
    no_tokens = np.empty(0, np.int64), np.empty((0, 1 + NUM_PROJECTIONS), np.float32)
    by_depth = [{sketch.depth: sketch for sketch in side} for side in (reference, other)]
    differences = []
    for depth in sorted(by_depth[0] | by_depth[1]):
        expected, actual = (side.get(depth, ActivationSketch(depth, *no_tokens)) for side in by_depth)
        differences.append(_compare_sketch(expected, actual, tolerance))
    return differences


def _compare_sketch(reference: ActivationSketch, other: ActivationSketch, tolerance: float) -> LayerDifference:
    tokens, reference_rows, other_rows = np.intersect1d(reference.tokens, other.tokens, return_indices=True)
    expected = reference.values[reference_rows].astype(np.float64)
    actual = other.values[other_rows].astype(np.float64)
    distance = np.sqrt(np.square(actual[:, 1:] - expected[:, 1:]).mean(axis=1))
    relative = distance / np.maximum(expected[:, 0], np.finfo(np.float32).tiny)
    nonfinite, reference_nonfinite = (first_nonfinite(s.tokens, s.values) for s in (other, reference))
    return layer_difference(reference.name, tokens, relative, (nonfinite, reference_nonfinite), tolerance)


def layer_difference(
    name: str, tokens: NDArray, differences: NDArray, nonfinite: tuple[int, int], tolerance: float
) -> LayerDifference:
    """Summarize the differences [n] of `tokens` [n]. `largest` is infinite if n is 0 or a difference is not finite."""
    sizes = np.where(np.isfinite(differences), differences, np.inf)
    index = int(sizes.argmax()) if len(sizes) else -1
    largest, token = (float(sizes[index]), int(tokens[index])) if len(sizes) else (float("inf"), -1)
    return LayerDifference(name, largest, token, len(tokens), *nonfinite, tolerance)


def first_nonfinite(tokens: NDArray, values: NDArray) -> int:
    """Return the smallest of `tokens` [n] whose row of `values` [n, ...] has a value that is not finite; -1 if there is none."""
    wrong = tokens[~np.isfinite(values.reshape(len(tokens), -1)).all(axis=1)] if len(tokens) else tokens
    return int(wrong.min()) if len(wrong) else -1


def row_and_position(block: TokenBlock, token: int) -> tuple[int, int]:
    """Return (row of the block, position in this row) of the token with index `token` in the block."""
    row = int(np.searchsorted(block.cu_seqlens, token, side="right")) - 1
    return row, token - int(block.cu_seqlens[row])
