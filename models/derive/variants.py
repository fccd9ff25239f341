"""Changes one config field at a time, and finds which fields decide whether a model has optional tensors.

A variant is the tiny model with another value of one field. The probes (models/derive/probes.py), which find what each tensor
does, run on the unchanged tiny model and on each variant. An optional part, such as the biases of queries, keys and values,
depends on a field in two cases: the variants with the part are exactly those in which the field is true, or exactly those in
which the field is false.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from models.derive.structure import Structure, find_structure
from models.derive.support import unsupported
from models.derive.tiny_config import class_defaults, config_class, known_fields
from models.derive.tiny_model import TinyModel
from models.hf_config import IGNORED_FIELDS

_NEVER_CHANGED = frozenset(
    [
        *(name for names in IGNORED_FIELDS.values() for name in names),
        "is_encoder_decoder",
        "add_cross_attention",
        "is_decoder",
    ]
)
PARTS = {
    "qkv_bias": ("attention", "q_bias"),
    "proj_bias": ("attention", "o_bias"),
    "qk_norms": ("attention", "q_norm"),
    "projection_norms": ("attention", "q_projection_norm"),
    "q_lora": ("latent_attention", "q_a"),
    "full_rank_q": ("latent_attention", "q"),
    "mlp_bias": ("mlp", "gate_bias"),
    "shared_experts": ("moe", "shared_gate_proj"),
}
"""Optional part -> (kind of block, a slot that only blocks with this part have)."""


@dataclass(frozen=True)
class Variant:
    """The structure of the tiny model, unchanged or with another value of one field."""

    fields: dict[str, Any]  # all fields of the config
    changed_field: str | None  # name of the changed field; None: no field is changed
    structure: Structure
    changes_outputs: bool = True  # whether logits or tensor names differ from those of the unchanged model

    @property
    def problems(self) -> list[str]:
        """One line for each operator of this model that a derived family cannot have."""
        return [*self.structure.problems, *unsupported(self.structure, self.fields)]


@dataclass(frozen=True)
class Condition:
    """When a part is present: always, never, or depending on the truth value of a field."""

    always: bool | None = None  # None: it depends on `field`
    field: str | None = None
    negated: bool = False  # whether the part is present if the field is false

    def code(self) -> str:
        """Return the condition as a Python expression for the family file."""
        if self.field is None:
            return str(self.always)
        return f'{"not " if self.negated else ""}config["{self.field}"]'


def changed_values(fields: dict[str, Any]) -> dict[str, Any]:
    """Return another value for each field that may decide about the structure of the model."""
    known = known_fields(fields)
    own = class_defaults(config_class(fields)).keys() | fields.keys()
    inherited = class_defaults(PreTrainedConfig).keys() - {"tie_word_embeddings"} - fields.keys()
    values: dict[str, Any] = {
        name: not known[name] for name in sorted(own - inherited - _NEVER_CHANGED) if isinstance(known.get(name), bool)
    }
    if "q_lora_rank" in known:
        values["q_lora_rank"] = None if known["q_lora_rank"] else 22
    if "first_k_dense_replace" in known:
        values["first_k_dense_replace"] = (known["first_k_dense_replace"] or 0) + 1
    if known.get("decoder_sparse_step") is not None:
        values["decoder_sparse_step"] = 3 - min(known["decoder_sparse_step"], 2)
    if isinstance(with_rope := known.get("no_rope_layers"), list):
        values["no_rope_layers"] = [1 - has_rope for has_rope in with_rope]
    if "mlp_only_layers" in known:
        values["mlp_only_layers"] = [0, 2]
    return values


def make_variants(fields: dict[str, Any]) -> list[Variant]:
    """Probe the tiny model that has `fields`. Then change one field at a time, and probe each variant that can be built.

    Raises:
        ValueError: transformers cannot build the tiny model.
    """
    try:
        model = TinyModel(fields)
    except Exception as error:  # a model of transformers may raise anything
        raise ValueError(f"transformers cannot build the tiny model: {type(error).__name__}: {error}") from error
    variants = [Variant(fields, None, find_structure(model))]
    for name, value in changed_values(fields).items():
        try:
            changed = TinyModel(fields | {name: value})
        except Exception:  # a config class may refuse any value, and a model may fail in any way; no conclusion follows
            continue
        same_names = changed.tensors.keys() == model.tensors.keys()
        changes = not (same_names and changed.logits.equal(model.logits))
        structure = find_structure(changed) if changes else variants[0].structure
        variants.append(Variant(fields | {name: value}, name, structure, changes))
    return variants


def condition_of(part: str, variants: list[Variant]) -> Condition | None:
    """Return the condition under which the part is present. None: no single field decides this.

    Variants with problems are ignored, except the unchanged model, which is the first.
    """
    kind, slot = PARTS[part]
    runs = [
        (variant.fields, any(slot in match.slots for match in variant.structure.matches(kind)))
        for variant in variants
        if variant is variants[0] or not variant.problems
    ]
    present = {is_present for _, is_present in runs}
    if len(present) == 1:
        return Condition(always=present.pop())
    for name in (variant.changed_field for variant in variants if variant.changed_field):
        values = [bool(_value(fields, name)) for fields, _ in runs]
        if values == [is_present for _, is_present in runs]:
            return Condition(field=name)
        if values == [not is_present for _, is_present in runs]:
            return Condition(field=name, negated=True)
    return None


def _value(fields: dict[str, Any], name: str) -> Any:
    return known_fields(fields).get(name)


def normalization_condition(variants: list[Variant]) -> Condition | None:
    """Return the condition under which the router's weights of the chosen experts sum to 1. None: no field explains it."""
    runs = [
        (variant, match.options["routing"].normalized)
        for variant in variants
        for match in variant.structure.matches("moe")[:1]
    ]
    values = {normalized for _, normalized in runs}
    if len(values) == 1:
        return Condition(always=values.pop())
    names = [v.changed_field for v in variants if v.changed_field]
    return next(
        (Condition(field=n) for n in names if all(bool(_value(v.fields, n)) == normalized for v, normalized in runs)),
        None,
    )


# Rules by which a config says which layers have experts. A rule has the fields that it needs, the code of `moe_layer_freq`, and a
# function that returns for the fields `f` and a layer `n` whether the layer has experts.
MOE_LAYERS = (
    ((), "[1] * num_layers", lambda f, n: True),
    (
        ("first_k_dense_replace",),
        '[int(n >= config["first_k_dense_replace"]) for n in range(num_layers)]',
        lambda f, n: n >= f["first_k_dense_replace"],
    ),
    (
        ("mlp_only_layers", "decoder_sparse_step"),
        '[int(n not in (config["mlp_only_layers"] or []) and (n + 1) % config["decoder_sparse_step"] == 0) '
        "for n in range(num_layers)]",
        lambda f, n: n not in (f["mlp_only_layers"] or []) and (n + 1) % f["decoder_sparse_step"] == 0,
    ),
)


def moe_layers_code(variants: list[Variant]) -> str | None:
    """Return the code of `moe_layer_freq`, or None if no known rule gives the layers with experts in all variants."""
    for needed, code, has_experts in MOE_LAYERS:
        known = [known_fields(v.fields) for v in variants]
        if all(name in fields for name in needed for fields in known) and all(
            v.structure.moe_layers == [n for n in range(len(v.structure.layers)) if has_experts(fields, n)]
            for v, fields in zip(variants, known, strict=True)
        ):
            return code
    return None
