"""Which steps the recorder dumps: requested steps, spikes of the gradient norm, and gradients that are not finite."""

import errno
import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mrl.algorithms.losses import PPOClip
from mrl.config.process_schema import StepDumpConfig
from mrl.core.run_errors import NonFiniteGradientError, ProcessesLostError
from mrl.core.types import TokenBlock, TrainBatch, UpdateReport
from mrl.diagnostics.step_dump import StepDump, StepDumpRecorder, WeightsLocation
from mrl.workers.model_trainers import UpdateRequest
from mrl.workers.worker import DUMPED_BATCH, TrainWorker

LATEST = WeightsLocation("/checkpoints/step_000004/actor", 4, checkpoint=True, hf_folder="/model")


class FakeWorkerGroup:
    """Stands in for a worker group. Writes rank 0's part of a step dump, without a model."""

    def call(self, method: Callable, block: TokenBlock, columns, folder: str, weights: bool) -> None:
        assert method is TrainWorker.dump_step and columns is None
        block.save(Path(folder) / DUMPED_BATCH)
        if weights:
            (Path(folder) / "weights").mkdir()


@pytest.fixture
def update() -> UpdateRequest:
    block = TokenBlock.from_lists([[1], [2]], [[3], [4, 5]])
    options = dict(loss=PPOClip(), temperature=1.0)
    return UpdateRequest(
        mini_batches=[TrainBatch.of(block, None)] * 2,
        lrs=[0.1, 0.2],
        options=options,
    )


def recorder(folder: Path, **settings) -> StepDumpRecorder:
    settings = StepDumpConfig(**(dict(spike_factor=10.0, spike_window=4, max_spikes=2) | settings))
    return StepDumpRecorder(folder, settings, layout={}, config={}, latest_weights=lambda: LATEST)


def train(recorder: StepDumpRecorder, update: UpdateRequest, norms: list[float], first: int = 0, group=None) -> None:
    for step, norm in enumerate(norms, first):
        with recorder.watch(group or FakeWorkerGroup(), update, step) as reports:
            reports += [UpdateReport({"loss": 0.5}, {"optim/grad_norm": size}) for size in (norm / 2, norm)]


def dumped_steps(folder: Path) -> list[int]:
    return [StepDump.read(path).description.step for path in sorted(folder.glob("step_*"))]


def test_a_spike_is_dumped_with_its_batch_and_the_location_of_the_weights(tmp_path, update):
    train(recorder(tmp_path), update, [1.0, 1.2, 0.8, 11.0, 1.0])
    assert dumped_steps(tmp_path) == [4]
    dump = StepDump.read(tmp_path / "step_000004")
    assert dump.description.weights == LATEST and dump.description.grad_norms == [5.5, 11.0]
    assert "11 is more than 10 times 1, the median of 3 steps" in dump.description.reason
    np.testing.assert_array_equal(dump.block().tokens, [1, 3, 2, 4, 5])


@pytest.mark.parametrize(
    ("norms", "settings"),
    [
        ([1.0, 50.0], {}),  # fewer steps than half a window are known
        ([1.0, 1.0, 9.9], {}),
        ([1.0, 1.0, 1.0, 50.0], dict(spike_factor=0.0)),
        ([1.0, 1.0, 1.0, 50.0], dict(max_spikes=0)),
    ],
)
def test_a_step_without_a_spike_is_not_dumped(tmp_path, update, norms, settings):
    train(recorder(tmp_path, **settings), update, norms)
    assert dumped_steps(tmp_path) == []


def test_the_limit_of_dumped_spikes_also_counts_spikes_before_a_resume(tmp_path, update):
    train(recorder(tmp_path), update, [1.0, 1.0, 20.0])
    train(recorder(tmp_path), update, [1.0, 1.0, 20.0, 1.0, 1.0, 20.0], first=3)
    assert dumped_steps(tmp_path) == [3, 6]


def test_requested_steps_are_numbered_as_in_the_metrics(tmp_path, update):
    requesting = replace(recorder(tmp_path, steps=[2, 5]), num_critic_steps=1)  # the first step trains only the critic
    train(requesting, update, [1.0, 1.0, 1.0, 1.0])
    assert dumped_steps(tmp_path) == [2, 5]
    description = StepDump.read(tmp_path / "step_000005").description
    assert (
        description.weights == WeightsLocation("weights", 4)
        and description.mini_batch == 0
        and description.losses == [0.5, 0.5]
    )


def test_each_update_of_a_step_has_a_dump_of_its_own(tmp_path, update):
    several = recorder(tmp_path, steps=[2])
    for attempt in (1.0, 2.0):  # the run repeats the step after it has recovered from a lost process
        for index in range(3):
            train(several, replace(update, update_index=index), [attempt + index], first=1)
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == ["step_000002", "step_000002_update_2", "step_000002_update_3"]
    descriptions = [StepDump.read(tmp_path / name).description for name in folders]
    assert [description.grad_norms[-1] for description in descriptions] == [2.0, 3.0, 4.0]
    assert {description.step for description in descriptions} == {2}


@contextmanager
def failing(recorder: StepDumpRecorder, update: UpdateRequest, writers: object):
    with pytest.raises(FloatingPointError) as caught, recorder.watch(writers, update, 2):
        raise NonFiniteGradientError(1, float("nan"))
    yield str(caught.value)


def test_the_error_of_a_nonfinite_gradient_names_its_step_dump(tmp_path, update):
    with failing(recorder(tmp_path), update, FakeWorkerGroup()) as message:
        assert f"mrl replay {tmp_path}/step_000003" in message
    description = StepDump.read(tmp_path / "step_000003").description
    assert description.mini_batch == 1 and description.weights == WeightsLocation("weights", 2)


def test_a_failed_dump_does_not_hide_the_error_of_the_gradient(tmp_path, update):
    with failing(recorder(tmp_path), update, None) as message:
        assert "mini-batch 1 is not finite" in message and "mrl replay" not in message
    assert not (tmp_path / "step_000003/step_dump.json").exists()


class FullDisk(FakeWorkerGroup):
    """A worker group that fails `times` times, each time after it has written a part of the dump."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self.left, self.error = times, error or OSError(errno.ENOSPC, "No space left on device")

    def call(self, method: Callable, block: TokenBlock, columns, folder: str, weights: bool) -> None:
        super().call(method, block, columns, folder, weights)
        if self.left:
            self.left -= 1
            raise self.error


def test_a_full_disk_prevents_one_dump_but_neither_the_run_nor_later_dumps(tmp_path, update, caplog):
    norms = [1.0, 1.0, 20.0, 1.0, 20.0, 1.0, 20.0]
    train(recorder(tmp_path, steps=[1], max_spikes=1), update, norms, group=FullDisk(2))
    assert dumped_steps(tmp_path) == [5], "the requested dump and the first spike fail; the limit is one spike"
    assert [record.message for record in caplog.records if record.exc_info] == [
        "step 1 could not be dumped (reason: requested (step_dump.steps))",
        "step 3 could not be dumped (reason: the gradient norm 20 is more than 10 times 1, the median of 2 steps before)",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000005"], "failed dumps are removed"


def test_a_manifest_that_does_not_fit_on_the_disk_costs_only_the_dump(tmp_path, update, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mrl.diagnostics.step_dump.write_manifest", fail)
    train(recorder(tmp_path, steps=[1]), update, [1.0, 1.0])
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_lost_during_a_dump_raises(tmp_path, update):
    with pytest.raises(ProcessesLostError, match="rank 1 died"):
        train(recorder(tmp_path, steps=[1]), update, [1.0], group=FullDisk(1, ProcessesLostError("rank 1 died")))


def test_the_manifest_lists_every_file_of_the_dump(tmp_path, update):
    train(recorder(tmp_path, steps=[1]), update, [1.0])
    manifest = json.loads((tmp_path / "step_000001/step_dump.json").read_text())
    assert manifest["files"].keys() == {"batch.npz", "mini_batches.npz"}
