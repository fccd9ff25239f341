"""What a model family states about itself, and the Hugging Face config it is read from. Pure: no torch.distributed."""

import json
from collections.abc import Callable, Iterator
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

    def either(self, *names: str) -> Any:
        """The first of these fields that is there: some have two spellings."""
        return next((self.fields[name] for name in names if name in self.fields), None) or self[names[0]]

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

    @property
    def num_layers(self) -> int:
        return self.transformer["num_layers"]

    @property
    def num_experts(self) -> int:
        """Experts of one layer; 0 in a dense model."""
        return self.transformer.get("num_moe_experts", 0)

    def is_moe(self, layer: int) -> bool:
        """Whether the layer has experts in place of one MLP."""
        return bool(self.num_experts and self.transformer["moe_layer_freq"][layer])

    def check_layout(self, dims: ParallelDims, uneven_stages: bool = False) -> None:
        """Raise ValueError where the layout cannot cut this model; names the rule and the sizes that would work.

        `uneven_stages`: the user says how many layers each pipeline stage has, and Megatron checks it.
        """
        t = self.transformer
        heads = dict(num_attention_heads=t["num_attention_heads"], num_key_value_heads=t["num_query_groups"])
        dense = {} if all(map(self.is_moe, range(self.num_layers))) else dict(intermediate_size=t["ffn_hidden_size"])
        _check_divides("tp", dims.tp, heads | dense)
        if dims.pp * dims.vpp > 1 and not uneven_stages:
            _check_divides(
                "pp x vpp" if dims.vpp > 1 else "pp", dims.pp * dims.vpp, dict(num_hidden_layers=self.num_layers)
            )
        if self.num_experts:
            _check_divides("ep", dims.ep, dict(num_experts=self.num_experts))
            _check_divides("etp", dims.expert_tp, dict(moe_intermediate_size=t["moe_ffn_hidden_size"]))
            if dims.tp > 1 and not dims.sequence_parallel:
                raise ValueError(
                    "parallel.sp=false: experts with parallel.tp > 1 are trained under sequence parallelism."
                )
        elif dims.ep > 1:
            raise ValueError(f"parallel.ep={dims.ep}: this model has no experts to spread; use 1.")
        elif dims.etp not in (None, dims.tp):
            raise ValueError(f"parallel.etp={dims.etp}: this model has no experts to cut; leave it out.")

    def flops(self) -> tuple[float, float]:
        """Multiply-adds (a, b) of a forward pass: a causal sequence of L tokens costs a*L + b*L**2. Balancing weighs by it."""
        t = self.transformer
        width, d = t["hidden_size"], t["kv_channels"]
        heads = t["num_attention_heads"] * d
        attention = width * (2 * heads + 2 * t["num_query_groups"] * d)
        linear = 0.0
        for layer in range(self.num_layers):
            active = t["moe_router_topk"] * t["moe_ffn_hidden_size"] if self.is_moe(layer) else t["ffn_hidden_size"]
            linear += attention + 3 * width * active
        seen = 0.5  # of a sequence, by its average token; scores, then their product with the values
        return linear + width * self.vocab_size, self.num_layers * 2 * heads * seen


def _check_divides(axis: str, size: int, cut: dict[str, int]) -> None:
    for name, whole in cut.items():
        if whole % size:
            fits = ", ".join(str(n) for n in range(1, whole + 1) if all(w % n == 0 for w in cut.values()))
            raise ValueError(f"parallel.{axis}={size} does not divide {name}={whole} of this model; use {fits}.")


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture: how its config reads, and its weights as a table."""

    architecture: str  # as in config.json
    read: Callable[[HFConfig], Architecture]
    table: tuple[Mapping, ...]
    # SGLang parameter suffix <- Hugging Face suffixes, concatenated in order; {expert}: of every expert in turn
    engine_fusions: dict[str, tuple[str, ...]]

    def entries(self, arch: Architecture) -> list[Mapping]:
        """The table's rows for this model: one per Megatron parameter, layers and experts written out."""
        rows = [row for row in self.table if not (row.where == "untied" and arch.tied_embeddings)]
        return [entry for row in rows for entry in _written_out(row, arch)]

    def hf_shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this model must hold, by Hugging Face name."""
        return {name: shape for row in self.entries(arch) for name, shape in row.hf_shapes(arch.sizes).items()}


def _written_out(row: Mapping, arch: Architecture) -> Iterator[Mapping]:
    if "{layer}" not in row.megatron:
        yield row
        return
    kinds = {"dense": [False], "moe": [True]}.get(row.where, [False, True])
    for layer in range(arch.num_layers):
        if arch.is_moe(layer) in kinds:
            experts = range(arch.num_experts) if "{expert}" in row.megatron else [None]
            yield from (row.at(layer, expert) for expert in experts)
