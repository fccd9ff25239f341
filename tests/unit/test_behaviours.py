"""The algorithm of a config: what it needs, and combinations that would say nothing or the wrong thing."""

import pytest
from hydra import compose, initialize_config_dir

from mrl.algorithms.parts import make_behaviours
from mrl.commands import hydra_app
from mrl.config.validate import from_hydra


def behaviours(*overrides: str):
    hydra_app.register_schema()
    with initialize_config_dir(str(hydra_app.CONF), version_base="1.3"):
        base = ["experiment=quickstart", "run.dir=unused", "teacher.path=unused"]
        return make_behaviours(from_hydra(compose("config", [*base, *overrides])))


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
    ],
)
def test_only_what_is_needed_is_computed(overrides, needs):
    found = behaviours(*overrides)
    assert found.needs == needs
    assert found.objective.old_from_rollout == ("algorithm.old_logprobs=rollout" in overrides)


IS = "++algorithm.correction._target_=mrl.algorithms.corrections.ImportanceSampling"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["algorithm.old_logprobs=rollout", IS], "has nothing to correct"),
        (["algorithm=gdpo", "++algorithm.kl_in_reward.coef=0.1"], "GDPO does not look at it; use algorithm.kl_in_loss"),
        (["algorithm=distill", "++algorithm.kl_in_reward.coef=0.1"], "OnPolicyDistillation does not look at it"),
        (["++algorithm.kl_in_loss.kind=k4"], "algorithm.kl_in_loss: .*kind='k4': expected one of k1, k2"),
        (["++algorithm.kl_in_loss.coeff=1"], "algorithm.kl_in_loss.coeff: .* did you mean 'coef'"),
        (["algorithm.aggregation=mean"], "algorithm.aggregation='mean'; expected one of"),
    ],
)
def test_combinations_that_say_nothing_are_errors(overrides, message):
    with pytest.raises(ValueError, match=message):
        behaviours(*overrides)
