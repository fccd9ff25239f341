"""`mrl timeline`: merges the timelines of a run's processes into one file, and says which phases take the time of the steps."""

import argparse
import re
import sys
from pathlib import Path

from mrl.tracking.timeline import read_timeline, summarize, write_trace


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `mrl timeline`."""
    top = argparse.ArgumentParser(
        prog="mrl timeline",
        description="Merge the spans of all processes of a run (tracking.timeline) into RUN/timeline.json, and say what the "
        "steps spend their time on. ui.perfetto.dev and chrome://tracing open the file. The run may still be in progress.",
        epilog="Example: mrl timeline outputs/quickstart/TIME --steps 3:5",
    )
    top.add_argument("run", metavar="RUN", help="run directory, as PATH or as run.dir=PATH")
    top.add_argument("--steps", metavar="A:B", help="only the steps A to B (default: all steps); the first step is 1")
    return top


def steps_of(text: str | None) -> range | None:
    """Return the steps of the option --steps: "3:5" means the steps 3, 4 and 5, "3" means step 3, and None means all steps."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"--steps {text}: expected A:B with 1 <= A <= B, such as 3:5, or one step, such as 3.")
    return range(first, last + 1)


def main(argv: list[str]) -> int:
    """Entry point of `mrl timeline`. Returns the exit status."""
    args = parser().parse_args(argv)
    run_dir = Path(args.run.removeprefix("run.dir="))
    try:
        timelines = read_timeline(run_dir, steps_of(args.steps))
        write_trace(timelines, run_dir / "timeline.json")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"mrl: {error}\n")
        return 2
    try:
        sentences = summarize(timelines)
    except ValueError as error:  # no step has ended yet
        sentences = [str(error)]
    dropped = sum(timeline.dropped for timeline in timelines)
    sentences += [f"{dropped} spans were dropped, because a file was full or a disk too slow."] if dropped else []
    opens = f"{run_dir / 'timeline.json'} shows all processes; open it at https://ui.perfetto.dev."
    sys.stdout.write("\n".join([*sentences, opens]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
