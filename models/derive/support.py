"""Lists operators that models.derive.probes recognizes in a model, but that a derived family cannot have.

A derived family is a family that `mrl family derive` writes. Some families in models/families have such operators, for example
sliding windows. These families are written by hand.

A `Match` is a block that the probes recognized. Its `slots` name the tensors in the formula of the block, and its `options` are
the variant of this formula.
"""

from models.derive.probes import Match
from models.derive.structure import Structure, fields_with
from models.derive.tiny_config import build_config


def unsupported(structure: Structure, fields: dict) -> list[str]:
    """Return one line for each recognized operator that a derived family cannot have."""
    lines = _rotations(structure, fields)
    for match in structure.matches("attention"):
        lines += _attention(match, fields)
    for match in structure.matches("latent_attention"):
        if match.options["attention"].rope != "interleaved":
            lines.append("latent attention: RoPE is not interleaved; mrl's latent attention rotates pairs (2i, 2i + 1)")
    for match in structure.matches("mlp"):
        lines += _mlp(match)
    for match in structure.matches("moe"):
        lines += _moe(match)
    return list(dict.fromkeys(lines))


def _rotations(structure: Structure, fields: dict) -> list[str]:
    """Return one line for each combination of rotary embeddings in different layers that a derived family cannot have."""
    options = [match.options["attention"] for match in structure.matches("attention")]
    lines = []
    if len({o.rope for o in options} - {"none"}) > 1:
        lines.append(
            "attention: RoPE rotates interleaved pairs (2i, 2i + 1) in some layers and pairs (i, i + D/2) in others"
        )
    if len({o.scaling for o in options}) > 1:
        lines.append("attention: the layers scale the queries by position in different ways")
    if any(o.rope == "none" for o in options) and not lists_layers_without_rope(structure, fields):
        lines.append(
            "attention: a layer has no rotary embedding, and the config has no field no_rope_layers that says so"
        )
    return lines


def lists_layers_without_rope(structure: Structure, fields: dict) -> bool:
    """Whether the config says in the field `no_rope_layers` which layers have a rotary embedding.

    In spite of the name, transformers writes 1 for layers with a rotary embedding, and 0 for the others.
    """
    said = getattr(build_config(fields), "no_rope_layers", None)
    found = [match.options["attention"].rope != "none" for match in structure.matches("attention")]
    return isinstance(said, list) and [bool(has_rope) for has_rope in said] == found


def _attention(match: Match, fields: dict) -> list[str]:
    options, lines = match.options["attention"], []
    if options.window is not None:
        lines.append(f"attention: sliding window ({options.window} tokens in the tiny model that this command builds)")
    if options.softcap is not None:
        lines.append(f"attention: soft cap of the scores, {options.softcap}{fields_with(fields, options.softcap)}")
    if options.scale is not None:
        factor = f"{options.scale:.6g}{fields_with(fields, options.scale)}"
        lines.append(f"attention: the factor of the scores is {factor}, not 1/sqrt(head size)")
    if options.norm == "after":
        lines.append(
            "attention: norms of queries and keys after the rotary embedding; a derived family has them before it"
        )
    if options.plus_one:
        lines.append("attention: norms of queries and keys multiply by 1 + weight")
    if "sinks" in match.slots:
        lines.append(f"attention: sinks ({match.slots['sinks']})")
    if match.options["rotated"] not in (0, match.options["head_dim"]) and "partial_rotary_factor" not in _names(fields):
        lines.append("attention: a part of each head is rotated, and no field partial_rotary_factor says how much")
    return lines


def _names(fields: dict) -> set[str]:
    return {*fields, *(fields.get("rope_parameters") or {})}


def _mlp(match: Match) -> list[str]:
    lines = []
    if "up" in match.slots and "gate" not in match.slots:
        lines.append(f"MLP: not gated, activation {match.options['activation']}; a derived family has a gated SiLU MLP")
    elif match.options["activation"] != "silu":
        lines.append(f"MLP: activation {match.options['activation']}; a derived family has silu")
    if ("gate_bias" in match.slots) != ("down_bias" in match.slots):
        lines.append("MLP: only some of its matrices have biases")
    return lines


def _moe(match: Match) -> list[str]:
    routing, lines = match.options["routing"], []
    further = [f"a scale of {routing.scale:g}"] if routing.scale != 1.0 else []
    further += ["groups of experts"] if routing.groups > 1 else []
    further += ["a correction bias"] if "correction" in match.slots else []
    if routing.score == "softmax" and further:
        lines.append(f"router: softmax scores with {' and '.join(further)}; a derived family cannot combine these")
    if routing.score == "softmax" and "shared_gate_proj" in match.slots:
        lines.append("experts: shared experts beside a softmax router")
    if routing.score == "sigmoid" and not (routing.normalized and "correction" in match.slots):
        lines.append("router: sigmoid scores without normalization or without a correction bias")
    return lines
