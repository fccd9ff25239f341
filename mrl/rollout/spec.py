"""Settings that a rollout worker is built from."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.config.schema import FaultToleranceConfig, ScoringConfig
from mrl.core.types import DeviceSlot
from mrl.data.prompts import PromptDataset
from mrl.data.tokenizer import ChatTemplate
from mrl.rewards.reward_types import Reward
from mrl.rollout.agents.tool_agent import ToolAgent
from mrl.rollout.step_metrics import GroupFilter


@dataclass(frozen=True)
class RolloutSpec:
    """Engines, prompts and rewards of one rollout worker."""

    model_path: str  # Hugging Face folder: architecture, tokenizer, and the weights that engines start with
    run_dir: str  # logs and recorded steps go here
    train: PromptDataset
    test: PromptDataset | None  # held-out prompts
    reward: Reward
    advantage_pipeline: AdvantagePipeline
    group_filter: GroupFilter | None  # dynamic sampling: which groups are trained; None: all
    needs_greedy: bool  # also sample a greedy response to each prompt, for the advantage
    old_from_rollout: bool  # use the rollout log-probabilities as old log-probabilities
    prompts_per_step: int
    responses_per_prompt: int
    max_response_tokens: int
    temperature: float
    num_engines: int
    engine_urls: tuple[str, ...]  # external servers; if there are any, no engine is started
    engine_tp: int
    seed: int
    eval_rows: int | None  # evaluate on this many rows of each test set; None: all
    request_timeout_s: float
    record: bool  # write each step's tokens to run_dir/rollouts
    replay: str | None  # folder of recorded steps to read instead of sampling
    staleness: int = 0  # most weight versions between the weights that sample a token and those that train on it
    over_sample_rate: float = 0.0  # extra groups in flight, as a fraction of a step's groups
    in_order: bool = False  # steps train groups in the order in which their prompts were drawn
    max_rounds: int = 1  # rejected groups are replaced until a step has drawn this multiple of its groups
    log_key: str = "samples"  # hash of the settings and data that determine the samples (see RolloutLog)
    chat: ChatTemplate = field(default_factory=ChatTemplate)  # how messages become text
    scoring: ScoringConfig = field(default_factory=ScoringConfig)  # processes and deadline of the reward
    agent: ToolAgent | None = None  # for multi-turn responses with tools
    deterministic: bool = False  # give each response its own seed
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)  # when an engine has failed
    routed_experts: bool = False  # return the experts of each token (mixture of experts only)
    server_args: dict[str, Any] = field(default_factory=dict)  # fields of SGLang's ServerArgs
    # Returns the device slots of engine 0 to num_engines - 1. None: engines are child processes of the rollout worker
    slots: Callable[[int], Sequence[DeviceSlot]] | None = None

    @property
    def extra_groups(self) -> int:
        """Over-sampling: groups in flight beyond those that steps need."""
        return math.ceil(self.over_sample_rate * self.prompts_per_step)

    @property
    def buffer_capacity(self) -> int:
        """Groups that may be drawn and not yet trained."""
        return (self.staleness + 1) * self.prompts_per_step + self.extra_groups
