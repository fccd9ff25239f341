"""MoE routers for packed sequences: layout-independent load-balancing losses, and replay of the engine's routing.

With routing replay (Rollout Routing Replay, Ma et al. 2025), the trainer sends each token to the experts that the engine chose
for the token. This holds in the forward pass, the backward pass and recomputation. The trainer computes the probabilities of
these experts itself, so the router still receives gradients.
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
    """Router whose load-balancing loss is weighted by the number of real tokens in the whole pack, without padding.

    Megatron 0.19 multiplies the token count of one rank by the number of ranks. With padding, the product is wrong for one of two
    reasons: the count is already the sum over all ranks, because Megatron has all-reduced it in place, or the ranks have
    different counts.

    The correction bias, if the model has one, stays in float32 for any dtype of the model.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedRouter":
        """Move and cast the module, but only move the correction bias, so that the bias stays in float32."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts for logits [L, 1, experts]; `padding_mask` [L, 1] is True at padding tokens."""
        if self.is_aux_loss_enabled():
            real = logits[..., 0].numel() if padding_mask is None else (~padding_mask).sum()
            total = logits.new_zeros((), dtype=torch.float32) + real  # torch.tensor(real) would wait for the GPU
            dist.all_reduce(total, group=self.tp_cp_group)
            self._tokens_per_rank = total / self.tp_cp_group.size()  # Megatron multiplies by the number of ranks
        return super().routing(logits, padding_mask)

    def attach_and_log_load_balancing_loss(self, *args, valid_token_count=None, **kwargs) -> Tensor:
        """Attach the load-balancing loss, with the token count of the pack instead of Megatron's count."""
        return super().attach_and_log_load_balancing_loss(*args, valid_token_count=self._tokens_per_rank, **kwargs)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert. Megatron 0.19 passes the mask with shape [L], but needs the shape [L, 1]."""
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))


def _router_replays(chunk: DistributedDataParallel) -> Iterator[tuple[int, RouterReplay]]:
    """Yield (layer index in the whole model, RouterReplay) for each MoE layer; yield nothing if routing replay is off."""
    for layer in chunk.module.decoder.layers:
        replay = getattr(getattr(layer.mlp, "router", None), "router_replay", None)
        if replay is not None:
            yield layer.layer_number - 1, replay


@contextmanager
def replay_routing(chunk: DistributedDataParallel, routing: Tensor | None) -> Iterator[None]:
    """Use the experts in `routing` [L, layers, topk] for one forward pass of `chunk`.

    If `routing` is None, the router chooses the experts. After the block, the experts stay stored until the backward pass of the
    pack has recomputed the layers. Backward passes must be in the order of the forward passes.
    """
    if routing is None:
        yield
        return
    if chunk.config.sequence_parallel:
        routing = routing.chunk(groups.tp_group().size())[groups.tp_group().rank()]
    replays = list(_router_replays(chunk))
    for layer, replay in replays:
        replay.set_target_indices(routing[:, layer])
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    yield
    for _, replay in replays:
        replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def stop_replay(chunks: list[DistributedDataParallel]) -> None:
    """Let the routers choose the experts again, and drop the experts that are stored for recomputation."""
    for chunk in chunks:
        for _, replay in _router_replays(chunk):
            replay.clear_router_replay_action()
            replay.clear_indices()
