"""The distributed optimizer's state as a checkpoint has it: by parameter, in the parameter's shape, for any layout.

The format is Megatron's `fully_reshardable`, and Megatron reads it. Megatron writes it by gathering the whole state on every
data-parallel rank, several times over. Here each rank hands over the parameters that lie in its part of the flat buffer, in
place; only those cut by the border between two parts are put together, by the rank that has their beginning.
"""

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

Described = ShardedTensor | ShardedTensorFactory


def num_steps(optimizer: MegatronOptimizer) -> int:
    """Optimizer steps taken; they live in the groups of parameters, and an empty group counts none."""
    return max((int(group.get("step", 0)) for group in _groups(optimizer)), default=0)


def describe(optimizer: MegatronOptimizer, weights: dict) -> dict:
    """What this rank writes, sharded tensors over its own memory; `weights` are all its stages' sharded weights.

    Every rank calls this. State of parameters that never took a step is made first: zeros.
    """
    begin(optimizer)
    by_param = _by_param(weights)
    return {number: dict(_described(part, by_param)) for number, part in enumerate(_parts(optimizer))}


def request(optimizer: MegatronOptimizer, weights: dict) -> dict:
    """What this rank reads: the whole of each parameter that its buffers have a part of."""
    begin(optimizer)
    state = {}
    for number, part in enumerate(_parts(optimizer)):
        state[number] = part.sharded_param_state_fully_reshardable(weights, is_loading=True, metadata={})
    return state


def restore(optimizer: MegatronOptimizer, state: dict, steps: int) -> None:
    """Take over what `request` asked for, once it is loaded. Settings such as betas stay those of this optimizer."""
    for group in _groups(optimizer):
        group["step"] = steps
    with torch.no_grad():
        for number, part in enumerate(_parts(optimizer)):
            part.load_parameter_state_from_fully_reshardable(state[number])


def tensors_of(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """All that a step reads and writes beside gradients: main parameters (of fp32 weights, views of these) and moments."""
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            yield from (param.data for param in group["params"])
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def begin(optimizer: MegatronOptimizer) -> None:
    """Make the state that the first step would make."""
    for part in _parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)


def _parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """Dense parameters, and those of experts, which have other data-parallel ranks."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if not part.is_stub_optimizer]  # a stage may be without experts


def _groups(optimizer: MegatronOptimizer) -> list[dict]:
    return [group for part in _parts(optimizer) for group in part.optimizer.param_groups]


def _by_param(weights: dict) -> dict[Tensor, Described]:
    described, _ = extract_sharded_tensors_and_factories(weights)
    return {one.data: one for one in nested_values(described)}


@dataclass(frozen=True)
class _Piece:
    """The part [start, end) of a flattened parameter that data-parallel rank `rank` steps."""

    rank: int
    start: int
    end: int


def _described(part: DistributedOptimizer, by_param: dict[Tensor, Described]) -> Iterator[tuple[str, Described]]:
    """(name within this rank, sharded tensor); layers that are alike share the key of the file."""
    group = part.data_parallel_group
    for number, (param, pieces) in enumerate(_pieces(part)):
        if all(piece.rank != group.rank() for piece in pieces):
            continue
        tensors = part._get_main_param_and_optimizer_states(param)
        if len(pieces) > 1:
            tensors = {key: _joined(tensor, pieces, group) for key, tensor in tensors.items()}
        if pieces[0].rank == group.rank():
            for key, tensor in tensors.items():
                yield f"{number}.{key}", _like(by_param[param], key, tensor, group.rank())


def _pieces(part: DistributedOptimizer) -> Iterator[tuple[Tensor, list[_Piece]]]:
    """Each parameter and who has which part of it, by place; the same order on all ranks."""
    held: list = [None] * part.data_parallel_group.size()
    dist.all_gather_object(held, [list(_ranges(part, n)) for n in range(len(part.buffers))], part.data_parallel_group)
    for number, buffer in enumerate(part.buffers):
        for index, param in enumerate(buffer.param_index_map):
            found = [(rank, ranges[number][index]) for rank, ranges in enumerate(held)]
            pieces = [_Piece(rank, *bounds) for rank, bounds in found if bounds is not None]
            yield param, sorted(pieces, key=lambda piece: piece.start)


def _ranges(part: DistributedOptimizer, number: int) -> Iterator[tuple[int, int] | None]:
    (buckets,) = part.gbuf_ranges[number].values()
    mine = ChainMap(*(bucket["param_map"] for bucket in buckets))
    for param in part.buffers[number].param_index_map:
        yield (mine[param]["param"].start, mine[param]["param"].end) if param in mine else None


def _joined(mine: Tensor, pieces: list[_Piece], group: dist.ProcessGroup) -> Tensor:
    """The whole flat tensor, on the host, on the rank of the first piece; the others send it theirs, which they get back."""
    if pieces[0].rank != group.rank():
        dist.send(mine.detach().contiguous(), group=group, group_dst=pieces[0].rank)
        return mine
    whole = torch.empty(pieces[-1].end, dtype=mine.dtype)  # a GPU may have no room for all of an embedding
    whole[: pieces[0].end] = mine.detach()
    for piece in pieces[1:]:
        part = mine.new_empty(piece.end - piece.start)
        dist.recv(part, group=group, group_src=piece.rank)
        whole[piece.start : piece.end] = part
    return whole


def _like(weight: Described, key: str, flat: Tensor, rank: int) -> Described:
    """`flat` with the shape and place of `weight`; where the weight is rank 0's to write, the state is this rank's."""
    *others, replica = weight.replica_id
    assert replica == rank, f"{weight.key}: replica {weight.replica_id} on data-parallel rank {rank}"
    found = dict(key=f"optimizer.state.{key}.{weight.key}", data=flat.view(weight.data.shape), replica_id=(*others, 0))
    if isinstance(weight, ShardedTensor):
        found["dtype"] = flat.dtype
    return replace(weight, **found)
