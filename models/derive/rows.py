"""Writes the table of a model family from what the probes (models/derive/probes.py) found.

A slot is the role of a tensor in a formula, such as "q" in the formula of attention. The probes find the tensor in each slot. A
row of the table maps a Megatron parameter to the tensors in one or several slots. The rows of one part of the model form a group.
A group that is equal to a constant with rows in models/families, such as ATTENTION, is written as the name of this constant.
"""

from dataclasses import replace

from models.conversion.mapping import GatedMLPMapping, ParamMapping, QKVMapping, VocabMapping
from models.derive.probes import Match
from models.derive.structure import Structure
from models.families import decoder_blocks
from models.families.decoder_blocks import moe_mlp
from models.families.deepseek_v3 import LATENT_ATTENTION

_LAYER = "decoder.layers.{layer}"
_ATTENTION, _MLP = f"{_LAYER}.self_attention", f"{_LAYER}.mlp"
_EXPERT = f"{_MLP}.experts.{{expert}}"
_HIDDEN, _VOCAB = ("hidden",), (("vocab", "hidden"),)
Rows = tuple[ParamMapping, ...]
_WIDTH = 118  # characters of a line of code, without the comma at its end
_INDENT = " " * 8


def merged_slots(structures: list[Structure]) -> dict[str, dict[str, str]]:
    """Return kind of block (such as attention or mlp) -> slot -> name of the tensor, merged over all layers of all `structures`.

    There is one structure for each variant of the config. The kind "outside_layers" has the tensors outside of layers. The kind
    "norms" has the slots attention_norm, mlp_norm and moe_norm for norms before the blocks, and after_attention and after_mlp
    for norms of the outputs of the blocks.

    Raises:
        ValueError: a slot has tensors with different names in two layers.
    """
    merged: dict[str, dict[str, str]] = {}

    def add(kind: str, slots: dict[str, str]) -> None:
        known = merged.setdefault(kind, {})
        for slot, name in slots.items():
            if known.setdefault(slot, name) != name:
                raise ValueError(
                    f"tensors {known[slot]} and {name} have the same function ({slot}) in different layers"
                )

    for structure in structures:
        add("outside_layers", structure.outside_layers)
        for layer in structure.layers:
            for match in (layer.mixer, layer.mlp):
                if isinstance(match, Match):
                    add(match.kind, match.slots)
            if layer.mlp is not None and "mlp_norm" in layer.norms:
                add("norms", {f"{layer.mlp.kind}_norm": layer.norms["mlp_norm"]})
            add("norms", {place: name for place, name in layer.norms.items() if place != "mlp_norm"})
    return merged


def table_groups(slots: dict[str, dict[str, str]], optional_qk_norms: bool) -> list[tuple[str, Rows]]:
    """Return (code, rows) of each group, in the order of the table. The code names a block of rows, or lists the rows.

    `optional_qk_norms`: whether a field of the config says if queries and keys have norms.
    """
    norms = slots.get("norms", {})
    groups: list[tuple[str, Rows]] = [_named("EMBEDDINGS", _embeddings(slots["outside_layers"]))]
    if "attention" in slots:
        groups += _attention_groups(slots["attention"], norms["attention_norm"], optional_qk_norms)
    if "latent_attention" in slots:
        groups.append(_named("LATENT_ATTENTION", _latent(slots["latent_attention"], norms["attention_norm"])))
    if "mlp" in slots:
        groups += _dense_groups(slots["mlp"], norms["mlp_norm"])
    if "moe" in slots:
        groups.append(_moe_group(slots["moe"], norms["moe_norm"]))
    if "after_attention" in norms:
        names = dict(self_attn=norms["after_attention"], mlp=norms["after_mlp"])
        rows = tuple(ParamMapping(f"{_LAYER}.post_{b}_layernorm.weight", (n,), (_HIDDEN,)) for b, n in names.items())
        groups.append(_named("POST_NORMS", rows))
    return [group for group in groups if group[1]]


def _named(block: str, rows: Rows) -> tuple[str, Rows]:
    known = LATENT_ATTENTION if block == "LATENT_ATTENTION" else getattr(decoder_blocks, block)
    return (f"*{block}", rows) if rows == known else (rows_code(rows), rows)


def _embeddings(slots: dict[str, str]) -> Rows:
    rows: list[ParamMapping] = [
        VocabMapping("embedding.word_embeddings.weight", (slots["embedding"],), _VOCAB, 0),
        ParamMapping("decoder.final_layernorm.weight", (slots["final_norm"],), (_HIDDEN,)),
    ]
    if "output" in slots:
        rows.append(VocabMapping("output_layer.weight", (slots["output"],), _VOCAB, 0, present_in="untied_models"))
    return tuple(rows)


def _attention_groups(slots: dict[str, str], norm: str, optional_qk_norms: bool) -> list[tuple[str, Rows]]:
    qkv, proj = f"{_ATTENTION}.linear_qkv", f"{_ATTENTION}.linear_proj"
    norms: Rows
    rows: Rows = (
        ParamMapping(f"{qkv}.layer_norm_weight", (norm,), (_HIDDEN,)),
        QKVMapping(
            f"{qkv}.weight",
            (slots["q"], slots["k"], slots["v"]),
            (("q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
            axis=0,
        ),
        ParamMapping(f"{proj}.weight", (slots["o"],), (("hidden", "q"),), axis=1),
    )
    groups = [_named("ATTENTION", rows)]
    if "q_bias" in slots:
        names = (slots["q_bias"], slots["k_bias"], slots["v_bias"])
        shapes = (("q",), ("kv",), ("kv",))
        groups.append(_named("QKV_BIAS", (QKVMapping(f"{qkv}.bias", names, shapes, axis=0, part="qkv_bias"),)))
    if "o_bias" in slots:
        groups.append(
            _named(
                "OUTPUT_PROJECTION_BIAS",
                (ParamMapping(f"{proj}.bias", (slots["o_bias"],), (_HIDDEN,), part="proj_bias"),),
            )
        )
    if "q_projection_norm" in slots:
        norms = tuple(
            ParamMapping(f"{_ATTENTION}.{s}_projection_norm.weight", (slots[f"{s}_projection_norm"],), ((size,),), 0)
            for s, size in (("q", "q"), ("k", "kv"))
        )
        groups.append(_named("PROJECTION_NORMS", norms))
    if "q_norm" in slots:
        norms = tuple(
            ParamMapping(f"{_ATTENTION}.{s}_layernorm.weight", (slots[f"{s}_norm"],), (("head_dim",),)) for s in "qk"
        )
        code, _ = _named("QK_NORMS", norms)
        if optional_qk_norms:
            norms = tuple(replace(row, part="qk_norms") for row in norms)
            code = '*(replace(row, part="qk_norms") for row in QK_NORMS)' if code == "*QK_NORMS" else rows_code(norms)
        groups.append((code, norms))
    return groups


def _latent(slots: dict[str, str], norm: str) -> Rows:
    def row(
        megatron: str, slot: str, shape: tuple[str, ...], axis: int | None = None, part: str | None = None
    ) -> list[ParamMapping]:
        name = f"{_ATTENTION}.{megatron}.weight"
        return [ParamMapping(name, (slots[slot],), (shape,), axis, part=part)] if slot in slots else []

    return (
        ParamMapping(f"{_LAYER}.input_layernorm.weight", (norm,), (_HIDDEN,)),
        *row("linear_q_proj", "q", ("q", "hidden"), 0, "full_rank_q"),
        *row("linear_q_down_proj", "q_a", ("q_lora", "hidden"), part="q_lora"),
        *row("q_layernorm", "q_norm", ("q_lora",), part="q_lora"),
        *row("linear_q_up_proj", "q_b", ("q", "q_lora"), 0, "q_lora"),
        *row("linear_kv_down_proj", "kv_a", ("kv_a", "hidden")),
        *row("kv_layernorm", "kv_norm", ("kv_lora",)),
        *row("linear_kv_up_proj", "kv_b", ("kv_b", "kv_lora"), 0),
        *row("linear_proj", "o", ("hidden", "o"), 1),
    )


def _gated(megatron: str, names: tuple[str, ...], width: str, present_in: str, part: str | None = None) -> ParamMapping:
    return GatedMLPMapping(megatron, names, ((width, "hidden"),) * 2, axis=0, present_in=present_in, part=part)  # type: ignore[arg-type]


def _down(megatron: str, name: str, width: str, present_in: str, part: str | None = None) -> ParamMapping:
    return ParamMapping(megatron, (name,), (("hidden", width),), axis=1, present_in=present_in, part=part)  # type: ignore[arg-type]


def _dense_groups(slots: dict[str, str], norm: str) -> list[tuple[str, Rows]]:
    fc1, fc2, where = f"{_MLP}.linear_fc1", f"{_MLP}.linear_fc2", "dense_layers"
    first = (slots["gate_up"],) if "gate_up" in slots else (slots["gate"], slots["up"])
    rows: Rows = (
        ParamMapping(f"{fc1}.layer_norm_weight", (norm,), (_HIDDEN,), present_in=where),
        _gated(f"{fc1}.weight", first, "ffn", where),
        _down(f"{fc2}.weight", slots["down"], "ffn", where),
    )
    groups = [_named("DENSE_MLP", rows)]
    if "gate_bias" in slots:
        names, part = (slots["gate_bias"], slots["up_bias"]), "mlp_bias"
        biases: Rows = (
            GatedMLPMapping(f"{fc1}.bias", names, (("ffn",), ("ffn",)), axis=0, present_in=where, part=part),
            ParamMapping(f"{fc2}.bias", (slots["down_bias"],), (_HIDDEN,), present_in=where, part=part),
        )
        groups.append(_named("DENSE_MLP_BIAS", biases))
    return groups


def _moe_group(slots: dict[str, str], norm: str) -> tuple[str, Rows]:
    where = "moe_layers"
    rows: list[ParamMapping] = [
        ParamMapping(f"{_LAYER}.pre_mlp_layernorm.weight", (norm,), (_HIDDEN,), present_in=where),
        ParamMapping(f"{_MLP}.router.weight", (slots["router"],), (("experts", "hidden"),), present_in=where),
        _gated(f"{_EXPERT}.linear_fc1.weight", (slots["gate"], slots["up"]), "moe_ffn", where),
        _down(f"{_EXPERT}.linear_fc2.weight", slots["down"], "moe_ffn", where),
    ]
    arguments = moe_arguments(slots)
    if arguments and tuple(rows) == moe_mlp(*arguments):
        code = f"*moe_mlp({', '.join(map(repr, arguments))})".replace("'", '"')
        if "correction" not in slots and "shared_gate_proj" not in slots:
            return code, tuple(rows)
    if "correction" in slots:
        name, bias = f"{_MLP}.router.expert_bias", (slots["correction"],)
        rows.append(ParamMapping(name, bias, (("experts",),), present_in=where, is_buffer=True))
    if "shared_gate_proj" in slots:
        shared, part = f"{_MLP}.shared_experts.linear_fc", "shared_experts"
        rows.append(
            _gated(f"{shared}1.weight", (slots["shared_gate_proj"], slots["shared_up_proj"]), "shared_ffn", where, part)
        )
        rows.append(_down(f"{shared}2.weight", slots["shared_down_proj"], "shared_ffn", where, part))
    return _named("SIGMOID_ROUTED_MOE", tuple(rows))


def moe_arguments(slots: dict[str, str]) -> tuple[str, str, str, str] | None:
    """Return the arguments of `moe_mlp`: the name of the MoE block, and the names of gate, up and down.

    Returns None if the name of gate has not the form `...{layer}.BLOCK.experts.{expert}.NAME.weight`.
    """
    prefix, is_expert, _ = slots["gate"].partition(".experts.{expert}.")
    if not is_expert or "{layer}." not in prefix:
        return None
    names = [slots[slot].rpartition("{expert}.")[2].removesuffix(".weight") for slot in ("gate", "up", "down")]
    return prefix.rpartition("{layer}.")[2], names[0], names[1], names[2]


def rows_code(rows: Rows) -> str:
    """Return the rows as Python code, one after another, for a place with an indentation of 8 spaces."""
    return f",\n{_INDENT}".join(_row_code(row).lstrip() for row in rows)


def format_call(start: str, arguments: list[str], end: str) -> str:
    """Return a call in one line if it has at most _WIDTH characters, otherwise with one line for each argument."""
    line = f"{start}{', '.join(arguments)}{end}"
    if len(line) <= _WIDTH:
        return line
    indent = " " * (len(start) - len(start.lstrip()))
    return "\n".join([start.rstrip(), *(f"{indent}    {argument}," for argument in arguments), f"{indent}{end}"])


def _row_code(row: ParamMapping) -> str:
    arguments = [f'"{row.megatron}"', repr(row.hf), repr(row.shapes)]
    default = ParamMapping("", (), ())
    for name in ("axis", "present_in", "is_buffer", "part"):
        if getattr(row, name) != getattr(default, name):
            arguments.append(f"{name}={getattr(row, name)!r}")
    return format_call(f"{_INDENT}{type(row).__name__}(", arguments, ")").replace("'", '"')
