"""Supervisor process between a rollout process and an SGLang server, so that the server never outlives the rollout process.

`python -I -S` runs this file as a script, so the supervisor starts in milliseconds, but cannot import anything from mrl. The
supervisor leads its own process session. It reads one line of JSON from stdin and starts the command in this line.

The supervisor ends the command and all descendants of the command in any of these cases:

- The command ends.
- stdin closes, because the parent process has ended (even by SIGKILL) or has closed the pipe.
- The parent of the supervisor changes.
- The supervisor receives SIGTERM, SIGINT or SIGHUP.

The supervisor is a subreaper, so it sees every descendant, including those that left the process group. If the supervisor itself
is killed, the kernel kills the command. The kernel then kills the command's children, because SGLang sets their parent-death
signal.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # options of the system call prctl
# Seconds between two checks whether the parent process has ended; a closed pipe or an ended child wakes the supervisor at once
POLL_INTERVAL_S = 1.0
KILL_TIMEOUT_S = 10.0  # how long killed processes may take to disappear
# Beginnings of the names of files that a server may leave in /dev/shm
SHARED_MEMORY_PREFIXES = ("sglang_", "torch_", "sem.mp-", "psm_", "nccl-")

SHARED_MEMORY_LIST = "shared_memory"  # the same value as in server.py, which this file must not import

prctl = ctypes.CDLL(None, use_errno=True).prctl


def descendants() -> list[int]:
    """Return the process ids of all descendants of this process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found, queue = [], [os.getpid()]
    while queue:
        pids = children.get(queue.pop(), [])
        found += pids
        queue += pids
    return found


def shared_memory(pids: list[int]) -> set[str]:
    """Return the files in /dev/shm that these processes have mapped and that may remain when the processes are killed."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
            found.update(line.rsplit(maxsplit=1)[-1] for line in file if " /dev/shm/" in line)
    return {
        path
        for path in found
        if path.startswith("/dev/shm/") and os.path.basename(path).startswith(SHARED_MEMORY_PREFIXES)
    }


def reap() -> dict[int, int]:
    """Reap the children that have ended. Returns process id -> exit status."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            ended[result[0]] = os.waitstatus_to_exitcode(result[1])
    return ended


def signal_all(pids: list[int], signal_number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def end_all(grace_s: float) -> None:
    """Send SIGTERM to all descendants. After `grace_s` seconds, send SIGKILL to those that still run."""
    signal_all(descendants(), signal.SIGTERM)
    now = time.monotonic()
    while descendants() and time.monotonic() < now + grace_s:
        reap()
        time.sleep(0.02)
    now = time.monotonic()
    while (pids := descendants()) and time.monotonic() < now + KILL_TIMEOUT_S:
        signal_all(pids, signal.SIGKILL)
        reap()
        time.sleep(0.02)


def start(spec: dict) -> int:
    """Start the command in its own process group. Returns the process id of the command.

    `spec`: the JSON object on stdin, which EngineServer.start writes.
    """

    def die_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    process = subprocess.Popen(
        spec["command"],
        env=spec["env"],
        cwd=spec["cwd"],
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=die_with_parent,  # safe, because this process has a single thread
    )
    return process.pid


def watch(pid: int, parent: int, stopping: list[int], wake_fd: int) -> int | None:
    """Wait until there is a reason to end. Returns the exit status of the command, or None if the command still runs.

    `stopping`: received signals that ask the supervisor to end. `wake_fd`: pipe into which Python writes at every signal.
    """
    while True:
        readable, _, _ = select.select([sys.stdin, wake_fd], [], [], POLL_INTERVAL_S)
        if wake_fd in readable:
            os.read(wake_fd, 4096)
        status = reap().get(pid)
        if status is not None:
            return status
        if stopping or os.getppid() != parent or (sys.stdin in readable and not os.read(0, 4096)):
            return None


def main() -> int:
    parent = os.getppid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    stopping: list[int] = []
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _: stopping.append(n))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    line = sys.stdin.readline()
    if not line:
        return 1
    spec = json.loads(line)
    leftovers: set[str] = set()
    try:
        status = watch(start(spec), parent, stopping, wake_read)
        leftovers = shared_memory(descendants())
        end_all(spec["grace_s"])
    finally:
        with contextlib.suppress(OSError), open(os.path.join(spec["scratch"], SHARED_MEMORY_LIST)) as file:
            leftovers.update(file.read().split())
        for path in leftovers:
            with contextlib.suppress(OSError):
                os.unlink(path)
        shutil.rmtree(spec["scratch"], ignore_errors=True)
    return 0 if status is None else abs(status) or 1


if __name__ == "__main__":
    sys.exit(main())
