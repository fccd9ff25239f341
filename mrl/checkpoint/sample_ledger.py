"""Which samples a run trained, step by step: the proof that none was lost, and none trained twice or too late."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from mrl.core.jsonl import JsonLinesFile
from mrl.core.types import Rollouts


class SampleLedger:
    """One line per step in run.dir/ledger.jsonl.

    `drawn`: rows of each source so far. `groups`: row and hash of each group's samples; `tickets`: its place in the order of
    drawing; `prompts` and `lengths`: tokens of its prompt, and sampled ones of its responses. `updates`, for each optimizer
    step: weight version -> [tokens of it that were in the loss, their share of the loss's weights before corrections].

    A run that goes back to a checkpoint takes back the lines of the steps whose effect is gone.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._lines = JsonLinesFile(path, last_step)

    def record(
        self, step: int, rollouts: Rollouts, drawn: list[int], weights: Sequence[NDArray[np.float64]] = ()
    ) -> None:
        """The weights of version `step` have learnt from these; `drawn`: rows of each source since the run began.

        `weights`: of each optimizer step, [B] what one token of a response counted for in the loss.
        """
        starts = np.flatnonzero(np.diff(rollouts.groups, prepend=-1))
        hashes = [xxhash.xxh3_64_hexdigest(part.tobytes()) for part in np.split(rollouts.digests, starts[1:])]
        version = int(rollouts.weight_versions.min())
        groups = [[int(row), digest] for row, digest in zip(rollouts.rows[starts], hashes, strict=True)]
        lengths = [part.tolist() for part in np.split(rollouts.sampled_lengths, starts[1:])]
        line = dict(drawn=drawn, weight_version=version, groups=groups, requests=rollouts.request_numbers.tolist())
        line |= dict(prompts=rollouts.prompt_lengths[starts].tolist(), lengths=lengths)
        self._lines.write(step, line | dict(updates=[_by_version(rollouts.spans, of_step) for of_step in weights]))

    def rewind(self, last_step: int) -> None:
        """Take back the steps after `last_step`."""
        self._lines.rewind(last_step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _by_version(spans: NDArray[np.int64], weights: NDArray[np.float64]) -> dict[str, list[float]]:
    """Weight version -> [tokens, their share of all weights]."""
    responses, versions, tokens = spans.T
    part, total = weights[responses] * tokens, float((weights[responses] * tokens).sum())
    found = {}
    for version in np.unique(versions[part > 0]).tolist():
        ours = (versions == version) & (part > 0)
        found[str(version)] = [int(tokens[ours].sum()), round(float(part[ours].sum()) / total, 9)]
    return found
