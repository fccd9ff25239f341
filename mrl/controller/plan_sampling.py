"""How training responses are sampled, and which of these settings training cannot correct for."""

from collections.abc import Sequence
from typing import Any

from mrl.algorithms.objective import Objective
from mrl.config.schema import Config
from mrl.rollout.client import SAMPLING_KEYS, SamplingParams
from mrl.rollout.engines.server_args import NO_TOKENIZER
from mrl.rollout.held_out import HeldOutEvaluation
from mrl.tracking.console import show_warning

TRUNCATING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Key of the section rollout that leaves unlikely tokens out -> the value with which it leaves out none."""


def plan_sampling(config: Config) -> SamplingParams:
    """Return how the responses that steps train are sampled. Raises ValueError for an invalid value."""
    rollout = config.rollout
    node = {name: getattr(rollout, name) for name in SAMPLING_KEYS if name != "n"}
    return SamplingParams.of(node, "rollout", SamplingParams(rollout.max_response_tokens))


def check_sampling(
    config: Config, sampling: SamplingParams, evaluations: Sequence[HeldOutEvaluation], vocab_size: int
) -> None:
    """Raise ValueError if the engines cannot sample as the config says. `evaluations`: how held-out sets are sampled."""
    sections = {f"data.test_sets.{next(iter(each.sets))}": each.sampling for each in evaluations} | {"rollout": sampling}
    for section, params in sections.items():
        if outside := [token for token in params.stop_token_ids if token >= vocab_size]:
            raise ValueError(
                f"{section}.stop_token_ids={list(params.stop_token_ids)}: token {outside[0]} is outside the vocabulary of the "
                f"model, which ends at {vocab_size - 1}."
            )
        if params.min_p and config.rollout.deterministic:
            raise ValueError(
                f"{section}.min_p={params.min_p} with rollout.deterministic=true: SGLang cannot sample with min_p and a seed; use "
                "top_p in its place, or set rollout.deterministic=false."
            )


def tokenizer_args(
    config: Config, sampling: SamplingParams, evaluations: Sequence[HeldOutEvaluation]
) -> dict[str, Any]:
    """Return the server arguments that stop texts need. Raises ValueError if the config section `sglang` contradicts them."""
    keys = ["rollout.stop"] if sampling.stop else []
    keys += [f"data.test_sets.{next(iter(each.sets))}.stop" for each in evaluations if each.sampling.stop]
    if keys and config.sglang.get(NO_TOKENIZER):
        raise ValueError(
            f"sglang.{NO_TOKENIZER}=true: engines without a tokenizer cannot find the texts of {keys[0]}; leave {NO_TOKENIZER} "
            "out, or use stop_token_ids."
        )
    return {NO_TOKENIZER: False} if keys else {}


def warn_of_sampling(config: Config, objective: Objective) -> None:
    """Show what differs between the distribution that the engines sample from and the distribution that is trained.

    SGLang returns log-probabilities at the sampling temperature, after the repetition penalty, and before top_p, top_k and min_p.
    So a correction by importance sampling compensates for the penalty, but not for tokens that are left out.
    """
    rollout = config.rollout
    values = {name: getattr(rollout, name) for name in TRUNCATING}
    changed = [f"rollout.{name}={value}" for name, value in values.items() if value != TRUNCATING[name]]
    if changed:
        show_warning(
            f"{', '.join(changed)}: the engines leave out unlikely tokens, but training uses the log-probabilities of the whole "
            "distribution. The policy is trained only on tokens that are likely already, and nothing corrects for this "
            "(docs/concepts/algorithms.md)."
        )
    is_corrected = objective.correction is not None or objective.rollout_logprobs_as_old
    if rollout.repetition_penalty != 1 and not is_corrected:
        show_warning(
            f"rollout.repetition_penalty={rollout.repetition_penalty}: the engines sample from a distribution with the penalty, "
            "but training uses the distribution without it. Set algorithm.correction (docs/concepts/algorithms.md), which "
            "corrects for it, or rollout.repetition_penalty=1."
        )
