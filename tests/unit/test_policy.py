"""What the driver makes of the reports of a rollout's optimizer steps."""

import numpy as np
import pytest

from mrl.algorithms.losses import PPOClip
from mrl.data.batching import CostModel
from mrl.types import Rollouts, UpdateReport
from mrl.workers.policy import ActorPolicy
from mrl.workers.shares import Packing, plan_step
from parallel.dims import ParallelDims
from parallel.optimizer_settings import AdamW


class Group:
    """Stands where the trainer processes are: plans as they do, reports as they would."""

    def update(self, steps, packing, *, aggregation, lrs, loss, temperature):
        self.steps, self.lrs = steps, lrs
        return [self._report(step, plan_step(step, ParallelDims(), packing, aggregation)) for step in steps]

    @staticmethod
    def _report(step, plan) -> UpdateReport:
        tokens = float(step.response_lengths[step.rows].sum())
        sums = dict(loss=1.0, tokens=tokens, gap=0.5 * tokens, entropy=2.0 * tokens) if tokens else {}
        maxima = {"optim/grad_norm": tokens, "seconds": 1.0, **({"gap": tokens} if tokens else {})}
        return UpdateReport(sums, maxima | plan.numbers)


def update(advantages: list[float], mini_batches: int):
    count = len(advantages)
    lengths = np.arange(1, count + 1)
    groups = np.arange(count) // 2
    rollouts = Rollouts(None, np.full(count, 3), lengths, groups, np.zeros(count, bool), np.zeros(count, int))
    group = Group()
    optimizer = AdamW(lr=1.0, warmup_steps=100)
    policy = ActorPolicy(
        group, PPOClip(), optimizer, "token_mean", Packing(100, True, CostModel()), 1.0, True, mini_batches
    )
    return policy.update(rollouts, np.array(advantages, np.float32), step=2), group


def test_counts_add_up_and_the_rest_is_averaged():
    found, group = update([1, -1, 1, 0, 0, 0, 2, 2], mini_batches=2)
    assert found["batch/optimizer_steps"] == 2 and found["spent/megatron_s"] == 2
    assert found["batch/trained_tokens"] == 1 + 2 + 3 + 7 + 8
    assert found["mismatch/logprob_abs_mean"] == 0.5 and found["policy/entropy_mean"] == 2.0
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
