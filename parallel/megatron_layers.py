"""Megatron layer modules for packed sequences: norms, rotary embedding, latent attention, MoE routers, and plain torch modules.

The plain torch modules have the same parameter names as Transformer Engine's modules. Therefore checkpoints and conversion
tables are the same on GPUs and CPUs.

The load-balancing losses of the MoE routers do not depend on the layout. With routing replay (Rollout Routing Replay, Ma et al.
2025), the trainer's forward pass, recomputation and backward pass send each token to the experts that the engine chose for the
token. The trainer computes the probabilities of these experts itself, so the router still receives gradients.

In shapes, L is the number of tokens on this rank, H is the hidden size, n is the number of heads, and d is the number of channels
per head. In shapes of angles, d is the number of channels per head that RoPE rotates.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from parallel import groups
from parallel.attention import PackedAttention
from parallel.device import capabilities
from parallel.packing import PackedSequences
from parallel.rope import Rope


def rms_norm(x: Tensor, weight: Tensor, eps: float | None, zero_centered: bool) -> Tensor:
    """Return the RMSNorm of `x` [..., H] times `weight` [H], or times 1 + `weight` if the weight is centered at zero.

    1 + weight is not rounded to the dtype of the weight.
    """
    if not zero_centered:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], 1 + weight.to(wide), eps).to(x.dtype)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with its weight marked for Megatron's sequence-parallel gradient all-reduce."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and a column-parallel projection. As in Transformer Engine, the norm's weight is called `layer_norm_weight`."""

    def __init__(self, input_size: int, output_size: int, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor, *args, **kwargs):
        zero_centered = self.config.layernorm_zero_centered_gamma
        normed = rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon, zero_centered)
        return super().forward(normed, *args, **kwargs)


class PackedRotaryEmbedding(RotaryEmbedding):
    """RoPE with one row of angles for each token of the pack, so that Megatron rotates all sequences in one operation.

    The object keeps the angles of the last pack, because all layers of a virtual stage and their recomputation use them.
    """

    def __init__(self, rope: Rope) -> None:
        # Megatron moves the frequencies to the device at the first use.
        super().__init__(rope.dim, 1.0, use_cpu_initialization=True)
        self.inv_freq = rope.inv_freq()
        self._angles: tuple[Tensor, Tensor] | None = None  # (positions of the tokens of the last pack, their angles)

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, config, packed=None, **unused
    ) -> int:
        assert isinstance(packed, PackedSequences), f"expected PackedSequences, got {type(packed)}"
        self._packed = packed
        return int(packed.max_position) + 1

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, **unused) -> Tensor:
        """Return the angles [L, 1, d] for the pack that the last call of `get_rotary_seq_len` received."""
        positions = self._packed.position_ids
        if self._angles is None or self._angles[0] is not positions:
            self._angles = positions, self.get_emb(max_seq_len, offset)[positions, 0]
        return self._angles[1]


@cache
def fuse_rope_of_packs() -> None:
    """Let Megatron call Transformer Engine's fused RoPE for packs with a row of angles for each token (PackedRotaryEmbedding).

    The kernel rotates token i of [L, 1, n, d] by row i of the angles [L, 1, 1, d]. Megatron 0.19 passes [L, n, d] and [L, 1, d].
    """
    kernel = rope_utils.fused_apply_rotary_pos_emb

    def rotate(tokens: Tensor, angles: Tensor, *, interleaved: bool = False) -> Tensor:
        return kernel(tokens[:, None], angles[:, None], interleaved=interleaved)[:, 0]

    rope_utils.fused_apply_rotary_pos_emb = rotate


class MultimodalRotaryEmbedding(PackedRotaryEmbedding):
    """RoPE of image models: each pair of components rotates by the position along one of three axes (parallel.rope.rope_axes)."""

    axes: Tensor

    def __init__(self, rope: Rope, axes: Sequence[int]) -> None:
        """`axes`: for each pair of components, the axis (0, 1 or 2) whose position rotates the pair."""
        super().__init__(rope)
        self.register_buffer("axes", torch.tensor([*axes, *axes]).view(1, 1, 1, -1), persistent=False)

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, **unused) -> Tensor:
        """Return the angles [L, 1, d] for the pack that the last call of `get_rotary_seq_len` received."""
        positions = self._packed.axis_position_ids
        if positions is None:
            return super().forward(max_seq_len, offset, packed_seq)
        if self._angles is None or self._angles[0] is not positions:
            of_each_axis = self.get_emb(max_seq_len, offset)[positions, 0]  # [3, L, 1, d]
            self._angles = positions, torch.take_along_dim(of_each_axis, self.axes, 0)[0]
        return self._angles[1]


def gather_sequence(hidden: Tensor, sequence_parallel: bool, *, replicated: bool = False) -> Tensor:
    """Return the values [L, ...] of all tokens of this context-parallel rank, for an output head or an adapter.

    Under sequence parallelism, `hidden` is [L/tp, ...].

    `replicated` means that the head computes the same values on every tensor-parallel rank. Otherwise each rank computes a part
    of the outputs and a part of the gradient, and the backward pass sums the parts of the gradient.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not replicated)
    return hidden if replicated else copy_to_tensor_model_parallel_region(hidden)


def average_gradients(module: torch.nn.Module) -> None:
    """Let Megatron average the gradients of a module over the tensor-parallel ranks. Each rank computes the whole gradients.

    On GPUs, the gradients of the ranks differ, because kernels sum in no fixed order.
    """
    for parameter in module.parameters():
        parameter.average_gradients_across_tp_domain = True


class TorchSpecProvider(LocalSpecProvider):
    """Provides the torch modules of this file to Megatron, in place of Transformer Engine's modules."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False):
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention


def spec_provider() -> BackendSpecProvider:
    """Return the provider of Transformer Engine's modules if they can be used, else the provider of plain torch modules."""
    if capabilities().transformer_engine:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # slow to import

        return TESpecProvider()
    return TorchSpecProvider()


class DownProjection(torch.nn.Linear):
    """Linear layer that is replicated on every tensor-parallel rank. Each rank applies it to its part of the sequence."""

    def __init__(self, input_size: int, output_size: int, config: MLATransformerConfig) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[missing-attribute]

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        """Return (output, None), because Megatron expects a bias in the second place."""
        return super().forward(input), None


class AmplifiedRotaryEmbedding(PackedRotaryEmbedding):
    """Rotary embedding that also returns its amplitude, because Megatron's latent attention expects angles and amplitude."""

    def __init__(self, rope: Rope) -> None:
        super().__init__(rope)
        self.amplitude = rope.amplitude

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, **unused) -> tuple[Tensor, float]:
        """Return (angles [L, 1, d], amplitude); cosines and sines are multiplied by the amplitude."""
        return super().forward(max_seq_len, offset, packed_seq), self.amplitude


class PackedLatentAttention(MLASelfAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over packs, with replicated down-projections.

    Down-projections compute two low-rank vectors for each token, and up-projections compute the queries, keys and values of all
    heads from these vectors. All heads share one part of the key, and RoPE rotates this part. Without Transformer Engine,
    Megatron 0.19 splits the down-projections over tensor-parallel ranks, and the gradient of the shared part misses the heads of
    the other ranks. Here, the down-projections are replicated, and the backward pass of the sequence-parallel gather sums the
    gradient over the ranks. Without sequence parallelism, there is no such gather. So tensor parallelism needs sequence
    parallelism.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        *args,
        rotary: AmplifiedRotaryEmbedding,  # the layers of a virtual stage share it
        **kwargs,
    ) -> None:
        # Megatron's constructor needs these modules. They are replaced below.
        temporary = dict(linear_q_down_proj=ColumnParallelLinear, linear_kv_down_proj=ColumnParallelLinear)
        super().__init__(config, replace(submodules, **temporary), *args, **kwargs)
        assert config.tensor_model_parallel_size == 1 or config.sequence_parallel, (
            "latent attention with tensor parallelism needs sequence parallelism"
        )
        width = config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DownProjection(width, config.q_lora_rank, config)
        self.linear_kv_down_proj = DownProjection(width, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)
        self.rotary_pos_emb = rotary

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, type]:
        """Return exactly the modules in `submodules`. Megatron would add a query norm if queries have no down-projection."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states=None, position_ids=None, packed_seq_params=None, **kwargs
    ) -> tuple[Tensor, ...]:
        """Return query, key and value [L, n, d], and two further tensors that Megatron's forward pass expects.

        RoPE rotates the last components of query and key by each token's position.
        """
        assert isinstance(packed_seq_params, PackedSequences), (
            f"expected PackedSequences, got {type(packed_seq_params)}"
        )
        unset: Any = None  # with cu_seqlens, Megatron would count positions from the start of each sequence in the pack
        packed = replace(packed_seq_params, cu_seqlens_q=unset, cu_seqlens_kv=unset)
        return super().get_query_key_value_tensors(hidden_states, None, None, packed, **kwargs)


class PackedRouter(TopKRouter):
    """Router whose load-balancing loss is weighted by the number of real tokens in the whole pack, without padding.

    Megatron 0.19 multiplies the token count of one rank by the number of ranks. With padding, this product is wrong. Either
    Megatron has already all-reduced the count in place, so it is the sum over the ranks, or the ranks have different counts.

    The correction bias (Megatron's expert_bias), if the model has one, stays in float32 for any dtype of the model.
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


class BiasedRouter(PackedRouter):
    """Router whose logits have a bias. The bias is trained, unlike the correction bias.

    Megatron adds this bias only if all matrices of the model have biases.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.bias = torch.nn.Parameter(torch.empty(config.num_moe_experts, dtype=config.params_dtype))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[missing-attribute]


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
