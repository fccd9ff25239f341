"""What a rollout worker is built from; light enough for the driver."""

from dataclasses import dataclass, field
from typing import Any

from mrl.rewards.base import Reward


@dataclass(frozen=True)
class RolloutSpec:
    """Engines, prompts and rewards of one rollout worker."""

    model_path: str  # Hugging Face folder: architecture, tokenizer, and the weights engines start with
    run_dir: str  # logs and recorded rollouts go here
    train: tuple[str, ...]  # prompt files
    test: tuple[str, ...]  # held-out prompt files
    reward: Reward
    responses_per_prompt: int
    max_response_tokens: int
    max_prompt_tokens: int
    temperature: float
    num_engines: int
    engine_tp: int
    seed: int
    eval_rows: int | None  # evaluate on the first rows only
    request_timeout_s: float
    record: bool  # write each step's tokens to run_dir/rollouts
    replay: str | None  # read them from this folder instead of sampling
    routed_experts: bool = False  # keep the experts each token was sent to (a mixture of experts only)
    server_args: dict[str, Any] = field(default_factory=dict)  # fields of SGLang's ServerArgs
