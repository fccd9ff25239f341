"""What trainer processes are built from; light enough for the driver."""

from dataclasses import dataclass
from typing import Any

from parallel.dims import ParallelDims
from parallel.trainer_config import AdamWConfig


@dataclass(frozen=True)
class ModelSpec:
    """A model to train and how."""

    model_path: str  # Hugging Face folder
    dims: ParallelDims
    dtype: str  # float32 or bfloat16
    optimizer: AdamWConfig | None  # None: it is never trained
    overrides: dict[str, Any]  # fields of Megatron's TransformerConfig
    share_prompts: bool = True  # packs may compute a group's prompt once
    logprob_chunk: int = 1024  # rows of logits that exist at one time
    family: str | None = None  # where the model's family is, if not in models/families
