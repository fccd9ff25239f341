"""This process's device, communication backend and NVIDIA libraries, and patches that let Megatron-Core run on a CPU.

`patch_megatron_for_cpu()` must run before the first import from Megatron. If CUDA is available, that function patches nothing,
but hides libraries that cannot be imported. Megatron-Core 0.19 always uses `torch.cuda` for streams, RNG state and new tensors
(`device="cuda"`). On a CPU, the patches redirect these calls to their `torch.cpu` counterparts.
"""

import functools
import logging
import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils._device

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
_TENSOR_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like")


def has_cuda() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Return the device of this process: its current GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else CPU


def backend() -> str:
    """Return the torch.distributed backend for `device()`: nccl or gloo."""
    return "nccl" if has_cuda() else "gloo"


def host_memory(nbytes: int) -> torch.Tensor:
    """Allocate a uint8 tensor [nbytes] in host memory. The memory is pinned if this process computes on a GPU."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=has_cuda())


def copy_to_device(values: np.ndarray, target: torch.device) -> torch.Tensor:
    """Copy an array to `target`. For a GPU, the array passes through pinned memory, so the host does not wait for the copy.

    On a CPU, the tensor shares its memory with the array.
    """
    return tensor_to_device(torch.from_numpy(values), target)


def tensor_to_device(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Copy a tensor on the host to `target`, see `copy_to_device`."""
    return tensor.pin_memory().to(target, non_blocking=True) if target.type == "cuda" else tensor.to(target)


def synchronize() -> None:
    """Wait until the device has finished all queued work."""
    if has_cuda():
        torch.cuda.synchronize()


def release_cached_memory() -> int | None:
    """Empty torch's memory cache; return the bytes of GPU memory that torch still reserves, or None on a CPU."""
    if not has_cuda():
        return None
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def set_threads() -> None:
    """Set the number of threads of torch's CPU kernels to OMP_NUM_THREADS. The default is 1, because ranks share the cores."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


# Library -> how a user can compile it for the installed torch
HOW_TO_BUILD = {
    "Transformer Engine": "run `make setup LOCK=requirements-gpu.txt`",
    "NVIDIA's Apex": "run the commands of the stage with-apex in the Dockerfile",
}


@dataclass(frozen=True)
class Capabilities:
    """NVIDIA libraries that this process uses. All are optional.

    A library is used if its compiled modules can be imported and a GPU is present. On a CPU, all fields are False.
    """

    cuda: bool
    transformer_engine: bool
    apex: bool  # NVIDIA's Apex, built with its extensions; the package apex on PyPI is other software
    fused_wgrad: bool  # Apex's kernel that adds weight gradients directly to the fp32 gradient buffers

    def __str__(self) -> str:
        kernels = "Transformer Engine" if self.transformer_engine else "torch"
        adam = "Transformer Engine's fused" if self.transformer_engine else "Apex's fused" if self.apex else "torch's"
        return (
            f"{'CUDA' if self.cuda else 'CPU'}: {kernels} layers, {adam} Adam, "
            f"gradient accumulation {'fused' if self.fused_wgrad or self.transformer_engine else 'not fused'}"
        )


@cache
def capabilities() -> Capabilities:
    """Detect the usable NVIDIA libraries once and log them in one line.

    A library that is installed but cannot be imported is logged, too. Megatron then treats it as not installed.

    Transformer Engine would multiply float32 matrices in TF32, whose products have errors of about 1e-3. The environment variable
    NVIDIA_TF32_OVERRIDE=0 prevents this in all NVIDIA libraries; a value that the user has set is kept.
    """
    cuda = has_cuda()
    if cuda:
        os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # before the first call of cuBLAS, which reads the variable
    detected = Capabilities(
        cuda=cuda,
        transformer_engine=cuda and can_use_transformer_engine(),
        apex=cuda and _is_usable("amp_C", "NVIDIA's Apex", "no kernel of Apex"),  # PyPI's package apex has no amp_C
        fused_wgrad=cuda and _is_usable("fused_weight_gradient_mlp_cuda", "NVIDIA's Apex", "no fused weight gradient"),
    )
    logger.info("%s", detected)
    return detected


def can_use_transformer_engine() -> bool:
    """Whether a process in this Python environment can use Transformer Engine on a GPU.

    If this process has a GPU, Transformer Engine is imported, because the import can fail although the package is installed.
    Without a GPU, the import may fail only because NVIDIA's driver is missing, so this function only tests whether the package is
    installed.
    """
    if not has_cuda():
        return find_spec("transformer_engine") is not None
    return _is_usable("transformer_engine.pytorch", "Transformer Engine", "torch's layers")


def _is_usable(module: str, library: str, otherwise: str) -> bool:
    """Whether `module`, which loads the compiled code of a library, can be imported.

    If the library is installed but its import fails, log the reason and hide the library from later imports. If the library were
    not hidden, Megatron would import it again, and the error would end the process.

    `otherwise`: what this process uses without the library.
    """
    package = module.partition(".")[0]
    if find_spec(package) is None:
        return False
    try:
        import_module(module)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        logger.warning(
            "%s is installed, but the import of %s fails (%s); this process uses %s. To build it for the installed torch, %s.",
            library,
            module,
            reason,
            otherwise,
            HOW_TO_BUILD[library],
        )
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            del sys.modules[name]
        sys.modules[package] = None  # type: ignore[assignment]  # a later import raises ImportError
        return False
    return True


class _CPUStream(torch.cpu.Stream):
    """CPU stream with the constructor signature of torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        super().__init__()

    def record_event(self, event: Any = None) -> torch.cpu.Event:
        return torch.cpu.Event()


class _FusedAdam(torch.optim.Optimizer):
    """AdamW with Apex's interface: the step count is in the param group, where Megatron's checkpoint code expects it."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, **unused):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            if params:
                self._update(group, params)

    def _update(self, group, params):
        state = [self.state[p] for p in params]
        torch.optim._functional.adam(
            params,
            [p.grad for p in params],
            [s["exp_avg"] for s in state],
            [s["exp_avg_sq"] for s in state],
            [],
            [torch.tensor(group["step"] - 1.0) for _ in params],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            foreach=True,
            decoupled_weight_decay=self.adam_w_mode,
        )


def _on_cpu(factory):
    """Wrap a tensor factory so that `device="cuda"` and `pin_memory` give plain CPU memory."""

    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        target = kwargs.get("device")
        if target is not None and not isinstance(target, int) and torch.device(target).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _patch_torch_cuda() -> None:
    cuda, main = torch.cuda, _CPUStream()
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda *a: None
    # `synchronize` and `set_device` must be two different functions, because torch keeps a table with functions as keys.
    cuda.synchronize = lambda *a: None
    cuda.Stream, cuda.Event, cuda.stream = _CPUStream, torch.cpu.Event, torch.cpu.stream
    cuda.current_stream = cuda.default_stream = lambda *a: main
    cuda.get_rng_state = lambda *a: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *a: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)


def _patch_tensor_factories() -> None:
    tensor_type = torch.Tensor.type

    def type_(self, dtype=None, **kwargs):  # Megatron compares `p.type()` with "torch.cuda.FloatTensor"
        if dtype is not None:
            return tensor_type(self, dtype, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.", 1)

    torch.utils._device._device_constructors()  # caches the original factories, which `with torch.device(...)` needs
    for name in _TENSOR_FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *a, **k: self
    torch.Tensor.type = type_


def _patch_megatron_optimizer_and_rng() -> None:
    import megatron.core.optimizer as optimizer  # only now, because this import reads torch.cuda, which must be patched before
    import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = _FusedAdam, False
    distributed_optimizer.Adam = _FusedAdam
    distributed_optimizer.HAVE_APEX_OR_TE = distributed_optimizer.USING_APEX_OPTIMIZER = True


def _patch_expert_communication() -> None:
    """Replace a function of Megatron's MoE token dispatcher, and two collectives of torch.distributed, that need CUDA or NCCL."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def to_cpu(tensor, as_numpy=False, record_stream=False):  # Megatron's function converts only GPU tensors to numpy
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_cpu
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)


def _uneven_all_gather(even):
    """Extend gloo's all_gather, which needs equal shapes. Tensors of unequal shapes are broadcast rank by rank."""

    @functools.wraps(even)
    def all_gather(outputs, tensor, group=None, async_op=False):
        if len({out.shape for out in outputs}) == 1:
            return even(outputs, tensor, group=group, async_op=async_op)
        for rank, out in enumerate(outputs):
            piece = (tensor if rank == dist.get_rank(group) else out).contiguous()
            dist.broadcast(piece, group=group, group_src=rank)
            out.copy_(piece)

    return all_gather


def _uneven_reduce_scatter(even):
    """Extend gloo's reduce_scatter, which needs equal shapes. Tensors of unequal shapes are all-reduced one by one."""

    @functools.wraps(even)
    def reduce_scatter(output, inputs, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({piece.shape for piece in inputs}) == 1:
            return even(output, inputs, op=op, group=group, async_op=async_op)
        for rank, piece in enumerate(inputs):
            total = piece.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, op=op, group=group)
            if rank == dist.get_rank(group):
                output.copy_(total)

    return reduce_scatter


def patch_megatron_for_cpu() -> None:
    """Patch torch and Megatron-Core so that they import and run without CUDA. Idempotent.

    If CUDA is available, this function patches nothing, but calls `capabilities`, which hides libraries that cannot be imported.
    """
    if has_cuda():
        capabilities()
        return
    if torch.cuda.Stream is _CPUStream:
        return
    # Megatron's jit_fuser is torch.compile. On a CPU, torch.compile needs seconds for its import and minutes for C++ builds.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _patch_torch_cuda()
    _patch_tensor_factories()
    _patch_megatron_optimizer_and_rng()
    _patch_expert_communication()
