"""SGLang platform plug-in that runs the unmodified SGLang package on a machine without a GPU.

SGLang finds the plug-in through the entry point `sglang.srt.platforms` (setup.py). If there is a GPU or another accelerator,
`activate()` returns None and SGLang chooses its own platform. Engines run with the hooks `sleep_while_paused`,
`discard_random_kv_scales` and `round_embedding_scale` on every machine: on a machine with a GPU, `activate()` registers them, and
without a GPU, launch_sglang.py does.
"""

import os
from pathlib import Path
from typing import Any

import psutil
import torch
from sglang.srt.arg_groups.choices import (
    ATTENTION_BACKEND_CHOICES,
    add_attention_backend_choices,
    add_deterministic_attention_backend_choices,
)
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from mrl.hang_report.process_registry import REGISTRY_FOLDER_ENV, REGISTRY_NAME_ENV, dump_stacks_on_signal
from mrl.rollout.cpu import ATTENTION_BACKEND
from mrl.rollout.engines.batch_spans import register_hooks

PAUSED_LOOP = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
"""Method that the loop of a paused scheduler calls in each iteration."""


def sleep_while_paused(result: None, scheduler: Any) -> None:
    """Let a paused scheduler sleep until a request arrives. Hook in the scheduler's loop.

    Without the hook, a paused scheduler would keep a CPU core busy, although the trainer and the weight sync need this core.
    """
    scheduler.maybe_sleep_on_idle()


KV_SCALES = "sglang.srt.layers.quantization.kv_cache.BaseKVCacheMethod.process_weights_after_loading"
"""Method that reads the scales of the KV cache of an attention layer of an FP8 engine."""


def discard_random_kv_scales(method: Any, layer: Any) -> None:
    """Mark scales of the KV cache as absent if the engine starts with random weights. Hook that runs before SGLang reads them.

    SGLang (0.5.23, load_format=dummy) fills not only the weights but also these scales with random numbers, and trainers do not
    send scales. The value -1 marks a scale as absent. SGLang then uses 1.
    """
    from sglang.srt.runtime_context import get_model  # can be imported only inside SGLang

    if get_model().load_format == "dummy":
        layer.k_scale.fill_(-1.0)
        layer.v_scale.fill_(-1.0)


LOAD_MODEL = "sglang.srt.managers.scheduler.Scheduler.init_tp_model_worker"
"""Method that builds the model of an engine rank. CUDA graphs are captured later, so they contain what a hook changes here."""


def round_embedding_scale(result: None, scheduler: Any) -> None:
    """Round the embedding scale of Gemma 3 to the dtype of the model, as transformers and mrl's trainers do.

    Gemma 3 multiplies its embeddings by this scale. SGLang (0.5.23) itself multiplies by the unrounded scale. Hook that runs
    after SGLang has built a model.
    """
    for module in scheduler.tp_worker.model_runner.model.modules():
        if type(module).__name__ == "Gemma3TextScaledWordEmbedding":
            module.embed_scale = torch.tensor(module.embed_scale, dtype=module.weight.dtype).item()


def activate() -> str | None:
    """Return the name of the platform class, or None if there is an accelerator.

    SGLang calls this function in each of its processes, also on a machine with GPUs.
    """
    # The signal handler of hang reports is installed here, because SGLang calls no other code of mrl in a spawned process.
    if REGISTRY_FOLDER_ENV in os.environ:
        dump_stacks_on_signal(Path(os.environ[REGISTRY_FOLDER_ENV]) / f"{os.environ[REGISTRY_NAME_ENV]}.txt")
    if torch.accelerator.is_available():
        # On a machine with a GPU, SGLang spawns its processes, so each process must register the hooks itself. Without a GPU,
        # launch_sglang.py registers the hooks before it forks.
        HookRegistry.register(PAUSED_LOOP, sleep_while_paused, HookType.AFTER)
        HookRegistry.register(KV_SCALES, discard_random_kv_scales, HookType.BEFORE)
        HookRegistry.register(LOAD_MODEL, round_embedding_scale, HookType.AFTER)
        register_hooks()
        return None
    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION_BACKEND])
        # Otherwise SGLang refuses deterministic inference. On a CPU, deterministic inference only means sampling with seeds.
        add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    return f"{__name__}.CpuPlatform"


class CpuPlatform(SRTPlatform):
    """SGLang's platform for a CPU: torch operators, without CUDA graphs, Triton or pinned memory."""

    _enum = PlatformEnum.OOT  # out of tree: not a part of SGLang
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
        """Do nothing, because torch has only one CPU device."""

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
        """Register the attention backend, the operators and the allocator. SGLang calls this once in each scheduler process."""
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS  # an earlier import would be circular
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
        from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

        from mrl.rollout.cpu import sdpa_attention, torch_ops

        assert sdpa_attention.BatchedSdpaBackend, "the import has registered the attention backend"
        torch_ops.register(self.get_dispatch_key_name())
        ALLOC_MEMORY_FUNCS[self.device_type] = allocate
        # Latent attention (MLA) is always computed on the compressed KV cache, because the other methods need their own kernels.
        AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda attention, batch: AttnForwardMethod.MLA)


def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: object) -> torch.Tensor:
    """Allocate host memory that is not pinned, for example for the buffer in which SGLang keeps the routed experts of each token.

    SGLang's own allocator pins the memory through the CUDA runtime, even on a machine without a GPU.
    """
    return torch.empty(dims, dtype=dtype, device=device)


_LOW_32_BITS = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Return the 32-bit MurmurHash3 of the 16 bytes (seed, position, column index), as SGLang's GPU kernel computes it.

    SGLang derives the random number of each token from this hash. On a CPU, SGLang would call the hash function of the
    package sgl_kernel, which mrl's environment for CPUs does not have. This function replaces the function of sgl_kernel.

    Args:
        seed: [B], 64 bits, the seed of each of the B requests in the engine's batch.
        positions: [B], 32 bits, the position of the token that each request samples.
        col_indices: [V], 32 bits, the indices of the V tokens of the vocabulary.

    Returns:
        [B, V], int64, values from 0 to 2**32 - 1.
    """
    seed_B, positions_B = seed.view(torch.int64), positions.to(torch.int64) & _LOW_32_BITS
    hash_B = torch.zeros_like(positions_B)
    for block_B in (seed_B & _LOW_32_BITS, (seed_B >> 32) & _LOW_32_BITS, positions_B):
        hash_B = _mix(hash_B, block_B)
    return _finish(_mix(hash_B[:, None], col_indices.to(torch.int64)[None, :]))


def _mix(state: Tensor, block: Tensor) -> Tensor:
    """Return the hash state after 4 more bytes, `block`. Products overflow int64, but their low 32 bits are correct."""
    block = _rotate((block * 0xCC9E2D51) & _LOW_32_BITS, 15)
    return (_rotate(state ^ ((block * 0x1B873593) & _LOW_32_BITS), 13) * 5 + 0xE6546B64) & _LOW_32_BITS


def _rotate(x: Tensor, bits: int) -> Tensor:
    """Rotate 32-bit numbers to the left."""
    return ((x << bits) | (x >> (32 - bits))) & _LOW_32_BITS


def _finish(state: Tensor) -> Tensor:
    """Return the hash from the state after the last bytes."""
    state = state ^ 16  # number of bytes that were hashed
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _LOW_32_BITS
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _LOW_32_BITS
    return state ^ (state >> 16)
