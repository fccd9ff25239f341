"""BackgroundWriter of parallel.checkpoint_writer: which memory it writes, which files it keeps open, and how it ends."""

import os
import signal
import time
from contextlib import nullcontext
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pytest
from mrl_runs import is_alive, wait_until

from parallel import checkpoint_writer
from parallel.checkpoint_writer import BackgroundWriter, CheckpointSave, _copy_to_host


def test_a_fork_writes_the_memory_of_the_time_of_the_fork(tmp_path):
    numbers, gate = np.zeros(1_000_000), tmp_path / "gate"

    def total() -> float:
        wait_until(gate.exists, 20)
        return float(numbers.sum())

    writer = BackgroundWriter(total, in_fork=True)
    numbers += 1
    gate.touch()
    assert writer.result(timeout_s=20) == 0
    assert BackgroundWriter(lambda: float(numbers.sum()), in_fork=False).result(0) == 1_000_000


def test_a_writer_does_not_keep_the_output_of_its_parent_open():
    writer = BackgroundWriter(lambda: [os.readlink(f"/proc/self/fd/{stream}") for stream in (1, 2)], in_fork=True)
    assert writer.result(timeout_s=20) == ["/dev/null"] * 2


def fail() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("in_fork", [False, True])
def test_result_raises_the_error_of_the_write(in_fork):
    with pytest.raises(RuntimeError, match=r"OSError: .* No space left on device"):
        BackgroundWriter(fail, in_fork).result(timeout_s=20)


def test_a_killed_writer_is_done_and_its_result_raises():
    writer = BackgroundWriter(lambda: time.sleep(60), in_fork=True)
    assert not writer.is_done()
    os.kill(writer._process.pid, signal.SIGKILL)
    wait_until(writer.is_done, 20)
    with pytest.raises(RuntimeError, match="was killed, exit code -9"):
        writer.result(timeout_s=20)


def test_a_writer_that_exceeds_its_timeout_is_killed():
    writer = BackgroundWriter(lambda: time.sleep(60), in_fork=True)
    pid = writer._process.pid
    with pytest.raises(RuntimeError, match=r"did not end within 0\.1 s"):
        writer.result(timeout_s=0.1)
    assert not is_alive(pid)
    with pytest.raises(RuntimeError, match="did not end"):
        writer.result(timeout_s=20)


def leave_a_writer(answer) -> None:
    writer = BackgroundWriter(lambda: time.sleep(60), in_fork=True)
    answer.send(writer._process.pid)
    time.sleep(60)


def test_a_writer_dies_with_its_parent():
    context = get_context("fork")
    mine, theirs = context.Pipe()
    parent = context.Process(target=leave_a_writer, args=(theirs,))
    parent.start()
    pid = mine.recv()
    assert is_alive(pid)
    parent.kill()
    parent.join()
    wait_until(lambda: not is_alive(pid), 20)


class _GpuTensor:
    """Stands in for a GPU tensor. torch makes non-blocking copies in pinned memory, which it never returns to the system."""

    def to(self, device: str, non_blocking: bool = False) -> str:
        return f"{'pinned' if non_blocking else 'pageable'} copy on the {device}"


def test_the_host_copy_of_a_save_is_not_in_pinned_memory():
    (bucket,) = _copy_to_host([("folder/file", "file", (["bytes"], [("item", _GpuTensor())]))])
    assert bucket == ("folder/file", "file", (["bytes"], [("item", "pageable copy on the cpu")]))


def test_a_save_writes_the_host_copies_in_pageable_memory(monkeypatch, tmp_path):
    buckets, written = [("folder/file", "file", (["bytes"], [("item", _GpuTensor())]))], []
    strategy = SimpleNamespace(writer=SimpleNamespace(write_buckets=buckets, transforms=None))
    monkeypatch.setattr(checkpoint_writer, "_plan", lambda state, folder: strategy)
    monkeypatch.setattr(checkpoint_writer, "raise_on_all_ranks", lambda make_error: nullcontext())
    monkeypatch.setattr(checkpoint_writer.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoint_writer, "_write_files", lambda *arguments: written.append(arguments[0]))
    CheckpointSave(tmp_path / "checkpoint", {}, {}, asynchronous=False)
    assert written == [[("folder/file", "file", (["bytes"], [("item", "pageable copy on the cpu")]))]]
