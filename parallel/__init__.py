"""Parallel training with Megatron-Core, on GPUs and on CPUs. This package imports neither `models` nor `mrl`."""

import sys
from pathlib import Path

if not Path("/proc/driver/nvidia/version").exists():
    # Without an NVIDIA driver, `import megatron` fails, because Megatron imports flash_mla, one of SGLang's CUDA kernels.
    # With the entry None, flash_mla looks as if it were not installed, and Megatron works without it.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
