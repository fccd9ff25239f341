"""Mamba-2 layers (Dao and Gu, 2024, arXiv:2405.21060) for packs, as in Nemotron-H.

A Mamba-2 layer projects each token to gates, values (x in the paper), keys (B), queries (C), and one number for each head. The
heads form groups, and all heads of a group have the same key and query. The step (Delta) of a head, the softplus of its number,
determines the weight of the update of the state and, multiplied by a learned rate, the decay of the state. A short convolution
mixes the values, keys and queries of neighboring tokens. The output of the recurrence, plus a learned multiple of the value, is
multiplied by the gates and then normalized over all heads of a group.

Megatron 0.19 has such a layer (megatron.core.ssm.mamba_mixer). It cannot compute packs with shared prompts, because it gives no
initial state to a sequence, and it needs the packages mamba-ssm and causal-conv1d, and a GPU. So PackedMamba2 does not derive
from it. The fields of the config are Megatron's.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from parallel.recurrent_layer import CONVOLVED, GATE, NUMBERS, PackedRecurrence
from parallel.segment_recurrence import RecurrencePlan, causal_convolution, selective_scan


class PackedMamba2(PackedRecurrence):
    """Mamba-2 layer over packs. Each tensor-parallel rank has a part of the groups of heads, so it normalizes whole groups.

    A group has the rows of its gates, its values, its key, its query, and one number for each of its heads.
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
        columns = {GATE: values, CONVOLVED: values + 2 * self.state_dim, NUMBERS: per_group}
        channels = groups // tp * columns[CONVOLVED]
        bias = dict(conv_bias=torch.zeros(channels)) if conv_bias else {}
        parameters = dict(conv_weight=torch.zeros(channels, 1, config.linear_conv_kernel_dim)) | bias
        parameters |= dict(dt_bias=torch.ones(self.heads), A_log=torch.zeros(self.heads), D=torch.ones(self.heads))
        parameters |= dict(norm_weight=torch.ones(self.heads * self.head_dim))
        return groups, columns, all_heads * self.head_dim, parameters

    def _recur(self, convolved: Tensor, numbers: Tensor, plan: RecurrencePlan) -> Tensor:
        bias = getattr(self, "conv_bias", None)
        by_group = F.silu(causal_convolution(convolved, self.conv_weight, plan, bias)).unflatten(1, (self.groups, -1))
        values = self.heads // self.groups * self.head_dim
        value, key, query = by_group.split([values, self.state_dim, self.state_dim], dim=-1)
        wide = torch.promote_types(numbers.dtype, torch.float32)
        value = value.to(wide).contiguous().view(-1, self.heads, self.head_dim)
        step = F.softplus(numbers.to(wide) + self.dt_bias)
        log_decay = -self.A_log.to(wide).exp() * step
        output = selective_scan(query, key, value, log_decay, step, plan)
        return (output + self.D[:, None] * value).to(numbers.dtype)

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Return the RMSNorm of `output` [L, heads, channels] times the gates, over all heads of each group."""
        gated = (output * F.silu(gate)).view(len(output), self.groups, -1)
        normed = F.rms_norm(gated, gated.shape[-1:], None, self.config.layernorm_epsilon)
        return normed.flatten(1).to(output.dtype) * self.norm_weight
