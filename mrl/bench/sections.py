"""Sections of `mrl bench gpu`. Each section runs in a child process with a deadline, and reports through a file.

`python -m mrl.bench.sections SPEC` runs one section; SPEC is a SectionSpec as JSON. The process appends lines of JSON to the file
`SectionSpec.events`: table rows, errors, measurements that are not possible, and what the section does now. So the
file keeps the numbers of a section that crashes or does not finish. This module imports no torch, so that the command shows its
first line at once.
"""

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from mrl.core.code_locations import IS_CHECKOUT, PACKAGE_ROOT, python_path
from mrl.core.processes import kill_with_parent

POLL_S = 0.1  # time between two reads of the file of a running section
MACHINE_TIMEOUT_S = 300.0  # longest time to import torch from a slow disk and to start CUDA
LOG_LINES = 30  # number of lines of a failed section's output that the report contains
MAX_PROBLEM = 300  # number of characters that the report keeps of an error's text
SIZES = ("full", "small", "toy")
Value = tuple[str, float, str]  # (quantity, number, unit)
CASE_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, ImportError, OSError)
"""Exceptions of libraries that cannot compute a case on this machine. torch's OutOfMemoryError is a RuntimeError, too."""


@dataclass(frozen=True)
class Section:
    """A group of measurements that run in one process."""

    name: str
    title: str
    function: str  # "package.module:function"; the function takes a SectionJob
    time_fraction: float  # fraction of the command's time that the section may use
    megatron: bool = False  # whether the module imports Megatron; `main` then patches Megatron first


SECTIONS = (
    Section("correctness", "programs of tests/gpu", "mrl.bench.sections:check_gpu_tests", 0.25),
    Section("matrix", "rate of matrix products", "mrl.bench.device_rates:measure_matrix_products", 0.05),
    Section("head", "log-probability head", "mrl.bench.device_rates:measure_head", 0.1),
    Section("attention", "attention over packs", "mrl.bench.attention:measure_attention", 0.12, megatron=True),
    Section("step", "training step", "mrl.bench.model_steps:measure_step", 0.18, megatron=True),
    Section("long", "long responses", "mrl.bench.model_steps:measure_long_responses", 0.1, megatron=True),
    Section("sleep", "offload and load of the trainer", "mrl.bench.model_steps:measure_sleep", 0.1, megatron=True),
    Section("ipc", "transfer between two processes", "mrl.bench.device_rates:measure_ipc", 0.05),
    Section("hashing", "checksums", "mrl.bench.device_rates:measure_checksums", 0.05),
)
"""All sections in the order in which they run."""

USED_BY_TESTS = 0.9  # fraction of the section's time after which pytest is interrupted
TEST_LINE = re.compile(r"(\S*::(\S+)) (PASSED|FAILED|SKIPPED|ERROR)(?: \((.*)\))?")
"""Line that pytest prints for a test: file with name, name alone, outcome, and the reason if the test was skipped."""
SUMMARY_LINE = re.compile(r"(?:FAILED|ERROR) \S*::(\S+) - (.*)")
"""Line that pytest prints at its end for a test that failed: name, and the first line of the error."""

MACHINE = Section("machine", "card and versions", "mrl.bench.device_rates:read_machine", 0.0)
"""Section that reports the card and the versions of packages. It runs before SECTIONS."""


@dataclass(frozen=True)
class SectionSpec:
    """Arguments of a section's process."""

    function: str  # as in Section
    megatron: bool  # as in Section
    size: str  # one of SIZES
    deadline_s: float
    events: str  # file to which the process appends its events
    # TFLOP/s of bfloat16 matrix products (float32 on a CPU): "measured" in the section matrix, and "published" for the card
    rates: Mapping[str, float]


@dataclass(frozen=True)
class SectionJob:
    """Argument of a section's function. It has the arguments of the process, and methods that report results."""

    spec: SectionSpec
    events: TextIO

    def progress(self, text: str) -> None:
        """Report what the section does now."""
        self._report(progress=text)

    def row(self, case: str, *values: Value) -> None:
        """Report one row of the table."""
        self._report(row=dict(case=case, values=[dict(quantity=q, value=v, unit=u) for q, v, u in values]))

    def leave_out(self, what: str, why: str) -> None:
        """Report that a measurement is not possible here, for example because a package is not installed."""
        self._report(left_out=f"{what}: {why}")

    def fail(self, problem: str) -> None:
        """Report an error. Later measurements of the section still count."""
        self._report(problem=problem[:MAX_PROBLEM])

    def report_test(self, test: str, outcome: str) -> None:
        """Report the outcome of a test in tests/gpu, such as "passed". `test` is the name that pytest uses."""
        self._report(test={test: outcome})

    def set_rate(self, name: str, tflops: float) -> None:
        """Report a rate relative to which later sections compute their efficiency."""
        self._report(rate={name: tflops})

    def set_machine(self, facts: Mapping[str, Any]) -> None:
        """Report the facts about this machine."""
        self._report(machine=dict(facts))

    def efficiency(self, tflops: float) -> list[Value]:
        """Return `tflops`, and its percentage of each rate that is known."""
        shares = [(f"of the {name} rate", 100 * tflops / rate, "%") for name, rate in self.spec.rates.items() if rate]
        return [("rate", tflops, "TFLOP/s"), *shares]

    @contextmanager
    def case(self, what: str) -> Iterator[None]:
        """Context of one measurement. Reports its start, and reports an error without ending the section.

        If the memory of the card is too small, the measurement is left out, and this does not count as an error.
        """
        self.progress(what)
        try:
            yield
        except CASE_ERRORS as error:
            if type(error).__name__ == "OutOfMemoryError":
                self.leave_out(what, "the memory of this card is too small for it")
            else:
                traceback.print_exc()
                self.fail(f"{what}: {describe_error(error)}")

    def _report(self, **event: Any) -> None:
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()


@dataclass
class SectionResult:
    """What a section reported."""

    name: str
    title: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)  # last lines of the output of a failed section
    last_step: str = "its start"  # what the section reported last with SectionJob.progress

    @property
    def status(self) -> str:
        """Return "failed" if the section reported an error, "measured" if it reported a row, and "left out" otherwise."""
        return "failed" if self.problems else "measured" if self.rows else "left out"

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        fields = {name: value for name, value in asdict(self).items() if name != "last_step"}
        return fields | dict(status=self.status, seconds=round(self.seconds, 3))


@dataclass
class Bench:
    """Runs sections one after the other, and shows their progress with `show`."""

    size: str  # one of SIZES
    environment: Mapping[str, str]  # environment variables of the processes, in addition to those of this process
    show: Callable[[str], None]
    rates: dict[str, float] = field(default_factory=dict)  # as in SectionSpec
    machine: dict[str, Any] = field(default_factory=dict)  # facts that the section `machine` reported
    gpu_tests: dict[str, str] = field(default_factory=dict)  # test in tests/gpu -> outcome

    def run(self, sections: Sequence[Section], seconds: float) -> list[SectionResult]:
        """Run all sections within `seconds`. The time that a section does not use goes to the later sections."""
        end, results = time.monotonic() + seconds, []
        for number, section in enumerate(sections):
            left = sum(one.time_fraction for one in sections[number:])
            deadline_s = max(1.0, (end - time.monotonic()) * section.time_fraction / left)
            self.show(f"{number + 1}/{len(sections)} {section.name}: {section.title} (at most {deadline_s:.0f} s)")
            try:
                results.append(self.run_section(section, deadline_s))
            except KeyboardInterrupt:
                problem = "the command was interrupted"
                rest = sections[number:]
                return results + [SectionResult(one.name, one.title, problems=[problem]) for one in rest]
        return results

    def run_section(self, section: Section, deadline_s: float) -> SectionResult:
        """Run a section in a child process. At the deadline, end the child and the processes that it started."""
        result, begun = SectionResult(section.name, section.title), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mrl-bench-") as folder:
            events, log = Path(folder, "events"), Path(folder, "log")
            events.touch()
            fields = dict(size=self.size, deadline_s=deadline_s, events=str(events), rates=self.rates)
            spec = SectionSpec(section.function, section.megatron, **fields)
            child = self._start(spec, folder, log)
            try:
                ended = self._follow(child, events, result, begun + deadline_s)
            finally:
                _kill(child)
            if not ended:
                result.problems.append(
                    f"it did not finish within {deadline_s:.0f} s; it was at: {result.last_step}; use a larger --minutes"
                )
            elif child.returncode and not result.problems:
                result.problems.append(_end_of_process(child.returncode, log))
            if result.problems:
                result.log = _without_folders(log.read_text(errors="replace"), folder).splitlines()[-LOG_LINES:]
        result.seconds = time.monotonic() - begun
        for problem in result.problems:
            self.show(f"  failed: {problem}")
        return result

    def _start(self, spec: SectionSpec, folder: str, log: Path) -> subprocess.Popen:
        environment = os.environ | {"PYTHONPATH": python_path(), "TMPDIR": folder, **self.environment}
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "mrl.bench.sections", json.dumps(asdict(spec))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def _follow(self, child: subprocess.Popen, events: Path, result: SectionResult, end: float) -> bool:
        """Read events until the process ends or the time is over. Returns whether the process has ended."""
        with events.open() as stream:
            text = ""
            while True:
                ended = child.poll() is not None  # checked before the read, so that the last events are read
                text += stream.read()
                *lines, text = text.split("\n")
                for line in lines:
                    self._take(json.loads(line), result)
                if ended or time.monotonic() > end:
                    return ended
                time.sleep(POLL_S)

    def _take(self, event: dict[str, Any], result: SectionResult) -> None:
        ((kind, value),) = event.items()
        match kind:
            case "progress":
                result.last_step = value
                self.show(f"  {value}")
            case "row":
                result.rows.append(value)
            case "left_out":
                result.left_out.append(value)
                self.show(f"  left out: {value}")
            case "problem":
                result.problems.append(value)
            case "test":
                self.gpu_tests |= value
            case "rate":
                self.rates |= value
            case "machine":
                self.machine |= value


def describe_error(error: BaseException) -> str:
    """Return type and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:MAX_PROBLEM]


def _without_folders(text: str, scratch: str) -> str:
    """Return an output in which short names replace the folders of this machine, because reports are published."""
    folders = {
        scratch: "SCRATCH",
        str(PACKAGE_ROOT): ".",
        sys.prefix: "VENV",
        sys.base_prefix: "PYTHON",
        str(Path.home()): "~",
    }
    for folder in sorted(folders, key=len, reverse=True):  # a folder before its parents
        text = text.replace(folder + os.sep, folders[folder] + os.sep)
    return text


def _end_of_process(status: int, log: Path) -> str:
    """Return why a process ended, if the process reported no error itself."""
    last = log.read_text(errors="replace").strip().splitlines()[-1:]
    reason = f"status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
    if -status == signal.SIGKILL:
        return f"its process was ended by {reason}; the host may be out of memory"
    return f"its process ended with {reason}" + (f": {last[0][:MAX_PROBLEM]}" if last else "")


def _kill(child: subprocess.Popen) -> None:
    """End a section's process and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def check_gpu_tests(job: SectionJob) -> None:
    """Section correctness: run the tests in tests/gpu with pytest, and report the outcome of each test."""
    folder = PACKAGE_ROOT / "tests" / "gpu"
    if not (IS_CHECKOUT and folder.is_dir()):
        job.leave_out(
            "programs of tests/gpu", "an installed package has no tests; run the command in a checkout of mrl"
        )
        return
    if importlib.util.find_spec("pytest") is None:
        job.leave_out("programs of tests/gpu", "pytest is not installed; run make setup")
        return
    chosen = ["-m", "extended" if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else "gpu"]
    if job.spec.size == "toy":  # tests that take only seconds
        chosen += ["-k", "equals_the_exact_attention or whole_logits or reads_the_slots"]
    _run_pytest(job, [str(folder), *chosen])


def _run_pytest(job: SectionJob, arguments: Sequence[str]) -> None:
    """Run pytest, and report each test. If pytest still runs shortly before the deadline, it is interrupted.

    An interrupted pytest does not run the remaining tests, but it still prints why tests have failed.
    """
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *arguments]
    wide = os.environ | {"COLUMNS": "400"}  # so that pytest prints the whole reason of a skipped test
    pipes = dict(stdout=subprocess.PIPE, text=True, errors="replace")
    pytest = subprocess.Popen(command, cwd=PACKAGE_ROOT, env=wide, preexec_fn=_restore_sigint, **pipes)
    assert pytest.stdout is not None, "the output is a pipe"
    interrupted = threading.Event()

    def interrupt() -> None:
        interrupted.set()
        pytest.send_signal(signal.SIGINT)  # the child processes of pytest end with this section at the latest

    timer = threading.Timer(USED_BY_TESTS * job.spec.deadline_s, interrupt)
    timer.start()
    counts = dict(PASSED=0, FAILED=0, SKIPPED=0, ERROR=0)
    for line in pytest.stdout:
        sys.stdout.write(line)
        if match := TEST_LINE.match(line):
            test, name, outcome, reason = match.groups()
            counts[outcome] += 1
            job.report_test(test, outcome.lower())
            job.progress(f"{name}: {outcome.lower()}")
            if outcome == "SKIPPED":
                job.leave_out(name, reason or "skipped")
            elif outcome != "PASSED":
                job.fail(f"{name}: {outcome.lower()}")
        elif match := SUMMARY_LINE.match(line):
            job.fail(f"{match[1]}: {match[2]}")
    status = pytest.wait()
    timer.cancel()
    failed = counts["FAILED"] + counts["ERROR"]
    if counts["PASSED"] or failed:
        job.row("programs of tests/gpu", ("passed", counts["PASSED"], "tests"), ("failed", failed, "tests"))
    if interrupted.is_set():
        job.leave_out(
            "the remaining programs", "there was no time for them; use a larger --minutes, or pytest -m gpu tests/gpu"
        )
    elif status and not failed:
        job.fail(f"pytest ended with status {status}")


def _restore_sigint() -> None:
    """Restore the default action of SIGINT. A shell makes its background processes ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main(spec: SectionSpec) -> int:
    """Run one section in this process. Returns the exit status."""
    kill_with_parent()
    with Path(spec.events).open("a") as events:
        job = SectionJob(spec, events)
        try:
            if spec.megatron:
                importlib.import_module("parallel.device").patch_megatron_for_cpu()
            module, _, name = spec.function.partition(":")
            getattr(importlib.import_module(module), name)(job)
        except Exception as error:  # process boundary: the parent reports the error and goes on with the next section
            traceback.print_exc()
            job.fail(describe_error(error))
            return 1
    return 0


if __name__ == "__main__":
    status = main(SectionSpec(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips exit handlers: a library that hangs in them would take time from other sections
