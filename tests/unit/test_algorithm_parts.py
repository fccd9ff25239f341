"""AlgorithmParts: the columns that an algorithm needs, and combinations of settings that are refused."""

from typing import ClassVar

import pytest

from mrl.algorithms.parts import build_algorithm
from mrl.config import hydra_entry


class DeclaredCorrection:
    needs: ClassVar = {"old_logprobs", "rollout_logprobs", "entropies"}

    def __call__(self, inputs):
        return inputs.old_logprobs.new_ones(len(inputs.old_logprobs)), {}


class UnknownNeed(DeclaredCorrection):
    needs: ClassVar = {"entropy"}


class ValuesNeed(DeclaredCorrection):
    needs: ClassVar = {"values"}


DECLARED, UNKNOWN, VALUES = (
    f"++algorithm.correction._target_={__name__}.{part.__name__}"
    for part in (DeclaredCorrection, UnknownNeed, ValuesNeed)
)


def algorithm(*overrides: str):
    base = ["experiment=quickstart", "run.dir=unused", "++roles.teacher.path=unused"]
    return build_algorithm(hydra_entry.compose_config([*base, *overrides]))


@pytest.mark.parametrize(
    "overrides, needs",
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
def test_an_algorithm_needs_only_the_columns_that_it_uses(overrides, needs):
    found = algorithm(*overrides)
    assert found.needs == needs
    assert found.objective.rollout_logprobs_as_old == ("algorithm.old_logprobs=rollout" in overrides)


IS = "++algorithm.correction._target_=mrl.algorithms.corrections.ImportanceSampling"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["algorithm.old_logprobs=rollout", IS], "has nothing to correct"),
        (
            ["algorithm=gdpo", "++algorithm.kl_in_reward.coef=0.1"],
            "GDPO does not use token rewards; use algorithm.kl_in_loss",
        ),
        (["algorithm=distill", "++algorithm.kl_in_reward.coef=0.1"], "OnPolicyDistillation does not use token rewards"),
        (["++algorithm.kl_in_loss.kind=k4"], "algorithm.kl_in_loss: .*kind='k4': expected one of k1, k2"),
        (["++algorithm.kl_in_loss.coeff=1"], "algorithm.kl_in_loss.coeff: .* did you mean 'coef'"),
        ([UNKNOWN], "names entropy in its attribute `needs`; expected names out of entropies, old_logprobs"),
        ([VALUES], "algorithm.correction needs values of a critic"),
        (["algorithm.aggregation=mean"], "algorithm.aggregation='mean': expected token_mean"),
    ],
)
def test_contradictory_settings_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        algorithm(*overrides)
