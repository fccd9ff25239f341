"""Trainer ranks, and a reward, that stand still or die where a test wants them to, until a file is gone."""

import os
import time
from pathlib import Path
from threading import Lock

from mrl.workers.worker import TrainWorker

HELD = "held"  # file in the folder of MRL_TEST_FAULTS


def folder() -> Path:
    return Path(os.environ["MRL_TEST_FAULTS"])


def hold() -> None:
    while (folder() / HELD).exists():
        time.sleep(0.05)


def crash() -> None:
    os.abort()


class FaultyWorker(TrainWorker):
    """A trainer rank with one fault to come."""

    def arm(self, rank: int, where: str, what: str) -> None:
        """Next time that `rank` comes by `where` (data, send or sync), it does `what` (hold or crash) first."""
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
        own, fault = owner.__dict__[name], globals()[what]

        def once(*args, **kwargs):
            setattr(owner, name, own)
            fault()
            return getattr(args[0] if where != "data" else owner, name)(*args[1 if where != "data" else 0 :], **kwargs)

        setattr(owner, name, staticmethod(once) if where == "data" else once)


class Deadlock:
    """A reward that takes a lock twice while the file is there."""

    in_process = True

    def __call__(self, responses):
        lock = Lock()
        with lock:
            while (folder() / HELD).exists():
                lock.acquire(timeout=0.1)
        return [float(len(response.text) % 2) for response in responses]
