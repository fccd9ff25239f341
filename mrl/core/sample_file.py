"""The file samples.jsonl of a run directory: a few sampled responses of each step, as text with their rewards and tokens.

The rollout log has all responses, but only of the steps since the last checkpoint. This file keeps a few responses of every step.
`mrl samples`, `mrl report` and the progress display read it, also during the run.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from mrl.core.jsonl import JsonLinesFile, check_lines, last_lines

logger = logging.getLogger(__name__)

SAMPLES_FILE = "samples.jsonl"
MAX_CHARACTERS = 4000  # limit of a prompt and of a response; the middle of a longer text is left out
MAX_TOKENS = 1024  # limit for the number of tokens of a response; the middle of a longer response is left out
RECENT_STEPS = 32  # number of steps that `recent_samples` searches
ALL_STEPS = 1 << 62  # with this value of its argument `last_step`, a JsonLinesFile keeps the lines of all steps


@dataclass(frozen=True)
class TextSample:
    """One sampled response, as text."""

    prompt: str
    response: str
    reward: float
    row: int  # index of the prompt's row in the data set
    weight_version: int  # weight version that sampled the first token
    num_tokens: int  # number of tokens that the policy sampled
    truncated: bool  # whether the token limit, which includes tool results, or the turn limit ended the response
    parts: Mapping[str, float] = field(default_factory=dict)  # named parts of the reward
    failure: str | None = None  # why the response could not be scored; None: it was scored
    group: int | None = None  # index of the prompt among the step's prompts; None: written by an older version of mrl
    group_rewards: Sequence[float] = ()  # rewards of all responses of the group, also of responses not in the file
    source: str | None = None  # name of the data source
    ground_truth: str | None = None  # expected answer of the row, as the reward gets it; None: the row has none
    turns: Sequence[Mapping[str, str]] = ()  # role and text of each message of a multi-turn response; else empty
    # The next lists have one entry for each kept token of the response. They are empty in files of older versions of mrl.
    tokens: Sequence[str] = ()  # text of the token
    trained: Sequence[int] = ()  # 1: the policy sampled the token; 0: it is part of a tool result
    logprobs: Sequence[float | None] = ()  # log-probability in nats, as the engine computed it; None: unknown
    trainer_logprobs: Sequence[float | None] = ()  # log-probability that the trainer computed; None: not computed
    advantages: Sequence[float | None] = ()  # advantage; None: unknown, as for tool results
    versions: Sequence[int | None] = ()  # weight version that sampled the token
    omitted_tokens: int = 0  # number of tokens that are left out in the middle of the lists

    @property
    def mismatches(self) -> list[float | None]:
        """The trainer's log-probability minus the engine's, for each kept token; None where one of them is unknown."""
        pairs = zip(self.trainer_logprobs, self.logprobs, strict=True)
        return [None if a is None or b is None else a - b for a, b in pairs]

    def text(self, response: str | None = None) -> str:
        """Return the sample as text for the terminal.

        If `response` is set (such as a colored copy), it is shown instead of the sample's own response.
        """
        notes = [f"row {self.row}", f"{self.num_tokens} sampled tokens"]
        if self.truncated:
            notes.append("truncated (the limit also counts tool results)" if self.turns else "truncated")
        notes.append(f"weight version {self.weight_version}")
        notes += [self.source] if self.source else []
        notes += [f"{name} {value:.4g}" for name, value in self.parts.items()]
        failure = f"\n  not scored: {self.failure}" if self.failure else ""
        lines = [f"reward {self.reward:.4g}  ({', '.join(notes)}){failure}"]
        lines += _indented("prompt", escaped(self.prompt))
        if self.ground_truth is not None:
            lines += _indented("expected answer", escaped(self.ground_truth))
        if response is not None:
            return "\n".join(lines + _indented("response", response))
        for turn in self.turns or ({"role": "response", "text": self.response},):
            lines += _indented(turn["role"], escaped(turn["text"]))
        return "\n".join(lines)


def escaped(text: str) -> str:
    """Return a text whose control characters are escaped, so that they do not act on the terminal. Line ends stay."""
    lines = ("".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in line) for line in text.splitlines())
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


def _indented(title: str, text: str) -> list[str]:
    """Return the lines of a text below its title."""
    return [f"  {title}:", *(f"    {line}" for line in text.splitlines() or [""])]


def shortened(text: str) -> str:
    """Return a text of at most about MAX_CHARACTERS characters: its start and its end."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def spread(rewards: Sequence[float], count: int) -> list[int]:
    """Return the indices of `count` responses whose rewards cover the whole range, best first.

    With a `count` of 2 or more, the best and the worst are among them. Responses with equal rewards keep their order.
    """
    order = sorted(range(len(rewards)), key=lambda index: (-rewards[index], index))
    if count >= len(order):
        return order
    positions = [round(n * (len(order) - 1) / max(1, count - 1)) for n in range(count)]
    return [order[position] for position in positions]


class SampleFile:
    """Appends the samples of each step. When a step is repeated, its old samples and those of all later steps are removed."""

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / SAMPLES_FILE
        self._last = max((step for step, _ in read_samples(run_dir)), default=0) if path.exists() else 0
        self._lines = JsonLinesFile(path, ALL_STEPS)

    def write(self, step: int, samples: Sequence[TextSample]) -> None:
        """Write the samples of a step, best first."""
        if step <= self._last:
            self._lines.rewind(step - 1)
        self._last = step
        self._lines.write(step, {"samples": samples})


def read_samples(run_dir: Path) -> Iterator[tuple[int, list[TextSample]]]:
    """Yield (step, samples of the step, best first). For lines that are damaged or missing, a warning is logged.

    Raises ValueError if the run directory has no samples.
    """
    path = run_dir / SAMPLES_FILE
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: expected the run directory of `mrl train`, after its first step and with "
            "tracking.samples_per_step above 0."
        )
    checked = check_lines(path)
    if checked.lost_steps:
        logger.warning("%s: the lines of these steps are damaged or missing: %s", path, checked.lost_steps)
    for _, line in checked.lines:
        if (parsed := _parse(line)) is not None:
            yield parsed


def last_samples(run_dir: Path, step: int) -> list[TextSample]:
    """Return the samples of a step if this step is the last step in the file, otherwise []."""
    parsed = [found for line in last_lines(run_dir / SAMPLES_FILE, 1) if (found := _parse(line))]
    return parsed[0][1] if parsed and parsed[0][0] == step else []


def recent_samples(run_dir: Path, step: int) -> list[TextSample]:
    """Return the samples of a step if this step is one of the last RECENT_STEPS steps in the file, otherwise []."""
    lines = last_lines(run_dir / SAMPLES_FILE, RECENT_STEPS)
    return dict(found for line in lines if (found := _parse(line))).get(step, [])


def best_and_worst_text(run_dir: Path, step: int) -> str:
    """Return the best and the worst response of `step` as text; "" if `step` is not the last step in the file."""
    samples = last_samples(run_dir, step)
    titles = {"best": samples[:1], "worst": samples[1:][-1:]}
    return "\n".join(f"{title} of step {step}: {one.text()}" for title, found in titles.items() for one in found)


def _parse(line: bytes) -> tuple[int, list[TextSample]] | None:
    try:
        content: Any = orjson.loads(line)
        return content["step"], [TextSample(**sample) for sample in content["samples"]]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
