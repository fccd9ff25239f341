"""The config: types, bounds, unknown keys, the files of conf/, plug-ins, and the descriptions of keys."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from models.megatron_overrides import (
    FIELDS_SET_BY_MRL,
    FP8_MULTIPLE,
    FP8_RECIPES,
    check_fp8_recipe,
    check_load_balancing,
    check_megatron_overrides,
)
from mrl.commands import config as config_command
from mrl.commands.config import markdown_page, metrics_page
from mrl.config import hydra_entry
from mrl.config.instantiate import instantiate, instantiate_callable
from mrl.config.schema import Config
from mrl.config.validate import RENAMED_KEYS, check, from_hydra, is_known, key_fields, unknown_key_message
from mrl.controller.plan_models import make_input_files
from parallel.dims import ParallelDims


def composed(**overrides):
    base = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Config)))
    node = {"_target_": "mrl.rewards.rule_based.ExactMatch"}
    needed = {
        "run.dir": "out",
        "model.path": "model",
        "data.train": ["a.parquet"],
        "reward": node,
        "algorithm.advantage": {"_target_": "mrl.algorithms.advantages.GRPO"},
        "algorithm.loss": {"_target_": "mrl.algorithms.losses.PPOClip"},
    }
    for key, value in (needed | overrides).items():
        OmegaConf.update(base, key, value, force_add=True)
    return base


def test_a_complete_config_becomes_typed_objects():
    config = from_hydra(composed(**{"optim.lr": "3e-4", "sft": {"train": "x.parquet", "steps": 5}}))
    assert config.optim.lr == 3e-4 and config.sft.steps == 5 and config.sft.batch_size == 128


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("algorithm.lr_typo", "optim.lr"),
        ("trainer.max_step", "trainer.max_steps"),
        ("rollout.temprature", "rollout.temperature"),
        ("paralel.tp", "parallel.tp"),
    ],
)
def test_an_unknown_key_names_its_nearest_match(key, near):
    assert not is_known(key)
    assert f"did you mean {near!r}" in unknown_key_message(key)
    with pytest.raises(ValueError, match=near.split(".")[0]):
        from_hydra(composed(**{key: 1}))


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("seed", "'run.seed'"),
        ("backends", "'tracking.backends'"),
        ("top_p", "'rollout.top_p' or 'generate.top_p'"),
        ("trainer.seed", "'run.seed'"),
        ("rollout.n", "'rollout.responses_per_prompt'"),
        ("data.train_batch_size", "'rollout.prompts_per_step'"),
        ("temprature", "'rollout.temperature' or 'generate.temperature'"),
        ("lr", "'optim.lr' or 'critic.optim.lr' or 'sft.optim.lr'"),
    ],
)
def test_the_last_name_of_a_key_is_enough_for_a_hint(key, near):
    assert f"unknown key {key!r}; did you mean {near}?" in unknown_key_message(key)


def test_free_form_nodes_take_any_key():
    assert is_known("sglang.mem_fraction_static") and is_known("algorithm.loss.clip_low") and is_known("megatron.x")


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.lr", "fast", "optim.lr"),
        ("rollout.temperature", 0.0, "rollout.temperature=0.0: must be greater than 0"),
        ("model.dtype", "float8", "expected bfloat16 or float32"),
        ("trainer.max_steps", -1, "must be 0 or more"),
        ("run.seed", -1, "must be 0 or more"),
        ("sft.batch_size", -1, "sft.batch_size=-1: must be 1 or more"),
        ("trainer.eval_rows", 0, "must be 1 or more"),
        ("model.path", "???", "model.path must be set"),
    ],
)
def test_a_bad_value_names_the_key(key, value, message):
    with pytest.raises(ValueError, match=message):
        from_hydra(composed(**{key: value}))


def test_checks_accept_the_defaults():
    check(from_hydra(composed()))


def test_the_number_of_keys_is_deliberate():
    assert len(list(key_fields())) == 253


def test_each_key_has_a_description_and_plausible_metadata():
    for key, field in key_fields():
        assert field.metadata.get("description"), key
        assert not set(field.metadata) - {"description", "unit", "above", "below", "least", "most"}, key


def test_the_generated_pages_are_up_to_date():
    folder = Path(__file__).resolve().parents[2] / "docs/reference"
    assert (folder / "config.md").read_text() == markdown_page(), "mrl config --markdown > docs/reference/config.md"
    assert (folder / "metrics.md").read_text() == metrics_page(), "mrl config --metrics > docs/reference/metrics.md"


@pytest.mark.extended
def test_former_names_of_keys_lead_to_the_new_ones():
    for former, key in RENAMED_KEYS.items():
        assert not is_known(former) and f"did you mean {key!r}" in unknown_key_message(former)
        assert is_known(key) or key.startswith("hydra."), key


@pytest.mark.extended
def test_hydra_checks_types_and_choices_when_it_composes():
    with pytest.raises(ValueError, match=r"optim\.lr: Value 'fast'"):
        compose("optim.lr=fast")
    with pytest.raises(ValueError, match=re.escape("rollout.mode='asynk': expected sync, one_step_off or async")):
        compose("rollout.mode=asynk")


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("++critic.parallel.tpp=2", "did you mean 'critic.parallel.tp'"),
        ("++critic.parallel.tp=two", "critic.parallel.tp: Value 'two'"),
        ("++roles.teacher.parallel.cp=0", "roles.teacher.parallel.cp=0: must be 1 or more"),
        ("++plan.efficiency.matmull=0.5", "unknown key 'plan.efficiency.matmull'"),
        ("rollout.max_staleness=3", "rollout.max_staleness=3 with rollout.mode=sync"),
        ("generate.top_p=1.5", "generate.top_p=1.5: must be greater than 0 and at most 1"),
        ("optim.betas=[0.9,1.0]", "must be 0 or more and less than 1|each must be in"),
    ],
)
def test_a_value_that_does_not_fit_names_its_key(override, message):
    with pytest.raises(ValueError, match=message):
        compose("model.path=m", override)


@pytest.mark.extended
def test_mrl_config_describes_keys(capsys):
    assert config_command.main(["optim.lr_schedule"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("optim.lr_schedule=constant") and "constant, linear, cosine, wsd" in text
    assert "set by the groups optim" in text
    assert config_command.main(["no_such_key"]) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tp_comm_overlap": True}, "its buffers have a fixed size"),
        (
            {"fp8": "hybrid", "fp8_recipe": "mxfp8"},
            "megatron.fp8=hybrid: needs Transformer Engine, which is not installed",
        ),
        (
            {"fp8": "hybrid"},
            "megatron.fp8_recipe is unset, and Megatron's default is delayed: this recipe reduces statistics",
        ),
        (
            {"fp8": "hybrid", "fp8_recipe": "delayed"},
            "a run hangs when replicas have different numbers of micro-batches; set megatron.fp8_recipe to tensorwise, "
            "blockwise or mxfp8.",
        ),
        ({"fp8": "e4m3", "fp8_recipe": "custom"}, "megatron.fp8_recipe=custom: mrl does not support this recipe"),
        (
            {"fp4": "e2m1"},
            "megatron.fp4=e2m1 is not supported, because mrl pads packs only for FP8",
        ),
        (
            {"fp8_param": True},
            "megatron.fp8_param=True: checkpoints, offloading and the push of weights to engines need",
        ),
        ({"moe_grouped_gemm": True}, "megatron.moe_grouped_gemm=True: needs Transformer Engine"),
        ({"num_moe_experts": 4}, "is derived from the model"),
        ({"deallocate_pipeline_outputs": True}, "is derived from the model"),
        ({"recompute_granularty": "full"}, "did you mean megatron.recompute_granularity?"),
    ],
)
def test_overrides_of_megatron_that_cannot_be(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_megatron_overrides(overrides, derived=FIELDS_SET_BY_MRL)


def test_fp8_pads_packs_for_every_recipe():
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_align_size

    assert all(FP8_MULTIPLE % get_fp8_align_size(Fp8Recipe(recipe)) == 0 for recipe in FP8_RECIPES)
    check_fp8_recipe({"fp8": None, "fp8_recipe": "delayed"})  # has no effect


def test_balancing_losses_that_mean_nothing_for_packs_are_refused():
    with pytest.raises(ValueError, match="use aux_loss"):
        check_load_balancing("seq_aux_loss", ParallelDims())
    with pytest.raises(ValueError, match="with dp=2 use aux_loss"):
        check_load_balancing(["aux_loss", "global_aux_loss"], ParallelDims(dp=2))
    for kinds in ("none", "aux_loss", "sinkhorn"):
        check_load_balancing(kinds, ParallelDims(dp=2))


def test_a_plug_in_is_built_and_its_arguments_are_checked():
    assert instantiate({"_target_": "mrl.algorithms.losses.PPOClip", "clip_low": 0.1}, "k").clip_low == 0.1
    with pytest.raises(ValueError, match=r"algorithm.loss.clip_lo: .* did you mean 'clip_low'"):
        instantiate({"_target_": "mrl.algorithms.losses.PPOClip", "clip_lo": 0.1}, "algorithm.loss")
    with pytest.raises(ValueError, match=r"losses: is a module; .* such as mrl.algorithms.losses.PPOClip"):
        instantiate({"_target_": "mrl.algorithms.losses"}, "algorithm.loss")
    with pytest.raises(ValueError, match="cannot be imported"):
        instantiate({"_target_": "no.such.Thing"}, "reward")
    with pytest.raises(ValueError, match="_target_ is missing"):
        instantiate({"x": 1}, "reward")


def test_inputs_are_made_where_they_are_missing(tmp_path):
    node = {"_target_": "mrl.data.synthetic_tasks.make_doubling_task", "folder": str(tmp_path / "made")}
    make_input_files(from_hydra(composed(**{"data.inputs": node})))
    assert (tmp_path / "made/model/config.json").is_file()


def double(responses, factor=2.0):
    return [factor for _ in responses]


def scaled(responses, scale):
    return [scale for _ in responses]


def test_a_plain_function_is_a_plug_in_too():
    here = f"{__name__}.double"
    assert instantiate_callable({"_target_": here}, "reward") is double
    assert instantiate_callable({"_target_": here, "factor": 3.0}, "reward")([1, 2]) == [3.0, 3.0]
    with pytest.raises(ValueError, match="is not callable"):
        instantiate_callable({"_target_": "mrl.core.types.SyncReport"}, "reward")
    assert instantiate_callable({"_target_": here}, "reward", ["responses"]) is double
    message = r"reward: double \(.*test_config.py:\d+\) takes .*, but mrl calls it with \(a, b, c\): too many"
    with pytest.raises(ValueError, match=message):
        instantiate_callable({"_target_": here}, "reward", ["a", "b", "c"])
    with pytest.raises(ValueError, match="missing a required argument: 'scale'"):
        instantiate_callable({"_target_": f"{__name__}.scaled"}, "reward", ["responses"])
    assert instantiate_callable({"_target_": f"{__name__}.scaled", "scale": 2.0}, "reward", ["responses"])([1]) == [2.0]


def test_quickstart_is_the_default_experiment_only_where_nothing_is_named():
    assert hydra_entry.add_default_experiment(["a=1"]) == ["experiment=quickstart", "a=1"]
    assert hydra_entry.add_default_experiment(["experiment=gsm8k"]) == ["experiment=gsm8k"]
    assert hydra_entry.add_default_experiment(["model.path=m"]) == ["model.path=m"]


def compose(*overrides):
    """Return the config that Hydra composes from conf/."""
    return hydra_entry.compose_config(["run.dir=out", *overrides])


@pytest.mark.extended
def test_the_quickstart_can_have_experts():
    """The group `model` applies after the experiment, and by default changes nothing. The two models have separate files."""
    dense, none, moe = (
        compose("experiment=quickstart", *more) for more in ([], ["model=none"], ["model=quickstart_moe"])
    )
    assert dense == none
    assert moe.data.inputs["model"] == "qwen3_moe"
    for of in (lambda c: c.run.name, lambda c: c.model.path, lambda c: c.data.train, lambda c: c.sft.output):
        assert of(dense) != of(moe)
    assert moe.model.path == "outputs/quickstart_moe/inputs/model" and moe.algorithm == dense.algorithm


@pytest.mark.extended
def test_a_family_from_a_file_can_be_named_on_the_command_line():
    assert compose("model.path=m").model.family is None
    assert compose("model.path=m", "model.family=/a/mine.py:MINE").model.family == "/a/mine.py:MINE"
    assert compose("model.path=m", "model.family=pack.mine:MINE").model.family == "pack.mine:MINE"


def test_mrl_refuses_a_foreign_package_called_models(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mrl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "mrl needs its own package 'models'" in done.stderr and str(tmp_path) in done.stderr


def test_free_form_sections_need_no_plus_and_are_checked():
    argv = hydra_entry.check_overrides(
        ["sglang.mem_fraction_static=0.5", "optim.lr=1", "experiment=quickstart", "--cfg", "job"]
    )
    assert argv == ["++sglang.mem_fraction_static=0.5", "optim.lr=1", "experiment=quickstart", "--cfg", "job"]
    assert hydra_entry.check_overrides(["data.columns={prompt: q}"]) == ["++data.columns={prompt: q}"]
    check_megatron_overrides({"recompute_granularity": "full", "recompute_num_layers": 1})
    with pytest.raises(ValueError, match=r"megatron.params_dtype is derived from"):
        check_megatron_overrides({"params_dtype": "float32"}, derived=FIELDS_SET_BY_MRL)
    with pytest.raises(ValueError, match=r"megatron.num_layer .*did you mean megatron.num_layers"):
        check_megatron_overrides({"num_layer": 3})


def test_megatron_fields_are_those_of_the_installed_class():
    from dataclasses import fields

    from models.megatron_overrides import transformer_config_fields
    from parallel import device

    device.patch_megatron_for_cpu()
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert transformer_config_fields() == {f.name for f in fields(TransformerConfig)}
