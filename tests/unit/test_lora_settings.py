"""Settings of LoRA: mistakes are refused before a process starts, and PEFT folders are checked."""

import json
import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES, IMAGE_FAMILIES, SIZES, config_class, image_config, make_family

from models.conversion.lora_mapping import adapter_mappings, adapter_shapes, can_have_adapter, check_lora
from models.conversion.peft_folder import ADAPTER_FOLDER, check_peft, peft_config, peft_warnings, write_peft
from models.families import family_of
from models.hf_config import HFConfig
from mrl.checkpoint.resume import ResumePoint
from mrl.checkpoint.store import Checkpoint, CheckpointStore
from mrl.config import hydra_entry
from mrl.controller import plan_train
from mrl.controller.memory_check import MemoryEstimator
from mrl.controller.model_processes import model_spec
from mrl.controller.plan_models import plan_model
from mrl.controller.plan_supervised import check_warm_start
from mrl.controller.plan_tools import plan_engine_check, plan_placement, plan_replay
from mrl.data.synthetic_tasks import make_doubling_task
from mrl.doctor.requirements import requirements_of
from mrl.evaluation.generation import find_model
from mrl.planner.model_shape import ModelShape
from parallel.dims import ParallelDims
from parallel.trainer_config import LoraConfig

LORA = LoraConfig(rank=2, alpha=4.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`models[name]` -> folder of a tiny model."""
    names = ("qwen3", "qwen3_moe", "deepseek_v3", "mixtral", "minimax_m2", "phi3", "olmo2", "qwen3_5", "qwen3_next")
    names += ("gpt_oss", "glm_moe_dsa", "nemotron_h_moe", "glm4")
    return {name: make_family(name, tmp_path_factory.mktemp(name)) for name in names}


def read(folder):
    hf = HFConfig.load(str(folder))
    return family_of(hf), family_of(hf).read(hf)


def config_of(folder, tmp_path, *overrides):
    base = [
        "experiment=quickstart",
        f"model.path={folder}",
        f"run.dir={tmp_path / 'run'}",
        "lora.rank=2",
        "lora.alpha=4",
    ]
    return hydra_entry.compose_config(hydra_entry.check_overrides([*base, *overrides]))


@pytest.mark.extended
def test_the_spec_of_a_trained_actor_has_the_adapters_and_other_models_have_none(models, tmp_path):
    config = config_of(models["qwen3"], tmp_path, "run.seed=7", "lora.targets=[q_proj]")
    spec = model_spec(plan_model(config, str(models["qwen3"])))
    assert spec.lora == LoraConfig(2, 4.0, ["q_proj"]) and spec.seed == 7
    for section, optimizer, head in (("critic", config.critic.optim, "value"), ("critic", None, "vocabulary")):
        plan = plan_model(config, str(models["qwen3"]), section, optimizer, head=head)
        assert model_spec(plan).lora is None
    assert model_spec(plan_model(replace(config, lora=LoraConfig()), str(models["qwen3"]))).lora is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("mixtral", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("minimax_m2", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("gpt_oss", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("olmo2", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("phi3", {"o_proj", "down_proj"}),
        ("glm4", {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}),
        ("deepseek_v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj",
                         "down_proj"}),
        ("glm_moe_dsa", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj",
                         "down_proj"}),  # and not wq_b, wk and weights_proj of the indexer
        ("qwen3_5", {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj"}),
        ("qwen3_next", {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "gate_proj",
                        "up_proj", "down_proj"}),
        ("nemotron_h_moe", {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "up_proj", "down_proj"}),
    ],
)  # fmt: skip
def test_linear_layers_outside_the_routed_experts_can_have_adapters(models, name, expected):
    family, arch = read(models[name])
    rows = [row for row in family.param_mappings(arch) if can_have_adapter(row)]
    mappings = [mapping for row in rows for mapping in adapter_mappings(row, expected)]
    assert {hf.split(".")[-3] for mapping in mappings for hf in mapping.hf} == expected
    assert not any(".experts." in hf for mapping in mappings for hf in mapping.hf)
    shapes = family.hf_shapes(arch)
    for of_a, of_b in zip(mappings[::2], mappings[1::2], strict=True):
        (name_a, a), (name_b, b) = (m.hf_shapes(arch.sizes | {"lora_rank": 2}).popitem() for m in (of_a, of_b))
        weight = name_a.removeprefix("base_model.model.").replace("lora_A.", "")
        weight = weight.replace("model.", "backbone.") if name == "nemotron_h_moe" else weight
        assert name_b == name_a.replace("lora_A", "lora_B") and (b[0], a[1]) == shapes[weight] and a[0] == b[1] == 2


def test_experts_that_a_checkpoint_stacks_have_no_adapters(models):
    family, arch = read(models["gpt_oss"])
    check_lora(LORA, family, arch)
    with pytest.raises(ValueError, match=r"lora.experts=true with GptOssForCausalLM: its experts cannot have adapters"):
        check_lora(replace(LORA, experts=True), family, arch)


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_the_vision_tower_of_an_image_model_has_no_adapters(tmp_path, name):
    image_config(name).save_pretrained(tmp_path)
    family, arch = read(tmp_path)
    check_lora(LORA, family, arch)
    adapted = {row.megatron for row in family.param_mappings(arch) if can_have_adapter(row)}
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert adapted == {f"decoder.layers.{layer}.{name}.weight" for layer in range(arch.num_layers) for name in linears}
    shape = ModelShape.of_adapters(family, arch, LORA)
    assert shape.frozen_vision_weights == 0 and shape.num_parameters == shape.num_weights


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("name", [*FAMILIES, *IMAGE_FAMILIES])
def test_the_target_modules_of_a_peft_folder_are_linear_layers_of_transformers(tmp_path, name):
    """PEFT finds the adapted modules by these names. Routed experts have no linear layers in transformers 5."""
    if name in IMAGE_FAMILIES:
        config = image_config(name)
    else:
        prefix, fields = FAMILIES[name]
        config = config_class(prefix)(**deepcopy(SIZES | fields), architectures=[f"{prefix}ForCausalLM"])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        modules = dict(getattr(transformers, config.architectures[0])(config).named_modules())
    shapes = adapter_shapes(LORA, *read(tmp_path))
    targets = peft_config(shapes, LORA, str(tmp_path))["target_modules"]
    assert targets and all(isinstance(modules[target], torch.nn.Linear) for target in targets)
    for target in targets:
        rows, columns = (shapes[f"base_model.model.{target}.lora_{m}.weight"][i] for m, i in (("B", 0), ("A", 1)))
        assert modules[target].weight.shape == (rows, columns)


def test_an_unknown_target_names_the_known_targets(models):
    with pytest.raises(ValueError, match=r"lora.targets: c_proj is not a linear layer of Qwen3ForCausalLM .* q_proj"):
        check_lora(replace(LORA, targets=["c_proj", "q_proj"]), *read(models["qwen3"]))


@pytest.mark.parametrize(
    ("name", "fused", "others"),
    [
        ("phi3", ["qkv_proj", "gate_up_proj"], ["o_proj", "down_proj"]),
        ("glm4", ["gate_up_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]),
    ],
)
def test_a_tensor_with_several_matrices_has_no_adapter(models, name, fused, others):
    family, arch = read(models[name])
    start = rf"lora.targets=\[\] with {family.architecture}: {', '.join(fused)} cannot have .*; set"
    with pytest.raises(ValueError, match=start):
        check_lora(LORA, family, arch)
    with pytest.raises(
        ValueError, match=rf"lora.targets: {fused[0]} is not a linear layer .* from {', '.join(others)}"
    ):
        check_lora(replace(LORA, targets=[fused[0], "o_proj"]), family, arch)
    check_lora(replace(LORA, targets=others), family, arch)


def test_tensors_that_trainers_store_with_several_matrices_have_no_adapters(models):
    family, arch = read(models["qwen3_5"])
    with pytest.raises(
        ValueError, match=r"in_proj_qkv, in_proj_z, in_proj_b, in_proj_a cannot have .*; set lora.targets"
    ):
        check_lora(LORA, family, arch)
    with pytest.raises(ValueError, match="layer 0 has none of these matrices"):
        check_lora(replace(LORA, targets=["q_proj", "v_proj"]), family, arch)
    check_lora(replace(LORA, targets=["q_proj", "v_proj", "out_proj"]), family, arch)
    check_lora(LORA, *read(models["qwen3_next"]))


def test_the_input_projection_of_mamba_2_has_no_adapter(models):
    family, arch = read(models["nemotron_h_moe"])
    with pytest.raises(
        ValueError, match=r"NemotronHForCausalLM: in_proj cannot have adapters, .* from out_proj, q_proj"
    ):
        check_lora(LORA, family, arch)
    targets = ["q_proj", "v_proj", "out_proj"]
    with pytest.raises(ValueError, match="layer 1 has none of these matrices; add one of up_proj, down_proj"):
        check_lora(replace(LORA, targets=targets), family, arch)
    check_lora(replace(LORA, targets=[*targets, "up_proj"]), family, arch)


def test_every_layer_needs_an_adapter(models):
    with pytest.raises(ValueError, match="layer 0 has none of these matrices"):
        check_lora(replace(LORA, targets=["gate_proj"]), *read(models["qwen3_moe"]))
    check_lora(replace(LORA, targets=["gate_proj", "o_proj"]), *read(models["qwen3_moe"]))


@pytest.mark.extended
def test_settings_that_contradict_frozen_weights_are_refused(models, tmp_path):
    folder = str(models["qwen3_moe"])
    with pytest.raises(ValueError, match=r"moe_router_bias_update_rate=0.1 with lora.rank=2: the routers of a model"):
        plan_model(config_of(folder, tmp_path, "megatron.moe_router_bias_update_rate=0.1"), folder)
    offloading = ["megatron.fine_grained_activation_offloading=true", "megatron.offload_modules=[expert_fc1,moe_act]"]
    with pytest.raises(ValueError, match=r"with lora.experts=true, it cannot contain expert_fc1"):
        plan_model(config_of(folder, tmp_path, *offloading, "lora.experts=true"), folder)
    plan_model(config_of(folder, tmp_path, *offloading), folder)
    empty = ["parallel.pp=2", "megatron.num_layers_in_first_pipeline_stage=2"]
    with pytest.raises(ValueError, match=r"needs a layer with adapters, but the stages have \[\[2\], \[0\]\] layers"):
        plan_model(config_of(folder, tmp_path, *empty), folder)
    with pytest.raises(ValueError, match="a reward model has no adapters"):
        plan_model(config_of(folder, tmp_path), folder, head="score")
    with pytest.raises(ValueError, match=r"sft.output=there with lora.rank=2"):
        check_warm_start(config_of(folder, tmp_path, "sft.output=there"))


def write_adapters(model, target):
    """Write a PEFT folder for the Qwen3 model in the folder `model`, and return `target`."""
    family, arch = read(model)
    rows = [row for row in family.param_mappings(arch) if can_have_adapter(row)]
    mappings = [mapping for row in rows for mapping in adapter_mappings(row, {"q_proj", "down_proj"})]
    shapes = {n: s for mapping in mappings for n, s in mapping.hf_shapes(arch.sizes | {"lora_rank": 2}).items()}
    write_peft({name: torch.randn(shape) for name, shape in shapes.items()}, LORA, str(model), target)
    return target


@pytest.fixture
def peft(models, tmp_path):
    """Return a PEFT folder for the Qwen3 model."""
    return write_adapters(models["qwen3"], tmp_path / "peft")


def test_commands_that_load_no_adapters_refuse_them(models, peft, tmp_path):
    config = config_of(models["qwen3"], tmp_path, f"lora.path={peft}")
    with pytest.raises(ValueError, match=r"lora.path=.*: mrl certify engine starts an engine .*; leave the key out"):
        plan_engine_check(config)
    with pytest.raises(ValueError, match=r"lora.path=.*: engines load no adapters; .* set model.path to an exported"):
        find_model(config)


def test_a_replay_from_an_exported_folder_has_the_base_model_and_its_adapters(models, tmp_path):
    """The folder has merged weights, to which adapters must not be added again."""
    export = tmp_path / "export"
    export.mkdir()
    adapters = write_adapters(models["qwen3"], export / ADAPTER_FOLDER)
    config, one = config_of(models["qwen3"], tmp_path, "lora.targets=[q_proj,down_proj]"), ParallelDims()
    spec = model_spec(plan_replay(config, str(export), one, one))
    assert spec.model_path == str(models["qwen3"]) and spec.lora is not None and spec.lora.path == str(adapters)
    (models["qwen3"] / ADAPTER_FOLDER).symlink_to(adapters)  # as if another run had exported the base model
    try:
        spec = model_spec(plan_replay(config, str(models["qwen3"]), one, one))
    finally:
        (models["qwen3"] / ADAPTER_FOLDER).unlink()
    assert spec.model_path == str(models["qwen3"]) and spec.lora is not None and spec.lora.path is None


def test_a_peft_folder_is_accepted_and_each_difference_is_named(models, peft):
    family, arch = read(models["qwen3"])
    lora = replace(LORA, targets=["q_proj", "down_proj"], path=str(peft))
    check_peft(lora, family, arch)
    with pytest.raises(ValueError, match=r"lora.rank=3: .* r=2"):
        check_peft(replace(lora, rank=3), family, arch)
    with pytest.raises(ValueError, match=r"lora.alpha=8: .* lora_alpha=4"):
        check_peft(replace(lora, alpha=8), family, arch)
    unknown = "belongs to a matrix that lora.targets does not name; set lora.targets to the matrices of these adapters"
    with pytest.raises(ValueError, match=f"do not fit; the first, .*, {unknown}"):
        check_peft(replace(lora, targets=["q_proj"]), family, arch)
    fields = json.loads((peft / "adapter_config.json").read_text())
    for changed, message in (
        (dict(use_rslora=True), r"use_rslora=True in adapter_config.json is not supported; expected False"),
        (dict(layer_replication=[[0, 1], [0, 2]]), r"layer_replication=\[\[0, 1\], \[0, 2\]\] in .* is not supported"),
        (dict(init_lora_weights="pissa"), r"init_lora_weights='pissa' in .*; expected true, false or 'gaussian'"),
    ):
        (peft / "adapter_config.json").write_text(json.dumps(fields | changed))
        with pytest.raises(ValueError, match=message):
            check_peft(lora, family, arch)
    for initial in (True, False, "gaussian", None):
        (peft / "adapter_config.json").write_text(json.dumps(fields | dict(init_lora_weights=initial)))
        check_peft(lora, family, arch)
    (peft / "adapter_config.json").write_text(json.dumps(fields))
    matrices = load_file(peft / "adapter_model.safetensors")
    name = next(iter(matrices))
    save_file(matrices | {name: matrices[name][:, 1:].contiguous()}, peft / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"1 tensors of .* do not fit; the first, {name}, has the shape .*; expected"):
        check_peft(lora, family, arch)
    save_file({each: matrices[each] for each in matrices if each != name}, peft / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match=f"1 tensors of .* do not fit; the first, {name}, is missing; set lora.targets"
    ):
        check_peft(lora, family, arch)
    (peft / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is missing"):
        check_peft(lora, family, arch)


def test_what_a_run_does_otherwise_than_the_writer_of_a_peft_folder_is_said(models, peft, tmp_path, caplog):
    lora = replace(LORA, path=str(peft))
    assert peft_warnings(lora, "float32") == []
    (rounded,) = peft_warnings(lora, "bfloat16")
    assert rounded.endswith("its matrices are F32, and are rounded to model.dtype=bfloat16.")
    fields = json.loads((peft / "adapter_config.json").read_text())
    (peft / "adapter_config.json").write_text(json.dumps(fields | dict(lora_dropout=0.05)))
    (dropout,) = peft_warnings(lora, "float32")
    assert "was trained with lora_dropout=0.05" in dropout
    words = ["lora.targets=[q_proj,down_proj]", f"lora.path={peft}", "model.dtype=bfloat16"]
    plan_model(config_of(models["qwen3"], tmp_path, *words), str(models["qwen3"]))
    assert "rounded to model.dtype=bfloat16" in caplog.text and "mrl's adapters have no dropout" in caplog.text


@pytest.mark.extended
def test_a_run_that_continues_from_a_checkpoint_does_not_read_the_initial_adapters(monkeypatch, tmp_path):
    made, removed = tmp_path / "made", str(tmp_path / "removed")
    make_doubling_task(made)
    words = [f"data.inputs.folder={made}", "sft.train=null", f"lora.path={removed}"]
    config = config_of(made / "model", tmp_path, *words)
    with pytest.raises(ValueError, match=r"lora.path=.*removed: adapter_config.json, .* is missing"):
        plan_train.plan_training(config)
    resume = ResumePoint(Checkpoint(tmp_path / "checkpoint", 4, {}))
    monkeypatch.setattr(plan_train, "find_resume_point", lambda config, check_hashes: resume)
    for check in ("check_checkpoint_fits", "check_pickles", "_check_prompt_position"):
        monkeypatch.setattr(plan_train, check, lambda *arguments: None)
    planned = plan_train.plan_training(config)
    assert model_spec(planned).lora == LORA
    assert planned.config.lora.path == removed, "the run's record keeps the key"


@pytest.mark.extended
def test_plans_of_a_run_that_continues_do_not_read_the_initial_adapters(models, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the plans write the input files of the quickstart
    config = config_of(models["qwen3"], tmp_path, f"lora.path={tmp_path / 'removed'}")
    missing = r"lora.path=.*removed: adapter_config.json, .* is missing"
    for plan in (MemoryEstimator.of, plan_placement):
        with pytest.raises(ValueError, match=missing):
            plan(config)
    assert re.search(missing, requirements_of(config).mistakes[0])
    store = CheckpointStore(tmp_path / "run/checkpoints")
    partial = store.begin()
    (partial / "actor").mkdir()
    store.commit(partial, 4, {})
    assert MemoryEstimator.of(config).models["actor"].lora == LORA
    plan_placement(config)
    assert requirements_of(config).mistakes == []


def test_the_planner_counts_only_the_parameters_of_adapters(models):
    family, arch = read(models["qwen3"])
    lora = replace(LORA, targets=["q_proj", "down_proj"])
    q_rows, hidden, ffn = 64, 32, 48
    expected = arch.num_layers * 2 * ((hidden + q_rows) + (ffn + hidden))
    assert ModelShape.of_adapters(family, arch, lora).num_parameters == expected
