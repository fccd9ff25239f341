"""ImageGPTModel: Megatron's GPTModel with a vision tower from the library transformers, on the first pipeline stage.

The outputs of the tower replace the embeddings of the image tokens of a pack. In models with DeepStack (Qwen3-VL), the tower has
further outputs, the features, which are added to the outputs of the first decoder layers. Every tensor-parallel and every
context-parallel rank computes the whole tower for all images of its pack. So each tensor-parallel rank has the complete gradients
of the tower. A context-parallel rank has the gradients of its own tokens, and the reduction of the gradients sums them.

In shapes, L is the number of tokens of a pack on this rank, and H is the hidden size.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from models.architecture import VISION_PREFIX, VisionTower
from parallel.device import tensor_to_device
from parallel.image_packing import PackedImages
from parallel.megatron_layers import average_gradients
from parallel.packing import PackedSequences

_TOWER = VISION_PREFIX.removesuffix(".")


class ImageGPTModel(GPTModel):
    """A language model that reads images. The images are in the field `images` of the pack (parallel.packing)."""

    def __init__(self, config, *args, vision: VisionTower, **kwargs) -> None:
        super().__init__(config, *args, scatter_embedding_sequence_parallel=False, **kwargs)
        if not self.pre_process:
            return
        assert vision.num_features <= len(self.decoder.layers), (
            f"{vision.num_features} layers get features of the vision tower, but the first stage has {len(self.decoder.layers)}"
        )
        self.visual = _build_tower(vision)
        average_gradients(self.visual)
        # The tower becomes the first module, so that parameters are in the order of their use.
        for name in [name for name in self._modules if name != _TOWER]:
            self._modules[name] = self._modules.pop(name)
        for layer in range(vision.num_features):
            self.decoder.layers[layer].register_forward_hook(partial(_add_features, layer), with_kwargs=True)

    def _apply(self, fn, recurse: bool = True):
        """Apply `fn` to all tensors, as `to` does, but keep the rotary frequencies of the tower in float32."""
        super()._apply(fn, recurse)
        if self.pre_process:
            _reset_frequencies(self.visual)
        return self

    def forward(
        self,
        input_ids: Tensor,  # [1, L]
        position_ids: Tensor,  # [1, L]
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **kwargs: Any,
    ) -> Tensor:
        """Compute what GPTModel computes, for a pack that may have images."""
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)  # [L, 1, H]
            if packed_seq_params.images is not None:
                embedded, features = self._insert(embedded, packed_seq_params.images)
                packed_seq_params = replace(packed_seq_params, layer_features=tuple(map(self._scatter, features)))
            embedded = self._scatter(embedded)
        return super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input=embedded,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )

    def _insert(self, embedded: Tensor, images: PackedImages) -> tuple[Tensor, list[Tensor]]:
        """Return `embedded` [L, 1, H] with the tower's outputs at the image tokens, and the features [L, 1, H] of each layer."""
        pixels = tensor_to_device(images.pixel_values.to(embedded.dtype), embedded.device)
        found = self.visual(pixels, grid_thw=images.grid_thw.to(embedded.device))

        def place(onto: Tensor, outputs: Tensor) -> Tensor:
            return onto.index_copy(0, images.token_index, outputs[images.output_index].to(onto.dtype)[:, None])

        features = getattr(found, "deepstack_features", None) or ()  # Qwen2.5-VL has no features
        return place(embedded, found.pooler_output), [place(torch.zeros_like(embedded), each) for each in features]

    def _scatter(self, hidden: Tensor) -> Tensor:
        """Return this rank's part [L/tp, 1, H] of `hidden` under sequence parallelism, otherwise the whole `hidden`."""
        if not self.config.sequence_parallel:
            return hidden
        return scatter_to_sequence_parallel_region(hidden, group=self.pg_collection.tp)


def _add_features(
    layer: int, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple[Tensor, Any]
) -> tuple[Tensor, Any] | None:
    """Forward hook of a decoder layer: add the features of the tower to the layer's output."""
    packed = kwargs["packed_seq_params"]
    if not packed.layer_features:
        return None
    hidden, context = output
    return hidden + packed.layer_features[layer], context


def _build_tower(vision: VisionTower) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModel  # takes seconds to import, and language models do not need it

    config = AutoConfig.for_model(vision.model_type, **vision.config)
    return AutoModel.from_config(config, attn_implementation="sdpa")


def _reset_frequencies(tower: torch.nn.Module) -> None:
    """Compute the rotary frequencies of the tower again in float32, on the device of its parameters."""
    rotary: Any = tower.rotary_pos_emb
    device = next(tower.parameters()).device
    if device.type != "meta" and rotary.inv_freq.dtype != torch.float32:
        tower.rotary_pos_emb = type(rotary)(rotary.config).to(device)


def tower_parameters(chunks: Iterable[GPTModel]) -> list[torch.nn.Parameter]:
    """Return the parameters of the vision tower on this rank."""
    return [
        parameter for chunk in chunks for name, parameter in chunk.named_parameters() if name.startswith(VISION_PREFIX)
    ]
