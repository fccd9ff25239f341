"""Simulated GPUs for whole runs: the processes take the branches for a machine with GPUs, but compute on the CPU.

tests/simulated_gpus/sitecustomize.py calls `install` in every process whose environment contains the variable HOST. A test sets
this variable for a Ray node. `install` arranges that the modules in STAND_INS are changed when the process imports them. Trainer
ranks use the unmodified Python code of Transformer Engine (tests/te_process.py). The transport `cuda_ipc` has its transfer
buffers in shared memory. Their handle has the form of torch's CUDA IPC handle, and only a process that sees the GPU in the
handle can open them. All other code is that of a real run.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

HOST = "MRL_TEST_HOST"  # environment variable with the name of the simulated host, which is one node of the Ray cluster
SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "simulated_gpus")
DEVICE_ARGUMENT = 6  # position of the device index among the arguments of torch's rebuild_cuda_tensor


def install() -> None:
    """Arrange that each module in STAND_INS is changed when this process imports it."""
    sys.meta_path.insert(0, _Finder())


def visible_gpus() -> list[str]:
    """Return the identifiers of the GPUs that CUDA_VISIBLE_DEVICES shows to this process."""
    return [f"GPU {number} of {os.environ[HOST]}" for number in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]


def python_path(*folders: str) -> str:
    """Return a PYTHONPATH with which the driver and all processes of its run use simulated GPUs."""
    return os.pathsep.join([SITE, os.path.dirname(SITE), *folders])


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name not in STAND_INS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None, f"{name} is not installed"
        execute = spec.loader.exec_module

        def execute_and_change(module: types.ModuleType) -> None:
            execute(module)
            STAND_INS[name](module)

        spec.loader.exec_module = execute_and_change
        return spec


def _use_transformer_engine(device: Any) -> None:
    """Make trainer ranks prepare Megatron for a GPU with Transformer Engine instead of for a CPU."""
    patch = device.patch_megatron_for_cpu

    def install_transformer_engine() -> None:
        from te_process import install

        device.patch_megatron_for_cpu = patch  # `install` calls the original function
        install()

    device.patch_megatron_for_cpu = install_transformer_engine


class _Cuda:
    """The part of torch.cuda that the transports use."""

    @staticmethod
    def device_count() -> int:
        return len(visible_gpus())

    @staticmethod
    def get_device_properties(device: Any) -> Any:
        return types.SimpleNamespace(uuid=visible_gpus()[device if isinstance(device, int) else device.index])

    @staticmethod
    def current_stream() -> Any:
        return types.SimpleNamespace(synchronize=lambda: None)


class _Torch(types.ModuleType):
    """Torch with simulated GPUs."""

    cuda = _Cuda

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    @staticmethod
    def empty(*shape: int, dtype: Any, device: Any) -> Any:
        import torch

        return torch.empty(*shape, dtype=dtype)


def open_shared_memory(*arguments: Any) -> Any:
    """Stand-in for torch's rebuild_cuda_tensor: return the memory [bytes] of another process."""
    import torch

    device, path, nbytes = arguments[DEVICE_ARGUMENT:]
    assert 0 <= device < len(visible_gpus()), f"device {device} is not one of {visible_gpus()}"
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def _reduce_tensor(tensor: Any) -> tuple[Callable, tuple]:
    """Stand-in for torch's reduce_tensor: move the storage into shared memory, and return how another process opens it."""
    fd, nbytes = tensor.untyped_storage()._share_fd_cpu_()
    return open_shared_memory, (*[None] * DEVICE_ARGUMENT, 0, f"/proc/{os.getpid()}/fd/{fd}", nbytes)


def _simulate_gpu_memory(transports: Any) -> None:
    transports.torch = _Torch("torch")
    transports.socket = types.SimpleNamespace(gethostname=lambda: os.environ[HOST])
    handle = transports.CudaIpcSendEndpoint.handle

    def simulated_handle(self: Any) -> Any:
        from unittest import mock

        with mock.patch("torch.multiprocessing.reductions.reduce_tensor", _reduce_tensor):
            return handle(self)

    transports.CudaIpcSendEndpoint.handle = simulated_handle


def _locate_trainer_rank(session: Any) -> None:
    import torch

    location_of = session.location_of
    session.location_of = lambda device: location_of(torch.device("cuda", 0))
    session._local_address = lambda url: (
        "localhost"
    )  # for several real hosts, this would be an address that other hosts can reach; simulated hosts are one machine


def _locate_engine_rank(receiver: Any) -> None:
    """Locate the weights of an engine rank on the GPU that has the rank's index on its node, and hash them as on a GPU."""
    import torch

    from mrl.weight_sync.sender import weighted_sums

    location_of = receiver.location_of

    def location_of_rank(device: Any) -> Any:
        from sglang.srt.runtime_context import get_parallel

        return location_of(torch.device("cuda", get_parallel().tp_rank % len(visible_gpus())))

    receiver.location_of = location_of_rank
    receiver.checksums = weighted_sums


STAND_INS: dict[str, Callable[[Any], None]] = {
    "parallel.device": _use_transformer_engine,
    "mrl.weight_sync.transports": _simulate_gpu_memory,
    "mrl.weight_sync.session": _locate_trainer_rank,
    "mrl.weight_sync.receiver": _locate_engine_rank,
}
"""Name of a module -> function that changes the imported module."""
