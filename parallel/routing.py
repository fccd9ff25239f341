"""Router replay: tokens go to the experts that the engine sent them to when it sampled, forward, backward and recomputed.

The probabilities of the chosen experts, and so the gradients of the router, are the trainer's own; only the choice is the
engine's (Rollout Routing Replay, Ma et al. 2025, section 4).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from parallel import groups


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
