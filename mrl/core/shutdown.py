"""Ends the processes of a run, and limits the time that this may take.

The processes of a run end in this order:

1. The driver closes trainer ranks, the rollout worker with its engines and reward workers, and placement groups. Then it ends
   Ray. All this runs within `shutdown_deadline`. After the deadline, a thread ends all processes that the driver has started.
2. The driver ends processes of the run that no longer have a parent in the run (`end_orphans`).
3. The supervisor of `mrl train` ends the descendants of the driver that are still alive (mrl.launch.supervisor).
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import psutil

from mrl.core.processes import descendants, describe, end_processes, with_variable
from mrl.core.run_errors import (
    REQUEUE_STATUS,
    UNHEALTHY_STATUS,
    PreemptedError,
    StartError,
    StartupLostError,
    UnhealthyRunError,
)

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0  # how long the processes of a run may take to end
NOTICE_S = 10.0  # interval between two messages that say what the end of the run waits for
EXIT_S = 60.0  # how long this process may continue to wait after the processes that it started were ended
STATUS_OF_EXIT = 1  # exit status after EXIT_S, unless the exception that ends the run has another status
_STATUS_OF_ERROR: dict[type[BaseException], int] = {
    PreemptedError: REQUEUE_STATUS,
    UnhealthyRunError: UNHEALTHY_STATUS,
    StartError: 2,
    KeyboardInterrupt: 128 + signal.SIGINT,
}

_before_exit: list[Callable[[], None]] = []


def call_before_exit(function: Callable[[], None]) -> None:
    """Make `function` run before this process exits at the deadline, unless the supervisor then starts the command again."""
    _before_exit[:] = [function]


@contextmanager
def shutdown_deadline(what: str, since: float) -> Iterator[None]:
    """Limit the time in which the body ends processes. `what` is the text that names these processes in messages.

    A process of Ray that is stopped or hangs can block calls of Ray forever. So a thread logs every NOTICE_S seconds which
    processes still run. After TIMEOUT_S seconds, the thread ends the descendants that this process started after `since`, a value
    of time.time(). Calls that wait for these processes then return. If the body continues for another EXIT_S seconds, this
    process exits. The exception that was being handled when the context began determines the exit status.
    """
    finished, reason = threading.Event(), sys.exception()
    watchdog = threading.Thread(target=_watch, args=(finished, what, since, reason), name="shutdown", daemon=True)
    watchdog.start()
    try:
        yield
    finally:
        finished.set()


def _watch(finished: threading.Event, what: str, since: float, reason: BaseException | None) -> None:
    start = time.monotonic()
    while not finished.wait(min(NOTICE_S, max(0.0, start + TIMEOUT_S - time.monotonic()))):
        running, waited_s = _started_since(since), time.monotonic() - start
        if waited_s >= TIMEOUT_S:
            break
        logger.warning(
            "waiting for the end of %s for %.0f s; mrl ends these processes after %.0f s: %s",
            what, waited_s, TIMEOUT_S, describe(running),
        )  # fmt: skip
    else:
        return
    logger.warning("%s did not end within %.0f s; ending %s", what, TIMEOUT_S, describe(running))
    end_processes(running, exit_patience_s=0)
    if not finished.wait(EXIT_S):
        logger.error("%s still blocks this process %.0f s after its processes were ended; exiting", what, EXIT_S)
        _exit(reason)


def _exit(reason: BaseException | None) -> NoReturn:
    """End this process at once. `reason` is the exception that ends the run, None for a run that is finished.

    If the run is finished or its start failed, this does not call the function of `call_before_exit`, because the
    supervisor then starts the command again. The second process prints the result of a finished run.
    """
    sys.stdout.flush()
    if reason is not None and not isinstance(reason, StartupLostError):
        for function in _before_exit:
            function()
    if isinstance(reason, SystemExit) and isinstance(reason.code, int):
        os._exit(reason.code)
    statuses = (status for kind, status in _STATUS_OF_ERROR.items() if isinstance(reason, kind))
    os._exit(next(statuses, STATUS_OF_EXIT))


def _started_since(since: float) -> list[psutil.Process]:
    found = []
    for process in descendants():
        with suppress(psutil.Error):
            if process.create_time() >= since - 1 and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_orphans(variable: str, value: str) -> None:
    """End processes that inherited an environment variable with this value, and that are no descendants of this process.

    Such a process was started by a reward, an agent or an engine of the run, and has lost its parent, for example after a double
    fork. Descendants of this process stay alive, because libraries end their helper processes when this process exits.
    """
    own = {each.pid for each in descendants()}
    if ended := end_processes(each for each in with_variable(variable, value) if each.pid not in own):
        logger.info("ended %d processes that the run left behind", len(ended))
