"""CheckpointSaver: when checkpoints are begun, committed and abandoned. The fake model writes one file."""

import errno
from pathlib import Path

import pytest

from mrl.checkpoint.saver import CheckpointSaver, CheckpointSchedule, exported_step
from mrl.checkpoint.store import CheckpointStore
from mrl.core.run_errors import ProcessesLostError, RunDirMovedError


class Model:
    """A model whose state is a number. Its save is finished once `arrived` is set."""

    def __init__(self) -> None:
        self.value, self.arrived, self.error, self.abandoned = 0, False, None, 0
        self.begun: list[tuple[Path, int, bool]] = []

    def begin_save(self, folder: str, asynchronous: bool, timeout_s: float) -> None:
        Path(folder).mkdir()
        self.begun.append((Path(folder), self.value, asynchronous))

    def save_has_ended(self) -> bool:
        return self.arrived

    def abandon_save(self) -> None:
        self.abandoned += 1

    def finish_save(self, timeout_s: float) -> None:
        if self.error:
            raise self.error
        folder, value, _ = self.begun[-1]
        (folder / "weights").write_text(str(value))


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def discarded():
    return []


@pytest.fixture
def saver(tmp_path, model, discarded):
    def build(**schedule) -> CheckpointSaver:
        defaults = dict(
            every=2, export_every=0, asynchronous=True, timeout_s=60.0, at_end=True, best_metric="reward/mean"
        )
        store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
        run_description = {"layout": {"tp": 1}}
        export = lambda folder: Path(folder).mkdir(parents=True)  # noqa: E731
        return CheckpointSaver(
            store,
            {"actor": model},
            {},
            CheckpointSchedule(**(defaults | schedule)),
            run_description,
            discarded.append,
            export,
            tmp_path,
        )

    return build


def state(step: int) -> dict:
    return {"progress": {"step": step}}


def test_an_asynchronous_checkpoint_has_the_weights_of_its_own_step(saver, model, discarded):
    made = saver()
    for step in range(6):
        model.value, model.arrived = step, step % 2 == 1
        made.between_steps(state(step), {"reward/mean": 0.1})
    for step in (2, 4):
        assert (made.store.folder / f"step_{step:06d}/actor/weights").read_text() == str(step)
    latest = made.store.latest()
    assert latest and latest.state == {"progress": {"step": 4}, "layout": {"tp": 1}}
    assert discarded == [2, 4] and all(asynchronous for *_, asynchronous in model.begun)


def test_a_due_checkpoint_waits_for_the_pending_one(saver, model):
    made = saver(every=1)
    for step in (1, 2, 3):
        made.between_steps(state(step), {})
    latest = made.store.latest()
    assert latest and latest.step == 2, "the third is still pending"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("the writer died")])
def test_a_failed_checkpoint_is_logged_and_the_earlier_one_stays(saver, model, discarded, caplog, error):
    made = saver(every=1, asynchronous=False)
    made.between_steps(state(1), {})
    model.error = error
    made.between_steps(state(2), {})
    latest = made.store.latest()
    assert latest and latest.step == 1 and discarded == [1] and made.failed == 1 and model.abandoned == 1
    assert str(error) in caplog.text and not list(made.store.folder.glob(".partial*"))
    model.error = None
    made.between_steps(state(3), {})
    latest = made.store.latest()
    assert latest and latest.step == 3


def test_lost_processes_are_not_treated_as_a_failed_checkpoint(saver, model):
    made = saver(every=1, asynchronous=False)
    model.error = ProcessesLostError("rank 0 died")
    with pytest.raises(ProcessesLostError):
        made.between_steps(state(1), {})


def test_the_last_checkpoint_of_a_run_must_succeed(saver, model):
    made = saver(every=0)
    model.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        made.finish(state(5))
    model.error = None
    made.finish(state(5))
    latest = made.store.latest()
    assert latest and latest.step == 5 and exported_step(made.run_dir) == 5


def test_an_export_that_a_kill_has_prevented_leaves_no_step_of_older_weights(saver, model):
    made = saver(every=0)
    assert exported_step(made.run_dir) is None
    made.finish(state(5))

    def fail(folder: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made.export = fail
    with pytest.raises(OSError, match="No space"):
        made.finish(state(7))
    assert exported_step(made.run_dir) == 5 and made.store.latest().step == 7


def test_a_failed_export_leaves_the_earlier_folder(saver):
    made = exported(saver(every=0, export_every=1))
    made.between_steps(state(1), {})

    def fail(folder: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made.export = fail
    made.between_steps(state(1), {})
    assert exports(made) == [1]
    exported(made).between_steps(state(1), {})
    assert [path.name for path in (made.run_dir / "exports").iterdir()] == ["step_000001"]


def test_a_preempted_run_is_saved_once(saver, model):
    made = saver(every=2)
    made.between_steps(state(2), {})
    made.save_now(state(2))
    assert len(model.begun) == 1, "the pending one is of this step"
    made.save_now(state(3))
    assert len(model.begun) == 2 and not model.begun[-1][2]


def test_exports_have_their_own_schedule(saver, tmp_path):
    made = saver(every=0, export_every=3)
    for step in range(7):
        made.between_steps(state(step), {})
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["step_000003", "step_000006"]


def exports(made) -> list[int]:
    folders = [path for path in (made.run_dir / "exports").iterdir() if path.name.startswith("step_")]
    assert all((folder / "weights").read_text() for folder in folders), "each folder is complete"
    return sorted(int(folder.name.removeprefix("step_")) for folder in folders)


def exported(made):
    """Let the saver write a file into each export."""

    def export(folder: str) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "weights").write_text("w")

    made.export = export
    return made


def test_the_newest_exports_are_kept_and_later_ones_of_an_abandoned_future_do_not_count(saver):
    made = exported(saver(every=0, export_every=1, keep_last_exports=2))
    for step in range(6):
        made.between_steps(state(step), {})
    (made.run_dir / "exports/mine").mkdir()
    assert exports(made) == [4, 5]
    resumed = exported(saver(every=0, export_every=1, keep_last_exports=1))
    resumed.between_steps(state(3), {})
    assert exports(resumed) == [3, 4, 5], "step 3 was just written; steps 4 and 5 are from before the resume"
    for step in (4, 5, 6):
        resumed.between_steps(state(step), {})
    assert exports(resumed) == [6] and (made.run_dir / "exports/mine").is_dir()


def test_a_kill_during_the_removal_of_an_export_leaves_no_half_folder(saver, monkeypatch):
    made = exported(saver(every=0, export_every=1, keep_last_exports=1))
    made.between_steps(state(1), {})

    class Killed(BaseException):
        pass

    def kill(path, **options):
        if (made.run_dir / "exports/.step_000001.old").exists():
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("mrl.checkpoint.saver.shutil.rmtree", kill)
        made.between_steps(state(2), {})
    assert exports(made) == [2]
    made.between_steps(state(3), {})
    assert exports(made) == [3] and [path.name for path in (made.run_dir / "exports").iterdir()] == ["step_000003"]


def test_constant_parts_are_written_once(saver, model, tmp_path):
    made, written = saver(every=1, asynchronous=False), []

    def write(folder: str) -> None:
        written.append(folder)
        Path(folder).mkdir()
        (Path(folder) / "weights").write_text("reference")

    made.constant_parts = {"reference": write}
    for step in (1, 2, 3):
        made.between_steps(state(step), {})
    assert len(written) == 1
    assert all((made.store.folder / f"step_{step:06d}/reference/weights").read_text() for step in (1, 2, 3))


@pytest.mark.parametrize("write", ["between_steps", "save_now", "finish"])
def test_nothing_is_written_to_a_run_directory_that_was_moved(saver, model, tmp_path, write):
    made = saver()
    tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    try:
        with pytest.raises(RunDirMovedError, match="was moved, deleted or replaced"):
            getattr(made, write)(state(2), *[{}] * (write == "between_steps"))
        assert not tmp_path.exists() and not model.begun
    finally:
        tmp_path.with_name(f"{tmp_path.name}-moved").rename(tmp_path)
