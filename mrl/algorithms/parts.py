"""AlgorithmParts: the objects that make up the configured algorithm. They are built and checked before any process starts."""

from dataclasses import dataclass

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.advantages import Advantage
from mrl.algorithms.corrections import ImportanceSampling, is_importance_sampling
from mrl.algorithms.distillation import TEACHER_OUTPUTS
from mrl.algorithms.filters import Filter
from mrl.algorithms.inputs import needs_of
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.objective import Objective
from mrl.config.instantiate import instantiate_callable
from mrl.config.schema import Config, Node
from mrl.config.validate import roles_of, teachers_of

POLICY_COLUMNS = {"old_logprobs": "logprobs", "entropies": "entropies", "sum_pi_squared": "sum_pi_squared"}
"""Column that the actor computes before its first optimizer step on a rollout -> output of MegatronActor.head that it is.

The actor computes all of these columns that are needed in one forward pass."""
COLUMNS = frozenset({*POLICY_COLUMNS, "ref_logprobs", "values", "rollout_logprobs"})
"""Columns (one number per sampled token) that the parts of an algorithm may name in `needs`. Models compute them, if needed.

An entry of the key `roles` computes a further column, such as teacher_logprobs.

    old_logprobs      log-probability of the token under the policy before the first optimizer step on the rollout
    entropies         entropy, in nats, of the distribution of this policy that predicts the token
    sum_pi_squared    sum of the squared probabilities of this distribution over the vocabulary
    ref_logprobs      log-probability under the reference
    values            value that the critic predicts before the token
    rollout_logprobs  log-probability that the engine reported; NaN if it reported none. No model computes this column

All distributions are softmax(logits / rollout.temperature)."""


@dataclass(frozen=True)
class AlgorithmParts:
    """The objects that decide how the policy learns from rewards."""

    objective: Objective
    advantage_pipeline: AdvantagePipeline
    rollout_filter: Filter | None  # decides which groups are trained; None: all groups are trained
    needs: frozenset[str]  # what the parts read: names of columns, and "greedy_rewards"
    penalties: dict[str, KLPenalty]  # the configured KL penalties; possible keys: "reward", "loss"


def build_algorithm(config: Config, step_needs: frozenset[str] = frozenset()) -> AlgorithmParts:
    """Build the algorithm of a config. Raises ValueError for parts that are invalid or do not fit together.

    `step_needs`: what the training step needs in addition, if `trainer._target_` names one.
    """
    algorithm = config.algorithm
    objective = build_objective(config)
    reward_penalty = _penalty(algorithm.kl_in_reward, "algorithm.kl_in_reward")
    advantage: Advantage = instantiate_callable(algorithm.advantage, "algorithm.advantage")
    advantage_pipeline = AdvantagePipeline(
        advantage, objective, reward_penalty, algorithm.whiten, algorithm.mask_truncated
    )
    needs = advantage_pipeline.needs | objective.needs | step_needs
    if algorithm.mini_batches * algorithm.epochs > 1:  # later optimizer steps are off-policy
        needs |= {"old_logprobs"}
    if algorithm.old_logprobs == "rollout":
        needs -= {"old_logprobs"}
    if reward_penalty and not getattr(advantage, "uses_token_rewards", True):
        raise ValueError(
            f"algorithm.kl_in_reward: {type(advantage).__name__} does not use token rewards; use algorithm.kl_in_loss."
        )
    if "values" in needs and "values" not in needs_of(advantage):
        raise ValueError(
            "algorithm.loss or algorithm.correction needs values of a critic, but algorithm.advantage computes no returns that "
            "the critic could learn; choose an advantage estimator that computes returns, such as GAE."
        )
    _check_distillation(config, objective, needs)
    columns = COLUMNS | {role.column for role in roles_of(config).values() if not role.is_served} | TEACHER_OUTPUTS
    if unknown := needs - columns - {"greedy_rewards"}:
        if names := sorted(name.removesuffix("_logprobs") for name in unknown if name.endswith("_logprobs")):
            raise ValueError(
                f"roles.{names[0]}.path must name a Hugging Face folder: the algorithm reads {names[0]}_logprobs, the "
                "log-probabilities of this model."
            )
        raise ValueError(
            f"algorithm: a part names {', '.join(sorted(unknown))} in its attribute `needs`; expected names out of "
            f"{', '.join(sorted(columns))} and greedy_rewards."
        )
    rollout_filter = instantiate_callable(config.rollout.filter, "rollout.filter") if config.rollout.filter else None
    penalties = {"reward": reward_penalty, "loss": objective.kl}
    return AlgorithmParts(
        objective, advantage_pipeline, rollout_filter, needs, {term: kl for term, kl in penalties.items() if kl}
    )


def _check_distillation(config: Config, objective: Objective, needs: frozenset[str]) -> None:
    """Raise ValueError if the algorithm reads outputs of a teacher that nothing computes."""
    if not (outputs := needs & TEACHER_OUTPUTS):
        return
    if not teachers_of(config):
        raise ValueError(
            "roles.teacher.path must name a Hugging Face folder: algorithm.loss compares the policy with this model."
        )
    if objective.distillation is None or len(outputs) > 1:
        raise ValueError(
            f"algorithm: a part names {', '.join(sorted(outputs))} in its attribute `needs`, but only one loss of the class "
            "mrl.algorithms.distillation.Distillation, in algorithm.loss, can read these outputs."
        )


def build_objective(config: Config) -> Objective:
    """Build the objective that the actor's optimizer minimises. Raises ValueError if the parts of the objective conflict."""
    algorithm, from_rollout = config.algorithm, config.algorithm.old_logprobs == "rollout"
    correction = instantiate_callable(algorithm.correction, "algorithm.correction") if algorithm.correction else None
    if from_rollout and correction and is_importance_sampling(correction):
        raise ValueError(
            "algorithm.old_logprobs=rollout makes the engine's policy the old policy, so algorithm.correction has nothing to "
            "correct; set algorithm.old_logprobs=recompute, or remove algorithm.correction."
        )
    policy = instantiate_callable(
        algorithm.loss, "algorithm.loss", required_attributes=("zero_without_advantage", "uses_entropy")
    )
    if config.rollout.staleness and not (correction or from_rollout) and getattr(policy, "uses_logprobs", True):
        correction = ImportanceSampling()  # otherwise gradients from samples of older weights are biased
    return Objective(
        policy=policy,
        correction=correction,
        kl=_penalty(algorithm.kl_in_loss, "algorithm.kl_in_loss"),
        entropy_coef=algorithm.entropy_coef,
        rollout_logprobs_as_old=from_rollout,
    )


def refuse_distillation(objective: Objective, command: str) -> None:
    """Raise ValueError if the loss compares the policy with a teacher, because `command` runs no teacher."""
    if objective.distillation is not None:
        raise ValueError(
            f"algorithm.loss._target_=mrl.algorithms.distillation.Distillation: {command} has no outputs of a teacher; use "
            "another algorithm, such as algorithm=distill, which has the same model and layout."
        )


def _penalty(node: Node | None, key: str) -> KLPenalty | None:
    """Build a KL penalty from `node`, a dict with its arguments. Without a node, return None. `key` is the config key."""
    if not node:
        return None
    return instantiate_callable({"_target_": f"{KLPenalty.__module__}.{KLPenalty.__qualname__}"} | node, key)
