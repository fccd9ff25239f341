"""The end of a run, and its deadline.

The processes of a run end in this order:

1. The driver closes trainer ranks, the rollout worker with its engines and reward workers, and placement groups. Then it ends
   Ray. It does this within `shutdown_deadline`. After the deadline, a thread ends all processes that the driver has started.
2. The driver ends processes of the run that no longer have a parent in the run (`end_orphans`).
3. The supervisor of `mrl train` ends all descendants of the driver that are still alive (mrl.launch.supervisor).
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from mrl.core.processes import descendants, describe, end_processes, with_variable

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0  # how long the processes of a run may take to end
NOTICE_S = 10.0  # interval between two messages that say what the end of the run waits for
EXIT_S = 60.0  # how long this process may continue to wait after its processes were ended
STATUS_OF_EXIT = 1  # exit status if this process still waits then


@contextmanager
def shutdown_deadline(what: str, since: float) -> Iterator[None]:
    """Limit the time in which the body ends processes. `what` is the text that names them in messages.

    A process of Ray that is stopped or hangs can block calls of Ray for ever. So a thread says every NOTICE_S seconds which
    processes still run. After TIMEOUT_S seconds it ends the descendants that this process started after `since`, a value of
    time.time(). Calls that wait for these processes then return. If the body continues for another EXIT_S seconds, this process
    exits.
    """
    finished = threading.Event()
    watchdog = threading.Thread(target=_watch, args=(finished, what, since), name="shutdown", daemon=True)
    watchdog.start()
    try:
        yield
    finally:
        finished.set()


def _watch(finished: threading.Event, what: str, since: float) -> None:
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
        sys.stdout.flush()
        os._exit(STATUS_OF_EXIT)


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
    fork. Descendants of this process are spared, because libraries end their helper processes when this process exits.
    """
    own = {each.pid for each in descendants()}
    if ended := end_processes(each for each in with_variable(variable, value) if each.pid not in own):
        logger.info("ended %d processes that the run left behind", len(ended))
