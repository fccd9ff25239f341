"""Finds the operations on which the host would wait for a GPU. The checked code runs on a CPU.

A GPU works through a queue of kernels while the host adds further kernels. The host must wait until the queue is empty if it
needs a value or the number of elements of a result, or if it copies between host and device without pinned memory. Afterwards,
the GPU is idle until the host has added new kernels.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# Kernels whose result is a Python value, or a tensor whose number of elements depends on the values of the arguments.
WAITING_KERNELS = {
    aten._local_scalar_dense,  # item(), bool(), int(), float(), and a tensor as an index, a size or a condition
    aten.nonzero,
    aten.masked_select,
    aten._unique,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.equal,
    aten.allclose,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# Functions that copy a tensor from a GPU to the host. If the tensor is on the CPU, they call no kernel that could be recorded.
COPIES_TO_HOST = {"tolist", "numpy", "cpu", "__array__"}
# Functions that make a tensor from Python numbers. On a GPU, the host waits for the copy, because it is from pageable memory.
COPIES_FROM_HOST = {"tensor", "as_tensor", "new_tensor"}
# The function whose copies do not wait on a GPU, because it uses pinned memory: (end of the file's path, function).
PINNED_COPY = ("parallel/device.py", "tensor_to_device")


class HostWaits(AbstractContextManager):
    """Context that records in `found` every operation on which the host would wait, with the lines of code that call it.

    Every tensor counts as a tensor on the GPU, except those that the code makes with `device="cpu"`. `recording` switches the
    recording on and off. `allowed` lists the functions that may wait, each as (end of the file's path, function name), where ""
    means all functions of the file. An operation counts as allowed only if an allowed function calls it directly. `num_allowed`
    counts the allowed operations by (operation, function).
    """

    def __init__(self, *allowed: tuple[str, str], recording: bool = True) -> None:
        self.found: list[str] = []
        self.num_allowed: Counter[tuple[str, str]] = Counter()
        self.recording = recording
        self._allowed = (PINNED_COPY, *allowed)
        self._stack = ExitStack()

    def __enter__(self) -> "HostWaits":
        for context in (_Functions(self), _Kernels(self), *self._synchronizations()):
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is recorded."""
        recording, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = recording

    def record(self, operation: str) -> None:
        """Add an operation, unless its caller may wait."""
        if not self.recording:
            return
        stack = traceback.extract_stack()
        callers = [frame for frame in stack if frame.filename != __file__ and "/torch/" not in frame.filename]
        caller = callers[-1]
        if any(caller.filename.endswith(end) and name in ("", caller.name) for end, name in self._allowed):
            self.num_allowed[operation, caller.name] += 1
        else:
            places = [f"{frame.filename}:{frame.lineno}" for frame in callers[-3:]]
            self.found.append(f"{operation} called by {', '.join(places)}")

    def _synchronizations(self) -> Iterator[AbstractContextManager]:
        """Replace the functions that wait for the whole device, a stream or an event."""
        places = [(torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize")]
        for owner, name in places:
            yield mock.patch.object(owner, name, lambda *args: self.record("synchronize"), create=True)

        def cuda(tensor: torch.Tensor, *args, non_blocking: bool = False, **kwargs) -> torch.Tensor:
            if not non_blocking:
                self.record("cuda")
            return tensor

        yield mock.patch.object(torch.Tensor, "cuda", cuda)


class _Functions(TorchFunctionMode):
    """Records the calls of torch's Python functions on which the host would wait."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        reads_device = name in COPIES_TO_HOST and not any(hasattr(value, "of_the_host") for value in args[:1])
        if reads_device or (name in COPIES_FROM_HOST and _makes_tensor_on_device(name, args, kwargs)):
            self._waits.record(name)
        elif name == "to" and _names_device(args[1:], kwargs) and not kwargs.get("non_blocking"):
            self._waits.record("to(device)")
        result = func(*args, **kwargs)
        if name in COPIES_FROM_HOST and kwargs.get("device") == "cpu":
            result.of_the_host = True
        return result


def _makes_tensor_on_device(name: str, args: tuple, kwargs: dict) -> bool:
    values = args[1] if name == "new_tensor" else args[0] if args else kwargs.get("data")
    on_device = name == "new_tensor" or kwargs.get("device") not in (None, "cpu")
    return on_device and not isinstance(values, torch.Tensor)


def _names_device(args: tuple, kwargs: dict) -> bool:
    return any(isinstance(value, torch.device | str) for value in (*args, kwargs.get("device")))


class _Kernels(TorchDispatchMode):
    """Records the calls of kernels on which the host would wait, also those from C++ code and from the backward pass."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func.overloadpacket
        needs_size = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in WAITING_KERNELS or needs_size or (packet in INDEXING and _counts_true_elements(packet, args)):
            self._waits.record(packet.__name__)
        return func(*args, **kwargs)


def _counts_true_elements(packet, args: tuple) -> bool:
    """Return whether indexing needs the number of a mask's true elements. torch assigns a single number by `masked_fill`."""
    has_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    assigns_number = "put" in packet.__name__ and args[2].numel() == 1
    return has_mask and not assigns_number
