"""A run dumps two steps, the second with a NaN in layer 1, and `mrl replay` computes them again."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.extended

NAN_LOSS = """
import os
from dataclasses import dataclass
from mrl.algorithms.losses import PPOClip

STEPS = 0

@dataclass(frozen=True)
class NanLoss(PPOClip):
    def __call__(self, inputs):
        if "SET_NAN" in os.environ:
            set_nan_in_next_step()
        return super().__call__(inputs)

def set_nan_in_next_step():
    from mrl.workers.actor_critic import MegatronActor
    accumulate = MegatronActor.accumulate_gradients

    def accumulate_with_nan(model, *args, **how):
        import torch
        with torch.no_grad():
            model.bridge.params["decoder.layers.1.mlp.linear_fc2.weight"][0] = float("nan")
        return accumulate(model, *args, **how)

    MegatronActor.accumulate_gradients = accumulate_with_nan
"""


@pytest.fixture(scope="module")
def run(start_mrl, quickstart, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nan_loss")
    (folder / "nan_loss.py").write_text(NAN_LOSS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        with pytest.MonkeyPatch.context() as nan_env:
            nan_env.setenv("SET_NAN", "1")
            loss = "algorithm.loss={_target_: nan_loss.NanLoss}"
            steps = ["step_dump.steps=[1]", "trainer.max_steps=3", "trainer.eval_rows=4", "trainer.save=false"]
            started = start_mrl("train", *quickstart, loss, *steps, "parallel.tp=2")
        done = started.finish(300)
        assert (done.folder / "step_dumps/step_000002/step_dump.json").exists(), done.output()
        yield done


def replay(run, step: int, *arguments: str) -> tuple[int, str, dict]:
    folder = run.folder / f"step_dumps/step_{step:06d}"
    line = [sys.executable, "-m", "mrl.cli", "replay", str(folder), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1) and (folder / "replay/replay.json").exists(), done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads((folder / "replay/replay.json").read_text())


def test_a_dumped_step_replayed_under_another_layout_is_equal(run):
    status, text, found = replay(run, 1)
    assert status == 0, text
    (step,) = run.metrics()
    assert found["grad_norm"] == pytest.approx([step["optim/grad_norm"]] * 2, rel=1e-4)
    assert found["loss"] == pytest.approx([step["loss/policy"]] * 2, abs=1e-6)
    names = [layer["name"] for layer in found["layers"]]
    assert names[:2] == ["embedding", "layer 0"] and names[-2:] == ["final norm", "log-probabilities"]
    assert (run.folder / "step_dumps/step_000001/replay/replay.png").stat().st_size > 10_000


def test_a_nonfinite_gradient_is_dumped_and_traced_to_its_layer(run):
    folder = run.folder / "step_dumps/step_000002"
    assert run.process.returncode != 0 and f"`mrl replay {folder}`" in run.output()
    assert len(run.metrics()) == 1 and run.leftovers() == []
    status, text, found = replay(run, 2, "parallel.tp=1")
    assert status == 1 and "NOT FINITE: the first value that is not finite is in layer 1" in text, text
    assert found["first_nonfinite"]["layer"] == "layer 1"


def test_a_step_dump_contains_no_pickle(run):
    files = [path for path in (run.folder / "step_dumps").rglob("*") if path.is_file() and "replay" not in path.parts]
    assert {path.suffix for path in files} == {".json", ".npz", ".safetensors", ".jinja"}
