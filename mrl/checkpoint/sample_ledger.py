"""SampleLedger: which samples each step trained. It proves that no sample was lost, trained twice, or trained too late."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from mrl.core.jsonl import JsonLinesFile
from mrl.core.types import Rollouts


class SampleLedger:
    """One line per step in run.dir/ledger.jsonl.

    `drawn`: rows drawn from each source since the run began. `groups`: data set row and hash of each group. `requests`: number
    of the group's prompt request, in drawing order. `prompts`: tokens of each group's prompt. `lengths`: sampled tokens of its
    responses. `updates`: for each optimizer step, weight version -> [tokens of that version in the loss, their fraction of the
    loss's total weight before corrections].

    When a run goes back to a checkpoint, the lines of later steps are removed.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._lines = JsonLinesFile(path, last_step)

    def record(
        self, step: int, rollouts: Rollouts, drawn: list[int], weights: Sequence[NDArray[np.float64]] = ()
    ) -> None:
        """Record the samples that led to weight version `step`.

        `drawn`: rows drawn from each source since the run began. `weights`: for each optimizer step, the weight [B] of one token
        of each response in the loss.
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
        """Remove the lines of steps after `last_step`."""
        self._lines.rewind(last_step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _by_version(spans: NDArray[np.int64], weights: NDArray[np.float64]) -> dict[str, list[float]]:
    """Return weight version -> [tokens in the loss, their fraction of all loss weights]."""
    responses, versions, tokens = spans.T
    token_weights, total = weights[responses] * tokens, float((weights[responses] * tokens).sum())
    fractions = {}
    for version in np.unique(versions[token_weights > 0]).tolist():
        selected = (versions == version) & (token_weights > 0)
        fractions[str(version)] = [int(tokens[selected].sum()), round(float(token_weights[selected].sum()) / total, 9)]
    return fractions
