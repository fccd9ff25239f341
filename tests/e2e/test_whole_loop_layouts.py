"""Under every kind of layout the whole loop learns, and `mrl certify` says whether a layout is right."""

import json

import numpy as np
import pytest

GOAL = 0.4  # from 0.05: far above what a wrong gradient reaches


def check_learned(run) -> None:
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    assert np.mean([step["reward/mean"] for step in steps[:3]]) < 0.2
    assert np.mean([step["reward/mean"] for step in steps[-5:]]) >= GOAL
    assert max(step["mismatch/logprob_abs_max"] for step in steps) <= 1e-4, "engines hold what was trained"
    assert run.leftovers() == []


@pytest.mark.parametrize(
    "layout", [["parallel.pp=2"], ["parallel.cp=2"], ["parallel.tp=2", "parallel.pp=2"]], ids=",".join
)
def test_the_quickstart_learns_under(start_mrl, inputs, warm, layout):
    start = [f"data.inputs.folder={inputs}", "sft.train=null", f"model.path={warm}"]
    short = [f"trainer.stop_reward={GOAL}", "trainer.max_steps=60", "trainer.eval_rows=16", "algorithm.mini_batches=1"]
    check_learned(start_mrl("train", "experiment=quickstart", *start, *layout, *short).finish(300))


def test_a_mixture_of_experts_learns_with_replayed_routing(start_mrl, tmp_path):
    made = [f"data.inputs.folder={tmp_path / 'inputs'}", "model=quickstart_moe"]
    short = [f"trainer.stop_reward={GOAL}", "trainer.max_steps=60", "trainer.eval_rows=16", "trainer.save=false"]
    replay = ["parallel.ep=2", "rollout.routing_replay=true"]
    run = start_mrl("train", "experiment=quickstart", *made, *replay, *short).finish(400)
    check_learned(run)
    assert run.metrics()[0]["weight_sync/tensors"] > 100, "experts are sent one by one"


def test_several_mini_batches_are_several_optimizer_steps(start_mrl, quickstart):
    run = start_mrl("train", *quickstart, "trainer.max_steps=2", "algorithm.mini_batches=3", "parallel.pp=2").finish()
    assert run.process.returncode == 0, run.output()
    first = run.metrics()[0]
    assert first["batch/optimizer_steps"] > 1
    assert first["weight_sync/version"] == 1


def test_a_certificate_of_a_right_layout(start_mrl, inputs):
    run = start_mrl(
        "certify", "experiment=quickstart", f"data.inputs.folder={inputs}", "parallel.tp=2", "parallel.pp=2"
    ).finish()
    assert run.process.returncode == 0, run.output()
    assert "agree with one process" in run.output() and "gradient lm_head.weight" in run.output()
    found = json.loads((run.folder / "certificate.json").read_text())
    names = [line["name"] for line in found]
    assert len([n for n in names if n.startswith("gradient model.")]) == len(
        [n for n in names if n.startswith("weight model.")]
    )
    assert all(line["within"] for line in found) and run.leftovers() == []


def test_a_certificate_of_a_layout_that_changes_the_step(start_mrl, inputs):
    """Experts that drop tokens over their capacity do so by rank: another step than one process makes."""
    wrong = ["megatron.moe_expert_capacity_factor=0.5", "parallel.tp=2", "parallel.etp=1", "parallel.ep=2"]
    folder = inputs.parent / "moe_inputs"
    run = start_mrl("certify", "experiment=quickstart", "model=quickstart_moe", f"data.inputs.folder={folder}", *wrong)
    assert run.finish().process.returncode == 1, run.output()
    assert "NOT EQUAL" in run.output() and "first: log-probabilities or values" in run.output()


def test_what_megatron_refuses_is_one_line_and_ends_everything(start_mrl, quickstart):
    run = start_mrl("train", *quickstart, "megatron.recompute_granularity=full", "trainer.max_steps=1").finish()
    assert run.process.returncode == 2, run.output()
    assert "mrl: Megatron refuses this model or layout:" in run.output() and "Traceback" not in run.output()
    assert run.leftovers() == []


def test_balancing_losses_and_replayed_routing_are_certified(start_mrl, inputs):
    folder = inputs.parent / "moe_inputs"
    balance = ["megatron.moe_router_load_balancing_type=aux_loss", "megatron.moe_aux_loss_coeff=0.01"]
    layout = ["parallel.ep=2", "rollout.routing_replay=true", "certify.prompts=4"]
    run = start_mrl(
        "certify", "experiment=quickstart", "model=quickstart_moe", f"data.inputs.folder={folder}", *layout, *balance
    )
    assert run.finish().process.returncode == 0, run.output()
