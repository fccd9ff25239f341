"""The run directory: its lock, the record of the command and config, the file starts.jsonl, and the sample ledger.

Only one process at a time holds the lock. The file starts.jsonl has one line for each start, resume and end of the run. A start
or resume without an end means that the run goes on, or that its driver was killed. `mrl report` reads commit, packages, hosts and
command of a run from this file. The ledger records on which samples each step trained. With the ledger, one can prove that no
sample was lost, and that no step trained on a sample twice or on a sample that was too stale.
"""

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import xxhash
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mrl.config.secrets import redacted
from mrl.core.jsonl import JsonLinesFile, last_lines
from mrl.core.processes import end_orphans, with_variable
from mrl.core.run_errors import PreemptedError, StartError, UnhealthyRunError
from mrl.core.types import Rollouts
from parallel.durable_files import read_sealed_json, sealed_json, write_file

logger = logging.getLogger(__name__)

RUN_RECORD = "run.json"  # name of the file in the run directory that has the command and the config
RECORD_KEYS = {"command", "config"}  # keys of run.json
RUN_DIR_VARIABLE = "MRL_RUN_DIR"  # environment variable with the run directory, for all processes that inherit it
# Names of files and folders; a folder that contains one of them has the results of a run
OUTPUTS = (RUN_RECORD, "metrics.jsonl", "sft.jsonl", "checkpoint", "checkpoints", "hf")
KILL_TIMEOUT_S = 20.0  # longest wait for killed processes to end


@contextmanager
def lock_run_dir(folder: Path, command: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Lock the folder for this process, kill processes that an earlier command left behind there, and write run.json.

    When the context exits, processes of this command that have lost their parents are ended. Then the lock is released. The
    kernel also releases the lock when this process ends. Raises StartError if another process holds the lock.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise _in_use_error(folder) from None
    try:
        _kill_leftovers(folder)
        os.environ[RUN_DIR_VARIABLE] = str(folder)
        if "NCCL_DEBUG" in os.environ:
            os.environ.setdefault("NCCL_DEBUG_FILE", str(folder / "logs/nccl_%h_%p.log"))
        write_file(folder / RUN_RECORD, sealed_json(dict(command=command, config=config)), durable=True)
        yield
    finally:
        os.environ.pop(RUN_DIR_VARIABLE, None)
        end_orphans(RUN_DIR_VARIABLE, str(folder))
        lock.release()


def check_not_in_use(folder: Path) -> None:
    """Raise StartError if a process holds the lock of this folder. Nothing is created or changed."""
    if (folder / "lock").exists():
        try:
            with FileLock(folder / "lock", timeout=0):
                pass
        except Timeout:
            raise _in_use_error(folder) from None


def _in_use_error(folder: Path) -> StartError:
    """Return the error for a folder whose lock another process holds. The message names processes of this host."""
    path, holders = folder.resolve() / "lock", []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and any(file.path == str(path) for file in process.open_files()):
                command = " ".join(" ".join(process.cmdline()).split())
                holders.append(f"process {process.pid} ({command:.80})")
    who = ", ".join(holders) or "a process of another host"
    return StartError(
        f"run.dir={folder}: another run is using it: {who}. Name another folder, or end that run first; then the same command "
        "continues that run."
    )


def read_run_record(folder: Path) -> dict[str, Any] | None:
    """Return the command and config of the run in this folder; None if there is no run.

    Raises ValueError if the file is damaged. A file without a hash, as older versions of mrl wrote it, is accepted.
    """
    path = folder / RUN_RECORD
    try:
        return read_sealed_json(path, RECORD_KEYS)
    except FileNotFoundError:
        return None
    except ValueError as error:
        with suppress(ValueError):
            content = json.loads(path.read_text())
            if isinstance(content, dict) and content.keys() == RECORD_KEYS:
                return content
        raise error from None


def check_unused(folder: Path) -> None:
    """Raise ValueError if the folder has the results of a run."""
    for name in OUTPUTS:
        if (folder / name).exists():
            raise ValueError(f"run.dir={folder}: the folder has {name} of a run; name another folder.")


def _kill_leftovers(folder: Path) -> None:
    """Kill processes of an earlier command in this folder.

    The processes would end by themselves, but they hold GPUs until then.
    """
    leftovers = with_variable(RUN_DIR_VARIABLE, str(folder))
    for process in leftovers:
        logger.warning("killing process %d, which an earlier command in this folder left behind", process.pid)
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(leftovers, timeout=KILL_TIMEOUT_S)


class SampleLedger:
    """The file run.dir/ledger.jsonl, with one line per step.

    Values of a line:
        drawn: for each data set in `data.train`, the number of rows that the run has drawn since it began
        weight_version: oldest weight version that sampled a token of the step
        groups: for each group, the row of its prompt in the data set, and a hash of prompt and responses
        requests: for each group, the serial number of its prompt request
        prompts: for each group, the number of tokens in its prompt
        lengths: for each group, the number of sampled tokens in each response
        offline: the row numbers of the step's rows from `data.offline.path`; absent if the step has no such rows
        updates: for each optimizer step, weight version -> [number of trained tokens that this version sampled, sum of their
            token weights / sum of the token weights of all versions]. The token weight is a token's factor in the loss, without
            corrections.

    When a run returns to a checkpoint, the lines of later steps are removed.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        """Open the file, and remove the lines of steps after `last_step`."""
        self._lines = JsonLinesFile(path, last_step, every_step=True)

    def record(
        self, step: int, rollouts: Rollouts, drawn: list[int], token_weights: Sequence[NDArray[np.float64]] = ()
    ) -> None:
        """Record the samples on which a training step trained. The weights after the step are weight version `step`.

        Args:
            step: 1 for the first training step of the run.
            rollouts: samples of the step.
            drawn: for each data set in `data.train`, the number of rows that the run has drawn since it began.
            token_weights: for each optimizer step, an array with one number for each response: the weight that each token of
                the response has in the loss. The weight is 0 if the optimizer step does not train on the response.
        """
        sampled = slice(rollouts.num_sampled)
        starts = np.flatnonzero(np.diff(rollouts.groups[sampled], prepend=-1))
        hashes = [xxhash.xxh3_64_hexdigest(part.tobytes()) for part in np.split(rollouts.digests[sampled], starts[1:])]
        version = int(rollouts.weight_versions[sampled].min())
        groups = [[int(row), digest] for row, digest in zip(rollouts.rows[starts], hashes, strict=True)]
        lengths = [part.tolist() for part in np.split(rollouts.sampled_lengths[sampled], starts[1:])]
        line = dict(drawn=drawn, weight_version=version, groups=groups, requests=rollouts.request_numbers.tolist())
        line |= dict(prompts=rollouts.prompt_lengths[starts].tolist(), lengths=lengths)
        if rollouts.num_offline:
            line["offline"] = (-1 - rollouts.rows[rollouts.num_sampled :]).tolist()
        self._lines.write(
            step,
            line | dict(updates=[_tokens_by_version(rollouts.version_spans, weights) for weights in token_weights]),
        )

    def rewind(self, last_step: int) -> None:
        """Remove the lines of steps after `last_step`."""
        self._lines.rewind(last_step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _tokens_by_version(spans: NDArray[np.int64], token_weights: NDArray[np.float64]) -> dict[str, list[float]]:
    """Return an entry of `updates` in the ledger, for one optimizer step.

    `spans`: an array whose entries are (index of the response, weight version, count of tokens in this response that this
    version sampled). `token_weights`: for each response, the weight that each of its tokens has in the loss.
    """
    responses, versions, counts = spans.T
    span_weights, total = token_weights[responses] * counts, float((token_weights[responses] * counts).sum())
    entry = {}
    for each in np.unique(versions[span_weights > 0]).tolist():
        selected = (versions == each) & (span_weights > 0)
        entry[str(each)] = [int(counts[selected].sum()), round(float(span_weights[selected].sum()) / total, 9)]
    return entry


STARTS_FILE = "starts.jsonl"
# Packages whose versions an event records
PACKAGES = ("mrl", "torch", "megatron-core", "sglang", "ray", "transformers", "transformer-engine")
GIT_TIMEOUT_S = 5.0  # time limit of each git command
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
    outcome: str | None = None  # finished, failed, preempted, interrupted or unhealthy (trainer.on_unhealthy=stop)
    error: str | None = None  # message of the error that ended the run


@contextmanager
def record_run(run_dir: Path, step: int, hosts: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Record that a run starts. When the context exits, record how the run ended. The caller holds the lock of the run directory.

    `step`: number of finished steps in the checkpoint from which the run resumes; 0 for a new run.
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
            # a killed process may have written half a line
            start = b"\n" if file.tell() and _lacks_line_end(path) else b""
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

    Without git or a checkout, or if git does not name the commit in time, the commit is None and the number is 0. If git does not
    list the files in time, the number is None.
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
