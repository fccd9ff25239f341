"""A compact table of the samples of a run, for a page with a limited number of bytes."""

from collections.abc import Sequence
from typing import Any

import orjson

from mrl.tracking.report.recorded_run import RecordedRun, Sample

COLUMNS = (
    "step",
    "prompt",  # index in `prompts`
    "response",
    "ground_truth",  # expected answer
    "reward",
    "group",
    "num_tokens",
    "weight_version",
    "truncated",
    "row",
    "source",
    "parts",
    "failure",
    "turns",
    "uniform",  # whether all responses of the group have the same reward; None: only one reward is known
    "group_rewards",
    "rank",  # position among the samples of the step; 0 is the best
    "last",  # position of the worst sample of the step
)
"""Columns of the table. mrl.core.sample_file.TextSample explains the columns without a comment, except `step`."""
TOKEN_FIELDS = ("logprobs", "trainer_logprobs", "advantages", "versions", "trained")  # one value per token
TOKEN_WORDS = {"logprobs": "log-probability", "trainer_logprobs": "mismatch", "advantages": "advantage"}
"""Field -> its name in a sentence."""
TEXT_SHARE = 0.6  # fraction of the byte limit that texts may use; tokens get the rest


def sample_table(run: RecordedRun, limit_bytes: int) -> dict[str, Any]:
    """Return the samples as {columns, prompts, rows, tokens, left_out}, of at most about `limit_bytes` bytes of JSON.

    If not all samples fit, the best and the worst samples of each step are kept first. Tokens with their values are kept for
    the newest steps first. `left_out` says in a sentence what is missing.
    """
    # `abs_rank`: distance from the best or from the worst sample of the step, whichever is smaller
    candidates = [
        (abs_rank, step, rank, len(samples) - 1, sample, uniform)
        for step, samples in run.samples
        for (abs_rank, rank, sample, uniform) in _ranked(samples)
    ]
    candidates.sort(key=lambda each: (each[0], -each[1]))
    total, prompts, chosen, size = len(candidates), {}, [], 0
    for _, step, rank, last, sample, uniform in candidates:
        row = _row(step, rank, last, sample, uniform)
        size += len(orjson.dumps(row)) + (0 if row[1] in prompts else len(orjson.dumps(row[1])))
        if size > limit_bytes * TEXT_SHARE:
            break
        prompts.setdefault(row[1], len(prompts))
        row[1] = prompts[row[1]]
        chosen.append((row, sample))
    chosen.sort(key=lambda each: (-each[0][0], each[0][COLUMNS.index("rank")]))
    tokens = _tokens([sample for _, sample in chosen], limit_bytes - min(size, int(limit_bytes * TEXT_SHARE)))
    return {
        "columns": COLUMNS,
        "prompts": list(prompts),
        "rows": [row for row, _ in chosen],
        "tokens": tokens,
        "left_out": _left_out_text(run, total, chosen, tokens),
    }


def _ranked(samples: Sequence[Sample]) -> list[tuple[int, int, Sample, bool | None]]:
    """Return (priority, rank, sample, whether its group has equal rewards) of each sample. Best and worst have priority 0."""
    kept: dict[Any, list[float]] = {}
    for sample in samples:
        kept.setdefault(group_of(sample), []).append(sample.get("reward", 0.0))
    found = []
    for rank, sample in enumerate(samples):
        rewards = sample.get("group_rewards") or kept[group_of(sample)]
        uniform = len(set(rewards)) == 1 if len(rewards) > 1 else None
        found.append((min(rank, len(samples) - 1 - rank), rank, sample, uniform))
    return found


def group_of(sample: Sample) -> Any:
    """Return what identifies a sample's group within a step: the group's number or, in files without this number, the prompt."""
    return sample["group"] if sample.get("group") is not None else sample.get("prompt", "")


def _row(step: int, rank: int, last: int, sample: Sample, uniform: bool | None) -> list[Any]:
    values = {name: sample.get(name) for name in COLUMNS} | dict(step=step, rank=rank, last=last, uniform=uniform)
    values["prompt"] = str(sample.get("prompt", ""))
    values["truncated"] = int(bool(sample.get("truncated")))
    values["parts"] = sample.get("parts") or None
    values["turns"] = [_turn(turn) for turn in sample.get("turns") or [] if isinstance(turn, dict)] or None
    return [values[name] for name in COLUMNS]


def _turn(turn: dict[str, Any]) -> list[str]:
    return [str(turn.get("role", "")), str(turn.get("text", ""))]


def _tokens(samples: Sequence[Sample], limit_bytes: int) -> dict[str, Any]:
    """Return {index of the sample: its tokens and their values} of the first samples that fit."""
    found, size = {}, 0
    for index, sample in enumerate(samples):
        tokens = sample.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            continue
        entry = {"tokens": tokens} | {
            name: _short(sample[name]) for name in TOKEN_FIELDS if isinstance(sample.get(name), list)
        }
        size += len(orjson.dumps(entry))
        if size > limit_bytes:
            break
        found[str(index)] = entry
    return found


def _short(values: list[Any]) -> Any:
    """Return rounded values, or one value if all are equal."""
    rounded = [round(value, 3) if isinstance(value, float) else value for value in values]
    return rounded[0] if rounded and all(value == rounded[0] for value in rounded) else rounded


def _left_out_text(
    run: RecordedRun, total: int, chosen: Sequence[tuple[list[Any], Sample]], tokens: dict[str, Any]
) -> str:
    if not total:
        return f"No samples were recorded: {no_samples_text(run)}."
    if len(chosen) < total:
        shown = (
            f"{len(chosen):,} of the {total:,} samples that the run kept are on this page; the others are left out to keep it "
            "small. `mrl samples` shows all."
        )
    else:
        shown = "The page has all samples that the run kept."
    recorded = sum(1 for _, sample in chosen if sample.get("tokens"))
    if not recorded:
        return f"{shown} The values of tokens were not recorded."
    absent = [
        word
        for name, word in TOKEN_WORDS.items()
        if not any(map(_is_known, (one.get(name) for one in tokens.values())))
    ]
    missing = f" Not recorded for tokens: {', '.join(absent)}." if absent else ""
    if len(tokens) == len(chosen):
        return f"{shown} Each has its tokens with their values.{missing}"
    newest = ", those of the newest steps" if len(tokens) < recorded else ""
    return f"{shown} {len(tokens):,} of them have their tokens with their values{newest}.{missing}"


def _is_known(values: Any) -> bool:
    """Return whether any token has a value. `values` is a list, or one value for all tokens."""
    return any(value is not None for value in values) if isinstance(values, list) else values is not None


def no_samples_text(run: RecordedRun) -> str:
    """Say why a run has no samples."""
    if run.setting("tracking.samples_per_step") == 0:
        return "tracking.samples_per_step is 0"
    return "the folder has no samples.jsonl" if run.metrics else "no step finished"
