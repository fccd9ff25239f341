"""The prompts of a run: training prompts and held-out sets, read and checked before any process starts.

For prompts with images, this module also has the settings of the engines, and the check that all models can read the images.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.architecture import Architecture
from mrl.config.instantiate import instantiate_callable
from mrl.config.schema import Config, Node
from mrl.config.validate import roles_of, teachers_of
from mrl.controller.colocation import ENGINES
from mrl.controller.plan_models import ModelPlan, chat_template, max_prompt_length, section_of
from mrl.core.metric_families import name_part
from mrl.data.columns import PromptExample
from mrl.data.images import PROCESSOR_BACKEND, ImagePrompts, processor_settings
from mrl.data.prompts import PromptConstraints, PromptDataset
from mrl.data.sources import PromptSource, test_sources, train_sources
from mrl.rewards.pass_at_k import MAX_SAMPLES
from mrl.rewards.reward_types import Response, Reward, unscored_reason
from mrl.rewards.scorer import check_reward
from mrl.rollout import rollout_log
from mrl.rollout.client import SAMPLING_KEYS, SamplingParams
from mrl.rollout.response_metrics import MAX_SOURCES, HeldOutEvaluation, response_limit_section
from mrl.tracking.console import show_warning

logger = logging.getLogger(__name__)

_WEIGHTS_BACKUP, _PIXEL_BACKEND = "enable_weights_cpu_backup", "image_processor_backend"  # server arguments of SGLang
RESPONSE_END_KEYS = ("stop", "stop_token_ids", "max_response_tokens")
"""Sampling keys that say where a response ends.

A held-out set that sets no other sampling keys is sampled twice (see plan_evaluations).
"""
DATA_TEST = ""  # name of data.test among the held-out sets
NO_SUFFIX = ""  # `metric_suffix` of a set with sampling keys of its own: its metric names have no suffix


def plan_evaluations(config: Config) -> tuple[HeldOutEvaluation, ...]:
    """Return how an evaluation samples and scores the held-out sets.

    By default, a set is sampled once at temperature 1 and once greedily. A set that has a sampling key outside
    RESPONSE_END_KEYS, such as n or temperature, is sampled once, as its keys say. Raises ValueError for an invalid value, or if
    two sets have the same name in metrics.

    The field `metric_suffix` of an evaluation is the suffix of its metric names: "sampled", "greedy" or NO_SUFFIX.
    """
    default_rows = config.trainer.eval_rows
    default_sets: dict[str, int | None] = {DATA_TEST: default_rows} if config.data.test else {}
    base = SamplingParams(config.rollout.max_response_tokens)
    own: list[HeldOutEvaluation] = []
    rewards = own_rewards(config.data.test_sets)
    for name, node in config.data.test_sets.items():
        key, settings = f"data.test_sets.{name}", node if isinstance(node, dict) else {}
        rows = _number_of_rows(settings, key, default_rows)
        sampling = {setting: value for setting, value in settings.items() if setting in SAMPLING_KEYS}
        if not sampling and name not in rewards:
            default_sets[name] = rows
            continue
        params = SamplingParams.of(sampling, key, base)
        if params.n > MAX_SAMPLES:
            raise ValueError(f"{key}.n={params.n}: at most {MAX_SAMPLES} responses to a prompt are evaluated.")
        samplings = {NO_SUFFIX: params} if sampling.keys() - set(RESPONSE_END_KEYS) else _default_samplings(params)
        own += [
            HeldOutEvaluation({name: rows}, params_of_suffix, suffix, rewards.get(name))
            for suffix, params_of_suffix in samplings.items()
        ]
    _check_metric_names(config.data.test_sets)
    default = [  # with metrics of all these sets together (`has_overall_metrics`)
        HeldOutEvaluation(default_sets, params, suffix, has_overall_metrics=True)
        for suffix, params in _default_samplings(base).items()
        if default_sets
    ]
    return (*default, *own)


def _default_samplings(params: SamplingParams) -> dict[str, SamplingParams]:
    return {"sampled": params, "greedy": replace(params, temperature=0.0)}


def _number_of_rows(settings: Node, key: str, default: int | None) -> int | None:
    rows = settings.get("rows", default)
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"{key}.rows={rows!r}: expected a number of rows, 1 or more, or null for all rows.")
    return rows


def own_rewards(test_sets: Node) -> dict[str, Reward]:
    """Return name of a held-out set -> its reward, for the sets that have a reward. Raises ValueError if a reward is invalid."""
    return {
        name: _own_reward(node["reward"], f"data.test_sets.{name}.reward")
        for name, node in test_sets.items()
        if isinstance(node, Mapping) and "reward" in node
    }


def _own_reward(node: Any, key: str) -> Reward:
    if not isinstance(node, Mapping):
        raise ValueError(
            f"{key}={node!r}: expected a node with _target_, such as {{_target_: mrl.rewards.rule_based.GSM8K}}; the files in "
            "conf/reward/ are examples."
        )
    reward = instantiate_callable(dict(node), key)
    try:
        check_reward(reward)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    return reward


def _check_metric_names(names: Mapping[str, Any]) -> None:
    """Raise ValueError if two held-out sets have the same name in metrics."""
    sets: dict[str, str] = {}
    for name in names:
        other = sets.setdefault(name_part(name), name)
        if other != name:
            raise ValueError(
                f"data.test_sets.{name}: its metrics would have the same names as those of {other}, such as "
                f"eval/{name_part(name)}/reward; rename one of the sets."
            )


def load_prompt_datasets(
    config: Config, actor: ModelPlan, reward: Reward, evaluations: Sequence[HeldOutEvaluation]
) -> tuple[PromptDataset, PromptDataset | None]:
    """Load the training prompts and the held-out prompts. Checks the recorded rollouts too, if the run replays them.

    A row that the reward cannot score is a bad row. Raises ValueError if a row cannot be used and the config does not skip such
    rows.
    """
    train = [replace(source, unusable_reason=unscored_row_check(reward)) for source in train_sources(config.data)]
    held_out = [_held_out_source(source, config, actor, reward, evaluations) for source in test_sources(config.data)]
    data = _load_prompts(config, actor, train, "train")
    test = _load_prompts(config, actor, held_out, "test") if held_out else None
    if (num_sources := len(data.rows_per_data_source)) > MAX_SOURCES:
        show_warning(
            f"the training data has {num_sources} data sources; only the {MAX_SOURCES} with the most rows get metrics of their "
            "own (reward/<source>/mean). To group sources, name another column in data.columns.data_source."
        )
    if config.rollout.replay:
        routing = config.rollout.routing_replay
        rollout_log.check_recording(config.rollout.replay, config.trainer.max_steps, routing=routing)
    return data, test


def _held_out_source(
    source: PromptSource, config: Config, actor: ModelPlan, reward: Reward, evaluations: Sequence[HeldOutEvaluation]
) -> PromptSource:
    """Return a copy of a held-out set's source, with a limit on the length of its prompts and with a check of its rows.

    The check finds rows that the reward of the set cannot score.
    """
    of_set = [evaluation for evaluation in evaluations if source.name in evaluation.sets]
    response_tokens = max(evaluation.sampling.max_new_tokens for evaluation in of_set)
    limit = max_prompt_length(config, actor.context, response_tokens, response_limit_section(source.name))
    return replace(source, unusable_reason=unscored_row_check(of_set[0].reward or reward), max_prompt_tokens=limit)


def unscored_row_check(reward: Reward) -> Callable[[PromptExample], str]:
    """Return a function that returns why the reward cannot score responses to a row, or "" if it can."""
    reasons: dict[tuple[str, str, str], str] = {}  # (data source, ability, style) -> reason

    def unusable_reason(example: PromptExample) -> str:
        attributes = source, ability, style = example.data_source, example.ability, example.style
        if attributes not in reasons:
            probe = Response(source, text="", ground_truth="", ability=ability, style=style)
            reasons[attributes] = unscored_reason(reward, probe)
        return reasons[attributes]

    return unusable_reason


def image_args(actor: ModelPlan) -> dict[str, Any]:
    """Return server arguments that make SGLang compute pixels and position embeddings of an image model as trainers do."""
    if not actor.arch.vision:
        return {}
    return {"enable_precise_embedding_interpolation": True, _PIXEL_BACKEND: PROCESSOR_BACKEND}


def image_environment(config: Config) -> dict[str, str]:
    """Return environment variables that engines need if the run trains the vision tower; {} for any other run.

    SGLang (0.5.23) caches outputs of the vision tower, and keeps them when it loads new weights. If the tower is trained, cached
    outputs are wrong, so mrl turns the cache off.
    """
    return dict(SGLANG_VLM_CACHE_SIZE_MB="0") if config.model.train_vision else {}


def check_image_engines(config: Config, arch: Architecture, colocated_roles: frozenset[frozenset[str]]) -> None:
    """Raise ValueError if values in the section `sglang` would make the engines of an image model sample wrongly."""
    if arch.vision is None:
        return
    if config.sglang.get(_WEIGHTS_BACKUP) is False and any(ENGINES in roles for roles in colocated_roles):
        raise ValueError(
            f"sglang.{_WEIGHTS_BACKUP}=false: colocated engines lose their weights when they are offloaded, and a weight sync "
            "does not restore the vision tower; leave the key out."
        )
    if (backend := config.sglang.get(_PIXEL_BACKEND, PROCESSOR_BACKEND)) != PROCESSOR_BACKEND:
        raise ValueError(
            f"sglang.{_PIXEL_BACKEND}={backend}: trainers compute pixels with {PROCESSOR_BACKEND}; other backends give other "
            "pixels; leave the key out."
        )


def check_readers_of_images(config: Config, models: Mapping[str, ModelPlan], *data: PromptDataset | None) -> None:
    """Raise ValueError if a part of the run cannot read the images of the prompts in `data`."""
    if not any(prompts is not None and prompts.has_images for prompts in data):
        return
    if config.rollout.agent:
        raise ValueError(
            "rollout.agent: agents do not support prompts with images; remove the agent, or the rows with images."
        )
    for name in teachers_of(config):
        if roles_of(config)[name].is_served:
            raise ValueError(f"roles.{name}: served teachers get no images; use a teacher on trainer ranks.")
    actor = models["actor"]
    for name, model in models.items():
        if _image_format(model) is None or _image_format(model) != _image_format(actor):
            raise ValueError(
                f"{section_of(name)}.path={model.model_path}: the model does not read the images of the actor's prompts; use an "
                "image model of the same family with the same image processor."
            )


def _image_format(model: ModelPlan) -> tuple[Any, ...] | None:
    """Return what determines the tokens and pixels of an image; None: the model reads no images."""
    vision = model.arch.vision
    if vision is None:
        return None
    patch = [vision.config[name] for name in ("patch_size", "temporal_patch_size")]
    return vision.model_type, vision.image_token, vision.merge_size, patch, processor_settings(model.model_path)


def _load_prompts(config: Config, actor: ModelPlan, sources: list[PromptSource], name: str) -> PromptDataset:
    constraints = PromptConstraints(
        max_prompt_length(config, actor.context),
        actor.arch.vocab_size,
        chat_template(config),
        ImagePrompts.of(actor.model_path, actor.arch.vision),
    )
    data = PromptDataset.load(sources, actor.model_path, constraints)
    bad_rows = Path(config.run.dir) / f"bad_rows_{name}.jsonl"
    data.enforce_row_policies(bad_rows, bad_rows=config.data.bad_rows, overlong=config.data.overlong)
    logger.info("%s prompts: %s", name, data.report)
    return data
