"""One step of a model, looked at from all sides: what `mrl certify` and the parity tests compare between layouts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from mrl.workers.sketch import Sketch, joined

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


@dataclass(frozen=True)
class Trace:
    """What one rank knows of one step; `Trace.joined` puts the ranks' together."""

    loss: float = 0.0
    grad_norm: float = 0.0
    outputs: dict[int, NDArray] = field(
        default_factory=dict
    )  # row of the block -> [R of the row] log-probabilities or values
    gradients: Tensors = field(default_factory=dict)  # by Hugging Face name, on rank 0
    weights: Tensors = field(default_factory=dict)  # after the step, on rank 0
    updates: Tensors = field(default_factory=dict)  # what the step added to them, on rank 0
    after: dict[int, NDArray] = field(default_factory=dict)  # outputs under the updated weights, from every replica
    sketches: tuple[Sketch, ...] = ()  # of the hidden states that passed on this rank

    @classmethod
    def joined(cls, traces: Sequence["Trace"]) -> "Trace":
        """The step as all ranks together saw it."""
        outputs, after = ({k: v for t in traces for k, v in getattr(t, name).items()} for name in ("outputs", "after"))
        sketches = joined(sketch for trace in traces for sketch in trace.sketches)
        loss = sum(trace.loss for trace in traces)
        return replace(traces[0], loss=loss, outputs=outputs, after=after, sketches=sketches)

    def stored(self, folder: str | Path) -> "Trace":
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
class Difference:
    """One line of the certificate."""

    name: str
    absolute: float  # largest difference of two elements
    relative: float  # the same, over the largest element of the reference
    tolerance: float  # of `relative` for numbers and tensors, of `absolute` for log-probabilities and values

    @property
    def within(self) -> bool:
        return (self.absolute if self.name in (OUTPUTS, AFTER) else self.relative) <= self.tolerance


def compare(reference: Trace, other: Trace, within: Tolerances = TOLERANCES["float32"]) -> list[Difference]:
    """Differences of everything, in the order in which a step makes it; a row or tensor that is missing is infinite."""
    return [
        *compare_gradients(reference, other, within),
        *_of_tensors("weight", reference.weights, other.weights, within.weights),
        *_of_tensors("update", reference.updates, other.updates, within.updates),
        _difference(AFTER, _joined(reference.after), _joined(other.after), 5 * within.outputs),
    ]


def compare_gradients(reference: Trace, other: Trace, within: Tolerances) -> list[Difference]:
    """The same of what there is before weights change."""
    return [
        _difference(OUTPUTS, _joined(reference.outputs), _joined(other.outputs), within.outputs),
        _difference("loss", np.array([reference.loss]), np.array([other.loss]), within.numbers),
        _difference("gradient norm", np.array([reference.grad_norm]), np.array([other.grad_norm]), within.numbers),
        *_of_tensors("gradient", reference.gradients, other.gradients, within.gradients),
    ]


def _of_tensors(what: str, mine: Tensors, theirs: Tensors, tolerance: float) -> Iterator[Difference]:
    missing = np.empty(0)
    for name in dict.fromkeys([*mine, *theirs]):
        yield _difference(f"{what} {name}", mine.get(name, missing), theirs.get(name, missing), tolerance)


def _joined(rows: Mapping[int, NDArray]) -> NDArray:
    return np.concatenate([np.empty(0), *(rows[row] for row in sorted(rows))])


def _difference(name: str, reference: NDArray, other: NDArray, tolerance: float) -> Difference:
    if reference.shape != other.shape or not np.isfinite(other).all():
        return Difference(name, float("inf"), float("inf"), tolerance)
    absolute = float(np.abs(reference.astype(np.float64) - other).max(initial=0.0))
    scale = float(np.abs(reference).max(initial=0.0))
    return Difference(name, absolute, absolute / scale if scale else float(absolute > 0), tolerance)
