"""The tested matrix: the versions that the locks of this checkout name."""

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CPU_LOCK, GPU_LOCK = "requirements.txt", "requirements-gpu.txt"
TESTED = ("torch", "ray", "sglang", "megatron-core", "transformers", "numpy")
TESTED_GPU = (*TESTED, "transformer-engine", "nvidia-nccl-cu13")
CUDA_RUNTIME = "nvidia-cuda-runtime"

_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s\\;]+)", re.MULTILINE)


def pins(lock: str, checkout: Path = CHECKOUT) -> dict[str, str]:
    """Distribution -> version of a lock file; empty where there is none, as in an installed wheel."""
    path = checkout / lock
    return {name.lower(): version for name, version in _PIN.findall(path.read_text())} if path.is_file() else {}


def tested(gpu: bool, checkout: Path = CHECKOUT) -> dict[str, str]:
    """Distribution -> the version tested together with the others."""
    found = pins(GPU_LOCK if gpu else CPU_LOCK, checkout)
    return {name: found[name] for name in (TESTED_GPU if gpu else TESTED) if name in found}


def cuda(checkout: Path = CHECKOUT) -> tuple[int, int]:
    """(major, minor) of the CUDA that torch brings along; (0, 0) where there is no lock."""
    major, minor, *_ = pins(GPU_LOCK, checkout).get(CUDA_RUNTIME, "0.0").split(".")
    return int(major), int(minor)
