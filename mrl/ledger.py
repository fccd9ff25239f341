"""Which samples a run trained, step by step: the proof that none was lost and none was trained twice."""

from pathlib import Path

import numpy as np
import xxhash

from mrl.lines import StepLines
from mrl.types import Rollouts


class Ledger:
    """One line per step in run.dir/ledger.jsonl: rows drawn so far, and of each trained group its row and a hash of its samples.

    A run that goes back to a checkpoint takes back the lines of the steps whose effect is gone.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._lines = StepLines(path, last_step)

    def record(self, step: int, rollouts: Rollouts, drawn: list[int]) -> None:
        """The weights of version `step` have learnt from these; `drawn`: rows of each source since the run began."""
        starts = np.flatnonzero(np.diff(rollouts.groups, prepend=-1))
        hashes = [xxhash.xxh3_64_hexdigest(part.tobytes()) for part in np.split(rollouts.digests, starts[1:])]
        version = int(rollouts.weight_versions.min())
        groups = [[int(row), digest] for row, digest in zip(rollouts.rows[starts], hashes, strict=True)]
        self._lines.write(step, dict(drawn=drawn, weight_version=version, groups=groups))

    def rewind(self, last_step: int) -> None:
        """Take back the steps after `last_step`."""
        self._lines.rewind(last_step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
