"""Trainer ranks that hang or crash at a chosen place, and a reward that deadlocks. They all hang until a file is removed."""

import os
import time
from pathlib import Path
from threading import Lock

from mrl.workers.worker import TrainWorker

HANG_FILE = "hang"  # name of the file. The environment variable MRL_TEST_FAULTS names its folder


def hang_file() -> Path:
    return Path(os.environ["MRL_TEST_FAULTS"]) / HANG_FILE


def hang() -> None:
    while hang_file().exists():
        time.sleep(0.05)


def crash() -> None:
    os.abort()


class FaultyWorker(TrainWorker):
    """A trainer rank with an optional fault."""

    def arm(self, rank: int, where: str, what: str) -> None:
        """Make `rank` hang or crash (`what`) once: when the rank next reaches the place `where` (data, send or sync)."""
        if self.rank != rank:
            return
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        from mrl.weight_sync.sender import BucketSender
        from mrl.workers.micro_batch import MicroBatch

        owner, name = {
            "data": (MicroBatch, "build"),
            "send": (P2PCommunicator, "send_forward"),
            "sync": (BucketSender, "send_all"),
        }[where]
        original, fault = owner.__dict__[name], dict(hang=hang, crash=crash)[what]

        def fail_once(*args, **kwargs):
            setattr(owner, name, original)
            fault()
            return getattr(args[0] if where != "data" else owner, name)(*args[1 if where != "data" else 0 :], **kwargs)

        setattr(owner, name, staticmethod(fail_once) if where == "data" else fail_once)


class Deadlock:
    """A reward that acquires a lock twice, and so blocks until the hang file is removed."""

    in_process = True

    def __call__(self, responses):
        lock = Lock()
        with lock:
            while hang_file().exists():
                lock.acquire(timeout=0.1)
        return [float(len(response.text) % 2) for response in responses]
