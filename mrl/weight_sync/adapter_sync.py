"""Adapter sync: trainer rank 0 writes the LoRA adapters to a folder, and the engines apply them to their base model.

The engines load the base model once, from its Hugging Face folder. A push gathers the matrices A and B of all layers on rank 0,
writes them to a folder in the format of PEFT, and sends the path of this folder to each engine. So the requests of a push are
small, and every engine rank reads the folder itself.

Each push loads its adapters under a new name, in addition to older adapters. So the engines are not paused: a running
request keeps the adapters with which it began, and waits only while its engine reads the folder. The identity of the adapters is
a part of the keys of SGLang's prefix cache, so no request continues from a prefix that was computed with other adapters.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from models.conversion.peft_folder import on_host, write_peft
from mrl.config.process_schema import PauseMode
from mrl.core.types import SyncReport
from mrl.weight_sync.coordinator import Coordinator, common_server_info
from mrl.weight_sync.engine_control import EngineControl, adapter_name, push_number
from parallel.trainer_config import LoraConfig

UNLOAD_FRACTION = 0.5  # an engine may use this fraction of weight_sync.timeout_s to unload all old adapters

NamedTensors = Iterable[tuple[str, Tensor]]

GatherAdapters = Callable[[Callable[[NamedTensors], SyncReport]], SyncReport | None]
"""Function that gathers the matrices A and B on rank 0, and takes a callback that gets them as pairs (name in PEFT, matrix).

All ranks call the function. Rank 0 calls the callback and returns its result. The other ranks return None.
"""


class AdapterSync:
    """One trainer rank's part in an adapter sync. All ranks gather the adapters; rank 0 does everything else."""

    def __init__(
        self,
        urls: Sequence[str],
        folder: Path,
        gather: GatherAdapters,
        lora: LoraConfig,
        model_path: str,
        timeout_s: float,
    ) -> None:
        """Connect rank 0 to the engines. `model_path`: folder of the base model.

        Each push writes a subfolder of `folder`, which all engines must be able to read. Raises WeightSyncError on rank 0 if an
        engine does not answer, and ValueError if engines have different devices, dtypes or parallel sizes.
        """
        self._folder, self._gather, self._lora, self._model_path, self._version = folder, gather, lora, model_path, -1
        self._coordinator: Coordinator | None = None
        if dist.get_rank() == 0:
            info = common_server_info(urls, timeout_s)
            self._max_adapters = int(info["max_loras_per_batch"])
            self._coordinator = Coordinator(urls, int(info["tp_size"]), timeout_s, PauseMode.retract, join_channel=None)

    def push(self, version: int, engines_offloaded: bool = False) -> SyncReport:
        """Load the current adapters into every engine, as weight version `version`. All ranks call this.

        A request uses the new adapters only if it names them. Their name is the field `adapter` of the report. This method
        neither pauses nor resumes engines, so `engines_offloaded` has no effect: offloaded engines stay paused.
        """
        return self._gather(lambda tensors: self._push(tensors, version)) or SyncReport()

    def _push(self, tensors: NamedTensors, version: int) -> SyncReport:
        assert version >= self._version, f"weight versions only grow: {version} was pushed after {self._version}"
        coordinator = self._coordinator
        assert coordinator is not None, "only rank 0 talks to the engines"
        start, matrices = time.perf_counter(), on_host(tensors)
        gathered = time.perf_counter()
        loaded = set[str]().union(*coordinator.call_all(self._unload_old_adapters).values())
        self._remove_unused_folders(loaded)
        name = adapter_name(version, 1 + max(map(push_number, loaded), default=0))
        write_peft(matrices, self._lora, self._model_path, self._folder / name)
        coordinator.call_all(lambda engine: engine.load_adapter(name, str(self._folder / name)))
        coordinator.call_all(lambda engine: engine.set_weight_version(str(version)))
        self._version, done = version, time.perf_counter()
        written = sum(matrix.nbytes for matrix in matrices.values())
        return SyncReport(
            bytes=written,
            uncompressed_bytes=written,
            tensors=len(matrices),
            buckets=1,
            seconds=done - start,
            engine_wait_seconds=done - gathered,
            failed=coordinator.failures,
            adapter=name,
        )

    def _unload_old_adapters(self, engine: EngineControl) -> list[str]:
        """Unload all adapters except the newest `max_loras_per_batch - 1`. Returns the names of the adapters that stay loaded.

        No later step takes responses of the unloaded adapters (see `adapter_slots` in mrl.rollout.engines.server_args). Raises
        EngineError if requests still use some of the adapters to unload after UNLOAD_FRACTION of the timeout.
        """
        deadline = time.monotonic() + UNLOAD_FRACTION * engine.timeout_s
        newest_first = sorted(engine.adapters(), key=push_number, reverse=True)
        for name in newest_first[self._max_adapters - 1 :]:
            engine.unload_adapter(name, max(0.1, deadline - time.monotonic()))
        return newest_first[: self._max_adapters - 1]

    def _remove_unused_folders(self, loaded: set[str]) -> None:
        """Remove the folders of adapters that no engine has loaded. Engines map the files of the other folders into memory."""
        for path in self._folder.glob("version_*"):
            if path.name not in loaded:
                shutil.rmtree(path)

    def close(self) -> None:
        """Close the connections to the engines."""
        if self._coordinator is not None:
            self._coordinator.close()
