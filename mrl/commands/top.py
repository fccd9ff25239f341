"""`mrl top`: shows in the terminal what a run and its processes do now."""

import argparse
import json
import math
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live

from mrl.tracking.live_view import LiveRun, RunView, frame
from mrl.tracking.report.recorded_run import check_is_run

ONCE_INTERVAL_S = 0.3  # time between the two measurements of CPU time, if the state is shown only once
MIN_INTERVAL_S = 0.2
MAX_CPU = 0.01  # largest CPU use of the live display, in cores; if a frame costs more, frames come less often


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `mrl top`."""
    top = argparse.ArgumentParser(
        prog="mrl top",
        description="Show what a run does now: its step, its processes with their activity, CPU, memory and GPUs, the requests "
        "in the engines, the staleness, the last steps, and the last warnings and errors. It only reads files of the run and of "
        "this host, and asks NVIDIA's management library about the GPUs. It does not disturb the run. q or Ctrl-C ends the "
        "display. Without a terminal, it prints one frame.",
        epilog="Example: mrl top outputs/quickstart/TIME",
    )
    top.add_argument("run", metavar="RUN", help="run directory, as PATH or as run.dir=PATH")
    top.add_argument("--once", action="store_true", help="print one frame and exit")
    top.add_argument("--json", action="store_true", help="print the state once as JSON and exit")
    top.add_argument("--every", type=float, default=2.0, metavar="S", help="seconds between two frames (default: 2)")
    return top


def main(argv: list[str]) -> int:
    """Entry point of `mrl top`. Returns the exit status."""
    args = parser().parse_args(argv)
    folder = Path(args.run.removeprefix("run.dir="))
    try:
        if not MIN_INTERVAL_S <= args.every < math.inf:
            raise ValueError(f"--every {args.every:g}: expected {MIN_INTERVAL_S:g} seconds or more.")
        check_is_run(folder)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"mrl: {error}\n")
        return 2
    run, console = LiveRun(folder), Console(file=sys.stdout)
    if args.json:
        sys.stdout.write(json.dumps(asdict(read_twice(run)), indent=1) + "\n")
    elif args.once or not console.is_terminal:
        console.print(frame(read_twice(run)))
    else:
        show_live(run, console, args.every)
    return 0


def read_twice(run: LiveRun) -> RunView:
    """Return the state of a run with the CPU use, which needs two measurements.

    `use` is None for dead processes and for processes of other hosts, so they need no second measurement.
    """
    if any(process.use for process in run.read().processes):
        time.sleep(ONCE_INTERVAL_S)
    return run.read()


def show_live(run: LiveRun, console: Console, every_s: float) -> None:
    """Show a frame every `every_s` seconds, or less often if a frame needs much CPU time, until the user presses q or Ctrl-C."""
    with _single_key_mode(), Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                before_s = time.process_time()
                live.update(frame(run.read(), console.height), refresh=True)
                cpu_s = time.process_time() - before_s
                if _pressed_q(max(every_s, cpu_s / MAX_CPU)):
                    return
        except KeyboardInterrupt:
            return


@contextmanager
def _single_key_mode() -> Iterator[None]:
    """Make the terminal pass on each key immediately, without echo. At the end, restore the settings of the terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed_q(timeout_s: float) -> bool:
    """Wait `timeout_s` seconds, or until the user presses q. Return whether the user pressed q."""
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0]:
            key = sys.stdin.read(1)
            if key in ("q", "Q", ""):  # "": the terminal was closed
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
