"""Algorithm settings of verl and trl become parts of an algorithm, and these parts build."""

import pytest

from mrl.algorithms.parts import build_algorithm
from mrl.commands.import_config import translate
from mrl.config import hydra_entry
from mrl.config.search_path import quote
from mrl.config.translation_rules import ALGORITHMS, VERL_LOSSES

ACTOR, ROLLOUT_CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
ESTIMATOR, LOSS_MODE = "algorithm.adv_estimator", f"{ACTOR}policy_loss.loss_mode"
LOSS, SCALE, AGGREGATION = "algorithm.loss._target_", "algorithm.advantage.scale_rewards", "algorithm.aggregation"
IMPORTANCE, REJECTION = "mrl.algorithms.corrections.ImportanceSampling", "mrl.algorithms.corrections.Rejection"
LOSSES, SEQUENCE_LOSSES = "mrl.algorithms.losses.", "mrl.algorithms.sequence_losses."
KL = "mrl.algorithms.kl.KLPenalty"
PASS_AT_K = {"algorithm": "grpo", "algorithm.advantage._target_": "mrl.algorithms.advantages.PassAtK"}
NORMALIZE_STD = "algorithm.advantage.normalize_std"
FOREIGN = {  # name -> (trainer, keys of its config, overrides of mrl)
    "the scale of verl's advantages": (
        "verl",
        {ESTIMATOR: "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
        {"algorithm": "grpo", SCALE: "none"},
    ),
    "a scale that the estimator does not use": (
        "verl",
        {ESTIMATOR: "reinforce_plus_plus", "algorithm.norm_adv_by_std_in_grpo": True},
        {"algorithm": "reinforce_pp"},
    ),
    "the discount of an estimator": (
        "verl",
        {ESTIMATOR: "reinforce_plus_plus", "algorithm.gamma": 0.9, "algorithm.lam": 0.95},
        {"algorithm": "reinforce_pp", "algorithm.advantage.gamma": 0.9},
    ),
    "pass@k": ("verl", {ESTIMATOR: "grpo_passk"}, PASS_AT_K | {NORMALIZE_STD: True}),
    "pass@k without scale": (
        "verl",
        {ESTIMATOR: "grpo_passk", "algorithm.norm_adv_by_std_in_grpo": False},
        PASS_AT_K | {NORMALIZE_STD: False},
    ),
    "several rewards": (
        "verl",
        {
            ESTIMATOR: "gdpo",
            "algorithm.gdpo_reward_keys": ["right", "short"],
            "algorithm.gdpo_reward_weights": [1.0, 0.5],
        },
        {"algorithm": "gdpo", "algorithm.advantage.weights": {"right": 1.0, "short": 0.5}},
    ),
    "the scale of trl's rewards": ("trl", {"scale_rewards": "batch"}, {SCALE: "batch"}),
    "trl's rewards without scale": (
        "trl",
        {"scale_rewards": False, "loss_type": "dr_grpo"},
        {SCALE: "none", AGGREGATION: "fixed_length"},
    ),
    "a trust region": (
        "verl",
        {ESTIMATOR: "grpo", LOSS_MODE: "dppo_kl", f"{ACTOR}clip_ratio": 0.05, f"{ACTOR}clip_ratio_c": 10.0},
        {
            "algorithm": "grpo",
            LOSS: f"{LOSSES}DPPO",
            "algorithm.loss.divergence": "kl",
            "algorithm.loss.delta_low": 0.05,
            "algorithm.loss.delta_high": 0.05,
            "algorithm.loss.max_ratio": 10.0,
        },
    ),
    "a loss without clip": (
        "verl",
        {LOSS_MODE: "dro", f"{ACTOR}policy_loss.dro_beta": 0.1, f"{ACTOR}clip_ratio_low": 0.2},
        {LOSS: f"{LOSSES}DRO", "algorithm.loss.beta": 0.1},
    ),
    "a ratio of the response with another estimator": (
        "verl",
        {
            ESTIMATOR: "rloo",
            LOSS_MODE: "gspo",
            f"{ACTOR}clip_ratio_high": 0.3,
            f"{ACTOR}loss_agg_mode": "token-mean",
        },
        {
            "algorithm": "rloo",
            LOSS: f"{SEQUENCE_LOSSES}GSPO",
            AGGREGATION: "sequence_mean",
            "algorithm.loss.clip_low": 0.2,
            "algorithm.loss.clip_high": 0.3,
        },
    ),
    "an estimator with verl's usual loss": (
        "verl",
        {ESTIMATOR: "opo", f"{ACTOR}clip_ratio": 0.1, f"{ACTOR}clip_ratio_low": 0.3},
        {
            "algorithm": "opo",
            LOSS: f"{LOSSES}PPOClip",
            "algorithm.loss.clip_low": 0.3,
            "algorithm.loss.clip_high": 0.1,
        },
    ),
    "tokens with a penalty": (
        "verl",
        {LOSS_MODE: "kl_cov", f"{ACTOR}policy_loss.kl_cov_ratio": 0.002},
        {
            LOSS: f"{LOSSES}KLCov",
            "algorithm.loss.kl": "abs",
            "algorithm.loss.fraction": 0.002,
            "algorithm.loss.coef": 0.1,
        },
    ),
    "an optimal baseline": ("verl", {ESTIMATOR: "tir_optimal_token_baseline"}, {"algorithm": "otb"}),
    "an optimal baseline with importance weights": (
        "verl",
        {ESTIMATOR: "optimal_token_baseline", f"{ROLLOUT_CORRECTION}rollout_is": "token"},
        {
            "algorithm": "otb",
            "algorithm.correction": {"_target_": IMPORTANCE, "level": "token", "mode": "truncate", "high": 2.0},
            "algorithm.advantage.correction": {
                "_target_": IMPORTANCE,
                "level": "token",
                "mode": "truncate",
                "high": 2.0,
            },
        },
    ),
    "a KL estimator": (
        "verl",
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "abs", "algorithm.kl_ctrl.kl_coef": 0.1},
        {"algorithm.kl_in_reward": {"_target_": KL, "coef": 0.1, "kind": "abs"}},
    ),
    "an adaptive KL penalty": (
        "verl",
        {
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_penalty": "kl",
            "algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.target_kl": 0.2,
        },
        {
            "algorithm.kl_in_reward": {
                "_target_": KL,
                "coef": 0.001,
                "kind": "k1",
                "target": 0.2,
                "horizon": 10_000,
            }
        },
    ),
    "a filter by correctness": (
        "verl",
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"},
        {"rollout.filter._target_": "mrl.algorithms.filters.NonzeroVariance", "rollout.filter.metric": "correctness"},
    ),
    "the length that divides": (
        "verl",
        {
            f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm",
            f"{ACTOR}loss_scale_factor": 512,
            "data.max_response_length": 512,
        },
        {AGGREGATION: "fixed_length", "rollout.max_response_tokens": 512},
    ),
    "policy filtration": (
        "verl",
        {ESTIMATOR: "gae", "algorithm.use_pf_ppo": True, "algorithm.pf_ppo.reweight_method": "max_min"},
        {
            "algorithm": "ppo",
            "algorithm.resampling._target_": "mrl.algorithms.filters.PolicyFiltration",
            "algorithm.resampling.per_group": False,
            "algorithm.resampling.method": "max_min",
        },
    ),
    "weights and a rejection": (
        "verl",
        {
            f"{ROLLOUT_CORRECTION}rollout_is": "token",
            f"{ROLLOUT_CORRECTION}rollout_is_threshold": "0.5_5.0",
            f"{ROLLOUT_CORRECTION}rollout_is_batch_normalize": True,
            f"{ROLLOUT_CORRECTION}rollout_rs": "seq_mean_k1,seq_max_k3",
            f"{ROLLOUT_CORRECTION}rollout_rs_threshold": "0.5_4.0,0.02",
        },
        {
            "algorithm.correction": {
                "_target_": "mrl.algorithms.corrections.Product",
                "corrections": [
                    {"_target_": IMPORTANCE, "level": "geometric", "mode": "reject", "low": 0.25, "high": 2.0},
                    {"_target_": REJECTION, "level": "max", "kind": "k3", "high": 0.02},
                    {
                        "_target_": IMPORTANCE,
                        "level": "token",
                        "mode": "mask",
                        "low": 0.5,
                        "high": 5.0,
                        "batch_normalize": True,
                    },
                ],
            }
        },
    ),
    "the bypass mode": (
        "verl",
        {
            f"{ROLLOUT_CORRECTION}bypass_mode": True,
            f"{ROLLOUT_CORRECTION}loss_type": "reinforce",
            f"{ROLLOUT_CORRECTION}rollout_is": "sequence",
        },
        {
            "algorithm.old_logprobs": "rollout",
            LOSS: f"{LOSSES}PolicyGradient",
            "algorithm.correction": {
                "_target_": IMPORTANCE,
                "level": "sequence",
                "mode": "truncate",
                "high": 2.0,
                "numerator": "current",
            },
        },
    ),
    "the bypass mode with a clip": (
        "verl",
        {f"{ROLLOUT_CORRECTION}bypass_mode": True, f"{ROLLOUT_CORRECTION}rollout_is": "sequence"},
        {"algorithm.old_logprobs": "rollout"},
    ),
    "trl's correction": (
        "trl",
        {"vllm_importance_sampling_correction": True, "off_policy_mask_threshold": 0.5},
        {
            "algorithm.correction": {
                "_target_": "mrl.algorithms.corrections.Product",
                "corrections": [
                    {"_target_": IMPORTANCE, "level": "sequence", "mode": "mask", "low": 0.0, "high": 3.0},
                    {"_target_": "mrl.algorithms.corrections.OffPolicyMask", "delta": 0.5},
                ],
            }
        },
    ),
    "trl's correction with vLLM": (
        "trl",
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0},
        {
            "algorithm.correction": {
                "_target_": IMPORTANCE,
                "level": "token",
                "mode": "truncate",
                "low": 0.0,
                "high": 2.0,
            }
        },
    ),
    "vLLM without correction": ("trl", {"use_vllm": True, "vllm_importance_sampling_correction": False}, {}),
    "the tokens with the largest entropy": (
        "trl",
        {"top_entropy_quantile": 0.3, "epsilon": 0.1, "epsilon_high": 0.4, "delta": 2.0},
        {
            LOSS: f"{LOSSES}TopEntropy",
            "algorithm.loss.fraction": 0.3,
            "algorithm.loss.loss._target_": f"{LOSSES}PPOClip",
            "algorithm.loss.loss.clip_low": 0.1,
            "algorithm.loss.loss.clip_high": 0.4,
            "algorithm.loss.loss.dual_clip": 2.0,
        },
    ),
    "the token with the largest entropy": (
        "trl",
        {"top_entropy_quantile": 0.0, "epsilon_high": 0.4},
        {
            LOSS: f"{LOSSES}TopEntropy",
            "algorithm.loss.fraction": 0.0,
            "algorithm.loss.loss._target_": f"{LOSSES}PPOClip",
            "algorithm.loss.loss.clip_high": 0.4,
        },
    ),
    "the tokens with the largest entropy with another loss": (
        "trl",
        {"top_entropy_quantile": 0.3, "loss_type": "vespo", "vespo_k_neg": 1.5},
        {
            "algorithm": "vespo",
            LOSS: f"{LOSSES}TopEntropy",
            "algorithm.loss.fraction": 0.3,
            "algorithm.loss.loss._target_": f"{SEQUENCE_LOSSES}VESPO",
            "algorithm.loss.loss.k_negative": 1.5,
        },
    ),
    "a ratio of the response": (
        "trl",
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo"},
        {
            "algorithm": "gspo",
            AGGREGATION: "sequence_mean",
            "algorithm.loss.clip_low": 3e-4,
            "algorithm.loss.clip_high": 4e-4,
        },
    ),
    "a ratio of the response times its length": (
        "trl",
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "top_entropy_quantile": 1.0},
        {"algorithm": "luspo"},
    ),
    "a smooth weight": (
        "trl",
        {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_neg": 1.0},
        {"algorithm": "vespo", "algorithm.loss.k_positive": 1.5, "algorithm.loss.lambda_negative": 1.0},
    ),
    "an unbiased KL": (
        "trl",
        {"beta": 0.1},
        {"algorithm.kl_in_loss": {"_target_": KL, "coef": 0.1, "kind": "unbiased"}},
    ),
    "a biased KL": (
        "trl",
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"algorithm.kl_in_loss": {"_target_": KL, "coef": 0.1, "kind": "k3"}},
    ),
}


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", FOREIGN)
def test_the_settings_of_algorithms_become_parts_that_build(name):
    """The order of the keys does not matter."""
    source, values, overrides = FOREIGN[name]
    for ordered in (values, dict(reversed(values.items()))):
        found = translate(source, ordered)
        assert found.overrides == overrides and not found.unknown and not found.no_counterpart
    words = [f"{key}={quote(value)}" for key, value in overrides.items()]
    build_algorithm(
        hydra_entry.compose_config(hydra_entry.check_overrides(["experiment=quickstart", *words, "run.dir=x"]))
    )


PAIRS = [  # each estimator of verl with two of its losses
    (estimator, list(VERL_LOSSES)[number % len(VERL_LOSSES)])
    for index, estimator in enumerate(ALGORITHMS)
    for number in (index, index + 4)
]


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(("estimator", "mode"), PAIRS)
def test_every_loss_of_verl_may_be_combined_with_every_estimator(estimator, mode):
    """The estimator selects the advantages, and the mode selects the loss."""
    overrides = translate("verl", {ESTIMATOR: estimator, LOSS_MODE: mode}).overrides
    words = [hydra_entry.format_override(key, value) for key, value in overrides.items()]
    words += ["roles.teacher.path=x"] if overrides["algorithm"] == "distill" else []
    parts = build_algorithm(
        hydra_entry.compose_config(hydra_entry.check_overrides(["experiment=quickstart", *words, "run.dir=x"]))
    )
    loss, advantage = parts.objective.policy, parts.advantage_pipeline.advantage
    assert f"{type(loss).__module__}.{type(loss).__name__}" == VERL_LOSSES[mode][LOSS]
    assert getattr(loss, "clip_low", 0.2) == getattr(loss, "clip_high", 0.2) == 0.2
    expected = "PassAtK" if estimator == "grpo_passk" else CLASSES[overrides["algorithm"]]
    assert type(advantage).__name__ == expected


CLASSES = {  # config -> class of its advantage estimator
    **dict.fromkeys(("grpo", "gspo", "cispo"), "GRPO"),
    **{"ppo": "GAE", "rloo": "RLOO", "remax": "ReMax", "opo": "OPO", "gdpo": "GDPO", "gpg": "GPG"},
    **{"otb": "OptimalTokenBaseline", "reinforce_pp": "ReinforcePlusPlus", "distill": "OnPolicyDistillation"},
    "reinforce_pp_baseline": "ReinforcePlusPlusBaseline",
}


def test_settings_that_have_no_effect_are_not_translated():
    unused = {f"{ACTOR}clip_ratio_c": 3.0, LOSS_MODE: "gspo", "algorithm.pf_ppo.weight_pow": 2.0}
    unused |= {f"{ACTOR}policy_loss.dro_beta": 0.1, f"{ACTOR}loss_agg_mode": "token-mean"}
    found = translate(
        "verl", unused | {f"{ROLLOUT_CORRECTION}rollout_is_threshold": 2.0, "algorithm.use_pf_ppo": False}
    )
    assert found.overrides[LOSS] == f"{SEQUENCE_LOSSES}GSPO" and found.overrides[AGGREGATION] == "sequence_mean"
    assert len(found.overrides) == 4 and len(found.not_needed) == 6 and not found.no_counterpart
    bypass = {f"{ROLLOUT_CORRECTION}bypass_mode": True, LOSS_MODE: "gspo", f"{ACTOR}clip_ratio_c": 3.0}
    assert translate("verl", bypass).overrides == {
        "algorithm.old_logprobs": "rollout",
        LOSS: f"{LOSSES}PPOClip",
        "algorithm.loss.dual_clip": 3.0,
    }
    other = {"data.max_response_length": 512, f"{ACTOR}loss_scale_factor": 100}
    assert "rollout.max_response_tokens" in translate("verl", other).no_counterpart[0][1]
    level = {"importance_sampling_level": "sequence", "loss_type": "cispo"}
    assert translate("trl", level).no_counterpart[0][1] == "mrl's loss cispo cannot use the ratio 'sequence'"
    off = {"algorithm.filter_groups.enable": False, "algorithm.filter_groups.metric": "acc"}
    assert not translate("verl", off).overrides
    mismatched = {
        f"{ROLLOUT_CORRECTION}rollout_rs": "token_k1,token_k2",
        f"{ROLLOUT_CORRECTION}rollout_rs_threshold": "2,1,3",
    }
    assert translate("verl", mismatched).no_counterpart[0][1] == "the value cannot be read"
