"""Collects the warnings of all processes of a run. Each warning is shown once, and listed with its count at the end of the run.

Processes of the run append their warnings to `run.dir/logs/warnings.jsonl`, and the driver reads this file once a second.
A warning is a log record of mrl with the level WARNING or higher, or a call of `warnings.warn` in the user's code. After
MAX_DISTINCT different warnings, new ones are dropped. The count of a frequent warning can lack up to 99 repeats per process.
"""

import json
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from mrl.core.code_locations import is_user_file

logger = logging.getLogger(__name__)

WARNINGS_FILE = Path("logs/warnings.jsonl")  # in the run directory
WARNINGS_VARIABLE = "MRL_WARNINGS_FILE"  # tells child processes the path of the file
USER_LOGGER = "mrl.user_code"  # name of the logger for warnings of the user's code
POLL_S = 1.0  # how often the driver reads the file
MAX_DISTINCT = 100  # largest number of different warnings in the list; further ones are dropped
MAX_LENGTH = 600  # characters that are kept of a warning
WRITTEN_ONE_BY_ONE = 100  # a process writes a line for each of the first 100 repeats, then one for every 100 repeats

_PACKAGES = ("mrl", "models", "parallel")
_LOCATION = re.compile(r"\(\S+:\d+(?:, in \S+)?\)")  # a location, as mrl.core.code_locations writes locations
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def warning_key(text: str) -> str:
    """Return the text without its numbers. Two warnings with the same key are repeats of one warning.

    If the text contains `(TEXT:NUMBER)`, usually a location in the user's code, the key is the text before the first colon, and
    the location.
    """
    if location := _LOCATION.search(text):
        return _NUMBER.sub("#", text.partition(": ")[0]) + location[0]
    return _NUMBER.sub("#", text)


class _WarningHandler(logging.Handler):
    """Passes the text of each warning of mrl and of the user's code to a function."""

    def __init__(self, receive: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._receive = receive

    def emit(self, record: logging.LogRecord) -> None:
        # A command itself prints the error that ends it. `is_shown` marks the log record of this error.
        if not getattr(record, "is_shown", False):
            error = record.exc_info[1] if record.exc_info else None
            suffix = f": {type(error).__name__}: {error}" if error else ""
            self._receive(" ".join(f"{record.getMessage()}{suffix}".split())[:MAX_LENGTH])


def _install(handler: logging.Handler) -> None:
    """Attach a handler to the loggers of mrl, and log the warnings of the user's code.

    The root logger gets no handler. With a handler there, `logging.basicConfig` in the user's code would do nothing, and Python
    would not show the records of the user's loggers.
    """
    for package in _PACKAGES:
        logging.getLogger(package).addHandler(handler)
    show = warnings.showwarning
    if getattr(show, "logs_user_code", False):
        return

    def show_or_log(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if is_user_file(filename):
            logging.getLogger(USER_LOGGER).warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)
        else:
            show(message, category, filename, lineno, file, line)

    # By default, Python shows a warning of the same line of code only once. With this filter, Python passes on every UserWarning
    # of a reward file, so that mrl can count the repeats. The module of a reward file has a name that begins with mrl_reward_of_
    # (mrl.rewards.user_function).
    warnings.filterwarnings("always", category=UserWarning, module="mrl_reward_of_")
    show_or_log.logs_user_code = True  # type: ignore[attr-defined]
    warnings.showwarning = show_or_log


class _FileWriter:
    """Appends the warnings of one process to the file of the run."""

    def __init__(self, path: Path, process: str) -> None:
        self.path, self.process = path, process
        self._counts: dict[str, int] = {}  # key of a warning -> how often it occurred in this process
        self._unwritten: dict[str, int] = {}  # key of a warning -> number of occurrences that are not in the file yet

    def __call__(self, text: str) -> None:
        key = warning_key(text)
        count = self._counts[key] = self._counts.get(key, 0) + 1
        waiting = self._unwritten[key] = self._unwritten.get(key, 0) + 1
        if count > WRITTEN_ONE_BY_ONE and waiting < WRITTEN_ONE_BY_ONE:
            return
        line = json.dumps(dict(process=self.process, text=text, count=waiting))
        with suppress(OSError), self.path.open("a") as file:  # a full disk, or the folder does not exist yet
            file.write(f"{line}\n")
            self._unwritten[key] = 0


_forwarding: list[str] = []  # the process name, if this process forwards its warnings


def forward_warnings(process: str, run_dir: str | Path | None = None) -> None:
    """Append the warnings of this process to the file of its run. Child processes can call this function, too.

    `process`: name of this process on the terminal. `run_dir`: the run directory; None: the parent process has set the file.
    Does nothing if no file is set, or if this process already forwards its warnings.
    """
    if run_dir is not None:
        os.environ[WARNINGS_VARIABLE] = str(Path(run_dir).resolve() / WARNINGS_FILE)
    if (path := os.environ.get(WARNINGS_VARIABLE)) and not _forwarding:
        _forwarding.append(process)
        _install(_WarningHandler(_FileWriter(Path(path), process)))


@dataclass
class _Entry:
    text: str
    count: int = 0


class WarningList:
    """The warnings of a run, in the order of their first occurrence."""

    def __init__(self, path: Path, terminal: TextIO | None = None) -> None:
        """`path`: file to which processes append their warnings. Its existing lines, from an earlier start, are skipped.

        `terminal`: where warnings are shown. None: the current sys.stderr, which a progress display replaces while it is shown.
        """
        self.path, self.terminal = path, terminal
        self._entries: dict[str, _Entry] = {}
        self._offset = path.stat().st_size if path.exists() else 0
        self._lock = threading.RLock()  # a signal handler that logs a warning may interrupt `add`

    def add(self, text: str, process: str = "", count: int = 1) -> None:
        """Count a warning, and show a new warning on the terminal. `process`: name of the process; empty for the driver."""
        shown = f"{process}: {text}" if process else text
        with self._lock:
            key = warning_key(text)
            if key not in self._entries:
                if len(self._entries) >= MAX_DISTINCT:
                    return
                self._entries[key] = _Entry(shown)
                self.show(f"warning: {shown}")
            self._entries[key].count += count

    def show(self, text: str) -> None:
        """Write a line to the terminal."""
        terminal = self.terminal or sys.stderr
        with suppress(RuntimeError):  # Python raises it if a signal handler writes while it interrupts another write
            terminal.write(f"{text}\n")
            terminal.flush()

    def read_file(self) -> None:
        """Add the warnings that other processes have written since the last call."""
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
            complete = content[: content.rfind(b"\n") + 1]
            self._offset += len(complete)
            for line in complete.splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a damaged line
                    record = json.loads(line)
                    self.add(record["text"], record["process"], record["count"])

    def summary(self) -> list[str]:
        """Return the lines of the list: each warning with its count. Returns [] if there was no warning."""
        entries = list(self._entries.values())
        lines = [f"  {entry.count}x {entry.text}" for entry in entries]
        return [f"warnings of this run ({sum(entry.count for entry in entries)}):", *lines] if entries else []


@contextmanager
def collect_warnings(run_dir: Path, terminal: TextIO | None = None) -> Iterator[WarningList]:
    """Show the warnings of this process and of the run's other processes on the terminal (default: stderr).

    When the context exits, the list with counts is written to the log, and also to the terminal if no exception ended the
    context.
    """
    found, show = WarningList(run_dir / WARNINGS_FILE, terminal), warnings.showwarning
    handler, ended = _WarningHandler(found.add), threading.Event()
    _install(handler)
    before = os.environ.get(WARNINGS_VARIABLE, "")
    os.environ[WARNINGS_VARIABLE] = str(found.path.resolve())  # for child processes
    reader = threading.Thread(target=_read_until, args=[found, ended], name="warnings", daemon=True)
    reader.start()
    try:
        yield found
        completed = True
    except BaseException:
        completed = False
        raise
    finally:
        ended.set()
        reader.join()
        found.read_file()
        for package in _PACKAGES:
            logging.getLogger(package).removeHandler(handler)
        warnings.showwarning = show
        os.environ[WARNINGS_VARIABLE] = before
        if lines := found.summary():
            logger.info("%s", "\n".join(lines))
            if completed:
                found.show("\n".join(lines))


def _read_until(found: WarningList, ended: threading.Event) -> None:
    while not ended.wait(POLL_S):
        found.read_file()
