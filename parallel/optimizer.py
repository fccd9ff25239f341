"""Megatron's distributed optimizer: gradient buffers, gradient reduction, and conversion of the state for checkpoints.

A checkpoint stores the optimizer state of each parameter in the parameter's shape, so any layout can load it. This is Megatron's
format `fully_reshardable`. To write this format, Megatron's own code gathers the whole state on every data-parallel rank several
times. With this module, each rank writes the state of the parameters in its shard of the flat buffer, without a copy. If several
shards contain parts of one parameter, the rank with the first part assembles the state of the parameter.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor
from torch.nn import Parameter

from parallel.spans import span
from parallel.trainer_config import OptimConfig


class GradientReducer:
    """Starts the reduction of a bucket group as soon as the gradients of this group and of all earlier groups are complete.

    A bucket group is one or several gradient buckets that Megatron reduces together. The order of the bucket groups is the order
    in which a backward pass completes them. It depends only on the parameters, so all ranks of a pipeline stage start the same
    reductions in the same order, whatever their micro-batches are. `start_remaining` starts the reductions that the backward pass
    did not start.
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
        """Forget the gradients and the reductions of this optimizer step. Call this when all reductions have finished."""
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
    """A bucket group of Megatron, with the number of gradients that each parameter got from the last micro-batch of a step."""

    def __init__(self, group: _ParamAndGradBucketGroup, chunk: DistributedDataParallel) -> None:
        self.params = group.params
        self._group, self._chunk = group, chunk
        # Number of gradients that each parameter gets. A parameter gets several gradients if several parts of the model use it
        # and are recomputed separately. None: no step has given gradients to all parameters yet.
        self._expected_counts: dict[Parameter, int] | None = None
        self._counts: dict[Parameter, int] = {}
        self._started = False

    def add(self, param: Parameter) -> None:
        assert not self._started, f"a gradient of shape {tuple(param.shape)} came after the reduction of its bucket"
        self._counts[param] = self._counts.get(param, 0) + 1

    def is_complete(self) -> bool:
        return self._counts == self._expected_counts

    def start(self) -> None:
        self._started = True
        self._group.start_grad_sync(force_all_reduce=self._chunk.force_all_reduce)

    def reset(self) -> None:
        if self._expected_counts is None and len(self._counts) == len(self.params):
            self._expected_counts = self._counts
        self._counts, self._started = {}, False
        # Megatron starts no reduction while these counts are empty, as before the first step.
        self._group.per_param_grad_ready_counts = {}


def _in_backward_order(chunk: DistributedDataParallel) -> list[_ParamAndGradBucketGroup]:
    """Return the bucket groups of dense and expert parameters, in the order in which a backward pass completes them.

    A backward pass goes from the last parameter of the model to the first. So it completes a group when it reaches the first
    parameter of this group.
    """
    position = {param: number for number, param in enumerate(chunk.params_with_grad)}
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    return sorted(groups, key=lambda group: min(position[param] for param in group.params), reverse=True)


ShardedTensorOrFactory = ShardedTensor | ShardedTensorFactory


def wrap_ddp(
    chunks: list[GPTModel], overlap: bool = False, settings: Mapping[str, Any] | None = None
) -> list[DistributedDataParallel]:
    """Wrap each virtual stage in Megatron's DistributedDataParallel. Gradients are summed over replicas, never averaged.

    With `overlap`, gradients are reduced during the backward pass of the last micro-batch, bucket by bucket (see
    GradientReducer). `settings`: fields of DistributedDataParallelConfig that `check_ddp_settings` allows.

    The all-gather of updated parameters does not overlap with the next forward pass. With overlap, Megatron would all-gather a
    bucket at the first call of a module that has a parameter of the bucket. mrl does not use this overlap, for three reasons:
    - The head of the actor reads the weight of the output layer without calling that layer, so it would read stale weights.
    - A replica without a micro-batch calls no module, so it would not take part in the all-gather.
    - After the last optimizer step of a training step, the weight sync reads all parameters at once, and so does the copy of
      the weights to the host, which makes room for the reference. So the all-gather would have no computation to overlap with.
    """
    defaults = dict(grad_reduce_in_fp32=True, use_distributed_optimizer=True, average_in_collective=False)
    config = DistributedDataParallelConfig(**defaults | dict(settings or {}), overlap_grad_reduce=overlap)
    wrapped = [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
        _fuse_weight_gradients(chunk)
    reducer = GradientReducer(wrapped) if overlap else None
    chunks[0].config.no_sync_func = reducer.paused if reducer else None
    # Losses are already divided by the denominator of the mini-batch, so the reduction must not divide gradients by token counts.
    chunks[0].config.finalize_model_grads_func = lambda model, num_tokens=None, **kwargs: _reduce_gradients(
        model, reducer, force_all_reduce=kwargs.get("force_all_reduce", False)
    )
    return wrapped


def _reduce_gradients(
    model: list[DistributedDataParallel], reducer: GradientReducer | None, force_all_reduce: bool
) -> None:
    with span("gradient reduction", "collective"):
        if reducer is not None:
            reducer.start_remaining()
        finalize_model_grads(model, None, force_all_reduce=force_all_reduce)
        if reducer is not None:
            reducer.reset()


def _fuse_weight_gradients(chunk: DistributedDataParallel) -> None:
    """Let Transformer Engine's matrices add their gradients directly to the gradient buffers, if the config says so."""
    if chunk.config.gradient_accumulation_fusion:
        for module in chunk.modules():
            is_trained = any(param.requires_grad for param in module.parameters(recurse=False))
            # In Transformer Engine 2.20, Linear, LayerNormLinear and GroupedLinear have this attribute.
            if is_trained and hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # type: ignore[missing-attribute]


def build_optimizer(chunks: list[DistributedDataParallel], settings: OptimConfig) -> MegatronOptimizer:
    """Build the distributed optimizer over the buffers of `chunks`, with float32 main weights.

    Also sets `grad_scale_func` in the config of the model, so that Megatron scales losses as this optimizer expects.
    """
    config = chunks[0].config
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=config.params_dtype == torch.bfloat16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
            **settings.megatron,
        ),
        chunks,
    )
    # In Megatron, the learning-rate scheduler sets the weight decay of each group, but mrl does not use that scheduler.
    for group in optimizer.param_groups:
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    """Set the learning rate of the next optimizer step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def num_optimizer_steps(optimizer: MegatronOptimizer) -> int:
    """Return the number of optimizer steps so far.

    Fused Adam stores this number in every parameter group with parameters. Torch's AdamW, which Megatron uses on a GPU without
    Transformer Engine and Apex, stores it in the state of each parameter.
    """
    places = [*_groups(optimizer), *(state for part in _optimizers(optimizer) for state in _torch_adam_states(part))]
    return max((int(place.get("step", 0)) for place in places), default=0)


def sharded_state_to_save(optimizer: MegatronOptimizer, weights: dict) -> dict:
    """Return the sharded tensors that this rank writes. Every rank calls this.

    The tensors share memory with the optimizer, except the state of a parameter that is assembled from several shards. `weights`
    are the sharded weights of all virtual stages of this rank. If no optimizer step has run yet, the optimizer state is created
    as zeros.
    """
    initialize_optimizer_state(optimizer)
    sharded_tensor_of_param = _sharded_tensor_of_param(weights)
    return {
        number: dict(_sharded_states(part, sharded_tensor_of_param))
        for number, part in enumerate(_optimizers(optimizer))
    }


def sharded_state_to_load(optimizer: MegatronOptimizer, weights: dict) -> dict:
    """Return the sharded tensors that this rank reads: the whole state of each parameter in the buffers of this rank."""
    initialize_optimizer_state(optimizer)
    sharded_tensor_of_param = _sharded_tensor_of_param(weights)
    return {
        number: dict(enumerate(_whole_states(part, sharded_tensor_of_param)))
        for number, part in enumerate(_optimizers(optimizer))
    }


def _whole_states(
    part: DistributedOptimizer, sharded_tensor_of_param: dict[Tensor, ShardedTensorOrFactory]
) -> Iterator[dict[str, ShardedTensorOrFactory]]:
    """Yield descriptions of empty tensors in host memory, for `load_parameter_state_from_fully_reshardable`.

    The order of the tensors is the order in which that function reads them. Megatron 0.19 has its own function for these
    descriptions, but with several buckets, it wrongly warns of damaged data: its offsets count the padding between buckets,
    and the buffer that it slices has no padding.
    """
    for buffer in part.buffers:
        for param in buffer.param_index_map:
            weight = sharded_tensor_of_param[param]
            yield {key: _empty_state(weight, key) for key in ("param", *part.optimizer_state_keys)}


def _empty_state(weight: ShardedTensorOrFactory, key: str) -> ShardedTensorOrFactory:
    data = torch.empty(weight.data.shape, dtype=torch.float32)
    dtype = dict(dtype=data.dtype) if isinstance(weight, ShardedTensor) else {}
    return replace(weight, key=f"optimizer.state.{key}.{weight.key}", data=data, **dtype)


def restore_optimizer_state(optimizer: MegatronOptimizer, state: dict, steps: int) -> None:
    """Copy the loaded tensors of `sharded_state_to_load` into the optimizer, and set its number of steps.

    Hyperparameters such as betas keep their current values.
    """
    with torch.no_grad():
        for number, part in enumerate(_optimizers(optimizer)):
            for adam_state in _torch_adam_states(part):
                adam_state.pop("step", None)  # otherwise Megatron would look for this tensor in the checkpoint
            part.load_parameter_state_from_fully_reshardable(state[number])
            _set_num_steps(part, steps)


def _set_num_steps(part: DistributedOptimizer, steps: int) -> None:
    if isinstance(part.optimizer, torch.optim.Adam):
        for adam_state in _torch_adam_states(part):
            adam_state["step"] = torch.tensor(float(steps))
    else:
        for group in part.optimizer.param_groups:
            group["step"] = steps


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield the tensors that an optimizer step updates: moments and main weights.

    The main weights of float32 weights are views of the weights.
    """
    for part in _optimizers(optimizer):
        for group in part.optimizer.param_groups:
            yield from (param.data for param in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for key, value in state.items() if isinstance(value, Tensor) and key != "step")


def initialize_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Create the optimizer state that the first optimizer step would create."""
    for part in _optimizers(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        for state in _torch_adam_states(part):
            state.setdefault("step", torch.tensor(0.0))  # AdamW creates it only for a parameter without any state


def _optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """Return the parts of the optimizer, for dense parameters and for experts, which have different data-parallel groups."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if not part.is_stub_optimizer]  # a stub: only experts are trained


def _groups(optimizer: MegatronOptimizer) -> list[dict]:
    return [group for part in _optimizers(optimizer) for group in part.optimizer.param_groups]


def _torch_adam_states(part: DistributedOptimizer) -> list[dict]:
    """Return the state of each parameter, with its step count, if `part` uses torch's Adam or AdamW; otherwise []."""
    return list(part.optimizer.state.values()) if isinstance(part.optimizer, torch.optim.Adam) else []


def _sharded_tensor_of_param(weights: dict) -> dict[Tensor, ShardedTensorOrFactory]:
    sharded_tensors, _ = extract_sharded_tensors_and_factories(weights)
    return {tensor.data: tensor for tensor in nested_values(sharded_tensors)}


@dataclass(frozen=True)
class _ParamShard:
    """Elements [start, end) of a flattened parameter, which the optimizer of data-parallel rank `rank` updates."""

    rank: int
    start: int
    end: int


def _sharded_states(
    part: DistributedOptimizer, sharded_tensor_of_param: dict[Tensor, ShardedTensorOrFactory]
) -> Iterator[tuple[str, ShardedTensorOrFactory]]:
    """Yield (name, sharded tensor) for the optimizer state that this rank writes.

    The names are unique on this rank. The keys in the checkpoint (ShardedTensor.key) are not unique: layers that Megatron stacks
    in one tensor share a key.
    """
    group = part.data_parallel_group
    for number, (param, shards) in enumerate(_param_shards(part)):
        if all(shard.rank != group.rank() for shard in shards):
            continue
        tensors = part._get_main_param_and_optimizer_states(param)
        tensors.pop("step", None)  # only torch's AdamW has it; a checkpoint contains the number of steps only once
        if len(shards) > 1:
            tensors = {key: _assembled(tensor, shards, group) for key, tensor in tensors.items()}
        if shards[0].rank == group.rank():
            for key, tensor in tensors.items():
                yield f"{number}.{key}", _describe_state(sharded_tensor_of_param[param], key, tensor, group.rank())


def _param_shards(part: DistributedOptimizer) -> Iterator[tuple[Tensor, list[_ParamShard]]]:
    """Yield each parameter with its shards, sorted by position. The order is the same on all ranks."""
    ranges_of_ranks: list = [None] * part.data_parallel_group.size()
    dist.all_gather_object(
        ranges_of_ranks, [list(_own_ranges(part, n)) for n in range(len(part.buffers))], part.data_parallel_group
    )
    for number, buffer in enumerate(part.buffers):
        for index, param in enumerate(buffer.param_index_map):
            ranges_of_param = [(rank, ranges[number][index]) for rank, ranges in enumerate(ranges_of_ranks)]
            shards = [_ParamShard(rank, *bounds) for rank, bounds in ranges_of_param if bounds is not None]
            yield param, sorted(shards, key=lambda shard: shard.start)


def _own_ranges(part: DistributedOptimizer, number: int) -> Iterator[tuple[int, int] | None]:
    """Yield for each parameter of `part.buffers[number]` the elements (start, end) that this rank updates.

    Yields None for a parameter without such elements.
    """
    (buckets,) = part.gbuf_ranges[number].values()
    range_of_param = ChainMap(*(bucket["param_map"] for bucket in buckets))
    for param in part.buffers[number].param_index_map:
        yield (
            (range_of_param[param]["param"].start, range_of_param[param]["param"].end)
            if param in range_of_param
            else None
        )


def _assembled(own_shard: Tensor, shards: list[_ParamShard], group: dist.ProcessGroup) -> Tensor:
    """On the rank of the first shard, assemble all shards. On the other ranks, send this rank's shard and return it unchanged."""
    if shards[0].rank != group.rank():
        dist.send(own_shard.detach().contiguous(), group=group, group_dst=shards[0].rank)
        return own_shard
    # The result is in host memory, because the state of a whole embedding may not fit on the GPU.
    assembled = torch.empty(shards[-1].end, dtype=own_shard.dtype)
    assembled[: shards[0].end] = own_shard.detach()
    for shard in shards[1:]:
        part = own_shard.new_empty(shard.end - shard.start)
        dist.recv(part, group=group, group_src=shard.rank)
        assembled[shard.start : shard.end] = part
    return assembled


def _describe_state(weight: ShardedTensorOrFactory, key: str, flat: Tensor, rank: int) -> ShardedTensorOrFactory:
    """Return a description of the state `flat`, with the shape of `weight` and its position in the whole model.

    Every data-parallel rank has a replica of a weight, and only the rank with replica id 0 writes the weight. The state `flat`
    exists only on this rank. Therefore the description of the state gets replica id 0.
    """
    *others, replica = weight.replica_id
    assert replica == rank, f"{weight.key}: replica {weight.replica_id} on data-parallel rank {rank}"
    changes = dict(
        key=f"optimizer.state.{key}.{weight.key}", data=flat.view(weight.data.shape), replica_id=(*others, 0)
    )
    if isinstance(weight, ShardedTensor):
        changes["dtype"] = flat.dtype
    return replace(weight, **changes)
