"""Weight sync through Hugging Face folders: for engines that only share a file system, and to look at what was sent.

SGLang loads the folder by itself (/update_weights_from_disk), so this works for every way in which an engine stores weights.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from mrl.core.types import SyncReport
from mrl.weight_sync.coordinator import Coordinator
from mrl.weight_sync.engine_control import EngineControl
from mrl.weight_sync.engine_layout import EngineLayout, EngineShard, Topology
from mrl.weight_sync.errors import SyncError, WeightMismatchError

KEPT = 2  # folders: the one that engines have, and the one before

NamedTensors = Iterable[tuple[str, Tensor]]


class DiskSync:
    """The one sender of whole tensors, rank 0. `write` brings them into a new folder, as (name, tensor) go by."""

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        layout_of: Callable[[Topology], EngineLayout],
        write: Callable[[NamedTensors, Path], None],
        timeout_s: float,
    ) -> None:
        self.folder, self._write, self._version = folder, write, -1
        try:
            with EngineControl(urls[0], timeout_s) as engine:
                self._info = engine.server_info()
        except httpx.HTTPError as error:
            raise SyncError(f"{urls[0]} does not answer: {error!r}", {urls[0]: repr(error)}) from error
        topology = Topology.of(self._info)
        self._layout = layout_of(topology)
        self._coordinator = Coordinator(urls, topology.tp, timeout_s, "retract", join=None)

    def push(self, tensors: NamedTensors, version: int, released: bool = False) -> SyncReport:
        """Write `folder/<version>` and have every engine load it; raises WeightMismatchError, and what `write` raises.

        `released`: engines had given the memory of their weights back, and stay paused until they have all of it again.
        """
        assert version >= self._version, f"versions only grow: {version} after {self._version}"
        start, target = time.perf_counter(), self.folder / str(version)
        if target.exists():  # of an attempt that did not reach all engines
            shutil.rmtree(target)
        expected, size = self._expected(), Counter[str]()
        self._write(_counted(expected.through(tensors) if expected else tensors, size), target)
        written = time.perf_counter()
        engines = self._coordinator
        engines.each(lambda engine: engine.pause("retract"))
        engines.each(lambda engine: engine.update_weights_from_disk(str(target)))
        if expected:
            for number, reported in engines.each(EngineControl.checksums).items():
                expected.compare(reported, engines.engines[number].url)
        engines.each(lambda engine: engine.set_weight_version(str(version)))
        engines.each(lambda engine: engine.flush_cache(engines.timeout_s))
        if not released:
            engines.each(EngineControl.resume)
        self._version = version
        self._remove_old()
        return SyncReport(
            bytes=size["bytes"],
            raw_bytes=size["bytes"],
            tensors=size["tensors"],
            buckets=1,
            seconds=time.perf_counter() - start,
            engine_seconds=time.perf_counter() - written,
            failed=engines.failures,
        )

    def _expected(self) -> ExpectedChecksums | None:
        """What engines should report after the next load; None for those whose checksums cannot be told from here."""
        if self._info["device"] != "cpu":
            return None
        return ExpectedChecksums(self._layout, getattr(torch, self._info["dtype"]))

    def _remove_old(self) -> None:
        versions = sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())
        for version in versions[:-KEPT]:
            shutil.rmtree(self.folder / str(version))

    def close(self) -> None:
        """Close the connections."""
        self._coordinator.close()


def _counted(tensors: NamedTensors, size: Counter[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        size.update(bytes=tensor.nbytes, tensors=1)
        yield name, tensor


class ExpectedChecksums:
    """SGLang's own checksums of all parameters of an engine, from the whole tensors that go by."""

    def __init__(self, layout: EngineLayout, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._shapes = [layout.shapes(rank) for rank in range(layout.topology.tp)]
        self._held: list[dict[str, list[EngineShard]]] = []
        for rank in range(layout.topology.tp):
            by_name: dict[str, list[EngineShard]] = {}
            for part in layout.rank(rank):
                by_name.setdefault(part.name, []).append(part)
            self._held.append(by_name)
        self._missing = [Counter(p.param for parts in held.values() for p in parts) for held in self._held]
        self._filling: list[dict[str, Tensor]] = [{} for _ in self._held]
        self._checksums: list[dict[str, str]] = [{} for _ in self._held]

    def through(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, looked at on their way."""
        for name, tensor in tensors:
            for rank, held in enumerate(self._held):
                for part in held.get(name, ()):
                    self._add(rank, part, tensor)
            yield name, tensor

    def _add(self, rank: int, part: EngineShard, tensor: Tensor) -> None:
        shape, filling = self._shapes[rank][part.param], self._filling[rank]
        whole = filling.setdefault(part.param, torch.zeros(shape, dtype=self._dtype))
        place = part.place(part.box)
        whole[place.slices].copy_(tensor[part.box.slices].view(place.sizes))
        self._missing[rank][part.param] -= 1
        if not self._missing[rank][part.param]:
            self._checksums[rank][part.param] = sglang_hash(filling.pop(part.param))

    def compare(self, reported: Sequence[Mapping[str, Any]], engine: str) -> None:
        """Raise WeightMismatchError where an engine's ranks report anything else, naming the parameters."""
        for rank, (mine, theirs) in enumerate(zip(self._checksums, reported, strict=True)):
            wrong = sorted(name for name in mine | dict(theirs) if theirs.get(name) != mine.get(name))
            if wrong:
                raise WeightMismatchError(
                    f"{engine} rank {rank} does not hold the weights that were written: {', '.join(wrong[:8])}. It stays out "
                    "of service."
                )


def sglang_hash(tensor: Tensor) -> str:
    """SGLang 0.5.23's hash of a tensor on a CPU (sglang.srt.managers.mm_utils.tensor_hash): SHA-256 cut to 8 bytes."""
    data = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return hashlib.sha256(data).hexdigest()[:16]
