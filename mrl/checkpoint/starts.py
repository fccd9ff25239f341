"""The file starts.jsonl of a run directory: one line for each start, resume and end of the run.

A start or resume without an end means that the run goes on, or that its driver was killed. `mrl report` reads commit,
packages, hosts and command of a run from this file.
"""

import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from mrl.config.secrets import redacted
from mrl.core.jsonl import last_lines
from mrl.core.run_errors import PreemptedError, UnhealthyRunError

logger = logging.getLogger(__name__)

STARTS_FILE = "starts.jsonl"
PACKAGES = ("mrl", "torch", "megatron-core", "sglang", "ray", "transformers", "transformer-engine")
GIT_TIMEOUT_S = 5.0
ERROR_CHARACTERS = 2000  # longest error message in an event `end`; the rest is cut off


@dataclass(frozen=True)
class RunEvent:
    """A start, resume or end of a run: one line of starts.jsonl. An end has only time, step, outcome and error."""

    event: str  # start, resume or end
    time: float  # seconds since 1970
    step: int  # number of finished steps
    command: str | None = None
    commit: str | None = None  # git commit of the working directory; None: no git checkout, or git fails
    changed_files: int | None = 0  # number of files with changes that are not committed; None: unknown
    hosts: Sequence[Mapping[str, Any]] = ()  # name, CPUs and GPUs of each host
    packages: Mapping[str, str] = field(default_factory=dict)  # name -> version
    outcome: str | None = None  # finished, failed, preempted, interrupted or unhealthy
    error: str | None = None  # message of the error that ended the run


@contextmanager
def record_run(run_dir: Path, step: int, hosts: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Record that a run starts, and how it ends when the context exits. The caller holds the lock of the run directory.

    `step`: number of steps in the checkpoint from which the run resumes; 0 for a new run.
    """
    commit, changed_files = _git_state()
    name = "resume" if step else "start"
    _append(
        run_dir,
        RunEvent(name, time.time(), step, _command(), commit, changed_files, hosts, _package_versions()),
    )
    outcome, message = "finished", None
    try:
        yield
    except BaseException as error:
        outcome, message = _outcome(error), f"{type(error).__name__}: {error}"
        raise
    finally:
        # Secrets are removed before the text is shortened: a part of a secret at the end would not be found.
        shown = _without_secrets([message])[0][:ERROR_CHARACTERS] if message else None
        _append(run_dir, RunEvent("end", time.time(), _last_step(run_dir, step), outcome=outcome, error=shown))


def read_events(run_dir: Path) -> list[RunEvent]:
    """Return the events of a run in order; [] if none are recorded. Damaged lines are skipped with a warning."""
    path, events = run_dir / STARTS_FILE, []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        try:
            events.append(RunEvent(**orjson.loads(line)))
        except (orjson.JSONDecodeError, TypeError) as error:
            logger.warning("%s: line %d is damaged and is not used: %s", path, number, error)
    return events


def _append(run_dir: Path, event: RunEvent) -> None:
    """Append an event. If the file cannot be written, a warning is logged and the run continues."""
    path = run_dir / STARTS_FILE
    try:
        with path.open("ab+") as file:
            start = (
                b"\n" if file.tell() and _lacks_line_end(path) else b""
            )  # a killed process may have written half a line
            file.write(start + orjson.dumps(asdict(event), option=orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        logger.warning("%s: the %s of the run is not recorded: %s", path, event.event, error)


def _lacks_line_end(path: Path) -> bool:
    return not path.read_bytes().endswith(b"\n")


def _outcome(error: BaseException) -> str:
    """Return the outcome of a run that an exception has ended."""
    outcomes = {PreemptedError: "preempted", UnhealthyRunError: "unhealthy", KeyboardInterrupt: "interrupted"}
    return next((outcome for kind, outcome in outcomes.items() if isinstance(error, kind)), "failed")


def _last_step(run_dir: Path, first: int) -> int:
    """Return the last step in metrics.jsonl, or `first` if the file has no step or cannot be read."""
    try:
        lines = last_lines(run_dir / "metrics.jsonl", 1)
        return orjson.loads(lines[0])["step"] if lines else first
    except (OSError, ValueError, KeyError, TypeError):  # an error here would hide why the run ended
        return first


def _command() -> str:
    """Return the command line of this process without secrets."""
    name = Path(sys.argv[0]).stem.removesuffix("_process")
    # Secrets are removed before the shell quotes are added, because quotes could divide a secret.
    return shlex.join(["mrl", name, *_without_secrets(sys.argv[1:])])


def _without_secrets(texts: Sequence[str]) -> list[str]:
    """Return texts without secrets and in valid Unicode. A path in another encoding is not valid Unicode."""
    return [text.encode(errors="backslashreplace").decode() for text in redacted(dict(texts=list(texts)))["texts"]]


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _git_state() -> tuple[str | None, int | None]:
    """Return the commit of the working directory and the number of changed files.

    The commit is None without git or a checkout. The number is None if git fails or does not answer in time.
    """

    def git(*arguments: str) -> bytes | None:
        line = ["git", "--no-optional-locks", *arguments]  # a lock would disturb the user's own git commands
        try:
            return subprocess.run(line, capture_output=True, timeout=GIT_TIMEOUT_S, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None

    if (commit := git("rev-parse", "HEAD")) is None:
        return None, 0
    changed = git("status", "--porcelain", "--untracked-files=no")
    return commit.decode().strip(), None if changed is None else len(changed.splitlines())
