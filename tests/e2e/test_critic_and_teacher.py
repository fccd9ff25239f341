"""A run with critic, teacher, reference and a role of another name: the advantage estimator gets the outputs of all models."""

import os

import numpy as np
import pytest
from recorded_steps import log_distributions, sampled_logprobs

from mrl.rollout.rollout_log import read_recording

pytestmark = pytest.mark.extended

RECORDING_ADVANTAGE = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mrl.algorithms.inputs import Advantages

calls = []


@dataclass(frozen=True)
class Recorder:
    """Saves its inputs. The advantage of a token is the reward of its response minus the reward of the greedy response."""

    folder: str
    required_inputs: ClassVar[frozenset[str]] = frozenset(
        {"values", "old_logprobs", "ref_logprobs", "teacher_logprobs", "opinion", "greedy_rewards"}
    )

    def __call__(self, inputs):
        np.savez(
            f"{self.folder}/{len(calls)}.npz", rewards=inputs.rewards, greedy=inputs.greedy_rewards,
            lengths=inputs.lengths, groups=inputs.groups, **inputs.columns,
        )
        calls.append(1)
        gain = (inputs.rewards - inputs.greedy_rewards)[inputs.response_of_token]
        return Advantages(gain + 0.1, inputs.rewards[inputs.response_of_token])
'''


@pytest.fixture(scope="module")
def run(start_mrl, quickstart, inputs, warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording")
    (folder / "recording_advantage.py").write_text(RECORDING_ADVANTAGE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        own = [
            f"roles.teacher.path={warm}",
            "roles.teacher.parallel.cp=2",
            f"roles.second.path={inputs / 'model'}",
            "roles.second.parallel.tp=2",
            "roles.second.column=opinion",
            "placement=paired",
            "placement.pools.apart=[second]",
            "critic.parallel.tp=2",
            "critic.warmup_steps=1",
            "rollout.record=true",
        ]
        advantage = [
            "algorithm.advantage._target_=recording_advantage.Recorder",
            f"algorithm.advantage.folder={folder}",
        ]
        rest = ["critic.loss.clip=0.5", "critic.optim.lr=0.01", "critic.mini_batches=2", "optim.lr=0.005"]
        started = start_mrl("train", *quickstart, *advantage, *own, *rest, "trainer.max_steps=3")
    return started.finish(300), folder


def test_the_outputs_of_all_models_reach_the_advantage(run):
    finished, folder = run
    assert finished.process.returncode == 0, finished.output()
    steps = [dict(np.load(folder / f"{number}.npz")) for number in range(3)]
    for number, inputs in enumerate(steps):
        size = inputs["lengths"].sum()
        assert all(
            inputs[name].shape == (size,) for name in ("values", "old_logprobs", "ref_logprobs", "teacher_logprobs")
        )
        assert np.isfinite(inputs["values"]).all() and set(np.unique(inputs["greedy"])) <= {0.0, 1.0}
        for group in np.unique(inputs["groups"]):
            assert len(np.unique(inputs["greedy"][inputs["groups"] == group])) == 1, (
                "one greedy response for each prompt"
            )
        # The teacher (on two ranks) and the reference have the same weights: the initial weights of the actor.
        np.testing.assert_allclose(inputs["teacher_logprobs"], inputs["ref_logprobs"], atol=1e-5)
        moved = np.abs(inputs["old_logprobs"] - inputs["ref_logprobs"]).max()
        assert moved == 0 if number < 2 else moved > 1e-3, "in the first step only the critic is trained"


def test_a_role_of_another_name_computes_its_column(run, inputs, warm):
    """`roles.second` is another model than the actor, and has a column and a pool with names of the user.

    Transformers computes the same log-probabilities with this model.
    """
    finished, folder = run
    for number in range(3):
        recorded = dict(np.load(folder / f"{number}.npz"))
        block, _ = read_recording(finished.folder / "rollouts", number)
        for column, model in (("opinion", inputs / "model"), ("ref_logprobs", warm)):
            expected = sampled_logprobs(log_distributions(model, block), block)
            np.testing.assert_allclose(recorded[column], expected, atol=1e-4, err_msg=column)
        assert np.abs(recorded["opinion"] - recorded["ref_logprobs"]).mean() > 0.1


def test_only_the_critic_is_trained_during_its_warmup(run):
    finished, folder = run
    first, second, third = finished.metrics()
    assert "loss/policy" not in first and "loss/policy" in second and "loss/policy" in third
    assert all(np.isfinite(step["critic/loss"]) and step["critic/lr"] == 0.01 for step in (first, second, third))
    errors = [
        np.mean((np.repeat(inputs["rewards"], inputs["lengths"]) - inputs["values"]) ** 2)
        for inputs in (dict(np.load(folder / f"{number}.npz")) for number in range(3))
    ]
    assert errors[2] < errors[0] / 2, f"value errors should decrease: {errors}"
    assert max(step["mismatch/logprob_abs_max"] for step in (second, third)) <= 1e-4
    assert (finished.folder / "checkpoints/step_000003/critic").is_dir() and (finished.folder / "hf").is_dir()
    assert finished.leftovers() == []
