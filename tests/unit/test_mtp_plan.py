"""Settings of MTP layers: what is refused before any process starts, and what a plan contains."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_families import add_mtp_layers, make_family

from models.conversion.hf_reader import check_hf_folder
from models.families import family_of
from models.hf_config import HFConfig
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.controller.model_processes import model_spec
from mrl.controller.plan_models import engine_layout, plan_model
from mrl.controller.plan_mtp import draft_server_args
from mrl.controller.supervised_stage import _loss_metrics
from mrl.core.types import UpdateReport
from mrl.rollout.engines.server_args import check_synced_args
from mrl.workers.model_trainers import mtp_metrics
from parallel.dims import ParallelDims


def config_of(folder, *overrides: str) -> Config:
    keys = [f"model.path={folder}", "model.dtype=float32", "run.dir=out"]
    return hydra_entry.compose_config(hydra_entry.check_overrides([*keys, *overrides]))


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    folder = make_family("glm4_moe", tmp_path_factory.mktemp("glm"))
    add_mtp_layers(folder)
    return folder


TRAINED = ("model.train_mtp=true", "trainer.share_prompts=false")


@pytest.mark.extended
def test_a_plan_contains_the_mtp_layers_only_on_request(glm):
    plan = plan_model(config_of(glm, *TRAINED, "model.mtp_loss_coef=0.25"), str(glm))
    assert plan.arch.mtp_layers == 1 and model_spec(plan).mtp_loss_coef == 0.25
    without = plan_model(config_of(glm), str(glm))
    assert without.arch.mtp_layers == 0 and model_spec(without).mtp_loss_coef is None
    assert plan.identity()["model.train_mtp"] and not without.identity()["model.train_mtp"]
    more = plan.arch.multiply_adds()[0] - without.arch.multiply_adds()[0]
    t, hidden = plan.arch.transformer, 32
    width = t["moe_router_topk"] * t["moe_ffn_hidden_size"] + t["moe_shared_expert_intermediate_size"]
    attention = 2 * (t["num_attention_heads"] + t["num_query_groups"]) * t["kv_channels"]
    assert more == hidden * (attention + 3 * width + 2 * hidden + 41)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.share_prompts=true"], r"trainer.share_prompts=true: .* set trainer.share_prompts=false"),
        (["lora.rank=2"], r"lora.rank=2: only the adapters are trained, and MTP layers have none"),
        (
            ["megatron.pipeline_model_parallel_layout=Et|tL"],
            r"megatron.pipeline_model_parallel_layout=Et\|tL: mrl puts",
        ),
        (
            ["megatron.fine_grained_activation_offloading=true"],
            r"megatron.fine_grained_activation_offloading=True: Megatron does",
        ),
        (
            [
                "megatron.recompute_granularity=full",
                "megatron.recompute_method=uniform",
                "megatron.recompute_num_layers=2",
            ],
            r"megatron.recompute_num_layers=2: Megatron recomputes MTP layers one by one; set it to 1",
        ),
    ],
)
def test_settings_that_do_not_fit_the_training_of_mtp_layers_are_refused(glm, overrides, message):
    with pytest.raises(ValueError, match=f"^model.train_mtp=true with {message}"):
        plan_model(config_of(glm, *TRAINED, *overrides), str(glm))


def test_a_reward_model_has_no_mtp_layers_to_train(glm):
    with pytest.raises(ValueError, match=r"^model.train_mtp=true: a reward model has no output layer"):
        plan_model(config_of(glm, *TRAINED), str(glm), head="score")


def test_a_second_model_has_no_mtp_layers(glm):
    assert plan_model(config_of(glm, *TRAINED), str(glm), "critic", head="value").arch.mtp_layers == 0


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3", {}, "mrl cannot train the MTP layers of Qwen3ForCausalLM, nor draft with them; leave the key out"),
        ("minimax_m2", {}, "mrl cannot train the MTP layers of MiniMaxM2ForCausalLM"),
        ("glm4_moe", dict(num_nextn_predict_layers=0), "says that the model has 0 MTP layers .*expected 1 or more"),
        ("qwen3_5", dict(mtp_num_hidden_layers=2), "says that the model has 2 MTP layers .*expected 1 to 1"),
    ],
)
def test_models_without_known_mtp_layers_are_refused(tmp_path, name, fields, message):
    config = HFConfig.load(make_family(name, tmp_path))
    config = replace(config, fields=config.fields | fields, train_mtp=True)
    with pytest.raises(ValueError, match=f"^model.train_mtp=true: .*{message}"):
        family_of(config).read(config)


def test_a_folder_without_the_mtp_tensors_is_refused(tmp_path):
    folder = make_family("qwen3_next", tmp_path)
    check_hf_folder(folder)
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight is missing \(expected \[32, 64\]\)"):
        check_hf_folder(folder, train_mtp=True)


SPECULATION = ("sglang.speculative_algorithm=EAGLE", "sglang.device=cuda", "model.dtype=bfloat16")


def plan_engines(folder, *overrides: str):
    config = config_of(folder, *SPECULATION, "cluster.address=auto", *overrides)
    hf = HFConfig.load(folder, train_mtp=config.model.train_mtp)
    actor = SimpleNamespace(hf=hf, arch=family_of(hf).read(hf), dims=ParallelDims())
    return engine_layout(config, actor)


@pytest.mark.extended
@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN", "eagle"])
def test_engines_may_draft_with_the_mtp_layer_of_the_model(glm, algorithm):
    untrained = plan_engines(glm, f"sglang.speculative_algorithm={algorithm}")
    assert not any(name.startswith("draft.") for name in untrained.param_shapes(0))
    trained = plan_engines(glm, *TRAINED)
    shapes = {name: shape for name, shape in trained.param_shapes(0).items() if name.startswith("draft.")}
    assert shapes["draft.model.eh_proj.weight"] == (32, 64) and shapes["draft.model.shared_head.norm.weight"] == (32,)
    assert shapes["draft.model.decoder.mlp.experts.w13_weight"] == (12, 24, 32)
    assert trained.param_shapes(0).keys() - shapes.keys() == untrained.param_shapes(0).keys()
    assert draft_server_args(config_of(glm, *SPECULATION), str(glm)) == dict(speculative_draft_model_path=str(glm))
    assert draft_server_args(config_of(glm), str(glm)) == {}


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sglang.speculative_algorithm=EAGLE3"], r"EAGLE3: trainers send no weights .* expected EAGLE or NEXTN"),
        (
            ["sglang.device=cpu"],
            r"EAGLE: on CPUs, SGLang 0.5.23 has no kernels .* most probable token instead of a sample",
        ),
        (["rollout.min_p=0.1"], r"EAGLE with rollout.min_p=0.1: SGLang 0.5.23 does not apply it exactly"),
        (["rollout.repetition_penalty=1.1"], r"EAGLE with rollout.repetition_penalty=1.1"),
        (
            ["rollout.routing_replay=true"],
            r"EAGLE with rollout.routing_replay=true: SGLang does not report the experts",
        ),
        (["sglang.quantization=fp8"], r"EAGLE with sglang.quantization=fp8: such engines start with random weights"),
        (
            ["weight_sync.transport=disk"],
            r"EAGLE with weight_sync.transport=disk: the folders for engines have no MTP layers",
        ),
        (
            ["weight_sync.lora=adapter", "lora.rank=2"],
            r"EAGLE with weight_sync.lora=adapter: SGLang would apply the adapters",
        ),
        (
            ["+sglang.speculative_accept_threshold_acc=0.5"],
            r"EAGLE with sglang.speculative_accept_threshold_acc=0.5: samples would",
        ),
    ],
)
def test_settings_that_do_not_fit_speculative_decoding_are_refused(glm, overrides, message):
    with pytest.raises(ValueError, match=rf"^sglang.speculative_algorithm={message}"):
        plan_engines(glm, *[each.removeprefix("+") for each in overrides])


@pytest.mark.extended
def test_speculative_decoding_needs_one_mtp_layer_in_the_folder(tmp_path, glm):
    folder = make_family("glm4_moe", tmp_path / "without", num_nextn_predict_layers=1)
    with pytest.raises(
        ValueError, match=r"has no MTP layer: \d+ of its \d+ tensors are missing, such as model\.layers\.2\."
    ):
        plan_engines(folder)
    add_mtp_layers(folder, 2)
    with pytest.raises(ValueError, match=r"the model has 2 MTP layers, but SGLang 0.5.23 drafts with one"):
        plan_engines(folder)
    with pytest.raises(ValueError, match=r"=EAGLE: mrl cannot train the MTP layers of Qwen3ForCausalLM"):
        plan_engines(make_family("qwen3", tmp_path / "qwen3"))


@pytest.mark.parametrize("name", ["speculative_draft_model_path", "enable_multi_layer_eagle"])
def test_other_draft_models_are_refused(name):
    with pytest.raises(ValueError, match=rf"^sglang\.{name}=x: .* from the trainers; remove this argument"):
        check_synced_args({"speculative_algorithm": "EAGLE", name: "x"})


def test_the_metric_of_mtp_layers_is_their_mean_loss_per_predicted_token():
    reports = [
        UpdateReport({"weight": 1.0, "loss": 7.0, "mtp_nll": 6.0, "mtp_tokens": 3.0}),
        UpdateReport({"weight": 1.0, "loss": 7.0, "mtp_nll": 2.0, "mtp_tokens": 1.0}),
    ]
    assert mtp_metrics(reports) == {"loss/mtp": 2.0}
    assert _loss_metrics(reports[0]) == {"loss/mtp": 2.0}
    assert mtp_metrics([UpdateReport({"weight": 1.0, "mtp_tokens": 0.0})]) == {} == mtp_metrics([UpdateReport()])
