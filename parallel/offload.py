"""Copies a Megatron model to the host: ModelOffloader offloads the model, and WeightsOnHost keeps a copy of its weights.

With offloading, processes can share a GPU. An offloaded model is loaded back bit-exactly.

Parameters, buffers and optimizer state are copied to the host. Gradients are dropped, because each optimizer step accumulates new
ones from zero. Storages are then resized to zero in place, so all tensors and views over them stay valid. Parameters are views of
Megatron's flat buffers, and the optimizer has views of parts of these buffers. On a CPU, the same code copies from host memory to
host memory.

A process keeps some device memory: CUDA's context, tables that layers compute only once (rotary angles), the workspaces of
cuBLAS in torch and in Transformer Engine, and the tensors without content that Transformer Engine gives to autograd in place of
weight gradients, one for each shape of a weight. If NCCL is older than 2.29.7, the process also keeps the buffers of the
communicators (see `parallel.groups.suspend_communicators`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage

from parallel import groups
from parallel.device import device, host_memory, release_cached_memory, synchronize
from parallel.optimizer import optimizer_tensors
from parallel.trainer_config import OffloadLevel

# size of one block of host memory; a power of two, because torch rounds up allocations of pinned memory to powers of two
BLOCK_BYTES = 1 << 26


class ModelOffloader:
    """Moves one rank's part of a model between device and host.

    Every rank must call `move_to`, and no computation may run during the call.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], get_optimizer: Callable[[], MegatronOptimizer | None]
    ) -> None:
        """`chunks` are this rank's virtual stages. `get_optimizer` returns the optimizer of these stages, or None."""
        self._chunks, self._get_optimizer = chunks, get_optimizer
        self._weights, self._state = _HostCopy(), _HostCopy()  # `_state` is for the optimizer state
        self._dropped_gradients: list[tuple[UntypedStorage, int]] = []  # (storage, its bytes)
        self._suspended = False

    @property
    def level(self) -> OffloadLevel:
        """The highest level whose contents are all on the device. The result is also correct after a failed `move_to`."""
        if self._weights.offloaded_storages:
            return OffloadLevel.FULLY_OFFLOADED
        return (
            OffloadLevel.WEIGHTS_LOADED
            if self._state.offloaded_storages or self._dropped_gradients
            else OffloadLevel.FULLY_LOADED
        )

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the weights and of the optimizer state that are now on the host instead of the device."""
        return self._weights.used + self._state.used

    def move_to(self, level: OffloadLevel) -> int:
        """Load what `level` includes and offload the rest. Idempotent, and can be called again after a failure.

        Returns the bytes of device memory that torch still reserves. On a CPU, returns the bytes of the model's storages.
        """
        if level is OffloadLevel.FULLY_OFFLOADED:
            self._drop_gradients()
            self._state.offload(self._storages_of_state())
            self._weights.offload(_storages(_weight_tensors(self._chunks)))
            self._drop_fp8_weights()
            self._suspend_communicators()
        else:
            self._resume_communicators()
            self._weights.load()
            if level is OffloadLevel.FULLY_LOADED:
                self._state.load()
                self._restore_gradients()
            else:
                self._drop_gradients()
                self._state.offload(self._storages_of_state())
        return self._remaining_bytes()

    def _storages_of_state(self) -> list[UntypedStorage]:
        """Return the storages of the optimizer's moments and master parameters, without the storages of the weights.

        (The master parameters of fp32 weights are views of the weights.)
        """
        optimizer = self._get_optimizer()
        weights = _storages(_weight_tensors(self._chunks))
        state = _storages(optimizer_tensors(optimizer)) if optimizer else []
        return _without(state, weights)

    def _storages_of_gradients(self) -> list[UntypedStorage]:
        return _without(_storages(_gradient_tensors(self._chunks)), _storages(_weight_tensors(self._chunks)))

    def _drop_gradients(self) -> None:
        optimizer = self._get_optimizer()
        if optimizer is not None:
            optimizer.zero_grad()  # frees the gradients of the master parameters
        for storage in self._storages_of_gradients():
            if _can_offload(storage):
                self._dropped_gradients.append((storage, storage.nbytes()))
                storage.resize_(0)

    def _restore_gradients(self) -> None:
        while self._dropped_gradients:
            storage, nbytes = self._dropped_gradients[-1]
            storage.resize_(nbytes)
            _bytes_of(storage).zero_()
            self._dropped_gradients.pop()

    def _drop_fp8_weights(self) -> None:
        """Free the FP8 copies of the weights. Transformer Engine quantizes the weights again in the next forward pass."""
        for chunk in self._chunks:
            for module in chunk.module.modules():
                getattr(module, "_fp8_workspaces", {}).clear()

    def _suspend_communicators(self) -> None:
        if not self._suspended:
            groups.free_scratch_memory()
            groups.suspend_communicators()
            self._suspended = True

    def _resume_communicators(self) -> None:
        if self._suspended:
            groups.resume_communicators()
            self._suspended = False

    def _remaining_bytes(self) -> int:
        reserved = release_cached_memory()
        if reserved is not None:
            return reserved
        ours = [*_storages(_weight_tensors(self._chunks)), *self._storages_of_state(), *self._storages_of_gradients()]
        return sum(storage.nbytes() for storage in ours)


class WeightsOnHost:
    """A copy of a model's trained weights and buffers on the host. `load` restores this copy on the device.

    Frozen weights never change, so they are not copied. In a model with LoRA adapters, only the adapters are copied.

    On a GPU, `save` and `load` queue the copy on the current stream, and the host does not wait for the copy. Only work that is
    queued later on this stream sees the result.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        """`chunks` are this rank's virtual stages."""
        self._chunks, self._memory = chunks, _HostMemory()
        # for each storage of weights, the host memory with the copy of this storage
        self._host_pieces: list[list[Tensor]] = []

    def save(self) -> None:
        """Copy the weights from the device to the host. This reuses the host memory of the previous copy."""
        storages = self._storages()
        if not self._host_pieces:
            self._host_pieces = [list(self._memory.reserve_pieces(storage.nbytes())) for storage in storages]
        for storage, host_pieces in zip(storages, self._host_pieces, strict=True):
            _copy_to_host(storage, host_pieces)

    def load(self) -> None:
        """Overwrite the weights on the device with the last saved copy."""
        for storage, host_pieces in zip(self._storages(), self._host_pieces, strict=True):
            _copy_from_host(storage, host_pieces)

    def _storages(self) -> list[UntypedStorage]:
        frozen = (p.data for chunk in self._chunks for p in chunk.module.parameters() if not p.requires_grad)
        return _without(_storages(_weight_tensors(self._chunks)), _storages(frozen))


class _HostMemory:
    """Blocks of host memory, pinned if this process computes on a GPU. Blocks stay allocated when nothing uses their bytes."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self.used = 0  # bytes used in the blocks

    def reserve_pieces(self, nbytes: int) -> Iterator[Tensor]:
        """Yield the next `nbytes` bytes as pieces: uint8 tensors, each of which is a part of one block."""
        while nbytes:
            number, start = divmod(self.used, BLOCK_BYTES)
            if number == len(self._blocks):
                self._blocks.append(host_memory(BLOCK_BYTES))
            piece = self._blocks[number][start : start + nbytes]
            self.used, nbytes = self.used + piece.numel(), nbytes - piece.numel()
            yield piece


class _HostCopy(_HostMemory):
    """Host copies of offloaded storages. The host memory stays allocated for the next offload."""

    def __init__(self) -> None:
        super().__init__()
        # (storage, its number of bytes, pieces of host memory that contain the copy)
        self._offloaded: list[tuple[UntypedStorage, int, list[Tensor]]] = []

    @property
    def offloaded_storages(self) -> list[UntypedStorage]:
        return [storage for storage, _, _ in self._offloaded]

    def offload(self, storages: Iterable[UntypedStorage]) -> None:
        """Copy storages to the host, then resize them to zero. Storages that are empty or not resizable stay unchanged."""
        used, copied = self.used, []
        try:
            for storage in filter(_can_offload, storages):
                host_pieces = list(self.reserve_pieces(storage.nbytes()))
                _copy_to_host(storage, host_pieces)
                copied.append((storage, storage.nbytes(), host_pieces))
            synchronize()
        except BaseException:  # for example, too little host memory; no storage has been resized yet
            self.used = used
            raise
        for storage, _, _ in copied:
            storage.resize_(0)
        self._offloaded += copied

    def load(self) -> None:
        """Restore the size and the bytes of all offloaded storages."""
        while self._offloaded:
            storage, nbytes, host_pieces = self._offloaded[-1]
            storage.resize_(nbytes)
            _copy_from_host(storage, host_pieces)
            self._offloaded.pop()
        self.used = 0
        synchronize()  # the copies must end before the next offload overwrites the host memory


def _weight_tensors(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    """Yield the parameters, Megatron's flat buffers that contain them, and the buffers of modules."""
    for chunk in chunks:
        yield from (tensor.data for tensor in (*chunk.module.parameters(), *chunk.module.buffers()))
        yield from (b.param_data for b in _flat_buffers(chunk) if b.param_data is not None)


def _gradient_tensors(chunks: Iterable[DistributedDataParallel]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in _flat_buffers(chunk):
            yield from (buffer.grad_data, *buffer.extra_main_grads)


def _flat_buffers(chunk: DistributedDataParallel) -> list:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the storages of those tensors that are on this process's device, each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device().type)
    return list({_storage_id(storage): storage for storage in storages}.values())


def _without(storages: Iterable[UntypedStorage], others: Iterable[UntypedStorage]) -> list[UntypedStorage]:
    known = {_storage_id(other) for other in others}
    return [storage for storage in storages if _storage_id(storage) not in known]


def _storage_id(storage: UntypedStorage) -> int:
    """Return an identifier that is the same for all tensors over one storage, also while the storage is empty."""
    return storage._cdata


def _can_offload(storage: UntypedStorage) -> bool:
    """Whether the storage has bytes and can be resized. A storage that a NumPy array uses cannot be resized."""
    return storage.nbytes() > 0 and storage.resizable()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _copy_to_host(storage: UntypedStorage, host_pieces: Sequence[Tensor]) -> None:
    for host_piece, piece in zip(host_pieces, _pieces(storage, host_pieces), strict=True):
        host_piece.copy_(piece, non_blocking=True)


def _copy_from_host(storage: UntypedStorage, host_pieces: Sequence[Tensor]) -> None:
    for host_piece, piece in zip(host_pieces, _pieces(storage, host_pieces), strict=True):
        piece.copy_(host_piece, non_blocking=True)


def _pieces(storage: UntypedStorage, host_pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split the bytes of a storage into consecutive pieces; piece i has as many bytes as `host_pieces[i]`."""
    return _bytes_of(storage).split([host_piece.numel() for host_piece in host_pieces])
