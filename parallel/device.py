"""The device layer: this process's device and backend, and a stand-in that lets stock Megatron-Core run on a CPU.

`install()` must run before anything from Megatron is imported. It does nothing where CUDA is present.
Megatron-Core 0.19 calls `torch.cuda` directly in places that its own process-group arguments do not reach (streams, RNG
state, `device="cuda"` in factory calls); on a CPU those calls are answered by their `torch.cpu` counterparts.
"""

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like")


def has_cuda() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this process: its current GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else CPU


def backend() -> str:
    """torch.distributed backend that fits `device()`."""
    return "nccl" if has_cuda() else "gloo"


def host_memory(nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 on the host, pinned where there is a GPU to copy to and from."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=has_cuda())


def synchronize() -> None:
    """Wait until the device has done all that it was asked."""
    if has_cuda():
        torch.cuda.synchronize()


def reserved_bytes() -> int | None:
    """Device memory that torch holds for this process once what it only caches is given back; None on a CPU: not counted."""
    if not has_cuda():
        return None
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


class _Stream(torch.cpu.Stream):
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        super().__init__()

    def record_event(self, event: Any = None) -> torch.cpu.Event:
        return torch.cpu.Event()


class _FusedAdam(torch.optim.Optimizer):
    """AdamW with Apex's contract: the step count lives in the param group, where Megatron's checkpoints look for it."""

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
    """`factory` with `device="cuda"` and `pin_memory` answered by plain CPU memory."""

    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        where = kwargs.get("device")
        if where is not None and not isinstance(where, int) and torch.device(where).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _stand_in_for_cuda() -> None:
    cuda, main = torch.cuda, _Stream()
    cuda.current_device = lambda: CPU
    cuda.set_device = lambda *a: None
    cuda.synchronize = lambda *a: None  # not the same object: torch keeps a table of functions by identity
    cuda.Stream, cuda.Event, cuda.stream = _Stream, torch.cpu.Event, torch.cpu.stream
    cuda.current_stream = cuda.default_stream = lambda *a: main
    cuda.get_rng_state = lambda *a: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *a: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)


def _stand_in_for_tensors() -> None:
    tensor_type = torch.Tensor.type

    def type_(self, dtype=None, **kwargs):  # Megatron compares `p.type()` with "torch.cuda.FloatTensor"
        if dtype is not None:
            return tensor_type(self, dtype, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.", 1)

    torch.utils._device._device_constructors()  # cached: `with torch.device(...)` must know the originals, not ours
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *a, **k: self
    torch.Tensor.type = type_


def _stand_in_for_megatron() -> None:
    import megatron.core.optimizer as optimizer  # after the stand-ins above: Megatron reads torch.cuda on import
    import megatron.core.optimizer.distrib_optimizer as distributed_optimizer
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = _FusedAdam, False
    distributed_optimizer.Adam = _FusedAdam
    distributed_optimizer.HAVE_APEX_OR_TE = distributed_optimizer.USING_APEX_OPTIMIZER = True


def _stand_in_for_experts() -> None:
    """What Megatron's token exchange assumes of CUDA and NCCL."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def to_cpu(tensor, as_numpy=False, record_stream=False):  # split sizes become numpy only when they left a GPU
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_cpu
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)


def _uneven_all_gather(even):
    """gloo wants equal shapes; unequal ones are broadcast rank by rank."""

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
    """gloo wants equal shapes; unequal ones are summed everywhere, and each rank keeps its own."""

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


def install() -> None:
    """Make Megatron-Core importable and runnable on this machine; idempotent, a no-op where CUDA is present."""
    if has_cuda() or torch.cuda.Stream is _Stream:
        return
    # Megatron's jit_fuser is torch.compile: minutes of C++ builds on a CPU, and seconds to import what would make them.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _stand_in_for_cuda()
    _stand_in_for_tensors()
    _stand_in_for_megatron()
    _stand_in_for_experts()


def init_process_group(rank: int, world_size: int, address: str, port: int, timeout_s: float) -> None:
    """Join the trainer's process group, which meets at rank 0's `address`; nothing listens on another one.

    Raises torch's error after `timeout_s` when a peer does not come.
    """
    from datetime import timedelta  # only needed here

    from parallel.store import host_store

    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store = host_store(address, port, timeout, world_size)
    else:
        store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    dist.init_process_group(backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)


def set_threads() -> None:
    """One thread for torch's CPU kernels per rank, unless OMP_NUM_THREADS says otherwise: ranks share the cores."""
    import os  # only needed here

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
