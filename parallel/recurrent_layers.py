"""Layers with a recurrence over packs: gated delta nets (Qwen3-Next, Qwen3.5) and Mamba-2 (Nemotron-H).

Such a layer takes the place of self-attention. Its state has a constant size, so its work grows linearly with the length of a
sequence. It projects each token to inputs of the recurrence, a gate, and a few numbers for each head. A short convolution mixes
the inputs of neighboring tokens. Then the recurrence computes the outputs, which are normalized, gated and projected.

Megatron 0.19 has both layers (megatron.core.ssm). They cannot compute packs with shared prompts, because they give no initial
state to a sequence. They also need a GPU and the packages flash-linear-attention, mamba-ssm and causal-conv1d, and the gated
delta net needs at least tp x cp key heads. Their constructors and their forward passes would all have to be replaced, so the
classes of this module do not derive from them. The fields of the config are Megatron's.

In shapes, S is the number of real tokens of the pack, L is the number of tokens of this context-parallel rank (padding
included), and H is the hidden size.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn import Parameter

from parallel.packing import PackedSequences
from parallel.segment_recurrence import RecurrencePlan, causal_convolution, gated_delta_rule, selective_scan

CONVOLVED, GATE, HEAD_SCALARS = "convolved", "gate", "head_scalars"  # keys of `PackedRecurrence.rows_per_group`


class RecurrencePlanCache:
    """Keeps the plan of the last pack.

    All recurrent layers of a virtual stage use the same plan, in the forward pass and in a recomputation.
    """

    def __init__(self, conv_width: int) -> None:
        """`conv_width`: number of tokens that the convolution reads for one token."""
        self.conv_width = conv_width
        self._last: tuple[PackedSequences, RecurrencePlan] | None = None

    def __call__(self, pack: PackedSequences, device: torch.device) -> RecurrencePlan:
        if self._last is None or self._last[0] is not pack:
            self._last = pack, RecurrencePlan.of(pack, self.conv_width, device)
        return self._last[1]


class PackedRecurrence(MegatronModule):
    """Layer with a recurrence over packs. Each tensor-parallel rank has a part of the groups of heads.

    The rows of the input projection are ordered by groups, so the rows of a tensor-parallel rank are consecutive. A group has
    three kinds of rows: for the inputs of the convolution and the recurrence (CONVOLVED), for the gates (GATE), and for the
    scalars of its heads (HEAD_SCALARS). `rows_per_group` maps each kind to its number of rows in a group, in the order of the
    rows.

    Under context parallelism, every rank gathers the projections of the whole pack and computes the convolution and the
    recurrence for all tokens, because ranks that split a recurrence along the sequence would have to wait for each other. Each
    rank computes the input and output projections, the gates and the norm only for its own tokens.
    """

    sharded: ClassVar[Mapping[str, int]]  # parameter of the layer itself -> dim that tensor parallelism shards

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        input_linear: type,  # column-parallel matrix that contains the norm before the layer
        output_linear: type,  # row-parallel matrix
        plans: RecurrencePlanCache,
        pg_collection: ProcessGroupCollection,
        **sizes: Any,  # arguments for _set_sizes: conv_bias (whether the convolution has a bias)
    ) -> None:
        super().__init__(config)
        self.layer_number, self.plans = layer_number, plans
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        groups, self.rows_per_group, width, parameters = self._set_sizes(config, **sizes)
        self.groups = groups // self.tp_group.size()
        for name, value in parameters.items():
            setattr(self, name, Parameter(value.to(config.params_dtype)))
            if name in self.sharded:
                set_tensor_model_parallel_attributes(getattr(self, name), True, self.sharded[name], 1)
        matrix = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.linear_proj = output_linear(
            width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **matrix,
        )
        self.linear_in = input_linear(
            config.hidden_size,
            groups * sum(self.rows_per_group.values()),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **matrix,
        )

    def _set_sizes(self, config: TransformerConfig, **sizes: Any) -> tuple[int, dict[str, int], int, dict[str, Tensor]]:
        """Return the sizes and the parameters of this layer, and set the attributes that `_recur` and `_gated_norm` need.

        The result is: the number of groups of heads on all ranks together; `rows_per_group`; the number of elements of the
        outputs of all heads for one token; and a dict of the initial values of this rank's parameters. The order of the dict
        determines the order of the parameters in Megatron's flat buffers.
        """
        raise NotImplementedError

    def _recur(self, convolved: Tensor, head_scalars: Tensor, plan: RecurrencePlan) -> Tensor:
        """Return the outputs [S, heads, channels] of the convolution and the recurrence for all tokens of the pack.

        `convolved`: [S, groups * rows_per_group[CONVOLVED]]. `head_scalars`: [S, groups * rows_per_group[HEAD_SCALARS]].
        """
        raise NotImplementedError

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Apply the norm and the gates to `output`, in the order that the model needs. `gate` has the shape of `output`."""
        raise NotImplementedError

    def forward(
        self, hidden_states: Tensor, *args, packed_seq_params: PackedSequences | None = None, **unused
    ) -> tuple[Tensor, None]:
        """Return (output [L, 1, H], None) for the hidden states of the pack `packed_seq_params`.

        With sequence parallelism, hidden states and outputs are [L/tp, 1, H].
        """
        pack = packed_seq_params
        assert isinstance(pack, PackedSequences), f"expected PackedSequences, got {type(pack)}"
        plan = self.plans(pack, hidden_states.device)
        projected, _ = self.linear_in(hidden_states)
        by_group = projected.view(-1, self.groups, sum(self.rows_per_group.values()))
        parts = dict(zip(self.rows_per_group, by_group.split(list(self.rows_per_group.values()), dim=-1), strict=True))
        # here, a row is a token of this rank
        rows = torch.cat([parts[CONVOLVED].flatten(1), parts[HEAD_SCALARS].flatten(1)], dim=1)
        if self.cp_group.size() > 1:
            rows = gather_from_sequence_parallel_region(rows, True, self.cp_group)
        widths = [self.groups * self.rows_per_group[name] for name in (CONVOLVED, HEAD_SCALARS)]
        convolved, head_scalars = plan.select_tokens(rows).split(widths, dim=1)
        output = plan.to_rows(self._recur(convolved, head_scalars, plan))
        gate = parts[GATE].contiguous().view(output.shape)
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
        output = self._gated_norm(output, gate).to(projected.dtype)
        output, _ = self.linear_proj(output.view(*projected.shape[:2], -1))
        return output, None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata=None) -> dict:
        """Return the parameters as Megatron's checkpoints need them."""
        assert metadata is not None, "the checkpoint passes its metadata"
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        state = make_sharded_tensors_for_checkpoint(own, prefix, self.sharded, sharded_offsets, **groups)
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state


class PackedGatedDeltaNet(PackedRecurrence):
    """Gated delta net over packs (Yang et al., 2024, arXiv:2412.06464). Each tensor-parallel rank has a part of the heads.

    The layer projects each token to queries, keys, values, output gates, and two numbers for each value head, beta and alpha.
    Beta determines the weight of the update of the state. Alpha determines the decay: the state is multiplied by the factor
    exp(-exp(A_log) softplus(alpha + dt_bias)), with learned A_log and dt_bias for each value head. Several value heads share a
    key head, and form a group with this key head. A group has the rows of its query, its key, its values, its gates, and one
    beta and one alpha for each of its value heads.
    """

    sharded = dict.fromkeys(("conv_weight", "dt_bias", "A_log"), 0)

    def _set_sizes(self, config: TransformerConfig, **unused) -> tuple[int, dict[str, int], int, dict[str, Tensor]]:
        tp, all_heads = self.tp_group.size(), config.linear_num_value_heads
        self.key_heads, self.value_heads = config.linear_num_key_heads // tp, all_heads // tp
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.values_per_key = self.value_heads // self.key_heads
        values = self.values_per_key * self.value_dim
        rows_per_group = {CONVOLVED: 2 * self.key_dim + values, GATE: values, HEAD_SCALARS: 2 * self.values_per_key}
        parameters = dict(
            conv_weight=torch.zeros(self.key_heads * rows_per_group[CONVOLVED], 1, config.linear_conv_kernel_dim),
            dt_bias=torch.ones(self.value_heads),
            A_log=torch.zeros(self.value_heads),
            norm_weight=torch.ones(self.value_dim),
        )
        return config.linear_num_key_heads, rows_per_group, all_heads * self.value_dim, parameters

    def _recur(self, convolved: Tensor, head_scalars: Tensor, plan: RecurrencePlan) -> Tensor:
        qkv = F.silu(causal_convolution(convolved, self.conv_weight, plan)).unflatten(1, (self.key_heads, -1))
        widths = [self.key_dim, self.key_dim, self.values_per_key * self.value_dim]
        query, key, value = qkv.split(widths, dim=-1)
        query, key = (x.repeat_interleave(self.values_per_key, dim=1) for x in (query, key))
        beta, alpha = head_scalars.unflatten(1, (self.key_heads, 2, -1)).unbind(2)
        wide = torch.promote_types(alpha.dtype, torch.float32)
        rate = F.softplus(alpha.flatten(1).to(wide) + self.dt_bias)
        log_decay = -self.A_log.to(wide).exp() * rate
        value = value.contiguous().view(-1, self.value_heads, self.value_dim)
        return gated_delta_rule(query, key, value, log_decay, beta.flatten(1).sigmoid(), plan)

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Return the RMSNorm of each head of `output` [L, value heads, value channels], times the gates.

        The norm multiplies by weight, not by 1 + weight. All tensor-parallel ranks have the same weight, but different heads.
        So the backward pass sums the gradients of the weight over these ranks.
        """
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        return F.rms_norm(output, output.shape[-1:], weight, self.config.layernorm_epsilon) * F.silu(gate)


class PackedMamba2(PackedRecurrence):
    """Mamba-2 layer over packs (Dao and Gu, 2024, arXiv:2405.21060). Each tensor-parallel rank has a part of the groups of heads.

    The layer projects each token to gates, values (x in the paper), keys (B), queries (C), and one number for each head. All
    heads of a group have the same key and query. The step (Delta) of a head, softplus(number + dt_bias), is the weight of the
    update of the state. Before the update, the state is multiplied by exp(-exp(A_log) * step), where A_log is learned. The
    layer adds D times the value, where D is learned, to the output of the recurrence. It then multiplies the sum by the gate,
    and normalizes the product over all heads of a group. A group has the rows of its gates, its values, its key, its query, and
    one number for each of its heads.
    """

    sharded = dict.fromkeys(("conv_weight", "conv_bias", "dt_bias", "A_log", "D", "norm_weight"), 0)

    def _set_sizes(
        self, config: TransformerConfig, *, conv_bias: bool, **unused
    ) -> tuple[int, dict[str, int], int, dict[str, Tensor]]:
        """Return the sizes of the layer. `conv_bias`: whether the convolution has a bias."""
        tp, all_heads, groups = self.tp_group.size(), config.mamba_num_heads, config.mamba_num_groups
        assert all_heads is not None, "the model family sets the number of heads"
        self.heads, self.head_dim, self.state_dim = all_heads // tp, config.mamba_head_dim, config.mamba_state_dim
        per_group = all_heads // groups
        values = per_group * self.head_dim
        rows_per_group = {GATE: values, CONVOLVED: values + 2 * self.state_dim, HEAD_SCALARS: per_group}
        channels = groups // tp * rows_per_group[CONVOLVED]
        bias = dict(conv_bias=torch.zeros(channels)) if conv_bias else {}
        parameters = dict(conv_weight=torch.zeros(channels, 1, config.linear_conv_kernel_dim)) | bias
        parameters |= dict(dt_bias=torch.ones(self.heads), A_log=torch.zeros(self.heads), D=torch.ones(self.heads))
        parameters |= dict(norm_weight=torch.ones(self.heads * self.head_dim))
        return groups, rows_per_group, all_heads * self.head_dim, parameters

    def _recur(self, convolved: Tensor, head_scalars: Tensor, plan: RecurrencePlan) -> Tensor:
        bias = getattr(self, "conv_bias", None)
        by_group = F.silu(causal_convolution(convolved, self.conv_weight, plan, bias)).unflatten(1, (self.groups, -1))
        values = self.heads // self.groups * self.head_dim
        value, key, query = by_group.split([values, self.state_dim, self.state_dim], dim=-1)
        wide = torch.promote_types(head_scalars.dtype, torch.float32)
        value = value.to(wide).contiguous().view(-1, self.heads, self.head_dim)
        step = F.softplus(head_scalars.to(wide) + self.dt_bias)
        log_decay = -self.A_log.to(wide).exp() * step
        output = selective_scan(query, key, value, log_decay, step, plan)
        return (output + self.D[:, None] * value).to(head_scalars.dtype)

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Multiply `output` [L, heads, channels] by the gates, and return the RMSNorm of the product over each group of heads."""
        gated = (output * F.silu(gate)).view(len(output), self.groups, -1)
        normed = F.rms_norm(gated, gated.shape[-1:], None, self.config.layernorm_epsilon)
        return normed.flatten(1).to(output.dtype) * self.norm_weight
