"""Runs with images: plans, requests to engines, and the layout of image models in an engine."""

from dataclasses import replace

import pytest
import torch
from tiny_families import IMAGE_FAMILIES, image_config

from models.families import family_of
from models.hf_config import HFConfig
from mrl.config import hydra_entry
from mrl.config.instantiate import instantiate_callable
from mrl.controller.plan_models import engine_layout, plan_model
from mrl.controller.plan_prompts import (
    check_image_engines,
    check_readers_of_images,
    image_args,
    image_environment,
    load_prompt_datasets,
    plan_evaluations,
)
from mrl.controller.plan_train import plan_training
from mrl.controller.processes import rollout_spec
from mrl.data.images import RequestImages
from mrl.data.shapes_task import make_shapes_task
from mrl.planner.model_shape import ModelShape
from mrl.planner.trainer_state_bytes import checkpoint_bytes, largest_state, pipeline_stages, state_of_rank
from mrl.rollout.client import EngineClient, EngineError, SamplingParams, _generate_body
from mrl.weight_sync.engine_layout import EngineLayout, Topology, check_engine_parameters
from parallel.dims import ParallelDims

IMAGE, PAD = RequestImages(("AAAA", "BBBB"), 9), 9


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes") / "inputs"
    make_shapes_task(folder)
    return folder


def config_of(inputs, tmp_path, *overrides):
    argv = [
        "experiment=quickstart",
        "data.inputs._target_=mrl.data.shapes_task.make_shapes_task",
        f"data.inputs.folder={inputs}",
        f"data.train=[{inputs}/test.parquet]",
        "data.test=[]",
        "sft.train=null",
        f"run.dir={tmp_path / 'run'}",
        *overrides,
    ]
    return hydra_entry.compose_config(hydra_entry.check_overrides(argv))


def plan(inputs, tmp_path, *overrides):
    config = config_of(inputs, tmp_path, *overrides)
    actor = plan_model(config, config.model.path)
    reward = instantiate_callable(config.reward, "reward")
    return config, actor, load_prompt_datasets(config, actor, reward, plan_evaluations(config))


def test_the_shapes_task_can_be_planned(inputs, tmp_path):
    config, actor, (train, test) = plan(inputs, tmp_path)
    assert len(train) == 128 and test is None and train.has_images
    check_readers_of_images(config, {"actor": actor}, train, test)
    pixels = train.image_inputs(3)
    assert train.encode(3).count(actor.arch.vision.image_token) == pixels.grid_thw.prod() // 4
    layout = engine_layout(config, actor)
    assert not any("visual" in name for name in layout.param_shapes(0))


def test_a_model_without_a_tower_cannot_read_the_prompts(inputs, tmp_path):
    config, actor, (train, _) = plan(inputs, tmp_path)
    blind = replace(actor, arch=replace(actor.arch, vision=None))
    with pytest.raises(ValueError, match=r"critic.path=.*the model does not read the images of the actor's prompts"):
        check_readers_of_images(config, {"actor": actor, "critic": blind}, train)


def test_a_critic_must_read_images_as_the_actor_does(inputs, tmp_path):
    import json
    import shutil

    config, actor, (train, _) = plan(inputs, tmp_path)
    vision = actor.arch.vision
    other_family = replace(actor, arch=replace(actor.arch, vision=replace(vision, model_type="qwen2_5_vl_vision")))
    folder = tmp_path / "resized"
    shutil.copytree(actor.model_path, folder)
    for path in folder.glob("*processor_config.json"):
        path.write_text(json.dumps(_with_size(json.loads(path.read_text()), 16 * 16 * 4)))
    copied = tmp_path / "copied"
    shutil.copytree(actor.model_path, copied)
    check_readers_of_images(config, {"actor": actor, "critic": replace(actor, model_path=str(copied))}, train)
    for critic in (other_family, replace(actor, model_path=str(folder))):
        with pytest.raises(
            ValueError, match=r"critic.path=.*the model does not read the images of the actor's prompts"
        ):
            check_readers_of_images(config, {"actor": actor, "critic": critic}, train)


def _with_size(value, shortest):
    """Return the settings of processors with another smallest size of images."""
    if not isinstance(value, dict):
        return value
    return {k: v | dict(shortest_edge=shortest) if k == "size" else _with_size(v, shortest) for k, v in value.items()}


def test_engines_compute_pixels_as_trainers_and_keep_no_outputs_of_a_trained_tower(inputs, tmp_path):
    config, actor, _ = plan(inputs, tmp_path)
    assert image_args(actor)["image_processor_backend"] == "pil"
    assert image_args(replace(actor, arch=replace(actor.arch, vision=None))) == {}
    assert image_environment(config) == {}
    trained = config_of(inputs, tmp_path, "model.train_vision=true")
    assert image_environment(trained) == {"SGLANG_VLM_CACHE_SIZE_MB": "0"}


def test_settings_with_which_engines_lose_the_tower_or_read_other_pixels_are_refused(inputs, tmp_path):
    shared = frozenset([frozenset(["actor", "engines"])])
    config, actor, _ = plan(inputs, tmp_path, "+sglang.enable_weights_cpu_backup=false")
    check_image_engines(config, actor.arch, frozenset())
    check_image_engines(config, replace(actor.arch, vision=None), shared)
    with pytest.raises(ValueError, match=r"enable_weights_cpu_backup=false: .* do not send the vision tower"):
        check_image_engines(config, actor.arch, shared)
    config = config_of(inputs, tmp_path, "+sglang.image_processor_backend=torchvision")
    with pytest.raises(ValueError, match=r"image_processor_backend=torchvision: trainers compute pixels with pil"):
        check_image_engines(config, actor.arch, frozenset())


def test_colocated_engines_keep_the_tower_on_the_host(inputs, tmp_path):
    """The engines of this plan would run on GPUs, and they share them with the trainer."""
    found = []
    for overrides in ([], ["model.train_vision=true", "weight_sync.transport=disk"]):
        argv = ["placement=colocated", *overrides]
        planned = plan_training(config_of(inputs, tmp_path, *argv))
        spec = rollout_spec(replace(planned, server_args=planned.server_args | dict(device="cuda")), "run")
        found.append((spec.server_args["enable_weights_cpu_backup"], dict(spec.engine_group.env)))
    assert found == [(True, {}), (True, {"SGLANG_VLM_CACHE_SIZE_MB": "0"})]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["megatron.recompute_granularity=full"],
            "megatron.recompute_granularity=full: each recomputed layer would run the backward pass of the vision tower",
        ),
        (["lora.rank=2"], "model.train_vision=true with lora.rank=2: only the adapters are trained"),
        ([], "reach the engines only by disk, not by weight_sync.transport=auto; set weight_sync.transport=disk"),
    ],
)
def test_a_trained_tower_has_restrictions(inputs, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        config, actor, _ = plan(inputs, tmp_path, "model.train_vision=true", *overrides)
        engine_layout(config, actor)


def test_engines_in_fp8_cannot_get_the_vision_tower(inputs, tmp_path):
    config, actor, _ = plan(inputs, tmp_path, "sglang.quantization=fp8")
    with pytest.raises(
        ValueError, match=r"sglang.quantization=fp8 with model.path=.* do not send the vision tower of an image"
    ):
        engine_layout(config, actor)


def test_a_language_model_has_no_tower_to_train(tmp_path, tiny_qwen3):
    argv = [f"model.path={tiny_qwen3()}", "model.train_vision=true", "run.dir=out", "model.dtype=float32"]
    config = hydra_entry.compose_config(hydra_entry.check_overrides(argv))
    with pytest.raises(ValueError, match=r"model.train_vision=true: .* has no vision tower; leave it false"):
        plan_model(config, config.model.path)


def test_requests_have_one_image_token_for_each_image():
    params = SamplingParams(3)
    prompts = [[1, PAD, PAD, PAD, 2, PAD, 3], [4, 5]]
    body = _generate_body(prompts, params, True, False, [IMAGE, None])
    assert body["input_ids"] == [[1, PAD, 2, PAD, 3], [4, 5]]
    assert body["image_data"] == [["AAAA", "BBBB"], [None]]
    assert "image_data" not in _generate_body(prompts, params, True, False, [None, None])


def test_another_number_of_image_tokens_in_the_engine_is_an_error():
    with EngineClient("http://127.0.0.1:1") as client:
        answers = [dict(meta_info=dict(prompt_tokens=7)), dict(meta_info=dict(prompt_tokens=5))]
        client._check_images(answers, [[1] * 7, [1] * 9], [IMAGE, None])
        with pytest.raises(EngineError, match="read 7 tokens of a prompt with images that has 9 tokens"):
            client._check_images(answers, [[1] * 9, [1] * 5], [IMAGE, IMAGE])


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_the_engine_layout_has_the_language_model_only(tmp_path, name):
    image_config(name).save_pretrained(tmp_path)
    config = HFConfig.load(tmp_path)
    family = family_of(config)
    layout = EngineLayout.of(family, family.read(config), Topology(tp=2))
    shapes = layout.param_shapes(0)
    assert shapes["model.embed_tokens.weight"] == (32, 32) and "model.layers.1.self_attn.qkv_proj.weight" in shapes
    assert {param.partition(".")[0] for param in shapes} == {"model", "lm_head"}
    reported = {param: (shape, "float32") for param, shape in shapes.items()}
    check_engine_parameters(layout, 0, reported | {"visual.merger.norm.weight": ((7,), "float32")}, "rank 0")
    with pytest.raises(ValueError, match=r"model\.more"):
        check_engine_parameters(layout, 0, reported | {"model.more": ((7,), "float32")}, "rank 0")


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
@pytest.mark.parametrize("train_vision", [False, True])
def test_the_planned_weights_are_those_of_the_model(tmp_path, name, train_vision):
    """The first stage has the tower. Only a trained tower has gradients and optimizer state."""
    import transformers

    saved = image_config(name)
    saved.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, saved.architectures[0])(saved)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    in_tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    config = HFConfig.load(tmp_path)
    shape = ModelShape.of(family_of(config), family_of(config).read(config), train_vision)
    assert shape.num_weights == num_weights
    assert shape.num_parameters == num_weights - (0 if train_vision else in_tower)
    assert checkpoint_bytes([shape], 2) == 14 * num_weights - (0 if train_vision else 12 * in_tower)
    dims = ParallelDims(pp=2)
    first, last = (state_of_rank(shape, dims, rank, 4) for rank in range(2))
    assert first.weights - last.weights >= 4 * (in_tower - shape.vocab * shape.hidden)
    assert (first.weights - first.gradients >= 4 * in_tower) != train_vision
    for rank, stage in enumerate(pipeline_stages(shape.num_layers, dims)):
        bound = largest_state(shape, dims, stage, 4, "vocabulary", True)
        assert bound.weights == (first, last)[rank].weights
