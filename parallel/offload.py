"""A Megatron model's memory, off its device and back bit by bit, so that processes that share a GPU can use it by turns.

Storages are emptied in place: every tensor over them stays the tensor it is, and views stay views (parameters of Megatron's
flat buffers, the optimizer's shards of those). Parameters, buffers and optimizer state are copied to the host; gradients are
dropped, because each step accumulates from zero. On a CPU the same is done with plain memory.

What a process has beside its model stays: CUDA's context, tables that layers compute once (rotary angles) and, before
NCCL 2.29.7, the communicators' buffers; from there on they are given back too (see `parallel.groups.suspend`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage

from parallel import groups
from parallel.device import device, host_memory, reserved_bytes, synchronize
from parallel.optimizer_state import tensors_of
from parallel.residence import Residence

BLOCK_BYTES = 1 << 26  # of pinned memory, which is taken in powers of two


class Offload:
    """Moves one rank's part of a model. Every rank of the layout calls `move`, between calls that compute."""

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], optimizer: Callable[[], MegatronOptimizer | None]
    ) -> None:
        """`chunks`: the rank's virtual stages; `optimizer`: the one that they have now, None where none trains them."""
        self._chunks, self._optimizer = chunks, optimizer
        self._weights, self._state = _Away(), _Away()
        self._gradients: list[tuple[UntypedStorage, int]] = []  # dropped, and their bytes
        self._suspended = False

    @property
    def residence(self) -> Residence:
        """What is whole on the device; of a move that failed, what is left of it."""
        if self._weights.storages:
            return Residence.NOTHING
        return Residence.WEIGHTS if self._state.storages or self._gradients else Residence.EVERYTHING

    def move(self, wanted: Residence) -> int:
        """Bring to the device what belongs there and take away the rest; may be repeated, also after it failed.

        Returns the bytes of device memory that torch keeps for this process (on a CPU: the bytes of the model's storages).
        """
        if wanted is Residence.NOTHING:
            self._drop_gradients()
            self._state.take(self._storages_of_state())
            self._weights.take(_storages(_weights(self._chunks)))
            self._suspend()
        else:
            self._resume()
            self._weights.give_back()
            if wanted is Residence.EVERYTHING:
                self._state.give_back()
                self._restore_gradients()
            else:
                self._drop_gradients()
                self._state.take(self._storages_of_state())
        return self._bytes_left()

    def _storages_of_state(self) -> list[UntypedStorage]:
        """Of main parameters and moments; those of fp32 weights are the weights themselves."""
        optimizer = self._optimizer()
        weights = _storages(_weights(self._chunks))
        found = _storages(tensors_of(optimizer)) if optimizer else []
        return _without(found, weights)

    def _storages_of_gradients(self) -> list[UntypedStorage]:
        return _without(_storages(_gradients(self._chunks)), _storages(_weights(self._chunks)))

    def _drop_gradients(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.zero_grad()  # the main parameters' gradients
        for storage in self._storages_of_gradients():
            if _movable(storage):
                self._gradients.append((storage, storage.nbytes()))
                storage.resize_(0)

    def _restore_gradients(self) -> None:
        while self._gradients:
            storage, nbytes = self._gradients[-1]
            storage.resize_(nbytes)
            _bytes_of(storage).zero_()
            self._gradients.pop()

    def _suspend(self) -> None:
        if not self._suspended:
            groups.drop_scratch()
            groups.suspend()
            self._suspended = True

    def _resume(self) -> None:
        if self._suspended:
            groups.resume()
            self._suspended = False

    def _bytes_left(self) -> int:
        reserved = reserved_bytes()
        if reserved is not None:
            return reserved
        ours = [*_storages(_weights(self._chunks)), *self._storages_of_state(), *self._storages_of_gradients()]
        return sum(storage.nbytes() for storage in ours)


class _Away:
    """Storages whose bytes are on the host. The host's memory is kept for the next time."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._used = 0  # bytes of the blocks
        self._held: list[tuple[UntypedStorage, int, list[Tensor]]] = []  # with their bytes, and where these are now

    @property
    def storages(self) -> list[UntypedStorage]:
        return [storage for storage, _, _ in self._held]

    def take(self, storages: Iterable[UntypedStorage]) -> None:
        """Copy the bytes of these to the host and empty them; those that are empty, or cannot be emptied, stay as they are."""
        used, taken = self._used, []
        try:
            for storage in filter(_movable, storages):
                spans = list(self._spans(storage.nbytes()))
                for span, piece in zip(spans, _pieces(storage, spans), strict=True):
                    span.copy_(piece, non_blocking=True)
                taken.append((storage, storage.nbytes(), spans))
            synchronize()
        except BaseException:  # no memory on the host: nothing was emptied yet
            self._used = used
            raise
        for storage, _, _ in taken:
            storage.resize_(0)
        self._held += taken

    def give_back(self) -> None:
        """Fill all that were emptied."""
        while self._held:
            storage, nbytes, spans = self._held[-1]
            storage.resize_(nbytes)
            for span, piece in zip(spans, _pieces(storage, spans), strict=True):
                piece.copy_(span, non_blocking=True)
            self._held.pop()
        self._used = 0
        synchronize()  # before the host's memory is written again

    def _spans(self, nbytes: int) -> Iterator[Tensor]:
        """The next `nbytes` of the host's memory, in order."""
        while nbytes:
            number, start = divmod(self._used, BLOCK_BYTES)
            if number == len(self._blocks):
                self._blocks.append(host_memory(BLOCK_BYTES))
            span = self._blocks[number][start : start + nbytes]
            self._used, nbytes = self._used + span.numel(), nbytes - span.numel()
            yield span


def _weights(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    """Parameters, the flat buffers that they are views of, and what modules keep besides."""
    for chunk in chunks:
        yield from (tensor.data for tensor in (*chunk.module.parameters(), *chunk.module.buffers()))
        yield from (b.param_data for b in _flat_buffers(chunk) if b.param_data is not None)


def _gradients(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in _flat_buffers(chunk):
            yield from (buffer.grad_data, *buffer.extra_main_grads)


def _flat_buffers(chunk: DistributedDataParallel) -> list:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each storage on this process's device once."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device().type)
    return list({_key(storage): storage for storage in found}.values())


def _without(storages: Iterable[UntypedStorage], others: Iterable[UntypedStorage]) -> list[UntypedStorage]:
    known = {_key(other) for other in others}
    return [storage for storage in storages if _key(storage) not in known]


def _key(storage: UntypedStorage) -> int:
    """The same for all tensors over one storage, also while it is empty."""
    return storage._cdata


def _movable(storage: UntypedStorage) -> bool:
    """Not empty, and no memory of others: what NumPy has seen cannot be emptied."""
    return storage.nbytes() > 0 and storage.resizable()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _pieces(storage: UntypedStorage, spans: Sequence[Tensor]) -> Sequence[Tensor]:
    """A storage's bytes cut as these spans are."""
    return _bytes_of(storage).split([span.numel() for span in spans])
