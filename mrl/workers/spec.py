"""What an actor is built from; light enough for the driver."""

from dataclasses import dataclass
from typing import Any

from parallel.dims import ParallelDims
from parallel.optimizer_settings import AdamW


@dataclass(frozen=True)
class ActorSpec:
    """What an actor is built from."""

    model_path: str  # Hugging Face folder
    dims: ParallelDims
    dtype: str  # float32 or bfloat16
    optimizer: AdamW
    overrides: dict[str, Any]  # fields of Megatron's TransformerConfig
