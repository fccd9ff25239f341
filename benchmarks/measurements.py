"""Measurements of the benchmarks: their JSON files, their noise, and their comparison with earlier results."""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

Kind = Literal["count", "ratio", "cpu_s", "wall"]
FLOORS: dict[Kind, float] = {  # smallest noise of a measurement, as a fraction of its value
    "count": 0.0,  # the same input always gives the same number
    "ratio": 0.15,  # both sides of a ratio are measured next to each other, so other work on the machine slows both
    "cpu_s": 0.25,  # other work on the machine slows the memory and the caches
    "wall": 0.5,  # other work on the machine takes the cores
}

MEMORY_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Environment variables of a process whose peak memory is measured.

With the threshold, glibc returns each freed block of at least 1 MiB to the system. By default, glibc raises the threshold when
blocks are freed, to at most 32 MiB. The peak then contains freed blocks, too, and their number differs from one run to the next.
"""


@dataclass(frozen=True)
class Measurement:
    """One number of a benchmark, with its noise."""

    name: str
    value: float
    unit: str
    kind: Kind
    better: Literal["lower", "higher"] = "lower"
    spread: float = 0.0  # interquartile range of the repeats, or distance between two runs; as a fraction of the value

    def __post_init__(self) -> None:
        assert self.kind in FLOORS, f"{self.name}: {self.kind!r} is none of the kinds {list(FLOORS)}"
        assert math.isfinite(self.value), f"{self.name}: {self.value} is not finite"
        assert self.kind == "count" or self.value > 0, f"{self.name}: {self.value} cannot be compared as a ratio"

    @property
    def noise(self) -> float:
        """Fraction of the value by which two measurements of the same code may differ."""
        return max(self.spread, FLOORS[self.kind])


def of_repeats(
    name: str, values: Sequence[float], unit: str, kind: Kind, better: Literal["lower", "higher"] = "lower"
) -> Measurement:
    """Return the median of repeats, with their spread."""
    middle = statistics.median(values)
    low, high = np.percentile(values, (25, 75))
    spread = float(high - low) / abs(middle) if middle else 0.0
    return Measurement(name, float(middle), unit, kind, better, spread)


def mean_of(first: Measurement, second: Measurement) -> Measurement:
    """Return the mean of a measurement over two runs of its program, or the second value if the measurement is a count.

    The spread is the larger spread of both runs or, if it is larger, the distance between both values divided by their mean.
    """
    if second.kind == "count":
        return second
    mean = (first.value + second.value) / 2
    between = abs(first.value - second.value) / mean
    return replace(second, value=mean, spread=max(between, first.spread, second.spread))


def paired_ratio(
    name: str, values: Sequence[float], base: Sequence[float], better: Literal["lower", "higher"] = "lower"
) -> Measurement:
    """Return the median of the ratios of neighboring runs. Run number n of `values` was next to run number n of `base`."""
    return of_repeats(name, [a / b for a, b in zip(values, base, strict=True)], "ratio", "ratio", better)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json`, which all benchmarks have."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements into this JSON file")


def write(path: Path | None, measurements: Sequence[Measurement]) -> None:
    """Write measurements into a JSON file. Does nothing if `path` is None."""
    names = [one.name for one in measurements]
    assert len(names) == len(set(names)), f"two measurements have the same name: {sorted(names)}"
    if path:
        path.write_text(json.dumps([asdict(one) for one in measurements], indent=1) + "\n")


def read(path: Path) -> list[Measurement]:
    """Read the measurements that `write` wrote."""
    return [Measurement(**one) for one in json.loads(path.read_text())]


def how_much_worse(before: Measurement, now: Measurement, slowdown: float = 1.0) -> str | None:
    """Return a sentence if `now` is worse than `before` by more than the larger noise of the two, else None.

    `slowdown` is the time that the machine needs for a fixed computation, divided by the time that it needed before. Seconds
    that grew by this factor are not called worse. Counts must be equal.
    """
    numbers = f"{now.name}: {before.value:.4g} -> {now.value:.4g} {now.unit}"
    if now.kind == "count":
        return (
            None if math.isclose(before.value, now.value, rel_tol=1e-9) else f"{numbers}; this number must stay equal"
        )
    growth = now.value / before.value if now.better == "lower" else before.value / now.value
    if now.kind in ("cpu_s", "wall"):
        growth /= max(1.0, slowdown)
    noise = max(before.noise, now.noise)
    if growth <= 1 + noise:
        return None
    return f"{numbers}; worse by {growth - 1:.0%}, noise {noise:.0%}"


def worse(before: Sequence[Measurement], now: Sequence[Measurement], slowdown: float = 1.0) -> dict[str, str]:
    """Return {name of a measurement: sentence} for each measurement that got worse by more than its noise."""
    earlier = {one.name: one for one in before}
    sentences = {one.name: how_much_worse(earlier[one.name], one, slowdown) for one in now if one.name in earlier}
    return {name: sentence for name, sentence in sentences.items() if sentence}
