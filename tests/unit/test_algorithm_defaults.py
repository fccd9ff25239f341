"""Pins every default of the algorithm classes and every value of conf/algorithm to the published or documented value.

A default that changes by accident changes the results of all users who rely on it, and no other test notices.
"""

import math
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path

import pytest
import yaml

from mrl.algorithms import (
    advantages,
    corrections,
    distillation,
    filters,
    kl,
    losses,
    objective,
    preference,
    sequence_losses,
)

CONF = Path(__file__).resolve().parents[2] / "conf" / "algorithm"
INF = math.inf

DEFAULTS = {
    # advantages
    advantages.GRPO: {"eps": 1e-4, "scale_rewards": "group", "ddof": 1},
    advantages.RLOO: {},
    advantages.ReinforcePlusPlusBaseline: {},
    advantages.ReMax: {"to_go": False},  # algorithm 1 of the paper has one advantage per response
    advantages.OPO: {},
    advantages.GPG: {"normalize_std": False, "eps": 1e-4},  # F_norm = 1 in the paper
    advantages.PassAtK: {"normalize_std": False, "eps": 1e-4},
    advantages.LogMeanExp: {"tau": 1.0},
    advantages.GDPO: {"weights": {}, "eps": 1e-4, "normalize_batch": True},
    advantages.GAE: {"gamma": 1.0, "lam": 0.95},  # lambda of PPO
    advantages.ReinforcePlusPlus: {"gamma": 1.0},
    advantages.OptimalTokenBaseline: {"zero_tail": True, "correction": None},  # as in the authors' code
    advantages.OnPolicyDistillation: {"coef": 1.0, "gamma": 0.0, "reward": None, "reward_coef": 1.0},  # discount 0
    advantages.NoAdvantage: {},
    # losses
    distillation.Distillation: {  # reverse KL, as in OnPolicyDistillation; `beta` is for the JS divergence
        "divergence": "reverse_kl",
        "beta": 0.5,
        "top_k": None,
        "temperature": None,
        "coef": 1.0,
        "reward_loss": None,
    },
    losses.PPOClip: {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},  # epsilon of PPO
    losses.PolicyGradient: {},
    losses.CISPO: {"clip_low": 1.0, "clip_high": 4.0},  # no lower bound; upper bound 5 of ScaleRL
    losses.SAPO: {"tau_positive": 1.0, "tau_negative": 1.05},
    losses.DPPO: {"delta_low": 0.2, "delta_high": 0.2, "max_ratio": 20.0, "divergence": "tv"},
    losses.DRO: {"beta": 0.05},  # as in Tinker
    losses.CrossEntropy: {},
    losses.ClipCov: {"fraction": 2e-4, "low": 1.0, "high": 5.0, "clip_low": INF, "clip_high": INF},  # r of the paper
    losses.KLCov: {"fraction": 2e-4, "coef": 1.0, "kl": "k3"},
    losses.ValueLoss: {"clip": 0.2},  # cliprange of openai/baselines
    sequence_losses.GSPO: {"clip_low": 3e-4, "clip_high": 4e-4},  # published clip bounds
    sequence_losses.GSPOToken: {"clip_low": 3e-4, "clip_high": 4e-4},
    sequence_losses.GMPO: {"clip_low": 0.4, "clip_high": 0.4},  # the ratio stays in (e^-0.4, e^0.4)
    sequence_losses.OPMD: {"tau": 0.1},
    sequence_losses.TOPR: {},
    sequence_losses.VESPO: {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
    # losses over preferences
    preference.DPO: {"beta": 0.1, "label_smoothing": 0.0, "nll_coef": 0.0},  # beta of the authors' experiments
    preference.IPO: {"beta": 0.1, "per_token": True},
    preference.Hinge: {"beta": 0.1},
    preference.SimPO: {"beta": 2.0, "gamma": 1.0},  # of the authors' Llama-3 base setting
    preference.ORPO: {"beta": 0.1},  # lambda of the authors' experiments with Phi-2 and Llama-2
    preference.KTO: {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "reference_point": 0.0},
    preference.BradleyTerry: {"center_coef": 0.0},
    preference.OutcomeLabels: {},
    # corrections
    corrections.ImportanceSampling: {
        "level": "token",
        "mode": "truncate",
        "low": 0.0,
        "high": 2.0,
        "veto": None,
        "numerator": "old",
        "batch_normalize": False,
    },  # TIS with C = 2
    corrections.IcePop: {
        "level": "token",
        "mode": "mask",
        "low": 0.5,
        "high": 5.0,
        "veto": None,
        "numerator": "old",
        "batch_normalize": False,
    },  # `low` and `high` are alpha and beta of Ring-1T
    corrections.OffPolicyMask: {"delta": 0.05},
    # KL penalty and filters
    objective.EntropyBonus: {"coef": 0.0, "target": None, "step": 0.005, "max_coef": 1.0},  # Skywork-OR1; trl's bound
    kl.KLPenalty: {"coef": 0.001, "kind": None, "target": None, "horizon": 10_000},  # horizon of Ziegler et al.
    filters.NonzeroVariance: {"tolerance": 0.0, "metric": None},  # equation 11 of DAPO: not all rewards are equal
    filters.PolicyFiltration: {"method": "pow", "power": 2.0, "per_group": True},
    filters.RewardRange: {"low": 0.2, "high": 0.8, "metric": None},  # as in PRIME
}

WITHOUT_DEFAULTS = {
    advantages.GroupStatistics,
    corrections.Product,
    corrections.Rejection,
    losses.TopEntropy,
}
INTERFACES = {
    "Advantage",
    "Loss",
    "PolicyLoss",
    "ValueLossFunction",
    "PairLoss",
    "ScoreLoss",
    "Correction",
    "Filter",
    "Resampling",
}


def defaults_of(kind):
    """Return the default of each field. A default factory is called to get the default."""
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(kind)
    }


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_the_defaults_of_a_class_are_the_published_ones(kind):
    assert defaults_of(kind) == DEFAULTS[kind]


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_an_object_without_arguments_has_the_defaults(kind):
    assert vars(kind()) == DEFAULTS[kind]


def test_every_class_of_the_algorithm_modules_is_pinned():
    for module in (advantages, losses, sequence_losses, distillation, preference, corrections, kl, filters):
        classes = {x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__}
        missing = {kind.__name__ for kind in classes - DEFAULTS.keys() - WITHOUT_DEFAULTS} - INTERFACES
        assert not missing, f"{module.__name__}: {missing}"


@pytest.mark.parametrize(
    ("kind", "zero_at_zero_advantage", "uses_entropy", "required_inputs"),
    [
        (losses.PPOClip, True, False, set()),
        (losses.PolicyGradient, True, False, set()),
        (losses.CISPO, True, False, set()),
        (losses.SAPO, True, False, set()),
        (losses.DPPO, True, False, set()),
        (losses.DRO, False, False, set()),
        (losses.CrossEntropy, False, False, set()),
        (losses.ClipCov, True, False, {"old_logprobs"}),
        (losses.KLCov, False, False, {"old_logprobs"}),
        (distillation.Distillation, False, False, {"teacher_hidden"}),
        (sequence_losses.GSPO, True, False, set()),
        (sequence_losses.GSPOToken, True, False, set()),
        (sequence_losses.GMPO, True, False, set()),
        (sequence_losses.OPMD, False, False, set()),
        (sequence_losses.TOPR, True, False, set()),
        (sequence_losses.VESPO, True, False, set()),
        (preference.DPO, False, False, {"ref_logprobs"}),
        (preference.IPO, False, False, {"ref_logprobs"}),
        (preference.Hinge, False, False, {"ref_logprobs"}),
        (preference.KTO, False, False, {"ref_logprobs"}),
        (preference.SimPO, False, False, set()),
        (preference.ORPO, False, False, set()),
    ],
)
def test_the_declarations_of_a_loss_are_pinned(kind, zero_at_zero_advantage, uses_entropy, required_inputs):
    loss = kind()
    declared = (loss.zero_at_zero_advantage, loss.uses_entropy, loss.required_inputs)
    assert declared == (zero_at_zero_advantage, uses_entropy, required_inputs)


@pytest.mark.parametrize(
    ("kind", "required_inputs"),
    [
        (advantages.GRPO, set()),
        (advantages.RLOO, set()),
        (advantages.ReinforcePlusPlusBaseline, set()),
        (advantages.ReMax, {"greedy_rewards"}),
        (advantages.OPO, set()),
        (advantages.GPG, set()),
        (advantages.PassAtK, set()),
        (advantages.LogMeanExp, set()),
        (advantages.GDPO, set()),
        (advantages.GAE, {"values"}),
        (advantages.ReinforcePlusPlus, set()),
        (advantages.OptimalTokenBaseline, {"old_logprobs", "sum_pi_squared"}),
        (advantages.OnPolicyDistillation, {"teacher_logprobs", "old_logprobs"}),
        (advantages.NoAdvantage, set()),
    ],
)
def test_the_declarations_of_an_advantage_are_pinned(kind, required_inputs):
    advantage = kind()
    assert advantage.required_inputs == required_inputs
    ignores_token_rewards = kind in (advantages.GDPO, advantages.OnPolicyDistillation, advantages.NoAdvantage)
    assert getattr(advantage, "uses_token_rewards", True) == (not ignores_token_rewards)


def part(path, **values):
    """Return a config node with a `_target_` in mrl.algorithms and arguments."""
    return {"_target_": f"mrl.algorithms.{path}", **values}


def distilled(**values):
    """Return the config of an algorithm whose loss is Distillation with these arguments."""
    parts = {"advantage": part("advantages.NoAdvantage"), "loss": part("distillation.Distillation", **values)}
    return {"algorithm": {**parts, "aggregation": "token_mean"}, "roles": {"teacher": {"path": "???"}}}


GRPO = part("advantages.GRPO")
PPO_CLIP = part("losses.PPOClip")
CONFIGS = {
    "grpo": {"advantage": GRPO, "loss": PPO_CLIP, "aggregation": "token_mean"},
    "dr_grpo": {  # Dr.GRPO: no division by the standard deviation, constant denominator
        "advantage": part("advantages.GRPO", scale_rewards="none"),
        "loss": PPO_CLIP,
        "aggregation": "fixed_length",
    },
    "dapo": {  # clip-higher 0.28, token-level loss, overlong filtering, dynamic sampling
        "algorithm": {
            "advantage": GRPO,
            "loss": part("losses.PPOClip", clip_low=0.2, clip_high=0.28),
            "aggregation": "token_mean",
            "mask_truncated": True,
            "mini_batches": 4,
        },
        "rollout": {"filter": part("filters.NonzeroVariance", metric="correctness"), "max_sampling_rounds": 10},
    },
    "ppo": {
        "algorithm": {
            "advantage": part("advantages.GAE", gamma=1.0, lam=0.95),
            "loss": PPO_CLIP,
            "aggregation": "token_mean",
            "kl_in_reward": part("kl.KLPenalty", coef=0.01, kind="k1"),
            "whiten": True,
            "mini_batches": 4,
        },
        "critic": {"optim": {"lr": 1e-5}, "loss": part("losses.ValueLoss"), "warmup_steps": 0},
    },
    "gspo": {
        "advantage": GRPO,
        "loss": part("sequence_losses.GSPO"),
        "aggregation": "sequence_mean",
        "mini_batches": 4,
    },
    "luspo": {  # GSPO whose loss of a response is multiplied by the length
        "advantage": GRPO,
        "loss": part("sequence_losses.GSPO"),
        "aggregation": "sequence_sum",
        "mini_batches": 4,
    },
    "gspo_token": {
        "advantage": GRPO,
        "loss": part("sequence_losses.GSPOToken"),
        "aggregation": "sequence_mean",
        "mini_batches": 4,
    },
    "gmpo": {
        "advantage": GRPO,
        "loss": part("sequence_losses.GMPO"),
        "aggregation": "sequence_mean",
        "mini_batches": 4,
    },
    "cispo": {"advantage": GRPO, "loss": part("losses.CISPO"), "aggregation": "token_mean", "mini_batches": 4},
    "sapo": {"advantage": GRPO, "loss": part("losses.SAPO"), "aggregation": "sequence_mean", "mini_batches": 4},
    "clip_cov": {  # bounds of 1 and 1 in the authors' runs
        "advantage": GRPO,
        "loss": part("losses.ClipCov", clip_low=1.0, clip_high=1.0),
        "aggregation": "token_mean",
        "mini_batches": 4,
    },
    "kl_cov": {  # |log r| with coefficient 1, as in the authors' code
        "advantage": GRPO,
        "loss": part("losses.KLCov", fraction=2e-3, coef=1.0, kl="abs"),
        "aggregation": "token_mean",
        "mini_batches": 4,
    },
    "opmd": {
        "advantage": part("advantages.GRPO", scale_rewards="none"),
        "loss": part("sequence_losses.OPMD", tau=0.1),
        "aggregation": "fixed_length",
        "skip_zero_advantage": False,
        "mini_batches": 4,
    },
    "opo": {  # the paper trains exactly on-policy
        "advantage": part("advantages.OPO"),
        "loss": part("losses.PolicyGradient"),
        "aggregation": "token_mean",
        "mini_batches": 1,
        "epochs": 1,
    },
    "policy_gradient": {
        "advantage": GRPO,
        "loss": part("losses.PolicyGradient"),
        "aggregation": "token_mean",
        "mini_batches": 1,
        "epochs": 1,
    },
    "reinforce_pp": {
        "advantage": part("advantages.ReinforcePlusPlus"),
        "loss": PPO_CLIP,
        "aggregation": "token_mean",
        "kl_in_reward": part("kl.KLPenalty", coef=0.001, kind="k1"),
        "whiten": True,
    },
    "reinforce_pp_baseline": {
        "advantage": part("advantages.ReinforcePlusPlusBaseline"),
        "loss": PPO_CLIP,
        "aggregation": "token_mean",
        "kl_in_loss": part("kl.KLPenalty", coef=0.001, kind="k2"),
        "whiten": True,
    },
    "remax": {
        "advantage": part("advantages.ReMax"),
        "loss": part("losses.PolicyGradient"),
        "aggregation": "fixed_length",
    },
    "rloo": {
        "advantage": part("advantages.RLOO"),
        "loss": part("losses.PolicyGradient"),
        "aggregation": "fixed_length",
        "kl_in_reward": part("kl.KLPenalty", coef=0.03, kind="k1"),
    },
    "otb": {
        "advantage": part("advantages.OptimalTokenBaseline"),
        "loss": PPO_CLIP,
        "aggregation": "token_mean",
    },
    "pf_ppo": {
        "algorithm": {
            "advantage": part("advantages.GAE", gamma=1.0, lam=0.95),
            "loss": PPO_CLIP,
            "aggregation": "token_mean",
            "kl_in_reward": part("kl.KLPenalty", coef=0.01, kind="k1"),
            "resampling": part("filters.PolicyFiltration", method="pow", power=2.0, per_group=True),
            "whiten": True,
            "mini_batches": 4,
        },
        "critic": {"optim": {"lr": 1e-5}, "loss": part("losses.ValueLoss"), "warmup_steps": 0},
    },
    "lite_ppo": {
        "advantage": part("advantages.GRPO", scale_rewards="batch"),
        "loss": PPO_CLIP,
        "aggregation": "token_mean",
    },
    "gpg": {
        "advantage": part("advantages.GPG"),
        "loss": part("losses.PolicyGradient"),
        "aggregation": "token_mean",
    },
    "dppo_tv": {  # deltas of the authors' runs
        "advantage": part("advantages.GRPO", scale_rewards="none"),
        "loss": part("losses.DPPO", divergence="tv", delta_low=0.15, delta_high=0.15),
        "aggregation": "fixed_length",
        "mini_batches": 4,
    },
    "dppo_kl": {
        "advantage": part("advantages.GRPO", scale_rewards="none"),
        "loss": part("losses.DPPO", divergence="kl", delta_low=0.05, delta_high=0.05),
        "aggregation": "fixed_length",
        "mini_batches": 4,
    },
    "dro": {
        "advantage": part("advantages.GRPO", scale_rewards="none"),
        "loss": part("losses.DRO", beta=0.05),
        "aggregation": "fixed_length",
        "skip_zero_advantage": False,
        "mini_batches": 4,
    },
    "vespo": {
        "advantage": GRPO,
        "loss": part("sequence_losses.VESPO"),
        "aggregation": "token_mean",
        "mini_batches": 4,
    },
    "top_entropy": {  # the top 20% of the tokens, with the loss of DAPO
        "advantage": GRPO,
        "loss": part("losses.TopEntropy", fraction=0.2, loss=part("losses.PPOClip", clip_low=0.2, clip_high=0.28)),
        "aggregation": "token_mean",
        "mini_batches": 4,
    },
    "gdpo": {"advantage": part("advantages.GDPO", weights={}), "loss": PPO_CLIP, "aggregation": "token_mean"},
    "distill": {
        "algorithm": {
            "advantage": part("advantages.OnPolicyDistillation"),
            "loss": part("losses.PolicyGradient"),
            "aggregation": "token_mean",
        },
        "roles": {"teacher": {"path": "???"}},
    },
    "distill_vocab": distilled(divergence="reverse_kl"),
    "distill_top_k": distilled(divergence="reverse_kl", top_k=64),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_the_values_of_an_algorithm_config_are_the_published_ones(name):
    assert yaml.safe_load((CONF / f"{name}.yaml").read_text()) == CONFIGS[name]


def test_every_pinned_config_exists():
    assert CONFIGS.keys() == {path.stem for path in CONF.glob("*.yaml")}


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_algorithm_classes_are_immutable(kind):
    for name, value in vars(kind()).items():
        with pytest.raises(FrozenInstanceError):
            setattr(kind(), name, value)
