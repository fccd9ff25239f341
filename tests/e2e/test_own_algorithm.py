"""A run in which every part of the algorithm is a user's function: the functions of docs/concepts/algorithms.md."""

import numpy as np
import own_parts
import pytest

pytestmark = pytest.mark.extended

RECORDER = '''

steps = []


def recorded(inputs, folder):
    """Saves what the estimator gets, and the advantages of `uncertain`."""
    result = uncertain(inputs)
    np.savez(
        f"{folder}/{len(steps)}.npz", advantages=result.advantages, rewards=inputs.rewards, lengths=inputs.lengths,
        groups=inputs.groups, **inputs.columns,
    )
    steps.append(1)
    return result


recorded.required_inputs = uncertain.required_inputs | drop_unlikely.required_inputs | {"old_logprobs"}
'''


@pytest.fixture
def run(start_mrl, quickstart, user_module, tmp_path):
    user_module("my_parts", own_parts.SOURCE + RECORDER)
    advantage = f"algorithm.advantage={{_target_: my_parts.recorded, folder: {tmp_path}}}"
    options = ["critic.optim.lr=0.001", "critic.mini_batches=1", "trainer.max_steps=3", "rollout.prompts_per_step=8"]
    finished = start_mrl("train", *quickstart, *own_parts.overrides(), advantage, *options).finish(300)
    assert finished.process.returncode == 0 and finished.leftovers() == [], finished.output()
    return finished, [dict(np.load(tmp_path / f"{number}.npz")) for number in range(3)]


def test_every_part_is_a_function_of_the_user(run):
    finished, steps = run
    for inputs, metrics in zip(steps, finished.metrics(), strict=True):
        lengths, groups, rollout = inputs["lengths"], inputs["groups"], inputs["rollout_logprobs"]
        rows = np.repeat(np.arange(len(lengths)), lengths)
        assert all(np.isfinite(inputs[name]).all() and inputs[name].shape == rows.shape for name in COLUMNS)

        # The columns come from the trained policy, so they agree with the metrics that the update reports.
        assert inputs["entropies"].mean() == pytest.approx(metrics["policy/entropy_mean"], rel=1e-4)
        mismatch = np.abs(inputs["old_logprobs"] - rollout).max()
        assert mismatch == pytest.approx(metrics["mismatch/logprob_abs_max"], abs=1e-5) and mismatch < 1e-3
        collision = inputs["sum_pi_squared"]
        assert (collision <= 1 + 1e-6).all() and (collision >= np.exp(-inputs["entropies"]) - 1e-6).all(), (
            "the collision entropy is at most the entropy"
        )
        assert np.ptp(collision) > 0.01

        # Filter, loss, correction and aggregation.
        for group in np.unique(groups):
            assert np.ptp(inputs["rewards"][groups == group]) > 0, "the filter drops groups of equal rewards"
        tokens = {group: lengths[groups == group].sum() for group in groups}
        weights = np.array([1 / (len(tokens) * tokens[group]) for group in groups])[rows]
        keep = np.exp(rollout) >= 0.001 * collision
        expected = (-inputs["advantages"] * keep * weights).sum()
        assert metrics["loss/policy"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert metrics["own/ratio"] == pytest.approx(1.0, abs=1e-5)

        # The Huber loss of the critic, with the same token weights.
        errors = np.abs(inputs["values"] - inputs["rewards"][rows])
        huber = np.where(errors < 0.5, errors**2 / 2, 0.5 * (errors - 0.25))
        assert metrics["critic/loss"] == pytest.approx((huber * weights).sum(), rel=1e-3)


COLUMNS = ("advantages", "entropies", "sum_pi_squared", "rollout_logprobs", "old_logprobs", "values")
