"""The Ray actor around one rank: brings the process up, and hands token blocks from the object store to the model."""

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from mrl.algorithms.losses import Loss
from mrl.config.schema import WeightSyncConfig
from mrl.core.types import Column, Handle, RankBatch, SyncReport, TokenBlock, UpdateReport
from mrl.data.tokenizer import ChatTemplate
from mrl.hang_report.process_registry import register_process, registry_folder, track_activity
from mrl.workers.awake import awake
from mrl.workers.model_spec import ModelSpec
from parallel.collective_log import CollectiveLog
from parallel.dims import ParallelDims


class TrainWorker:
    """One trainer process. Methods are called on all ranks of the layout at once, by mrl.workers.group.

    `shares`: of all replicas, by data-parallel rank.
    """

    def __init__(self, rank: int, dims: ParallelDims, run_dir: str, model: str = "") -> None:
        """Start the heavy imports; nothing here waits for another rank. `model`: the name of one beside the actor."""
        logging.basicConfig(
            filename=Path(run_dir) / "logs" / model / f"trainer_{rank}.log",
            level=logging.INFO,
            format="%(asctime)s %(name)s %(message)s",
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request
        self.rank, self.dims = rank, dims
        self._sync: Any = None
        self.model: Any = None
        title, name = f"{model} {dims.title(rank)}".strip(), f"{model or 'trainer'}_{rank}"
        where = register_process(registry_folder(run_dir), name, title, "rank", group=model, rank=rank)
        self._collectives = CollectiveLog(where.with_suffix(".ops"))
        from parallel import device  # torch is heavy: imported here, in the process that computes

        device.patch_megatron_for_cpu()
        device.set_threads()

    def address(self) -> tuple[str, int]:
        """Where rank 0 will listen for the others: its node's address and a port that is free there now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def setup(
        self, spec: ModelSpec, seed: int, address: tuple[str, int], timeout_s: float, critic: bool = False
    ) -> None:
        """Join the process group and build this rank's part of the model."""
        from mrl.workers.actor import MegatronActor  # imports Megatron, after the device stand-in
        from mrl.workers.critic import MegatronCritic
        from parallel import collectives, device, groups

        collectives.init_process_group(self.rank, self.dims.world_size, *address, timeout_s)
        groups.initialize(self.dims, seed)
        self._collectives.watch()
        self.model = MegatronCritic(spec) if critic else MegatronActor(spec)

    def load_sft(self, path: str, tokenizer: str, max_tokens: int, chat: ChatTemplate) -> dict[str, Any]:
        """Tokenise a supervised data set into the object store; returns its handle and [rows] lengths."""
        from mrl.data.supervised_dataset import SftDataset  # imports the tokenizer library

        data = SftDataset.load(path, tokenizer, max_tokens, chat)
        block = TokenBlock.from_lists(data.prompts, data.responses, sampled=data.sampled)
        columns = dict(response_lengths=block.response_lengths, sampled_lengths=block.sampled_lengths)
        return dict(handle=ray.put(block), lengths=block.lengths, **columns)

    def sleep(self, keep_weights: bool = False) -> int:
        """Give back the device's memory, but for the weights where they are to be kept; bytes this process still has there.

        Until `wake()`, calls that need what is gone raise RuntimeError. A save on its way has all it needs.
        """
        with track_activity("giving the device's memory back"):
            return self.model.sleep(keep_weights)

    def wake(self) -> None:
        """Have the memory on the device again, as it was."""
        with track_activity("taking the device's memory again"):
            self.model.wake()

    @awake
    def reset_optimizer(self, **settings: Any) -> None:
        """Fresh optimizer state around the current weights."""
        from parallel.trainer_config import OptimConfig

        self.model.reset_optimizer(OptimConfig(**settings))

    @awake
    def keep_reference(self) -> None:
        """Remember the current weights as the reference policy's."""
        self.model.keep_reference()

    @awake
    def compute(self, block: TokenBlock, shares: Sequence[RankBatch], what: str, **how: Any) -> Handle | None:
        """This replica's part of the column `what` [R]; a handle on one rank of the replica, None on the others."""
        from mrl.workers.columns import compute

        with track_activity(f"computing {what}"):
            part = compute(self.model, what, block, self._own(shares), **how)
        return ray.put(part) if part else None

    @awake
    def update(
        self,
        block: TokenBlock,
        shares: Sequence[Sequence[RankBatch]],
        columns: Mapping[str, Column] | None = None,
        **how: Any,
    ) -> list[UpdateReport]:
        """One optimizer step on this replica's share of each mini-batch; Ray has fetched block and columns by their handles.

        `how`: what the model's own `update` takes besides.
        """
        with track_activity("updating the weights"):
            return self.model.update(block.with_columns(**columns or {}), self._own(shares), **how)

    @awake
    def trace(
        self,
        block: TokenBlock,
        shares: Sequence[RankBatch],
        loss: Loss | None,
        lr: float,
        temperature: float,
        folder: str,
    ) -> Any:
        """One step of the certificate, tensors in `folder`; without a loss the model is a critic."""
        from mrl.workers.parity_trace import trace

        return trace(self.model, block, self._own(shares), loss, lr, temperature).stored(folder)

    @awake
    def trace_layers(
        self, block: TokenBlock, shares: Sequence[RankBatch], loss: Loss | None, temperature: float, folder: str
    ) -> Any:
        """A step up to its gradients, layer by layer, tensors in `folder`."""
        from mrl.workers.parity_trace import trace_layers

        return trace_layers(self.model, block, self._own(shares), loss, temperature).stored(folder)

    @awake
    def keep_step(self, block: TokenBlock, columns: Mapping[str, Column] | None, folder: str, weights: bool) -> None:
        """This rank's part of a capsule: batch and random numbers, and the current weights as a Hugging Face folder."""
        from mrl.workers import capsule

        try:
            capsule.keep(Path(folder), block.with_columns(**columns or {}), self.dims)
        finally:  # also of a rank that could not write: the others wait for it in the gathers
            if weights:
                self.model.export_hf(f"{folder}/{capsule.WEIGHTS}", {})

    @awake
    def begin_from(self, folder: str, weights: str | None) -> bool:
        """Take up what a capsule kept: the weights of the checkpoint `weights`, if any, and the states of random numbers.

        Returns whether these were of this layout; else they stay as they are.
        """
        from parallel import rng_state

        if weights:
            self.model.load_weights(weights)
        states = rng_state.read(folder, self.dims)
        if states is not None:
            rng_state.restore(states)
        return states is not None

    @awake
    def look(self, block: TokenBlock, shares: Sequence[RankBatch], temperature: float) -> dict[int, Any]:
        """Row -> log-probabilities or values, on one rank of those that have them."""
        from mrl.workers.parity_trace import look

        return look(self.model, block, self._own(shares), temperature)

    def _own[T](self, shares: Sequence[T]) -> T:
        """Of all replicas' shares this one's."""
        return shares[self.dims.coords(self.rank).dp]

    def connect_engines(self, urls: list[str], settings: WeightSyncConfig, folder: str) -> dict[str, str]:
        """Open the ways to the engines, in place of those to earlier ones; every rank sends what it owns.

        `folder`: where the disk transport writes. Returns engines that failed meanwhile, and why; then nothing is open.
        """
        from mrl.weight_sync.errors import SyncError  # with httpx: here, where engines are talked with

        if self._sync is not None:
            self._sync.close()
        self._sync = None
        try:
            self._sync = self.model.connect(urls, settings, folder) if urls else None  # a replay has no engines
        except SyncError as error:
            if not error.failed:
                raise
            return error.failed
        self._collectives.watch()  # the sync has a group of its own
        return {}

    @awake
    def push_weights(self, version: int, released: bool = False) -> SyncReport:
        """Bring the current weights to the engines as `version`; what this rank sent.

        `released`: engines had given the memory of their weights back, and stay paused until they have all of it again.
        """
        with track_activity(f"pushing version {version} of the weights"):
            return self._sync.push(version, released) if self._sync is not None else SyncReport()

    @awake
    def export_hf(self, folder: str, notes: dict[str, str] | None = None) -> None:
        """Write the current weights as a Hugging Face folder, with `notes` (file name -> text) beside them."""
        self.model.export_hf(folder, notes or {})

    @awake
    def save(self, folder: str) -> None:
        """Write a distributed checkpoint; the folder appears when it is complete."""
        self.model.save(folder)

    @awake
    def load(self, folder: str) -> bool:
        """Restore a distributed checkpoint; whether random number generators were restored too (same layout)."""
        return self.model.load(folder)

    @awake
    def begin_save(self, folder: str, asynchronous: bool) -> None:
        """Start writing a distributed checkpoint into `folder`, in place; `finish_save` completes it."""
        self.model.begin_save(folder, asynchronous)

    def save_finished(self) -> bool:
        """Whether `finish_save` would find this rank's part written, or failed."""
        return self.model.save_finished()

    def finish_save(self, timeout_s: float) -> None:
        """Complete the checkpoint that `begin_save` began; it is then on the disk."""
        self.model.finish_save(timeout_s)

    def abandon_save(self) -> None:
        """Give up what `begin_save` began, if anything."""
        self.model.abandon_save()

    @awake
    def save_reference(self, folder: str) -> None:
        """Write the reference policy's weights as a checkpoint without optimizer."""
        self.model.save_reference(folder)

    @awake
    def load_reference(self, folder: str) -> None:
        """Take the reference policy's weights from what `save_reference` wrote."""
        self.model.load_reference(folder)

    def cpu_seconds(self) -> float:
        """User and system seconds this process has used, for benchmarks."""
        times = os.times()
        return times.user + times.system

    def close(self) -> None:
        """Leave the process groups."""
        import torch.distributed as dist

        if self._sync is not None:
            self._sync.close()
        if self.model is not None:
            self.model.abandon_save()
        self._collectives.close()
        if dist.is_initialized():
            dist.destroy_process_group()
