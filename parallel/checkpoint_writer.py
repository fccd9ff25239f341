"""Writes a checkpoint: all ranks plan the files, each rank writes its files, and rank 0 completes the checkpoint.

In an asynchronous save, a forked child process writes the files of a rank while the rank continues to train.
"""

import ctypes
import gc
import multiprocessing
import os
import queue
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from parallel.checkpoint_validation import BACKEND_CONFIG
from parallel.collectives import object_group, raise_on_all_ranks
from parallel.durable_files import FileHash, fsync_path, hash_file, write_hashes
from parallel.spans import record, span

_libc = ctypes.CDLL(None, use_errno=True)  # loaded before the fork, so that the child loads nothing
_PR_SET_PDEATHSIG = 1  # option of prctl(): the signal that the child gets when its parent ends
_CHILD_NICENESS = 10  # nice value of the child: a lower priority than training


class BackgroundWriter[T]:
    """Runs the function `write` once, in a forked child process or directly in this process.

    The child sees the memory of this process as it was at the fork (copy-on-write pages). When the thread that created the
    child ends, the Linux kernel kills the child with SIGKILL. The child has no stdout and no stderr, and does not use the GPU.
    """

    def __init__(self, write: Callable[[], T], in_fork: bool) -> None:
        self._outcome: tuple[T | None, str | None] | None = None if in_fork else _attempt(write)  # (result, error)
        if in_fork:
            context = multiprocessing.get_context("fork")
            self._connection, child_connection = context.Pipe(duplex=False)
            self._process = context.Process(
                target=_child_main, args=(os.getpid(), child_connection, write), daemon=True
            )
            # Python warns that a fork is unsafe in a process with threads. This child takes no lock that a thread may hold.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
            child_connection.close()

    def is_done(self) -> bool:
        """Whether the write has ended: it has succeeded, has failed or was killed. If so, the child's memory is free."""
        if self._outcome is None and self._connection.poll():
            self._outcome = self._receive(timeout_s=0)
        return self._outcome is not None

    def result(self, timeout_s: float) -> T:
        """Wait for `write` and return its result. The child has always ended when this method returns or raises.

        Raises RuntimeError if `write` failed, if the child was killed, or if the child does not end within `timeout_s` seconds.
        """
        if self._outcome is None:
            self._outcome = self._receive(timeout_s)
        value, error = self._outcome
        if error is not None:
            raise RuntimeError(error)
        return value  # type: ignore[bad-return]

    def kill(self) -> None:
        """Kill the child if it is still running; `result` then raises RuntimeError."""
        if self._outcome is None:
            self._outcome = None, "the save was abandoned"
            self._stop()

    def _receive(self, timeout_s: float) -> tuple[T | None, str | None]:
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv()
            return None, f"the writer (process {self._process.pid}) did not end within {timeout_s:g} s"
        except EOFError:
            self._process.join()
            return None, f"the writer (process {self._process.pid}) was killed, exit code {self._process.exitcode}"
        finally:
            self._stop()

    def _stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()


def _attempt[T](write: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return write(), None
    except Exception as error:  # `BackgroundWriter.result` raises an error with this text
        return None, f"{type(error).__name__}: {error}"


def _child_main(parent: int, connection: Connection, write: Callable[[], Any]) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the child must not run the trainer's handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the child, but only the trainer handles it
    with open(os.devnull, "wb") as devnull:
        for descriptor in (1, 2):  # otherwise a reader of the trainer's stdout or stderr would wait for this child
            os.dup2(devnull.fileno(), descriptor)
    gc.disable()  # garbage collection would copy the memory page of every object, and might free tensors on the GPU
    os.nice(_CHILD_NICENESS)
    connection.send(_attempt(write))
    os._exit(0)  # skip the trainer's exit hooks


class WrittenFiles(NamedTuple):
    """What the writer of a rank returns."""

    results: list[WriteResult]  # for each shard, its place in a file
    hashes: dict[str, FileHash]  # file name -> (size in bytes, hash)
    started_at: float  # time.time() when the writer began
    seconds: float  # duration of the write


class CheckpointSaveError(RuntimeError):
    """A checkpoint could not be written; its folder is not a valid checkpoint."""


class CheckpointSave:
    """One save of a checkpoint into `folder`. Every rank creates this object for its own shards, and then calls `finish`.

    Megatron's functions plan and write the shards. This class replaces only the last part of a save, because Megatron's code for
    this part reports errors to rank 0 only. With that code, the other ranks would wait forever if the disk of rank 0 was full.
    """

    def __init__(self, folder: Path, state: dict, files: Mapping[str, bytes], asynchronous: bool) -> None:
        """Plan the shards of `state` (a sharded state dict), and start to write them and `files` (name -> content).

        In a synchronous save, the write has ended when the constructor returns. In an asynchronous save, a fork of this process
        writes the current values of the tensors. Tensors on a GPU are copied to the host before the fork. Pages of host memory
        are copied only if training changes them during the write. Raises CheckpointSaveError on all ranks if a rank cannot
        create the folder, copy its tensors or start its writer. If the write itself fails, `finish` raises the error.
        """
        self.folder = folder
        with raise_on_all_ranks(self._error):
            if dist.get_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
        self._strategy = _plan(state, folder)
        self._writer: BackgroundWriter[WrittenFiles] | None = None
        contents = {folder / name: content for name, content in files.items()}
        try:
            with raise_on_all_ranks(self._error), span("checkpoint snapshot", "checkpoint"):
                buckets = _copy_to_host(self._strategy.writer.write_buckets or [])
                write = partial(_write_files, buckets, self._strategy.writer.transforms, contents)
                self._writer = BackgroundWriter(write, asynchronous)
        except CheckpointSaveError:
            # Either this rank or another rank failed, for example because of too little host memory.
            self.abandon()
            raise
        # After this assignment only the writer refers to the host copies, so their memory is free when the writer ends.
        self._strategy.writer.write_buckets = None

    def writer_has_ended(self) -> bool:
        """Whether the writer of this rank has ended, with or without an error. Does not communicate."""
        return self._writer is None or self._writer.is_done()

    def finish(self, timeout_s: float) -> None:
        """Wait until all ranks have written, then complete the checkpoint and sync it to the disk. Every rank calls this.

        This also works while the model is offloaded: the ranks communicate only through `parallel.collectives.object_group()`.
        Raises CheckpointSaveError on all ranks if a writer failed, was killed or does not end within `timeout_s` seconds. The
        message names the folder and the cause on the first failed rank. All writers have ended when the method ends.
        """
        assert self._writer is not None, "the constructor raises if there is no writer"
        with raise_on_all_ranks(self._error), span("wait for the checkpoint writer", "checkpoint"):
            written = self._writer.result(timeout_s)
        record("checkpoint write", "checkpoint", written.started_at, written.seconds, in_background=True)
        gathered: list = [None] * dist.get_world_size()
        dist.gather_object(written, gathered if dist.get_rank() == 0 else None, group=object_group())
        with raise_on_all_ranks(self._error):
            if dist.get_rank() == 0:
                self._strategy.complete(gathered)

    def abandon(self) -> None:
        """Kill the writer of this rank. The folder stays incomplete. Does not communicate."""
        if self._writer is not None:
            self._writer.kill()

    def _error(self, message: str) -> CheckpointSaveError:
        return CheckpointSaveError(f"checkpoint {self.folder} is not written: {message}")


class _SaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron's save strategy, with two additional attributes: the file writer and the metadata of the planned save."""

    writer: FileSystemWriterAsync
    metadata: Metadata | None  # None on ranks other than 0

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret, async_strategy):
        self.writer, self.metadata, _ = writer, *save_state_dict_ret[1:]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)

    def complete(self, written: list[WrittenFiles]) -> None:
        """Write the files that describe the checkpoint, then the hashes of all files, and sync both to the disk."""
        folder = Path(self.writer.checkpoint_dir)
        self.writer.finish(self.metadata, [files_of_rank.results for files_of_rank in written])
        save_config(CheckpointingConfig(self.backend, self.version), str(folder))
        write_hashes(folder, {name: entry for files_of_rank in written for name, entry in files_of_rank.hashes.items()})
        for path in (folder / BACKEND_CONFIG, folder):
            fsync_path(path)


def _plan(state: dict, folder: Path) -> _SaveStrategy:
    apply_factories(state)
    dict_list_map_inplace(_with_own_storage, state)
    # Megatron would start a manager process to pass on the results. That process imports torch again, which takes seconds, and
    # continues to run after this process is killed. Here BackgroundWriter returns the results, so an ordinary queue is enough.
    filesystem_async._results_queue = queue.Queue()
    strategy = _SaveStrategy()
    dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True, async_strategy="mcore")
    return strategy


def _with_own_storage(part: object) -> object:
    """Give a tensor in host memory a second storage, which covers only the bytes of this tensor.

    Megatron would copy a tensor that is a view of a larger storage.
    """
    if isinstance(part, ShardedTensor) and part.data is not None and part.data.device.type == "cpu":
        part.data = _with_second_storage(part.data.detach())
    return part


def _with_second_storage(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return tensor
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    # The write passes the storage of a tensor to NumPy. After that, torch cannot resize this storage. But offloading must resize
    # the original storage, so the write gets a second storage over the same bytes.
    shared = torch.from_dlpack(flat)
    return shared.view(tensor.dtype).view(tensor.shape)


def _copy_to_host(buckets: list) -> list:
    """Copy the tensors of `buckets` from the GPU to the host. Tensors in host memory are returned without a copy.

    The copies are in pageable memory. A non-blocking copy to the host would be in pinned memory, which torch keeps for its next
    pinned tensors instead of returning it to the system. Each rank would then permanently pin as much host memory as its part
    of a checkpoint needs, and torch would round the size of each tensor up to a power of two.
    """
    return FileSystemWriterAsync.preload_tensors(buckets, non_blocking=False)


def _write_files(buckets: list, transforms: object, files: Mapping[Path, bytes]) -> WrittenFiles:
    """Write this rank's files, sync them to the disk, and hash them. An asynchronous save calls this in the forked child.

    `buckets`: Megatron's write buckets. A bucket has the tensors and objects of one file, and its first element is the path of
    the file. `transforms`: attribute of Megatron's writer. `files`: path -> content of each further file.
    """
    started_at, since = time.time(), time.perf_counter()
    for path, content in files.items():
        path.write_bytes(content)
        fsync_path(path)
    results: list[WriteResult] = []
    for number, bucket in enumerate(buckets):
        _, bucket_results = FileSystemWriterAsync.write_preloaded_data(
            [transforms], number, bucket, None, None, use_fsync=True
        )
        if isinstance(bucket_results, Exception):
            raise bucket_results
        fsync_path(Path(bucket[0]))  # Megatron's own sync comes too early, before Python flushes the file's buffer
        results += bucket_results
    paths = [*files, *(Path(bucket[0]) for bucket in buckets)]
    hashes = {path.name: hash_file(path) for path in paths}
    return WrittenFiles(results, hashes, started_at, time.perf_counter() - since)
