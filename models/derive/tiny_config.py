"""Reads a config of transformers and shrinks it, so that a random model with the same structure takes milliseconds on a CPU.

No two sizes in WIDTHS are equal. So a size in the shape of a tensor says which width it is. The size of the vocabulary is odd,
because trainers pad it. All other sizes are even, so that two ranks can share each matrix. Fields that this module does not know
keep their value.
"""

import inspect
import json
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

NUM_LAYERS = 4
NUM_HEADS, NUM_GROUPS = 6, 2  # query heads, and key/value heads
WIDTHS = dict(
    vocab_size=97,
    hidden_size=96,
    intermediate_size=46,
    moe_intermediate_size=26,
    q_lora_rank=22,
    kv_lora_rank=18,
    qk_nope_head_dim=14,
    qk_rope_head_dim=6,
    v_head_dim=12,
)
"""Sizes of the tiny model. With 6 heads, 2 groups and a head size of 24, queries have 144 components, keys and values 48."""
# A half and a quarter of HEAD_DIM are even, so that RoPE can rotate a part of a head. The same holds for hidden_size / NUM_HEADS,
# the size of a head if a config has no head_dim.
HEAD_DIM = 24
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # field names of the number of experts
NUM_EXPERTS = 8
MAX_POSITIONS = 64
SLIDING_WINDOW = 5  # smaller than the sequences of the probes
_TOKENS = re.compile("window|chunk")  # a field with such a name contains the number of tokens to which a token attends
INITIALIZER_RANGE = 0.2  # gives logits of the order of 1
SIZE_FIELDS = frozenset(
    [
        *WIDTHS,
        *EXPERT_COUNTS,
        *("num_hidden_layers", "num_attention_heads", "max_position_embeddings", "num_experts_per_tok"),
    ]
)
"""Fields with sizes. If a model has one of these sizes, its config has the field. So a family needs no default for it."""
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")  # fields that a config must have
_DERIVED = ("qk_head_dim",)  # fields that a config class computes from other fields
# fields of config.json that build_config does not copy to the arguments of the config class
_NOT_ARGUMENTS = ("architectures", "model_type", "transformers_version", "auto_map", "torch_dtype", "dtype")


def read_fields(model: Path) -> dict[str, Any]:
    """Return the fields of a config. `model` is a Hugging Face folder or a config.json.

    Raises:
        ValueError: there is no such file, it is not JSON, or it does not name an architecture that transformers knows.
    """
    path = model / "config.json" if model.is_dir() else model
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a Hugging Face folder or a config.json.")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}). Download or write it again.") from None
    if not isinstance(found, dict) or found.get("model_type") not in CONFIG_MAPPING:
        kind = found.get("model_type") if isinstance(found, dict) else None
        raise ValueError(
            f"{path}: model_type={kind!r} is not in the installed transformers; expected an architecture of transformers, "
            "because the derived family is compared with it."
        )
    names = found.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not str(names[0]).endswith("ForCausalLM"):
        raise ValueError(f"{path}: architectures={names!r}; expected a list of one name that ends in ForCausalLM.")
    return found


def config_class(found: dict[str, Any]) -> type[PreTrainedConfig]:
    """Return the class of transformers for this config."""
    return CONFIG_MAPPING[found["model_type"]]


def class_defaults(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the default of each field that the config class declares. Fields without a default are left out."""
    if is_dataclass(cls):
        return {
            field.name: field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
            for field in fields(cls)
            if field.default is not MISSING or field.default_factory is not MISSING
        }
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def build_config(found: dict[str, Any], **changes: Any) -> PreTrainedConfig:
    """Return the config of transformers with these fields; `changes` replaces some of them."""
    cls, given = config_class(found), found | changes
    arguments = {name: value for name, value in given.items() if name not in _NOT_ARGUMENTS}
    # config.json has objects in place of infinity
    decoded = cls._decode_special_floats(json.loads(json.dumps(arguments)))
    return cls(**decoded, architectures=found["architectures"])


def written_fields(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that transformers would write to config.json for this config."""
    config = build_config(found)
    return json.loads(config.to_json_string()) | {"architectures": config.architectures}


def known_fields(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of this config, and the values that transformers uses for absent fields."""
    computed = json.loads(build_config(found).to_json_string(use_diff=False))
    return class_defaults(config_class(found)) | computed | found


def shrink(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a tiny config with the same structure: the same kinds of layers, options and rotary embedding.

    Raises:
        ValueError: the config has no field for one of the sizes that every decoder has.
    """
    cls = config_class(found)
    declared = class_defaults(cls)
    known = known_fields(found)
    if missing := [name for name in _NEEDED if not isinstance(known.get(name), int)]:
        raise ValueError(
            f"{found['architectures'][0]}: its config has no number in {', '.join(missing)}; the probes need a decoder whose "
            "config has these fields."
        )
    tiny = dict(found)
    tiny |= {name: size for name, size in WIDTHS.items() if known.get(name) is not None}
    tiny |= dict(num_hidden_layers=NUM_LAYERS, max_position_embeddings=MAX_POSITIONS)
    if "initializer_range" in known:
        tiny["initializer_range"] = INITIALIZER_RANGE
    if known.get("pad_token_id") is not None:  # it may exceed the tiny vocabulary
        tiny["pad_token_id"] = None
    tiny |= _tiny_heads(known, declared)
    tiny |= _tiny_experts(known)
    tiny |= _tiny_layer_kinds(found, known)
    tiny |= _tiny_rope(found)
    latent = known.get("kv_lora_rank") is not None
    for name in (*_DERIVED, *(["head_dim"] if latent else [])):  # the config class computes them
        tiny.pop(name, None)
    return tiny


def _tiny_heads(known: dict[str, Any], declared: dict[str, Any]) -> dict[str, Any]:
    heads = known["num_attention_heads"]
    groups = known.get("num_key_value_heads") or heads
    sizes: dict[str, Any] = dict(num_attention_heads=NUM_HEADS)
    if "num_key_value_heads" in known:
        sizes["num_key_value_heads"] = NUM_HEADS if groups == heads else NUM_GROUPS
    if "head_dim" in declared or known.get("head_dim") is not None:
        sizes["head_dim"] = HEAD_DIM
    return sizes


def _tiny_experts(known: dict[str, Any]) -> dict[str, Any]:
    counts = [name for name in EXPERT_COUNTS if known.get(name)]
    if not counts:
        return {}
    sizes: dict[str, Any] = dict.fromkeys(counts, NUM_EXPERTS)
    if (known.get("n_group") or 1) > 1:  # mrl needs two chosen experts for each chosen group (decoder_blocks)
        return sizes | dict(n_group=4, topk_group=2, num_experts_per_tok=4)
    return sizes | dict(num_experts_per_tok=min(known.get("num_experts_per_tok") or 1, 3))


def _tiny_layer_kinds(found: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that say which layers are of which kind. The tiny model has a layer of each kind."""
    fields: dict[str, Any] = {}
    if known.get("first_k_dense_replace"):
        fields["first_k_dense_replace"] = 1
    if known.get("mlp_only_layers"):
        fields["mlp_only_layers"] = [1]
    fields |= _tiny_layer_lists(found, known["num_hidden_layers"])
    if known.get("max_window_layers") is not None:
        fields["max_window_layers"] = NUM_LAYERS // 2
    for name, value in known.items():
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if is_number and _TOKENS.search(name) and not name.endswith(("_layers", "_pattern")):
            fields[name] = SLIDING_WINDOW
    return fields


def _tiny_layer_lists(found: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the fields that have one value for each of `count` layers, such as `layer_types`, for the tiny model."""
    lists = {
        name: values
        for name, values in found.items()
        if isinstance(values, list)
        and len(values) == count
        and not name.endswith("token_id")
        and name not in _NOT_ARGUMENTS
    }
    kinds: dict[str, int] = {}  # values of all fields in one layer -> first layer that has them
    for layer, values in enumerate(zip(*lists.values(), strict=True)):
        kinds.setdefault(repr(values), layer)
    layers = list(kinds.values())
    chosen = [layers[min(n, len(layers) - 1)] for n in range(NUM_LAYERS)] if layers else []
    return {name: [values[layer] for layer in chosen] for name, values in lists.items()}


def _tiny_rope(found: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields with a context that fits the tiny model."""
    changed = {}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(parameters := found.get(name), dict):
            limit = "original_max_position_embeddings"
            changed[name] = parameters | ({limit: MAX_POSITIONS // 4} if limit in parameters else {})
    return changed
