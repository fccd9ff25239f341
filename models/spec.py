"""What a model family states about itself, and the Hugging Face config it is read from. Pure: no torch.distributed."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.conversion.mapping import Mapping
from parallel.dims import ParallelDims


@dataclass(frozen=True)
class HFConfig:
    """A Hugging Face `config.json`; a field that is asked for must be there."""

    path: Path
    fields: dict[str, Any]

    @classmethod
    def load(cls, folder: str | Path) -> "HFConfig":
        """Read `folder/config.json`; raises ValueError when the folder is not a Hugging Face model."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            found = "is missing" if not Path(folder).is_dir() else "has no config.json"
            raise ValueError(
                f"model.path={folder}: the folder {found}; a Hugging Face model folder is expected "
                "(config.json, *.safetensors, tokenizer files)."
            )
        return cls(path, json.loads(path.read_text()))

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"{self.path}: field {name!r} is missing; it is needed to build the model.")
        return self.fields[name]

    def expect(self, **values: Any) -> None:
        """Raise ValueError unless each field is absent or one of the allowed values (a tuple means: any of these)."""
        for name, allowed in values.items():
            options = allowed if isinstance(allowed, tuple) else (allowed,)
            if name in self.fields and self.fields[name] not in options:
                raise ValueError(
                    f"{self.path}: {name}={self.fields[name]!r} is not supported; expected "
                    f"{' or '.join(repr(o) for o in options)}."
                )

    @property
    def architecture(self) -> str:
        names = self["architectures"]
        if not isinstance(names, list) or len(names) != 1:
            raise ValueError(f"{self.path}: architectures={names!r}; expected a list of one name.")
        return names[0]

    @property
    def tied_embeddings(self) -> bool:
        return bool(self.fields.get("tie_word_embeddings", False))

    @property
    def rope(self) -> dict[str, Any]:
        """RoPE parameters, wherever this version of transformers wrote them; `rope_type` and `rope_theta` at least."""
        rope = dict(self.fields.get("rope_parameters") or self.fields.get("rope_scaling") or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        if "rope_theta" not in rope:
            rope["rope_theta"] = self["rope_theta"]
        return rope


@dataclass(frozen=True)
class Architecture:
    """What a Hugging Face config says of a decoder, in Megatron's terms; logged field by field when a model is built."""

    vocab_size: int
    max_position_embeddings: int
    rotary_base: float
    tied_embeddings: bool
    transformer: dict[str, Any]  # keyword arguments of Megatron's TransformerConfig
    sizes: dict[str, int] = field(default_factory=dict)  # symbols of the shapes in the family's table

    def check_layout(self, dims: ParallelDims) -> None:
        """Raise ValueError when tensor parallelism cannot cut this model."""
        sizes = dict(
            num_attention_heads=self.transformer["num_attention_heads"],
            num_key_value_heads=self.transformer["num_query_groups"],
            intermediate_size=self.transformer["ffn_hidden_size"],
        )
        for name, size in sizes.items():
            if size % dims.tp:
                fits = ", ".join(str(n) for n in range(1, size + 1) if all(s % n == 0 for s in sizes.values()))
                raise ValueError(f"parallel.tp={dims.tp} does not divide {name}={size} of this model; use {fits}.")


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture: how its config reads, and its weights as a table."""

    architecture: str  # as in config.json
    read: Callable[[HFConfig], Architecture]
    table: tuple[Mapping, ...]
    engine_fusions: dict[
        str, tuple[str, ...]
    ]  # SGLang parameter suffix <- Hugging Face suffixes, concatenated in order

    def entries(self, arch: Architecture) -> list[Mapping]:
        """The table's rows for this model: one per Megatron parameter, layers written out."""
        rows = [row for row in self.table if not (row.untied_only and arch.tied_embeddings)]
        return [
            row.at_layer(layer)
            for row in rows
            for layer in (range(arch.transformer["num_layers"]) if "{layer}" in row.megatron else [0])
        ]

    def hf_shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this model must hold, by Hugging Face name."""
        return {name: shape for row in self.entries(arch) for name, shape in row.hf_shapes(arch.sizes).items()}
