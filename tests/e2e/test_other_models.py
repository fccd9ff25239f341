"""Critic, teacher and reference beside the actor, each under a layout of its own: what they compute reaches the advantage."""

import numpy as np
import pytest

pytestmark = pytest.mark.extended

LOOKING = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mrl.algorithms.inputs import Advantages

calls = []


@dataclass(frozen=True)
class Looking:
    """Writes down all it is given; each token is worth its response's reward less the greedy one's."""

    folder: str
    needs: ClassVar[frozenset[str]] = frozenset(
        {"values", "old_logprobs", "ref_logprobs", "teacher_logprobs", "greedy_rewards"}
    )

    def __call__(self, inputs):
        np.savez(
            f"{self.folder}/{len(calls)}.npz", rewards=inputs.rewards, greedy=inputs.greedy_rewards,
            lengths=inputs.lengths, groups=inputs.groups, **inputs.columns,
        )
        calls.append(1)
        gain = (inputs.rewards - inputs.greedy_rewards)[inputs.rows]
        return Advantages(gain + 0.1, inputs.rewards[inputs.rows])
'''


@pytest.fixture(scope="module")
def run(start_mrl, quickstart, warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("looking")
    (folder / "looking.py").write_text(LOOKING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        own = [f"teacher.path={warm}", "teacher.parallel.cp=2", "critic.parallel.tp=2", "critic.warmup_steps=1"]
        advantage = ["algorithm.advantage._target_=looking.Looking", f"algorithm.advantage.folder={folder}"]
        rest = ["critic.value_clip=0.5", "critic.optim.lr=0.01", "critic.mini_batches=2", "optim.lr=0.005"]
        started = start_mrl("train", *quickstart, *advantage, *own, *rest, "trainer.max_steps=3")
    return started.finish(300), folder


def test_all_columns_reach_the_advantage(run):
    done, folder = run
    assert done.process.returncode == 0, done.output()
    steps = [dict(np.load(folder / f"{number}.npz")) for number in range(3)]
    for number, seen in enumerate(steps):
        size = seen["lengths"].sum()
        assert all(
            seen[name].shape == (size,) for name in ("values", "old_logprobs", "ref_logprobs", "teacher_logprobs")
        )
        assert np.isfinite(seen["values"]).all() and set(np.unique(seen["greedy"])) <= {0.0, 1.0}
        for group in np.unique(seen["groups"]):
            assert len(np.unique(seen["greedy"][seen["groups"] == group])) == 1, "one greedy response for each prompt"
        # The teacher is the folder that the actor started from, on two ranks; the reference is the actor's first weights.
        np.testing.assert_allclose(seen["teacher_logprobs"], seen["ref_logprobs"], atol=1e-5)
        moved = np.abs(seen["old_logprobs"] - seen["ref_logprobs"]).max()
        assert moved == 0 if number < 2 else moved > 1e-3, "in the first step only the critic learns"


def test_the_critic_learns_alone_at_first(run):
    done, folder = run
    first, second, third = done.metrics()
    assert "loss/policy" not in first and "loss/policy" in second and "loss/policy" in third
    assert all(np.isfinite(step["critic/loss"]) and step["critic/lr"] == 0.01 for step in (first, second, third))
    errors = [
        np.mean((np.repeat(seen["rewards"], seen["lengths"]) - seen["values"]) ** 2)
        for seen in (dict(np.load(folder / f"{number}.npz")) for number in range(3))
    ]
    assert errors[2] < errors[0] / 2, f"values come nearer to the returns: {errors}"
    assert max(step["mismatch/logprob_abs_max"] for step in (second, third)) <= 1e-4
    assert (done.folder / "checkpoints/step_000003/critic").is_dir() and (done.folder / "hf").is_dir()
    assert done.leftovers() == []
