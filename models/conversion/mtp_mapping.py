"""Table rows of MTP layers (multi-token prediction; DeepSeek-V3, arXiv:2412.19437, section 2.2).

An MTP layer has a norm of the hidden state, a norm of the embedding of a later token, a projection of both together, one decoder
layer, and a norm before the output layer. The decoder layer has attention, and experts if the model has experts. All MTP layers
use the output layer of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from models.conversion.mapping import ParamMapping

MTP_PREFIX = "mtp.layers."
"""Begins the names of all parameters of MTP layers in Megatron."""
DRAFT_PREFIX = "draft."
"""Begins the names of the parameters of an engine's draft model, which computes the MTP layer."""
TWO_HIDDEN = "two_hidden"  # key of Architecture.sizes: width of the projection's input
_MEGATRON_LAYER, _HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"


@dataclass(frozen=True)
class MtpNames:
    """Hugging Face names of the tensors of MTP layers.

    {depth} is the index of the MTP layer among the MTP layers, from 0, and {number} is the number of decoder layers plus {depth}.
    """

    layer: str  # the decoder layer: beginning of the names of its tensors
    embedding_norm: str
    hidden_norm: str
    projection: str
    output_norm: str
    count_fields: tuple[str, ...]  # fields of config.json with the number of MTP layers
    default_count: int  # number of MTP layers if config.json has no such field
    # beginning of the name of a tensor -> beginning of the name of its parameter in SGLang's draft model, after DRAFT_PREFIX;
    # the first entry that fits applies
    draft_names: Mapping[str, str]
    max_count: int | None = None  # largest number of MTP layers that the names describe; None: no limit
    # name of a tensor of an MTP layer -> name of the tensor of the model that it duplicates, such as the embedding
    duplicate_tensors: Mapping[str, str] = field(default_factory=dict)

    def draft_prefixes(self, num_layers: int) -> dict[str, str]:
        """Return `draft_names` of the first MTP layer: with {number} and {depth} filled in, and the prefix DRAFT_PREFIX."""
        names = dict(number=num_layers, depth=0)
        return {name.format(**names): DRAFT_PREFIX + own for name, own in self.draft_names.items()}

    def duplicates_of(self, num_layers: int, num_mtp_layers: int) -> dict[str, str]:
        """Return name of a duplicate -> name of its source, for all MTP layers of a model with `num_layers` decoder layers."""
        return {
            name.format(number=num_layers + depth, depth=depth): source
            for depth in range(num_mtp_layers)
            for name, source in self.duplicate_tensors.items()
        }

    def rows(
        self, rows_of_layers: Iterable[ParamMapping], num_layers: int, num_mtp_layers: int, num_experts: int
    ) -> Iterator[ParamMapping]:
        """Yield one row for each parameter of the MTP layers.

        `rows_of_layers`: Family.rows. Rows that are in no layer are ignored.
        """
        kinds = {"all", "attention_layers", "moe_layers" if num_experts else "dense_layers"}
        inner = [row for row in rows_of_layers if _HF_LAYER in row.hf[0] and row.present_in in kinds]
        for depth in range(num_mtp_layers):
            megatron = f"{MTP_PREFIX}{depth}"
            names = dict(number=num_layers + depth, depth=depth)
            for parameter, name in (("enorm", self.embedding_norm), ("hnorm", self.hidden_norm)):
                yield ParamMapping(f"{megatron}.{parameter}.weight", (name.format(**names),), (("hidden",),))
            shape = ("hidden", TWO_HIDDEN)
            projection = ParamMapping(
                f"{megatron}.eh_proj.weight", (self.projection.format(**names),), (shape,), axis=0
            )
            yield replace(projection, replicated_in_engine=True)
            for row in inner:
                moved = replace(
                    row,
                    megatron=row.megatron.replace(_MEGATRON_LAYER, f"{megatron}.mtp_model_layer"),
                    hf=tuple(name.replace(_HF_LAYER, self.layer.format(**names)) for name in row.hf),
                    present_in="all",
                )
                experts = range(num_experts) if "{expert}" in row.megatron else [None]
                yield from (moved.for_layer(depth, expert) for expert in experts)
            yield ParamMapping(
                f"{megatron}.final_layernorm.weight", (self.output_norm.format(**names),), (("hidden",),)
            )


_NUMBERED = "model.layers.{number}"
# DeepSeek-V3 and GLM-4.5: further decoder layers, with duplicates of the embedding and of the output layer
NUMBERED_LAYERS = MtpNames(
    layer=_NUMBERED,
    embedding_norm=f"{_NUMBERED}.enorm.weight",
    hidden_norm=f"{_NUMBERED}.hnorm.weight",
    projection=f"{_NUMBERED}.eh_proj.weight",
    output_norm=f"{_NUMBERED}.shared_head.norm.weight",
    count_fields=("num_nextn_predict_layers", "num_mtp_layers"),
    default_count=0,
    draft_names={
        **{f"{_NUMBERED}.{name}": f"model.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head")},
        f"{_NUMBERED}.": "model.decoder.",
    },
    duplicate_tensors={
        f"{_NUMBERED}.embed_tokens.weight": "model.embed_tokens.weight",
        f"{_NUMBERED}.shared_head.head.weight": "lm_head.weight",
    },
)
# Qwen3-Next and Qwen3.5: one layer, which configs of Qwen3-Next do not mention
PREFIXED_LAYER = MtpNames(
    layer="mtp.layers.{depth}",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc.weight",
    output_norm="mtp.norm.weight",
    count_fields=("mtp_num_hidden_layers",),
    default_count=1,
    draft_names={"mtp.fc": "fc", "mtp.pre_fc": "pre_fc", "mtp.": "model."},
    max_count=1,
)
