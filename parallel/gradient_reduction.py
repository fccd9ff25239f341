"""Reduces gradients over the replicas during the backward pass, bucket after bucket, in the same order on all ranks.

Megatron starts the reduction of a gradient bucket when the gradients of all its parameters are complete. To know when this is the
case, Megatron counts in the first step how many gradients each parameter gets. On a replica without a micro-batch, parameters get
no gradients. Then one of two things happens in Megatron 0.19: the ranks of this replica raise an error, or they start their
reductions in another order than the other replicas do. In the second case, all ranks wait forever.

Therefore GradientReducer decides when a reduction starts. It keeps Megatron's bucket groups in the state of the first step. In
this state, Megatron itself starts no reduction before the end of the backward pass, and starts no reduction a second time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch.nn import Parameter


class GradientReducer:
    """Starts the reduction of a bucket group as soon as the gradients of this group and of all earlier groups are complete.

    The order of the bucket groups is the order in which a backward pass completes them. It depends only on the parameters, so all
    ranks of a pipeline stage start the same reductions in the same order, whatever their micro-batches are. `start_remaining`
    starts the reductions that the backward pass did not start.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        """Watch the gradients of `chunks`, this rank's virtual stages, which must have `overlap_grad_reduce`."""
        assert all(chunk.ddp_config.overlap_grad_reduce for chunk in chunks), (
            "Megatron's reduction would not be asynchronous"
        )
        self._groups = [
            _WatchedGroup(group, chunk) for chunk in reversed(chunks) for group in _in_backward_order(chunk)
        ]
        self._num_started = 0
        self._last_micro_batch = True
        watched = {param: group for group in self._groups for param in group.params}
        for chunk in chunks:
            # Megatron's own hook on these accumulators runs first. It adds each gradient to the gradient buffer.
            for param, accumulator in zip(chunk.params_with_grad, chunk.grad_accs, strict=True):
                accumulator.register_hook(partial(self._on_gradient, watched[param], param))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context for all micro-batches except the last. Megatron's schedules enter this context as `no_sync_func`."""
        self._last_micro_batch = False
        try:
            yield
        finally:
            self._last_micro_batch = True

    def start_remaining(self) -> None:
        """Start all reductions that have not started yet. Every rank calls this after its last micro-batch."""
        for group in self._groups[self._num_started :]:
            group.start()
        self._num_started = len(self._groups)

    def reset(self) -> None:
        """Forget the gradients of this optimizer step. Call this when all reductions have finished."""
        self._num_started = 0
        for group in self._groups:
            group.reset()

    def _on_gradient(self, group: "_WatchedGroup", param: Parameter, *unused: object) -> None:
        if not self._last_micro_batch:
            return
        group.add(param)
        while self._num_started < len(self._groups) and self._groups[self._num_started].is_complete():
            self._groups[self._num_started].start()
            self._num_started += 1


class _WatchedGroup:
    """A bucket group of Megatron, with a count of the gradients that each parameter got from the last micro-batch."""

    def __init__(self, group: _ParamAndGradBucketGroup, chunk: DistributedDataParallel) -> None:
        self.params = group.params
        self._group, self._chunk = group, chunk
        # Number of gradients that each parameter gets; more than one if several recomputed segments use the parameter. None: no
        # step has given gradients to all parameters yet.
        self._expected: dict[Parameter, int] | None = None
        self._found: dict[Parameter, int] = {}
        self._started = False

    def add(self, param: Parameter) -> None:
        assert not self._started, f"a gradient of shape {tuple(param.shape)} came after the reduction of its bucket"
        self._found[param] = self._found.get(param, 0) + 1

    def is_complete(self) -> bool:
        return self._found == self._expected

    def start(self) -> None:
        self._started = True
        self._group.start_grad_sync(force_all_reduce=self._chunk.force_all_reduce)

    def reset(self) -> None:
        if self._expected is None and len(self._found) == len(self.params):
            self._expected = self._found
        self._found, self._started = {}, False
        self._group.per_param_grad_ready_counts = {}  # keeps Megatron in the state of the first step


def _in_backward_order(chunk: DistributedDataParallel) -> list[_ParamAndGradBucketGroup]:
    """Return the bucket groups of dense and expert parameters, in the order in which a backward pass completes them.

    A backward pass goes from the last parameter of the model to the first. So it completes a group when it reaches the first
    parameter of this group.
    """
    position = {param: number for number, param in enumerate(chunk.params_with_grad)}
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    return sorted(groups, key=lambda group: min(position[param] for param in group.params), reverse=True)
