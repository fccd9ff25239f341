"""Errors that end or interrupt a run, PreemptionHandler, and the report of the error that ends a run.

PreemptionHandler raises PreemptedError after SIGTERM or SIGUSR1. If an exception ends a command that takes config keys, the
command prints the text that `report_error` returns. `report_error` also writes the whole traceback to a file.
"""

import errno
import logging
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import psutil

from mrl.core.code_locations import error_chain, is_ray_task_error, own_traceback, source_line, user_location

logger = logging.getLogger(__name__)

REQUEUE_STATUS = 75
"""Exit status of a preempted run, which must be started again. 75 is EX_TEMPFAIL of sysexits.h.

The run has written a checkpoint if training had begun when the signal arrived.
"""
UNHEALTHY_STATUS = 3
"""Exit status of a run that trainer.on_unhealthy=stop has ended. The run has a checkpoint."""
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
KILLED_ADVICE = "the kernel's out-of-memory killer is the usual cause; check `dmesg`"
DUPLICATE_S = 2.0  # seconds after a signal in which PreemptionHandler ignores the same signal


def describe_exit(status: int) -> str:
    """Return how a process ended. `status`: exit status, negative for a signal, as in subprocess.Popen.returncode."""
    if status >= 0:
        return f"exit status {status}"
    text = f"killed by signal {-status} ({signal.Signals(-status).name})"
    return f"{text}; {KILLED_ADVICE}" if -status == signal.SIGKILL else text


class ProcessesLostError(RuntimeError):
    """Processes of the run have died, hang, or cannot be reached. New processes can continue from the last checkpoint."""

    role = "rank"  # which process was lost: "rank" is a trainer rank, "rollout" is the rollout worker


class StartupLostError(ProcessesLostError):
    """Processes were lost while the run was starting. The whole command must be restarted."""


class StartError(ValueError):
    """The run cannot start, for example because the cluster has no room for it, or because another run uses the run directory."""


class NonFiniteGradientError(FloatingPointError):
    """The gradient of a mini-batch is NaN or infinite. The optimizer has not changed any model weight."""

    def __init__(self, mini_batch: int, norm: float, reason: str = "") -> None:
        super().__init__(mini_batch, norm, reason)
        self.mini_batch, self.norm, self.reason = mini_batch, norm, reason

    def __str__(self) -> str:
        reason = f" {self.reason}" if self.reason else ""
        return (
            f"the gradient of mini-batch {self.mini_batch} is not finite (norm {self.norm}); the run ends before it sends "
            f"weights to the engines.{reason}"
        )


class UnhealthyRunError(RuntimeError):
    """The health check of learning ends the run, because trainer.on_unhealthy=stop. The run writes a checkpoint first."""


class RunDirMovedError(RuntimeError):
    """The run directory, or a file in it, was moved, deleted or replaced while the run was writing to it."""


def check_in_place(descriptor: int, path: Path) -> None:
    """Raise RunDirMovedError if `path` is no longer the file or folder that this process has opened as `descriptor`."""
    try:
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return
    except FileNotFoundError:
        pass
    raise RunDirMovedError(
        f"{path} was moved, deleted or replaced while the run was writing to it. The run ends, because its files would be split "
        "over two folders. To continue from the last checkpoint, move the folder back and start the same command again."
    )


class PreemptedError(Exception):
    """SIGTERM or SIGUSR1 asked the run to end now. The run is started again later."""


def _do_nothing() -> None:
    pass


_callback_during_waits: list[Callable[[], None]] = [_do_nothing]  # one element, which `set_callback_during_waits` sets


def set_callback_during_waits(callback: Callable[[], None] | None) -> None:
    """Set the function that the driver calls repeatedly while it waits. None: it calls no function.

    To end the wait, `callback` raises an exception.
    """
    _callback_during_waits[0] = callback or _do_nothing


def check_wait() -> None:
    """Call the function that `set_callback_during_waits` has set.

    The loops in which the driver waits for Ray calls and for placement groups call `check_wait` about twice per second or more
    often.
    """
    _callback_during_waits[0]()


class PreemptionHandler:
    """Remembers the first preemption signal, and abandons the running step if the step would take too long.

    If the same signal arrives again within DUPLICATE_S, it is ignored. Duplicate signals are normal: Slurm signals every process
    of a job step, and the supervisor of `mrl train` forwards the signals that it receives. Any other second signal ends the
    process at once. The child processes notice this end, and end too.

    After a signal, each call of `check_wait` calls `may_abandon`, and raises PreemptedError if the result is True.
    `may_abandon` is None until the first process of the run is started. Until then the signal handler itself raises
    PreemptedError. Later the signal handler must not raise, because Ray discards exceptions of signal handlers.
    """

    def __init__(self, may_abandon: Callable[[], bool] | None = None) -> None:
        self.may_abandon = may_abandon
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._previous: dict[signal.Signals, object] = {}

    def __call__(self) -> bool:
        """Return whether a signal has arrived."""
        return self.received is not None

    def __enter__(self) -> Self:
        for number in PREEMPTION_SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        set_callback_during_waits(self._check)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_callback_during_waits(None)
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[bad-argument-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received == number and time.monotonic() - self._received_at < DUPLICATE_S:
            return
        if self.received is not None:
            os._exit(128 + number)
        self.received, self._received_at = signal.Signals(number), time.monotonic()
        if self.may_abandon is None:
            raise PreemptedError(self._reason())

    def _check(self) -> None:
        if self.received is not None and self.may_abandon is not None and self.may_abandon():
            raise PreemptedError(self._reason())

    def _reason(self) -> str:
        assert self.received is not None, "only called after a signal"
        logger.warning("preempted by %s", self.received.name)
        return f"preempted by {self.received.name}"


MAX_LINES = 15  # largest number of lines of a report
MAX_MESSAGE_LINES = 8  # largest number of these lines that show the exception's own message
MAX_LINE_LENGTH = 400  # characters
DEBUG_VARIABLE = "MRL_DEBUG"  # MRL_DEBUG=1 prints the whole traceback on the terminal too
TRACEBACK_FILE = Path("logs/traceback.txt")  # in the run directory

_QUOTED_PATH = re.compile(r"'(/[^'\n]+)'")
_PORT = re.compile(r"(?:port:? ?|127\.0\.0\.1:|0\.0\.0\.0:|localhost:|\]:)(\d{2,5})", re.IGNORECASE)
_GPU_MEMORY = re.compile(r"CUDA(?: error:)? out of memory|HIP out of memory")


def report_error(error: BaseException, run_dir: Path) -> str:
    """Return the report of an error, write its traceback to a file, and log the report.

    The report has at most MAX_LINES lines. With MRL_DEBUG=1, the whole traceback follows. Characters that cannot be encoded
    are escaped, so that every terminal and file accepts the text.
    """
    full = _encodable(full_traceback(error))
    report = _encodable("\n".join([*error_lines(error, run_dir), _write_traceback(full, run_dir)][:MAX_LINES]))
    logger.error("%s", report, extra=dict(is_shown=True))  # is_shown: the command itself prints the report
    return f"{report}\n{full}" if os.environ.get(DEBUG_VARIABLE) == "1" else report


def error_lines(error: BaseException, run_dir: Path) -> list[str]:
    """Return the lines of a report, without the path of the traceback.

    The lines say what is wrong, what to do if the cause is known, and which line of the user's code raised the error.
    """
    lines = _message_lines(_unwrap(error))
    for explain in (_full_disk, _taken_port, _gpu_memory, _host_memory, _lost_process):
        if explanation := explain(list(error_chain(error)), run_dir):
            lines += explanation
            break
    if location := user_location(error):
        lines.append(f"  raised in your code: {location}")
        if source := source_line(location):
            lines.append(f"    {source}")
    return [line[:MAX_LINE_LENGTH] for line in lines]


def full_traceback(error: BaseException) -> str:
    """Return the traceback of an exception and of its causes in other processes, as text."""
    text = "".join(traceback.format_exception(error))
    remote = [own_traceback(each) for each in error_chain(error) if is_ray_task_error(each)]
    return "\n".join([text, *(part for part in remote if part not in text)])


def _unwrap(error: BaseException) -> BaseException:
    """Return the first exception of the chain that is not a RayTaskError. The message of a RayTaskError is a traceback."""
    for each in error_chain(error):
        if not is_ray_task_error(each):
            return each
    return error


def _message_lines(error: BaseException) -> list[str]:
    """Return the lines of an exception's message. For a type that mrl does not define, the type precedes the message."""
    of_mrl = type(error).__module__.startswith("mrl.")
    message = str(error).strip()
    prefix = "" if of_mrl and message else f"{type(error).__name__}: "
    lines = f"{prefix}{message}".splitlines() or [type(error).__name__]
    if len(lines) > MAX_MESSAGE_LINES:  # for example the end of an engine's log
        lines = [
            *lines[:3],
            f"  ... ({len(lines) - MAX_MESSAGE_LINES + 1} lines left out)",
            *lines[3 - MAX_MESSAGE_LINES + 1 :],
        ]
    return lines


def _encodable(text: str) -> str:
    """Return the text with escapes for lone surrogates, which UTF-8 cannot encode. A file name or JSON text may have them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _write_traceback(text: str, run_dir: Path) -> str:
    """Write the traceback to a file, and return a line that names the file."""
    path = (
        run_dir / TRACEBACK_FILE
        if run_dir.is_dir()
        else Path(tempfile.gettempdir(), f"mrl_traceback_{os.getpid()}.txt")
    )
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return f"  The traceback could not be written to {path} ({error.strerror}); {DEBUG_VARIABLE}=1 prints it."
    return f"  full traceback: {path} ({DEBUG_VARIABLE}=1 prints it)"


def _find(chain: Sequence[BaseException], matches: Callable[[BaseException], object]) -> BaseException | None:
    return next((error for error in chain if matches(error)), None)


def _full_disk(chain: Sequence[BaseException], run_dir: Path) -> list[str]:
    numbers = (errno.ENOSPC, errno.EDQUOT)
    found = _find(
        chain,
        lambda e: (isinstance(e, OSError) and e.errno in numbers) or os.strerror(errno.ENOSPC) in str(e),
    )
    if found is None:
        return []
    named = getattr(found, "filename", None)
    quoted = _QUOTED_PATH.search(str(found))
    path = Path(os.fsdecode(named) if named else quoted[1] if quoted else run_dir).resolve()
    mount = _mount_point(path)
    free = shutil.disk_usage(mount).free
    is_quota = isinstance(found, OSError) and found.errno == errno.EDQUOT
    cause = "The disk quota is used up" if is_quota else "The disk is full"
    return [
        f"  {cause}: {path} cannot be written. The file system {mount} has {free:,} bytes free.",
        "  Free space there, lower checkpoint.keep_last, or start the run on another disk (run.dir=FOLDER). If run.dir stays "
        "the same, the same command continues the run from its last checkpoint.",
    ]


def _mount_point(path: Path) -> Path:
    """Return the root of the file system that contains `path`; `path` need not exist."""
    while not path.is_mount() and path != path.parent:
        path = path.parent
    return path


def _taken_port(chain: Sequence[BaseException], run_dir: Path) -> list[str]:
    texts = (os.strerror(errno.EADDRINUSE).lower(), "eaddrinuse")
    found = _find(
        chain,
        lambda e: (
            (isinstance(e, OSError) and e.errno == errno.EADDRINUSE) or any(text in str(e).lower() for text in texts)
        ),
    )
    if found is None:
        return []
    port = _PORT.search(str(found))
    name, example = (f"Port {port[1]}", port[1]) if port else ("A port", "PORT")
    return [
        f"  {name} is taken by another process, which `ss -ltnp 'sport = :{example}'` shows. End this process, or start the "
        "command again: mrl then chooses other ports."
    ]


def _gpu_memory(chain: Sequence[BaseException], run_dir: Path) -> list[str]:
    def matches(error: BaseException) -> object:
        kind = type(error)
        return (kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch")) or _GPU_MEMORY.search(
            str(error)
        )

    if _find(chain, matches) is None:
        return []
    return [
        "  A GPU is out of memory. Lower trainer.max_tokens_per_micro_batch (for training), "
        "trainer.max_tokens_per_forward_micro_batch (for log-probabilities) or sglang.mem_fraction_static (for engines), or set "
        "megatron.recompute_granularity=full. `mrl plan memory` estimates the memory of each process."
    ]


def _host_memory(chain: Sequence[BaseException], run_dir: Path) -> list[str]:
    def matches(error: BaseException) -> bool:
        of_ray = type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("ray")
        return isinstance(error, MemoryError) or of_ray or os.strerror(errno.ENOMEM) in str(error)

    if _find(chain, matches) is None:
        return []
    memory = psutil.virtual_memory()
    return [
        f"  A host is out of memory. This host has {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available.",
        "  End other processes, use fewer ranks or engines on the host, or lower scoring.workers, scoring.memory_gb and "
        "rollout.prompts_per_step.",
    ]


def _lost_process(chain: Sequence[BaseException], run_dir: Path) -> list[str]:
    """Explain the death of a process. Ray does not report the signal that ended it."""
    found = _find(chain, lambda e: isinstance(e, ProcessesLostError) and " died" in str(e))
    if found is None:
        return []
    return [
        "  A process that dies without an error of its own was killed by a signal, usually by signal 9 (SIGKILL): "
        f"{KILLED_ADVICE}."
    ]
