"""`mrl import`: configs of verl, slime and trl become overrides that compose, key by key."""

import pytest

from mrl.cli import main
from mrl.commands.import_config import translate
from mrl.config import hydra_entry
from mrl.config.counterparts import SOURCES
from mrl.config.translation_rules import Note
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


@pytest.mark.extended
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


@pytest.mark.extended_after(1)
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
    ("source", "values", "overrides"),
    [
        ("slime", {"adam-beta1": 0.8}, {"optim.betas": [0.8, 0.999]}),
        ("slime", {"adam-beta2": 0.98}, {"optim.betas": [0.9, 0.98]}),
        ("slime", {"adam-beta2": 0.98, "adam-beta1": 0.8}, {"optim.betas": [0.8, 0.98]}),
        ("trl", {"adam_beta2": 0.98}, {"optim.betas": [0.9, 0.98]}),
        ("trl", {"adam_beta1": 0.8, "adam_beta2": None}, {"optim.betas": [0.8, 0.999]}),
        ("slime", {"actor-num-nodes": 2}, {"parallel.world_size": 16}),
        ("slime", {"actor-num-nodes": 2, "actor-num-gpus-per-node": 4}, {"parallel.world_size": 8}),
        ("slime", {"rollout-seed": 7}, {"run.seed": 7}),
        ("slime", {"rollout-seed": 7, "seed": 7}, {"run.seed": 7}),
        (
            "slime",
            {
                "dynamic-sampling-filter-path": "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
            },
            {"rollout.filter._target_": "mrl.algorithms.filters.NonzeroVariance"},
        ),
        ("verl", {"trainer.log_val_generations": 0}, {}),
    ],
)
def test_keys_that_belong_together_are_translated(source, values, overrides):
    found = translate(source, values)
    assert found.overrides == overrides and not found.no_counterpart and not found.unknown


@pytest.mark.parametrize(
    ("source", "values", "overrides", "reason"),
    [
        ("slime", {"seed": 1234, "rollout-seed": 42}, {"run.seed": 1234}, "it gets the value of --seed"),
        ("slime", {"dynamic-sampling-filter-path": "mine.keep"}, {}, "name it in rollout.filter._target_"),
        (
            "verl",
            {"trainer.log_val_generations": 10},
            {},
            "rollout.record=true writes the responses of each evaluation",
        ),
    ],
)
def test_a_setting_that_would_be_lost_has_a_reason(source, values, overrides, reason):
    found = translate(source, values)
    ((_, text),) = found.no_counterpart
    assert found.overrides == overrides and reason in text


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
        ("lora_rank", "lora.rank"),
        ("lora_r", "lora.rank"),
        ("kl_coef", "algorithm.kl_in_reward.coef"),
        ("--rm-type", "reward"),
        ("num_generations", "rollout.responses_per_prompt"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "algorithm.mini_batches"),
    ],
)
def test_the_message_for_a_foreign_key_names_the_key_of_mrl(key, meant):
    assert f"'{meant}'" in unknown_key_message(key)


def test_adapters_have_the_scale_and_the_matrices_of_the_other_trainer():
    model = "actor_rollout_ref.model."
    for keys, rank, alpha in (
        ({f"{model}lora_rank": 8}, 8, 16),
        ({f"{model}lora_rank": 8, f"{model}lora_alpha": 64}, 8, 64),
        ({f"{model}lora.rank": 8}, 8, 32),
    ):
        assert translate("verl", keys).overrides == {"lora.rank": rank, "lora.alpha": alpha}
    assert translate("verl", {f"{model}lora_rank": 0}).overrides == {"lora.rank": 0}
    assert translate("trl", {"use_peft": True}).overrides == {
        "lora.rank": 16,
        "lora.alpha": 32,
        "lora.targets": ["q_proj", "v_proj"],
    }
    given = dict(lora_r=4, lora_alpha=8, lora_target_modules=["k_proj", "o_proj"], lora_dropout=0.1, use_peft=True)
    found = translate("trl", given)
    assert found.overrides == {"lora.rank": 4, "lora.alpha": 8, "lora.targets": ["k_proj", "o_proj"]}
    assert found.no_counterpart == [("lora_dropout=0.1", "mrl's adapters have no dropout")]
    every = translate("trl", {"use_peft": True, "lora_target_modules": ["all-linear"]}).overrides
    assert every == {"lora.rank": 16, "lora.alpha": 32}, "by default, mrl adapts all linear layers"
    assert not translate("trl", {"use_peft": False, "lora_r": 4}).overrides


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
