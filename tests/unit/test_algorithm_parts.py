"""AlgorithmParts: the columns that an algorithm needs, and combinations of settings that are refused."""

import pickle
from typing import ClassVar

import numpy as np
import pytest

from mrl.algorithms.objective import EntropyBonus, sequence_sum
from mrl.algorithms.parts import build_algorithm
from mrl.config import hydra_entry
from mrl.config.validate import is_known


class DeclaredCorrection:
    required_inputs: ClassVar = {"old_logprobs", "rollout_logprobs", "entropies"}

    def __call__(self, inputs):
        return inputs.old_logprobs.new_ones(len(inputs.old_logprobs)), {}


class UnknownNeed(DeclaredCorrection):
    required_inputs: ClassVar = {"entropy"}


class ValuesNeed(DeclaredCorrection):
    required_inputs: ClassVar = {"values"}


DECLARED, UNKNOWN, VALUES = (
    f"++algorithm.correction._target_={__name__}.{part.__name__}"
    for part in (DeclaredCorrection, UnknownNeed, ValuesNeed)
)


def algorithm(*overrides: str):
    base = ["experiment=quickstart", "run.dir=unused", "++roles.teacher.path=unused"]
    return build_algorithm(hydra_entry.compose_config(hydra_entry.check_overrides([*base, *overrides])))


@pytest.mark.extended_after(3)
@pytest.mark.parametrize(
    "overrides, required_inputs",
    [
        ([], set()),
        (["algorithm.mini_batches=2"], {"old_logprobs"}),
        (["algorithm.epochs=2"], {"old_logprobs"}),
        (["algorithm.mini_batches=2", "algorithm.old_logprobs=rollout"], set()),
        (["algorithm=ppo"], {"values", "old_logprobs", "ref_logprobs"}),
        (["algorithm=reinforce_pp_baseline"], {"ref_logprobs"}),
        (["algorithm=remax"], {"greedy_rewards"}),
        (["algorithm=distill"], {"teacher_logprobs", "old_logprobs"}),
        (["algorithm=distill", "algorithm.old_logprobs=rollout"], {"teacher_logprobs"}),
        (["algorithm=kl_cov"], {"old_logprobs"}),
        ([DECLARED], {"old_logprobs", "rollout_logprobs", "entropies"}),
        ([DECLARED, "algorithm.old_logprobs=rollout"], {"rollout_logprobs", "entropies"}),
    ],
)
def test_an_algorithm_needs_only_the_columns_that_it_uses(overrides, required_inputs):
    found = algorithm(*overrides)
    assert found.required_inputs == required_inputs
    assert found.objective.rollout_logprobs_as_old == ("algorithm.old_logprobs=rollout" in overrides)


OTB_CORRECTION = "++algorithm.advantage.correction._target_=mrl.algorithms.corrections.ImportanceSampling"
IS = "++algorithm.correction._target_=mrl.algorithms.corrections.ImportanceSampling"


@pytest.mark.extended_after(4)
@pytest.mark.parametrize(
    "overrides, message",
    [
        (["algorithm.old_logprobs=rollout", IS], "has nothing to correct"),
        (
            ["algorithm=otb", "algorithm.old_logprobs=rollout", OTB_CORRECTION],
            "algorithm.advantage.correction has nothing to correct",
        ),
        (
            ["algorithm=otb", OTB_CORRECTION, "++algorithm.advantage.correction.numerator=current"],
            "algorithm.advantage: .* rejects its arguments: correction.numerator='current'",
        ),
        (
            ["algorithm=otb", OTB_CORRECTION, "++algorithm.advantage.correction.veto=1e-4"],
            "algorithm.advantage: .* rejects its arguments: correction.veto=0.0001: baselines cannot reject responses",
        ),
        (
            ["algorithm=gdpo", "++algorithm.kl_in_reward.coef=0.1"],
            "GDPO does not use token rewards; use algorithm.kl_in_loss",
        ),
        (["algorithm=distill", "++algorithm.kl_in_reward.coef=0.1"], "OnPolicyDistillation does not use token rewards"),
        (["++algorithm.kl_in_loss.kind=k4"], "algorithm.kl_in_loss: .*kind='k4': expected one of k1, k2"),
        (["++algorithm.kl_in_loss.coeff=1"], "algorithm.kl_in_loss.coeff: .* did you mean 'coef'"),
        ([UNKNOWN], "names entropy in its attribute `required_inputs`; expected names out of entropies, old_logprobs"),
        ([VALUES], "algorithm.correction needs values of a critic"),
        (
            ["algorithm=dapo", "correction=bypass_pg_is"],
            r"algorithm.loss.clip_low: .*PolicyGradient has no argument 'clip_low'; it takes nothing. If the config sets it for "
            r"another class, remove it: ~algorithm.loss.clip_low ~algorithm.loss.clip_high$",
        ),
        (
            ["algorithm.aggregation=mean"],
            "algorithm.aggregation='mean': expected token_mean, sequence_mean, fixed_length",
        ),
        (["algorithm.adaptive_entropy={step: 0.01}"], "algorithm.adaptive_entropy.target: must be set"),
        (["algorithm.adaptive_entropy={target: 1, coef: 1}"], "set the first coefficient in algorithm.entropy_coef"),
        (["algorithm.adaptive_entropy={target: 1, delta: 1}"], "algorithm.adaptive_entropy.delta: .* has no argument"),
        (["algorithm.adaptive_entropy={target: -1}"], "algorithm.adaptive_entropy: .*target=-1"),
        (["critic.loss.clip=-1"], "critic.loss: .*clip=-1: must be 0 or more"),
        (["critic.loss.clips=1"], "critic.loss.clips: .* did you mean 'clip'"),
        (["algorithm.aggregation=token-sum"], "did you mean token_sum?"),
        (["algorithm.aggregation={_target_: no.such_thing}"], "algorithm.aggregation._target_=no.such_thing: cannot"),
    ],
)
def test_contradictory_settings_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        algorithm(*overrides)


def first_tokens(inputs, tokens):
    """An aggregation: the token weights of a response sum to min(its length, tokens) / max_response_tokens."""
    return tokens / np.maximum(inputs.lengths, tokens) / inputs.max_response_tokens


def test_an_aggregation_is_a_name_or_a_function_of_the_user():
    assert algorithm("algorithm.aggregation=sequence_sum").weighting.aggregation is sequence_sum
    own = f"algorithm.aggregation={{_target_: {__name__}.first_tokens, tokens: 3}}"
    weighting = pickle.loads(pickle.dumps(algorithm(own, "rollout.max_response_tokens=10").weighting))
    assert weighting(np.array([2, 6]), np.array([0, 0])).tolist() == [0.1, 0.05]
    assert is_known("algorithm.aggregation._target_") and is_known("algorithm.aggregation.tokens")


def test_the_entropy_bonus_is_constant_or_adapts():
    assert algorithm().objective.entropy is None and not algorithm().terms
    constant = algorithm("algorithm.entropy_coef=0.01")
    assert constant.terms == {"entropy": EntropyBonus(0.01)} and constant.objective.uses_entropy
    adaptive = algorithm("algorithm.entropy_coef=0.02", "algorithm.adaptive_entropy={target: 0.3, step: 0.01}")
    bonus = EntropyBonus(0.02, target=0.3, step=0.01)
    assert adaptive.terms == {"entropy": bonus} and adaptive.objective.coefs == {"entropy": 0.02}
    first = algorithm(
        "algorithm.adaptive_entropy.target=0.3"
    ).objective  # the coefficient is 0 now but may grow, so no row is skipped
    assert first.entropy == EntropyBonus(target=0.3) and not first.uses_entropy and not first.zero_at_zero_advantage
