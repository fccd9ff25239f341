"""torch.distributed helpers: rendezvous, a group for objects, a differentiable all-reduce, errors that all ranks raise."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, TCPStore

from parallel.device import backend
from parallel.spans import span

_object_group: ProcessGroup | None = None  # set by init_process_group
_gloo_devices: dict[int, Any] = {}  # process id -> devices of all its gloo groups; a forked process needs new ones


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on `address` only. If `port` is 0, it has a free port.

    Raises OSError if this machine does not have the address, or if the port is in use.
    """
    ((family, *_), *_) = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    return socket.create_server((address, port), family=family, backlog=2048)


def open_tcp_store(listener: socket.socket, timeout: timedelta, world_size: int | None = None) -> TCPStore:
    """Serve a key-value store from this process, on the address of `listener` only. (torch's constructor would listen on all.)

    `listener`: result of `listen`; the store closes it. If `world_size` is given, the call waits until `world_size` processes
    have joined, including this one.
    """
    with listener:
        address, port, *_ = listener.getsockname()
        return TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=world_size is not None,
            master_listen_fd=listener.detach(),  # the store closes the socket
        )


def init_process_group(
    rank: int, world_size: int, address: str, port: int, timeout_s: float, listener: socket.socket | None = None
) -> None:
    """Join the trainer's default process group and its object group. Rank 0 serves the rendezvous store, on `address` only.

    `listener`: on rank 0, a result of `listen` for this address and port; None: rank 0 listens now. Raises an error of
    torch.distributed if a rank does not join within `timeout_s` seconds.
    """
    global _object_group
    share_gloo_devices()
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store = open_tcp_store(listener or listen(address, port), timeout, world_size)
    else:
        store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    dist.init_process_group(backend(), store=store, rank=rank, world_size=world_size, timeout=timeout)
    group = dist.new_group(backend="gloo", timeout=timeout, group_desc="OBJECT_GROUP")
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    _object_group = group


def share_gloo_devices() -> None:
    """From now on, create the gloo groups of this process on the devices of its first gloo group. Idempotent.

    torch gives each group a device of its own (gloo's object for a network interface). Each device has a thread that wakes up 100
    times a second, and Megatron creates tens of groups, so the threads of idle groups would take several percent of a core in
    each rank.
    """
    dist.Backend.register_backend(
        dist.Backend.GLOO,
        _create_gloo_group,
        extended_api=True,
        devices=dist.Backend.backend_capability[dist.Backend.GLOO],
        _backend_type=ProcessGroup.BackendType.GLOO,
    )


def _create_gloo_group(settings: Any, _: object) -> ProcessGroupGloo:
    """Create a gloo group as torch does, on the devices of the first group. `settings`: torch's _DistributedBackendOptions."""
    arguments = settings.store, settings.group_rank, settings.group_size
    if devices := _gloo_devices.get(os.getpid()):
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = devices, 2 * len(devices), settings.timeout
        options.enable_reconfigure = settings.enable_reconfigure
        group = ProcessGroupGloo(*arguments, options)
    else:  # torch reads GLOO_SOCKET_IFNAME and creates the devices
        group = ProcessGroupGloo(*arguments, settings.timeout, settings.enable_reconfigure)
        _gloo_devices[os.getpid()] = group.options._devices
    group.options.global_ranks_in_group = settings.global_ranks_in_group
    group.options.group_name = settings.group_id
    return group


def object_group() -> ProcessGroup | None:
    """Return the gloo group of all ranks, for Python objects. Suspending the groups of `parallel.groups` does not affect it.

    Returns None if this process did not call `init_process_group`. torch takes None as the default group.
    """
    return _object_group


def all_reduce_sum(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the differentiable sum of `values` over the ranks of `group`.

    Every rank of the group must run the forward and the backward pass. The loss of each rank may depend on the sum, and the
    total loss is the sum of the losses of all ranks. Therefore the backward pass also sums the gradients over the group.
    """
    return _AllReduceSum.apply(values, group) if group.size() > 1 else values


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_reduced(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[bad-override]
        return _all_reduced(gradient, ctx.group), None


def _all_reduced(values: Tensor, group: ProcessGroup) -> Tensor:
    total = values.contiguous().clone()
    with span("all-reduce of a sum", "collective", bytes=total.nbytes, ranks=group.size()):
        dist.all_reduce(total, group=group)
    return total


@contextmanager
def raise_on_all_ranks(make_error: Callable[[str], Exception]) -> Iterator[None]:
    """If the block raises on any rank, every rank raises the error of the lowest failed rank at the end of the block.

    Without this context manager, the other ranks would wait for the failed rank in their next collective. Every rank must
    run the block. An all-gather in `object_group()` gives every rank the errors of all ranks. A ValueError reports a mistake of
    the user and stays a ValueError. Any other error becomes `make_error(message)`.
    """
    own_error: Exception | None = None
    try:
        yield
    except Exception as error:  # raised again below, on all ranks
        own_error = error
    errors: list = [None] * dist.get_world_size()
    own_report = None if own_error is None else (isinstance(own_error, ValueError), _message(own_error))
    with span("agreement of all ranks", "collective"):
        dist.all_gather_object(errors, own_report, group=object_group())
    failed = [rank for rank, error in enumerate(errors) if error]
    if not failed:
        return
    is_value_error, message = errors[failed[0]]
    same_everywhere = errors.count(errors[failed[0]]) == len(errors)
    error_type = ValueError if is_value_error else make_error
    raise error_type(message if same_everywhere else f"rank {failed[0]}: {message}") from own_error


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
