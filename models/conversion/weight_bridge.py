"""Loads Hugging Face weights into the ranks of a Megatron model and exports them again, according to the family's table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import lcm

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup

from models.architecture import EMBEDDING_WEIGHT, OUTPUT_WEIGHT, SCORE_HEAD_ROW, VISION_PREFIX
from models.conversion.hf_reader import HFWeights
from models.conversion.mapping import Box, ParamMapping
from models.conversion.mtp_mapping import MTP_PREFIX
from models.families import family_of
from models.hf_config import HFConfig
from models.model_builder import HeadKind
from parallel import groups
from parallel.dims import ParallelDims
from parallel.lora import LoraAdapter
from parallel.param_names import global_names

_HEADS: dict[HeadKind, list[ParamMapping]] = {
    "value": [
        ParamMapping(OUTPUT_WEIGHT, ("value_head.weight",), (("one", "hidden"),)),
        ParamMapping("output_layer.bias", ("value_head.bias",), (("one",),)),
    ],
    "score": [SCORE_HEAD_ROW],
}
"""Table rows of the heads that replace the output layer, by kind of head."""


def read_output_weight(folder: str, family_path: str | None, group: ProcessGroup) -> Tensor:
    """Return this rank's rows [V/tp, H] of the output layer of a language model (V: padded vocabulary, H: hidden size).

    `folder`: Hugging Face folder. Each rank of `group` gets an equal number of rows, as in Megatron, and the last ranks may get
    padding rows. `family_path`: the user's own model family, see the field `family` of ModelSpec.
    """
    config, weights = HFConfig.load(folder, family_path), HFWeights(folder)
    family = family_of(config)
    arch = family.read(config)
    rows = {row.megatron: row for row in family.param_mappings(arch)}
    row = rows[EMBEDDING_WEIGHT if arch.tied_embeddings else OUTPUT_WEIGHT]
    return row.to_megatron([weights[name] for name in row.hf], arch.sizes, group.rank(), group.size()).clone()


def _tied_output_row(rows: Sequence[ParamMapping]) -> ParamMapping:
    """Return the table row of the output layer on the last pipeline stage, which is a copy of the tied embedding."""
    return next(replace(row, megatron=OUTPUT_WEIGHT) for row in rows if row.megatron == EMBEDDING_WEIGHT)


class ParamBridge:
    """Converts between parameters of this rank and Hugging Face tensors, according to rows of a table."""

    def __init__(
        self,
        rows: Sequence[ParamMapping],
        params: dict[str, Tensor],
        sizes: dict[str, int],
        dims: ParallelDims,
        num_experts: int = 0,
        tied_rows: Sequence[ParamMapping] = (),
    ) -> None:
        """`params`: this rank's parameters by their names in the whole model. `num_experts`: number of experts of a layer.

        `tied_rows`: rows of parameters that are copies of a parameter in `rows`, such as an output layer that is tied to the
        embedding. This rank loads these parameters, but does not export them. Raises AssertionError if the rows and the
        parameters of all pipeline stages differ.
        """
        self.rows, self.params, self.sizes, self.dims, self.tied_rows = rows, params, sizes, dims, tied_rows
        # number of all experts of a layer, and number of those on each expert-parallel rank
        self.num_experts, self.local_experts = num_experts, num_experts // dims.ep
        self.row_of_megatron = {row.megatron: row for row in [*tied_rows, *rows]}
        self._stage_of = self._find_stages()
        self.row_of_hf = {name: row for row in rows for name in row.hf}

    def _find_stages(self) -> dict[str, int]:
        """Return the pipeline stage of each layer, and of each parameter outside the layers.

        The method also checks that table and model have the same parameters.
        """
        unknown = self.params.keys() - self.row_of_megatron.keys()
        stages: list[set[str]] = [set()] * self.dims.pp
        dist.all_gather_object(stages, set(self.params), group=groups.pp_group())
        found = set().union(*stages)
        ep_rank = groups.ep_group().rank()
        expected = {r.megatron for r in self.rows if r.expert is None or r.expert // self.local_experts == ep_rank}
        assert not unknown | (expected - found), f"table and model differ in {sorted(unknown | (expected - found))[:5]}"
        return {_layer_or_name(name): stage for stage, names in reversed(list(enumerate(stages))) for name in names}

    @torch.no_grad()
    def load(self, weights: HFWeights) -> None:
        """Load this rank's parameters from a Hugging Face checkpoint, one row of the table at a time."""
        for row in [*self.rows, *self.tied_rows]:
            param, stored = self.params.get(row.megatron), self._stored_row(row, weights)
            if param is None or stored is None:
                continue
            group = _shard_group(stored)
            shard = stored.to_megatron([weights[name] for name in stored.hf], self.sizes, group.rank(), group.size())
            assert shard.shape == param.shape, f"{row.megatron}: {tuple(shard.shape)} into {tuple(param.shape)}"
            param.copy_(shard)
            for name in stored.hf:
                weights.release(name)

    def _stored_row(self, row: ParamMapping, weights: HFWeights) -> ParamMapping | None:
        """Return the row that says from which tensors the parameter of `row` is loaded. None: it keeps its initial value."""
        return row

    def current(self, param: Tensor) -> Tensor:
        """Return the current value of a parameter, as it is exported. It may share memory with the parameter."""
        return param.detach()

    def stage(self, name: str) -> int:
        """Return the pipeline stage of the Megatron parameter `name`. The parameter may be on another rank."""
        return self._stage_of[_layer_or_name(name)]

    def reader(self) -> Callable[[str, Box], Tensor]:
        """Return a function that reads slices of Hugging Face tensors from the current weights of this rank.

        The slices may share memory with the parameters. A reader caches the tensors of the row that it has read most recently.
        Therefore the caller must make a new reader after each change of the parameters.
        """
        last: tuple[str, list[Tensor]] = ("", [])  # (Megatron name of the cached row, its Hugging Face shards)

        @torch.no_grad()
        def read(name: str, box: Box) -> Tensor:
            nonlocal last
            row = self.row_of_hf[name]
            if last[0] != row.megatron:  # callers usually read the tensors of a row one after another
                last = (row.megatron, row.split(self.current(self.params[row.megatron]), self.sizes))
            group = _shard_group(row)
            boxes = row.split_over_ranks(self.sizes, group.size())[name]
            own_boxes = boxes[group.rank() if len(boxes) > 1 else 0]
            part = next(index for index, own_box in enumerate(own_boxes) if own_box.contains(box))
            return last[1][row.first_shape_index(name) + part][box.within(own_boxes[part]).slices]

        return read

    def participates_in_export(self, rank: int) -> bool:
        """Whether `rank` must iterate over `export()`.

        This is true for the first ranks of each pipeline stage: as few as possible, but whole tensor-parallel groups and whole
        copies of the experts. So no rank waits in a gather for a rank that does not iterate.
        """
        rank_in_stage = rank % (self.dims.world_size // self.dims.pp)
        experts = self.dims.ep * self.dims.expert_tp if self.num_experts else 1
        return rank_in_stage < lcm(self.dims.tp, experts)

    @torch.no_grad()
    def export(
        self, tensor_of: Callable[[Tensor], Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor). Every rank for which `participates_in_export` is true must iterate.

        `tensor_of` may replace each parameter with another tensor, such as its gradient. `dtype` must be the dtype of the tensors
        that `tensor_of` returns (None: the dtype of the parameters). With `tensor_of`, buffers, frozen weights and a vision tower
        that is not trained are not exported, because they have no gradient. The yielded tensors may share memory with the
        parameters, so the caller must use or copy them before the parameters change.
        """
        rows = [row for row in self.rows if tensor_of is None or self._has_gradient(row)]
        tensor_of = tensor_of or self.current
        for row in rows:
            if row.expert is None:
                shard = self._broadcast_over_stages(row, tensor_of, torch.float32 if row.is_buffer else dtype)
                yield from row.to_hf(_gather(shard, _shard_group(row), row.axis is not None), self.sizes).items()
            elif row.expert < self.local_experts:
                # This call also exports the experts with the same local index on the other expert-parallel ranks.
                yield from self._export_experts(row, tensor_of, dtype)

    def _has_gradient(self, row: ParamMapping) -> bool:
        return not (row.is_buffer or row.is_frozen)

    def _export_experts(
        self, row: ParamMapping, tensor_of: Callable[[Tensor], Tensor], dtype: torch.dtype | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the row's expert, and of the experts with its local index on other expert-parallel ranks."""
        assert row.expert is not None, "the caller checks that the row belongs to an expert"
        prefix, _, suffix = row.megatron.partition(f"experts.{row.expert}.")
        experts = [rank * self.local_experts + row.expert for rank in range(self.dims.ep)]
        rows = [self.row_of_megatron[f"{prefix}experts.{expert}.{suffix}"] for expert in experts]
        shard = self._broadcast_over_stages(rows[groups.ep_group().rank()], tensor_of, dtype)
        shards = _gather(shard, groups.etp_group(), row.axis is not None)
        gathered = [_gather(shard, groups.ep_group(), True) for shard in shards]  # [etp][ep]
        for ep_rank, expert_row in enumerate(rows):
            yield from expert_row.to_hf([by_ep_rank[ep_rank] for by_ep_rank in gathered], self.sizes).items()

    def _broadcast_over_stages(
        self, row: ParamMapping, tensor_of: Callable[[Tensor], Tensor], dtype: torch.dtype | None
    ) -> Tensor:
        """Return a shard of the row's parameter. The pipeline stage that has the shard broadcasts it to all stages."""
        param = self.params.get(row.megatron)
        if self.dims.pp == 1:
            assert param is not None, f"{row.megatron} is on no stage"
            return tensor_of(param)
        if param is None:
            any_param = next(iter(self.params.values()))
            group = _shard_group(row)
            hf_tensors = [torch.empty(shape, device="meta") for shape in row.hf_shapes(self.sizes).values()]
            shape = row.to_megatron(hf_tensors, self.sizes, group.rank(), group.size()).shape
            shard = torch.empty(shape, dtype=dtype or any_param.dtype, device=any_param.device)
        else:
            shard = tensor_of(param).contiguous()
        dist.broadcast(shard, group=groups.pp_group(), group_src=self.stage(row.megatron))
        return shard


class WeightBridge(ParamBridge):
    """Converts between the weights of this rank and Hugging Face tensors, according to the family's table.

    If the model has LoRA adapters, the exported weights are W + (alpha / rank) B A.
    """

    def __init__(
        self,
        config: HFConfig,
        chunks: list[GPTModel],
        dims: ParallelDims,
        head: HeadKind = "vocabulary",
        train_vision: bool = True,
    ) -> None:
        """`chunks` are this rank's virtual stages without a DistributedDataParallel wrapper.

        If `train_vision` is false, the vision tower has no gradients. Raises AssertionError if the table and the model have
        different parameters.
        """
        family = family_of(config)
        arch = family.read(config)
        self.family, self.arch, self.train_vision = family, arch, train_vision
        self.adapters: dict[Tensor, LoraAdapter] = {}  # weight of a linear layer -> its adapter, see models.lora
        rows = family.param_mappings(arch)
        self.own_head = _HEADS.get(head, [])
        if self.own_head:
            rows = [row for row in rows if row.megatron != OUTPUT_WEIGHT] + self.own_head
        params = {name: p for chunk in chunks for name, p in global_names(chunk, arch.num_experts // dims.ep)}
        has_tied_output = head == "vocabulary" and arch.tied_embeddings and OUTPUT_WEIGHT in params
        tied_rows = [_tied_output_row(rows)] if has_tied_output else []
        super().__init__(rows, params, arch.sizes | {"one": 1}, dims, arch.num_experts, tied_rows)

    def _stored_row(self, row: ParamMapping, weights: HFWeights) -> ParamMapping | None:
        """As in ParamBridge, but return None for a head that the checkpoint lacks: the head keeps its initial values.

        Exception: if a critic starts from a reward model, the weight of its value head is loaded from the score head.
        """
        if row not in self.own_head or row.hf[0] in weights:
            return row
        has_score = row.megatron == OUTPUT_WEIGHT and SCORE_HEAD_ROW.hf[0] in weights
        return SCORE_HEAD_ROW if has_score else None

    def _has_gradient(self, row: ParamMapping) -> bool:
        return super()._has_gradient(row) and (self.train_vision or not row.megatron.startswith(VISION_PREFIX))

    def current(self, param: Tensor) -> Tensor:
        adapter = self.adapters.get(param)
        return param.detach() if adapter is None else adapter.merged(param.detach())


def _layer_or_name(name: str) -> str:
    """Return the layer of a parameter (such as `decoder.layers.3`), or the parameter's name if it is in no layer."""
    return ".".join(name.split(".")[:3]) if name.startswith(("decoder.layers.", MTP_PREFIX)) else name


def _shard_group(row: ParamMapping) -> ProcessGroup:
    return groups.tp_group() if row.expert is None else groups.etp_group()


def _gather(shard: Tensor, group: ProcessGroup, is_split: bool) -> list[Tensor]:
    """Return the shards of all ranks of `group` in rank order. If the tensor is not split, return only `shard`."""
    if not is_split or group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards
