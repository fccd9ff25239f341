"""Adapter sync: trainer rank 0 sends the LoRA adapters to the engines, which apply them to their base model.

The engines load the base model once, from its Hugging Face folder. A push gathers the matrices A and B of all layers on rank 0,
and sends a copy to every engine rank in one HTTP request to each engine. SGLang compares the SHA-256 of each matrix.

Each push loads new adapters beside the older ones, under a name of its own. So the engines are not paused: a running request
keeps the adapters with which it began. SGLang's prefix cache uses the identity of the adapters as a part of its keys, so no
request continues a prefix that other adapters have computed.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from models.conversion.peft_folder import on_host, peft_config
from mrl.config.process_schema import PauseMode
from mrl.core.types import SyncReport
from mrl.weight_sync.coordinator import Coordinator
from mrl.weight_sync.engine_control import EngineControl, adapter_name, adapter_request, read_server_info
from parallel.trainer_config import LoraConfig

NamedTensors = Iterable[tuple[str, Tensor]]


GatherAdapters = Callable[[Callable[[NamedTensors], SyncReport]], SyncReport | None]
"""Function that gathers the matrices A and B, and passes them to its argument on rank 0, by their names in PEFT.

All ranks call it. Rank 0 returns the result of the argument, the other ranks None.
"""


class AdapterSync:
    """One trainer rank's part in an adapter sync. All ranks gather the adapters; rank 0 does everything else."""

    def __init__(
        self, urls: Sequence[str], gather: GatherAdapters, lora: LoraConfig, model_path: str, timeout_s: float
    ) -> None:
        """Connect rank 0 to the engines. `model_path`: folder of the base model.

        Raises WeightSyncError on rank 0 if the first engine does not answer.
        """
        self._gather, self._lora, self._model_path, self._version = gather, lora, model_path, -1
        self._coordinator: Coordinator | None = None
        if dist.get_rank() == 0:
            info = read_server_info(urls[0], timeout_s)
            self._max_adapters = int(info["max_loras_per_batch"])
            self._coordinator = Coordinator(urls, int(info["tp_size"]), timeout_s, PauseMode.retract, join_channel=None)

    def push(self, version: int, engines_offloaded: bool = False) -> SyncReport:
        """Load the current adapters into every engine, as weight version `version`. All ranks call this.

        Requests do not use the new adapters before their sender knows the name, `adapter` in the report. Offloaded engines stay
        paused, and so this method has nothing else to do for them.
        """
        return self._gather(lambda tensors: self._push(tensors, version)) or SyncReport()

    def _push(self, tensors: NamedTensors, version: int) -> SyncReport:
        assert version >= self._version, f"weight versions only grow: {version} was pushed after {self._version}"
        engines = self._coordinator
        assert engines is not None, "only rank 0 talks to the engines"
        start, name, num_engines = time.perf_counter(), adapter_name(version), len(engines.alive)
        matrices = on_host(tensors)
        payloads = [b64encode(pickle.dumps(matrices)).decode()] * engines.tp
        config = peft_config(matrices, self._lora, self._model_path)
        request = adapter_request(name, config, payloads, sha256_of(matrices))
        gathered = time.perf_counter()
        engines.call_all(self._unload_old_adapters)
        engines.call_all(lambda engine: engine.load_adapter(request))
        engines.call_all(lambda engine: engine.set_weight_version(str(version)))
        self._version, done = version, time.perf_counter()
        sent = sum(matrix.nbytes for matrix in matrices.values()) * engines.tp * num_engines
        return SyncReport(
            bytes=sent,
            uncompressed_bytes=sent,
            tensors=len(matrices),
            buckets=num_engines,
            seconds=done - start,
            engine_seconds=done - gathered,
            failed=engines.failures,
            adapter=name,
        )

    def _unload_old_adapters(self, engine: EngineControl) -> None:
        """Unload the adapters that no request of this run can use any more.

        A request uses the newest adapters of the time at which the request began (see mrl.controller.plan_adapters).
        """
        newest_first = sorted(engine.adapters(), key=_time_of_push, reverse=True)
        for name in newest_first[self._max_adapters - 1 :]:
            engine.unload_adapter(name)

    def close(self) -> None:
        """Close the connections to the engines."""
        if self._coordinator is not None:
            self._coordinator.close()


def sha256_of(matrices: dict[str, Tensor]) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each contiguous CPU tensor, as a hexadecimal number."""
    views = {name: matrix.flatten().view(torch.uint8).numpy() for name, matrix in matrices.items()}
    return {name: hashlib.sha256(memoryview(view)).hexdigest() for name, view in views.items()}


def _time_of_push(name: str) -> int:
    return int(name.split("_")[2])
