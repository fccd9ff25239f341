"""Which steps a run keeps because their gradient norm is a spike; the trainers are not asked anything that is not written."""

import errno
import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mrl.algorithms.losses import PPOClip
from mrl.config.schema import StepDumpConfig
from mrl.core.run_errors import NonFiniteGradientError, ProcessesLostError
from mrl.core.types import TokenBlock, TrainBatch, UpdateReport
from mrl.diagnostics.step_dump import Capsule, Weights
from mrl.diagnostics.step_dump_recorder import Recorder
from mrl.workers.model_trainers import UpdateRequest
from mrl.workers.worker import DUMPED_BATCH, TrainWorker

LATEST = Weights("/checkpoints/step_000004/actor", 4, checkpoint=True, like="/model")


class Writers:
    """What trainer ranks do for a capsule, without a model: rank 0's batch."""

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
        steps=[TrainBatch.of(block, None)] * 2, lrs=[0.1, 0.2], aggregation="token_mean", max_response_tokens=3, options=options
    )


def recorder(folder: Path, **settings) -> Recorder:
    settings = StepDumpConfig(**(dict(spike_factor=10.0, spike_window=4, max_spikes=2) | settings))
    return Recorder(folder, settings, layout={}, config={}, latest=lambda: LATEST)


def train(recorder: Recorder, update: UpdateRequest, norms: list[float], first: int = 0, group=None) -> None:
    for step, norm in enumerate(norms, first):
        with recorder.watch(group or Writers(), update, step) as reports:
            reports += [UpdateReport({"loss": 0.5}, {"optim/grad_norm": size}) for size in (norm / 2, norm)]


def kept(folder: Path) -> list[int]:
    return [Capsule.read(path).content.step for path in sorted(folder.glob("step_*"))]


def test_a_spike_is_kept_with_its_batch_and_where_weights_are(tmp_path, update):
    train(recorder(tmp_path), update, [1.0, 1.2, 0.8, 11.0, 1.0])
    assert kept(tmp_path) == [4]
    capsule = Capsule.read(tmp_path / "step_000004")
    assert capsule.content.weights == LATEST and capsule.content.grad_norms == [5.5, 11.0]
    assert "11 is more than 10 times 1, the median of 3 steps" in capsule.content.why
    np.testing.assert_array_equal(capsule.block().tokens, [1, 3, 2, 4, 5])


@pytest.mark.parametrize(
    ("norms", "settings"),
    [
        ([1.0, 50.0], {}),  # half a window of steps is not yet known
        ([1.0, 1.0, 9.9], {}),
        ([1.0, 1.0, 1.0, 50.0], dict(spike_factor=0.0)),
        ([1.0, 1.0, 1.0, 50.0], dict(max_spikes=0)),
    ],
)
def test_what_is_no_spike_is_not_kept(tmp_path, update, norms, settings):
    train(recorder(tmp_path, **settings), update, norms)
    assert kept(tmp_path) == []


def test_no_more_spikes_are_kept_than_allowed_also_when_a_run_goes_on(tmp_path, update):
    train(recorder(tmp_path), update, [1.0, 1.0, 20.0])
    train(recorder(tmp_path), update, [1.0, 1.0, 20.0, 1.0, 1.0, 20.0], first=3)
    assert kept(tmp_path) == [3, 6]


def test_steps_that_are_asked_for_are_counted_as_in_the_metrics(tmp_path, update):
    asking = replace(recorder(tmp_path, steps=[2, 5]), first_step=1)  # one step trained the critic only
    train(asking, update, [1.0, 1.0, 1.0, 1.0])
    assert kept(tmp_path) == [2, 5]
    content = Capsule.read(tmp_path / "step_000005").content
    assert content.weights == Weights("weights", 4) and content.mini_batch == 0 and content.losses == [0.5, 0.5]


@contextmanager
def failing(recorder: Recorder, update: UpdateRequest, writers: object):
    with pytest.raises(FloatingPointError) as caught, recorder.watch(writers, update, 2):
        raise NonFiniteGradientError(1, float("nan"))
    yield str(caught.value)


def test_a_gradient_that_is_not_finite_names_its_capsule(tmp_path, update):
    with failing(recorder(tmp_path), update, Writers()) as message:
        assert f"mrl replay {tmp_path}/step_000003" in message
    content = Capsule.read(tmp_path / "step_000003").content
    assert content.mini_batch == 1 and content.weights == Weights("weights", 2)


def test_a_capsule_that_cannot_be_written_hides_no_error(tmp_path, update):
    with failing(recorder(tmp_path), update, None) as message:
        assert "mini-batch 1 is not finite" in message and "mrl replay" not in message
    assert not (tmp_path / "step_000003/capsule.json").exists()


class FullDisk(Writers):
    """Writes a part; the rest does not fit, so often."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self.left, self.error = times, error or OSError(errno.ENOSPC, "No space left on device")

    def call(self, method: Callable, block: TokenBlock, columns, folder: str, weights: bool) -> None:
        super().call(method, block, columns, folder, weights)
        if self.left:
            self.left -= 1
            raise self.error


def test_a_capsule_that_does_not_fit_on_the_disk_costs_neither_the_run_nor_a_later_capsule(tmp_path, update, caplog):
    norms = [1.0, 1.0, 20.0, 1.0, 20.0, 1.0, 20.0]
    train(recorder(tmp_path, steps=[1], max_spikes=1), update, norms, group=FullDisk(2))
    assert kept(tmp_path) == [5], "not the one asked for, not the first spike, and one is enough"
    assert [record.message for record in caplog.records if record.exc_info] == [
        "step 1 is not kept, though asked for (step_dump.steps)",
        "step 3 is not kept, though the gradient norm 20 is more than 10 times 1, the median of 2 steps before",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000005"], "nothing half written stays"


def test_a_manifest_that_does_not_fit_costs_the_capsule_alone(tmp_path, update, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mrl.diagnostics.step_dump_recorder.complete", fail)
    train(recorder(tmp_path, steps=[1]), update, [1.0, 1.0])
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_lost_while_a_capsule_is_written_is_told(tmp_path, update):
    with pytest.raises(ProcessesLostError, match="rank 1 died"):
        train(recorder(tmp_path, steps=[1]), update, [1.0], group=FullDisk(1, ProcessesLostError("rank 1 died")))


def test_a_manifest_has_every_file_of_the_capsule(tmp_path, update):
    train(recorder(tmp_path, steps=[1]), update, [1.0])
    manifest = json.loads((tmp_path / "step_000001/capsule.json").read_text())
    assert manifest["files"].keys() == {"batch.npz", "mini_batches.npz"}
