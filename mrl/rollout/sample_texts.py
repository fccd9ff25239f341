"""Text samples: the responses that samples.jsonl keeps, with the text, log-probability and advantage of each token.

mrl.core.types explains the letters in shapes such as [R] and [B].
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrl.core.sample_file import MAX_TOKENS, TextSample, shortened
from mrl.core.types import Column
from mrl.data.prompts import PromptDataset
from mrl.rollout.trajectory import Group, Sample, Trajectory

DIGITS = 6  # digits after the decimal point of log-probabilities and advantages


def text_samples(
    groups: Sequence[Group], chosen: Sequence[int], data: PromptDataset, columns: Mapping[str, Column]
) -> list[TextSample]:
    """Return the `chosen` responses as text.

    Args:
        groups: the groups of a step, with B responses in all.
        chosen: indices among the B responses.
        data: decodes tokens, and has the data source and the ground truth of each row.
        columns: name of a column -> values [R] of all sampled tokens of the step. Only "advantages" and "old_logprobs" are used.
    """
    samples = [(index, sample) for index, group in enumerate(groups) for sample in group.samples]
    ends = np.cumsum([sample.trajectory.num_sampled for _, sample in samples])
    return [
        replace(
            _text_sample(*samples[index], data, {name: _part(column, ends, index) for name, column in columns.items()}),
            group_rewards=[float(reward) for reward in groups[samples[index][0]].rewards],
        )
        for index in chosen
    ]


def _part(column: Column, ends: NDArray[np.int64], index: int) -> Column:
    """Return the values of response `index`. `ends` [B]: end of each response in the column."""
    return column[ends[index - 1] if index else 0 : ends[index]]


def _text_sample(group: int, sample: Sample, data: PromptDataset, columns: Mapping[str, Column]) -> TextSample:
    """Return a response as text. `columns`: name of a column -> values of the sampled tokens of this response."""
    trajectory = sample.trajectory
    prompt, response = data.decode([sample.prompt, trajectory.token_ids])
    return TextSample(
        prompt=shortened(prompt),
        response=shortened(response),
        reward=float(sample.score.value),
        row=int(sample.row),
        weight_version=int(trajectory.weight_version),
        num_tokens=trajectory.num_sampled,
        truncated=bool(trajectory.truncated),
        parts={name: float(value) for name, value in sample.score.parts.items()},
        failure=sample.score.failure and sample.score.failure.encode(errors="replace").decode(),  # no lone surrogates
        group=group,
        source=data.data_source(sample.row) or None,
        ground_truth=_ground_truth_text(data.ground_truth(sample.row)),
        turns=[{"role": turn.role, "text": shortened(turn.text)} for turn in trajectory.texts(data.decode)],
        **_token_lists(trajectory, data, columns),
    )


def _ground_truth_text(value: Any) -> str | None:
    """Return a ground truth as shortened text; None if the row has none. Lists and objects become JSON."""
    if value is None or value == "":
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return shortened(text.encode(errors="replace").decode())


def _token_lists(trajectory: Trajectory, data: PromptDataset, columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return the fields of TextSample that are lists with one entry for each kept token, and the field `omitted_tokens`."""
    total = len(trajectory.token_ids)
    kept = list(range(total))
    if total > MAX_TOKENS:
        kept = [*kept[: MAX_TOKENS // 2], *kept[total - MAX_TOKENS // 2 :]]
    sampled = trajectory.sampled or [True] * total
    position = (np.cumsum(sampled) - 1).tolist()  # index of each sampled token in a column
    spans = trajectory.versions or ((trajectory.weight_version, trajectory.num_sampled),)
    versions = [version for version, tokens in spans for _ in range(tokens)]

    def values(column: Sequence[float] | Column | None) -> list[float | None]:
        if column is None:
            return [None] * len(kept)
        rounded = np.round(np.asarray(column, np.float64), DIGITS).tolist()
        found = [rounded[position[index]] if sampled[index] else math.nan for index in kept]
        return [None if math.isnan(value) else value for value in found]

    return dict(
        tokens=data.token_texts([trajectory.token_ids[index] for index in kept]),
        trained=[int(sampled[index]) for index in kept],
        logprobs=values(trajectory.logprobs),
        trainer_logprobs=values(columns.get("old_logprobs")),
        advantages=values(columns.get("advantages")),
        versions=[versions[position[index]] if sampled[index] else None for index in kept],
        omitted_tokens=total - len(kept),
    )
