"""`mrl bench gpu`: measures one GPU with mrl's own code, and writes the numbers to a file."""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mrl.bench.sections import MACHINE, MACHINE_TIMEOUT_S, SECTIONS, SIZES, Bench, Section, SectionResult
from mrl.core.code_locations import IS_CHECKOUT, PACKAGE_ROOT
from mrl.doctor.gather.host_probe import read_gpus

USAGE = """usage: mrl bench gpu [--device cuda|cpu] [--size full|small|toy] [--sections NAME,NAME] [--minutes N] [--output FILE]

Measures one GPU with mrl's own code: first whether the programs of tests/gpu compute the right results, then speed and memory of
matrix products, the log-probability head, attention, a training step, an update on a long response, offload and load, transfers
and checksums. Needs no network, no model and no data. Needs torch 2.14, as all of mrl does: older versions lack functions that
attention uses. If another package is missing, such as flash-attn, one line says which measurements are skipped and why.

Each section runs in a process of its own, which ends at its deadline. If a section fails, the next section still runs. The
numbers are printed as a table and written to a JSON file.

  mrl bench gpu                                  measures the first visible GPU, in at most 10 minutes
  mrl bench gpu --sections matrix,attention      measures only these sections
  mrl bench gpu --device cpu                     runs the same code at toy size on a CPU, in about a minute

  --device     cuda (default) or cpu
  --size       full, small or toy. Default: full if the card has enough free memory, otherwise small or toy; toy on a CPU.
  --sections   some of: @sections@. Default: all.
  --minutes    longest duration. Default: 10.
  --output     JSON file. Default: gpu_CARD_DATE.json in benchmarks/results of the checkout, or in the current folder if mrl is
               installed as a package.

The exit status is 0 if every section ran or was skipped, 1 if a section failed, and 2 for wrong arguments or if there is no GPU.
""".replace("@sections@", ", ".join(section.name for section in SECTIONS))

SCHEMA = 1  # version of the format of the JSON file
FREE_GIB = {"full": 60.0, "small": 14.0}
"""Size of the measurements -> free GPU memory that this size needs, in GiB. If neither size fits, the size is toy."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "mrl bench", usage=USAGE.splitlines()[0].removeprefix("usage: "), add_help=False, allow_abbrev=False
    )
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("kind", nargs="?", choices=["gpu"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--sections", type=_sections, default=SECTIONS)
    parser.add_argument("--minutes", type=_minutes, default=10.0)
    parser.add_argument("--output", type=Path)
    return parser


def _sections(text: str) -> list[Section]:
    """Return the named sections in the order of SECTIONS."""
    known = {section.name: section for section in SECTIONS}
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or (unknown := [name for name in names if name not in known]):
        wrong = repr(unknown[0]) if names else "no section"
        raise argparse.ArgumentTypeError(f"{wrong}; expected some of {', '.join(known)}")
    return [section for section in SECTIONS if section.name in names]


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of minutes above 0, such as 10")
    return minutes


def visible_device(device: str, visible: str | None) -> str:
    """Return a value of CUDA_VISIBLE_DEVICES that shows one GPU, or no GPU if `device` is cpu. `visible`: the current value."""
    if device == "cpu":
        return ""
    return "0" if visible is None else visible.split(",")[0]


def choose_size(device: str, free_gib: float) -> str:
    """Return the largest size that fits on the device."""
    if device == "cpu":
        return "toy"
    return next((size for size, needed in FREE_GIB.items() if free_gib >= needed), "toy")


def write_new(folder: Path, report: dict[str, Any], now: time.struct_time) -> Path:
    """Write a report to a new file, and return its path: gpu_CARD_DATE.json, or cpu_DATE.json without a card.

    If this file exists, for example because two commands run at the same time, the name also contains the time. If that file
    exists, too, the name also contains the id of this process.
    """
    card = re.sub(r"[^a-z0-9]+", "_", (report["machine"].get("card") or "").lower().removeprefix("nvidia ")).strip("_")
    name = f"{f'gpu_{card}' if card else 'cpu'}_{time.strftime('%Y-%m-%d', now)}"
    with_time = f"{name}_{time.strftime('%H%M%S', now)}"
    folder.mkdir(parents=True, exist_ok=True)
    for stem in (name, with_time, f"{with_time}_{os.getpid()}"):
        with suppress(FileExistsError), (folder / f"{stem}.json").open("x") as file:
            file.write(as_text(report))
            return folder / f"{stem}.json"
    raise FileExistsError(f"{folder / with_time}_{os.getpid()}.json exists; use --output")


def as_text(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=1) + "\n"


def _results_folder() -> Path:
    folder = PACKAGE_ROOT / "benchmarks" / "results"
    return folder if IS_CHECKOUT and folder.is_dir() else Path.cwd()


def refusal(device: str, machine: dict[str, Any], result: SectionResult) -> str:
    """Return why this machine cannot be measured, and what to do; "" if it can."""
    if result.problems:
        return f"the facts about this machine cannot be read: {result.problems[0]}\n" + "\n".join(result.log)
    if device == "cpu" or machine.get("card"):
        return ""
    torch = machine["versions"]["torch"]
    built = f"for CUDA {machine['cuda_of_torch']}" if machine["cuda_of_torch"] else "without CUDA"
    return (
        f"torch {torch}, which is built {built}, finds no GPU on this machine. Run `mrl doctor` to see which driver and GPUs it "
        "has. `mrl bench gpu --device cpu` runs the same code at toy size without a GPU."
    )


def print_results(console: Console, results: Sequence[SectionResult]) -> None:
    """Print one table with a row for each case. Then, for each section, print what could not be measured, and the errors."""
    table = Table("section", "case", "numbers", show_lines=False)
    for result in results:
        for row in result.rows:
            numbers = (f"{one['quantity']} {_number(one['value'])} {one['unit']}".strip() for one in row["values"])
            table.add_row(result.name, row["case"], ", ".join(numbers))
    console.print(table)
    for result in results:
        for reason in result.left_out:
            console.print(f"left out: {result.name}: {reason}", markup=False)
        for problem in result.problems:
            console.print(f"failed: {result.name}: {problem}", markup=False, style="bold red")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def report_of(
    bench: Bench, results: Sequence[SectionResult], begun: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the content of the JSON file. `begun`: time.time() at the start of the command."""
    cards = read_gpus().cards if arguments.device == "cuda" else []
    machine = {name: value for name, value in bench.machine.items() if name != "versions"}
    return dict(
        schema=SCHEMA,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
        seconds=round(time.time() - begun, 1),
        device=arguments.device,
        size=bench.size,
        machine=machine | dict(driver=cards[0].driver if cards else None),
        versions=bench.machine["versions"],
        rates_tflops=bench.rates,
        programs=bench.gpu_tests,
        sections=[result.as_json() for result in results],
        left_out=[f"{result.name}: {reason}" for result in results for reason in result.left_out],
        failed=[f"{result.name}: {problem}" for result in results for problem in result.problems],
    )


def measure(arguments: argparse.Namespace, console: Console) -> int:
    """Measure the device, print the table and write the file. Returns the exit status."""
    begun = time.time()
    show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    show(
        f"mrl bench gpu: reading the {'card' if arguments.device == 'cuda' else 'machine'} and the versions of packages"
    )
    visible = visible_device(arguments.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    bench = Bench(arguments.size or "toy", {"CUDA_VISIBLE_DEVICES": visible}, show)
    facts = bench.run_section(MACHINE, MACHINE_TIMEOUT_S)
    if why := refusal(arguments.device, bench.machine, facts):
        sys.stderr.write(f"mrl bench gpu: {why}\n")
        return 2
    machine = bench.machine
    bench.size = arguments.size or choose_size(arguments.device, machine["free_gib"])
    card = (
        f"{machine['card']} with {machine['free_gib']} of {machine['memory_gib']} GiB free"
        if machine["card"]
        else "CPU"
    )
    needed = "; ".join(f"{size} needs {gib:.0f} GiB" for size, gib in FREE_GIB.items())
    show(
        f"{card}, torch {machine['versions']['torch']}, size {bench.size}" + (f" ({needed})" if machine["card"] else "")
    )
    results = bench.run(arguments.sections, 60 * arguments.minutes - (time.time() - begun))
    print_results(console, results)
    report = report_of(bench, results, begun, arguments)
    if path := arguments.output:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_text(report))
    else:
        path = write_new(_results_folder(), report, time.gmtime(begun))
    show(f"{path}: all numbers, after {time.time() - begun:.0f} s")
    return int(any(result.problems for result in results))


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # an exception, so that `measure` also ends the process of the current section


def main(argv: list[str]) -> int:
    """Entry point of `mrl bench`. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.help or not arguments.kind:
        (sys.stdout if arguments.help else sys.stderr).write(USAGE)
        return 0 if arguments.help else 2
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return measure(arguments, Console(width=None if sys.stdout.isatty() else 160, highlight=False))
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
