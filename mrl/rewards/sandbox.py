"""Sandbox for untrusted Python: programs in responses, and the code tool of agents.

Each run is one process, which executes `mrl/rewards/sandbox_child.py`. Before the process compiles the program, it
gives up access to the network, to other processes, and to all files except the Python installation and its own
temporary folder; it also cannot start processes. The kernel enforces this (Landlock, seccomp, resource limits). This
module starts the process, checks the limits that the kernel does not enforce, ends the process in time, and reports why
it ended. docs/tutorials/reward.md lists the restrictions.
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

from mrl.rewards import sandbox_child

Reason = Literal[
    "ok",  # exited with status 0
    "wrong exit",  # exited with another status, for example after an uncaught exception
    "forbidden",  # uncaught PermissionError: a file, the network, a new process
    "time limit",  # wall clock
    "cpu limit",
    "memory",
    "too much output",
    "too many threads",
    "too much on disk",  # bytes or files
    "killed",  # by a signal that the sandbox did not send: a crash, or the machine is out of memory
]
_TICK_S = 0.02  # seconds between two checks of threads and files
_PF_EXITING = 0x4  # flag in /proc/PID/stat
_LEAST_MEMORY = 64 << 20  # bytes that the interpreter needs to start
_START_S = 30.0  # time limit for the start of the interpreter and its restrictions; long enough for a busy machine
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_DEVICES = ("/dev/urandom", "/dev/random", "/dev/zero")


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one run. Raises ValueError for a limit that is too small."""

    wall_s: float = 10.0
    cpu_s: int = 10  # of all threads together
    memory_bytes: int = 1 << 30  # address space; the interpreter itself takes about 20 MiB
    output_bytes: int = 1 << 20  # limit of stdout, and of stderr
    disk_bytes: int = 16 << 20  # all files in its temporary folder together
    files: int = 64
    threads: int = 32

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), _LEAST_MEMORY if each.name == "memory_bytes" else 0
            kinds = (int, float) if each.name == "wall_s" else (int,)
            if not isinstance(value, kinds) or value <= least:
                kind = "number" if each.name == "wall_s" else "whole number"
                raise ValueError(f"sandbox limit {each.name}={value!r}: expected a {kind} above {least}.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the limits of a config node. Raises ValueError for an unknown name."""
        known = [each.name for each in fields(cls)]
        if unknown := [name for name in values if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{unknown[0]!r} is not a limit of the sandbox; did you mean {near!r}? SandboxLimits: {', '.join(known)}."
            )
        return cls(**values)


@dataclass(frozen=True)
class SandboxResult:
    """Result of a run. Output is decoded as UTF-8; invalid bytes become U+FFFD."""

    reason: Reason
    detail: str  # the limit, or the last line on stderr
    stdout: str
    stderr: str
    returncode: int  # as in subprocess: -N for signal N
    seconds: float  # wall time of the program, without the start of the interpreter

    @property
    def failure(self) -> str | None:
        """Reason and detail in one line; None after a normal end."""
        return None if self.reason == "ok" else f"{self.reason}: {self.detail}"


@functools.cache
def unavailable_reason() -> str | None:
    """Return why this machine does not support the sandbox; None if it does."""
    if sys.platform != "linux" or os.uname().machine not in sandbox_child.ARCHITECTURES:
        return f"it needs Linux on {' or '.join(sandbox_child.ARCHITECTURES)}, this is {sys.platform} on {os.uname().machine}"
    if sandbox_child.landlock_abi() < 1:
        return "the kernel offers no Landlock (Linux 5.13 or later with lsm=landlock; a container runtime may also hide it)"
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
    """Run a program without input, for example for a code tool; see `run`."""
    return run(source, "", limits or SandboxLimits())


def run(source: str, stdin: str, limits: SandboxLimits, path: tuple[str, ...] = ()) -> SandboxResult:
    """Run the Python program `source` on `stdin` and return when its process has ended.

    Args:
        path: additional folders that the program may read and import from.

    Raises:
        ValueError: the machine does not support the sandbox.
        RuntimeError: restricting the process failed; the program has not run.
    """
    require_sandbox()
    with (
        tempfile.TemporaryDirectory(prefix="mrl-code-", ignore_cleanup_errors=True) as folder,
        _sealed("source", source) as source_file,
        _sealed("stdin", stdin) as stdin_file,
    ):
        process, status = _start(Path(folder), source_file, stdin_file, limits, path)
        with process, open(status, "rb") as ready:
            run = _Run(process, Path(folder), limits, os.fstat(stdin_file))
            try:
                run.wait_for_lock(ready.fileno())
                return run.watch()
            finally:
                process.kill()


@contextmanager
def _sealed(name: str, text: str) -> Iterator[int]:
    """Yield the descriptor of a sealed in-memory file with `text`, which nothing can change."""
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
    """Start sandbox_child.py. Return the process, and the descriptor from which its report LOCKED can be read."""
    ready, status = os.pipe()
    stdlib = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), f"{sys.base_prefix}/lib")
    stack = min(64 << 20, limits.memory_bytes // 4)
    config = {
        "limits": {
            "AS": limits.memory_bytes,
            "CPU": limits.cpu_s + 1,
            "FSIZE": limits.disk_bytes,
            "STACK": stack,
        },
        "readable": [*dict.fromkeys([*stdlib, *_SYSTEM, *_DEVICES, *path])],
        "path": list(path),
        "parent": os.getpid(),
        "source_fd": source,
        "status_fd": status,
    }
    try:
        process = subprocess.Popen(
            [os.path.realpath(sys.executable), "-I", "-S", "-B", sandbox_child.__file__, marshal.dumps(config).hex()],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd=folder,
            pass_fds=(source, status),
            start_new_session=True,
        )
    except OSError:
        os.close(ready)
        raise
    finally:
        os.close(status)
    return process, ready


@dataclass
class _Run:
    """One process of the sandbox, from start to end."""

    process: subprocess.Popen[bytes]
    folder: Path
    limits: SandboxLimits
    stdin: os.stat_result
    output: dict[int, bytearray] = field(default_factory=dict)  # by descriptor
    stopped: tuple[Reason, str] | None = None  # why this module ended the process; None: it did not
    started: float = 0.0  # time.monotonic() when the program started
    checked: float = 0.0  # time.monotonic() of the last check of the limits

    def wait_for_lock(self, ready: int) -> None:
        """Wait until the process reports that its restrictions are in force. Raises RuntimeError if it does not."""
        poll = select.poll()  # select() takes no descriptor above 1023
        poll.register(ready, select.POLLIN)
        if poll.poll(_START_S * 1000) and os.read(ready, 64) == sandbox_child.LOCKED:
            return
        self.process.kill()
        said = self.process.communicate()[1].decode("utf-8", "replace").strip()
        raise RuntimeError(f"the sandbox could not be locked, nothing was run: {_last_line(said) or 'no answer'}")

    def watch(self) -> SandboxResult:
        """Read the output of the process and check its limits until it ends; return the result."""
        assert self.process.stdout and self.process.stderr, "both are pipes"
        out, err = self.process.stdout.fileno(), self.process.stderr.fileno()
        self.output = {out: bytearray(), err: bytearray()}
        self.started = time.monotonic()
        ended = os.pidfd_open(self.process.pid)
        with open(ended, "rb"), selectors.DefaultSelector() as selector:
            for descriptor in (out, err, ended):
                selector.register(descriptor, selectors.EVENT_READ)
            while ended in selector.get_map():
                for key, _ in selector.select(_TICK_S):
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
        """Read available output, up to the limit. Return False at the end of the output."""
        room = self.limits.output_bytes - len(self.output[descriptor])
        chunk = os.read(descriptor, 1 << 16)
        self.output[descriptor] += chunk[:room]
        if len(chunk) > room:
            self._stop("too much output", f"more than {self.limits.output_bytes} bytes")
            return False
        return bool(chunk)

    def _check(self) -> None:
        """Stop the running process if it exceeds a limit that the kernel does not enforce."""
        now = time.monotonic()
        if now - self.checked < _TICK_S:
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
        blocks: dict[tuple[int, int], int] = {}  # blocks of each file, counted once for all its hard links
        names = 0
        try:
            for names, found in enumerate(self._files(), start=1):
                blocks[found.st_dev, found.st_ino] = found.st_blocks
                if names > self.limits.files:
                    return self._stop("too much on disk", f"more than {self.limits.files} files")
        except PermissionError:
            return self._stop("forbidden", "its open files cannot be inspected")
        if sum(blocks.values()) * 512 > self.limits.disk_bytes:
            self._stop("too much on disk", f"more than {self.limits.disk_bytes} bytes")
        elif self._maps_removed():
            self._stop("too much on disk", "a removed file is still mapped into memory")

    def _files(self) -> Iterator[os.stat_result]:
        """Yield the files in the folder and the removed files that are still open. Raises PermissionError if these are hidden."""
        for entry in os.scandir(self.folder):
            with suppress(OSError):  # removed in the meantime
                yield entry.stat(follow_symlinks=False)
        removed: dict[int, os.stat_result] = {}  # by inode, because threads share descriptors
        for task in self._tasks():
            for found in _opened(task):
                if stat.S_ISREG(found.st_mode) and not found.st_nlink and not os.path.samestat(found, self.stdin):
                    removed[found.st_ino] = found
        yield from removed.values()

    def _maps_removed(self) -> bool:
        """Whether the process maps a file that it removed. Such a file uses disk space that cannot be measured."""
        inside = os.fsencode(os.path.realpath(self.folder)) + b"/"
        for task in self._tasks():
            with suppress(OSError):  # the thread ends
                if maps := Path(f"{task}/maps").read_bytes():  # the same for all live threads
                    return any(line.endswith(b" (deleted)") and inside in line for line in maps.splitlines())
        return False

    def _tasks(self) -> list[str]:
        """Return the /proc folders of the threads. The main thread may end before other threads; its folder is then empty."""
        with suppress(OSError):  # it has ended
            return [entry.path for entry in os.scandir(f"/proc/{self.process.pid}/task")]
        return []

    def _stop(self, reason: Reason, detail: str) -> None:
        if not self.stopped:
            self.stopped = reason, detail
            os.kill(self.process.pid, signal.SIGKILL)  # Popen.kill might reap the process and lose its resource usage

    def _explain(self, stderr: str, usage: resource.struct_rusage) -> tuple[Reason, str]:
        """Return why the process ended, if this module did not stop it. `usage` is its resource usage."""
        code, said = self.process.returncode, _last_line(stderr)
        cpu = usage.ru_utime + usage.ru_stime
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= self.limits.cpu_s):
            return "cpu limit", f"more than {self.limits.cpu_s} s"
        if code == -signal.SIGSYS:
            return "forbidden", "a system call of another architecture"
        if code < 0:
            return "killed", f"signal {-code} ({signal.strsignal(-code)})"
        if code == 0:
            return "ok", ""
        for mark, reason in _REFUSALS.items():
            if said.startswith(mark):
                return reason, said
        return "wrong exit", f"status {code}" + (f", {said}" if said else "")


def _opened(task: str) -> Iterator[os.stat_result]:
    """Yield the open files of a thread. Raises PermissionError if the thread is alive and hides them."""
    try:
        opened = list(os.scandir(f"{task}/fd"))
    except PermissionError:
        if _is_ending(task):
            return
        raise
    except OSError:  # it has ended
        return
    for entry in opened:
        with suppress(OSError):  # closed in the meantime
            yield os.stat(entry.path)


def _is_ending(task: str) -> bool:
    """Whether a thread is exiting. Its /proc files then belong to root for a moment before they vanish."""
    try:
        flags = int(Path(f"{task}/stat").read_bytes().rpartition(b")")[2].split()[6])
    except OSError:
        return True
    return bool(flags & _PF_EXITING)


# Start of the last line on stderr -> reason, for uncaught exceptions that a limit or a restriction causes.
_REFUSALS: dict[str, Reason] = {
    "PermissionError: ": "forbidden",
    "OSError: [Errno 38]": "forbidden",  # ENOSYS: a system call that the sandbox hides
    "MemoryError": "memory",
    "OSError: [Errno 12]": "memory",  # ENOMEM
    "RuntimeError: can't start new thread": "too many threads",
    "OSError: [Errno 27]": "too much on disk",  # EFBIG
}


def _last_line(text: str) -> str:
    """Return the last non-empty line, truncated to 300 characters."""
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")
