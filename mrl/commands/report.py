"""`mrl report`: writes one HTML file that shows a run, two runs side by side, or a sweep."""

import argparse
import logging
import sys
import time
from pathlib import Path

from mrl.sweep.points import METRIC_STEPS, SWEEP_FILE, Sweep, load_sweep
from mrl.tracking.report.page import write_page
from mrl.tracking.report.page_data import SweepPoint, pair_data, run_data, sweep_data
from mrl.tracking.report.recorded_run import is_running, read_run

logger = logging.getLogger(__name__)

FILE_NAME = "report.html"


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `mrl report`."""
    top = argparse.ArgumentParser(
        prog="mrl report",
        description="Write one HTML file that shows a run: its warnings, learning curves, times, samples, config and versions. "
        "With two runs, the file compares them. With the folder of a sweep, it compares the points. The file needs no network "
        "and no other file. The run may still be in progress.",
        epilog="Example: mrl report outputs/quickstart/TIME",
    )
    top.add_argument("runs", metavar="RUN", nargs="+", help="one or two run directories, or the folder of a sweep")
    top.add_argument("-o", "--output", metavar="FILE", help=f"file to write (default: {FILE_NAME} in the first folder)")
    top.add_argument("--watch", action="store_true", help="write the file again every few seconds until the run ends")
    top.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between two writes (default: 10)")
    return top


def main(argv: list[str]) -> int:
    """Entry point of `mrl report`. Returns the exit status."""
    args = parser().parse_args(argv)
    folders = [Path(word.removeprefix("run.dir=")) for word in args.runs]
    try:
        _check(folders, args)
        output = Path(args.output) if args.output else folders[0] / FILE_NAME
        output.parent.mkdir(parents=True, exist_ok=True)
        if args.watch:
            watch(folders, output, args.every)
        size = write_page(output, page_data(folders))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"mrl: {error}\n")
        return 2
    sys.stdout.write(f"{output} ({size / 1e6:.1f} MB); open it in a browser\n")
    return 0


def _check(folders: list[Path], args: argparse.Namespace) -> None:
    if len(folders) > 2:
        raise ValueError(f"{len(folders)} runs: expected one or two runs; for more runs, name the folder of a sweep.")
    if args.watch and args.every < 1:
        raise ValueError(f"--every {args.every:g}: expected 1 second or more.")
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder}: there is no such folder; name the run.dir of `mrl train`.")


def page_data(folders: list[Path], reload_every_s: int = 0) -> dict:
    """Return the data of the page of one run, of two runs or of a sweep.

    A single folder may be the folder of a sweep. A browser reloads the page every `reload_every_s` seconds; 0: never. Raises
    ValueError if a folder is no run directory.
    """
    if len(folders) == 2:
        return pair_data(read_run(folders[0]), read_run(folders[1])) | {"reload_every_s": reload_every_s}
    if (folders[0] / SWEEP_FILE).exists():
        sweep = load_sweep(folders[0])
        data = sweep_data(sweep.folder.resolve().name, sweep.metric, sweep.maximize, _points(sweep), METRIC_STEPS)
        return data | {"reload_every_s": reload_every_s}
    return run_data(read_run(folders[0]), reload_every_s)


def _points(sweep: Sweep) -> list[SweepPoint]:
    found = []
    for result in sweep.results():
        overrides = dict(override.split("=", 1) for override in result.point)
        try:
            run = read_run(result.folder)
        except ValueError:  # the point has not started
            run = None
        outcome = (str(result.state), result.value, result.steps, result.reason, sweep.command(result.index))
        found.append(SweepPoint(run, overrides, *outcome))
    return found


def watch(folders: list[Path], output: Path, every_s: float) -> None:
    """Write the page every `every_s` seconds until all runs, or all points of the sweep, have ended, or the user interrupts."""
    sys.stdout.write(f"writing {output} every {every_s:g} s; Ctrl-C ends this\n")
    try:
        while _in_progress(folders):
            write_page(output, page_data(folders, reload_every_s=max(1, round(every_s))))
            time.sleep(every_s)
    except KeyboardInterrupt:
        sys.stdout.write("\n")


def _in_progress(folders: list[Path]) -> bool:
    if (folders[0] / SWEEP_FILE).exists():
        return any(not result.state.ended for result in load_sweep(folders[0]).results())
    return any(map(is_running, folders))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
