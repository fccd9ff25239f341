"""Looks at what passes between layers in a forward pass, whatever the layout: hidden states are whole in H there."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mrl.workers.batch import MicroBatch
from mrl.workers.sketch import EMBEDDING, NORM, PROJECTIONS, Sketch, joined
from parallel import groups


class Taps:
    """Hooks on this rank's stages while the context is open.

    No pass may compute activations again meanwhile: it would not be known whose they are.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], sequence_parallel: bool) -> None:
        """`sequence_parallel`: each tensor-parallel rank has a part of the tokens; else all have the same."""
        self._models: list[Any] = [chunk.module for chunk in chunks]
        self._parts = groups.tp_group().size() if sequence_parallel else 1
        self._part = groups.tp_group().rank() if sequence_parallel else 0
        self._silent = not sequence_parallel and groups.tp_group().rank() > 0
        self._hooks: list[Any] = []
        self._found: list[Sketch] = []
        self._tokens = np.empty(0, np.int64)  # [L here] of the micro-batch that passes, -1: pads

    def __enter__(self) -> "Taps":
        for model in self._models:
            self._hooks.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
            if model.pre_process:
                self._tap(model.embedding, EMBEDDING)
            for layer in model.decoder.layers:
                self._tap(layer, layer.layer_number)
            if model.post_process:
                self._tap(model.decoder.final_layernorm, NORM)
        return self

    def __exit__(self, *unused: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def sketches(self) -> tuple[Sketch, ...]:
        """What passed on this rank, one sketch a place; nothing where another rank says the same."""
        return joined(self._found)

    def _tap(self, module: torch.nn.Module, place: int) -> None:
        if not self._silent:
            self._hooks.append(module.register_forward_hook(self._keeping(place)))

    def _begin(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        micro: MicroBatch = kwargs["output_processor_context"]
        self._tokens = np.split(micro.origin, self._parts)[self._part]

    def _keeping(self, place: int) -> Callable[..., None]:
        def keep(module: torch.nn.Module, args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
            hidden = output[0] if isinstance(output, tuple) else output  # [L here, 1, H]
            real = self._tokens >= 0
            values = sketch(hidden.detach()[:, 0])[torch.from_numpy(real).to(hidden.device)]
            self._found.append(Sketch(place, self._tokens[real], values.cpu().numpy()))

        return keep


@torch.no_grad()
def sketch(hidden: Tensor) -> Tensor:
    """[n, 1 + K] float32 of hidden states [n, H]."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(hidden.size(1), PROJECTIONS, generator=generator, dtype=torch.float64).to(hidden.device)
    wide = hidden.double()  # the sketch's own round-off must not be seen
    return torch.cat([wide.norm(dim=1, keepdim=True), wide @ vectors], dim=1).float()
