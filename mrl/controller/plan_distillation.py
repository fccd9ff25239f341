"""The teachers of a run: checks before any process starts, and the responses that each teacher teaches.

Every check raises ValueError for a mistake of the user. No function starts a process.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.hf_config import HFConfig
from mrl.algorithms.distillation import TEACHER_OUTPUTS, Distillation
from mrl.algorithms.parts import AlgorithmParts
from mrl.config.process_schema import RoleConfig
from mrl.config.schema import Config
from mrl.config.validate import teachers_of
from mrl.controller.plan_models import ModelPlan, max_prompt_length
from mrl.core.types import Rollouts


def check_distillation(config: Config, algorithm: AlgorithmParts, models: Mapping[str, ModelPlan]) -> None:
    """Check the teachers of a Distillation loss: their vocabularies, and whether served teachers can compute what the loss needs.

    `models`: the models that Megatron runs, by role, including the actor.
    """
    distillation = algorithm.objective.distillation
    if distillation is None:
        return
    actor = models["actor"]
    if (k := distillation.top_k) and k > actor.arch.vocab_size:
        raise ValueError(
            f"algorithm.loss.top_k={k}: the vocabulary has only {actor.arch.vocab_size} tokens; use fewer, or null for the "
            "whole vocabulary."
        )
    for name, role in teachers_of(config).items():
        if role.is_served:
            _check_served(config, distillation, name, role, actor)
            vocab_size, path = HFConfig.load(str(role.path))["vocab_size"], str(role.path)
        else:
            vocab_size, path = models[name].arch.vocab_size, models[name].model_path
        key = f"roles.{name}.path={role.path}"
        if vocab_size != actor.arch.vocab_size:
            raise ValueError(
                f"{key}: its vocabulary has {vocab_size} tokens, the policy's {actor.arch.vocab_size}; "
                "mrl.algorithms.distillation.Distillation compares the probabilities of teacher and policy for each token id. "
                "Use a teacher of the same model family, or algorithm=distill, which reads only the sampled tokens."
            )
        if (other := _tokens(path)) and (own := _tokens(actor.model_path)) and own != other:
            raise ValueError(
                f"{key}: its tokenizer.json has other tokens than the policy's, so equal token ids mean different tokens. "
                "Use a teacher with the tokenizer of the policy."
            )


def _check_served(config: Config, distillation: Distillation, name: str, role: RoleConfig, actor: ModelPlan) -> None:
    key = f"roles.{name}.num_engines={role.num_engines}"
    if not distillation.top_k:
        raise ValueError(
            f"{key}: SGLang returns the most probable tokens, not the whole distribution; set algorithm.loss.top_k, such as 64, "
            f"or remove roles.{name}.num_engines, so that trainer ranks run the teacher."
        )
    temperature = distillation.temperature or config.rollout.temperature
    if temperature != 1:
        raise ValueError(
            f"{key}: SGLang returns probabilities at temperature 1, but the divergence has temperature {temperature:g} "
            "(algorithm.loss.temperature, or rollout.temperature); set algorithm.loss.temperature=1."
        )
    longest = max_prompt_length(config, actor.context) + config.rollout.max_response_tokens
    context = role.sglang.get("context_length") or HFConfig.load(str(role.path))["max_position_embeddings"]
    if context < longest:
        raise ValueError(
            f"roles.{name}.path={role.path}: its context is {context} tokens, but the actor's sequences need {longest}."
        )


def _tokens(folder: str) -> object:
    """Return the vocabulary of the tokenizer in a folder, without added tokens. Returns None if there is no tokenizer.json."""
    path = Path(folder) / "tokenizer.json"
    return json.loads(path.read_text()).get("model", {}).get("vocab") if path.is_file() else None


def check_taught_sources(config: Config, algorithm: AlgorithmParts, sources: Iterable[str]) -> None:
    """Raise ValueError if a data source of the prompts has no teacher, or a teacher names a data source without prompts."""
    if not algorithm.required_inputs & (TEACHER_OUTPUTS | {"teacher_logprobs"}):
        return
    teachers, found = teachers_of(config), set(sources)
    taught = {source for role in teachers.values() for source in role.teacher_for}
    for name, role in teachers.items():
        if unknown := sorted(set(role.teacher_for) - found):
            raise ValueError(
                f"roles.{name}.teacher_for={role.teacher_for}: no training prompt has the data source {unknown[0]!r}; the "
                f"prompts have {', '.join(map(repr, sorted(found)))}."
            )
    has_default = any(not role.teacher_for for role in teachers.values())
    if teachers and not has_default and (missing := sorted(found - taught)):
        raise ValueError(
            f"roles: no teacher teaches the data source {missing[0]!r} of the training prompts; add it to `teacher_for` of a "
            "role, or add roles.teacher, which teaches all other prompts."
        )


def taught_responses(
    config: Config, name: str, data_source: Callable[[int], str]
) -> Callable[[Rollouts], NDArray[np.bool_]]:
    """Return a function that maps Rollouts to a mask [B] of the responses for which the role `name` computes outputs.

    A teacher computes outputs for the responses that it teaches. Any other role computes outputs for all responses. `data_source`
    returns the data source of a row of the training prompts, and "offline" for a row of data.offline.path.
    """
    teachers = teachers_of(config)
    # own: data sources that the role names in `teacher_for`. others: data sources that only other teachers name.
    own = set(teachers[name].teacher_for) if name in teachers else set()
    others = {source for role in teachers.values() for source in role.teacher_for} - own if name in teachers else set()

    def rows(rollouts: Rollouts) -> NDArray[np.bool_]:
        sources = [data_source(row) for row in rollouts.rows.tolist()]
        return np.array([source in own if own else source not in others for source in sources], bool)

    return rows


def teacher_output_layer_folders(
    config: Config, algorithm: AlgorithmParts, models: Mapping[str, ModelPlan]
) -> dict[str, str]:
    """Return teacher -> folder from which the trainer ranks of the actor load the output layer of the teacher.

    These ranks compute the teacher's logits from its hidden states. Returns {} if the loss does not distill over the whole
    vocabulary.

    `models`: the models beside the actor, by role.
    """
    distillation = algorithm.objective.distillation
    if distillation is None or distillation.top_k:
        return {}
    return {name: models[name].model_path for name in teachers_of(config)}
