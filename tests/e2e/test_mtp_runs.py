"""Runs that train the MTP layers of a model: metrics, engines, exports, and a resumed run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_families import add_mtp_layers, make_family

pytestmark = pytest.mark.extended

TRAINED = ["model.train_mtp=true", "trainer.share_prompts=false", "model.mtp_loss_coef=1"]


@pytest.fixture(scope="module")
def model(inputs, tmp_path_factory) -> Path:
    """A tiny GLM-4.5 with an MTP layer, and the tokenizer of the quickstart."""
    folder, source = tmp_path_factory.mktemp("glm"), inputs / "model"
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    make_family("glm4_moe", folder, vocab_size=vocab_size, intermediate_size=64, moe_intermediate_size=32)
    for path in source.iterdir():
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    add_mtp_layers(folder)
    return folder


def is_equal(folder: Path, other: Path, name: str) -> bool:
    return torch.equal(load_file(folder / "model.safetensors")[name], load_file(other / "model.safetensors")[name])


MTP_WEIGHT, WEIGHT = "model.layers.2.eh_proj.weight", "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture
def small(inputs, model, letters_reward) -> list[str]:
    """Overrides of a small run."""
    batch = [
        "rollout.prompts_per_step=6",
        "rollout.responses_per_prompt=4",
        "trainer.eval_rows=8",
        "optim.warmup_steps=0",
    ]
    task = ["experiment=quickstart", f"data.inputs.folder={inputs}", f"model.path={model}", "trainer.stop_reward=null"]
    return [
        *task,
        *batch,
        "sft.train=null",
        "tracking.backends=[]",
        *letters_reward,
    ]


def test_a_run_trains_the_mtp_layers_and_continues_from_its_checkpoint(start_mrl, small, model):
    keys = [*small, *TRAINED, "parallel.pp=2"]
    run = start_mrl("train", *keys, "trainer.max_steps=2").finish(400)
    assert run.process.returncode == 0, run.output()
    run = start_mrl("train", *keys, "trainer.max_steps=4", folder=run.folder).finish(400)
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    assert [step["rollout/weight_version"] for step in steps] == list(range(4))
    assert max(step["mismatch/logprob_abs_max"] for step in steps) <= 1e-4, "engines have the trained weights"
    losses = [step["loss/mtp"] for step in steps]
    assert losses[-1] < losses[0] and min(losses) > 0
    assert not is_equal(run.folder / "hf", model, MTP_WEIGHT)
    assert load_file(run.folder / "hf/model.safetensors").keys() == load_file(model / "model.safetensors").keys()
    assert run.leftovers() == []


def test_a_run_that_does_not_train_the_mtp_layers_exports_them_unchanged(start_mrl, small, model):
    run = start_mrl("train", *small, "trainer.max_steps=1").finish(400)
    assert run.process.returncode == 0, run.output()
    assert "loss/mtp" not in run.metrics()[0]
    assert is_equal(run.folder / "hf", model, MTP_WEIGHT) and not is_equal(run.folder / "hf", model, WEIGHT)


def test_supervised_training_trains_the_mtp_layers(start_mrl, inputs, model, tmp_path):
    options = ["sft.steps=10", "sft.batch_size=32", "sft.optim.warmup_steps=0", f"sft.output={tmp_path / 'out'}"]
    task = ["experiment=quickstart", f"data.inputs.folder={inputs}", f"model.path={model}"]
    run = start_mrl("sft", *task, *TRAINED, *options, "parallel.tp=2").finish(400)
    assert run.process.returncode == 0, run.output()
    losses = [json.loads(line)["loss/mtp"] for line in (run.folder / "sft.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert not is_equal(tmp_path / "out", model, MTP_WEIGHT)


def test_a_parity_check_compares_the_gradients_of_the_mtp_layers(start_mrl, inputs, model):
    task = ["experiment=quickstart", f"data.inputs.folder={inputs}", f"model.path={model}", "certify.prompts=4"]
    run = start_mrl("certify", *task, *TRAINED, "parallel.tp=2", "parallel.cp=2").finish(400)
    assert run.process.returncode == 0, run.output()
    names = [line["name"] for line in json.loads((run.folder / "parity.json").read_text())]
    assert f"gradient {MTP_WEIGHT}" in names and f"weight {MTP_WEIGHT}" in names
