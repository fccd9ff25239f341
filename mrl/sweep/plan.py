"""A sweep's file: what its points are, so that any process on any node can run one, and a sweep can go on."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mrl.config.overrides import key_of, override
from mrl.core.durable_files import write_json
from mrl.sweep.outcome import STATUS, Outcome, read
from mrl.sweep.points import Point

NAME = "sweep.json"  # in the sweep's folder


@dataclass(frozen=True)
class Sweep:
    """Points of one sweep, each with a folder of its own: FOLDER/0, FOLDER/1, ..."""

    folder: Path
    group: str  # in wandb
    metric: str
    maximize: bool
    fixed: Point  # overrides of every point
    points: tuple[Point, ...]

    def of(self, index: int) -> Path:
        """The folder of a point."""
        return self.folder / str(index)

    def overrides(self, index: int) -> list[str]:
        """What `mrl train` is given for a point."""
        return [
            *self.fixed,
            *self.points[index],
            override("run.dir", self.of(index)),
            override("tracking.group", self.group),
        ]

    def command(self, index: int) -> str:
        """The point as a line for a shell, in a folder of its own."""
        own = [line for line in self.fixed if not key_of(line).startswith(("run.dir", "sweep"))]
        return shlex.join(["mrl", "train", *own, *self.points[index]])

    def outcomes(self) -> list[Outcome]:
        """Of every point, in order."""
        return [self.outcome(index) for index in range(len(self.points))]

    def outcome(self, index: int) -> Outcome:
        """Where a point is now."""
        return read(index, self.points[index], self.of(index), self.metric)

    def forget(self, index: int) -> None:
        """How the point ended, before it is run again."""
        (self.of(index) / STATUS).unlink(missing_ok=True)

    def write(self) -> None:
        """Keep it in its folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / NAME, asdict(self))


def load(folder: Path) -> Sweep:
    """What `write` kept, wherever the folder is now; raises ValueError where there is no sweep."""
    try:
        kept = json.loads((folder / NAME).read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder}: holds no sweep ({NAME} is missing); name the run.dir of one.") from None
    points = tuple(tuple(point) for point in kept["points"])
    return Sweep(folder, kept["group"], kept["metric"], kept["maximize"], tuple(kept["fixed"]), points)


def differences(kept: Sweep, wanted: Sweep) -> list[str]:
    """What a sweep that was begun in the folder has otherwise, for a person."""
    return [
        f"{name}: {_shown(getattr(kept, name))} there, {_shown(getattr(wanted, name))} now"
        for name in ("fixed", "points", "metric", "maximize")
        if getattr(kept, name) != getattr(wanted, name)
    ]


def _shown(value: object) -> str:
    words = (
        [" ".join(item) if isinstance(item, tuple) else str(item) for item in value]
        if isinstance(value, Sequence)
        else value
    )
    return f"{words}"[:200]
