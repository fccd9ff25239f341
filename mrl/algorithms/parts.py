"""AlgorithmParts: the objects of the configured algorithm, built and checked before any process starts."""

from dataclasses import dataclass

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.advantages import Advantage
from mrl.algorithms.corrections import ImportanceSampling, is_importance_sampling
from mrl.algorithms.filters import Filter
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.objective import Objective
from mrl.config.instantiate import instantiate_callable
from mrl.config.schema import Config, Node

SCORED_COLUMNS = frozenset({"old_logprobs", "ref_logprobs", "values", "teacher_logprobs"})
"""Columns [R] that models compute. The parts of an algorithm declare which of them they need."""


@dataclass(frozen=True)
class AlgorithmParts:
    """Everything that decides how the policy learns from rewards."""

    objective: Objective
    advantage_pipeline: AdvantagePipeline
    group_filter: Filter | None  # decides which groups are trained; None: all
    needs: frozenset[str]  # columns that must be computed: from SCORED_COLUMNS, or "greedy_rewards"
    penalties: dict[str, KLPenalty]  # keys: "reward", "loss"


def build_algorithm(config: Config) -> AlgorithmParts:
    """Build every part. Raises ValueError that names the key, its value and the allowed values."""
    algorithm = config.algorithm
    objective = build_objective(config)
    in_reward = _penalty(algorithm.kl_in_reward, "algorithm.kl_in_reward")
    advantage: Advantage = instantiate_callable(algorithm.advantage, "algorithm.advantage")
    advantage_pipeline = AdvantagePipeline(advantage, objective, in_reward, algorithm.whiten, algorithm.mask_truncated)
    needs = advantage_pipeline.needs | objective.needs
    if algorithm.mini_batches * algorithm.epochs > 1:  # later optimizer steps are off-policy
        needs |= {"old_logprobs"}
    if algorithm.old_logprobs == "rollout":
        needs -= {"old_logprobs"}
    if in_reward and not getattr(advantage, "uses_token_rewards", True):
        raise ValueError(
            f"algorithm.kl_in_reward: {type(advantage).__name__} does not use token rewards; use algorithm.kl_in_loss."
        )
    if "values" in needs and "values" not in getattr(advantage, "needs", frozenset()):
        raise ValueError(
            "algorithm.loss needs values of the critic, but algorithm.advantage computes no returns to train it; choose an "
            "advantage that needs values, such as GAE."
        )
    if unknown := needs - SCORED_COLUMNS - {"greedy_rewards"}:
        raise ValueError(
            f"algorithm: the advantage or the loss needs {', '.join(sorted(unknown))}, which no model computes; expected "
            f"{', '.join(sorted(SCORED_COLUMNS))}."
        )
    group_filter = instantiate_callable(config.rollout.filter, "rollout.filter") if config.rollout.filter else None
    penalties = {"reward": in_reward, "loss": objective.kl}
    return AlgorithmParts(
        objective, advantage_pipeline, group_filter, needs, {where: kl for where, kl in penalties.items() if kl}
    )


def build_objective(config: Config) -> Objective:
    """Build the objective that the actor's optimizer steps minimise. Raises ValueError, as `build_algorithm` does."""
    algorithm, from_rollout = config.algorithm, config.algorithm.old_logprobs == "rollout"
    correction = instantiate_callable(algorithm.correction, "algorithm.correction") if algorithm.correction else None
    if from_rollout and correction and is_importance_sampling(correction):
        raise ValueError(
            "algorithm.old_logprobs=rollout: the old policy is then the engine's policy, so algorithm.correction has nothing to "
            "correct; set algorithm.old_logprobs=recompute, or remove algorithm.correction."
        )
    if config.rollout.staleness and not (correction or from_rollout):
        correction = ImportanceSampling()  # without it, gradients from samples of older weights are biased
    return Objective(
        policy=instantiate_callable(algorithm.loss, "algorithm.loss", needs=("zero_without_advantage", "uses_entropy")),
        correction=correction,
        kl=_penalty(algorithm.kl_in_loss, "algorithm.kl_in_loss"),
        entropy_coef=algorithm.entropy_coef,
        old_from_rollout=from_rollout,
    )


def _penalty(node: Node | None, key: str) -> KLPenalty | None:
    if not node:
        return None
    return instantiate_callable({"_target_": f"{KLPenalty.__module__}.{KLPenalty.__qualname__}"} | node, key)
