"""One step of a model, looked at from all sides: what `mrl certify` and the parity tests compare between layouts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from mrl.core.types import TokenBlock

Tensors = Mapping[str, NDArray]


class TensorFile(Mapping):
    """Tensors in a safetensors file by name, read one at a time."""

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


PROJECTIONS = 8  # K
EMBEDDING, NORM = 0, 10**6  # places; a layer's is its number, from 1


@dataclass(frozen=True)
class ActivationSketch:
    """Of n tokens at one place between layers."""

    place: int
    tokens: NDArray[np.int64]  # [n] of the block
    values: NDArray[np.float32]  # [n, 1 + K] length, products

    @property
    def name(self) -> str:
        """The part of the model that made these states; layers are counted from 0, as in Hugging Face names."""
        return {EMBEDDING: "embedding", NORM: "final norm"}.get(self.place, f"layer {self.place - 1}")


def merge_sketches(sketches: Iterable[ActivationSketch]) -> tuple[ActivationSketch, ...]:
    """One for each place, in the order in which a token passes them."""
    parts: dict[int, list[ActivationSketch]] = {}
    for sketch in sketches:
        parts.setdefault(sketch.place, []).append(sketch)
    return tuple(
        ActivationSketch(place, np.concatenate([s.tokens for s in found]), np.concatenate([s.values for s in found]))
        for place, found in sorted(parts.items())
    )


@dataclass(frozen=True)
class StepTrace:
    """What one rank knows of one step; `StepTrace.joined` puts the ranks' together."""

    loss: float = 0.0
    grad_norm: float = 0.0
    outputs: dict[int, NDArray] = field(
        default_factory=dict
    )  # row of the block -> [R of the row] log-probabilities or values
    gradients: Tensors = field(default_factory=dict)  # by Hugging Face name, on rank 0
    weights: Tensors = field(default_factory=dict)  # after the step, on rank 0
    updates: Tensors = field(default_factory=dict)  # what the step added to them, on rank 0
    after: dict[int, NDArray] = field(default_factory=dict)  # outputs under the updated weights, from every replica
    sketches: tuple[ActivationSketch, ...] = ()  # of the hidden states that passed on this rank

    @classmethod
    def joined(cls, traces: Sequence["StepTrace"]) -> "StepTrace":
        """The step as all ranks together saw it."""
        outputs, after = ({k: v for t in traces for k, v in getattr(t, name).items()} for name in ("outputs", "after"))
        sketches = merge_sketches(sketch for trace in traces for sketch in trace.sketches)
        loss = sum(trace.loss for trace in traces)
        return replace(traces[0], loss=loss, outputs=outputs, after=after, sketches=sketches)

    def stored(self, folder: str | Path) -> "StepTrace":
        """The same, with the tensors of rank 0 in files, which another process may read from."""
        tensors = [name for name in ("gradients", "weights", "updates") if getattr(self, name)]
        files = {}
        for name in tensors:
            Path(folder).mkdir(parents=True, exist_ok=True)
            path = Path(folder) / f"{name}.safetensors"
            save_file(dict(getattr(self, name)), path)
            files[name] = TensorFile(path)
        return replace(self, **files)


OUTPUTS = "log-probabilities or values"
AFTER = "the same after the step"


@dataclass(frozen=True)
class Tolerances:
    """How far a layout may be from one process."""

    outputs: float  # largest absolute difference, in nats
    numbers: float  # relative, of loss and gradient norm
    gradients: float  # of the largest element of each tensor
    weights: float  # of the largest element of each tensor
    updates: float  # of the largest element of each update: Adam divides gradients by themselves, round-off and all
    layers: float  # of a token's hidden state, as a share of its length


TOLERANCES = {
    "float32": Tolerances(1e-5, 2e-5, 2e-5, 2e-5, 5e-2, 1e-5),
    # Round-off of 2**-8 goes through every layer, and now and then sends a token to another expert: about as far as
    # bfloat16 is from float32 in one process.
    "bfloat16": Tolerances(0.3, 0.1, 0.4, 2e-3, float("inf"), 0.1),
}


@dataclass(frozen=True)
class ParityDifference:
    """One line of the certificate."""

    name: str
    absolute: float  # largest difference of two elements
    relative: float  # the same, over the largest element of the reference
    tolerance: float  # of `relative` for numbers and tensors, of `absolute` for log-probabilities and values

    @property
    def within(self) -> bool:
        return (self.absolute if self.name in (OUTPUTS, AFTER) else self.relative) <= self.tolerance


def compare(
    reference: StepTrace, other: StepTrace, within: Tolerances = TOLERANCES["float32"]
) -> list[ParityDifference]:
    """Differences of everything, in the order in which a step makes it; a row or tensor that is missing is infinite."""
    return [
        *compare_gradients(reference, other, within),
        *_of_tensors("weight", reference.weights, other.weights, within.weights),
        *_of_tensors("update", reference.updates, other.updates, within.updates),
        _difference(AFTER, _joined(reference.after), _joined(other.after), 5 * within.outputs),
    ]


def compare_gradients(reference: StepTrace, other: StepTrace, within: Tolerances) -> list[ParityDifference]:
    """The same of what there is before weights change."""
    return [
        _difference(OUTPUTS, _joined(reference.outputs), _joined(other.outputs), within.outputs),
        _difference("loss", np.array([reference.loss]), np.array([other.loss]), within.numbers),
        _difference("gradient norm", np.array([reference.grad_norm]), np.array([other.grad_norm]), within.numbers),
        *_of_tensors("gradient", reference.gradients, other.gradients, within.gradients),
    ]


def _of_tensors(what: str, mine: Tensors, theirs: Tensors, tolerance: float) -> Iterator[ParityDifference]:
    missing = np.empty(0)
    for name in dict.fromkeys([*mine, *theirs]):
        yield _difference(f"{what} {name}", mine.get(name, missing), theirs.get(name, missing), tolerance)


def _joined(rows: Mapping[int, NDArray]) -> NDArray:
    return np.concatenate([np.empty(0), *(rows[row] for row in sorted(rows))])


def _difference(name: str, reference: NDArray, other: NDArray, tolerance: float) -> ParityDifference:
    if reference.shape != other.shape or not np.isfinite(other).all():
        return ParityDifference(name, float("inf"), float("inf"), tolerance)
    absolute = float(np.abs(reference.astype(np.float64) - other).max(initial=0.0))
    scale = float(np.abs(reference).max(initial=0.0))
    return ParityDifference(name, absolute, absolute / scale if scale else float(absolute > 0), tolerance)


@dataclass(frozen=True)
class LayerDifference:
    """How far apart two layouts are at one place."""

    name: str
    largest: float  # distance of a token's states over the reference's length; of log-probabilities, in nats
    token: int  # of the block, where that is; -1: nowhere
    compared: int  # tokens that both sides computed
    broken: int  # first token that is not finite under the layout looked at; -1: none
    reference_nonfinite: int  # the same under the reference
    tolerance: float

    @property
    def within(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def finite(self) -> bool:
        return self.broken < 0 and self.reference_nonfinite < 0


def compare_sketches(
    reference: Sequence[ActivationSketch], other: Sequence[ActivationSketch], tolerance: float
) -> list[LayerDifference]:
    """A line for each place that either side has; one that a side lacks is infinitely far."""
    pairs = {sketch.place: sketch for sketch in other}
    nothing = np.empty(0, np.int64), np.empty((0, 1 + PROJECTIONS), np.float32)
    found = []
    for place in sorted({s.place for s in (*reference, *other)}):
        mine = next((s for s in reference if s.place == place), ActivationSketch(place, *nothing))
        found.append(_compare(mine, pairs.get(place, ActivationSketch(place, *nothing)), tolerance))
    return found


def _compare(reference: ActivationSketch, other: ActivationSketch, tolerance: float) -> LayerDifference:
    tokens, mine, theirs = np.intersect1d(reference.tokens, other.tokens, return_indices=True)
    expected, found = reference.values[mine].astype(np.float64), other.values[theirs].astype(np.float64)
    distance = np.sqrt(np.square(found[:, 1:] - expected[:, 1:]).mean(axis=1))
    relative = distance / np.maximum(expected[:, 0], np.finfo(np.float32).tiny)
    broken, reference_nonfinite = (first_nonfinite(s.tokens, s.values) for s in (other, reference))
    return layer_difference(reference.name, tokens, relative, (broken, reference_nonfinite), tolerance)


def layer_difference(
    name: str, tokens: NDArray, differences: NDArray, broken: tuple[int, int], tolerance: float
) -> LayerDifference:
    """`differences` [n] of `tokens` [n]; without any, or where one is not a number, infinity."""
    sizes = np.where(np.isfinite(differences), differences, np.inf)
    where = int(sizes.argmax()) if len(sizes) else -1
    largest, token = (float(sizes[where]), int(tokens[where])) if len(sizes) else (float("inf"), -1)
    return LayerDifference(name, largest, token, len(tokens), *broken, tolerance)


def first_nonfinite(tokens: NDArray, values: NDArray) -> int:
    """The first token with a value that is not finite, -1 if there is none; `values` [n, ...]."""
    wrong = tokens[~np.isfinite(values.reshape(len(tokens), -1)).all(axis=1)] if len(tokens) else tokens
    return int(wrong.min()) if len(wrong) else -1


def row_and_position(block: TokenBlock, token: int) -> tuple[int, int]:
    """(row, position in the row) of a token of the block."""
    row = int(np.searchsorted(block.cu_seqlens, token, side="right")) - 1
    return row, token - int(block.cu_seqlens[row])
