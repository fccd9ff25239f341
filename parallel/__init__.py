"""Megatron-Core's parallel dimensions behind a small, device-neutral surface (knows nothing of models or of mrl)."""

import sys
from pathlib import Path

if not Path("/proc/driver/nvidia/version").exists():
    # Where SGLang's CUDA kernels are installed without a driver, importing this one kills `import megatron`, which does
    # without it where it is absent.
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]
