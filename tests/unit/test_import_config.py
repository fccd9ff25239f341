"""`mrl import`: configs of verl, slime and trl become overrides that compose, key by key."""

import pytest

from mrl.algorithms.parts import build_algorithm
from mrl.cli import main
from mrl.commands.import_config import translate
from mrl.config import hydra_entry
from mrl.config.counterparts import SOURCES
from mrl.config.search_path import quote
from mrl.config.translation_rules import ALGORITHMS, VERL_LOSSES, Note
from mrl.config.validate import is_known, unknown_key_message

VERL = """
set -x
max_response_length=$((1024 * 8))
MODEL=${MODEL:-Qwen/Qwen3-8B}
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=data/train.parquet data.val_files=data/test.parquet \\
    data.train_batch_size=512 data.max_prompt_length=1024 \\
    data.max_response_length=${max_response_length} \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.002 actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.top_p=0.7 \\
    algorithm.use_kl_in_reward=False \\
    trainer.logger='["console","wandb"]' trainer.total_epochs=15 trainer.save_freq=-1 \\
    trainer.nothing_of_that_name=3 $@
"""
SLIME = """
CKPT_ARGS=(
   --hf-checkpoint /models/Qwen3-4B   # a comment
   --save /runs/mine
)
ROLLOUT_ARGS=(
   --prompt-data /data/math.jsonl --input-key question --label-key label
   --num-rollout 300 --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 8192 --global-batch-size 128 --rm-type math
)
EVAL_ARGS=(
   --eval-prompt-data aime /data/aime.jsonl gpqa /data/gpqa.jsonl
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.001 --kl-loss-type low_var_kl --eps-clip 0.2 --eps-clip-high 0.28
)
PERF_ARGS=(
   --tensor-model-parallel-size 2 --sequence-parallel
)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)
ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate ${CKPT_ARGS[@]} --rollout-num-gpus 8
"""
TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
learning_rate: 1.0e-6
num_generations: 8
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
max_completion_length: 512
beta: 0.04
loss_type: dr_grpo
entropy_coef: 0.001
use_adaptive_entropy: true
entropy_target: 0.3
reward_funcs: [accuracy]
bf16: true
max_steps: 100
warmup_ratio: 0.1
"""
EXPECTED = {
    "verl": {
        "algorithm=grpo",
        "data.train=[data/train.parquet]",
        "rollout.prompts_per_step=512",
        "rollout.max_response_tokens=8192",
        "model.path=Qwen/Qwen3-8B",
        "algorithm.mini_batches=4",
        "algorithm.kl_in_loss={_target_:mrl.algorithms.kl.KLPenalty,coef:0.002,kind:k3}",
        "algorithm.kl_in_reward=null",
        "algorithm.loss.clip_high=0.28",
        "parallel.tp=2",
        "megatron.recompute_granularity=full",
        "rollout.responses_per_prompt=16",
        "rollout.engine_tp=4",
        "tracking.backends=[wandb]",
        "checkpoint.every=0",
        "optim.lr=1e-06",
        "rollout.top_p=0.7",
        "trainer.epochs=15",
    },
    "slime": {
        "placement=colocated",
        "reward=math",
        "algorithm=grpo",
        "model.path=/models/Qwen3-4B",
        "run.dir=/runs/mine",
        "data.train=[/data/math.jsonl]",
        "data.test=[/data/aime.jsonl,/data/gpqa.jsonl]",
        "data.columns.prompt=question",
        "algorithm.mini_batches=2",
        "parallel.world_size=8",
        "rollout.num_engines=4",
        "rollout.engine_tp=2",
        "sglang.mem_fraction_static=0.7",
        "parallel.sp=true",
    },
    "trl": {
        "model.path=Qwen/Qwen3-0.6B",
        "rollout.prompts_per_step=8",
        "rollout.responses_per_prompt=8",
        "algorithm.kl_in_loss={_target_:mrl.algorithms.kl.KLPenalty,coef:0.04,kind:unbiased}",
        "algorithm.aggregation=fixed_length",
        "algorithm.entropy_coef=0.001",
        "algorithm.adaptive_entropy={target:0.3,step:0.005,max_coef:1.0}",
        "model.dtype=bfloat16",
        "optim.warmup_steps=10",
    },
}
CONFIGS = {"verl": ("run.sh", VERL), "slime": ("run.sh", SLIME), "trl": ("grpo.yaml", TRL)}
NO_COUNTERPART = {
    "verl": ["nothing_of_that_name=3"],
    "slime": [],
    "trl": ["reward_funcs=['accuracy']"],
}


def imported(source, tmp_path, capsys, *options):
    name, text = CONFIGS[source]
    (tmp_path / name).write_text(text)
    status = main(["import", source, str(tmp_path / name), *options])
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.mark.parametrize("source", SOURCES)
def test_a_config_becomes_overrides_that_compose(source, tmp_path, capsys):
    status, out, err = imported(source, tmp_path, capsys, "--overrides")
    assert status == 0, err
    overrides = out.splitlines()
    assert EXPECTED[source] <= set(overrides), EXPECTED[source] - set(overrides)
    composed = hydra_entry.compose_config(
        hydra_entry.check_overrides([*(each for each in overrides if not each.startswith("run.dir=")), "run.dir=x"])
    )
    assert composed.rollout.responses_per_prompt in (8, 16)


@pytest.mark.parametrize("source", SOURCES)
def test_keys_without_a_counterpart_are_shown_with_the_reason(source, tmp_path, capsys):
    status, out, _ = imported(source, tmp_path, capsys)
    assert status == 0 and "mrl train" in out
    for shown in NO_COUNTERPART[source]:
        assert shown in out


@pytest.mark.parametrize("source", SOURCES)
def test_every_rule_names_a_key_of_mrl(source):
    for key, rule in SOURCES[source].items():
        if isinstance(rule, str) and not rule.endswith("*"):
            assert is_known(rule), (key, rule)


def test_a_value_that_cannot_be_read_is_reported():
    found = translate("verl", {"actor_rollout_ref.actor.ppo_mini_batch_size": "$SIZE", "data.train_batch_size": 8})
    assert found.no_counterpart == [("actor_rollout_ref.actor.ppo_mini_batch_size=$SIZE", "the value cannot be read")]
    assert isinstance(SOURCES["verl"]["data.custom_cls.*"], Note)


def test_sampling_and_epochs_are_translated():
    trl = translate("trl", {"top_p": 0.9, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1, "num_train_epochs": 3})
    assert trl.overrides == {
        "rollout.top_p": 0.9, "rollout.top_k": -1, "rollout.min_p": 0.1, "rollout.repetition_penalty": 1.1, "trainer.epochs": 3
    }  # fmt: skip
    slime = {"rollout-top-k": 20, "rollout-stop": "###", "rollout-stop-token-ids": [7], "num-epoch": 2}
    assert translate("slime", slime).overrides == {
        "rollout.top_k": 20, "rollout.stop": ["###"], "rollout.stop_token_ids": [7], "trainer.epochs": 2
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "contains no keys of verl"), ("a: [1", "is not valid YAML"), ("- 1\n- 2\n", "contains no keys of verl")],
    ids=["empty", "not YAML", "a list"],
)
def test_a_file_that_is_no_config_is_refused(text, said, tmp_path, capsys):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["import", "verl", str(tmp_path / "x.yaml")])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("data.train_batch_size", "rollout.prompts_per_step"),
        ("train_batch_size", "rollout.prompts_per_step"),
        ("rollout.n", "rollout.responses_per_prompt"),
        ("lr", "optim.lr"),
        ("kl_coef", "algorithm.kl_in_reward.coef"),
        ("--rm-type", "reward"),
        ("num_generations", "rollout.responses_per_prompt"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "algorithm.mini_batches"),
    ],
)
def test_the_message_for_a_foreign_key_names_the_key_of_mrl(key, meant):
    assert f"'{meant}'" in unknown_key_message(key)


def test_how_held_out_sets_are_sampled_becomes_part_of_each_set():
    rollout = "actor_rollout_ref.rollout.val_kwargs"
    verl = translate(
        "verl",
        {
            "data.val_files": ["a.parquet"],
            f"{rollout}.n": 16,
            f"{rollout}.temperature": 0.6,
            f"{rollout}.do_sample": True,
        },
    )
    assert verl.overrides == {"data.test_sets": {"validation": {"files": ["a.parquet"], "n": 16, "temperature": 0.6}}}
    greedy = translate("verl", {"data.val_files": "a.parquet", f"{rollout}.do_sample": False, f"{rollout}.n": 1})
    assert greedy.overrides == {"data.test_sets": {"validation": {"files": ["a.parquet"], "temperature": 0.0}}}
    assert translate("verl", {"data.val_files": "a.parquet"}).overrides == {"data.test": ["a.parquet"]}
    files = ["aime", "aime.jsonl", "gpqa", "gpqa.jsonl"]
    slime = translate("slime", {"eval-prompt-data": files, "n-samples-per-eval-prompt": 8, "eval-top-p": 0.7})
    sampling = {"n": 8, "top_p": 0.7}
    assert slime.overrides == {
        "data.test_sets": {"aime": {"files": ["aime.jsonl"]} | sampling, "gpqa": {"files": ["gpqa.jsonl"]} | sampling}
    }
    assert not slime.no_counterpart and not slime.unknown and not verl.no_counterpart


def test_sampling_of_held_out_sets_on_the_command_line_can_be_parsed(tmp_path, capsys):
    files = "data.val_files=data/test.parquet"
    assert files in VERL
    (tmp_path / "run.sh").write_text(VERL.replace(files, f"{files} actor_rollout_ref.rollout.val_kwargs.n=4"))
    main(["import", "verl", str(tmp_path / "run.sh"), "--overrides"])
    assert "data.test_sets={validation:{files:[data/test.parquet],n:4}}" in capsys.readouterr().out


ACTOR, ROLLOUT_CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
ESTIMATOR, LOSS_MODE = "algorithm.adv_estimator", f"{ACTOR}policy_loss.loss_mode"
LOSS, SCALE, AGGREGATION = "algorithm.loss._target_", "algorithm.advantage.scale_rewards", "algorithm.aggregation"
IMPORTANCE, REJECTION = "mrl.algorithms.corrections.ImportanceSampling", "mrl.algorithms.corrections.Rejection"
LOSSES, SEQUENCE_LOSSES = "mrl.algorithms.losses.", "mrl.algorithms.sequence_losses."
KL = "mrl.algorithms.kl.KLPenalty"
PASS_AT_K = {"algorithm": "grpo", "algorithm.advantage._target_": "mrl.algorithms.advantages.PassAtK"}
NORMALIZE_STD = "algorithm.advantage.normalize_std"
FOREIGN = {  # name -> (trainer, its keys, overrides of mrl)
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


@pytest.mark.parametrize(("estimator", "mode"), PAIRS)
def test_every_loss_of_verl_may_be_combined_with_every_estimator(estimator, mode):
    """The estimator selects the advantages, and the mode the loss."""
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
    assert translate("trl", level).no_counterpart[0][1] == "mrl's loss cispo has no other ratio"
    off = {"algorithm.filter_groups.enable": False, "algorithm.filter_groups.metric": "acc"}
    assert not translate("verl", off).overrides
    mismatched = {
        f"{ROLLOUT_CORRECTION}rollout_rs": "token_k1,token_k2",
        f"{ROLLOUT_CORRECTION}rollout_rs_threshold": "2,1,3",
    }
    assert translate("verl", mismatched).no_counterpart[0][1] == "the value cannot be read"
