"""What the driver makes of the reports of a rollout's optimizer steps."""

import numpy as np
import pytest

from mrl.algorithms.corrections import MISMATCH_SUMS
from mrl.algorithms.losses import PPOClip
from mrl.algorithms.objective import Objective
from mrl.core.types import AdvantageResult, Rollouts, UpdateReport
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.model_trainers import ActorTrainer, UpdateRunner, _of_actor
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig


class Group:
    """Stands where the trainer processes are: plans as they do, reports as they would."""

    def update(self, steps, packing, *, aggregation, longest, lrs, loss, temperature):
        self.steps, self.lrs = steps, lrs
        return [self._report(step, partition_step(step, ParallelDims(), packing, aggregation)) for step in steps]

    @staticmethod
    def _report(step, plan) -> UpdateReport:
        tokens = float(step.sampled_lengths[step.rows].sum())
        sums = dict(loss=1.0, tokens=tokens, gap=0.5 * tokens, entropy=2.0 * tokens) if tokens else {}
        if tokens:  # trainer and engine agree: every ratio is 1
            ones = ("mismatch/count", "mismatch/ratio", "mismatch/ratio_squared")
            sums |= dict.fromkeys(MISMATCH_SUMS, 0.0) | dict.fromkeys(ones, tokens)
        maxima = {"optim/grad_norm": tokens, "seconds": 1.0, **({"gap": tokens} if tokens else {})}
        return UpdateReport(sums, maxima | plan.metrics)


def update(advantages: list[float], mini_batches: int, epochs: int = 1, rejected: tuple[int, ...] = ()):
    count = len(advantages)
    lengths = np.arange(1, count + 1)
    rollouts = Rollouts(
        block=None,
        prompt_lengths=np.full(count, 3),
        response_lengths=lengths,
        sampled_lengths=lengths,
        rows=np.arange(count) // 2,
        groups=np.arange(count) // 2,
        digests=np.arange(count, dtype=np.uint64),
        truncated=np.zeros(count, bool),
        weight_versions=np.zeros(count, int),
        rewards=np.zeros(count),
    )
    estimates = AdvantageResult(None, np.array(advantages) == 0, np.isin(np.arange(count), rejected), {})
    group = Group()
    updates = UpdateRunner(
        OptimConfig(lr=1.0, warmup_steps=100), Packing(100, True, CostModel()), "token_mean", 100, mini_batches, epochs
    )
    policy = ActorTrainer(group, Objective(PPOClip()), updates, temperature=1.0, skip_zero_advantage=True)
    return policy.update(rollouts, estimates, step=2, kl_coef=0.0), group


def test_counts_add_up_and_the_rest_is_averaged():
    found, group = update([1, -1, 1, 0, 0, 0, 2, 2], mini_batches=2)
    assert found["batch/optimizer_steps"] == 2 and found["spent/megatron_s"] == 2
    assert found["batch/trained_tokens"] == 1 + 2 + 3 + 7 + 8
    assert found["mismatch/logprob_abs_mean"] == 0.5 and found["policy/entropy_mean"] == 2.0
    assert found["mismatch/ess_fraction"] == 1 and found["mismatch/chi2"] == 0
    assert found["mismatch/logprob_abs_max"] == 15 and found["optim/grad_norm"] == (6 + 15) / 2
    assert found["batch/zero_advantage_fraction"] == 3 / 8
    assert group.lrs == [pytest.approx(5 / 100), pytest.approx(6 / 100)], "optimizer steps count, not rollouts"
    assert [len(step.counted) for step in group.steps] == [4, 4] and found["optim/lr"] == group.lrs[-1]


def test_a_mini_batch_without_rows_is_still_a_step():
    found, group = update([1, -1, 1, 1, 0, 0, 0, 0], mini_batches=2)
    assert [len(step.rows) for step in group.steps] == [4, 0]
    assert found["batch/optimizer_steps"] == 2 and found["batch/trained_tokens"] == 10
    assert found["loss/policy"] == 0.5 and np.isfinite(list(found.values())).all()


def test_one_row_is_trained_where_no_advantage_is_left():
    found, group = update([0, 0, 0, 0], mini_batches=1)
    assert group.steps[0].rows.tolist() == [0] and found["batch/trained_tokens"] == 1


def test_epochs_pass_over_the_same_mini_batches():
    found, group = update([1, -1, 1, 2, 3, 1, 2, 2], mini_batches=2, epochs=3)
    assert found["batch/optimizer_steps"] == 6
    assert [step.rows.tolist() for step in group.steps] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3
    assert group.lrs == [pytest.approx((13 + number) / 100) for number in range(6)]


def test_rejected_rows_count_for_nothing():
    _, group = update([1, -1, 0, 2], mini_batches=1, rejected=(1, 2))
    assert group.steps[0].rows.tolist() == [0, 3] and group.steps[0].counted.tolist() == [0, 3]


def test_where_every_row_is_rejected_the_step_is_empty_but_taken():
    found, group = update([1, -1, 0, 2], mini_batches=2, rejected=(0, 1, 2, 3))
    assert [step.rows.tolist() for step in group.steps] == [[0]] and not len(group.steps[0].counted)
    assert np.isfinite(found["batch/skipped_tokens_fraction"])


def test_the_row_that_measures_the_mismatch_is_not_a_rejected_one():
    _, group = update([0, 0, 0, 0], mini_batches=2, rejected=(0, 1))
    assert [step.rows.tolist() for step in group.steps] == [[2]]


def test_what_losses_report_is_averaged_over_the_tokens_that_report():
    """Half of the weight was skipped; the number is of the other half."""
    reports = [
        UpdateReport(
            dict(zip(MISMATCH_SUMS, (4.0, 0.0, 4.0, 4.0, 0.0), strict=True)) | own,
            {"seconds": 1.0, "batch/computed_tokens": 4},
        )
        for own in (
            {"tokens": 4.0, "weight": 0.5, "loss/clip_fraction": 0.25, "loss": 1.0},
            {"tokens": 4.0, "weight": 0.25, "loss/clip_fraction": 0.0, "loss": 1.0},
        )
    ]
    assert _of_actor(reports)["loss/clip_fraction"] == (0.5 + 0.0) / 2
