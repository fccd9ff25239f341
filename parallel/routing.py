"""Routers of packs: balancing losses that do not depend on the layout, and replay of the engine's choices.

Router replay (Rollout Routing Replay, Ma et al. 2025): tokens go to the experts that the engine sent them to when it sampled,
forward, backward and recomputed. The probabilities of the chosen experts, and so the gradients of the router, are the
trainer's own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from parallel import groups


class PackedRouter(TopKRouter):
    """Megatron's router, its balancing loss weighed by the real tokens of the whole pack.

    Megatron 0.19 multiplies its count of one rank's tokens by the number of ranks. Where tokens pad, that count is the sum of
    all ranks' already (an all-reduce in place), or another number on each rank.

    Its correction bias, where a model has one, is float32 whatever the model's dtype.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedRouter":
        """Move and cast as any module, the bias back to what it was before it was rounded."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts for [L, 1, experts]; `padding_mask` [L, 1] is True where a token only pads."""
        if self.is_aux_loss_enabled():
            real = logits[..., 0].numel() if padding_mask is None else (~padding_mask).sum()
            total = torch.as_tensor(real, dtype=torch.float32, device=logits.device)
            dist.all_reduce(total, group=self.tp_cp_group)
            self._tokens_per_rank = total / self.tp_cp_group.size()
        return super().routing(logits, padding_mask)

    def attach_and_log_load_balancing_loss(self, *args, valid_token_count=None, **kwargs) -> Tensor:
        """Attach the loss, weighed by the pack's tokens whatever Megatron counted."""
        return super().attach_and_log_load_balancing_loss(*args, valid_token_count=self._tokens_per_rank, **kwargs)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert; Megatron 0.19 needs the mask as a column and passes it flat."""
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))


def _replays(chunk: DistributedDataParallel) -> Iterator[tuple[int, RouterReplay]]:
    """(number of the layer in the whole model, its replay) of every layer with experts; none where replay is off."""
    for layer in chunk.module.decoder.layers:
        replay = getattr(getattr(layer.mlp, "router", None), "router_replay", None)
        if replay is not None:
            yield layer.layer_number - 1, replay


@contextmanager
def replayed(chunk: DistributedDataParallel, routing: Tensor | None) -> Iterator[None]:
    """Inside, a forward pass of `chunk` over one pack takes the experts in `routing` [L, layers, topk].

    Afterwards the same choice waits for the pack's recomputation in the backward pass; packs come back in their order.
    """
    if routing is None:
        yield
        return
    if chunk.config.sequence_parallel:
        routing = routing.chunk(groups.tp_group().size())[groups.tp_group().rank()]
    replays = list(_replays(chunk))
    for layer, replay in replays:
        replay.set_target_indices(routing[:, layer])
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    yield
    for _, replay in replays:
        replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def forget(chunks: list[DistributedDataParallel]) -> None:
    """Route freely again, and drop what was kept for recomputation."""
    for chunk in chunks:
        for _, replay in _replays(chunk):
            replay.clear_router_replay_action()
            replay.clear_indices()
