"""Weight sync through the disk: rank 0 writes a Hugging Face folder, and the engines load it.

Use this transport if engines share only a file system with the trainer, or to inspect the weights that are sent. SGLang loads
the folder itself (/update_weights_from_disk). This works even if an engine stores weights in a form that mrl does not know.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from models.architecture import VISION_PREFIX
from mrl.config.process_schema import PauseMode
from mrl.core.types import SyncReport
from mrl.weight_sync.coordinator import Coordinator, common_server_info
from mrl.weight_sync.engine_control import EngineControl, WeightMismatchError
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes, EngineShard

KEPT_VERSIONS = 2  # weight versions whose folders stay on the disk: the newest version and the version before
MAX_NAMES = 8  # an error message lists at most this many parameters

NamedTensors = Iterable[tuple[str, Tensor]]


class ExportsWeights(Protocol):
    """The methods of a trainer rank's model that DiskSync uses."""

    def consume_on_rank_0[T](self, consume: Callable[[NamedTensors], T]) -> T | None:
        """Gather all tensors on rank 0, and call `consume` with these tensors on rank 0. Returns None on the other ranks."""
        ...

    def write_hf(self, tensors: NamedTensors, folder: Path) -> None:
        """Write whole tensors as a Hugging Face folder."""
        ...


class DiskSync:
    """One trainer rank's part in a weight sync through the disk. All ranks gather the weights; rank 0 does everything else."""

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        model: ExportsWeights,
        layout_of: Callable[[EngineParallelSizes], EngineLayout],
        timeout_s: float,
    ) -> None:
        """Connect rank 0 to the engines. Each version of the weights is written to a subfolder of `folder`.

        Raises WeightSyncError on rank 0 if an engine does not answer, and ValueError if engines have different devices, dtypes or
        parallel sizes.
        """
        self._folder, self._model, self._layout_of, self._version = folder, model, layout_of, -1
        self._coordinator: Coordinator | None = None
        if dist.get_rank() == 0:
            self._server_info = common_server_info(urls, timeout_s)
            self._parallel_sizes = EngineParallelSizes.of(self._server_info)
            self._coordinator = Coordinator(
                urls, self._parallel_sizes.tp, timeout_s, PauseMode.retract, join_channel=None
            )

    def push(self, version: int, engines_offloaded: bool = False) -> SyncReport:
        """Write the current weights to `folder/<version>` and have every engine load this folder. All ranks call this.

        `engines_offloaded`: whether the engines had released their weights. Such engines stay paused, because they have no
        KV cache yet. Raises WeightMismatchError if the weights in an engine on CPUs differ from the weights in the folder.
        Engines on GPUs are not checked.
        """
        report = self._model.consume_on_rank_0(lambda tensors: self._push(tensors, version, not engines_offloaded))
        return report or SyncReport()

    def _push(self, tensors: NamedTensors, version: int, resume: bool) -> SyncReport:
        assert version >= self._version, f"weight versions only grow: {version} was pushed after {self._version}"
        start, folder = time.perf_counter(), self._folder / str(version)
        if folder.exists():  # an earlier push wrote this folder, but did not reach all engines
            shutil.rmtree(folder)
        expected, totals = self._expected_checksums(), Counter[str]()
        self._model.write_hf(_count(expected.observe(tensors) if expected else tensors, totals), folder)
        written = time.perf_counter()
        failed = self._load_on_engines(folder, version, expected, resume)
        self._version = version
        self._remove_old_versions()
        return SyncReport(
            bytes=totals["bytes"],
            uncompressed_bytes=totals["bytes"],
            tensors=totals["tensors"],
            buckets=1,
            seconds=time.perf_counter() - start,
            engine_wait_seconds=time.perf_counter() - written,
            failed=failed,
        )

    def _load_on_engines(
        self, folder: Path, version: int, expected: ExpectedChecksums | None, resume: bool
    ) -> dict[str, str]:
        """Have every engine load the folder. Compare the checksums that the engines report with `expected`.

        Returns failed engines: URL -> reason.
        """
        coordinator = self._coordinator
        assert coordinator is not None, "only rank 0 talks to the engines"
        coordinator.call_all(lambda engine: engine.pause(PauseMode.retract))
        coordinator.call_all(lambda engine: engine.update_weights_from_disk(str(folder)))
        if expected:
            for index, reported in coordinator.call_all(EngineControl.checksums).items():
                expected.compare(reported, coordinator.engines[index].url)
        coordinator.call_all(lambda engine: engine.set_weight_version(str(version)))
        coordinator.call_all(lambda engine: engine.flush_cache(coordinator.timeout_s))
        if resume:
            coordinator.call_all(EngineControl.resume)
        return coordinator.failures

    def _expected_checksums(self) -> ExpectedChecksums | None:
        """Return a new ExpectedChecksums. If the engines are on GPUs, return None: the trainer cannot compute their checksums."""
        if self._server_info["device"] != "cpu":
            return None
        return ExpectedChecksums(self._layout_of(self._parallel_sizes), getattr(torch, self._server_info["dtype"]))

    def _remove_old_versions(self) -> None:
        versions = sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())
        for version in versions[:-KEPT_VERSIONS]:
            shutil.rmtree(self._folder / str(version))

    def close(self) -> None:
        """Close the connections to the engines."""
        if self._coordinator is not None:
            self._coordinator.close()


def _count(tensors: NamedTensors, totals: Counter[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        totals.update(bytes=tensor.nbytes, tensors=1)
        yield name, tensor


class ExpectedChecksums:
    """The checksums that SGLang should report for all parameters of an engine, computed from whole tensors."""

    def __init__(self, layout: EngineLayout, dtype: torch.dtype) -> None:
        """`dtype`: the dtype in which the engine computes. Some of its parameters have other dtypes, as `layout` says."""
        self._layout, self._dtype = layout, str(dtype).removeprefix("torch.")
        ranks = range(layout.parallel_sizes.tp)
        self._shapes = [layout.param_shapes(rank) for rank in ranks]
        self._shards: list[dict[str, list[EngineShard]]] = [{} for _ in ranks]  # by rank, by Hugging Face name
        for rank, by_name in enumerate(self._shards):
            for shard in layout.shards(rank):
                by_name.setdefault(shard.name, []).append(shard)
        # By rank: parameter -> number of its shards that have not been observed yet.
        self._missing = [Counter(s.param for shards in by_name.values() for s in shards) for by_name in self._shards]
        # By rank: parameter that still lacks some shards -> its values.
        self._incomplete: list[dict[str, Tensor]] = [{} for _ in ranks]
        self._checksums: list[dict[str, str]] = [{} for _ in ranks]  # by rank, by parameter

    def observe(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors unchanged, and copy each tensor into the engine parameters that contain it."""
        for name, tensor in tensors:
            for rank, by_name in enumerate(self._shards):
                for shard in by_name.get(name, ()):
                    self._add(rank, shard, tensor)
            yield name, tensor

    def _add(self, rank: int, shard: EngineShard, tensor: Tensor) -> None:
        shape, incomplete = self._shapes[rank][shard.param], self._incomplete[rank]
        dtype = getattr(torch, self._layout.dtype_of(shard.param, self._dtype))
        param = incomplete.setdefault(shard.param, torch.zeros(shape, dtype=dtype))
        box = shard.box_in_param(shard.box)
        param[box.slices].copy_(tensor[shard.box.slices].view(box.sizes))
        self._missing[rank][shard.param] -= 1
        if not self._missing[rank][shard.param]:
            self._checksums[rank][shard.param] = sglang_hash(incomplete.pop(shard.param))

    def compare(self, reported: Sequence[Mapping[str, Any]], engine: str) -> None:
        """Raise WeightMismatchError if the checksums in `reported`, by rank, differ from the expected checksums.

        The vision tower of an image model is not compared. `engine` is the URL of the engine that reported the checksums, for the
        error message.
        """
        for rank, (expected, actual) in enumerate(zip(self._checksums, reported, strict=True)):
            names = [name for name in expected | dict(actual) if not name.startswith(VISION_PREFIX)]
            wrong = sorted(name for name in names if actual.get(name) != expected.get(name))
            if wrong:
                raise WeightMismatchError(
                    f"{engine} rank {rank} does not hold the weights that were written: {', '.join(wrong[:MAX_NAMES])}. The "
                    "engine stays out of service."
                )


def sglang_hash(tensor: Tensor) -> str:
    """Hash a CPU tensor as SGLang 0.5.23 does (sglang.srt.managers.mm_utils.tensor_hash): SHA-256 cut to 8 bytes."""
    data = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return hashlib.sha256(data).hexdigest()[:16]
