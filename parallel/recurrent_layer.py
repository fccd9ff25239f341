"""Base of layers with a recurrence over packs: gated delta nets (parallel.gated_delta_net) and Mamba-2 (parallel.mamba2).

Such a layer takes the place of self-attention. Its state has a constant size, so its work grows linearly with the length of a
sequence. It projects each token to inputs of the recurrence, a gate, and a few numbers for each head. A short convolution mixes
the inputs of neighboring tokens. Then the recurrence computes the outputs, which are normalized, gated and projected.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn import Parameter

from parallel.packing import PackedSequences
from parallel.segment_recurrence import RecurrencePlan

CONVOLVED, GATE, NUMBERS = "convolved", "gate", "numbers"  # keys of `columns`, see PackedRecurrence


class PlanOfLastPack:
    """Keeps the plan of the last pack, because all recurrent layers of a virtual stage and their recomputation use it."""

    def __init__(self, kernel: int) -> None:
        self.kernel = kernel
        self._last: tuple[PackedSequences, RecurrencePlan] | None = None

    def __call__(self, pack: PackedSequences, device: torch.device) -> RecurrencePlan:
        if self._last is None or self._last[0] is not pack:
            self._last = pack, RecurrencePlan.of(pack, self.kernel, device)
        return self._last[1]


class PackedRecurrence(MegatronModule):
    """Layer with a recurrence over packs. Each tensor-parallel rank has a part of the groups of heads.

    The rows of the input projection are ordered by groups. `columns` says which rows a group has, in order: the inputs of the
    convolution and the recurrence (CONVOLVED), the gates (GATE), and the numbers of its heads (NUMBERS). So the rows of a
    tensor-parallel rank are consecutive. Under context parallelism, every rank gathers the projections of the whole pack and
    computes the convolution and the recurrence for all tokens, because ranks that split a recurrence along the sequence would
    have to wait for each other. Each rank computes the gates, the norm and the matrices only for its own tokens.
    """

    sharded: Mapping[str, int]  # parameter of the layer itself -> dim that tensor parallelism shards

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        input_linear: type,  # column-parallel matrix that contains the norm before the layer
        output_linear: type,  # row-parallel matrix
        plans: PlanOfLastPack,
        pg_collection: ProcessGroupCollection,
        **sizes: Any,  # see _set_sizes
    ) -> None:
        super().__init__(config)
        self.layer_number, self.plans = layer_number, plans
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        groups, self.columns, width, parameters = self._set_sizes(config, **sizes)
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
            groups * sum(self.columns.values()),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **matrix,
        )

    def _set_sizes(self, config: TransformerConfig, **sizes: Any) -> tuple[int, dict[str, int], int, dict[str, Tensor]]:
        """Return what the model has in this layer, and set the attributes that `_recur` and `_gated_norm` need.

        The result is: the number of groups of heads, without tensor parallelism; `columns`; the number of elements of the outputs
        of all heads for one token; and the initial values of this rank's parameters. The order of the parameters is that of
        Megatron's flat buffers.
        """
        raise NotImplementedError

    def _recur(self, convolved: Tensor, numbers: Tensor, plan: RecurrencePlan) -> Tensor:
        """Return the outputs [S, heads, channels] of the convolution and the recurrence for all tokens of the pack.

        `convolved`: [S, groups * columns[CONVOLVED]]. `numbers`: [S, groups * columns[NUMBERS]].
        """
        raise NotImplementedError

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Return the normalized outputs times the gates, in float32 or a wider dtype; `output` and `gate` have one shape."""
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
        by_group = projected.view(-1, self.groups, sum(self.columns.values()))
        parts = dict(zip(self.columns, by_group.split(list(self.columns.values()), dim=-1), strict=True))
        rows = torch.cat([parts[CONVOLVED].flatten(1), parts[NUMBERS].flatten(1)], dim=1)
        if self.cp_group.size() > 1:
            rows = gather_from_sequence_parallel_region(rows, True, self.cp_group)
        widths = [self.groups * self.columns[name] for name in (CONVOLVED, NUMBERS)]
        convolved, numbers = plan.select_tokens(rows).split(widths, dim=1)
        output = plan.to_rows(self._recur(convolved, numbers, plan))
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
