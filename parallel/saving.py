"""One checkpoint on its way to the disk: planned together, written by each rank (beside training or not), finished together."""

import queue
from collections.abc import Mapping
from functools import partial
from pathlib import Path

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

from parallel.agreement import together
from parallel.disk import sync
from parallel.writer import Writer


class SaveError(RuntimeError):
    """A checkpoint could not be written; its folder is not one."""


class Save:
    """A checkpoint being written into `folder`, in place. Every rank makes one with its part of `state`, then finishes it.

    Megatron plans, writes and describes the shards. What it would do at the end is done here: it tells only rank 0 what went
    wrong, and leaves the others waiting where rank 0's disk is full.
    """

    def __init__(self, folder: Path, state: dict, files: Mapping[str, bytes], asynchronous: bool) -> None:
        """Plan the shards of `state` (a sharded state dict), to be written with `files` (name -> content) beside them.

        Not asynchronous: they are written when this returns. Asynchronous: a fork of this process writes them as they are
        now, whatever happens to the tensors later; memory on the host is copied only where training changes it meanwhile, and
        of tensors on a GPU the host holds one copy. Raises SaveError on all ranks.
        """
        self.folder = folder
        with together(self._error):
            if dist.get_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
        self._plan = _planned(state, folder)
        self._writer: Writer[list[WriteResult]] | None = None
        contents = {folder / name: content for name, content in files.items()}
        try:
            with together(self._error):
                buckets = FileSystemWriterAsync.preload_tensors(self._plan.writer.write_buckets or [])  # from a GPU
                write = partial(_write, buckets, self._plan.writer.transforms, contents)
                self._writer = Writer(write, asynchronous)
        except SaveError:  # another rank has no memory for one
            self.abandon()
            raise
        self._plan.writer.write_buckets = None  # the writer's now: memory of a snapshot is free when it ends

    def written(self) -> bool:
        """Whether this rank's part is written, or failed; asks no other rank."""
        return self._writer is None or self._writer.ended()

    def finish(self, timeout_s: float) -> None:
        """Wait for all ranks' parts and complete the checkpoint: all of it is then on the disk. Every rank calls this.

        Raises SaveError on all ranks, naming the folder and the first rank's cause: also where a rank's part is not written
        within `timeout_s` seconds, or its writer was killed. No writer is left.
        """
        assert self._writer is not None, "a save without a writer has raised"
        with together(self._error):
            results = self._writer.result(timeout_s)
        gathered: list = [None] * dist.get_world_size()
        dist.gather_object(results, gathered if dist.get_rank() == 0 else None)
        with together(self._error):
            if dist.get_rank() == 0:
                self._plan.complete(gathered)

    def abandon(self) -> None:
        """End the writer; the folder stays incomplete. Asks no other rank."""
        if self._writer is not None:
            self._writer.end()

    def _error(self, words: str) -> SaveError:
        return SaveError(f"checkpoint {self.folder} is not written: {words}")


class _Plan(TorchDistSaveShardedStrategy):
    """Megatron's strategy, which also keeps what it planned."""

    writer: FileSystemWriterAsync
    metadata: Metadata | None  # on rank 0

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret, async_strategy):
        self.writer, self.metadata, _ = writer, *save_state_dict_ret[1:]
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret, async_strategy)

    def complete(self, results: list[list[WriteResult]]) -> None:
        """Say in the folder what it holds."""
        folder = Path(self.writer.checkpoint_dir)
        self.writer.finish(self.metadata, results)
        save_config(CheckpointingConfig(self.backend, self.version), str(folder))
        for path in (folder / "metadata.json", folder):
            sync(path)


def _planned(state: dict, folder: Path) -> _Plan:
    apply_factories(state)
    dict_list_map_inplace(_in_place, state)
    # The results are handed over by `Writer`; Megatron would spawn a manager process for them, which imports torch again
    # (seconds) and outlives a killed worker.
    filesystem_async._results_queue = queue.Queue()
    plan = _Plan()
    dist_checkpointing.save(state, str(folder), plan, async_sharded_save=True, async_strategy="mcore")
    return plan


def _in_place(part: object) -> object:
    """A tensor in host memory as a storage of its own over the same bytes: Megatron copies parts of larger storages."""
    if isinstance(part, ShardedTensor) and part.data is not None and part.data.device.type == "cpu":
        part.data = _own_storage(part.data.detach())
    return part


def _own_storage(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return tensor
    shared = torch.from_dlpack(
        tensor.contiguous().reshape(-1).view(torch.uint8)
    )  # what NumPy has seen cannot be resized
    return shared.view(tensor.dtype).view(tensor.shape)


def _write(buckets: list, transforms: object, files: Mapping[Path, bytes]) -> list[WriteResult]:
    """Write this rank's files to the disk; runs in a fork when the save is asynchronous."""
    for path, content in files.items():
        path.write_bytes(content)
        sync(path)
    results: list[WriteResult] = []
    for number, bucket in enumerate(buckets):
        _, found = FileSystemWriterAsync.write_preloaded_data([transforms], number, bucket, None, None, use_fsync=True)
        if isinstance(found, Exception):
            raise found
        sync(Path(bucket[0]))  # Megatron syncs before it closes: what Python had in its buffer came later
        results += found
    return results
