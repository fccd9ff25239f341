"""A Hugging Face config in which every field is accounted for: used, checked, or known to be without influence."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parallel.rope import Rope, rope_from_parameters

IGNORED_FIELDS: dict[str, tuple[str, ...]] = {
    "which class reads the file; `architectures` decides for us": (
        *("model_type", "auto_map", "architectures", "is_llama_config"),
    ),
    "who wrote the file, and in which type the weights are stored": (
        *("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"),
        *("transformers.js_config", "unsloth_fixed", "unsloth_version"),
    ),
    "tokens that a tokenizer or a sampler treats apart": (
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
    ),
    "what a call of the model returns or keeps beside its logits": (
        *("use_cache", "cache_implementation", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("return_dict", "use_return_dict"),
    ),
    "defaults of sampling, today in generation_config.json": (
        *("do_sample", "max_length", "temperature", "top_k", "top_p", "repetition_penalty"),
    ),
    "which kernel computes attention, and in how many slices a layer is computed: the function is the same": (
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "pretraining_tp"),
        "chunk_size_feed_forward",
    ),
    "heads for classification, which a causal language model does not have": ("id2label", "label2id", "problem_type"),
    "weight of a balancing loss in pretraining; here `megatron.moe_aux_loss_coeff` asks for one": (
        "router_aux_loss_coef",
    ),
}
"""Fields that do not change the logits, by the reason why not."""

_IGNORED_FIELDS = frozenset(name for names in IGNORED_FIELDS.values() for name in names)


@dataclass(frozen=True)
class HFConfig:
    """A Hugging Face `config.json`; a field that is read must be there, or have a default in transformers."""

    path: Path
    fields: dict[str, Any]
    family: str | None = None  # where the family is, if not here: "package.module:NAME" or "/path/file.py:NAME"
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what transformers takes for a field that is absent
    read_fields: set[str] = field(default_factory=set, compare=False)  # names of the fields that were read

    @classmethod
    def load(cls, folder: str | Path, family: str | None = None) -> "HFConfig":
        """Read `folder/config.json`; raises ValueError when the folder is not a Hugging Face model."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            kind = "is a file" if Path(folder).is_file() else "is missing"
            found = kind if not Path(folder).is_dir() else "has no config.json"
            raise ValueError(
                f"model.path={folder}: the folder {found}; a Hugging Face model folder is expected "
                "(config.json, *.safetensors, tokenizer files)."
            )
        try:
            fields = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}). Fetch or write it again.") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{path}: expected an object of fields, got {type(fields).__name__}.")
        return cls(path, fields, family)

    def __getitem__(self, name: str) -> Any:
        self.read_fields.add(name)
        if name in self.fields:
            return self.fields[name]
        if name in self.defaults:
            return self.defaults[name]
        raise ValueError(f"{self.path}: field {name!r} is missing; it is needed to build the model.")

    def any_spelling(self, *names: str) -> Any:
        """A field with several spellings; raises ValueError where it has none of them, or they differ."""
        self.read_fields.update(names)
        said = {name: self.fields[name] for name in names if name in self.fields}
        if not said:
            return self[names[0]]
        value = next(iter(said.values()))
        if any(other != value for other in said.values()):
            shown = ", ".join(f"{name}={other!r}" for name, other in said.items())
            raise ValueError(f"{self.path}: {shown} say the same thing and differ; remove one.")
        return value

    def expect(self, **values: Any) -> None:
        """Raise ValueError unless each field is one of the allowed values (a tuple means: any of these)."""
        for name, allowed in values.items():
            options = allowed if isinstance(allowed, tuple) else (allowed,)
            if self[name] not in options:
                raise ValueError(
                    f"{self.path}: {name}={self[name]!r} is not supported; expected "
                    f"{' or '.join(repr(o) for o in options)}."
                )

    def start_reading(self, defaults: Mapping[str, Any]) -> "HFConfig":
        """The same config, nothing read of it yet, under a family's `defaults`."""
        return replace(self, defaults=defaults, read_fields=set())

    def check_all_fields_read(self) -> None:
        """Raise ValueError at a field that nobody read and that is not known to be without influence."""
        for name in sorted(self.fields.keys() - self.read_fields - _IGNORED_FIELDS):
            raise ValueError(
                f"{self.path}: {name}={self.fields[name]!r} is not known to {self.architecture} here, and may change what "
                f"the model computes. Remove the field if it has no influence; otherwise a family that reads it is needed "
                f"(docs/tutorials/model.md)."
            )

    @property
    def architecture(self) -> str:
        names = self["architectures"]
        if not isinstance(names, list) or len(names) != 1:
            raise ValueError(f"{self.path}: architectures={names!r}; expected a list of one name.")
        return names[0]

    def rope(self, head_dim: int, *, partial: bool = False) -> Rope:
        """The rotary embedding of heads of `head_dim`, wherever this version of transformers wrote its parameters.

        `partial`: the family may rotate a part of each head only, `partial_rotary_factor` of it.
        """
        found = dict(self._rope_parameters())
        kind = found.setdefault("rope_type", found.pop("type", "default"))
        if found.get("rope_theta") is None:
            found["rope_theta"] = self["rope_theta"]
        share = found.pop("partial_rotary_factor", None)
        if partial:
            share = self["partial_rotary_factor"] if share is None else share
            self.read_fields.add("partial_rotary_factor")
        if not partial and share not in (None, 1.0):
            raise ValueError(f"{self.path}: partial_rotary_factor={share!r} is not supported; expected 1.0.")
        if kind in ("llama3", "yarn"):
            found.setdefault("original_max_position_embeddings", self["max_position_embeddings"])
        try:
            return rope_from_parameters(found, int(head_dim * (1.0 if share is None else share)))
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _rope_parameters(self) -> dict[str, Any]:
        """`rope_parameters`, under transformers 4 `rope_scaling`; if both say something, they must say the same."""
        self.read_fields.update(("rope_parameters", "rope_scaling", "rope_theta"))
        said = [found for name in ("rope_parameters", "rope_scaling") if (found := self.fields.get(name))]
        if len(said) > 1 and said[0] != said[1]:
            raise ValueError(f"{self.path}: rope_parameters={said[0]} and rope_scaling={said[1]} differ; remove one.")
        if not said:
            return {}
        outer, inner = self.fields.get("rope_theta"), said[0].get("rope_theta")
        if outer is not None and inner is not None and outer != inner:
            raise ValueError(
                f"{self.path}: rope_theta={outer}, and {inner} within the rotary embedding's parameters; remove one."
            )
        return said[0]
