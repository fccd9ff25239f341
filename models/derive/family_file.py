"""Returns the text of a family file: imports, `translate`, the table, `engine_fused_params` and `defaults`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.derive.rows import Rows, format_call

# block -> module, for blocks that a family file does not import from decoder_blocks
_BLOCK_MODULES = {"LATENT_ATTENTION": "models.families.deepseek_v3"}
_MAPPINGS = ("GatedMLPMapping", "ParamMapping", "QKVMapping", "VocabMapping")
# names that a family file may import from decoder_blocks: table rows, defaults and functions
_BLOCKS = (
    *(
        "ATTENTION",
        "DEFAULTS",
        "DENSE_MLP",
        "DENSE_MLP_BIAS",
        "EMBEDDINGS",
        "ENGINE_FUSED_PARAMS",
        "FULL_ATTENTION_DEFAULTS",
    ),
    *(
        "OUTPUT_PROJECTION_BIAS",
        "QKV_BIAS",
        "QK_NORMS",
        "SIGMOID_ROUTED_MOE",
        "SIGMOID_ROUTED_MOE_DEFAULTS",
        "POST_NORMS",
        "PROJECTION_NORMS",
        "check_full_attention",
    ),
    *("moe_fused_params", "moe_mlp", "read_decoder", "read_sigmoid_routed_moe", "sigmoid_routed_moe_parts"),
    *("read_layers_without_rope", "read_query_scaling"),
)
# Code of `translate` for latent attention: lines before the call of read_decoder, further arguments, and lines after the call.
LATENT_FIELDS = """\
    unrotated, rotated, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    # transformers 5 writes these two fields as well.
    config.expect(head_dim=(None, rotated), qk_head_dim=(None, unrotated + rotated))
    config.expect(num_key_value_heads=config["num_attention_heads"])
    heads, q_lora, kv_lora = config["num_attention_heads"], config["q_lora_rank"], config["kv_lora_rank"]
    rope = config.rope(rotated)
    is_yarn = isinstance(rope, YarnRope)  # Megatron computes the scale of the scores from these fields
    yarn = dict(rotary_scaling_factor=rope.factor, mscale_all_dim=rope.mscale_all_dim or 0.0) if is_yarn else {}
"""
LATENT_ARGUMENTS = (
    "rope=rope",
    "multi_latent_attention=True",
    "q_lora_rank=q_lora",
    "kv_lora_rank=kv_lora",
    "qk_head_dim=unrotated",
    "qk_pos_emb_head_dim=rotated",
    "v_head_dim=value",
    "**yarn",
)
LATENT_SIZES = """\
    key = unrotated + rotated
    sizes = dict(arch.sizes)
    del sizes["kv"], sizes["head_dim"]
    sizes |= dict(
        q=heads * key,
        q_lora=q_lora or 0,
        kv_a=kv_lora + rotated,
        kv_lora=kv_lora,
        kv_b=heads * (unrotated + value),
        o=heads * value,
    )
    return replace(arch, sizes=sizes, transformer=arch.transformer | dict(kv_channels=key))
"""


@dataclass
class FamilyPlan:
    """The content of a family file. Fields without a comment are fields of Family."""

    architecture: str
    # Code and rows of each group of the family's table, which maps Megatron parameters to Hugging Face tensors; see
    # models.derive.rows
    row_groups: list[tuple[str, Rows]]
    summary: str = ""  # first line of the docstring
    # optional part of the model -> Python expression over `config` that is true if the model has the part
    parts: dict[str, str] = field(default_factory=dict)
    is_latent: bool = False  # whether the model has latent attention
    # whether `translate` must call check_full_attention, because a config can ask for other attention, such as sliding windows
    must_check_full_attention: bool = False
    arguments: list[str] = field(default_factory=list)  # further arguments of read_decoder
    # fields of Architecture that read_decoder does not set
    architecture_fields: list[str] = field(default_factory=list)
    # field -> its value in the config from which the family is derived; `translate` refuses other values
    fixed_fields: dict[str, Any] = field(default_factory=dict)
    fused_params: dict[str, tuple[str, ...]] = field(default_factory=dict)  # Family.engine_fused_params
    defaults: dict[str, Any] = field(default_factory=dict)
    unsupported_parts: tuple[str, ...] = ()  # Family.engine_unsupported_parts
    supported_by_sglang: bool = True  # whether SGLang implements the architecture
    has_mtp_layers: bool = False

    @property
    def constant(self) -> str:
        """Name of the family in its file: DeepseekV3ForCausalLM -> DEEPSEEK_V3."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.architecture.removesuffix("ForCausalLM")).upper()

    def code(self) -> str:
        """Return the text of the file."""
        body = "\n".join([self._translate(), "", "", self._family(), ""])
        return "\n".join([f'"""{self.summary}"""', "", self._imports(body), "", "", body])

    def _imports(self, body: str) -> str:
        def used(names: tuple[str, ...]) -> list[str]:
            return sorted(name for name in names if re.search(rf"\b{name}\b", body))

        lines = ["from dataclasses import replace", ""] if "replace(" in body else []
        lines.append("from models.architecture import Architecture, Family")
        if mappings := used(_MAPPINGS):
            lines.append(f"from models.conversion.mapping import {', '.join(mappings)}")
        lines.append(_import("models.families.decoder_blocks", used(_BLOCKS)))
        lines += [_import(module, [name]) for name, module in _BLOCK_MODULES.items() if name in body]
        lines.append("from models.hf_config import HFConfig")
        if self.is_latent:
            lines.append("from parallel.rope import YarnRope")
        return "\n".join(lines)

    def _translate(self) -> str:
        lines = ["def translate(config: HFConfig) -> Architecture:"]
        lines.append(
            f'    """Translate a config of {self.architecture}. Raises ValueError if a value is not supported."""'
        )
        if self.must_check_full_attention:
            lines.append("    check_full_attention(config)")
        if self.fixed_fields:
            lines.append(format_call("    config.expect(", _keywords(self.fixed_fields), ")"))
        if self.is_latent:
            lines.append(LATENT_FIELDS.rstrip())
        arguments = ["config", *self._parts(lines), *self.arguments]
        if any("num_layers" in argument for argument in arguments):
            lines.append('    num_layers = config["num_hidden_layers"]')
        if any("(head_dim" in argument for argument in arguments):
            lines.append('    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]')
        start = "    arch = read_decoder(" if self.is_latent or self.architecture_fields else "    return read_decoder("
        lines.append(format_call(start, arguments, ")"))
        if self.architecture_fields:
            lines.append(format_call("    return replace(arch, ", self.architecture_fields, ")"))
        return "\n".join([*lines, *([LATENT_SIZES.rstrip()] if self.is_latent else [])])

    def _parts(self, lines: list[str]) -> list[str]:
        """Return the argument `parts` of read_decoder. If a part depends on the config, its condition is added to `lines`."""
        constant = [part for part, code in self.parts.items() if code == "True"]
        present = [part for part, code in self.parts.items() if code != "False"]
        if not present:
            return []
        if present == constant:
            return [f"parts=frozenset({constant!r})".replace("'", '"')]
        lines.append(format_call("    optional_parts = dict(", [f"{part}={self.parts[part]}" for part in present], ")"))
        return ["parts=frozenset(part for part, is_present in optional_parts.items() if is_present)"]

    def _family(self) -> str:
        table = "".join(f"        {code},\n" for code, _ in self.row_groups)
        entries = "".join(f'        "{name}": {_tuple(parts)},\n' for name, parts in self.fused_params.items())
        fused_params = f"{{\n{entries}    }}" if entries else "{}"
        lines = [f"{self.constant} = Family("]
        lines += [f'    architecture="{self.architecture}",', "    translate=translate,"]
        lines += [f"    table=(\n{table}    ),", f"    engine_fused_params={fused_params},"]
        lines.append(format_call("    defaults=dict(", _keywords(self.defaults), "),"))
        if self.unsupported_parts:
            lines.append(f"    engine_unsupported_parts=frozenset({_tuple(self.unsupported_parts)}),")
        if not self.supported_by_sglang:
            lines.append("    supported_by_sglang=False,")
        if self.has_mtp_layers:
            lines.append("    has_mtp_layers=True,")
        return "\n".join([*lines, ")"])


def _import(module: str, names: list[str]) -> str:
    return f"from {module} import (\n{''.join(f'    {name},{chr(10)}' for name in names)})"


def _tuple(names: tuple[str, ...]) -> str:
    end = "," if len(names) == 1 else ""
    return f"({', '.join(f'{chr(34)}{name}{chr(34)}' for name in names)}{end})"


def _keywords(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}".replace("'", '"') for name, value in values.items()]
