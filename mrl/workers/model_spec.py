"""Description of a model that a worker group builds. Imports no Megatron, so the driver can make one."""

from dataclasses import dataclass
from typing import Any

from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig


@dataclass(frozen=True)
class ModelSpec:
    """What every trainer rank builds its part of a model from."""

    model_path: str  # Hugging Face folder
    dims: ParallelDims
    dtype: str  # float32 or bfloat16
    optimizer: OptimConfig | None  # None: the model is never trained
    overrides: dict[str, Any]  # fields of Megatron's TransformerConfig
    share_prompts: bool = True  # micro-batches may compute the prompt of a group once
    logprob_chunk: int = 1024  # rows of logits in memory at a time
    family: str | None = None  # file that defines the model's family; None: one of models/families
