"""Carries weights between a Hugging Face folder and the ranks of a live Megatron model, by the family's table."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from models.conversion.hf_io import HFWeights
from models.families import family_of
from models.spec import HFConfig
from parallel import groups


class Bridge:
    """One model's table bound to this rank's parameters."""

    def __init__(self, config: HFConfig, model: GPTModel) -> None:
        """`model` is unwrapped; raises AssertionError when table and model do not name the same parameters."""
        family = family_of(config)
        arch = family.read(config)
        self.sizes = arch.sizes
        self.fusions = family.engine_fusions
        self.rows = family.entries(arch)
        self.params = dict(model.named_parameters())
        named = {row.megatron for row in self.rows}
        assert named == set(self.params), f"table and model differ in {sorted(named ^ set(self.params))[:5]}"

    @torch.no_grad()
    def load(self, weights: HFWeights) -> None:
        """Fill this rank's parameters from a Hugging Face checkpoint, one row of the table at a time."""
        group = groups.tp_group()
        for row in self.rows:
            tensors = [weights[name] for name in row.hf]
            shard = row.to_megatron(tensors, self.sizes, group.rank(), group.size())
            param = self.params[row.megatron]
            assert shard.shape == param.shape, f"{row.megatron}: {tuple(shard.shape)} into {tuple(param.shape)}"
            param.copy_(shard)

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor); every rank of the tensor-parallel group must iterate along.

        The tensors may share memory with the live parameters: use or copy them before the next update.
        """
        group = groups.tp_group()
        for row in self.rows:
            shard = self.params[row.megatron].detach()
            shards = [shard]
            if row.axis is not None and group.size() > 1:
                shards = [torch.empty_like(shard) for _ in range(group.size())]
                dist.all_gather(shards, shard.contiguous(), group=group)
            yield from row.to_hf(shards, self.sizes).items()
