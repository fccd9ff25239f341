"""CheckpointStore: a checkpoint is complete or absent, whatever interrupts its writing or damages it later."""

import logging
import os
import pathlib
import threading

import pytest
import xxhash
from fsspec.implementations.local import LocalFileSystem

from mrl.checkpoint import store as checkpoint
from mrl.checkpoint.store import STATE_FILE, Checkpoint, CheckpointStore, find_checkpoint
from parallel import durable_files


def written(store: CheckpointStore, step: int, score: float | None = None) -> Checkpoint:
    partial = store.begin()
    (partial / "actor").mkdir()
    (partial / "actor/__0_0.distcp").write_bytes(os.urandom(100 + step))
    return store.commit(partial, step, {"progress": {"step": step}, "seen": 10_000}, score)


def steps(store: CheckpointStore) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in store.folder.glob("step_*"))


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=3)
    assert store.latest() is None
    for step in (9, 10, 100):
        written(store, step)
    latest = CheckpointStore(store.folder).latest()
    assert latest and (latest.step, latest.state) == (100, {"progress": {"step": 100}, "seen": 10_000})


def flip_bit(path, after: bytes = b"") -> None:
    """Flip one bit of a file, in the third byte after the bytes `after`."""
    content = bytearray(path.read_bytes())
    content[content.index(after) + len(after) + 2] ^= 1
    path.write_bytes(content)


def torn_shard(folder):
    with (folder / "actor/__0_0.distcp").open("r+b") as file:
        file.truncate(50)


TEARS = {
    "a truncated shard": (torn_shard, r"has 50 bytes but was written with 120"),
    "a missing shard": (lambda folder: (folder / "actor/__0_0.distcp").unlink(), r"__0_0.distcp is missing"),
    "half a state": (lambda folder: (folder / STATE_FILE).write_text('{"format": 1, "st'), "cannot be read"),
    "no state": (lambda folder: (folder / STATE_FILE).unlink(), "has no state.json"),
    "another format": (lambda folder: (folder / STATE_FILE).write_text('{"format": 7}'), "format 7; this version"),
    "a state of something else": (lambda folder: (folder / STATE_FILE).write_text("[1]"), "has format list"),
    "another number in the state": (lambda folder: flip_bit(folder / STATE_FILE, b'"seen":'), "its hash is"),
}


@pytest.mark.parametrize("tear", TEARS)
def test_an_incomplete_checkpoint_is_skipped_with_a_warning_and_refused_by_name(tmp_path, caplog, tear):
    act, message = TEARS[tear]
    store = CheckpointStore(tmp_path)
    written(store, 10)
    act(written(store, 20).path)
    with caplog.at_level(logging.WARNING):
        latest = store.latest()
    assert latest and latest.step == 10
    assert "step_000020" in caplog.text
    with pytest.raises(ValueError, match=message):
        find_checkpoint(str(tmp_path / "step_000020"))


def test_a_checkpoint_with_a_changed_bit_is_passed_over_and_refused_by_name(tmp_path, caplog):
    store = CheckpointStore(tmp_path, keep_last=3)
    written(store, 10)
    flip_bit(written(store, 20).path / "actor/__0_0.distcp")
    again = CheckpointStore(tmp_path, keep_last=3)
    intact = again.latest_intact()
    assert intact and intact.step == 10 and again.damaged == {20}
    assert "step_000020: actor/__0_0.distcp is damaged: its hash is" in caplog.text
    with pytest.raises(ValueError, match=r"step_000020: actor/__0_0\.distcp is damaged.*; use another checkpoint"):
        find_checkpoint(str(tmp_path / "step_000020"))
    assert find_checkpoint(str(tmp_path)).step == 10
    written(again, 15)  # after a restart from step 10, this is the newest checkpoint, not the damaged one
    latest = again.latest()
    assert latest and latest.step == 15 and steps(again) == [10, 15, 20]
    written(again, 20)
    latest = again.latest_intact()
    assert latest and latest.step == 20 and not again.damaged


def test_exchanged_files_and_folders_are_found(tmp_path):
    store = CheckpointStore(tmp_path)
    first, second = (written(store, step).path for step in (1, 2))
    first.rename(tmp_path / "aside"), second.rename(first)
    with pytest.raises(ValueError, match="has the checkpoint of step 2; rename the folder"):
        Checkpoint.read(first)
    partial = store.begin()
    for name in ("a", "b"):
        (partial / name).write_text(name)
    path = store.commit(partial, 3, {}).path
    (path / "a").write_text("b"), (path / "b").write_text("a")
    with pytest.raises(ValueError, match="a is damaged"):
        Checkpoint.read(path).check_hashes()


def test_hashes_of_the_writers_are_used_and_their_files_are_not_read_again(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    partial = store.begin()
    (partial / "actor").mkdir()
    (partial / "actor/shard").write_bytes(b"w")
    durable_files.write_hashes(partial / "actor", {"shard": (1, "hash of the writer")})
    committed = store.commit(partial, 1, {})
    assert committed.files["actor/shard"] == (1, "hash of the writer")
    assert committed.files.keys() == {"actor/shard", f"actor/{durable_files.HASHES_FILE}"}


def test_a_copy_with_another_content_is_not_a_checkpoint(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path / "own", copy_to=f"file://{tmp_path}/copies")
    put = LocalFileSystem.put_file

    def put_damaged(self, source, target, **options):
        put(self, source, target, **options)
        if target.endswith(".distcp"):
            flip_bit(pathlib.Path(target))

    monkeypatch.setattr(LocalFileSystem, "put_file", put_damaged)
    written(store, 3)
    assert store.wait_for_copy(60) and "size and hash of the copied file actor/__0_0.distcp are" in caplog.text
    with pytest.raises(ValueError, match=r"has no state\.json"):
        Checkpoint.read(tmp_path / "copies/step_000003")


def test_an_uncommitted_folder_is_not_a_checkpoint_and_the_next_begin_removes_it(tmp_path):
    store = CheckpointStore(tmp_path)
    written(store, 1)
    left = store.begin()
    (left / "actor").mkdir()
    latest = store.latest()
    assert latest and latest.step == 1 and find_checkpoint(str(tmp_path)).step == 1
    store.begin()
    assert not left.exists()


def test_a_full_disk_leaves_only_the_earlier_checkpoint(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    written(store, 1)
    partial = store.begin()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(checkpoint.os, "fsync", full)
        store.commit(partial, 2, {})
    store.abandon(partial)
    latest = store.latest()
    assert steps(store) == [1] and latest and latest.step == 1 and not partial.exists()


def test_the_last_and_the_best_checkpoints_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=2)
    for step, score in enumerate([0.5, 0.9, 0.1, 0.8, 0.3, 0.2, None], 1):
        written(store, step, score)
    assert steps(store) == [2, 4, 6, 7]
    assert not list(tmp_path.glob(".partial*"))


def test_incomplete_checkpoints_do_not_count_among_those_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (950, 1000):
        torn_shard(written(store, step).path)
    assert store.latest() is None and not store.is_empty()
    written(store, 50)
    latest = store.latest()
    assert latest and latest.step == 50


def test_a_checkpoint_exists_at_every_moment_of_its_replacement(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep_last=1)
    written(store, 7)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path, **_: found.append(store.latest() is not None))
    found: list[bool] = []
    written(store, 7)
    assert found and all(found)


def test_a_hanging_copy_delays_nothing(tmp_path, monkeypatch, caplog):
    store, go_on = CheckpointStore(tmp_path, copy_to="file:///unused"), threading.Event()
    monkeypatch.setattr(CheckpointStore, "_copy", lambda self, checkpoint: go_on.wait(60))
    for step in (1, 2):
        written(store, step)
    assert "still being copied" in caplog.text and not store.wait_for_copy(0.01)
    go_on.set()
    assert store.wait_for_copy(60)


def test_an_incomplete_checkpoint_of_the_same_step_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    torn_shard(written(store, 20).path)
    written(store, 20)
    latest = store.latest()
    assert latest and latest.step == 20


def test_constant_parts_are_linked_and_not_written_again(tmp_path):
    store = CheckpointStore(tmp_path)
    partial = store.begin()
    assert not store.link_latest("reference", partial), "there is no checkpoint yet"
    (partial / "reference").mkdir()
    (partial / "reference/weights").write_bytes(b"w" * 1000)
    first = store.commit(partial, 1, {})
    partial = store.begin()
    assert store.link_latest("reference", partial)
    second = store.commit(partial, 2, {})
    assert (second.path / "reference/weights").stat().st_ino == (first.path / "reference/weights").stat().st_ino
    assert second.files == {"reference/weights": (1000, xxhash.xxh3_128_hexdigest(b"w" * 1000))}


def test_complete_checkpoints_are_copied_to_the_users_url(tmp_path, caplog):
    store = CheckpointStore(tmp_path / "own", copy_to=f"file://{tmp_path}/copies")
    kept = written(store, 3)
    assert store.wait_for_copy(60)
    copy = Checkpoint.read(tmp_path / "copies/step_000003")
    assert copy.state == kept.state
    assert (copy.path / "actor/__0_0.distcp").read_bytes() == (kept.path / "actor/__0_0.distcp").read_bytes()
    broken = CheckpointStore(tmp_path / "own", copy_to="file:///proc/nowhere")
    written(broken, 4)
    assert broken.wait_for_copy(60) and "was not copied to file:///proc/nowhere" in caplog.text
    latest = broken.latest()
    assert latest and latest.step == 4


def test_a_user_can_name_a_run_its_checkpoints_folder_or_one_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path / "run/checkpoints")
    path = written(store, 5).path
    assert {find_checkpoint(str(where)).step for where in (tmp_path / "run", store.folder, path)} == {5}
    with pytest.raises(ValueError, match="no such folder"):
        find_checkpoint(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no complete and undamaged checkpoint"):
        find_checkpoint(str(tmp_path / "empty"))


PARTS = ("actor", "critic", "reference")


def written_parts(store: CheckpointStore, step: int, score: float | None = None, parts=PARTS) -> Checkpoint:
    partial = store.begin()
    for part in parts:
        (partial / part).mkdir()
        (partial / part / "shard").write_bytes(os.urandom(100 + step))
    return store.commit(partial, step, {"progress": {"step": step}}, score)


def parts_by_step(store: CheckpointStore) -> dict[int, set[str]]:
    """Return step -> parts as found in the folders, and check that the state files name the same parts."""
    found = {}
    for step in steps(store):
        read = Checkpoint.read(store.folder / f"step_{step:06d}")
        read.check_hashes()
        found[step] = {path.name for path in read.path.iterdir() if path.is_dir()}
        assert found[step] == read.parts and read.state == {"progress": {"step": step}}
        assert set(read.removed) == set(PARTS) - found[step]
    return found


@pytest.mark.parametrize(
    ("keep_actor", "keep_critic", "expected"),
    [
        (3, 1, {3: {"actor", "reference"}, 4: {"actor", "reference"}, 5: set(PARTS)}),
        (1, 3, {3: {"critic"}, 4: {"critic"}, 5: set(PARTS)}),
        (2, 2, {4: set(PARTS), 5: set(PARTS)}),
    ],
)
def test_each_part_is_kept_as_often_as_its_own_number_says(tmp_path, keep_actor, keep_critic, expected):
    store = CheckpointStore(tmp_path, keep_actor, {"critic": keep_critic})
    for step in range(1, 6):
        written_parts(store, step)
    assert parts_by_step(store) == expected and not list(tmp_path.glob(".partial*"))
    latest = CheckpointStore(tmp_path).latest_intact()
    assert latest and latest.step == 5 and not latest.removed


def test_the_best_checkpoints_keep_all_parts(tmp_path):
    store = CheckpointStore(tmp_path, 3, {"critic": 1}, keep_best=1)
    for step, score in enumerate([0.9, 0.1, 0.2, 0.3, 0.4], 1):
        written_parts(store, step, score)
    assert parts_by_step(store) == {1: set(PARTS), 3: PARTS_OF_ACTOR, 4: PARTS_OF_ACTOR, 5: set(PARTS)}


PARTS_OF_ACTOR = {"actor", "reference"}


def test_a_run_never_continues_from_a_checkpoint_without_all_parts(tmp_path):
    """If the newest checkpoint is damaged, the run does not continue from an older one whose critic was removed."""
    store = CheckpointStore(tmp_path, 3, {"critic": 2})
    for step in (1, 2, 3):
        written_parts(store, step)
    flip_bit(tmp_path / "step_000003/critic/shard")
    again = CheckpointStore(tmp_path, 3, {"critic": 2})
    intact = again.latest_intact()
    assert intact and intact.step == 2 and again.damaged == {3}
    flip_bit(tmp_path / "step_000002/actor/shard")
    assert CheckpointStore(tmp_path).latest_intact() is None
    with pytest.raises(ValueError, match="no complete and undamaged checkpoint"):
        find_checkpoint(str(tmp_path))
    assert find_checkpoint(str(tmp_path / "step_000001")).removed == ("critic",), "its actor can still be named"


class Killed(BaseException):
    """Stands in for a signal that kills the process."""


@pytest.mark.parametrize("kill_at", range(6))
def test_a_kill_during_the_removal_of_parts_leaves_checkpoints_that_the_next_commit_tidies(
    tmp_path, monkeypatch, kill_at
):
    """After the new checkpoint has its name, `kill_at` changes of the disk happen; then the process is killed."""
    store, calls = CheckpointStore(tmp_path, 3, {"critic": 1}), []
    for step in (1, 2):
        written_parts(store, step)

    def killing(function):
        def wrapped(*arguments, **options):
            if store._path(3).exists():
                calls.append(function)
                if len(calls) > kill_at:
                    raise Killed
            return function(*arguments, **options)

        return wrapped

    with monkeypatch.context() as patch:
        for owner, name in (
            (pathlib.Path, "rename"), (pathlib.Path, "replace"), (pathlib.Path, "write_bytes"), (checkpoint.shutil, "rmtree"),
        ):  # fmt: skip
            patch.setattr(owner, name, killing(getattr(owner, name)))
        try:
            written_parts(store, 3)
        except Killed:
            pass
        else:
            assert kill_at >= len(calls) == 5, "there was nothing left to interrupt"
    left = CheckpointStore(tmp_path, 3, {"critic": 1})
    latest = left.latest_intact()
    assert latest and latest.step == 3 and not latest.removed and not left.damaged
    for step in steps(left):
        Checkpoint.read(left._path(step)).check_hashes()
    written_parts(left, 4)
    assert parts_by_step(left) == {2: PARTS_OF_ACTOR, 3: PARTS_OF_ACTOR, 4: set(PARTS)}


def test_a_disk_that_is_full_when_parts_are_removed_does_not_fail_the_new_checkpoint(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path, 2, {"critic": 1})
    written_parts(store, 1)
    write_state = Checkpoint.write_state

    def full(self, folder):
        if self.removed:
            raise OSError(28, "No space left on device")
        write_state(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write_state", full)
        assert written_parts(store, 2).step == 2
    assert "an old checkpoint could not be removed" in caplog.text
    assert parts_by_step(store) == {1: set(PARTS), 2: set(PARTS)}
