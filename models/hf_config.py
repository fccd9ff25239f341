"""Reads a Hugging Face config, and records which fields were read.

A model family must read every field that may change the logits. Every field that the family does not read must be in
IGNORED_FIELDS; otherwise, mrl raises ValueError.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parallel.rope import Rope, rope_from_parameters

IGNORED_FIELDS: dict[str, tuple[str, ...]] = {
    "class of the model, which mrl looks up in `architectures`": (
        *("model_type", "auto_map", "architectures", "is_llama_config"),
    ),
    "origin of the file, and the dtype in which the weights are stored": (
        *("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"),
        *("transformers.js_config", "unsloth_fixed", "unsloth_version"),
    ),
    "special tokens of the tokenizer or the sampler": (
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
    ),
    "outputs and caches of a model call in addition to the logits": (
        *("use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("return_dict", "use_return_dict"),
    ),
    "sampling defaults, which newer models have in generation_config.json": (
        *("do_sample", "max_length", "temperature", "top_k", "top_p", "repetition_penalty"),
    ),
    "attention kernel and split matrix products, which do not change the result": (
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "pretraining_tp"),
        "chunk_size_feed_forward",
    ),
    "classification heads, which a causal language model does not have": (
        *("id2label", "label2id", "num_labels", "problem_type"),
    ),
    "coefficient of the load-balancing loss in pretraining (in mrl, `megatron.moe_aux_loss_coeff` sets this coefficient)": (
        "router_aux_loss_coef",
    ),
}
"""What the config fields describe -> names of the fields. None of these fields changes the logits."""

_LANGUAGE_MODEL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"  # suffixes of architecture names
# Name of a text classifier -> name of its language model. In these families, XForSequenceClassification is a classifier that also
# reads images, so the classifier of texts has the name XTextForSequenceClassification.
_TEXT_CLASSIFIERS = {f"{name}Text{_CLASSIFIER}": f"{name}{_LANGUAGE_MODEL}" for name in ("Gemma3", "Qwen3_5")}
_IGNORED_FIELDS = frozenset(name for names in IGNORED_FIELDS.values() for name in names)


@dataclass(frozen=True)
class HFConfig:
    """A Hugging Face `config.json`. `config[name]` reads a field.

    Reading raises ValueError if the field is missing and `defaults` does not contain it.
    """

    path: Path
    fields: dict[str, Any]
    family: str | None = None  # family outside models/families: "package.module:NAME" or "/path/file.py:NAME"
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values that transformers uses for missing fields
    read_fields: set[str] = field(default_factory=set, compare=False)  # names of the fields that have been read
    train_mtp: bool = False  # whether the MTP layers are part of the model, because they are trained

    @classmethod
    def load(cls, folder: str | Path, family: str | None = None, train_mtp: bool = False) -> "HFConfig":
        """Read `folder/config.json`; raise ValueError if the folder is not a Hugging Face model."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            kind = "is a file" if Path(folder).is_file() else "is missing"
            problem = kind if not Path(folder).is_dir() else "has no config.json"
            raise ValueError(
                f"model.path={folder}: the folder {problem}; expected a Hugging Face model folder "
                "(config.json, *.safetensors, tokenizer files)."
            )
        try:
            fields = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}). Download or write it again.") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{path}: expected an object of fields, got {type(fields).__name__}.")
        return cls(path, fields, family, train_mtp=train_mtp)

    def __getitem__(self, name: str) -> Any:
        self.read_fields.add(name)
        if name in self.fields:
            return self.fields[name]
        if name in self.defaults:
            return self.defaults[name]
        raise ValueError(f"{self.path}: field {name!r} is missing; it is needed to build the model.")

    def any_spelling(self, *names: str) -> Any:
        """Return a field that has several names. If all are missing, the default of the first name applies.

        Raises ValueError if there is no default, or if the values of the names differ.
        """
        self.read_fields.update(names)
        values = {name: self.fields[name] for name in names if name in self.fields}
        if not values:
            return self[names[0]]
        value = next(iter(values.values()))
        if any(other != value for other in values.values()):
            shown = ", ".join(f"{name}={other!r}" for name, other in values.items())
            raise ValueError(f"{self.path}: {shown} are names of one field, but their values differ; remove one.")
        return value

    def expect(self, **values: Any) -> None:
        """Raise ValueError if a field does not have its expected value. A tuple lists several expected values."""
        for name, allowed in values.items():
            options = allowed if isinstance(allowed, tuple) else (allowed,)
            if self[name] not in options:
                raise ValueError(
                    f"{self.path}: {name}={self[name]!r} is not supported; expected "
                    f"{' or '.join(repr(o) for o in options)}."
                )

    def start_reading(self, defaults: Mapping[str, Any]) -> "HFConfig":
        """Return a copy with the `defaults` of a family, in which no field is marked as read."""
        return replace(self, defaults=defaults, read_fields=set())

    def nested(self, name: str, defaults: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> "HFConfig":
        """Return the config in the field `name`, with no field marked as read.

        `fields`: fields of the returned config; None: those in the file. Raises ValueError if the field `name` is missing or is
        not an object.
        """
        own = self[name] if fields is None else fields
        if not isinstance(own, Mapping):
            raise ValueError(f"{self.path}: {name}={own!r}; expected an object of fields.")
        return HFConfig(self.path, {**own, "architectures": [self.architecture]}, defaults=defaults)

    def check_all_fields_read(self) -> None:
        """Raise ValueError if a field was not read and is not in IGNORED_FIELDS."""
        for name in sorted(self.fields.keys() - self.read_fields - _IGNORED_FIELDS):
            raise ValueError(
                f"{self.path}: {name}={self.fields[name]!r} is not known to {self.architecture} in mrl, and may change the "
                f"outputs of the model. If the field has no influence, remove it; otherwise use a family that reads the field "
                f"(docs/tutorials/model.md)."
            )

    @property
    def is_reward_model(self) -> bool:
        """Whether the folder has a sequence classifier in place of a language model."""
        names = self.fields.get("architectures")
        return isinstance(names, list) and len(names) == 1 and str(names[0]).endswith(_CLASSIFIER)

    @property
    def family_architecture(self) -> str:
        """Name under which the family is registered: for XForSequenceClassification, the name XForCausalLM."""
        return _TEXT_CLASSIFIERS.get(self.architecture) or self.architecture.replace(_CLASSIFIER, _LANGUAGE_MODEL)

    def as_reward_model(self) -> "HFConfig":
        """Return the config of a sequence classifier with one output and the same layers.

        The length of `id2label` sets the number of outputs, in all versions of transformers. The result has no `num_labels`.
        """
        text = {model: classifier for classifier, model in _TEXT_CLASSIFIERS.items()}
        classifier = text.get(self.architecture) or self.architecture.replace(_LANGUAGE_MODEL, _CLASSIFIER)
        labels = dict(architectures=[classifier], id2label={"0": "score"}, label2id={"score": 0})
        fields = {name: value for name, value in self.fields.items() if name != "num_labels"}
        return replace(self, fields=fields | labels)

    def check_one_output(self) -> None:
        """Raise ValueError if this sequence classifier does not have exactly one output. The default of transformers is two."""
        outputs = self.fields.get("num_labels", len(self.fields.get("id2label") or (0, 1)))
        if outputs != 1:
            raise ValueError(
                f"{self.path}: {self.architecture} has {outputs} outputs; expected a reward model, whose id2label has one entry."
            )

    @property
    def architecture(self) -> str:
        names = self["architectures"]
        if not isinstance(names, list) or len(names) != 1:
            raise ValueError(f"{self.path}: architectures={names!r}; expected a list of one name.")
        return names[0]

    def rope(self, head_dim: int, *, partial: bool = False, without: tuple[str, ...] = ()) -> Rope:
        """Return the rotary embedding for heads of size `head_dim`. The config may be from any version of transformers.

        With `partial`, the family supports `partial_rotary_factor`, the fraction of each head that is rotated. `without`: names
        of fields of `rope_parameters` that do not describe the rotation.
        """
        parameters = {name: value for name, value in self.rope_parameters().items() if name not in without}
        if parameters.get("rope_theta") is None:
            parameters["rope_theta"] = self["rope_theta"]
        fraction = parameters.pop("partial_rotary_factor", None)
        if partial:
            fraction = self["partial_rotary_factor"] if fraction is None else fraction
            self.read_fields.add("partial_rotary_factor")
        if not partial and fraction not in (None, 1.0):
            raise ValueError(f"{self.path}: partial_rotary_factor={fraction!r} is not supported; expected 1.0.")
        return self._build_rope(parameters, int(head_dim * (1.0 if fraction is None else fraction)))

    def rope_by_layer(self, head_dim: int, theta: float, local_theta: float) -> tuple[Rope, Rope]:
        """Return the rotary embeddings of layers with full attention and of layers with a sliding window.

        `theta` is the base for full attention, and `local_theta` is the base for a sliding window. `rope_parameters` has
        parameters for each kind of layer. If they contain a base (`rope_theta`), this base has priority over the arguments. The
        field `rope_scaling` of transformers 4 applies to full attention only.
        """
        self.read_fields.update(("rope_parameters", "rope_scaling"))
        by_kind = dict(self.fields.get("rope_parameters") or {})
        full, local = (dict(by_kind.pop(kind, None) or {}) for kind in ("full_attention", "sliding_attention"))
        if by_kind:
            raise ValueError(
                f"{self.path}: rope_parameters={self.fields['rope_parameters']} is not supported; expected parameters for "
                "full_attention and for sliding_attention."
            )
        full |= self.fields.get("rope_scaling") or {}
        if not (full.get("truncate", True) and local.get("truncate", True)):
            raise ValueError(
                f"{self.path}: truncate=false of the rotary embedding is not supported, because transformers ignores it in "
                "models whose layers with a window have their own rotary embedding; expected true."
            )
        ropes = [
            self._build_rope({"rope_theta": base} | given, head_dim)
            for given, base in ((full, theta), (local, local_theta))
        ]
        return ropes[0], ropes[1]

    def _build_rope(self, parameters: dict[str, Any], dim: int) -> Rope:
        """Return the rotary embedding of `dim` components. A missing original context length gets the default of transformers."""
        kind = parameters.setdefault("rope_type", parameters.pop("type", "default"))
        if kind in ("llama3", "yarn"):
            parameters.setdefault("original_max_position_embeddings", self["max_position_embeddings"])
        if kind == "longrope":
            self._complete_longrope(parameters)
        try:
            return rope_from_parameters(parameters, dim)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _complete_longrope(self, parameters: dict[str, Any]) -> None:
        """Set the original context length of LongRoPE and the factor by which it is extended.

        As in transformers, an original context length outside of `rope_parameters` has priority.
        """
        name, longest = "original_max_position_embeddings", self["max_position_embeddings"]
        if name in self.fields or name in self.defaults:
            parameters[name] = self[name]
        original = parameters.setdefault(name, longest)
        if parameters.setdefault("factor", longest / original) != longest / original:
            raise ValueError(
                f"{self.path}: factor={parameters['factor']} of the rotary embedding is not supported; expected "
                f"max_position_embeddings / {name} = {longest / original}."
            )

    def rope_parameters(self) -> dict[str, Any]:
        """Read `rope_parameters`, or `rope_scaling` of transformers 4.

        Raises ValueError if both are set and differ, or if they contain another `rope_theta` than the config itself.
        """
        self.read_fields.update(("rope_parameters", "rope_scaling", "rope_theta"))
        sources = [parameters for name in ("rope_parameters", "rope_scaling") if (parameters := self.fields.get(name))]
        if len(sources) > 1 and sources[0] != sources[1]:
            raise ValueError(
                f"{self.path}: rope_parameters={sources[0]} and rope_scaling={sources[1]} differ; remove one."
            )
        if not sources:
            return {}
        outer, inner = self.fields.get("rope_theta"), sources[0].get("rope_theta")
        if outer is not None and inner is not None and outer != inner:
            raise ValueError(
                f"{self.path}: rope_theta={outer}, but {inner} in the parameters of the rotary embedding; remove one."
            )
        return sources[0]
