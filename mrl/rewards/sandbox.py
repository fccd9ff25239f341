"""Sandbox for untrusted Python: programs in responses, and the code tool of agents.

Each run is one process, which executes `mrl/rewards/sandbox_child.py`. Before this process compiles the program, it gives
up access to the network and to other processes. After that, it cannot start a process. It can open only the files in its own
temporary folder, /dev/null and, for reading, the Python installation, some files of the system (_SYSTEM_PATHS, _DEVICE_FILES) and
the folders `path` of `run`. The kernel enforces these restrictions by Landlock, seccomp and resource limits.
`mrl/rewards/sandbox_filter.py` contains the seccomp filter.

This module starts the process, checks the limits that the kernel does not enforce, ends the process in time, and reports
why the process ended. docs/tutorials/reward.md lists the restrictions.
"""

import difflib
import fcntl
import functools
import marshal
import os
import resource
import select
import selectors
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from mrl.rewards import sandbox_child, sandbox_filter

Reason = Literal[
    "ok",  # the program exited with status 0
    "wrong exit",  # the program exited with another status, for example after an uncaught exception
    "forbidden",  # uncaught PermissionError, for example after access to a file or the network
    "time limit",  # the program exceeded the limit of the wall time
    "cpu limit",  # the program exceeded the limit of the CPU time
    "memory",
    "too much output",
    "too many threads",
    "too much on disk",  # too many bytes or too many files
    "killed",  # ended by a signal that this module did not send, for example after a crash or when memory ran out
]
_CHECK_INTERVAL_S = 0.02  # seconds between two checks of the limits
_PF_EXITING = 0x4  # flag of an exiting thread in /proc/PID/stat
_MIN_MEMORY_BYTES = 64 << 20  # SandboxLimits.memory_bytes must be larger
_START_LIMIT_S = 30.0  # seconds in which the interpreter must start and restrict itself; long enough for a busy machine
_SYSTEM_PATHS = (  # paths that programs may read
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)
_DEVICE_FILES = ("/dev/urandom", "/dev/random", "/dev/zero")  # also readable


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one run. Raises ValueError for a limit that is too small or has the wrong type."""

    wall_s: float = 10.0  # wall time in seconds
    cpu_s: int = 10  # CPU time in seconds of all threads together
    memory_bytes: int = 1 << 30  # size of the address space; the interpreter itself takes about 20 MiB
    output_bytes: int = 1 << 20  # size of stdout; the same limit holds for stderr
    disk_bytes: int = 16 << 20  # size of all files in the temporary folder together
    files: int = 64  # number of files in the temporary folder
    threads: int = 32  # number of threads

    def __post_init__(self) -> None:
        for each in fields(self):
            value, bound = getattr(self, each.name), _MIN_MEMORY_BYTES if each.name == "memory_bytes" else 0
            types = (int, float) if each.name == "wall_s" else (int,)
            if not isinstance(value, types) or value <= bound:
                expected = "number" if each.name == "wall_s" else "whole number"
                raise ValueError(f"sandbox limit {each.name}={value!r}: expected a {expected} above {bound}.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the limits that a config node sets. Raises ValueError for an unknown name."""
        known = [each.name for each in fields(cls)]
        if unknown := [name for name in values if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{unknown[0]!r} is not a limit of the sandbox; did you mean {near!r}? The limits are {', '.join(known)}."
            )
        return cls(**values)


@dataclass(frozen=True)
class SandboxResult:
    """Result of a run. The output of the program is decoded as UTF-8, and invalid bytes become U+FFFD."""

    reason: Reason
    detail: str  # the limit that was exceeded, or the last line on stderr
    stdout: str
    stderr: str
    returncode: int  # exit status; -N if signal N ended the process
    seconds: float  # wall time of the program, without the start of the interpreter

    @property
    def failure(self) -> str | None:
        """The reason and the detail in one line; None if the program ended normally."""
        return None if self.reason == "ok" else f"{self.reason}: {self.detail}"


@functools.cache
def unavailable_reason() -> str | None:
    """Return why this machine does not support the sandbox, or None if it does."""
    if sys.platform != "linux" or os.uname().machine not in sandbox_filter.ARCHITECTURES:
        expected = " or ".join(sandbox_filter.ARCHITECTURES)
        return f"the sandbox needs Linux on {expected}, but this is {sys.platform} on {os.uname().machine}"
    if sandbox_child.landlock_abi() < 1:
        return "the kernel offers no Landlock (it needs Linux 5.13 or later with lsm=landlock; a container runtime may hide it)"
    if not sandbox_child.seccomp_works():
        return "the kernel offers no seccomp filters (CONFIG_SECCOMP_FILTER)"
    return None


def require_sandbox() -> None:
    """Raise ValueError with the reason if this machine does not support the sandbox."""
    if reason := unavailable_reason():
        raise ValueError(
            f"untrusted code cannot be run on this machine: {reason}; choose a reward or tool that runs no code."
        )


def run_python(source: str, limits: SandboxLimits | None = None) -> SandboxResult:
    """Run a Python program without standard input. `run` describes the result and the errors."""
    return run(source, "", limits or SandboxLimits())


def run(source: str, stdin: str, limits: SandboxLimits, path: tuple[str, ...] = ()) -> SandboxResult:
    """Run a Python program. Return after its process has ended.

    Args:
        source: the program.
        stdin: standard input of the program.
        limits: resource limits.
        path: additional folders that the program may read and import from.

    Raises:
        ValueError: the machine does not support the sandbox.
        RuntimeError: the restrictions could not be applied, so the program has not run.
    """
    require_sandbox()
    with (
        tempfile.TemporaryDirectory(prefix="mrl-code-", ignore_cleanup_errors=True) as folder,
        _sealed_file("source", source) as source_file,
        _sealed_file("stdin", stdin) as stdin_file,
    ):
        process, status = _start(Path(folder), source_file, stdin_file, limits, path)
        with process, open(status, "rb") as status_pipe:
            program = _RunningProgram(process, Path(folder), limits, os.fstat(stdin_file))
            try:
                program.wait_for_restrictions(status_pipe.fileno())
                return program.watch()
            finally:
                process.kill()


@contextmanager
def _sealed_file(name: str, text: str) -> Iterator[int]:
    """Yield the descriptor of an in-memory file with `text`. The file is sealed, so no process can change it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", buffering=0) as file:
        data = memoryview(text.encode("utf-8", "replace"))
        while data:
            data = data[file.write(data) :]
        file.seek(0)
        fcntl.fcntl(
            file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        )
        yield descriptor


def _start(
    folder: Path, source: int, stdin: int, limits: SandboxLimits, path: tuple[str, ...]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start sandbox_child.py. Return the process, and the descriptor from which its message RESTRICTED can be read."""
    read_end, write_end = os.pipe()
    stdlib = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), f"{sys.base_prefix}/lib")
    stack = min(64 << 20, limits.memory_bytes // 4)
    program = sandbox_filter.seccomp_program(os.uname().machine)
    config = {
        "limits": {
            "AS": limits.memory_bytes,
            "CPU": limits.cpu_s + 1,
            "FSIZE": limits.disk_bytes,
            "STACK": stack,
        },
        "readable": [*dict.fromkeys([*stdlib, *_SYSTEM_PATHS, *_DEVICE_FILES, *path])],
        "path": list(path),
        "parent": os.getpid(),
        "filter": (program.code, program.own_pid_offsets),
        "source_fd": source,
        "status_fd": write_end,
    }
    try:
        process = subprocess.Popen(
            [os.path.realpath(sys.executable), "-I", "-S", "-B", sandbox_child.__file__, marshal.dumps(config).hex()],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd=folder,
            pass_fds=(source, write_end),
            start_new_session=True,
        )
    except OSError:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return process, read_end


@dataclass
class _RunningProgram:
    """A process of the sandbox that runs a program."""

    process: subprocess.Popen[bytes]
    folder: Path  # temporary folder of the process
    limits: SandboxLimits
    stdin: os.stat_result  # os.fstat of the file that is the standard input of the process
    output: dict[int, bytearray] = field(default_factory=dict)  # descriptor of stdout or stderr -> bytes read from it
    stopped: tuple[Reason, str] | None = None  # why this module ended the process; None: this module has not ended it
    started: float = 0.0  # time.monotonic() when the program started
    checked: float = 0.0  # time.monotonic() of the last check of the limits

    def wait_for_restrictions(self, status: int) -> None:
        """Wait for the message that all restrictions are in force. Raises RuntimeError if the process does not send it.

        `status` is the descriptor of the pipe on which the process sends the message.
        """
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(status, select.POLLIN)
        if poll.poll(_START_LIMIT_S * 1000) and os.read(status, 64) == sandbox_child.RESTRICTED:
            return
        self.process.kill()
        stderr = self.process.communicate()[1].decode("utf-8", "replace")
        raise RuntimeError(
            "the restrictions of the sandbox could not be applied, so the program was not run: "
            f"{_last_line(stderr) or 'the process gave no answer'}"
        )

    def watch(self) -> SandboxResult:
        """Read the output of the process and check its limits until the process ends. Return the result."""
        assert self.process.stdout and self.process.stderr, "both are pipes"
        out, err = self.process.stdout.fileno(), self.process.stderr.fileno()
        self.output = {out: bytearray(), err: bytearray()}
        self.started = time.monotonic()
        ended = os.pidfd_open(self.process.pid)
        with open(ended, "rb"), selectors.DefaultSelector() as selector:
            for descriptor in (out, err, ended):
                selector.register(descriptor, selectors.EVENT_READ)
            while ended in selector.get_map():
                for key, _ in selector.select(_CHECK_INTERVAL_S):
                    if key.fd == ended or not self._read(key.fd):
                        selector.unregister(key.fd)
                if ended in selector.get_map():
                    self._check()
            while any([self._read(key.fd) for key in selector.get_map().values()]):
                pass
        seconds = time.monotonic() - self.started
        self._check_disk()
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        stdout, stderr = (bytes(self.output[each]).decode("utf-8", "replace") for each in (out, err))
        reason, detail = self.stopped or self._explain(stderr, usage)
        return SandboxResult(reason, detail, stdout, stderr, self.process.returncode, seconds)

    def _read(self, descriptor: int) -> bool:
        """Read available output. Return False at the end of the output, and if the output exceeds the limit."""
        remaining_bytes = self.limits.output_bytes - len(self.output[descriptor])
        chunk = os.read(descriptor, 1 << 16)
        self.output[descriptor] += chunk[:remaining_bytes]
        if len(chunk) > remaining_bytes:
            self._stop("too much output", f"more than {self.limits.output_bytes} bytes")
            return False
        return bool(chunk)

    def _check(self) -> None:
        """Stop the running process if it exceeds a limit that the kernel does not enforce."""
        now = time.monotonic()
        if now - self.checked < _CHECK_INTERVAL_S:
            return
        self.checked = now
        if now - self.started > self.limits.wall_s:
            self._stop("time limit", f"more than {self.limits.wall_s:g} s")
        try:
            threads = os.stat(f"/proc/{self.process.pid}/task").st_nlink - 2
        except OSError:
            threads = 0
        if threads > self.limits.threads:
            self._stop("too many threads", f"more than {self.limits.threads}")
        self._check_disk()

    def _check_disk(self) -> None:
        # (device, inode) -> number of disk blocks. All hard links of a file have the same inode.
        blocks: dict[tuple[int, int], int] = {}
        num_files = 0
        try:
            for num_files, found in enumerate(self._all_files(), start=1):
                blocks[found.st_dev, found.st_ino] = found.st_blocks
                if num_files > self.limits.files:
                    return self._stop("too much on disk", f"more than {self.limits.files} files")
        except PermissionError:
            return self._stop("forbidden", "the open files of the process cannot be inspected")
        if sum(blocks.values()) * 512 > self.limits.disk_bytes:
            self._stop("too much on disk", f"more than {self.limits.disk_bytes} bytes")
        elif self._maps_removed_file():
            self._stop("too much on disk", "a removed file is still mapped into memory")

    def _all_files(self) -> Iterator[os.stat_result]:
        """Yield the status of the files in the temporary folder, and of removed files that the process still has open.

        Raises PermissionError if the process hides its open files.
        """
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # the file was removed in the meantime
                yield entry.stat(follow_symlinks=False)
        # inode -> file. Threads share descriptors, so a file may be found several times.
        removed: dict[int, os.stat_result] = {}
        for thread in self._thread_folders():
            for found in _open_files(thread):
                if stat.S_ISREG(found.st_mode) and not found.st_nlink and not os.path.samestat(found, self.stdin):
                    removed[found.st_ino] = found
        yield from removed.values()

    def _maps_removed_file(self) -> bool:
        """Return whether the process maps a file that it removed. The disk space of such a file cannot be measured."""
        folder = os.fsencode(os.path.realpath(self.folder)) + b"/"
        for thread in self._thread_folders():
            with suppress(OSError):  # the thread has ended
                if maps := Path(f"{thread}/maps").read_bytes():  # all threads that are alive have the same maps
                    return any(line.endswith(b" (deleted)") and folder in line for line in maps.splitlines())
        return False

    def _thread_folders(self) -> list[str]:
        """Return the /proc folders of the threads.

        If the main thread has ended before other threads, the folder of the main thread is empty.
        """
        with suppress(OSError):  # the process has ended
            return [entry.path for entry in os.scandir(f"/proc/{self.process.pid}/task")]
        return []

    def _stop(self, reason: Reason, detail: str) -> None:
        if not self.stopped:
            self.stopped = reason, detail
            # Popen.kill may reap the process. Then wait4 in `watch` could no longer return the resource usage.
            os.kill(self.process.pid, signal.SIGKILL)

    def _explain(self, stderr: str, usage: resource.struct_rusage) -> tuple[Reason, str]:
        """Return why the process ended, if this module did not stop the process."""
        code, last_line = self.process.returncode, _last_line(stderr)
        cpu = usage.ru_utime + usage.ru_stime
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= self.limits.cpu_s):
            return "cpu limit", f"more than {self.limits.cpu_s} s"
        if code == -signal.SIGSYS:
            return "forbidden", "a system call of another architecture"
        if code < 0:
            return "killed", f"signal {-code} ({signal.strsignal(-code)})"
        if code == 0:
            return "ok", ""
        for prefix, reason in _REASON_BY_PREFIX.items():
            if last_line.startswith(prefix):
                return reason, last_line
        return "wrong exit", f"status {code}" + (f", {last_line}" if last_line else "")


def _open_files(thread: str) -> Iterator[os.stat_result]:
    """Yield the open files of the thread with the /proc folder `thread`.

    Raises PermissionError if the thread is alive and hides its open files.
    """
    try:
        entries = list(os.scandir(f"{thread}/fd"))
    except PermissionError:
        if _is_exiting(thread):
            return
        raise
    except OSError:  # the thread has ended
        return
    for entry in entries:
        with suppress(OSError):  # the file was closed in the meantime
            yield os.stat(entry.path)


def _is_exiting(thread: str) -> bool:
    """Return whether a thread is exiting. While a thread exits, the files in its /proc folder belong to root."""
    try:
        flags = int(Path(f"{thread}/stat").read_bytes().rpartition(b")")[2].split()[6])
    except OSError:
        return True
    return bool(flags & _PF_EXITING)


# Beginning of the last line on stderr after an uncaught exception -> reason why the program ended.
_REASON_BY_PREFIX: dict[str, Reason] = {
    "PermissionError: ": "forbidden",
    "OSError: [Errno 38]": "forbidden",  # ENOSYS: a system call that the sandbox refuses
    "MemoryError": "memory",
    "OSError: [Errno 12]": "memory",  # ENOMEM
    "RuntimeError: can't start new thread": "too many threads",
    "OSError: [Errno 27]": "too much on disk",  # EFBIG
}


def _last_line(text: str) -> str:
    """Return the last non-empty line, truncated to 300 characters."""
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")
