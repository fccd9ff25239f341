"""Names and shapes of LoRA adapters: the matrices that can have adapters, and conversion rules between Megatron and PEFT.

PEFT is the library of Hugging Face for adapters. The adapter of a Hugging Face matrix `NAME.weight` [out, in] consists of
`base_model.model.NAME.lora_A.weight` [rank, in] and `base_model.model.NAME.lora_B.weight` [out, rank]. NAME is the name of the
module in transformers. If it does not begin like the name in the checkpoint, Family.peft_prefixes has both beginnings.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from models.architecture import Architecture, Family
from models.conversion.expert_stacks import is_stacked
from models.conversion.mapping import ParamMapping
from parallel.trainer_config import LoraConfig

RANK = "lora_rank"  # key of the adapters' rank in the dict `sizes`, beside the keys of Architecture.sizes
_LINEAR = re.compile(r"decoder\.layers\..*\.linear_\w+\.weight$")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_PEFT_PREFIX = "base_model.model."


def matrix_name(hf_name: str) -> str:
    """Return the name of a matrix in its module: "q_proj" for "model.layers.0.self_attn.q_proj.weight"."""
    return hf_name.removesuffix(".weight").rpartition(".")[2]


def can_have_adapter(row: ParamMapping, experts: bool = False) -> bool:
    """Whether the row is a linear layer that can have adapters. The output layer and the router cannot have adapters.

    A row cannot have adapters if one of its Hugging Face tensors concatenates several matrices, as in Phi-3. Routed experts can
    have adapters only if `experts` is true.
    """
    return _is_linear(row, experts) and row.num_concatenated == 1


def _is_linear(row: ParamMapping, experts: bool) -> bool:
    return (experts or ".mlp.experts." not in row.megatron) and _LINEAR.match(row.megatron) is not None


def adapted_matrices(rows: Iterable[ParamMapping], lora: LoraConfig) -> set[str]:
    """Return the names of the matrices that get adapters: lora.targets, or if it is empty, all that can have adapters."""
    return set(lora.targets) or {
        matrix_name(name) for row in rows if can_have_adapter(row, lora.experts) for name in row.hf
    }


def check_lora(lora: LoraConfig, family: Family, arch: Architecture) -> None:
    """Raise ValueError if lora.targets names a matrix that cannot have an adapter, or leaves a layer without an adapter.

    If lora.targets is empty, a linear layer that cannot have adapters is an error, too.
    """
    if lora.experts and any(is_stacked(name) for row in family.rows(arch) for name in row.hf):
        raise ValueError(
            f"lora.experts=true with {family.architecture}: its experts cannot have adapters, because its checkpoints stack all "
            "experts of a layer in one tensor; set lora.experts=false."
        )
    linears = [row for row in family.param_mappings(arch) if _is_linear(row, lora.experts)]
    rows = [row for row in linears if can_have_adapter(row, lora.experts)]
    known = list(dict.fromkeys(matrix_name(name) for row in rows for name in row.hf))
    fused = {matrix_name(name): None for row in linears if row.num_concatenated > 1 for name in row.hf}
    if fused and not lora.targets:
        raise ValueError(
            f"lora.targets=[] with {family.architecture}: {', '.join(fused)} cannot have adapters, because each of them "
            f"joins several matrices; set lora.targets to names from {', '.join(known)}."
        )
    if unknown := [name for name in lora.targets if name not in known]:
        raise ValueError(
            f"lora.targets: {', '.join(unknown)} is not a linear layer of {family.architecture} that can have an adapter; "
            f"expected names from {', '.join(known)}."
        )
    targets = adapted_matrices(rows, lora)
    adapted = {_LAYER.match(row.megatron)[1] for row in rows if any(matrix_name(name) in targets for name in row.hf)}  # type: ignore[unsupported-operation]
    if missing := set(map(str, range(arch.num_layers))) - adapted:
        layer = min(missing, key=int)
        own = dict.fromkeys(matrix_name(n) for row in rows if _LAYER.match(row.megatron)[1] == layer for n in row.hf)  # type: ignore[unsupported-operation]
        raise ValueError(
            f"lora.targets={lora.targets}: layer {layer} has none of these matrices; add one of {', '.join(own)}."
        )


def adapter_shapes(lora: LoraConfig, family: Family, arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each matrix A and B of a model, by its name in PEFT."""
    rows = [row for row in family.param_mappings(arch) if can_have_adapter(row, lora.experts)]
    targets, sizes = adapted_matrices(rows, lora), arch.sizes | {RANK: lora.rank}
    mappings = [mapping for row in rows for mapping in adapter_mappings(row, targets, family.peft_prefixes)]
    return {name: shape for mapping in mappings for name, shape in mapping.hf_shapes(sizes).items()}


def adapter_mappings(
    row: ParamMapping, targets: set[str], prefixes: Mapping[str, str] | None = None
) -> Iterator[ParamMapping]:
    """Yield the conversion rules of A and B for each matrix in `targets` that the linear layer `row` combines.

    `prefixes`: Family.peft_prefixes.
    """
    megatron_prefix = row.megatron.removesuffix("weight") + "lora."
    for hf_name, (rows, columns) in zip(row.hf, row.shapes, strict=True):
        if (name := matrix_name(hf_name)) in targets:
            prefix, module = megatron_prefix + name, hf_name.removesuffix("weight")
            for old, new in (prefixes or {}).items():
                module = new + module.removeprefix(old) if module.startswith(old) else module
            peft = _PEFT_PREFIX + module
            # A [rank, in] is split if the inputs of the matrix are split, and B [out, rank] if the outputs are
            axis_of_a, axis_of_b = (axis if row.axis == axis else None for axis in (1, 0))
            where = dict(present_in=row.present_in, part=row.part, expert=row.expert)
            yield ParamMapping(f"{prefix}.lora_a", (f"{peft}lora_A.weight",), ((RANK, columns),), axis_of_a, **where)
            yield ParamMapping(f"{prefix}.lora_b", (f"{peft}lora_B.weight",), ((rows, RANK),), axis_of_b, **where)
