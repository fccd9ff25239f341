"""Gated delta nets (Yang et al., 2024, arXiv:2412.06464) for packs, as in Qwen3-Next and Qwen3.5.

A gated delta net takes the place of self-attention in a layer. Its state has a constant size, so its work grows linearly with the
length of a sequence. It projects each token to queries, keys, values, output gates, and two numbers for each value head. Beta
determines the weight of the update of the state, and alpha determines the decay of the state. A short convolution mixes the
queries, keys and values of neighboring tokens. Then the gated delta rule computes the outputs, which are normalized and
multiplied by the gates.

Megatron 0.19 has such a layer (megatron.core.ssm.gated_delta_net). It cannot compute packs with shared prompts, because it gives
no initial state to a sequence. It also needs the package flash-linear-attention, a GPU, and at least tp x cp key heads. Its
constructor and its forward pass would both have to be replaced, so PackedGatedDeltaNet does not derive from it. The fields of the
config are Megatron's.
"""

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
from parallel.segment_recurrence import RecurrencePlan, causal_convolution, gated_delta_rule

_SHARDED = {"conv_weight": 0, "dt_bias": 0, "A_log": 0}  # parameter -> dim that tensor parallelism shards


class PlanOfLastPack:
    """Keeps the plan of the last pack, because all gated delta nets of a virtual stage and their recomputation use it."""

    def __init__(self, kernel: int) -> None:
        self.kernel = kernel
        self._last: tuple[PackedSequences, RecurrencePlan] | None = None

    def __call__(self, pack: PackedSequences, device: torch.device) -> RecurrencePlan:
        if self._last is None or self._last[0] is not pack:
            self._last = pack, RecurrencePlan.of(pack, self.kernel, device)
        return self._last[1]


class PackedGatedDeltaNet(MegatronModule):
    """Gated delta net over packs. Each tensor-parallel rank has a part of the heads.

    Several value heads share a key head. The rows of the input projection are ordered by key heads. Each key head has the rows of
    its query, its key, its values, its gates, and one beta and one alpha for each of its value heads. So the rows of a
    tensor-parallel rank are consecutive. Under context parallelism, every rank gathers the projections of the whole pack and
    computes the convolution and the recurrence for all tokens, because ranks that split a recurrence along the sequence would
    have to wait for each other. Each rank computes the gates, the norm and the matrices only for its own tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        input_linear: type,  # column-parallel matrix that contains the norm before the layer
        output_linear: type,  # row-parallel matrix
        plans: PlanOfLastPack,
        pg_collection: ProcessGroupCollection,
        **unused,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.plans = layer_number, plans
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        tp = self.tp_group.size()
        self.key_heads, self.value_heads = config.linear_num_key_heads // tp, config.linear_num_value_heads // tp
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.values_per_key = self.value_heads // self.key_heads
        # columns of one key head in the input projection: queries, keys and values; gates; betas and alphas
        values = self.values_per_key * self.value_dim
        self.columns = [2 * self.key_dim + values, values, 2 * self.values_per_key]
        channels, dtype = self.key_heads * self.columns[0], config.params_dtype
        self.conv_weight = Parameter(torch.zeros(channels, 1, config.linear_conv_kernel_dim, dtype=dtype))
        self.dt_bias = Parameter(torch.ones(self.value_heads, dtype=dtype))
        self.A_log = Parameter(torch.zeros(self.value_heads, dtype=dtype))
        self.norm_weight = Parameter(torch.ones(self.value_dim, dtype=dtype))
        for name, dim in _SHARDED.items():
            set_tensor_model_parallel_attributes(getattr(self, name), True, dim, 1)
        matrix = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        width = config.linear_num_value_heads * self.value_dim
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
            config.linear_num_key_heads * sum(self.columns),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **matrix,
        )

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
        by_head = projected.view(-1, self.key_heads, sum(self.columns))
        qkv, gate, beta_alpha = by_head.split(self.columns, dim=-1)
        rows = torch.cat([qkv.flatten(1), beta_alpha.flatten(1)], dim=1)
        if self.cp_group.size() > 1:
            rows = gather_from_sequence_parallel_region(rows, True, self.cp_group)
        qkv, beta_alpha = plan.select_tokens(rows).split([len(self.conv_weight), 2 * self.value_heads], dim=1)
        output = plan.to_rows(self._recur(qkv, beta_alpha, plan))
        gate = gate.contiguous().view(output.shape).to(torch.promote_types(gate.dtype, torch.float32))
        output = (self._norm(output) * F.silu(gate)).to(projected.dtype)
        output, _ = self.linear_proj(output.view(*projected.shape[:2], -1))
        return output, None

    def _recur(self, qkv: Tensor, beta_alpha: Tensor, plan: RecurrencePlan) -> Tensor:
        """Return the outputs [S, value heads, value channels] of the convolution and the gated delta rule."""
        qkv = F.silu(causal_convolution(qkv, self.conv_weight, plan)).unflatten(1, (self.key_heads, -1))
        query, key, value = qkv.split([self.key_dim, self.key_dim, self.columns[1]], dim=-1)
        query, key = (x.repeat_interleave(self.values_per_key, dim=1) for x in (query, key))
        beta, alpha = beta_alpha.unflatten(1, (self.key_heads, 2, -1)).unbind(2)
        wide = torch.promote_types(alpha.dtype, torch.float32)
        rate = F.softplus(alpha.flatten(1).to(wide) + self.dt_bias)
        log_decay = -self.A_log.to(wide).exp() * rate
        value = value.contiguous().view(-1, self.value_heads, self.value_dim)
        return gated_delta_rule(query, key, value, log_decay, beta.flatten(1).sigmoid(), plan)

    def _norm(self, x: Tensor) -> Tensor:
        """Return the RMSNorm of each head of `x` [L, value heads, value channels]. It multiplies by weight, not by 1 + weight.

        All tensor-parallel ranks have the same weight, and each rank has other heads. So the backward pass sums the gradients of
        the weight over these ranks.
        """
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        return F.rms_norm(x, x.shape[-1:], weight, self.config.layernorm_epsilon)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata=None) -> dict:
        """Return the parameters as Megatron's checkpoints need them."""
        assert metadata is not None, "the checkpoint passes its metadata"
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        groups = dict(tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
        state = make_sharded_tensors_for_checkpoint(own, prefix, _SHARDED, sharded_offsets, **groups)
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state
