"""Megatron-Core's parallelism, on GPUs and CPUs. Imports neither models nor mrl."""

import sys
from pathlib import Path

if not Path("/proc/driver/nvidia/version").exists():
    # Without an NVIDIA driver, `import megatron` fails because it imports flash_mla (one of SGLang's CUDA kernels). This entry
    # makes flash_mla look as if it were not installed, and then Megatron works.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
