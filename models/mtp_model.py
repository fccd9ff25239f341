"""MtpGPTModel: Megatron's GPTModel with MTP layers on the last pipeline stage (DeepSeek-V3, arXiv:2412.19437, section 2.2).

MTP layer k combines the state of token i at depth k - 1 with the embedding of token i + k, and predicts token i + k + 1. At depth
0, the state is the hidden state of the model after its last norm. No gradient of an MTP layer reaches the model: the hidden
states, the embedding and the output layer are constants for the MTP layers. So the gradients of the model are the same with and
without MTP layers.

Megatron's own model finds later tokens by shifting the pack, which works neither with PackedAttention nor with the order of
context-parallel chunks in mrl. Here, the pack contains the later tokens (PackedSequences.later_tokens).

In shapes, L is the number of tokens of a pack on this rank, and H is the hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from parallel import groups
from parallel.megatron_layers import spec_provider
from parallel.packing import PackedSequences


class PackedMtpLayer(MultiTokenPredictionLayer):
    """Megatron's MTP layer for packs, which contain the later tokens."""

    def _get_embeddings(
        self,
        input_ids: Any,
        position_ids: Any,
        embedding,
        hidden_states: Tensor,
        packed_seq_params=None,
        padding_mask=None,
    ) -> tuple[Any, Any, Tensor | None, Tensor, Tensor]:
        """Return the arguments unchanged (Megatron would shift them by one token), and the embeddings of later tokens.

        For each token, layer k reads the embedding of the token k places later. The embeddings are [L, 1, H], or [L/tp, 1, H]
        under sequence parallelism.
        """
        assert isinstance(packed_seq_params, PackedSequences) and packed_seq_params.later_tokens is not None
        embedded = embedding(packed_seq_params.later_tokens[self.layer_number - 1])
        # Recomputation needs an input that requires a gradient.
        hidden_states = hidden_states if hidden_states.requires_grad else hidden_states.requires_grad_()
        return input_ids, position_ids, padding_mask, embedded, hidden_states


class MtpGPTModel(GPTModel):
    """A language model whose last pipeline stage has MTP layers in the attribute `mtp`.

    The function `output_processor`, an argument of Megatron's `forward`, gets the hidden states [L, 1, H] of the model. If the
    pack has `later_tokens`, the function gets the hidden states of the model and of all MTP layers, [L, 1 + MTP layers, H].
    Under sequence parallelism, L/tp replaces L.
    """

    def __init__(self, config, *args, mtp_layer_specs: Sequence[ModuleSpec], **kwargs) -> None:
        """`mtp_layer_specs`: spec of the decoder layer in each MTP layer."""
        super().__init__(config, *args, **kwargs)
        self.num_mtp_layers = len(mtp_layer_specs)
        self.token_embedding: Tensor | None = None  # copy of the embedding, see `embedding_for_mtp`
        if not self.post_process:
            return
        provider = spec_provider()
        norm, projection = provider.layer_norm(rms_norm=True), provider.column_parallel_linear()
        # This is a copy, because in `config` these fields would change how GPTModel and Megatron's schedules compute the model.
        own_config = copy(config)
        own_config.mtp_num_layers, own_config.mtp_detach_heads = len(mtp_layer_specs), True
        specs = [
            ModuleSpec(
                module=PackedMtpLayer,
                submodules=MultiTokenPredictionLayerSubmodules(
                    enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=projection, mtp_model_layer=layer
                ),
            )
            for layer in mtp_layer_specs
        ]
        block = MultiTokenPredictionBlockSubmodules(layer_specs=specs)
        self.mtp = MultiTokenPredictionBlock(
            own_config, block, vp_stage=self.vp_stage, pg_collection=self.pg_collection
        )

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedSequences, **kwargs: Any) -> Tensor:
        if self.post_process and packed_seq_params.later_tokens is not None:
            states = self.mtp(
                input_ids=None,
                position_ids=None,
                hidden_states=hidden_states,
                attention_mask=None,
                rotary_pos_emb=kwargs["rotary_pos_emb"],
                packed_seq_params=packed_seq_params,
                padding_mask=kwargs["padding_mask"],
                embedding=self._embed,
            )
            hidden_states = torch.cat(states.chunk(1 + self.num_mtp_layers), 1)
        return super()._postprocess(hidden_states, packed_seq_params=packed_seq_params, **kwargs)

    @torch.no_grad()
    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [L, 1, H] of tokens [L], or this rank's part [L/tp, 1, H] under sequence parallelism."""
        weight, group = self._embedding_weight(), groups.tp_group()
        row = tokens - group.rank() * len(weight)
        is_local = (row >= 0) & (row < len(weight))
        embedded = weight[row.clamp(0, len(weight) - 1)] * is_local[:, None]
        if group.size() > 1:
            dist.all_reduce(embedded, group=group)
        if self.config.sequence_parallel:
            embedded = embedded.chunk(group.size())[group.rank()]
        return embedded[:, None]

    def _embedding_weight(self) -> Tensor:
        if self.pre_process:
            return self.embedding.word_embeddings.weight
        if self.share_embeddings_and_output_weights:
            return self.output_layer.weight
        assert self.token_embedding is not None, "embedding_for_mtp() comes first"
        return self.token_embedding


@contextmanager
def embedding_for_mtp(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Context in which the last pipeline stage has a copy of the first stage's embedding. All ranks must enter the context.

    `chunks`: virtual stages of this rank. Nothing is copied without MTP layers, with a single pipeline stage, or if the output
    layer of the last stage is the embedding.
    """
    first, last, group = chunks[0].module, chunks[-1].module, groups.pp_group()
    if not isinstance(last, MtpGPTModel) or group.size() == 1 or last.share_embeddings_and_output_weights:
        yield
        return
    if first.pre_process:
        dist.send(first.embedding.word_embeddings.weight.data, group=group, group_dst=group.size() - 1)
    elif last.post_process:
        last.token_embedding = torch.empty_like(last.output_layer.weight.data)
        dist.recv(last.token_embedding, group=group, group_src=0)
    try:
        yield
    finally:
        last.token_embedding = None
