"""Starts a process in which Megatron uses the Python code of Transformer Engine, with te_extension.py as compiled extension.

Megatron decides at its import whether it uses Transformer Engine. So tests with Transformer Engine need a process of their own.
"""

import contextlib
import importlib.machinery
import multiprocessing
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from rank_processes import run_in_processes

ROOT = Path(__file__).parents[1]
TE_PYTHON = ROOT / "build/te_python"
HOPPER = dict(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="stand-in of an H100")


def missing_python() -> str:
    """Return what is missing for these tests, and how to get it; an empty string if nothing is missing."""
    (version,) = re.findall(r"^transformer-engine==([\w.]+)", (ROOT / "requirements-gpu.txt").read_text(), re.MULTILINE)
    if (TE_PYTHON / f"transformer_engine-{version}.dist-info").is_dir():
        return ""
    return f"no Python of Transformer Engine {version} in {TE_PYTHON}; scripts/fetch_te_python.sh downloads it"


@contextlib.contextmanager
def te_process() -> Iterator[ProcessPoolExecutor]:
    """Context with a pool that has one new process. `install` has run in this process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=install) as pool:
        yield pool


def run_forked(dims, fn: Callable, *args: Any) -> list[Any]:
    """Return [fn(rank, *args) of each rank]. Each rank is a fork of this process."""
    return run_in_processes(multiprocessing.get_context("fork"), dims, fn, args, timeout_s=120)


def install() -> None:
    """Make Megatron and mrl use the same classes in this process as on a GPU with Transformer Engine. Tensors stay on the CPU."""
    _import_transformer_engine()
    from parallel import device

    device.patch_megatron_for_cpu()
    _simulate_gpu()
    _use_fused_adam()
    _detect_capabilities()
    # Every rank needs these modules when it builds a model. A fork gets them from this process, so no rank imports them itself.
    for name in ("core.extensions.transformer_engine_spec_provider", "core.models.mimo.optimizer"):
        import_module(f"megatron.{name}")
    import_module("mrl.workers.parity_trace")


def _import_transformer_engine() -> None:
    """Import the Python code of Transformer Engine. Replaces only the functions that load shared libraries."""
    import torch  # noqa: F401
    from te_extension import NAME, Extension

    sys.path.insert(0, str(TE_PYTHON))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # then transformer_engine.common loads no CUDA libraries
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.modules[NAME] = Extension()
    for name in ("onnx", "onnxscript"):  # only for exports to ONNX
        sys.modules[name] = MagicMock(name=name, __spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "could not find the shared object file"
        common = import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    import_module("transformer_engine.pytorch")


def _simulate_gpu() -> None:
    """Change torch so that Transformer Engine finds one Hopper GPU, and takes every tensor for a tensor on this GPU."""
    import torch

    gemm, cuda = import_module("transformer_engine.pytorch.cpp_extensions.gemm"), torch.cuda
    cuda.get_device_capability = lambda *a: (HOPPER["major"], HOPPER["minor"])
    cuda.get_device_properties = lambda *a: types.SimpleNamespace(**HOPPER)
    cuda.is_available = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.device = lambda *a: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *a: None
    torch.Tensor.is_cuda = property(lambda tensor: True)
    torch.Tensor.to = _without_cuda(torch.Tensor.to)
    workspace = torch.empty(1, dtype=torch.uint8)
    gemm.get_cublas_workspace = lambda device, ub, grouped_gemm: [workspace] if grouped_gemm else workspace


def _without_cuda(to: Callable) -> Callable:
    """Wrap Tensor.to so that the device "cuda" means the CPU."""

    def on_cpu(argument: Any) -> Any:
        return "cpu" if isinstance(argument, str) and argument.startswith("cuda") else argument

    def wrapped(tensor, *args: Any, **kwargs: Any):
        return to(tensor, *map(on_cpu, args), **{name: on_cpu(argument) for name, argument in kwargs.items()})

    return wrapped


def _use_fused_adam() -> None:
    """Make Megatron use Transformer Engine's FusedAdam again. The CPU patches have replaced it with torch's Adam."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed_optimizer

    fused_adam = import_module("transformer_engine.pytorch.optimizers").FusedAdam
    optimizer.Adam = distributed_optimizer.Adam = fused_adam
    distributed_optimizer.USING_APEX_OPTIMIZER = False
    assert distributed_optimizer.USING_TE_OPTIMIZER, "Megatron has not found Transformer Engine"


def _detect_capabilities() -> None:
    """Make mrl detect the libraries of a machine with a GPU. Afterwards, `has_cuda` is False, so mrl uses the CPU and gloo."""
    from parallel import device

    found = device.capabilities()
    assert found.cuda and found.transformer_engine, f"expected CUDA and Transformer Engine, found: {found}"
    device.has_cuda = lambda: False  # the result of capabilities() is cached
