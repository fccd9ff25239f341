"""`mrl plan memory`: memory of runs, advice, and its output as text and JSON."""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from planned_runs import FULL, config_of, folder_of, memory_of

from mrl.commands import plan
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.controller import plan_tools
from mrl.controller.memory_check import MemoryEstimator, advise
from mrl.controller.plan_models import engine_parallel_sizes, plan_model
from mrl.data.synthetic_tasks import make_doubling_task
from mrl.planner.engine_memory import kv_bytes, state_bytes
from mrl.planner.run_memory import GIB
from mrl.weight_sync.engine_layout import EngineParallelSizes

GROUPS = ("algorithm", "cluster", "model", "placement", "reward", "sweep")
FILES = sorted(f"{group}={path.stem}" for group in GROUPS for path in (hydra_entry.CONF / group).glob("*.yaml"))
BLANKS = {  # file of conf -> overrides for the values that the user must set
    "algorithm=distill": ["roles.teacher.path=${model.path}"],
    "algorithm=distill_top_k": ["roles.teacher.path=${model.path}"],
    "algorithm=distill_vocab": ["roles.teacher.path=${model.path}"],
    "reward=function": ["reward.path=mine.py"],
    "reward=judge": ["reward.url=http://judge:30000", "reward.model=judge"],
    "reward=reward_model": ["reward.url=http://rewards:30000", "reward.tokenizer=${model.path}"],
    "reward=served_judge": ["roles.judge.path=${model.path}"],
    "reward=served_reward_model": ["roles.reward_model.path=${model.path}"],
}
# Experiments without a published model. test_experiment_recipes.py and test_sums_task.py plan all other experiments.
EXPERIMENTS = sorted(
    path.stem
    for path in (hydra_entry.CONF / "experiment").glob("*.yaml")
    if not re.search(r"^  path: (?!\$)", path.read_text(), re.MULTILINE)
)
PPO = "{_target_: mrl.algorithms.losses.PPOClip}"
LAYOUT = ["cluster=h100", "parallel.tp=4", "parallel.dp=2"]
SHARED = ["cluster=h100", "placement=colocated", "rollout.engine_tp=4", "rollout.num_engines=2"]
TRAINED = ["parallel.tp=4", "parallel.ep=8", "parallel.etp=1", "parallel.dp=2"]


@pytest.mark.extended
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_can_be_planned(tmp_path, monkeypatch, experiment):
    """An experiment that names no model is planned with Qwen3-8B on a node of eight GPUs."""
    monkeypatch.chdir(tmp_path)
    own = "path:" in (hydra_entry.CONF / "experiment" / f"{experiment}.yaml").read_text()
    layout = [] if own else ["parallel.tp=4", "parallel.dp=2"]
    memory = memory_of(config_of(None if own else "Qwen3-8B", tmp_path, "cluster=h100", *layout, experiment=experiment))
    assert memory.fits, memory.problems


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    make_doubling_task(folder := tmp_path_factory.mktemp("inputs") / "made")
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("choice", FILES)
def test_every_file_of_conf_can_be_planned(inputs, capsys, choice):
    words = ["experiment=quickstart", f"data.inputs.folder={inputs}", choice, *BLANKS.get(choice, [])]
    assert plan.main(words) == 0
    printed = capsys.readouterr().out
    assert "actor: " in printed and ("It fits." in printed or "GPU memory is unknown" in printed)


@pytest.mark.extended
def test_a_run_that_does_not_fit_exits_with_status_1_and_shows_advice(tmp_path, capsys):
    config = config_of("Qwen3-30B-A3B", tmp_path, *SHARED, *TRAINED)
    with pytest.raises(SystemExit) as ended:
        plan.explain_memory(config)
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert "It does not fit" in out and "actor during update" in out
    assert "megatron.recompute_granularity=full" in out


def test_a_run_that_fits_says_so(tmp_path, capsys):
    plan.explain_memory(config_of("Qwen3-30B-A3B", tmp_path, *SHARED, *TRAINED, *FULL))
    out = capsys.readouterr().out
    assert "It fits." in out and "30.53 billion parameters" in out


@pytest.mark.extended
def test_json_output_has_the_estimated_numbers(tmp_path, capsys):
    config = config_of("Qwen3-30B-A3B", tmp_path, *SHARED, *TRAINED)
    with pytest.raises(SystemExit):
        plan.explain_memory(config, as_json=True)
    printed, memory = json.loads(capsys.readouterr().out), memory_of(config)
    assert [moment["total"] for moment in printed["phases"]] == [moment.total for moment in memory.phases]
    assert not printed["fits"] and printed["alternatives"] and all(change["fits"] for change in printed["alternatives"])


@pytest.mark.extended
def test_advice_has_the_memory_of_its_config(tmp_path):
    estimator = MemoryEstimator.of(config_of("Qwen3-30B-A3B", tmp_path, *SHARED, *TRAINED))
    changes = advise(estimator.config, estimator.estimate)
    assert changes
    for change in changes:
        assert change.memory.fits
        assert estimator.estimate(change.config) == change.memory
        again = config_of("Qwen3-30B-A3B", tmp_path, *SHARED, *TRAINED, *change.overrides)
        assert memory_of(again).phases == change.memory.phases


@pytest.mark.extended
def test_advice_combines_changes_if_one_is_not_enough(tmp_path):
    layout = ["cluster=h100", "parallel.world_size=16", "cluster.nodes=3", "rollout.engine_tp=8"]
    estimator = MemoryEstimator.of(config_of("Qwen3-30B-A3B", tmp_path, *layout))
    changes = advise(estimator.config, estimator.estimate)
    assert changes and len(changes[0].overrides) > 1
    assert all(change.memory.gpus <= 24 for change in changes)


def test_too_few_nodes_are_a_problem(tmp_path):
    memory = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=h200", "cluster.nodes=1", "parallel.dp=16"))
    assert any("the run needs 17 GPUs, but the cluster has 8" in problem for problem in memory.problems)


@pytest.mark.extended
def test_no_sequence_is_longer_than_the_context(tmp_path):
    """By default, the plan assumes that prompts are as long as responses, or fill the rest of the context if that is shorter."""
    config = config_of("Qwen3-8B", tmp_path, "cluster=h100", "rollout.max_response_tokens=30000")
    assert memory_of(config).longest_sequence == 40_960
    assert memory_of(config_of("Qwen3-8B", tmp_path, "rollout.max_response_tokens=1000")).longest_sequence == 2000


def test_without_hardware_there_is_no_limit(tmp_path):
    memory = memory_of(config_of("Qwen3-8B", tmp_path))
    assert memory.fits and all(moment.limit == 0 for moment in memory.phases)
    assert memory.engine is not None and memory.engine.tokens == 65536


@pytest.mark.extended
def test_colocated_roles_are_counted_in_the_phases_in_which_they_work(tmp_path):
    apart = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=h100", "parallel.dp=8"))
    shared = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=h100", "parallel.dp=8", "placement=colocated"))
    assert {(m.role, m.phase) for m in apart.phases} >= {("actor", "weight_sync"), ("engines", "rollout")}
    assert {(m.role, m.phase) for m in shared.phases} >= {("actor, engines", "weight_sync"), ("engines", "rollout")}
    assert shared.gpus == 8 and apart.gpus == 9
    of = {m.phase: m for m in shared.phases}
    assert of["update"].parts["reserve"] == 4 * GIB
    assert shared.host.offloaded > 0 and apart.host.offloaded == 0


@pytest.mark.extended
def test_engines_that_apply_adapters_keep_slots_on_the_gpu_and_a_copy_of_their_weights_on_the_host(tmp_path):
    lora = ["cluster=h100", "parallel.dp=8", "lora.rank=16"]
    for placement in ("colocated", "disaggregated"):
        words = [*lora, f"placement={placement}"]
        merged = memory_of(config_of("Qwen3-8B", tmp_path, *words))
        config = config_of("Qwen3-8B", tmp_path, *words, "weight_sync.lora=adapter")
        adapter = memory_of(config)
        assert merged.engine and adapter.engine and merged.engine.adapters == merged.host.engines == 0
        slots = adapter.engine.adapters
        assert 2 * 50e6 < slots < 2 * 300e6, "two slots; A of fused layers has rows for each matrix"
        assert adapter.engine.kv_cache == merged.engine.kv_cache - slots
        of = {(m.role, m.phase): m.parts for m in adapter.phases}
        if placement == "colocated":
            assert adapter.host.engines == config.rollout.num_engines * adapter.engine.weights
            assert of["actor", "update"]["engine's weights"] == slots
            assert of["actor, engines", "weight_sync"]["engine's weights"] == adapter.engine.weights + slots
        else:
            assert adapter.host.engines == 0 and "engine's weights" not in of["actor", "update"]


@pytest.mark.extended
def test_servers_that_share_gpus_are_in_memory_at_the_same_time(tmp_path):
    served = ["roles.reward_model.path=unused", "roles.reward_model.num_engines=8"]
    shared = ["cluster=h100", "parallel.dp=8", "placement=colocated"]
    memory = memory_of(config_of("Qwen3-8B", tmp_path, *shared, *served))
    (rollout,) = [moment for moment in memory.phases if moment.phase == "rollout"]
    assert rollout.role == "reward_model, engines" and not rollout.fits
    assert (
        rollout.parts["reward_model: weights and kv cache"] == int(0.8 * rollout.limit)
        and rollout.parts["kv cache"] > 0
    )
    apart = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=h100", "parallel.dp=8", *served))
    rollouts = [moment for moment in apart.phases if moment.phase == "rollout"]
    assert {moment.role for moment in rollouts} == {"reward_model", "engines"}
    assert all(moment.fits for moment in rollouts)


@pytest.mark.extended
def test_a_critic_and_a_reference_are_counted(tmp_path):
    ppo = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=h100", "parallel.dp=8", "algorithm=ppo"))
    assert {m.role for m in ppo.phases} == {"actor", "critic", "engines"}
    kl = memory_of(config_of("Qwen3-8B", tmp_path, "parallel.dp=8", "++algorithm.kl_in_loss.coef=0.1"))
    assert kl.host.reference > 0
    lora = memory_of(config_of("Qwen3-8B", tmp_path, "parallel.dp=8", "++algorithm.kl_in_loss.coef=0.1", "lora.rank=1"))
    assert lora.host.reference == 2 * 8 * (1 << 26), (
        "two copies of the adapters on each rank, each in a block of pinned memory"
    )


@pytest.mark.extended
def test_the_masks_of_dropout_are_counted(tmp_path):
    """Each of the 36 layers saves two masks, with one byte for each of the 4096 elements of a token's hidden state."""

    def update(*overrides: str) -> tuple[Config, dict[str, int]]:
        config = config_of("Qwen3-8B", tmp_path, "cluster=h100", "parallel.dp=8", *overrides)
        (phase,) = [m for m in memory_of(config).phases if (m.role, m.phase) == ("actor", "update")]
        return config, dict(phase.parts)

    (config, plain), (_, dropped) = update(), update("megatron.hidden_dropout=0.1")
    tokens = max(config.trainer.max_tokens_per_micro_batch, memory_of(config).longest_sequence)
    assert dropped["activations"] - plain["activations"] == 36 * 2 * tokens * 4096


@pytest.mark.extended
def test_the_output_layers_and_hidden_states_of_teachers_are_counted(tmp_path):
    """Teachers with the hidden sizes 4096 and 2560 have output layers and hidden states of different sizes in bytes."""

    def config(algorithm: str, teacher: str, *overrides: str) -> Config:
        layout = ["cluster=h100", "parallel.tp=4", "parallel.dp=2", f"algorithm={algorithm}"]
        path = f"roles.teacher.path={folder_of(teacher, tmp_path)}"
        return config_of("Qwen3-8B", tmp_path, *layout, path, *overrides)

    def working_and_host_bytes(config: Config) -> np.ndarray:
        memory = memory_of(config)
        (update,) = [phase for phase in memory.phases if (phase.role, phase.phase) == ("actor", "update")]
        return np.array([update.parts["working"], memory.host.teachers])

    large, small = config("distill_vocab", "Qwen3-8B"), config("distill_vocab", "Qwen3-4B")
    working, host = working_and_host_bytes(large) - working_and_host_bytes(small)
    rollout, rows, columns = large.rollout, 151_936 // 4, 4096 - 2560
    tokens = max(large.trainer.max_tokens_per_micro_batch, memory_of(large).longest_sequence)
    assert working == (rows + tokens) * columns * 2
    sampled = rollout.prompts_per_step * rollout.responses_per_prompt * rollout.max_response_tokens
    assert host == (8 * rows + sampled) * columns * 2, "the eight ranks of the actor are on one node"
    assert working_and_host_bytes(config("distill_top_k", "Qwen3-8B"))[1] == 0
    rewards = ["algorithm.advantage._target_=mrl.algorithms.advantages.GRPO", f"+algorithm.loss.reward_loss={PPO}"]
    both = working_and_host_bytes(config("distill_vocab", "Qwen3-8B", *rewards))
    gradient = rows * 4096 * 2 + tokens * 4096 * 4
    assert both[0] > working_and_host_bytes(large)[0] + gradient, "two losses have two gradients of the output layer"


@pytest.mark.extended
def test_an_impossible_layout_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"parallel\.tp=3 does not divide"):
        memory_of(config_of("Qwen3-8B", tmp_path, "parallel.tp=3"))


@pytest.mark.extended
def test_a_small_kv_cache_is_a_problem(tmp_path):
    long = ["rollout.max_response_tokens=30000", "sglang.mem_fraction_static=0.2"]
    memory = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=a100", "parallel.dp=8", *FULL, *long))
    assert any("the KV cache holds" in problem for problem in memory.problems)


@pytest.mark.extended
def test_the_memory_of_a_run_can_be_copied_and_written_as_json(tmp_path):
    memory = memory_of(config_of("Qwen3-8B", tmp_path))
    assert replace(memory, nodes=2).nodes == 2
    json.dumps(memory.as_json())


def test_only_the_memory_is_printed_as_json(capsys):
    assert plan.main(["sync", "--json"]) == 2
    assert "--json" in capsys.readouterr().err


@pytest.mark.extended
@pytest.mark.parametrize("model", ["Qwen3.5-27B", "Qwen3-Next-80B-A3B", "Nemotron-3-Nano-30B-A3B"])
def test_engines_of_recurrent_layers_need_gpus(tmp_path, model):
    layout = ["cluster=h100", "parallel.tp=2", "parallel.dp=4"]
    config = config_of(model, tmp_path, *layout, "rollout.engine_tp=4")
    actor = MemoryEstimator.of(config).models["actor"]
    assert engine_parallel_sizes(config, actor).tp == 4
    with pytest.raises(
        ValueError, match=r"SGLang 0.5.23 has no kernels for \w+ on a CPU; use GPUs, or train .* mrl sft"
    ):
        engine_parallel_sizes(config_of(model, tmp_path, *layout, "sglang.device=cpu"), actor)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("model", ["Qwen3.5-27B", "Nemotron-Nano-9B-v2"])
def test_recurrent_layers_are_not_computed_in_fp8(tmp_path, model):
    fp8 = ["megatron.fp8=hybrid", "megatron.fp8_recipe=mxfp8"]
    with pytest.raises(
        ValueError, match=r"megatron\.fp8=hybrid: trainers compute recurrent layers only in model\.dtype"
    ):
        MemoryEstimator.of(config_of(model, tmp_path, *LAYOUT, *fp8))


def test_mrl_certify_engine_refuses_gated_delta_nets(tmp_path, monkeypatch):
    config = config_of("Qwen3.5-27B", tmp_path, *LAYOUT)
    plan_of = partial(plan_model, path=config.model.path, weights=False)
    monkeypatch.setattr(plan_tools, "plan_parity", plan_of)
    with pytest.raises(
        ValueError, match="mrl certify engine compares only language models with attention in every layer"
    ):
        plan_tools.plan_engine_check(config)


def test_mrl_certify_engine_refuses_the_dtype_of_an_engine_that_cannot_compute_in_it(tmp_path, monkeypatch):
    on_gpus = ["sglang.device=cuda", "sglang.dtype=float32", "certify.dtype=bfloat16", "rollout.deterministic=false"]
    config = config_of("Qwen3-4B", tmp_path, *on_gpus)
    monkeypatch.setattr(plan_tools, "plan_parity", partial(plan_model, path=config.model.path, weights=False))
    with pytest.raises(ValueError, match=r"sglang\.dtype=float32: on GPUs"):
        plan_tools.plan_engine_check(config)


def test_a_model_with_gated_delta_nets_caches_keys_only_in_its_other_layers(tmp_path):
    config = config_of("Qwen3.5-27B", tmp_path, *LAYOUT, "rollout.engine_tp=4")
    shape = MemoryEstimator.of(config).shapes["actor"]
    assert kv_bytes(shape, EngineParallelSizes(4), 2) == 16 * 2 * 256 * 2, "one of four key heads in 16 of 64 layers"


def test_a_model_with_one_block_in_each_layer_caches_keys_and_states_only_in_some_layers(tmp_path):
    shape = MemoryEstimator.of(config_of("Nemotron-Nano-9B-v2", tmp_path, *LAYOUT, "rollout.engine_tp=4")).shapes[
        "actor"
    ]
    assert kv_bytes(shape, EngineParallelSizes(4), 2) == 4 * 2 * 2 * 128 * 2, "two of eight key heads in 4 of 56 layers"
    # one of four ranks, 27 layers: a float32 matrix for each of 128 heads, and three inputs of the convolution in bfloat16
    state = 27 * (128 * 80 * 128 * 4 + (128 * 80 + 2 * 8 * 128) * 3 * 2) // 4
    assert state_bytes(shape, EngineParallelSizes(4)) == state


@pytest.mark.extended
def test_an_engine_divides_its_cache_between_keys_and_states_of_gated_delta_nets(tmp_path):
    keys = [*LAYOUT, "rollout.engine_tp=4"]
    config = config_of("Qwen3.5-27B", tmp_path, *keys)
    # one of four ranks, 48 layers: a float32 matrix for each of 48 heads, and three inputs of the convolution in bfloat16
    state = 48 * (48 * 128 * 128 * 4 + (2 * 2048 + 6144) * 3 * 2) // 4
    assert state_bytes(MemoryEstimator.of(config).shapes["actor"], EngineParallelSizes(4)) == state
    settings = ([], ["sglang.mamba_full_memory_ratio=0.25"], ["sglang.max_mamba_cache_size=100"])
    default, fifth, slots = (memory_of(config_of("Qwen3.5-27B", tmp_path, *keys, *more)).engine for more in settings)
    assert default.kv_cache == fifth.kv_cache == slots.kv_cache and default.total == slots.total
    assert default.states / default.kv_cache == pytest.approx(0.9 / 1.9)
    assert fifth.states / fifth.kv_cache == pytest.approx(1 / 5) and slots.states == 101 * state
    assert all(rank.tokens == (rank.kv_cache - rank.states) // rank.token_bytes for rank in (default, fifth, slots))
