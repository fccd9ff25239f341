"""Processes of `mrl` commands that a test started: their output, their metrics, and whether any of them are left."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

TAG = "MRL_TEST_RUN"
PATIENCE = 3  # deadlines are this many times the time that a run takes on an idle machine


def tagged(tag: str) -> list[psutil.Process]:
    """Return the live processes of one run; they inherited the variable TAG with this value."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def signal_all(processes: Iterable[psutil.Process], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes. One that ended meanwhile, for example because its parent was killed, is passed over."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def own_processes(word: str) -> list[psutil.Process]:
    """Return the live processes of the run that this process belongs to whose command line has the argument `word`."""
    found = []
    for process in tagged(os.environ[TAG]):
        with suppress(psutil.Error):  # the process ended meanwhile
            if word in process.cmdline():
                found.append(process)
    return found


def wait_until(condition: Callable[[], object], timeout_s: float = 600, poll_s: float = 0.05) -> None:
    """Wait until the condition is true, or fail. The condition should stay true once it is, or this may miss it."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"the condition did not become true within {timeout_s} s"
        time.sleep(poll_s)


@dataclass
class RunFolder:
    """The run directory of a run that may have been started by another process of the tests."""

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
        """Wait for the process to end. `timeout_s`: seconds on an idle machine; PATIENCE multiplies it."""
        try:
            self.process.wait(PATIENCE * timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            raise AssertionError(
                f"the process did not end within {PATIENCE * timeout_s} s:\n{self.output()[-3000:]}"
            ) from None
        return self

    def tagged(self) -> list[psutil.Process]:
        """Return the live processes of the run."""
        return tagged(self.tag)

    def leftovers(self, within_s: float = 90) -> list[psutil.Process]:
        """Return the processes of the run that are alive after `within_s` seconds. Ray's agents wait 60 s for a dead head."""
        end = time.monotonic() + within_s
        while (alive := tagged(self.tag)) and time.monotonic() < end:
            time.sleep(0.2)
        return alive


def restore_sigint() -> None:
    """Restore the default action of SIGINT. A shell makes its background processes, such as these tests, ignore it."""
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
"""Module with a rollout filter that kills the driver of its run once. Tests give it to `user_module`."""
