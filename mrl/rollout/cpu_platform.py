"""SGLang platform plug-in: stock SGLang on a machine without a GPU.

SGLang finds it through the entry point `sglang.srt.platforms` (setup.py); nothing else refers to it by import. Where a GPU or
another accelerator is available `activate()` declines and SGLang picks its own platform.
"""

import os
from pathlib import Path

import psutil
import torch
from sglang.srt.arg_groups.choices import (
    ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
    add_deterministic_attention_backend_choices,
)
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from mrl.hang_report.register import FOLDER, NAME, dump_on_signal
from mrl.rollout.names import ATTENTION_BACKEND


def activate() -> str | None:
    """Name of the platform class, or None where there is an accelerator."""
    if FOLDER in os.environ:  # this runs in every process of SGLang, also in those that it spawns where there is CUDA
        dump_on_signal(Path(os.environ[FOLDER]) / f"{os.environ[NAME]}.txt")
    if torch.accelerator.is_available():
        return None
    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION_BACKEND])
        add_deterministic_attention_backend_choices([ATTENTION_BACKEND])  # it draws no random numbers
    return f"{__name__}.CpuPlatform"


class CpuPlatform(SRTPlatform):
    """Torch operators on host memory; no graphs, no Triton, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device(self, device_id: int = 0) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        """Every rank shares the one CPU device."""

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_capability(self, device_id: int = 0) -> None:
        return None

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def init_backend(self) -> None:
        """Called once in each scheduler process, when SGLang's layers can be imported."""
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS  # importing them earlier would be a cycle
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
        from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

        from mrl.rollout import cpu_attention, cpu_ops

        assert cpu_attention.BatchedSdpaBackend, "importing it registers it"
        cpu_ops.register(self.get_dispatch_key_name())
        ALLOC_MEMORY_FUNCS[self.device_type] = allocate
        # Latent attention always over the cache, which holds the short vectors: the other ways have kernels of their own.
        AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda attention, batch: AttnForwardMethod.MLA)


def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: object) -> torch.Tensor:
    """Host memory as it is. SGLang's default pins it through the CUDA runtime, also where there is no GPU to read it; the
    table of routed experts lives in such memory."""
    return torch.empty(dims, dtype=dtype, device=device)
