"""`mrl samples`: shows sampled responses of a run with their rewards."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mrl.core.sample_file import TextSample, read_samples


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `mrl samples`."""
    top = argparse.ArgumentParser(
        prog="mrl samples",
        description="Show sampled responses of a run with prompt, reward, parts of the reward and weight version. "
        "The run may still be in progress. A run keeps tracking.samples_per_step responses of each step.",
        epilog="Example: mrl samples outputs/quickstart/TIME --step 10 --worst -n 2",
    )
    top.add_argument("run", metavar="RUN", help="run directory, as PATH or as run.dir=PATH")
    top.add_argument("--step", type=int, help="step to show (default: the last one)")
    top.add_argument("--best", action="store_true", help="show the responses with the highest rewards")
    top.add_argument("--worst", action="store_true", help="show the responses with the lowest rewards")
    top.add_argument("-n", type=int, default=4, metavar="K", help="number of responses (default: %(default)s)")
    return top


def choose(samples: Sequence[TextSample], count: int, *, best: bool, worst: bool) -> list[TextSample]:
    """Return `count` of `samples`, which must be sorted best first, as `read_samples` returns them.

    With `best`, these are the first samples, and with `worst` the last ones. With both or neither, half of
    them are taken from each end.
    """
    count = min(count, len(samples))
    num_best = count if best and not worst else 0 if worst and not best else (count + 1) // 2
    return [*samples[:num_best], *samples[len(samples) - (count - num_best) :]]


def main(argv: list[str]) -> int:
    """Entry point of `mrl samples`. Returns the exit status."""
    args = parser().parse_args(argv)
    try:
        text = show(Path(args.run.removeprefix("run.dir=")), args)
    except ValueError as error:
        sys.stderr.write(f"mrl: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0


def show(run_dir: Path, args: argparse.Namespace) -> str:
    """Return the chosen samples as text. Raises ValueError for a mistake of the user."""
    if args.n < 1:
        raise ValueError(f"-n {args.n}: expected 1 or more.")
    steps = dict(read_samples(run_dir))
    if not steps:
        raise ValueError(f"{run_dir} has no samples yet; the first step has not finished.")
    step = max(steps) if args.step is None else args.step
    if step not in steps:
        raise ValueError(f"--step {step}: {run_dir} has samples of the steps {min(steps)} to {max(steps)}.")
    chosen = choose(steps[step], args.n, best=args.best, worst=args.worst)
    title = f"step {step}: {len(chosen)} of the {len(steps[step])} responses that the run keeps of each step\n"
    return "\n\n".join([title.rstrip(), *(sample.text() for sample in chosen)]) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
