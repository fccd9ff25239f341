"""Finds, signals and waits for processes that a test started, and reads the output and the metrics of `mrl` commands."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

TAG = "MRL_TEST_RUN"
PATIENCE = 3  # a deadline is this factor times the duration on an idle machine


def select_processes(
    processes: Iterable[psutil.Process | int], condition: Callable[[psutil.Process], object]
) -> list[psutil.Process]:
    """Return the processes that meet the condition. A process that ends during the check does not meet the condition."""
    found = []
    for each in processes:
        with suppress(psutil.Error):
            process = psutil.Process(each) if isinstance(each, int) else each
            if condition(process):
                found.append(process)
    return found


def is_alive(process: psutil.Process | int) -> bool:
    """Return whether a process is alive. A zombie is not alive, although psutil says that it is running."""
    return bool(select_processes([process], lambda p: p.is_running() and p.status() != psutil.STATUS_ZOMBIE))


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """Return all descendants of a process, or an empty list if the process has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def start_program(line: list[str], **options: Any) -> subprocess.Popen:
    """Start a program as `subprocess.Popen` does, and wait until the kernel shows its command line and its environment.

    Popen returns a moment earlier, while the kernel still shows both as empty.
    """
    process = subprocess.Popen(line, **options)
    wait_until(psutil.Process(process.pid).cmdline, 60, poll_s=0.001)
    return process


def tagged(tag: str, variable: str = TAG) -> list[psutil.Process]:
    """Return the live processes of one run: those in whose environment `variable` has the value `tag`."""
    return select_processes(psutil.process_iter(), lambda p: p.environ().get(variable) == tag and is_alive(p))


def leftovers(tag: str, within_s: float, variable: str = TAG) -> list[psutil.Process]:
    """Wait up to `within_s` seconds until all processes of one run have ended, and return those that are still alive."""
    end = time.monotonic() + within_s
    while (found := tagged(tag, variable)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def signal_all(processes: Iterable[psutil.Process], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes. Ignores processes that have already ended, for example because their parent was killed."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def own_processes(word: str) -> list[psutil.Process]:
    """Return the live processes that belong to the same run as this process and that have `word` in their command line."""
    return select_processes(tagged(os.environ[TAG]), lambda process: word in process.cmdline())


def wait_until(condition: Callable[[], object], timeout_s: float = 600, poll_s: float = 0.05) -> None:
    """Wait until the condition is true. Fails after `timeout_s` seconds. May miss a condition that is true only for a moment."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"the condition did not become true within {timeout_s} s"
        time.sleep(poll_s)


@dataclass
class RunFolder:
    """The run directory of a run. Another process of the tests may have started the run."""

    folder: Path

    def output(self) -> str:
        return (self.folder / "terminal.log").read_text()

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@dataclass
class MrlRun(RunFolder):
    """One `mrl` process and its run directory."""

    tag: str
    process: subprocess.Popen

    def finish(self, timeout_s: float = 240) -> "MrlRun":
        """Wait for the process to end.

        `timeout_s`: seconds on an idle machine; PATIENCE multiplies it. On a busy machine, in which each process has a fraction
        of a core, a second counts as this fraction. The timeout of pytest still counts whole seconds.
        """
        begin, counted_s, cores = time.monotonic(), 0.0, os.cpu_count() or 1
        while self.process.poll() is None:
            if counted_s > PATIENCE * timeout_s:
                self.process.send_signal(signal.SIGTERM)
                waited_s = time.monotonic() - begin
                raise AssertionError(f"the process did not end within {waited_s:.0f} s:\n{self.output()[-3000:]}")
            last = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            counted_s += (time.monotonic() - last) * cores / max(cores, os.getloadavg()[0])
        return self

    def tagged(self) -> list[psutil.Process]:
        """Return the live processes of the run."""
        return tagged(self.tag)

    def leftovers(self, within_s: float = 90) -> list[psutil.Process]:
        """Wait up to `within_s` seconds until all processes of the run have ended, and return those that are still alive.

        The default is longer than 60 s, because Ray's agents wait 60 s for a head node that has died.
        """
        return leftovers(self.tag, within_s)


def restore_sigint() -> None:
    """Restore the default action of SIGINT. A shell makes its background processes ignore SIGINT, for example these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


KILLING_FILTER = '''
from dataclasses import dataclass
from pathlib import Path

from mrl_runs import own_processes, signal_all

GROUP_OF_THE_KILL = 20  # the second group of step 4
groups = []


@dataclass(frozen=True)
class Killing:
    """Accepts all groups. In step 4 it kills the driver of this run, once."""

    done: str

    def __call__(self, rewards):
        groups.append(1)
        if len(groups) == GROUP_OF_THE_KILL and not Path(self.done).exists():
            Path(self.done).touch()
            signal_all(own_processes("mrl.commands.train_process"))
        return True
'''
"""Source of a module whose rollout filter kills the driver of the run once. Tests pass it to the fixture `user_module`."""
