"""Names of Megatron's config fields, read from its source: importing Megatron would cost the driver seconds."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

DECIDED = frozenset(
    [
        "params_dtype",
        "pipeline_dtype",
        "bf16",
        "fp16",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "virtual_pipeline_model_parallel_size",
        "activation_func",
        "calculate_per_token_loss",
        "variable_seq_lengths",
        "perform_initialization",
        "use_cpu_initialization",
    ]
)
"""Fields that follow from the model and the layout; a user cannot set them apart from those."""

_FILES = ("transformer/transformer_config.py", "model_parallel_config.py")
_CLASSES = ("TransformerConfig", "ModelParallelConfig")


@cache
def transformer_fields() -> frozenset[str]:
    """Every field of TransformerConfig, inherited ones included."""
    spec = find_spec("megatron")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    names: set[str] = set()
    for path in (Path(root) / "core" / file for root in roots for file in _FILES):
        for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
            if isinstance(node, ast.ClassDef) and node.name in _CLASSES:
                names |= {
                    s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
                }
    assert "num_layers" in names, "Megatron's source has another layout than models/megatron_fields.py expects"
    return frozenset(names)
