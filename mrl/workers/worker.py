"""The Ray actor around one rank: brings the process up, and hands token blocks from the object store to the model."""

import logging
import os
import socket
from pathlib import Path
from typing import Any

import ray

from mrl.algorithms.losses import Loss
from mrl.types import Share, TokenBlock, UpdateReport
from mrl.workers.spec import ModelSpec
from parallel.dims import ParallelDims


class TrainWorker:
    """One trainer process. Methods are called on all ranks of the layout at once, by mrl.workers.group."""

    def __init__(self, rank: int, dims: ParallelDims, log_dir: str) -> None:
        """Start the heavy imports; nothing here waits for another rank."""
        logging.basicConfig(
            filename=Path(log_dir) / f"trainer_{rank}.log",
            level=logging.INFO,
            format="%(asctime)s %(name)s %(message)s",
        )
        self.rank, self.dims = rank, dims
        self._transport: Any = None
        from parallel import device  # torch is heavy: imported here, in the process that computes

        device.install()
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
        from mrl.workers.actor import Actor  # imports Megatron, after the device stand-in
        from mrl.workers.critic import Critic
        from parallel import device, groups

        device.init_process_group(self.rank, self.dims.world_size, *address, timeout_s)
        groups.initialize(self.dims, seed)
        self.model = Critic(spec) if critic else Actor(spec)

    def load_sft(self, path: str, tokenizer: str, max_tokens: int) -> dict[str, Any]:
        """Tokenise a supervised data set into the object store; returns its handle and [rows] lengths."""
        from mrl.data.sft import SftDataset  # imports the tokenizer library

        data = SftDataset.load(path, tokenizer, max_tokens)
        block = TokenBlock.from_lists(data.prompts, data.responses)
        return dict(handle=ray.put(block), lengths=block.lengths, response_lengths=block.response_lengths)

    def reset_optimizer(self, **settings: Any) -> None:
        """Fresh optimizer state around the current weights."""
        from parallel.optimizer_settings import AdamW

        self.model.reset_optimizer(AdamW(**settings))

    def update(
        self, block: TokenBlock, shares: list[Share], loss: Loss, lrs: list[float], temperature: float
    ) -> list[UpdateReport]:
        """One optimizer step on this replica's share of each mini-batch; Ray has fetched the block by its handle."""
        from mrl.workers.actor import Actor

        assert isinstance(self.model, Actor), f"a policy loss trains an actor, this is a {type(self.model).__name__}"
        return self.model.update(block, shares, loss, lrs, temperature)

    def trace(
        self, block: TokenBlock, share: Share, loss: Loss | None, lr: float, temperature: float, folder: str
    ) -> Any:
        """One step of the certificate, tensors in `folder`; without a loss the model is a critic."""
        from mrl.workers.trace import trace

        return trace(self.model, block, share, loss, lr, temperature).stored(folder)

    def look(self, block: TokenBlock, share: Share, temperature: float) -> dict[int, Any]:
        """Row -> log-probabilities or values, on one rank of those that have them."""
        from mrl.workers.trace import look

        return look(self.model, block, share, temperature)

    def connect_engines(self, urls: list[str], **settings: Any) -> None:
        """Open the way to the engines; only the rank that sends does anything."""
        if self.rank > 0 or not urls:  # without engines (a replay) there is nowhere to send to
            return
        from mrl.weight_sync.checksum import expand_experts
        from mrl.weight_sync.transport import open_transport  # imports the engine's group helper

        bridge = self.model.bridge
        fusions = expand_experts(bridge.fusions, bridge.num_experts)
        self._transport = open_transport(urls, fusions=fusions, **settings)

    def push_weights(self, version: int) -> Any:
        """Send the current weights to the engines as `version`; the sender returns mrl.weight_sync's report."""
        if not self.model.takes_part:  # other replicas hold the same weights
            return None
        tensors = self.model.export()
        if self._transport is not None:
            return self._transport.push(tensors, version)
        for _ in tensors:  # take part in the gathers
            pass
        return None

    def export_hf(self, folder: str, notes: dict[str, str] | None = None) -> None:
        """Write the current weights as a Hugging Face folder, with `notes` (file name -> text) beside them."""
        self.model.export_hf(folder, notes or {})

    def save(self, folder: str) -> None:
        """Write a distributed checkpoint."""
        self.model.save(folder)

    def cpu_seconds(self) -> float:
        """User and system seconds this process has used, for benchmarks."""
        times = os.times()
        return times.user + times.system

    def close(self) -> None:
        """Leave the process groups."""
        import torch.distributed as dist

        if self._transport is not None:
            self._transport.close()
        if dist.is_initialized():
            dist.destroy_process_group()
