"""Proposes a model family: finds by experiments on tiny random models what each tensor does, and plans the family file.

The experiments are called probes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoModelForCausalLM

from models.architecture import Family
from models.derive.engine_source import EngineSource, read_engine_source
from models.derive.family_file import LATENT_ARGUMENTS, FamilyPlan
from models.derive.rows import merged_slots, table_groups
from models.derive.structure import Structure
from models.derive.support import lists_layers_without_rope
from models.derive.tiny_config import (
    EXPERT_COUNTS,
    SIZE_FIELDS,
    class_defaults,
    config_class,
    known_fields,
    shrink,
    written_fields,
)
from models.derive.tiny_model import TinyModel
from models.derive.variants import (
    PARTS,
    Condition,
    Variant,
    condition_of,
    make_variants,
    moe_layers_code,
    normalization_condition,
)
from models.families import load_family
from models.families.decoder_blocks import DEFAULTS, FULL_ATTENTION_DEFAULTS, SIGMOID_ROUTED_MOE_DEFAULTS
from models.hf_config import IGNORED_FIELDS, HFConfig
from parallel.rope import ROPE_TYPES

_IGNORED = frozenset(name for names in IGNORED_FIELDS.values() for name in names)
_SIGMOID_FIELDS = (  # fields that read_sigmoid_routed_moe reads
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "first_k_dense_replace"),
    *("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"),
)
# a family reads these fields only if the config has them, so they need no default
_WITHOUT_DEFAULT = {"rope_parameters", "rope_scaling", "sliding_window", "max_window_layers", "num_mtp_layers"}
# whether changing a field changed the tensors or logits (None: not tested) -> last part of the note about the field
_EFFECTS = {
    True: "; another value changed the tensors or the logits of the tiny model",
    False: "; another value changed neither the tensors nor the logits of the tiny model",
    None: "",
}


@dataclass
class Proposal:
    """A proposed family, what the probes found, and what is unknown."""

    config_fields: dict[str, Any]  # fields of the config
    tiny: dict[str, Any]  # fields of the tiny config, see `shrink`
    variants: list[Variant]  # the first one is the tiny config itself
    plan: FamilyPlan
    problems: list[str] = field(default_factory=list)  # one line each; any problem makes the family wrong or incomplete
    notes: list[str] = field(default_factory=list)  # one line for each restriction of the family
    # None: SGLang is not installed or does not have this architecture, or planning ended early
    engine: EngineSource | None = None

    @property
    def models_to_prove(self) -> list[tuple[str, dict[str, Any]]]:
        """(title, fields) of each model to compare: the tiny model, and variants.

        The variants are those that the family accepts and whose structure differs from that of the tiny model.
        """
        base = self.variants[0].structure
        configs = [("the tiny model", self.tiny)]
        for variant in self.variants[1:]:
            is_supported = variant.changes_outputs and not variant.problems and _differs(variant.structure, base)
            if is_supported and variant.changed_field not in self.plan.fixed_fields:
                configs.append(
                    (f"{variant.changed_field}={variant.fields[variant.changed_field or '']!r}", variant.fields)
                )
        return configs


def _differs(structure: Structure, other: Structure) -> bool:
    return (structure.layers, structure.outside_layers) != (other.layers, other.outside_layers)


def propose(config_fields: dict[str, Any]) -> Proposal:
    """Probe a random model with the structure of this config, and propose a family, which is not proven yet.

    `config_fields`: fields of config.json. The proposal names all unknown operators: computations that mrl cannot reproduce. If
    the family can be planned, the proposal also names all fields that the family does not read, except IGNORED_FIELDS.
    """
    tiny = shrink(config_fields)
    variants = make_variants(tiny)
    architecture = config_fields["architectures"][0]
    plan = FamilyPlan(architecture, [], f"{architecture}, derived from a config of transformers.")
    proposal = Proposal(config_fields, tiny, variants, plan, list(variants[0].problems))
    if config_fields.get("quantization_config"):
        proposal.problems.append(
            "quantization_config: mrl loads weights in bfloat16, float16 or float32; convert them first"
        )
    if proposal.problems and "embedding" not in variants[0].structure.outside_layers:
        return proposal
    try:
        _plan_table(proposal)
        _plan_engine(proposal)
        _plan_fields(proposal)
    except (KeyError, ValueError) as error:  # a part is missing, because a probe failed; the problems name the probe
        proposal.problems.append(f"the family could not be planned: {type(error).__name__}: {error}")
    return proposal


def _plan_table(proposal: Proposal) -> None:
    """Plan the groups of rows of the family's table, its optional parts, and the arguments of read_decoder."""
    variants, plan = proposal.variants, proposal.plan
    supported = [v.structure for v in variants if v is variants[0] or not v.problems]
    slots = merged_slots(supported)
    conditions = {
        part: _condition(part, proposal) for part, (kind, slot) in PARTS.items() if slot in slots.get(kind, {})
    }
    plan.is_latent = "latent_attention" in slots
    qk_norms = conditions.pop("qk_norms", Condition(always=False))
    if qk_norms.always is not False:
        plan.arguments.append(f"qk_layernorm={qk_norms.code()}")
    if qk_norms.field:
        conditions["qk_norms"] = qk_norms
    plan.parts = {part: condition.code() for part, condition in conditions.items()}
    if conditions.get("projection_norms", Condition(always=True)).always is not True:
        proposal.problems.append(
            "attention: norms of queries and keys over all heads together, but not in all variants"
        )
    if "shared_experts" in conditions:
        plan.parts["shared_experts"] = 'config["n_shared_experts"]'
    plan.row_groups = table_groups(slots, optional_qk_norms=qk_norms.field is not None)
    if "after_attention" in slots.get("norms", {}):
        plan.parts["post_norms"] = "True"
    plan.arguments += LATENT_ARGUMENTS if plan.is_latent else _rope_arguments(proposal)
    if "moe" in slots:
        plan.arguments += _moe_arguments(proposal)
    known = known_fields(proposal.tiny)
    plan.must_check_full_attention = "use_sliding_window" in known or (
        "layer_types" in known and not plan.is_latent and set(known["layer_types"] or []) <= {"full_attention"}
    )


def _condition(part: str, proposal: Proposal) -> Condition:
    condition = condition_of(part, proposal.variants)
    if condition is None:
        proposal.problems.append(f"part {part}: no single field says whether a model has it")
        return Condition(always=True)
    return condition


def _rope_arguments(proposal: Proposal) -> list[str]:
    """Return the arguments of read_decoder for the rotary embedding, and plan the fields of Architecture for it."""
    structure, fields = proposal.variants[0].structure, proposal.tiny
    matches = structure.matches("attention")
    options = [match.options["attention"] for match in matches]
    if any(option.rope == "interleaved" for option in options):
        proposal.plan.architecture_fields.append("interleaved_rope=True")
    if any(option.scaling is not None for option in options):
        proposal.plan.architecture_fields.append("query_scaling=read_query_scaling(config)")
    arguments = []
    if lists_layers_without_rope(structure, fields):
        arguments.append("**read_layers_without_rope(config)")
    is_partial = any(m.options["rotated"] not in (0, m.options["head_dim"]) for m in matches)  # 0: a layer without RoPE
    others = other_rope_fields(proposal, has_scaling=any(option.scaling is not None for option in options))
    if is_partial or others:
        further = ["partial=True"] * is_partial + [f"without={others!r}".replace("'", '"')] * bool(others)
        arguments.append(f"rope=config.rope({', '.join(['head_dim', *further])})")
    return arguments


def other_rope_fields(proposal: Proposal, has_scaling: bool) -> tuple[str, ...]:
    """Return the numeric keys of `rope_parameters` for which mrl's class of this rope_type has no field.

    Adds a problem for each of these keys whose value changes the logits, unless the value scales the queries.
    """
    parameters = proposal.tiny.get("rope_parameters") or {}
    kind = ROPE_TYPES.get(parameters.get("rope_type", parameters.get("type", "default")))
    if kind is None:
        return ()
    known = {"rope_type", "type", "partial_rotary_factor", *(f.name for f in dataclass_fields(kind))}
    others = {name: value for name, value in parameters.items() if name not in known and isinstance(value, int | float)}
    if not others:
        return ()
    logits = TinyModel(proposal.tiny).logits
    for name, value in others.items():
        changed = proposal.tiny | dict(rope_parameters=parameters | {name: 2 * value})
        if not TinyModel(changed).logits.equal(logits) and not (has_scaling and name == "llama_4_scaling_beta"):
            proposal.problems.append(
                f"rope_parameters: {name}={value!r} changes the logits, and no known operator uses it"
            )
    return tuple(sorted(others))


def _moe_arguments(proposal: Proposal) -> list[str]:
    variants, known = proposal.variants, known_fields(proposal.tiny)
    supported = [v for v in variants if v is variants[0] or not v.problems]
    match = variants[0].structure.matches("moe")[0]
    layers = moe_layers_code(supported)
    if match.options["routing"].score == "sigmoid":
        if missing := [name for name in _SIGMOID_FIELDS if name not in known]:
            proposal.problems.append(f"router: sigmoid scores without the config fields {', '.join(missing)}")
        if layers is None or "first_k_dense_replace" not in layers:
            proposal.problems.append("layers with experts: first_k_dense_replace does not say which they are")
        return ["**read_sigmoid_routed_moe(config)"]
    normalized = normalization_condition(supported)
    if layers is None or normalized is None:
        proposal.problems.append(
            "layers with experts: no known config field says which they are"
            if layers is None
            else "router: no known config field says whether the weights of the chosen experts are normalized to sum 1"
        )
        return []
    counts = [name for name in EXPERT_COUNTS if name != "n_routed_experts"]
    count = f"config.any_spelling({', '.join(f'{chr(34)}{n}{chr(34)}' for n in counts)})"
    width = "moe_intermediate_size" if known.get("moe_intermediate_size") else "intermediate_size"
    pre_softmax = f"not {normalized.code()}" if normalized.field else str(not normalized.always)
    return [
        f"num_moe_experts={count if 'n_routed_experts' not in known else 'config[' + repr('n_routed_experts') + ']'}",
        f'moe_ffn_hidden_size=config["{width}"]',
        f"moe_layer_freq={layers}",
        'moe_router_topk=config["num_experts_per_tok"]',
        f"moe_router_pre_softmax={pre_softmax}",
    ]


def _plan_engine(proposal: Proposal) -> None:
    plan = proposal.plan
    proposal.engine = source = read_engine_source(plan.architecture)
    if source is None:
        plan.supported_by_sglang = False
        proposal.notes.append(
            f"SGLang: the installed SGLang has no {plan.architecture}, so the family has supported_by_sglang=False: mrl sft "
            "trains the model, and mrl train only from recorded rollouts (rollout.replay)"
        )
    else:
        deciding = {part: re.findall(r'config\["(\w+)"\]', code) for part, code in plan.parts.items()}
        plan.unsupported_parts = tuple(p for p, names in deciding.items() if not all(map(source.mentions, names)))
        rows = [row for _, group in plan.row_groups for row in group if row.part not in plan.unsupported_parts]
        plan.fused_params = source.derive_fused_params({name for row in rows for name in row.hf})
    cls = AutoModelForCausalLM._model_mapping[config_class(proposal.config_fields)]
    ignored = cls._keys_to_ignore_on_load_unexpected or ()
    plan.has_mtp_layers = any(re.match(r"(model\\?\.)?layers\\?\.\d", pattern) for pattern in ignored)


def _plan_fields(proposal: Proposal) -> None:
    """Find the fields that the family does not read, except IGNORED_FIELDS.

    Let the family refuse any value of these fields that differs from the value in this config.
    """
    plan, cls = proposal.plan, config_class(proposal.config_fields)
    available = DEFAULTS | FULL_ATTENTION_DEFAULTS | SIGMOID_ROUTED_MOE_DEFAULTS | dict(head_dim=None, qk_head_dim=None)
    available |= {name: value for name, value in class_defaults(cls).items() if name not in SIZE_FIELDS}
    available |= rope_defaults(cls)
    plan.defaults = available
    family = family_from_code(plan)
    read, rest = set(), {}
    for fields in (written_fields(proposal.tiny), proposal.config_fields):
        reading = HFConfig(Path("config.json"), fields).start_reading(available)
        family.translate(reading)
        read |= reading.read_fields
        rest |= {name: fields[name] for name in fields.keys() - reading.read_fields - _IGNORED}
    influence = {v.changed_field: v.changes_outputs for v in proposal.variants}
    for name, value in sorted(rest.items()):
        effect = _EFFECTS[influence.get(name)]
        proposal.notes.append(
            f"field {name}={value!r}: the family does not read this field and refuses any other value{effect}"
        )
    plan.fixed_fields = dict(sorted(rest.items()))
    plan.defaults = {
        name: value
        for name, value in (plan.fixed_fields | available).items()
        if name in plan.fixed_fields or name in read - SIZE_FIELDS - _WITHOUT_DEFAULT
    }


def rope_defaults(cls: type) -> dict[str, Any]:
    """Return the rotary fields that transformers uses if a config has none of them."""
    parameters: Mapping[str, Any] = getattr(cls(), "rope_parameters", None) or {}
    return {n: parameters[n] for n in ("rope_theta", "partial_rotary_factor") if isinstance(parameters.get(n), float)}


def family_from_code(plan: FamilyPlan) -> Family:
    """Write the file of the plan to a temporary folder, and load the family.

    Raises:
        ValueError: the file cannot be imported.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"derived_{plan.constant.lower()}.py"
        path.write_text(plan.code())
        return load_family(f"{path}:{plan.constant}")
