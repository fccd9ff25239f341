"""The supervised stage on the driver: rows, references, KTO's reference point, and evaluations of held-out rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mrl.algorithms.losses import CrossEntropy
from mrl.algorithms.objective import TokenWeighting, sequence_mean, token_mean
from mrl.algorithms.preference import DPO, KTO, SimPO
from mrl.controller.plan_supervised import SupervisedObjective
from mrl.controller.supervised_stage import SupervisedStage
from mrl.core.types import ColumnPart, SupervisedRows, TokenBlock, TrainBatch, UpdateReport, assemble_column
from mrl.data.supervised_dataset import RowForm
from mrl.tracking.tracker import Tracker
from mrl.workers.dp_partition import Packing
from mrl.workers.group import ComputedColumns, PendingCall
from mrl.workers.worker import TrainWorker
from parallel.trainer_config import OptimConfig

LENGTHS = [2, 3, 1, 4, 2, 2, 3, 1]  # number of response tokens of each sequence


def data_set(num_rows: int, per_row: int, num_sequences: int = 8) -> SupervisedRows:
    """Return a data set of `num_rows` rows. The other sequences are prompts with responses to other prompts."""
    lengths = LENGTHS[:num_sequences]
    block = TokenBlock.from_lists([[1, 2]] * num_sequences, [[3] * length for length in lengths])
    columns = (block.lengths, block.response_lengths, block.sampled_lengths)
    return SupervisedRows(block, *columns, num_rows, per_row)


@dataclass
class Group:
    """A worker group whose model gives every token of sequence n the log-probability -n, and 0.5 more after each step."""

    updates: list[tuple[TrainBatch, TokenWeighting, Any]] = field(default_factory=list)
    evaluations: list[TrainBatch] = field(default_factory=list)
    scored: list[list[int]] = field(default_factory=list)  # for each forward pass, its sequences

    def begin_columns(self, method: Any, batch: TrainBatch, packing: Packing, temperature: float, names: list[str]):
        assert method is TrainWorker.compute_columns and temperature == 1.0 and names == ["logprobs"]
        self.scored.append(batch.rows.tolist())
        halves = np.array_split(batch.rows, 2)  # as if two replicas had returned them
        parts = [
            ColumnPart(
                rows,
                np.concatenate(
                    [np.full(LENGTHS[row], 0.5 * len(self.updates) - row, np.float32) for row in rows]
                    or [np.empty(0, np.float32)]
                ),
            )
            for rows in halves
        ]
        return PendingCall(lambda: ComputedColumns({"logprobs": parts}, 0.1))

    def call_rank_0(self, method: Any, block: TokenBlock, *arguments: Any) -> Any:
        if method is TrainWorker.add_column:
            name, *parts = arguments
            return block.with_columns(**{name: assemble_column(parts, block.sampled_lengths, fill=float("nan"))})
        assert method is TrainWorker.mean_log_ratio
        return TrainWorker.mean_log_ratio(None, block, *arguments)  # type: ignore[bad-argument-type]  # it uses no state

    def update(
        self, steps: Sequence[TrainBatch], packing: Packing, *, weighting: TokenWeighting, lrs: list[float], loss: Any
    ):
        self.updates.append((steps[0], weighting, loss))
        sums = {"loss": 0.25, "weight": 0.5, "tokens": 9.0, "preference/accuracy": 0.3}
        return [UpdateReport(sums, {"optim/grad_norm": 2.0, "batch/imbalance": 1.0})]

    def evaluate(self, batch: TrainBatch, packing: Packing, *, weighting: TokenWeighting, loss: Any) -> UpdateReport:
        self.evaluations.append(batch)
        share = len(batch.rows) / len(batch.denominator_rows)
        return UpdateReport({"loss": 2.0 * share, "preference/accuracy": 0.75 * share, "weight": share})


class Log:
    """A sink for metrics."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        assert step == len(self.steps) + 1
        self.steps.append(dict(metrics))

    def close(self, failed: bool = False) -> None:
        pass


def run(loss: Any, rows: SupervisedRows, **changes: Any) -> tuple[Group, list[dict[str, float]], float]:
    mismatched = isinstance(loss, KTO)
    objective = SupervisedObjective(loss, RowForm(loss.rows, mismatched=mismatched), "vocabulary")
    group, log = Group(), Log()
    settings = dict(held_out=None, eval_every=0, steps=3, batch_size=2, optim=OptimConfig(lr=0.1), seed=0) | changes
    stage = SupervisedStage(group=group, rows=rows, objective=objective, packing=Packing(99), **settings)  # type: ignore
    with Tracker([log]) as tracker:  # type: ignore[bad-argument-type]
        result = stage.run(tracker)
    return group, log.steps, result


def test_supervised_fine_tuning_needs_no_forward_pass_and_weighs_all_tokens_equally():
    group, steps, loss = run(CrossEntropy(), data_set(8, 1))
    assert group.scored == [] and len(group.updates) == 3 and loss == 0.25
    mean = TokenWeighting(token_mean)
    assert all(weighting == mean and not batch.whole_groups for batch, weighting, _ in group.updates)
    trained = [row for batch, *_ in group.updates for row in batch.rows.tolist()]
    assert len(trained) == len(set(trained)) == 6
    assert steps[0]["loss/sft"] == 0.25 and steps[0]["optim/grad_norm"] == 2.0 and steps[0]["optim/lr"] == 0.1


def test_pairs_are_trained_whole_with_log_probabilities_from_before_the_first_step():
    group, steps, _ = run(DPO(), data_set(4, 2), steps=2, batch_size=1)
    batches = [batch for batch, *_ in group.updates]
    assert all(batch.whole_groups and batch.rows[0] % 2 == 0 and np.diff(batch.rows) == 1 for batch in batches)
    trained = sorted(row for batch in batches for row in batch.rows.tolist())
    assert sorted(row for rows in group.scored for row in rows) == trained, "other rows need no reference"
    assert all(len(rows) == 2 for rows in group.scored), "a forward pass is no larger than a step"
    column, ends = batches[-1].block.columns["ref_logprobs"], np.cumsum(LENGTHS)
    for row, (end, length) in enumerate(zip(ends, LENGTHS, strict=True)):
        expected = -row if row in trained else np.nan
        np.testing.assert_array_equal(column[end - length : end], expected)
    assert steps[0]["preference/accuracy"] == pytest.approx(0.6), "the sum divided by the sum of the weights"
    assert "tokens" not in steps[0]


def test_an_objective_without_reference_needs_no_forward_pass():
    group, _, _ = run(SimPO(), data_set(4, 2))
    assert (
        group.scored == [] and [weighting for _, weighting, _ in group.updates] == [TokenWeighting(sequence_mean)] * 3
    )


def test_kto_gets_the_mean_log_ratio_of_the_mismatched_sequences_in_each_step():
    """Rows 0 to 3 have the mismatched sequences 4 to 7. After n steps, each of their tokens has the log-ratio 0.5 n."""
    group, steps, _ = run(KTO(), data_set(4, 1))
    for number, (batch, _, loss) in enumerate(group.updates):
        expected = 0.5 * number * np.mean([LENGTHS[4 + row] for row in batch.rows.tolist()])
        assert loss.reference_point == pytest.approx(expected, abs=1e-6)
        assert steps[number]["preference/reference_point"] == loss.reference_point
        assert group.scored[-3 + number] == sorted(4 + row for row in batch.rows.tolist())
        assert (batch.rows < 4).all(), "mismatched sequences are not trained"


def test_held_out_rows_are_measured_at_intervals_and_after_the_last_step():
    group, steps, _ = run(DPO(), data_set(4, 2), held_out=data_set(3, 2, 6), eval_every=2, steps=5)
    assert [number for number, step in enumerate(steps, 1) if "loss/sft_held_out" in step] == [2, 4, 5]
    assert steps[1]["loss/sft_held_out"] == pytest.approx(2.0)
    assert steps[1]["preference/held_out_accuracy"] == pytest.approx(0.75)
    assert [batch.rows.tolist() for batch in group.evaluations[:2]] == [[0, 1, 2, 3], [4, 5]]
    assert all(batch.denominator_rows.tolist() == list(range(6)) for batch in group.evaluations)
    assert not np.isnan(group.evaluations[0].block.columns["ref_logprobs"]).any()
