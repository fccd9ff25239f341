"""Runs with images: plans, requests to engines, and the layout of image models in an engine."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from tiny_families import IMAGE_FAMILIES, image_config

from models.architecture import VisionTower
from models.families import family_of
from models.hf_config import HFConfig
from mrl.config import hydra_entry
from mrl.config.instantiate import instantiate_callable
from mrl.controller.plan_models import check_layout, engine_layout, plan_model
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
from mrl.planner.activation_bytes import tower_bytes, tower_patch_bytes, tower_working_bytes
from mrl.planner.micro_batch_shape import MicroBatchShape
from mrl.planner.model_shape import ModelShape
from mrl.planner.run_memory import RoleModel, trainer_settings
from mrl.planner.run_memory import _pixel_bytes as pixel_bytes
from mrl.planner.trainer_memory import TrainerSettings, trainer_memory
from mrl.planner.trainer_state_bytes import checkpoint_bytes, largest_state, pipeline_stages, state_of_rank
from mrl.rollout.client import EngineClient, EngineError, SamplingParams, _generate_body
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes, check_engine_parameters
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


@pytest.mark.extended
def test_the_shapes_task_can_be_planned(inputs, tmp_path):
    config, actor, (train, test) = plan(inputs, tmp_path)
    assert len(train) == 128 and test is None and train.has_images
    check_readers_of_images(config, {"actor": actor}, train, test)
    pixels = train.image_inputs(3)
    assert train.encode(3).count(actor.arch.vision.image_token) == pixels.grid_thw.prod() // 4
    layout = engine_layout(config, actor)
    assert not any("visual" in name for name in layout.param_shapes(0))


@pytest.mark.extended
def test_the_held_out_problems_of_the_shapes_task_are_new_and_all_answers_are_likely(inputs):
    files = [pq.read_table(inputs / f"{split}.parquet").to_pylist() for split in ("train", "test")]
    train, test = ({(row["images"][0]["bytes"], row["prompt"][0]["content"]) for row in rows} for rows in files)
    assert len(files[0]) == 2048 and len(files[1]) == 128 and not train & test
    for rows in files:
        answers = Counter(row["reward_model"]["ground_truth"] for row in rows)
        assert sorted(answers) == ["0", "1", "2", "3"] and max(answers.values()) < 0.35 * len(rows), answers


@pytest.mark.extended
def test_a_model_without_a_tower_cannot_read_the_prompts(inputs, tmp_path):
    config, actor, (train, _) = plan(inputs, tmp_path)
    blind = replace(actor, arch=replace(actor.arch, vision=None))
    with pytest.raises(ValueError, match=r"critic.path=.*the model does not read the images of the actor's prompts"):
        check_readers_of_images(config, {"actor": actor, "critic": blind}, train)


@pytest.mark.extended
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


@pytest.mark.extended
def test_engines_compute_pixels_as_trainers_and_keep_no_outputs_of_a_trained_tower(inputs, tmp_path):
    config, actor, _ = plan(inputs, tmp_path)
    assert image_args(actor)["image_processor_backend"] == "pil"
    assert image_args(replace(actor, arch=replace(actor.arch, vision=None))) == {}
    assert image_environment(config) == {}
    trained = config_of(inputs, tmp_path, "model.train_vision=true")
    assert image_environment(trained) == {"SGLANG_VLM_CACHE_SIZE_MB": "0"}


@pytest.mark.extended
def test_settings_with_which_engines_lose_the_tower_or_read_other_pixels_are_refused(inputs, tmp_path):
    shared = frozenset([frozenset(["actor", "engines"])])
    config, actor, _ = plan(inputs, tmp_path, "+sglang.enable_weights_cpu_backup=false")
    check_image_engines(config, actor.arch, frozenset())
    check_image_engines(config, replace(actor.arch, vision=None), shared)
    with pytest.raises(ValueError, match=r"enable_weights_cpu_backup=false: .* does not restore the vision tower"):
        check_image_engines(config, actor.arch, shared)
    config = config_of(inputs, tmp_path, "+sglang.image_processor_backend=torchvision")
    with pytest.raises(ValueError, match=r"image_processor_backend=torchvision: trainers compute pixels with pil"):
        check_image_engines(config, actor.arch, frozenset())


@pytest.mark.extended
def test_colocated_engines_keep_the_tower_on_the_host(inputs, tmp_path):
    """The engines of this plan would run on GPUs, and they share them with the trainer."""
    found = []
    for overrides in ([], ["model.train_vision=true", "weight_sync.transport=disk"]):
        argv = ["placement=colocated", *overrides]
        planned = plan_training(config_of(inputs, tmp_path, *argv))
        spec = rollout_spec(replace(planned, server_args=planned.server_args | dict(device="cuda")), "run")
        found.append((spec.server_args["enable_weights_cpu_backup"], dict(spec.engine_group.env)))
    assert found == [(True, {}), (True, {"SGLANG_VLM_CACHE_SIZE_MB": "0"})]


@pytest.mark.extended_after(1)
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


def test_an_uneven_first_stage_must_have_the_layers_with_features_of_the_tower(tmp_path):
    image_config("qwen3_vl", num_hidden_layers=6).save_pretrained(tmp_path)
    hf = HFConfig.load(tmp_path)
    arch = family_of(hf).read(hf)
    arch = replace(arch, vision=replace(arch.vision, repeats=arch.vision.repeats | dict(feature=2)))

    def check(pp: int, **megatron) -> None:
        check_layout(SimpleNamespace(megatron=megatron), arch, ParallelDims(pp=pp))

    check(3)
    check(2, num_layers_in_first_pipeline_stage=2)
    check(4, num_layers_in_first_pipeline_stage=3)
    ends = dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    check(2, **ends)
    for pp, megatron in ((2, dict(num_layers_in_first_pipeline_stage=1)), (4, ends)):
        with pytest.raises(ValueError, match=r"stages has 1 layers, but the first 2 layers get features of the vision"):
            check(pp, **megatron)
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_layout='Ettt\|tttL': mrl does not read this layout"):
        check(2, pipeline_model_parallel_layout="Ettt|tttL")
    without = replace(arch, vision=replace(arch.vision, repeats=arch.vision.repeats | dict(feature=0)))
    check_layout(SimpleNamespace(megatron=dict(num_layers_in_first_pipeline_stage=1)), without, ParallelDims(pp=2))


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
    layout = EngineLayout.of(family, family.read(config), EngineParallelSizes(tp=2))
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


def image_shape(tmp_path, name: str, train_vision: bool = False) -> tuple[ModelShape, VisionTower]:
    image_config(name).save_pretrained(tmp_path)
    config = HFConfig.load(tmp_path)
    arch = family_of(config).read(config)
    return ModelShape.of(family_of(config), arch, train_vision), arch.vision


def saved_by_the_tower(vision: VisionTower, depth: int) -> int:
    """Return the bytes of the storages that autograd keeps for two images of 64 patches. Weights do not count."""
    from transformers import AutoConfig, AutoModel

    fields = vision.config | dict(depth=depth, hidden_size=64, intermediate_size=128, num_heads=4)
    tower = AutoModel.from_config(AutoConfig.for_model(vision.model_type, **fields), attn_implementation="sdpa")
    weights = {tensor.untyped_storage()._cdata for tensor in (*tower.parameters(), *tower.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}  # keeps the storages alive, so that no address is used again

    def record(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        tower(torch.randn(128, 3 * 2 * 4 * 4), grid_thw=torch.tensor([[1, 8, 8], [1, 8, 8]]))
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_a_block_of_the_tower_keeps_the_planned_bytes(tmp_path, name):
    shape, vision = image_shape(tmp_path, name)
    assert (shape.tower.patches, shape.tower.values, shape.tower.blocks) == (4, 96, 2)
    real = saved_by_the_tower(vision, 2) - saved_by_the_tower(vision, 1)
    # statistics of norms and of the attention are not planned
    planned = 128 * tower_patch_bytes(replace(shape.tower, hidden=64, ffn=128), 4)
    assert planned == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_the_first_stage_has_the_memory_of_pixels_and_of_the_tower(tmp_path, name):
    frozen, _ = image_shape(tmp_path, name)
    trained, _ = image_shape(tmp_path, name, train_vision=True)
    dims, settings = ParallelDims(pp=2), TrainerSettings(max_tokens=1000, itemsize=4)
    with_images = replace(settings, image_fraction=0.8)
    batch = MicroBatchShape.of(dims, 1000, 4, images=800)
    for shape in (frozen, trained):
        (plain, last), (first, same) = (trainer_memory(shape, dims, s).stages for s in (settings, with_images))
        assert same == last
        kept = sum(tower_bytes(shape.tower, shape.hidden, batch).values())
        assert first.saved - plain.saved == 2 * kept, "two micro-batches are in flight"
        assert first.scoring == max(plain.scoring, tower_working_bytes(shape.tower, shape.hidden, batch))
    features = (name == "qwen3_vl") * 1000 * frozen.hidden * 4
    assert sum(tower_bytes(frozen.tower, frozen.hidden, batch).values()) == features
    pixels = 800 * 4 * 96 * 4
    assert tower_bytes(trained.tower, trained.hidden, batch)["pixels"] == pixels
    assert tower_working_bytes(frozen.tower, frozen.hidden, batch) > pixels


@pytest.mark.extended
def test_hosts_have_the_pixels_of_the_prompts_of_a_step(inputs, tmp_path):
    """As if all tokens of a prompt were image tokens."""
    keys = ["rollout.prompts_per_step=16", "data.max_prompt_tokens=40", "rollout.max_response_tokens=10"]
    config = config_of(inputs, tmp_path, *keys)
    actor = plan_model(config, config.model.path)
    shape, dims = ModelShape.of(family_of(actor.hf), actor.arch), ParallelDims(dp=2)
    settings = trainer_settings(config, actor.context)
    assert settings.image_fraction == pytest.approx(0.8)
    prompt = 40 * shape.tower.patches * shape.tower.values * 4
    role = RoleModel(shape, dims, settings, actor.context)
    assert pixel_bytes(config, role, ranks=2) == 16 * prompt + 2 * 16 * prompt // 2
    assert pixel_bytes(config, replace(role, shape=replace(shape, tower=None)), ranks=2) == 0
