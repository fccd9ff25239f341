"""Gated delta nets (Yang et al., 2024, arXiv:2412.06464) for packs, as in Qwen3-Next and Qwen3.5.

A gated delta net projects each token to queries, keys, values, output gates, and two numbers for each value head. Beta
determines the weight of the update of the state, and alpha determines the decay of the state. A short convolution mixes the
queries, keys and values of neighboring tokens. Then the gated delta rule computes the outputs, which are normalized and
multiplied by the gates.

Megatron 0.19 has such a layer (megatron.core.ssm.gated_delta_net). It cannot compute packs with shared prompts, because it gives
no initial state to a sequence. It also needs the package flash-linear-attention, a GPU, and at least tp x cp key heads. Its
constructor and its forward pass would both have to be replaced, so PackedGatedDeltaNet does not derive from it. The fields of the
config are Megatron's.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from parallel.recurrent_layer import CONVOLVED, GATE, NUMBERS, PackedRecurrence
from parallel.segment_recurrence import RecurrencePlan, causal_convolution, gated_delta_rule


class PackedGatedDeltaNet(PackedRecurrence):
    """Gated delta net over packs. Each tensor-parallel rank has a part of the heads.

    Several value heads share a key head, and form a group with this key head. A group has the rows of its query, its key, its
    values, its gates, and one beta and one alpha for each of its value heads.
    """

    sharded: ClassVar = {"conv_weight": 0, "dt_bias": 0, "A_log": 0}

    def _set_sizes(self, config: TransformerConfig, **unused) -> tuple[int, dict[str, int], int, dict[str, Tensor]]:
        tp, all_heads = self.tp_group.size(), config.linear_num_value_heads
        self.key_heads, self.value_heads = config.linear_num_key_heads // tp, all_heads // tp
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.values_per_key = self.value_heads // self.key_heads
        values = self.values_per_key * self.value_dim
        columns = {CONVOLVED: 2 * self.key_dim + values, GATE: values, NUMBERS: 2 * self.values_per_key}
        parameters = dict(
            conv_weight=torch.zeros(self.key_heads * columns[CONVOLVED], 1, config.linear_conv_kernel_dim),
            dt_bias=torch.ones(self.value_heads),
            A_log=torch.zeros(self.value_heads),
            norm_weight=torch.ones(self.value_dim),
        )
        return config.linear_num_key_heads, columns, all_heads * self.value_dim, parameters

    def _recur(self, convolved: Tensor, numbers: Tensor, plan: RecurrencePlan) -> Tensor:
        qkv = F.silu(causal_convolution(convolved, self.conv_weight, plan)).unflatten(1, (self.key_heads, -1))
        widths = [self.key_dim, self.key_dim, self.values_per_key * self.value_dim]
        query, key, value = qkv.split(widths, dim=-1)
        query, key = (x.repeat_interleave(self.values_per_key, dim=1) for x in (query, key))
        beta, alpha = numbers.unflatten(1, (self.key_heads, 2, -1)).unbind(2)
        wide = torch.promote_types(alpha.dtype, torch.float32)
        rate = F.softplus(alpha.flatten(1).to(wide) + self.dt_bias)
        log_decay = -self.A_log.to(wide).exp() * rate
        value = value.contiguous().view(-1, self.value_heads, self.value_dim)
        return gated_delta_rule(query, key, value, log_decay, beta.flatten(1).sigmoid(), plan)

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Return the RMSNorm of each head of `output` [L, value heads, value channels], times the gates.

        The norm multiplies by weight, not by 1 + weight. All tensor-parallel ranks have the same weight, and each rank has other
        heads. So the backward pass sums the gradients of the weight over these ranks.
        """
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        return F.rms_norm(output, output.shape[-1:], weight, self.config.layernorm_epsilon) * F.silu(gate)
