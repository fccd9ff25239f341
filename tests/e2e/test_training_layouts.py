"""Training runs in several layouts, and `mrl certify`, which compares a layout with one process.

tests/e2e/test_quickstart.py tests that the reward rises. tests/learning tests it for every algorithm and more layouts.
"""

import json

import numpy as np
import pytest

GOAL = 0.3  # mean reward. It is 0.15 after the warm start, and stays far below the goal if gradients are wrong.


def check_learned(run) -> None:
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    assert np.mean([step["reward/mean"] for step in steps[:3]]) < 0.2
    assert np.mean([step["reward/mean"] for step in steps[-5:]]) >= GOAL
    assert max(step["mismatch/logprob_abs_max"] for step in steps) <= 1e-4, "engines have the trained weights"
    assert run.leftovers() == []


LAYOUTS = {
    "cp2, deltas over a process group to two engines": [
        *["parallel.cp=2", "weight_sync.transport=process_group", "weight_sync.delta=true", "rollout.num_engines=2"],
        *["weight_sync.bucket_bytes=300000"],
    ],
    "tp2 pp2, to an engine with tp2": ["parallel.tp=2", "parallel.pp=2", "rollout.engine_tp=2"],
}


@pytest.mark.extended
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_engines_have_the_trained_weights_after_each_update(start_mrl, quickstart, layout):
    """The log-probabilities of trainer and engine are compared in each of four steps."""
    run = start_mrl("train", *quickstart, *layout, "trainer.max_steps=4", "trainer.save=false").finish(300)
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    assert [step["rollout/weight_version"] for step in steps] == list(range(4))
    assert max(step["mismatch/logprob_abs_max"] for step in steps) <= 1e-4, "engines have the trained weights"
    assert run.leftovers() == []


@pytest.mark.extended
def test_a_mixture_of_experts_learns_with_routing_replay(start_mrl, tmp_path):
    """Experts are sharded over the trainer ranks and over the engine ranks."""
    from safetensors.torch import load_file

    made = [f"data.inputs.folder={tmp_path / 'inputs'}", "model=quickstart_moe", "sft.steps=45"]
    short = [f"trainer.stop_reward={GOAL}", "trainer.max_steps=60", "trainer.eval_rows=16", "trainer.save=false"]
    layout = ["parallel.tp=2", "parallel.etp=1", "parallel.ep=2", "rollout.engine_tp=2", "sglang.ep_size=2"]
    run = start_mrl("train", "experiment=quickstart", *made, *layout, "rollout.routing_replay=true", *short).finish(400)
    check_learned(run)
    model_bytes = sum(tensor.nbytes for tensor in load_file(tmp_path / "inputs/model/model.safetensors").values())
    first = run.metrics()[0]
    assert first["weight_sync/senders"] == 2, "each rank sends its experts"
    assert model_bytes < first["weight_sync/bytes"] < 1.01 * model_bytes, (
        "each expert is sent to one engine rank, norms and routers to both"
    )


@pytest.mark.extended
def test_a_parity_check_of_a_correct_layout_finds_no_difference(start_mrl, inputs):
    run = start_mrl(
        "certify", "experiment=quickstart", f"data.inputs.folder={inputs}", "parallel.tp=2", "parallel.pp=2"
    ).finish()
    assert run.process.returncode == 0, run.output()
    assert "agree with those of one process" in run.output() and "gradient lm_head.weight" in run.output()
    found = json.loads((run.folder / "parity.json").read_text())
    names = [line["name"] for line in found]
    assert len([n for n in names if n.startswith("gradient model.")]) == len(
        [n for n in names if n.startswith("weight model.")]
    )
    assert all(line["within"] for line in found) and run.leftovers() == []


@pytest.mark.extended
def test_a_parity_check_of_a_layout_that_changes_the_step_finds_a_difference(start_mrl, inputs):
    """Each rank drops the tokens above its experts' capacity, so the step differs from that of one process."""
    wrong = ["megatron.moe_expert_capacity_factor=0.5", "parallel.tp=2", "parallel.etp=1", "parallel.ep=2"]
    folder = inputs.parent / "moe_inputs"
    run = start_mrl("certify", "experiment=quickstart", "model=quickstart_moe", f"data.inputs.folder={folder}", *wrong)
    assert run.finish().process.returncode == 1, run.output()
    assert "NOT EQUAL" in run.output() and "The first is log-probabilities or values" in run.output()


@pytest.mark.extended
def test_a_config_that_megatron_refuses_is_reported_in_one_line(start_mrl, quickstart):
    run = start_mrl("train", *quickstart, "megatron.recompute_granularity=full", "trainer.max_steps=1").finish()
    assert run.process.returncode == 2, run.output()
    assert "mrl: the trainer ranks cannot build the model:" in run.output() and "Traceback" not in run.output()
    assert run.leftovers() == []


@pytest.mark.extended
def test_a_parity_check_passes_with_balancing_loss_and_routing_replay(start_mrl, inputs):
    folder = inputs.parent / "moe_inputs"
    balance = ["megatron.moe_router_load_balancing_type=aux_loss", "megatron.moe_aux_loss_coeff=0.01"]
    layout = ["parallel.ep=2", "rollout.routing_replay=true", "certify.prompts=4"]
    run = start_mrl(
        "certify", "experiment=quickstart", "model=quickstart_moe", f"data.inputs.folder={folder}", *layout, *balance
    )
    assert run.finish().process.returncode == 0, run.output()
