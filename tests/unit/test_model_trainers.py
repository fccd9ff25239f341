"""Actor updates on the driver: which rows are trained, and which metrics the reports of the optimizer steps give."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_cases import loss_inputs, make_case

from mrl.algorithms.corrections import MISMATCH_SUMS
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import CrossEntropy, PPOClip
from mrl.algorithms.objective import EntropyBonus, Objective, TokenWeighting
from mrl.algorithms.parts import Coefficients
from mrl.core.types import AdvantageResult, Rollouts, UpdateReport
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, partition_step, step_weights
from mrl.workers.group import PendingCall
from mrl.workers.model_trainers import ActorTrainer, UpdateRunner, _actor_metrics
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig


class Group:
    """Stands in for a worker group. Partitions the mini-batches, and makes up the reports."""

    def begin_update(self, mini_batches, packing, *, weighting, lrs, loss, temperature):
        self.mini_batches, self.lrs, self.loss = mini_batches, lrs, loss
        parts = [partition_step(batch, ParallelDims(), packing, weighting) for batch in mini_batches]
        reports = [self._report(batch, part) for batch, part in zip(mini_batches, parts, strict=True)]
        return PendingCall(lambda: reports)

    @staticmethod
    def _report(batch, partition) -> UpdateReport:
        tokens = float(batch.sampled_lengths[batch.rows].sum())
        sums = dict(loss=1.0, tokens=tokens, mismatch_abs=0.5 * tokens, entropy=2.0 * tokens) if tokens else {}
        if tokens:  # trainer and engine agree, so every ratio is 1
            ones = ("mismatch/count", "mismatch/ratio", "mismatch/ratio_squared")
            sums |= dict.fromkeys(MISMATCH_SUMS, 0.0) | dict.fromkeys(ones, tokens)
        maxima = {"optim/grad_norm": tokens, "seconds": 1.0, **({"mismatch_abs": tokens} if tokens else {})}
        return UpdateReport(sums, maxima | partition.metrics)


def rollouts_of(count: int, all_filtered: bool = False) -> Rollouts:
    lengths = np.arange(1, count + 1)
    return Rollouts(
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
        all_filtered=all_filtered,
    )


def actor_trainer(group: Group, objective: Objective, mini_batches: int = 1, epochs: int = 1) -> ActorTrainer:
    packing, weighting = Packing(100, True, CostModel()), TokenWeighting()
    updates = UpdateRunner(OptimConfig(lr=1.0, warmup_steps=100), packing, weighting, mini_batches, epochs)
    return ActorTrainer(group, objective, updates, temperature=1.0, skip_zero_advantage=True)


def update(
    advantages: list[float],
    mini_batches: int,
    epochs: int = 1,
    excluded: tuple[int, ...] = (),
    counts: list[int] | None = None,
    rows: np.ndarray | None = None,
    all_filtered: bool = False,  # if true, the update gets no estimates
):
    count, group = len(advantages), Group()
    rollouts = rollouts_of(count, all_filtered)
    drawn = None if counts is None else np.array(counts)
    result = AdvantageResult(None, np.array(advantages) == 0, np.isin(np.arange(count), excluded), {}, drawn)
    policy = actor_trainer(group, Objective(PPOClip()), mini_batches, epochs)
    if all_filtered:
        with pytest.raises(ValueError, match=r"update\(\) got no advantages, but the loss PPOClip is 0 without"):
            policy.begin_update(rollouts, None, step=2, coefs={}, rows=rows)
        call = policy.begin_update(rollouts, None, step=2, coefs={}, rows=rows, loss=CrossEntropy())
    else:
        call = policy.begin_update(rollouts, result, step=2, coefs={}, rows=rows)
    return policy.metrics([call.result()]), group


def test_the_observer_of_updates_gets_the_index_of_the_update_in_its_step():
    observed = []

    class Observer:
        def watch(self, group, update, step):
            observed.append((step, update.update_index))
            return nullcontext([])

    policy = actor_trainer(Group(), Objective(PPOClip()))
    policy = replace(policy, updates=replace(policy.updates, observer=Observer()))
    for index in range(2):
        policy.begin_update(rollouts_of(2), None, step=4, coefs={}, loss=CrossEntropy(), update_index=index).result()
    assert observed == [(4, 0), (4, 1)]


def test_counts_are_summed_and_the_rest_is_averaged_over_the_steps():
    metrics, group = update([1, -1, 1, 0, 0, 0, 2, 2], mini_batches=2)
    assert metrics["batch/optimizer_steps"] == 2 and metrics["component_time/megatron_s"] == 2
    assert metrics["batch/trained_tokens"] == 1 + 2 + 3 + 7 + 8
    assert metrics["mismatch/logprob_abs_mean"] == 0.5 and metrics["policy/entropy_mean"] == 2.0
    assert metrics["mismatch/ess_fraction"] == 1 and metrics["mismatch/chi2"] == 0
    assert metrics["mismatch/logprob_abs_max"] == 15 and metrics["optim/grad_norm"] == (6 + 15) / 2
    assert metrics["batch/zero_advantage_fraction"] == 3 / 8
    assert group.lrs == [pytest.approx(5 / 100), pytest.approx(6 / 100)], (
        "the schedule counts optimizer steps, not rollouts"
    )
    assert [len(batch.denominator_rows) for batch in group.mini_batches] == [4, 4]
    assert metrics["optim/lr"] == group.lrs[-1]


def test_a_mini_batch_without_trained_rows_is_still_a_step():
    metrics, group = update([1, -1, 1, 1, 0, 0, 0, 0], mini_batches=2)
    assert [len(batch.rows) for batch in group.mini_batches] == [4, 0]
    assert metrics["batch/optimizer_steps"] == 2 and metrics["batch/trained_tokens"] == 10
    assert metrics["loss/policy"] == 0.5 and np.isfinite(list(metrics.values())).all()


def test_one_row_is_trained_if_all_advantages_are_zero():
    metrics, group = update([0, 0, 0, 0], mini_batches=1)
    assert group.mini_batches[0].rows.tolist() == [0] and metrics["batch/trained_tokens"] == 1


def test_every_epoch_trains_the_same_mini_batches():
    metrics, group = update([1, -1, 1, 2, 3, 1, 2, 2], mini_batches=2, epochs=3)
    assert metrics["batch/optimizer_steps"] == 6
    assert [batch.rows.tolist() for batch in group.mini_batches] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3
    assert group.lrs == [pytest.approx((13 + number) / 100) for number in range(6)]


def test_excluded_rows_are_neither_trained_nor_counted():
    _, group = update([1, -1, 0, 2], mini_batches=1, excluded=(1, 2))
    assert group.mini_batches[0].rows.tolist() == [0, 3] and group.mini_batches[0].denominator_rows.tolist() == [0, 3]


def test_an_update_without_estimates_trains_no_group_that_the_rollout_filter_rejected():
    _, group = update([1, -1, 0, 2], mini_batches=1, all_filtered=True)
    assert not len(group.mini_batches[0].denominator_rows)


def test_an_update_without_rows_has_finite_metrics():
    metrics, group = update([1, -1, 0, 2], mini_batches=1, rows=np.zeros(4, bool))
    assert not len(group.mini_batches[0].denominator_rows) and metrics["batch/zero_advantage_fraction"] == 0


def test_a_row_that_is_drawn_twice_is_trained_once_with_twice_the_weight():
    _, group = update([1, -1, 0, 2], mini_batches=1, excluded=(1,), counts=[2, 0, 1, 3])
    (batch,) = group.mini_batches
    assert batch.rows.tolist() == [0, 3] and batch.denominator_rows.tolist() == [0, 0, 2, 3, 3, 3]
    weights = step_weights(batch, TokenWeighting())  # the lengths are 1, 2, 3, 4; row 2 has advantage 0
    np.testing.assert_allclose(weights, np.array([2, 0, 0, 3]) / (2 * 1 + 3 + 3 * 4))


def test_a_step_is_taken_even_if_every_row_is_excluded():
    metrics, group = update([1, -1, 0, 2], mini_batches=2, excluded=(0, 1, 2, 3))
    (batch,) = group.mini_batches
    assert batch.rows.tolist() == [0] and not len(batch.denominator_rows)
    assert np.isfinite(metrics["batch/skipped_tokens_fraction"])


def test_the_row_that_measures_the_mismatch_is_not_excluded():
    _, group = update([0, 0, 0, 0], mini_batches=2, excluded=(0, 1))
    assert [batch.rows.tolist() for batch in group.mini_batches] == [[2]]


@pytest.mark.parametrize("loss", [None, CrossEntropy()])
def test_the_loss_of_the_trainer_ranks_has_the_coefficients_of_the_step(loss):
    """`loss` replaces the policy loss. The KL penalty and the entropy bonus stay, with their adapted coefficients."""
    kl, case = KLPenalty(0.3, target=0.1, horizon=10), make_case(0)
    entropy = EntropyBonus(0.0, target=0.2, step=0.01)
    coefs = Coefficients(dict(kl_loss=kl, entropy=entropy))
    coefs.adapt({"policy/kl_ref": 9.0, "policy/entropy_mean": 0.1}, samples=10)
    group = Group()
    estimates = AdvantageResult(None, np.zeros(4, bool), np.zeros(4, bool), {})
    policy = actor_trainer(group, Objective(PPOClip(), kl=kl, entropy=entropy))
    policy.begin_update(rollouts_of(4), estimates, step=2, coefs=coefs.current(), loss=loss).result()
    inputs = replace(loss_inputs(case), entropy=torch.full((len(case.old),), 1.5, dtype=torch.float64))
    expected = (loss or PPOClip())(inputs)[0] + 0.3 * 1.2 * kl(inputs) - 0.01 * 1.5
    np.testing.assert_allclose(group.loss(inputs)[0], expected, rtol=1e-12)
    assert group.loss.uses_entropy, "the ranks compute gradients of the entropy"


def test_statistics_of_a_loss_are_averaged_over_the_weight_of_the_trained_tokens():
    """Training has skipped half of the weight. The metric describes only the other half."""
    reports = [
        UpdateReport(
            dict(zip(MISMATCH_SUMS, (4.0, 0.0, 4.0, 4.0, 0.0, 0.0), strict=True)) | own,
            {"seconds": 1.0, "batch/computed_tokens": 4},
        )
        for own in (
            {"tokens": 4.0, "weight": 0.5, "loss/clip_fraction": 0.25, "loss": 1.0},
            {"tokens": 4.0, "weight": 0.25, "loss/clip_fraction": 0.0, "loss": 1.0},
        )
    ]
    assert _actor_metrics(reports)["loss/clip_fraction"] == (0.5 + 0.0) / 2


def test_a_step_that_excludes_every_row_adapts_no_kl_coefficient():
    """The loss of the step has weight 0, so the step has no measured KL."""
    reports = [
        UpdateReport({"tokens": 4.0, "weight": 0.0, "policy/kl_ref": 0.0}, {"seconds": 1.0, "batch/computed_tokens": 4})
    ]
    metrics = _actor_metrics(reports)
    assert "policy/kl_ref" not in metrics
    coefs = Coefficients({"kl_loss": KLPenalty(0.3, target=0.1)})
    coefs.adapt(metrics, samples=100)
    assert coefs.current() == {"kl_loss": 0.3}


def test_a_step_without_a_sampled_token_has_no_entropy():
    report = UpdateReport(dict.fromkeys(("tokens", "entropy"), 0.0), {"seconds": 1.0, "batch/computed_tokens": 4})
    assert np.isnan(_actor_metrics([report])["policy/entropy_mean"])


def test_the_mismatch_is_averaged_over_the_tokens_that_the_engine_reported():
    sums = dict(zip(MISMATCH_SUMS, (2.0, 0.0, 2.0, 2.0, 0.0, 2.0), strict=True))
    sums |= {"tokens": 4.0, "weight": 1.0, "mismatch_abs": 1.0}
    metrics = _actor_metrics([UpdateReport(sums, {"mismatch_abs": 0.75, "seconds": 1.0, "batch/computed_tokens": 4})])
    assert metrics["mismatch/logprob_abs_mean"] == 0.5 and metrics["mismatch/logprob_abs_max"] == 0.75
    assert metrics["mismatch/nan_tokens"] == 2.0
