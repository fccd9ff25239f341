"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): each token attends to a limited number of keys.

A lightning indexer scores a token and all tokens before it in the sequence, and the token attends only to the `topk` keys with
the best scores. The index score of key s for the query of token t is

    I[t, s] = sum_j w[t, j] * ReLU(q[t, j] . k[s])     (equation 1)

over the heads j of the indexer. q comes from the compressed queries of latent attention (the normalized output of their
down-projection, with q_lora_rank channels), k and w come from the hidden states, and RoPE rotates the first components of q and
k. As in transformers, w contains the factor 1 / sqrt(heads * channels), with the heads and channels of the indexer.

The choice of keys has no gradient, so the loss of a policy gives the indexer no gradient. (In pretraining, the indexer learns
from a loss of its own, on the distribution of the attention's weights.) Therefore the weights of the indexer are frozen: they
have no gradient buffers and no optimizer state. The scores give the hidden states no gradient either.

Queries and keys have the dtype of the model. The index scores are computed from them in float32. Of keys with equal scores, the
earliest are chosen, so the choice does not depend on the layout or on the kernel. (torch.topk breaks ties in no fixed order.) If
no query of a pack has more than `topk` keys, a token attends to all of them, and the indexer computes nothing.

In GLM-5 models, a layer may have no indexer. Then it uses the keys that the nearest earlier layer with an indexer has chosen.
Both layers must be in the same pipeline stage.

The trainer computes the products of a query with all earlier keys, and then masks out the keys that are not chosen. In shapes,
L is the number of tokens on this rank, H is the hidden size, n is the number of heads of the attention on this rank, d is
the number of channels per head, h and c are the numbers of heads and of channels of the indexer, and K is the number of keys.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.attention import PackedAttention
from parallel.megatron_layers import AmplifiedRotaryEmbedding
from parallel.packing import AttentionCall, PackedSequences
from parallel.trainer_config import MAX_INDEX_PRODUCTS

_NORM_EPSILON = 1e-6  # of the norm of the indexer's keys, in every model


class IndexerNorm(torch.nn.LayerNorm):
    """LayerNorm of the indexer's keys. Its weights stay in float32 for any dtype of the model, as in SGLang."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=_NORM_EPSILON, dtype=torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "IndexerNorm":
        """Move the weights, but do not cast them."""
        own = {name: parameter.data for name, parameter in self.named_parameters()}
        super()._apply(fn, recurse)
        for name, parameter in self.named_parameters():
            parameter.data = own[name].to(parameter.device)
        return self


class LightningIndexer(torch.nn.Module):
    """Chooses the keys to which each token attends. Every tensor-parallel rank computes all heads of the indexer.

    The ranks gather the compressed queries [L, q_lora_rank], the keys [L, c] and the weights of the heads [L, h], so that each
    rank chooses the keys for all L queries. Gathering the queries [L, h, c] of all heads would send more data.
    """

    def __init__(self, config: MLATransformerConfig, rotary: AmplifiedRotaryEmbedding) -> None:
        super().__init__()
        heads, channels = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        assert heads and channels and config.q_lora_rank, "sparse attention needs an indexer and compressed queries"
        self.heads, self.channels, self.topk = heads, channels, config.dsa_indexer_topk or 0
        self.interleaved, self.config, self.rotary = config.dsa_indexer_rope_interleaved, config, rotary
        matrix = dict(bias=False, dtype=config.params_dtype)
        self.wq_b = torch.nn.Linear(config.q_lora_rank, heads * channels, **matrix)
        self.wk = torch.nn.Linear(config.hidden_size, channels, **matrix)
        self.weights_proj = torch.nn.Linear(config.hidden_size, heads, **matrix)
        self.k_norm = IndexerNorm(channels)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self,
        hidden: Tensor,  # [L, H], or [L/tp, H] under sequence parallelism
        compressed: Tensor,  # [L, q_lora_rank], or [L/tp, q_lora_rank] under sequence parallelism
        pack: PackedSequences,
        tp_group: ProcessGroup,
        cp_group: ProcessGroup,
    ) -> list[Tensor | None]:
        """Return for each call of the pack a mask [count, num_queries, num_keys] that is True at the chosen keys.

        None in place of a mask means that a query attends to all keys up to its own.
        """
        key = self.k_norm(self.wk(hidden).float())
        weights = F.linear(hidden.float(), self.weights_proj.weight.float()) * (self.heads * self.channels) ** -0.5
        if self.config.sequence_parallel and tp_group.size() > 1:
            compressed = gather_from_sequence_parallel_region(compressed, group=tp_group)
            both = gather_from_sequence_parallel_region(torch.cat([key, weights], -1), group=tp_group)
            key, weights = both.split([self.channels, self.heads], -1)
        query = self.wq_b(compressed).unflatten(-1, (self.heads, self.channels))
        rotated = self._rotate(query.float(), pack), self._rotate(key.unsqueeze(1), pack).squeeze(1)
        query, key = (rows.to(hidden.dtype) for rows in rotated)
        if cp_group.size() > 1:
            key = gather_from_sequence_parallel_region(key, group=cp_group)
        if pack.query_index is not None:
            query, weights = (rows.index_select(0, pack.query_index) for rows in (query, weights))
        if pack.key_index is not None:
            key = key.index_select(0, pack.key_index)
        queries, head_weights = (rows.split([c.count * c.num_queries for c in pack.calls]) for rows in (query, weights))
        keys = key.split([call.count * call.num_keys for call in pack.calls])
        calls = zip(queries, keys, head_weights, pack.calls, strict=True)
        return [choose_keys(q, k, w, call, self.topk) if call.num_keys > self.topk else None for q, k, w, call in calls]

    def _rotate(self, x: Tensor, pack: PackedSequences) -> Tensor:
        """Rotate the first components of queries [L, h, c] or keys [L, 1, c] by the position of each token.

        Interleaved pairs of components are separated. This changes the order of the components of queries and keys alike, so it
        does not change their products.
        """
        length = self.rotary.get_rotary_seq_len(None, None, x, self.config, pack)
        angles, amplitude = self.rotary(length, packed_seq=True)
        half = angles.size(-1) // 2  # both halves of the angles are equal
        cos, sin = (angles[..., :half].cos() * amplitude), (angles[..., :half].sin() * amplitude)
        rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
        first, second = (rotated[..., 0::2], rotated[..., 1::2]) if self.interleaved else rotated.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def choose_keys(query: Tensor, key: Tensor, weights: Tensor, call: AttentionCall, topk: int) -> Tensor:
    """Return the mask [count, num_queries, num_keys] of the `topk` keys with the best index scores of each query.

    `query` [count * num_queries, h, c], `key` [count * num_keys, c], `weights` [count * num_queries, h]. A query chooses only
    from the keys to which it may attend: see AttentionCall. The scores of all heads are computed for a limited number of queries
    at a time.
    """
    query, key, weights = (rows.unflatten(0, (call.count, -1)) for rows in (query, key, weights))
    block = max(1, MAX_INDEX_PRODUCTS // (call.count * query.size(2) * call.num_keys))
    own_key = call.num_keys - call.num_queries  # index of the first query's own key
    causal = torch.ones(call.num_queries, call.num_keys, dtype=torch.bool, device=query.device).tril(own_key)
    masks = [
        _best(index_scores(q, key, w).masked_fill_(~allowed, float("-inf")), topk).logical_and_(allowed)
        for q, w, allowed in zip(query.split(block, 1), weights.split(block, 1), causal.split(block), strict=True)
    ]
    return masks[0] if len(masks) == 1 else torch.cat(masks, 1)


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Return the index scores [count, queries, K]; arguments [count, queries, h, c], [count, K, c] and [count, queries, h]."""
    products = _products(query.flatten(1, 2), key.mT).relu_()  # [count, queries * h, K]
    return (weights.unsqueeze(2) @ products.unflatten(1, query.shape[1:3])).squeeze(2)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix products [count, rows, columns] in float32. On a GPU, tensor cores multiply the 16-bit numbers."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


def _best(scores: Tensor, topk: int) -> Tensor:
    """Return a mask of the `topk` largest scores [..., K] of each row. Of equal scores, the first are chosen."""
    topk = min(topk, scores.size(-1))
    least = scores.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    missing = topk - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= missing))


class SparseAttention(PackedAttention):
    """Core attention of Megatron's latent attention, over the keys that an indexer chooses."""

    requires_dsa_inputs = True  # Megatron then passes the hidden states x and the compressed queries qr
    indexer: LightningIndexer | None

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        *args: Any,
        rotary: AmplifiedRotaryEmbedding,  # of the model; the layers of a virtual stage share it
        indexer_layers: Sequence[bool],  # [layers of the model] whether the layer has an indexer
        pg_collection: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, layer_number, *args, pg_collection=pg_collection, **kwargs)
        self.layer, self.topk, self.tp_group = layer_number - 1, config.dsa_indexer_topk, pg_collection.tp
        self.key_choosing_layer = max(layer for layer in range(layer_number) if indexer_layers[layer])
        self.shares_keys_with_next_layer = layer_number < len(indexer_layers) and not indexer_layers[layer_number]
        self.indexer = LightningIndexer(config, rotary) if self.key_choosing_layer == self.layer else None

    def forward(
        self,
        query: Tensor,  # [L, n, d]
        key: Tensor,  # [L, n, d]
        value: Tensor,  # [L, n, d]
        attention_mask: Tensor | None = None,
        *,
        x: Tensor,  # [L, 1, H] hidden states, or [L/tp, 1, H] under sequence parallelism
        qr: Tensor,  # [L, q_lora_rank] compressed queries, or [L/tp, q_lora_rank] under sequence parallelism
        packed_seq_params: PackedSequences,
        **unused: Any,
    ) -> Tensor:  # [L, n*d]
        """Compute the attention over the chosen keys. Megatron's other arguments are not used."""
        pack: PackedSequences = packed_seq_params
        masks = None
        if any(call.num_keys > self.topk for call in pack.calls):
            masks = self._read(pack) if self.indexer is None else self._choose(x, qr, pack, query)
        return self.attend(query, key, value, pack, masks)

    def _choose(self, x: Tensor, qr: Tensor, pack: PackedSequences, query: Tensor) -> list[Tensor | None]:
        """Choose the keys, and keep them for the layers that also use them.

        The backward pass of this layer drops the keys. The backward passes of the other layers that use the keys come earlier,
        also with recomputation.
        """
        assert self.indexer is not None, "this layer chooses the keys"
        masks = self.indexer(x.flatten(0, 1), qr, pack, self.tp_group, self.cp_group)
        if self.shares_keys_with_next_layer:
            pack.chosen_keys[self.layer] = masks
            if query.requires_grad:
                query.register_hook(lambda grad: _drop(pack, self.layer))
        return masks

    def _read(self, pack: PackedSequences) -> list[Tensor | None]:
        """Return the keys that an earlier layer has chosen. If no backward pass follows, the last reader drops them."""
        masks = pack.chosen_keys[self.key_choosing_layer]
        if not self.training and not self.shares_keys_with_next_layer:
            _drop(pack, self.key_choosing_layer)
        return masks

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Return the weights of the indexer, if there is one, as Megatron's checkpoints need them: whole on every rank."""
        if self.indexer is None:
            return {}
        return make_sharded_tensors_for_checkpoint(
            self.indexer.state_dict(prefix="", keep_vars=True),
            f"{prefix}indexer.",
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _drop(pack: PackedSequences, layer: int) -> None:
    pack.chosen_keys.pop(layer, None)
