"""Runs all benchmarks at small sizes, one after the other, and compares the results with earlier ones: `make bench`.

    python benchmarks/run.py [--only balance step] [--minutes 20] [--against FILE] [--output FOLDER]

The results are in OUTPUT/DATE_TIME.json, and DATE_TIME.png shows the ratios. Each program is compared with its last result in
OUTPUT or, if there is none, in the files bench_*.json of benchmarks/results. After all programs, those with worse measurements
run again if there is time, at most twice. A measurement is called worse only if it is worse in all runs. After them, programs
without an earlier result run a second time if there is time. If the last result is from another machine, only ratios and counts
are compared. The exit status is 1 if a program failed.

The programs that write files use /dev/shm if it has 4 GiB free, because the speed of a disk changes from one run to the next.
"""

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.measurements import Measurement, mean_of, read, worse

ROOT = Path(__file__).resolve().parents[1]
OUTPUT, REFERENCES = ROOT / "build/bench", ROOT / "benchmarks/results"
MAX_RUNS = 3  # largest number of runs, the first included, of a program with a worse measurement
TRL_PYTHON, SMOLLM2 = "build/peer/bin/python", "outputs/smollm2/model"
TRL_HELP = "benchmarks/README.md says how to make an environment with TRL"
SMOLLM2_HELP = "docs/tutorials/model.md says how to get SmolLM2 without the Hub"


def folder_in_memory(folder: Path = Path("/dev/shm"), free_bytes: int = 4 * 2**30) -> Path:
    """Return `folder`, or the folder for temporary files if `folder` does not exist or has less than `free_bytes` free."""
    has_room = folder.is_dir() and shutil.disk_usage(folder).free >= free_bytes
    return folder if has_room else Path(tempfile.gettempdir())


FOLDER = folder_in_memory()


@dataclass(frozen=True)
class Program:
    """A program of benchmarks/ at one size."""

    name: str
    command: str  # the script and its arguments
    deadline_s: float
    needs: Mapping[str, str] = field(default_factory=dict)  # path -> sentence that says how to get it

    def missing(self) -> list[str]:
        """Return a sentence for each path that does not exist."""
        return [f"{path} does not exist; {how}" for path, how in self.needs.items() if not (ROOT / path).exists()]


PROGRAMS = (
    Program("balance", "balance.py --seeds 3", 90),
    Program("weight_sync bytes", "weight_sync.py bytes", 90),
    Program("logprobs_memory", "logprobs_memory.py --positions 1024 --vocab 16000 --repeats 3", 150),
    Program(
        "distillation_memory", "distillation_memory.py --positions 1024 --vocab 16000 --dtype float32 --repeats 3", 150
    ),
    Program(
        "compute_only_what_matters",
        "compute_only_what_matters.py --hidden 128 --layers 2 --vocab 1024 --repeats 3",
        180,
    ),
    Program("training_step small", "training_step.py --sizes small --repeats 5", 240),
    Program("training_step toy", "training_step.py --sizes toy --repeats 3", 150),
    Program("convert", f"convert.py --layers 2 --repeats 3 --warm --folder {FOLDER}", 240),
    Program("checkpoint", f"checkpoint.py --hidden 256 --repeats 7 --folder {FOLDER}", 180),
    Program("controller", "controller.py --prompts 256 --ranks 256 --steps 4", 180),
    Program("step", "step.py --steps 12", 150),
    Program("observability", "observability.py --blocks 6 --steps 2", 180),
    Program("weight_sync speed", "weight_sync.py speed --pushes 5 --buckets 64", 180),
    Program("weight_sync delta", "weight_sync.py delta --steps 3 --runs bfloat16", 240),
    Program("asynchrony", "asynchrony.py --rounds 1 --scale 0.3 --modes sync async", 240),
    Program("TRL, toy", f"against_trl.py toy --steps 20 --peer-python {TRL_PYTHON}", 300, {TRL_PYTHON: TRL_HELP}),
    Program(
        "TRL, SmolLM2",
        f"against_trl.py smollm2 --steps 3 --peer-python {TRL_PYTHON} --model {SMOLLM2}",
        300,
        {TRL_PYTHON: TRL_HELP, SMOLLM2: SMOLLM2_HELP},
    ),
)


@dataclass
class Outcome:
    """Result of one program."""

    command: str
    seconds: float = 0.0
    reference_cpu_s: float = 0.0  # mean CPU-seconds of a fixed computation, before and after the program
    measurements: list[Measurement] = field(default_factory=list)
    error: str | None = None
    worse: list[str] = field(default_factory=list)  # a sentence for each measurement that got worse


def machine() -> dict[str, Any]:
    """Return the processor and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"processor": names[0] if names else platform.processor(), "cores": os.cpu_count()}


def fixed_computation_s() -> float:
    """Return the CPU-seconds of a fixed computation. They show how fast the machine is at the moment."""
    matrix, start = np.ones((700, 700)), time.process_time()
    for _ in range(5):
        matrix = (matrix @ matrix) / 700
    sum(number * number for number in range(1_000_000))
    return time.process_time() - start


def run_program(program: Program, deadline_s: float) -> Outcome:
    """Run a program as a process group of its own. Its output goes to the screen. At the deadline, the group is ended."""
    outcome, start = Outcome(program.command, reference_cpu_s=fixed_computation_s()), time.monotonic()
    script, *arguments = program.command.split()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "measurements.json")
        command = [sys.executable, f"benchmarks/{script}", *arguments, "--json", str(path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
            try:
                status = process.wait(deadline_s)
                outcome.error = f"exit status {status}" if status else None
            except subprocess.TimeoutExpired:
                outcome.error = f"not finished after {deadline_s:.3g} s"
                if deadline_s < program.deadline_s:  # the other programs took the rest of the time
                    outcome.error += ", and no more time remained; set --minutes"
            finally:
                end_group(process)
        if not outcome.error and path.exists():
            outcome.measurements = read(path)
        elif not outcome.error:
            outcome.error = "it wrote no measurements"
    outcome.seconds = time.monotonic() - start
    outcome.reference_cpu_s = (outcome.reference_cpu_s + fixed_computation_s()) / 2
    return outcome


def end_group(process: subprocess.Popen) -> None:
    """End all processes of the process group: first by SIGTERM, after ten seconds by SIGKILL."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        if process.poll() is None:
            process.wait(10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def earlier_result(last: Mapping[str, Any], name: str, command: str) -> Mapping[str, Any] | None:
    """Return the last result of the program `name`; None if it has none, or if its last result is of another command."""
    before = last.get("programs", {}).get(name)
    return before if before and before["command"] == command else None


def what_got_worse(last: Mapping[str, Any], name: str, now: Outcome) -> dict[str, str]:
    """Return {name of a measurement: sentence} for each measurement of the program that is worse than in the last results.

    `name`: the program. Nothing is compared if the program had another command. If the last results are from another machine,
    only ratios and counts are compared.
    """
    before = earlier_result(last, name, now.command)
    if before is None:
        return {}
    same = before["machine"] == machine()
    found = [one for one in now.measurements if same or one.kind in ("ratio", "count")]
    slowdown = now.reference_cpu_s / before["reference_cpu_s"] if before["reference_cpu_s"] else 1.0
    return worse([Measurement(**one) for one in before["measurements"]], found, slowdown)


def run_again(program: Program, last: Mapping[str, Any], outcome: Outcome, remaining_s: float) -> Outcome:
    """Run a program again as long as a measurement is worse than its last result in all runs so far, at most MAX_RUNS in total.

    Returns the outcome of the last run, with a sentence for each measurement that was worse in all runs. A program without an
    earlier result of the same command runs a second time (`repeat`). A program that failed does not run again.
    """
    if outcome.error:
        return outcome
    if earlier_result(last, program.name, program.command) is None:
        return repeat(program, outcome, remaining_s)
    found, end = what_got_worse(last, program.name, outcome), time.monotonic() + remaining_s
    for _ in range(MAX_RUNS - 1):
        remaining_s = end - time.monotonic()
        if not found:
            break
        if remaining_s < 1.5 * outcome.seconds:
            found = {name: f"{text}; no time remained to measure it again" for name, text in found.items()}
            break
        outcome = run_program(program, min(program.deadline_s, remaining_s))
        now = what_got_worse(last, program.name, outcome)
        found = {name: text for name, text in now.items() if name in found}
    outcome.worse = list(found.values())
    return outcome


def repeat(program: Program, outcome: Outcome, remaining_s: float) -> Outcome:
    """Run a program a second time if the time suffices, because later results are compared with this one.

    Returns the means of both runs, or the first outcome if there is no second one.
    """
    if remaining_s < 1.5 * outcome.seconds:
        return outcome
    second = run_program(program, min(program.deadline_s, remaining_s))
    if second.error:
        return outcome
    first = {one.name: one for one in outcome.measurements}
    found = [mean_of(first[one.name], one) for one in second.measurements if one.name in first]
    reference_cpu_s = (outcome.reference_cpu_s + second.reference_cpu_s) / 2
    return replace(second, measurements=found, reference_cpu_s=reference_cpu_s)


def result_files(output: Path) -> list[Path]:
    """Return the files with results, oldest first: those of benchmarks/results, and then those in `output`."""
    return [*sorted(REFERENCES.glob("bench_*.json")), *sorted(output.glob("*.json"))]


def read_results(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the last result of each program. A program that did not run or failed keeps its earlier result.

    `paths`: files with results, oldest first.
    """
    programs = {}
    for path in paths:
        content = orjson.loads(path.read_bytes())
        for name, outcome in content["programs"].items():
            programs[name] = outcome | {"machine": content["machine"]}
    return {"programs": programs}


def run_all(
    programs: Sequence[Program], last: Mapping[str, Any], seconds: float, console: Console
) -> tuple[dict[str, Outcome], list[str]]:
    """Run the programs in at most `seconds`, and run them again in the time that is left (`run_again`).

    Programs with worse measurements come first, then those without an earlier result. In both classes, the shortest come first.
    Returns the outcomes by name, and a sentence for each program that cannot run.
    """
    end, outcomes = time.monotonic() + seconds, {}
    missing = {program.name: program.missing() for program in programs}
    left_out = [f"{name} was left out: {'; '.join(sentences)}" for name, sentences in missing.items() if sentences]
    for sentence in left_out:
        console.print(sentence, style="yellow")
    chosen = [program for program in programs if not missing[program.name]]
    for number, program in enumerate(chosen, 1):
        remaining_s = end - time.monotonic()
        console.rule(f"{number} of {len(chosen)}: {program.command}, {remaining_s / 60:.0f} minutes remain")
        if remaining_s > 1:
            outcomes[program.name] = run_program(program, min(program.deadline_s, remaining_s))
        else:
            outcomes[program.name] = Outcome(program.command, error="no time remained; set --minutes")
    is_worse = {program.name: bool(what_got_worse(last, program.name, outcomes[program.name])) for program in chosen}
    for program in sorted(chosen, key=lambda one: (not is_worse[one.name], outcomes[one.name].seconds)):
        outcomes[program.name] = run_again(program, last, outcomes[program.name], end - time.monotonic())
    return outcomes, left_out


def table_of(outcomes: Mapping[str, Outcome], last: Mapping[str, Any]) -> Table:
    """Return a table of all measurements, beside the last results."""
    table = Table("program", "measurement", "value", "noise", "last", title="all measurements", title_justify="left")
    for name, outcome in outcomes.items():
        before = last.get("programs", {}).get(name, {}).get("measurements", [])
        values = {one["name"]: f"{one['value']:.4g}" for one in before}
        for one in outcome.measurements:
            cells = [f"{one.value:.4g} {one.unit}", f"{one.noise:.0%}", values.get(one.name, "")]
            table.add_row(name, one.name, *cells)
    return table


def draw(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Draw all ratios with their noise."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [(name, one) for name, outcome in outcomes.items() for one in outcome.measurements if one.unit == "ratio"]
    figure = Figure(figsize=(11, 1.2 + 0.22 * len(found)), layout="constrained")
    axes = figure.subplots()
    for place, (_, one) in enumerate(found):
        axes.errorbar(one.value, place, xerr=one.value * one.noise, fmt="o", markersize=4, color="C0", capsize=2)
    axes.set_yticks(range(len(found)), [f"{name}: {one.name}" for name, one in found], fontsize=7)
    axes.set(xscale="log", xlabel="ratio, with its noise", ylim=(len(found), -1))
    axes.axvline(1.0, color="gray", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> int:
    """Parse the arguments, run the programs, write the results, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [program.name for program in PROGRAMS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PROGRAM", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=20.0, help="time for all programs")
    parser.add_argument("--against", type=Path, help="results to compare with; default: the last results")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the results")
    args = parser.parse_args()
    console, start = Console(), time.monotonic()
    against = [args.against] if args.against else result_files(args.output)
    last = read_results(against)
    chosen = [program for program in PROGRAMS if program.name in args.only]
    outcomes, left_out = run_all(chosen, last, 60 * args.minutes, console)
    date = datetime.now().strftime("%Y-%m-%d_%H%M%S")
    results = {"date": date, "machine": machine(), "seconds": time.monotonic() - start, "left_out": left_out}
    results["programs"] = {name: asdict(outcome) for name, outcome in outcomes.items() if not outcome.error}
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"{date}.json"
    path.write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))
    draw(outcomes, path.with_suffix(".png"))
    console.print(table_of(outcomes, last))
    compared = f"compared with {against[-1]}" if against else "no earlier results to compare with"
    compared += f" and {len(against) - 1} earlier files" if len(against) > 1 else ""
    console.print(f"{path}: {results['seconds'] / 60:.1f} minutes, {compared}")
    for name, outcome in outcomes.items():
        for sentence in [f"failed: {outcome.error}"] if outcome.error else outcome.worse:
            console.print(f"{name}: {sentence}", style="red", highlight=False)
    for sentence in left_out:
        console.print(sentence, style="yellow", highlight=False)
    return 1 if any(outcome.error for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
