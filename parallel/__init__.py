"""Megatron-Core's parallelism behind a device-neutral interface. Imports neither models nor mrl."""

import sys
from pathlib import Path

if not Path("/proc/driver/nvidia/version").exists():
    # Without an NVIDIA driver, importing flash_mla (one of SGLang's CUDA kernels) makes `import megatron` fail. Megatron works
    # if the package seems not to be installed.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
