"""Builds AlgorithmParts, the objects that make up the configured algorithm, and checks them before any process starts.

The class Coefficients has the coefficients of the KL penalties and of the entropy bonus, which may adapt over a run.
"""

import difflib
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.advantages import Advantage
from mrl.algorithms.corrections import ImportanceSampling, compares_old_policy
from mrl.algorithms.distillation import TEACHER_OUTPUTS
from mrl.algorithms.filters import Filter
from mrl.algorithms.inputs import required_inputs_of
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import ValueLossFunction
from mrl.algorithms.objective import AGGREGATIONS, EntropyBonus, Objective, TokenWeighting
from mrl.config.instantiate import instantiate, instantiate_callable
from mrl.config.schema import AlgorithmConfig, Config, Node
from mrl.config.validate import REFERENCE_ROLE, TEACHER, roles_of, teachers_of
from mrl.core.code_locations import plug_in_name

POLICY_COLUMNS = {"old_logprobs": "logprobs", "entropies": "entropies", "sum_pi_squared": "sum_pi_squared"}
"""Column that the actor computes before its first optimizer step on a rollout -> output of MegatronActor.head with this content.

The actor computes only the columns that the algorithm needs, all of them in one forward pass."""
COLUMNS = frozenset({*POLICY_COLUMNS, "ref_logprobs", "values", "rollout_logprobs"})
"""Columns (one number per sampled token) that parts of an algorithm may name in `required_inputs`.

Models compute only needed columns. Each model of the key `roles`, except `reference` and the models that SGLang serves, computes
a further column, such as teacher_logprobs.

    old_logprobs      log-probability of the token under the policy before the first optimizer step on the rollout
    entropies         entropy, in nats, of the distribution over the vocabulary with which this policy predicts the token
    sum_pi_squared    sum of the squared probabilities of this distribution
    ref_logprobs      log-probability under the reference
    values            value that the critic predicts before the token
    rollout_logprobs  log-probability that the engine reported; NaN if it reported none. No model computes this column

All distributions are softmax(logits / rollout.temperature)."""


TERM_METRICS = {"kl_reward": "policy/kl_reward", "kl_loss": "policy/kl_ref", "entropy": "policy/entropy_mean"}
"""Name of a term of the reward or of the loss -> metric that the term's adaptive coefficient keeps near its target."""
COEF_METRICS = {
    "kl_reward": "policy/kl_coef_reward",
    "kl_loss": "policy/kl_coef_loss",
    "entropy": "policy/entropy_coef",
}
"""Name of a term -> name of the metric that reports which coefficient the step used."""


class Term(Protocol):
    """Interface of a term with a coefficient: KLPenalty and EntropyBonus."""

    @property
    def coef(self) -> float:
        """The coefficient at the start of the run."""
        ...

    @property
    def target(self) -> float | None:
        """Target of the measured value. The coefficient adapts to reach it. None: the coefficient is constant."""
        ...

    def next_coef(self, coef: float, measured: float, samples: int) -> float:
        """Return the coefficient after a training step with `samples` responses. `measured`: value that the step measured."""
        ...

    def is_active(self, measured: float | None) -> bool:
        """Return whether a step uses the term. `measured`: value in the previous step; None: no step has measured it yet."""
        ...


@dataclass(frozen=True)
class AlgorithmParts:
    """The objects that decide how the policy learns from rewards."""

    objective: Objective
    advantage_pipeline: AdvantagePipeline
    rollout_filter: Filter | None  # decides on which groups a step trains; None: on all groups
    # what the parts read: names of columns, "greedy_rewards", and names in TEACHER_OUTPUTS
    required_inputs: frozenset[str]
    terms: dict[str, Term]  # the configured terms that have a coefficient; possible keys: kl_reward, kl_loss, entropy
    weighting: TokenWeighting  # computes the weight of each token in the loss
    value_loss: ValueLossFunction  # loss of the critic, if the run has one


def build_algorithm(config: Config, step_required_inputs: Mapping[str, frozenset[str]] | None = None) -> AlgorithmParts:
    """Build the algorithm of a config. Raises ValueError for parts that are invalid or do not fit together.

    `step_required_inputs`: config key -> further columns that the user's own training step (`trainer._target_`) needs. The key
    is the config key of the step itself or of the argument of the step that needs these columns.
    """
    algorithm, step_required_inputs = config.algorithm, step_required_inputs or {}
    objective = build_objective(config)
    reward_penalty = _penalty(algorithm.kl_in_reward, "algorithm.kl_in_reward")
    advantage: Advantage = instantiate_callable(algorithm.advantage, "algorithm.advantage", ["inputs"])
    resampling = None
    if algorithm.resampling:
        arguments = ["rewards", "groups", "rng"]
        resampling = instantiate_callable(algorithm.resampling, "algorithm.resampling", arguments)
    advantage_pipeline = AdvantagePipeline(
        advantage, objective, reward_penalty, algorithm.whiten, algorithm.mask_truncated, resampling
    )
    required_inputs = advantage_pipeline.required_inputs | objective.required_inputs
    required_inputs = required_inputs.union(*step_required_inputs.values())
    if algorithm.mini_batches * algorithm.epochs > 1:  # later optimizer steps are off-policy
        required_inputs |= {"old_logprobs"}
    if algorithm.old_logprobs == "rollout":
        required_inputs -= {"old_logprobs"}
        if getattr(advantage, "correction", None):
            raise ValueError(
                "algorithm.old_logprobs=rollout makes the engine's policy the old policy, so algorithm.advantage.correction has "
                "nothing to correct; remove it, or set algorithm.old_logprobs=recompute."
            )
    if reward_penalty and not getattr(advantage, "uses_token_rewards", True):
        raise ValueError(
            f"algorithm.kl_in_reward: {plug_in_name(advantage)} does not use token rewards; use algorithm.kl_in_loss."
        )
    role_columns = {role.column for role in roles_of(config).values() if not role.is_served}
    _check_distillation(config, objective, required_inputs)
    _check_role_columns(config, required_inputs)
    _check_required_inputs(required_inputs, advantage, COLUMNS | role_columns | TEACHER_OUTPUTS, step_required_inputs)
    group_filter = config.rollout.filter
    rollout_filter = instantiate_callable(group_filter, "rollout.filter", ["rewards"]) if group_filter else None
    terms: dict[str, Term | None] = dict(kl_reward=reward_penalty, kl_loss=objective.kl, entropy=objective.entropy)
    return AlgorithmParts(
        objective,
        advantage_pipeline,
        rollout_filter,
        required_inputs,
        {name: term for name, term in terms.items() if term},
        build_weighting(config),
        build_value_loss(config),
    )


def _check_required_inputs(
    required_inputs: frozenset[str],
    advantage: Advantage,
    columns: frozenset[str],
    step_required_inputs: Mapping[str, frozenset[str]],
) -> None:
    """Raise ValueError if the algorithm needs a column outside `columns`, or a critic that would get no returns to learn."""

    def key_of(names: AbstractSet[str], otherwise: str) -> str:
        return next((key for key, needed in step_required_inputs.items() if needed & names), otherwise)

    if unknown := required_inputs - columns - {"greedy_rewards"}:
        if names := sorted(name.removesuffix("_logprobs") for name in unknown if name.endswith("_logprobs")):
            raise ValueError(
                f"roles.{names[0]}.path must name a Hugging Face folder: the algorithm reads {names[0]}_logprobs, the "
                "log-probabilities of this model."
            )
        raise ValueError(
            f"{key_of(unknown, 'algorithm')}: a part names {', '.join(sorted(unknown))} in its attribute `required_inputs`; "
            f"expected names out of {', '.join(sorted(columns))} and greedy_rewards."
        )
    if "values" in required_inputs and "values" not in required_inputs_of(advantage):
        raise ValueError(
            f"{key_of({'values'}, 'algorithm.loss or algorithm.correction')} needs values of a critic, but algorithm.advantage "
            "computes no returns that the critic could learn; set algorithm.advantage to an advantage estimator that computes "
            "returns, such as GAE."
        )


def _check_role_columns(config: Config, required_inputs: frozenset[str]) -> None:
    """Raise ValueError if no model computes a needed column, or if several models compute the same column for a response."""
    teachers, computed_by = teachers_of(config), dict[str, str]()
    for name, role in roles_of(config).items():
        key, expected = f"roles.{name}", f"{TEACHER if name in teachers else name}_logprobs"
        if role.is_served:
            if expected in required_inputs:
                hint = ", or use algorithm=distill_top_k" if name in teachers else ""
                raise ValueError(
                    f"{key}.num_engines={role.num_engines}: the algorithm reads {expected}, which trainer ranks compute, not "
                    f"SGLang; leave num_engines out{hint}."
                )
            continue
        if name in teachers and expected in required_inputs and role.column != expected:
            raise ValueError(
                f"{key}.column={role.column}: the algorithm reads {expected} of each teacher; remove {key}.column."
            )
        other = computed_by.setdefault(role.column, name)
        is_taken = other != name and not {name, other} <= teachers.keys()
        if is_taken or role.column in COLUMNS - ({"ref_logprobs"} if name == REFERENCE_ROLE else set()):
            raise ValueError(
                f"{key}.column={role.column}: {f'roles.{other}' if is_taken else 'the run'} computes this column already; choose "
                f"another name, such as {key}.column=my_logprobs."
            )


def _check_distillation(config: Config, objective: Objective, required_inputs: frozenset[str]) -> None:
    """Raise ValueError if the algorithm reads teacher outputs that no model computes, or that its loss cannot read."""
    if not (outputs := required_inputs & TEACHER_OUTPUTS):
        return
    if not teachers_of(config):
        raise ValueError(
            "roles.teacher.path must name a Hugging Face folder: algorithm.loss compares the policy with this model."
        )
    if objective.distillation is None or len(outputs) > 1:
        raise ValueError(
            f"algorithm: a part names {', '.join(sorted(outputs))} in its attribute `required_inputs`, but only one loss "
            "of the class mrl.algorithms.distillation.Distillation, in algorithm.loss, can read these outputs."
        )


def build_objective(config: Config) -> Objective:
    """Build the objective that the actor's optimizer minimizes. Raises ValueError if the parts of the objective conflict."""
    algorithm, from_rollout = config.algorithm, config.algorithm.old_logprobs == "rollout"
    node = algorithm.correction
    correction = instantiate_callable(node, "algorithm.correction", ["inputs"]) if node else None
    if from_rollout and correction and compares_old_policy(correction):
        raise ValueError(
            "algorithm.old_logprobs=rollout makes the engine's policy the old policy, so algorithm.correction has nothing to "
            "correct; set algorithm.old_logprobs=recompute, remove algorithm.correction, or give it numerator=current."
        )
    policy = instantiate_callable(algorithm.loss, "algorithm.loss", ["inputs"])
    if config.rollout.staleness and not (correction or from_rollout) and getattr(policy, "uses_logprobs", True):
        correction = ImportanceSampling()  # otherwise gradients from samples of older weights are biased
    return Objective(
        policy=policy,
        correction=correction,
        kl=_penalty(algorithm.kl_in_loss, "algorithm.kl_in_loss"),
        entropy=_entropy_bonus(algorithm),
        rollout_logprobs_as_old=from_rollout,
    )


def _entropy_bonus(algorithm: AlgorithmConfig) -> EntropyBonus | None:
    """Build the entropy bonus. Returns None if its coefficient is constantly 0."""
    node, key = algorithm.adaptive_entropy, "algorithm.adaptive_entropy"
    if not node:
        return EntropyBonus(algorithm.entropy_coef) if algorithm.entropy_coef else None
    if "coef" in node:
        raise ValueError(f"{key}.coef={node['coef']}: set the first coefficient in algorithm.entropy_coef.")
    if node.get("target") is None:
        raise ValueError(f"{key}.target: must be set, in nats per token, such as 0.2; got {dict(node)}.")
    return instantiate(_class_node(EntropyBonus) | node | {"coef": algorithm.entropy_coef}, key)


def _class_node(plug_in: type) -> Node:
    """Return a config node for a class: a dict whose `_target_` names the class."""
    return {"_target_": f"{plug_in.__module__}.{plug_in.__qualname__}"}


def build_weighting(config: Config) -> TokenWeighting:
    """Build the object that computes token weights. Raises ValueError if algorithm.aggregation names no aggregation."""
    value, limit = config.algorithm.aggregation, config.rollout.max_response_tokens
    if isinstance(value, dict):
        return TokenWeighting(instantiate_callable(value, "algorithm.aggregation", ["inputs"]), limit)
    if str(value) not in AGGREGATIONS:
        near = difflib.get_close_matches(str(value), AGGREGATIONS, n=1)
        raise ValueError(
            f"algorithm.aggregation={value!r}: expected {', '.join(AGGREGATIONS)}, or a mapping whose _target_ names your own "
            f"function{f'; did you mean {near[0]}?' if near else '.'}"
        )
    return TokenWeighting(AGGREGATIONS[value], limit)


def build_value_loss(config: Config) -> ValueLossFunction:
    """Build the loss of the critic."""
    return instantiate_callable(config.critic.loss, "critic.loss", ["values", "returns", "old_values"])


def refuse_distillation(objective: Objective, source: str) -> None:
    """Raise ValueError if the loss compares the policy with a teacher.

    `source`: name, in the message, of the command or of the data that has no outputs of a teacher.
    """
    if objective.distillation is not None:
        raise ValueError(
            f"algorithm.loss._target_=mrl.algorithms.distillation.Distillation: {source} has no outputs of a teacher; use "
            "another algorithm, such as algorithm=distill; the model and the layout can stay the same."
        )


def _penalty(node: Node | None, key: str) -> KLPenalty | None:
    """Build a KL penalty from `node`, a dict with its arguments. Without a node, return None. `key` is the config key."""
    if not node:
        return None
    return instantiate_callable(_class_node(KLPenalty) | node, key)


@dataclass
class Coefficients:
    """The current coefficients of all terms. A coefficient adapts if its term has a `target`."""

    terms: Mapping[str, Term]  # keys: names in TERM_METRICS
    values: dict[str, float] = field(default_factory=dict)  # current coefficients, with the keys of `terms`
    measured: dict[str, float] = field(default_factory=dict)  # what the last step measured for each adaptive term

    def __post_init__(self) -> None:
        self.values = {name: term.coef for name, term in self.terms.items()} | self.values

    def current(self) -> dict[str, float]:
        """Return the coefficients that the next step uses; 0 for a term that is not active."""
        return {
            name: self.values[name] if term.is_active(self.measured.get(name)) else 0.0
            for name, term in self.terms.items()
        }

    def metrics(self) -> dict[str, float]:
        """Return metrics: the coefficients that the next step uses."""
        return {COEF_METRICS[name]: coef for name, coef in self.current().items()}

    def adapt(self, metrics: Mapping[str, float], samples: int) -> None:
        """Adapt the coefficients to the `metrics` of a step that trained the actor on `samples` responses.

        A coefficient does not change if the step measured no value of its term, for example if every response was excluded.
        """
        for name, term in self.terms.items():
            measured = metrics.get(TERM_METRICS[name], math.nan)
            if term.target is not None and math.isfinite(measured):
                self.values[name] = term.next_coef(self.values[name], measured, samples)
                self.measured[name] = measured

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficients and the last measured values, for a checkpoint."""
        return dict(values=dict(self.values), measured=dict(self.measured))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the adaptive coefficients of a checkpoint. Constant coefficients keep the value of the config."""
        for name, term in self.terms.items():
            if term.target is not None:
                self.values[name] = state["values"].get(name, self.values[name])
        self.measured = {name: value for name, value in state["measured"].items() if name in self.terms}
