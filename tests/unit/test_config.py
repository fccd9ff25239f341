"""Config: unknown keys are errors with the nearest match; the key list grows on purpose."""

import re
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from models.megatron_overrides import FIELDS_SET_BY_MRL, check_load_balancing, check_megatron_overrides
from mrl.config import hydra_entry
from mrl.config.instantiate import construct, plug_in
from mrl.config.schema import Config
from mrl.config.validate import check, from_hydra, is_known, known_keys, unknown_key_message
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


def test_free_form_nodes_take_any_key():
    assert is_known("sglang.mem_fraction_static") and is_known("algorithm.loss.clip_low") and is_known("megatron.x")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.lr", "fast", "optim.lr"),
        ("rollout.temperature", 0.0, "rollout.temperature=0.0: must be greater than 0"),
        ("model.dtype", "float8", "expected bfloat16 or float32"),
        ("trainer.max_steps", -1, "must be 0 or more"),
        ("run.seed", -1, "must be 0 or more"),
        ("sft.batch_size", -1, "sft.batch_size=-1: must be greater than 0"),
        ("trainer.eval_rows", 0, "must be 1 or more"),
        ("model.path", "???", "model.path must be set"),
    ],
)
def test_a_bad_value_names_the_key(key, value, message):
    with pytest.raises(ValueError, match=message):
        from_hydra(composed(**{key: value}))


def test_checks_accept_the_defaults():
    check(from_hydra(composed()))


def test_the_key_list_is_a_decision():
    """Growth of the config is deliberate: change this number together with the docs."""
    assert len(known_keys()) == 246


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tp_comm_overlap": True}, "its buffers have a fixed size"),
        ({"fp8": "hybrid"}, "FP8 needs Transformer Engine, which is not installed"),
        ({"moe_grouped_gemm": True}, "grouped experts need Transformer Engine"),
        ({"num_moe_experts": 4}, "is derived from the model"),
        ({"deallocate_pipeline_outputs": True}, "is derived from the model"),
        ({"recompute_granularty": "full"}, "did you mean megatron.recompute_granularity?"),
    ],
)
def test_overrides_of_megatron_that_cannot_be(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_megatron_overrides(overrides, derived=FIELDS_SET_BY_MRL)


def test_balancing_losses_that_mean_nothing_for_packs_are_refused():
    with pytest.raises(ValueError, match="use aux_loss"):
        check_load_balancing("seq_aux_loss", ParallelDims())
    with pytest.raises(ValueError, match="with dp=2 use aux_loss"):
        check_load_balancing(["aux_loss", "global_aux_loss"], ParallelDims(dp=2))
    for kinds in ("none", "aux_loss", "sinkhorn"):
        check_load_balancing(kinds, ParallelDims(dp=2))


def test_a_plug_in_is_built_and_its_arguments_are_checked():
    assert construct({"_target_": "mrl.algorithms.losses.PPOClip", "clip_low": 0.1}, "k").clip_low == 0.1
    with pytest.raises(ValueError, match=r"algorithm.loss.clip_lo: .* did you mean 'clip_low'"):
        construct({"_target_": "mrl.algorithms.losses.PPOClip", "clip_lo": 0.1}, "algorithm.loss")
    with pytest.raises(ValueError, match="cannot be imported"):
        construct({"_target_": "no.such.Thing"}, "reward")
    with pytest.raises(ValueError, match="_target_ is missing"):
        construct({"x": 1}, "reward")


def test_inputs_are_made_where_they_are_missing(tmp_path):
    node = {"_target_": "mrl.data.synthetic_tasks.make_doubling_task", "folder": str(tmp_path / "made")}
    make_input_files(from_hydra(composed(**{"data.inputs": node})))
    assert (tmp_path / "made/model/config.json").is_file()


def double(responses, factor=2.0):
    return [factor for _ in responses]


def test_a_plain_function_is_a_plug_in_too():
    here = f"{__name__}.double"
    assert plug_in({"_target_": here}, "reward") is double
    assert plug_in({"_target_": here, "factor": 3.0}, "reward")([1, 2]) == [3.0, 3.0]
    with pytest.raises(ValueError, match="cannot be called"):
        plug_in({"_target_": "mrl.core.types.SyncReport"}, "reward")
    with pytest.raises(ValueError, match="class attribute 'zero_without_advantage'"):
        plug_in({"_target_": "mrl.rewards.rule_based.ExactMatch"}, "algorithm.loss", needs=("zero_without_advantage",))


def test_quickstart_is_the_default_experiment_only_where_nothing_is_named():
    assert hydra_entry.add_default_experiment(["a=1"]) == ["experiment=quickstart", "a=1"]
    assert hydra_entry.add_default_experiment(["experiment=gsm8k"]) == ["experiment=gsm8k"]
    assert hydra_entry.add_default_experiment(["model.path=m"]) == ["model.path=m"]


def compose(*overrides):
    """The config as Hydra composes it from conf/."""
    from hydra import compose, initialize_config_dir

    hydra_entry.register_schema()
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        return from_hydra(compose("config", ["run.dir=out", *overrides]))


def test_the_quickstart_can_have_experts():
    """The model group comes after the experiment, changes nothing by default, and keeps the two kinds of files apart."""
    dense, none, moe = (
        compose("experiment=quickstart", *more) for more in ([], ["model=none"], ["model=quickstart_moe"])
    )
    assert dense == none
    assert moe.data.inputs["model"] == "qwen3_moe"
    for of in (lambda c: c.run.name, lambda c: c.model.path, lambda c: c.data.train, lambda c: c.sft.output):
        assert of(dense) != of(moe)
    assert moe.model.path == "outputs/quickstart_moe/inputs/model" and moe.algorithm == dense.algorithm


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
