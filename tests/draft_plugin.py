"""A plug-in of SGLang with which a server on a CPU starts with a draft model. Such a server takes weights, but cannot sample.

Speculative decoding needs kernels in Triton, so mrl refuses it on a CPU. The plug-in only skips the parts of SGLang's start that
need a GPU. SGLang builds and loads the model and the draft model itself, and passes messages to them.
"""

from pathlib import Path
from typing import Any

_SKIPPED = (
    "torch.cuda.synchronize",
    "torch.cuda.empty_cache",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
    "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend",
    "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend",
)
_ALLOWED = (
    "mrl.rollout.cpu.sglang_platform.CpuPlatform.supports_speculative_algorithm",
    "mrl.rollout.cpu.sglang_platform.CpuPlatform.supports_speculative_draft_attention_backend",
)


def register() -> None:
    """Replace functions of SGLang. SGLang calls this function when it loads its plug-ins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in _SKIPPED:
        HookRegistry.register(name, _skip, HookType.REPLACE)
    for name in _ALLOWED:
        HookRegistry.register(name, _allow, HookType.REPLACE)


def _skip(*_: Any, **__: Any) -> None: ...


def _allow(*_: Any, **__: Any) -> bool:
    return True


def install(folder: Path) -> str:
    """Write the metadata of an installed package with this plug-in to `folder`. Returns the PYTHONPATH of the server."""
    metadata = folder / "draft_plugin-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: draft-plugin\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[sglang.srt.plugins]\ndrafts = draft_plugin:register\n")
    return f"{folder}:{Path(__file__).parent}"
