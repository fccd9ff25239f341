"""Runs on rows with images: a frozen vision tower with live weight sync, and a trained one with weight sync through files."""

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.extended

FROZEN = ["model.train_vision=false", "weight_sync.transport=auto"]


@pytest.mark.parametrize("overrides", [FROZEN, []], ids=["frozen", "trained"])
def test_a_run_on_images_sends_equal_weights_and_trains_the_vision_tower_only_if_the_config_says_so(
    start_mrl, letters_reward, tmp_path, overrides
):
    task = tmp_path / "shapes"
    run = start_mrl(
        "train",
        "experiment=shapes",
        f"data.inputs.folder={task}",
        *letters_reward,
        "rollout.prompts_per_step=6",
        "rollout.responses_per_prompt=4",
        "rollout.max_response_tokens=4",
        "optim.warmup_steps=0",
        "trainer.max_steps=2",
        "trainer.eval_rows=8",
        "trainer.stop_reward=null",
        "tracking.backends=[]",
        *overrides,
    ).finish(400)
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    assert [step["rollout/weight_version"] for step in steps] == [0, 1]
    assert all(step["mismatch/logprob_abs_max"] < 1e-4 for step in steps), steps
    before, after = (load_file(folder / "model.safetensors") for folder in (task / "model", run.folder / "hf"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".visual." not in name for name in changed)
    assert any(".visual." in name for name in changed) == (overrides != FROZEN)
