"""What a rollout worker is built from; light enough for the driver."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mrl.algorithms.estimate import Estimator
from mrl.config.schema import FaultsConfig, ScoringConfig
from mrl.core.device_slot import Slot
from mrl.data.prompts import PromptDataset
from mrl.data.tokenizer import Chat
from mrl.rewards.base import Reward
from mrl.rollout.agent import ToolAgent
from mrl.rollout.batch import Keep


@dataclass(frozen=True)
class RolloutSpec:
    """Engines, prompts and rewards of one rollout worker."""

    model_path: str  # Hugging Face folder: architecture, tokenizer, and the weights engines start with
    run_dir: str  # logs and recorded rollouts go here
    train: PromptDataset
    test: PromptDataset | None  # held-out prompts
    reward: Reward
    estimator: Estimator
    keep: Keep | None  # dynamic sampling: which groups are trained
    needs_greedy: bool  # a greedy response to each prompt besides
    old_from_rollout: bool  # the engine's log-probabilities stand for those of the old policy
    prompts_per_step: int
    responses_per_prompt: int
    max_response_tokens: int
    temperature: float
    num_engines: int
    engine_urls: tuple[str, ...]  # of servers that run already; then none are started
    engine_tp: int
    seed: int
    eval_rows: int | None  # evaluate on the first rows only
    request_timeout_s: float
    record: bool  # write each step's tokens to run_dir/rollouts
    replay: str | None  # read them from this folder instead of sampling
    staleness: int = 0  # weight versions that a token may be older than those it trains
    over_sampling: float = 0.0  # groups in the making beyond those needed, as a share of a step's
    in_order: bool = False  # steps train groups in the order their prompts were drawn
    max_rounds: int = 1  # so many times a step's groups are drawn at most
    journal_key: str = "samples"  # of what decides the samples
    chat: Chat = field(default_factory=Chat)  # how messages become text
    scoring: ScoringConfig = field(default_factory=ScoringConfig)  # how the reward is run
    agent: ToolAgent | None = None  # responses of several turns, with tools
    deterministic: bool = False  # a seed for each response
    faults: FaultsConfig = field(default_factory=FaultsConfig)  # when an engine has failed
    routed_experts: bool = False  # keep the experts each token was sent to (a mixture of experts only)
    server_args: dict[str, Any] = field(default_factory=dict)  # fields of SGLang's ServerArgs
    slots: Callable[[int], Sequence[Slot]] | None = None  # of an engine, by its number; None: the worker's own children

    @property
    def window_extra(self) -> int:
        """Groups in the making beyond those needed."""
        return math.ceil(self.over_sampling * self.prompts_per_step)
