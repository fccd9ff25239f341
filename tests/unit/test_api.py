"""`import mrl`: settings in all forms give the same config; mistakes are errors before anything starts."""

import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import mrl
from mrl import api
from mrl.config.schema import Config

OVERRIDES = ["experiment=quickstart", "run.dir=x", "rollout.prompts_per_step=16", "optim.lr=0.001"]


@pytest.mark.extended
def test_lists_dicts_and_configs_give_the_same_config():
    config = mrl.load_config(OVERRIDES)
    nested = {"experiment": "quickstart", "run": {"dir": "x"}, "rollout.prompts_per_step": 16, "optim": {"lr": 1e-3}}
    assert isinstance(config, Config) and mrl.load_config(nested) == config and mrl.load_config(config) == config
    assert config.rollout.prompts_per_step == 16 and config.model.path.endswith("inputs/model")


def test_values_of_all_types_reach_the_config():
    settings = {
        "run.dir": "a folder, with a comma",
        "data.test": ["a.parquet", "b c.parquet"],
        "rollout": {"filter": None, "agent": {"_target_": "a.B", "tools": {"x": {"_target_": "a.C"}}}},
        "algorithm.mask_truncated": True,
        "sglang": {"mem_fraction_static": 0.5},
    }
    config = mrl.load_config(settings)
    assert config.run.dir == "a folder, with a comma" and config.data.test == ["a.parquet", "b c.parquet"]
    assert config.rollout.filter is None and config.rollout.agent["tools"] == {"x": {"_target_": "a.C"}}
    assert config.algorithm.mask_truncated is True and config.sglang["mem_fraction_static"] == 0.5


def test_a_function_of_a_module_becomes_its_name():
    config = mrl.load_config({"run.dir": "x", "reward": statistics.mean})
    assert config.reward == {"_target_": "statistics.mean"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"run.dri": "x"}, "did you mean 'run.dir'"),
        (["trainer.max_steps=many"], "trainer.max_steps"),
        ("experiment=quickstart", "expected a list of overrides"),
        ({"reward": lambda inputs: 0.0}, "give a function or class at the top level of an importable module"),
    ],
    ids=["an unknown key", "a wrong type", "a string", "a lambda"],
)
def test_a_mistake_in_the_settings_is_a_value_error(settings, said):
    with pytest.raises(ValueError, match=said):
        mrl.load_config(settings)


@pytest.mark.extended
def test_a_slurm_job_is_refused():
    with pytest.raises(ValueError, match="to submit a Slurm job, use the command"):
        mrl.train(["experiment=quickstart", "cluster=slurm", "run.dir=x"])
    for function in (mrl.generate, mrl.evaluate):
        with pytest.raises(ValueError, match=f"to submit a Slurm job, use the command `mrl {function.__name__}`"):
            function(["experiment=quickstart", "cluster=slurm", "run.dir=x"])


@pytest.mark.extended
def test_a_command_gets_the_whole_config(monkeypatch, tmp_path):
    """From a file, the child composes the same config as the parent, including values that no override has set."""
    config = mrl.load_config([*OVERRIDES, f"run.dir={tmp_path / 'run'}", "algorithm=ppo"])
    config = replace(config, trainer=replace(config.trainer, max_steps=7))
    printed = []

    def compose(command, arguments):
        line = [sys.executable, "-P", "-m", "mrl.cli", command, *arguments, "--cfg", "job", "--resolve"]
        printed.append(subprocess.run(line, capture_output=True, text=True, check=True, timeout=300).stdout)

    monkeypatch.setattr(api, "_run_child", compose)
    mrl.train(config)
    (tmp_path / "printed.yaml").write_text(printed[0])
    text = printed[0]
    assert "max_steps: 7" in text and "mrl.algorithms.advantages.GAE" in text and "prompts_per_step: 16" in text


@pytest.mark.extended
def test_a_failed_command_raises_its_message(capfd):
    with pytest.raises(mrl.CommandError, match="no-such-folder") as failed:
        mrl.convert("to-megatron", model_path="no-such-folder", output="never")
    assert failed.value.status == 2 and "no-such-folder" in capfd.readouterr().err


def test_importing_mrl_imports_nothing_large():
    code = "import sys, mrl; mrl.load_config(['run.dir=x']); print([m for m in ('ray', 'torch', 'sglang') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_attribute_names_the_functions():
    with pytest.raises(AttributeError, match="its functions are CommandError"):
        _ = mrl.nothing


@pytest.mark.extended
def test_a_program_with_a_hydra_of_its_own_keeps_it(tmp_path):
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert mrl.load_config(["run.dir=x"]).model.path.endswith("inputs/model")
        assert compose("config").mine == 1
    assert not GlobalHydra.instance().is_initialized()


def test_a_closed_stderr_does_not_block_a_command(monkeypatch):
    """The child writes more than fits into a pipe, although the parent has no stderr for this output."""
    monkeypatch.setattr(sys, "stderr", None)
    code = "import sys; sys.stderr.write('x' * 300_000 + '\\n'); sys.exit(3)"
    monkeypatch.setattr(api, "_command_line", lambda command, arguments: [sys.executable, "-c", code])
    with pytest.raises(mrl.CommandError) as failed:
        mrl.convert("check", model_path="x")
    assert failed.value.status == 3
