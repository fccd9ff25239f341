"""`mrl samples`: shows sampled responses of a run with their rewards."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.style import Style

from mrl.core.sample_file import TextSample, escaped, read_samples

# Value of --color -> (function that returns the values of a sample's tokens, meaning of these values)
COLORINGS: dict[str, tuple[Callable[[TextSample], Sequence[float | None]], str]] = {
    "logprob": (lambda sample: sample.logprobs, "log-probability of the token, as the engine computed it"),
    "advantage": (lambda sample: sample.advantages, "advantage of the token"),
    "version": (lambda sample: sample.versions, "weight version that sampled the token"),
    "mismatch": (lambda sample: sample.mismatches, "the trainer's log-probability minus the engine's"),
}
# red, gray, blue
LOW, MIDDLE, HIGH = ColorTriplet(214, 69, 65), ColorTriplet(128, 128, 128), ColorTriplet(38, 130, 196)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `mrl samples`."""
    top = argparse.ArgumentParser(
        prog="mrl samples",
        description="Show sampled responses of a run with prompt, reward, parts of the reward and weight version. "
        "The run may still be in progress. A run keeps tracking.samples_per_step responses of each step.",
        epilog="Example: mrl samples outputs/quickstart/TIME --step 10 --worst -n 2 --color logprob",
    )
    top.add_argument("run", metavar="RUN", help="run directory, as PATH or as run.dir=PATH")
    top.add_argument("--step", type=int, help="step to show (default: the last one)")
    top.add_argument("--best", action="store_true", help="show the responses with the highest rewards")
    top.add_argument("--worst", action="store_true", help="show the responses with the lowest rewards")
    top.add_argument("-n", type=int, default=4, metavar="K", help="number of responses (default: %(default)s)")
    top.add_argument("--search", metavar="TEXT", help="only samples whose prompt or response contains TEXT")
    top.add_argument("--source", metavar="NAME", help="only samples of this data source")
    top.add_argument("--group", type=int, metavar="N", help="only responses to prompt N of the step (0: the first)")
    top.add_argument(
        "--equal", action="store_true", help="only groups of two or more kept responses whose rewards are all equal"
    )
    top.add_argument("--color", choices=COLORINGS, help="color the tokens of the responses by this value")
    return top


def choose(samples: Sequence[TextSample], count: int, *, best: bool, worst: bool) -> list[TextSample]:
    """Return at most `count` of `samples`. The samples must be sorted best first, as `read_samples` returns them.

    With `best`, return the first samples, and with `worst` the last ones. With both or neither, return samples from both ends,
    half of `count` from each end.
    """
    count = min(count, len(samples))
    num_best = count if best and not worst else 0 if worst and not best else (count + 1) // 2
    return [*samples[:num_best], *samples[len(samples) - (count - num_best) :]]


def matching(samples: Sequence[TextSample], args: argparse.Namespace) -> list[TextSample]:
    """Return the samples that match --search, --source, --group and --equal."""
    rewards: dict[int | None, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group, []).append(sample.reward)
    equal = {group for group, found in rewards.items() if len(found) > 1 and len(set(found)) == 1}
    return [
        sample
        for sample in samples
        if (args.search is None or args.search in sample.prompt or args.search in sample.response)
        and (args.source is None or args.source == sample.source)
        and (args.group is None or args.group == sample.group)
        and (not args.equal or sample.group in equal)
    ]


def main(argv: list[str]) -> int:
    """Entry point of `mrl samples`. Returns the exit status."""
    args = parser().parse_args(argv)
    try:
        text = render(Path(args.run.removeprefix("run.dir=")), args)
    except ValueError as error:
        sys.stderr.write(f"mrl: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0


def render(run_dir: Path, args: argparse.Namespace) -> str:
    """Return the chosen samples as text. Raises ValueError for a mistake of the user."""
    if args.n < 1:
        raise ValueError(f"-n {args.n}: expected 1 or more.")
    step, samples = _samples_of(run_dir, args.step)
    found = matching(samples, args)
    if not found:
        raise ValueError(
            f"no sample of step {step} ({len(samples)} are kept) matches the filters (--search, --source, --group, --equal)."
        )
    chosen = choose(found, args.n, best=args.best, worst=args.worst)
    title = f"step {step}: {len(chosen)} of the {len(samples)} responses that the run kept of this step"
    if not args.color:
        return "\n\n".join([title, *(sample.text() for sample in chosen)]) + "\n"
    values, meaning = COLORINGS[args.color]
    known = [value for sample in chosen for value in values(sample) if value is not None]
    if not known:
        raise ValueError(
            f"--color {args.color}: the chosen samples of step {step} have no such values, because an older version of mrl wrote "
            "the samples, or because the algorithm does not need these values."
        )
    low, high = min(known), max(known)
    legend = f"colors: {meaning}, from {_colored(f'{low:.4g}', 0.0)} to {_colored(f'{high:.4g}', 1.0)}"
    texts = [sample.text(_colored_response(sample, values(sample), low, high)) for sample in chosen]
    return "\n\n".join([f"{title}\n{legend}", *texts]) + "\n"


def _samples_of(run_dir: Path, step: int | None) -> tuple[int, list[TextSample]]:
    """Return a step and its samples. If `step` is None, this is the last step.

    The function does not keep the parsed samples of other steps in memory.
    """
    steps, chosen = [], None
    for each, samples in read_samples(run_dir):
        steps.append(each)
        if step is None or each == step:
            chosen = each, samples
    if not steps:
        raise ValueError(f"{run_dir} has no samples yet; the first step has not finished.")
    if chosen is None:
        raise ValueError(f"--step {step}: {run_dir} has samples of the steps {min(steps)} to {max(steps)}.")
    return chosen


def _colored_response(sample: TextSample, values: Sequence[float | None], low: float, high: float) -> str:
    """Return the kept tokens of a response, each in the color of its value. Tokens without a value have no color."""
    width = high - low
    pieces = [
        escaped(token)
        if value is None
        else "\n".join(_colored(part, (value - low) / width if width else 0.5) for part in escaped(token).split("\n"))
        for token, value in zip(sample.tokens, values, strict=True)
    ]
    if sample.omitted_tokens:
        pieces.insert(len(pieces) // 2, f"\n[... {sample.omitted_tokens} tokens ...]\n")
    return "".join(pieces)


def _colored(text: str, position: float) -> str:
    """Return a text with the escape codes of a color. `position`: 0 is red, 0.5 is gray, 1 is blue. NO_COLOR turns colors off."""
    if os.environ.get("NO_COLOR") or not text or math.isnan(position):
        return text
    start, end, share = (LOW, MIDDLE, 2 * position) if position < 0.5 else (MIDDLE, HIGH, 2 * position - 1)
    mixed = ColorTriplet(*(round(a + (b - a) * share) for a, b in zip(start, end, strict=True)))
    return Style(color=Color.from_triplet(mixed)).render(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
