"""The prompts of a run: training prompts and held-out prompts, read and checked before any process starts."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mrl.config.schema import Config
from mrl.controller.plan_models import ModelPlan, chat_template, max_prompt_length
from mrl.data.columns import PromptExample
from mrl.data.prompts import PromptConstraints, PromptDataset
from mrl.data.sources import PromptSource, test_sources, train_sources
from mrl.rewards.reward_types import Response, Reward, unscored_reason
from mrl.rollout import rollout_log

logger = logging.getLogger(__name__)


def load_prompt_datasets(
    config: Config, actor: ModelPlan, reward: Reward
) -> tuple[PromptDataset, PromptDataset | None]:
    """Load the training prompts and the held-out prompts. Checks the recorded rollouts too, if the run replays them.

    A row that the reward cannot score is a bad row. Raises ValueError if a row cannot be used and the config does not skip such
    rows.
    """
    find_fault = find_unscored(reward)
    train = [replace(source, find_fault=find_fault) for source in train_sources(config.data)]
    held_out = [replace(source, find_fault=find_fault) for source in test_sources(config.data)]
    data = _load_prompts(config, actor, train, "train")
    test = _load_prompts(config, actor, held_out, "test") if held_out else None
    if config.rollout.replay:
        routing = config.rollout.routing_replay
        rollout_log.check_recording(config.rollout.replay, config.trainer.max_steps, routing=routing)
    return data, test


def find_unscored(reward: Reward) -> Callable[[PromptExample], str]:
    """Return a function that says why no part of the reward scores responses to a row, or "" if one does."""
    reasons: dict[tuple[str, str, str], str] = {}  # (data source, ability, style) -> reason

    def find_fault(example: PromptExample) -> str:
        attributes = source, ability, style = example.data_source, example.ability, example.style
        if attributes not in reasons:
            probe = Response(source, text="", ground_truth="", ability=ability, style=style)
            reasons[attributes] = unscored_reason(reward, probe)
        return reasons[attributes]

    return find_fault


def _load_prompts(config: Config, actor: ModelPlan, sources: list[PromptSource], name: str) -> PromptDataset:
    constraints = PromptConstraints(
        max_prompt_length(config, actor.context), actor.arch.vocab_size, chat_template(config)
    )
    data = PromptDataset.load(sources, actor.model_path, constraints)
    bad_rows = Path(config.run.dir) / f"bad_rows_{name}.jsonl"
    data.enforce_row_policies(bad_rows, bad_rows=config.data.bad_rows, overlong=config.data.overlong)
    logger.info("%s prompts: %s", name, data.report)
    return data
