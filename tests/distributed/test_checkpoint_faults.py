"""A failed save raises the same error on every rank, and an invalid checkpoint raises an error before the model changes."""

import os
import shutil
import signal

import pytest
from models_for_layouts import make
from test_checkpoints import hold_writers, weights_of, with_adam
from test_layouts import make_actor

from parallel.dims import ParallelDims


def error_of(kind: type[Exception], action, *args) -> str:
    with pytest.raises(kind) as caught:
        action(*args)
    return str(caught.value)


def failing_saves(rank: int, path, folder, dims: ParallelDims) -> dict[str, str]:
    """Return the error of each failing save on this rank. Rank 1 fails, or rank 0 when it writes the metadata."""
    from parallel.checkpoint_writer import CheckpointSaveError

    actor, heard = make_actor(path, dims), {}

    def fail(name: str, asynchronous: bool, timeout_s: float = 60.0, meanwhile=lambda: None) -> None:
        actor.begin_save(folder / name, asynchronous)
        if rank == 1:
            meanwhile()
        heard[name] = error_of(CheckpointSaveError, actor.finish_save, timeout_s)

    for name, file in (
        ("full", "__1_0.distcp"),
        ("full beside training", "__1_0.distcp"),
        ("full at the end", ".metadata.tmp"),
    ):
        (folder / name).mkdir(exist_ok=True)
        if rank == 0:
            (folder / name / file).symlink_to("/dev/full")
        fail(name, asynchronous="beside" in name)
    if rank == 1:
        hold_writers(folder / "never")
    fail("killed", True, meanwhile=lambda: os.kill(actor._save._writer._process.pid, signal.SIGKILL))
    fail("late", True, timeout_s=0.5)
    (folder / "file").touch()
    heard["no folder"] = error_of(CheckpointSaveError, actor.begin_save, folder / "file" / "checkpoint", True)
    (folder / "never").touch()
    actor.begin_save(folder / "good", False)  # a save after all failures
    actor.finish_save(60)
    return heard


@pytest.mark.extended
def test_every_rank_raises_the_cause_of_a_failed_save(run_ranks, tmp_path):
    make("dense", tmp_path / "model")
    dims = ParallelDims(dp=2)
    first, second = run_ranks(dims, failing_saves, tmp_path / "model", tmp_path, dims)
    assert first == second
    for name, error in first.items():
        assert str(tmp_path / ("file" if name == "no folder" else name)) in error
    assert "rank 1" in first["full"] and "No space left on device" in first["full"]
    assert "rank 1" in first["full beside training"] and "No space left on device" in first["full beside training"]
    assert "rank 0" in first["full at the end"] and "No space left on device" in first["full at the end"]
    assert "was killed, exit code -9" in first["killed"]
    assert "did not end within 0.5 s" in first["late"]
    assert "NotADirectoryError" in first["no folder"]
    written = {path.name for path in tmp_path.iterdir() if (path / "metadata.json").exists()}
    assert written == {"good"}


def refused(rank: int, model, checkpoint, folder, dims: ParallelDims) -> dict[str, str]:
    """Return the error of loading each damaged copy of a checkpoint; check that the model is unchanged."""
    actor, heard = make_actor(model, dims), {}
    before = weights_of(actor)
    for path in sorted(
        folder.iterdir(), key=lambda path: path.name == "garbled"
    ):  # "garbled" is the last: only reading detects this damage, when some weights may have changed already
        heard[path.name] = error_of(ValueError, actor.load, path)
        assert weights_of(actor) == before or path.name == "garbled", path
    assert actor.load(checkpoint)
    return heard


def saved(rank: int, path, folder, dims: ParallelDims, reference: bool = False) -> None:
    actor = make_actor(path, dims)
    if reference:
        actor.copy_weights_to_reference()
        actor.save_reference(folder)
    else:
        actor.save(folder)


def damaged_copies(checkpoint, folder) -> None:
    for name in ("cut", "missing", "garbled", "unfinished", "no description", "numbers lost"):
        shutil.copytree(checkpoint, folder / name)
    os.truncate(folder / "cut/__0_0.distcp", 1000)
    (folder / "missing/__1_0.distcp").unlink()
    content = (folder / "garbled/__0_0.distcp").read_bytes()
    (folder / "garbled/__0_0.distcp").write_bytes(content[:-200] + bytes(200))
    (folder / "unfinished/metadata.json").unlink()
    os.truncate(folder / "no description/.metadata", 100)
    (folder / "numbers lost/rng_00001.safetensors").unlink()
    (folder / "empty").mkdir()


@pytest.mark.extended_except("fused")
@pytest.mark.parametrize("adam", ["fused", "torch"])
def test_an_incomplete_or_foreign_checkpoint_raises_an_error(run_ranks, tmp_path, adam):
    dims, folder = ParallelDims(dp=2), tmp_path / "damaged"
    for kind in ("dense", "moe"):
        make(kind, tmp_path / kind)
    run_ranks(dims, with_adam, adam, saved, tmp_path / "dense", tmp_path / "checkpoint", dims)
    damaged_copies(tmp_path / "checkpoint", folder)
    run_ranks(dims, with_adam, adam, saved, tmp_path / "moe", folder / "other", dims)
    run_ranks(dims, with_adam, adam, saved, tmp_path / "dense", folder / "weights", dims, True)
    paths = (tmp_path / "dense", tmp_path / "checkpoint", folder)
    first, second = run_ranks(dims, with_adam, adam, refused, *paths, dims)
    assert first == second
    for name, error in first.items():
        assert str(folder / name) in error
    assert "__0_0.distcp has 1000 bytes, expected" in first["cut"]
    assert "__1_0.distcp is missing" in first["missing"]
    assert "not readable" in first["garbled"]
    assert "metadata.json not there" in first["unfinished"]
    assert "damaged" in first["no description"]
    assert "rng_00001.safetensors: not readable" in first["numbers lost"]
    assert "found: nothing" in first["empty"]
    assert "tensors differ" in first["other"] and "is not in this model" in first["other"]
    assert "no optimizer state" in first["weights"]


def train_with_reference(rank: int, path, folder, before: bool, dims: ParallelDims) -> list[bytes]:
    """Save the reference after a training step (`before`), or load it. Returns the weights of the reference."""
    from test_checkpoints import train

    actor = make_actor(path, dims)
    if before:
        actor.copy_weights_to_reference()
        train(actor, dims, rank, 1)
        current = weights_of(actor)
        actor.save_reference(folder)
    else:
        current = weights_of(actor)
        actor.load_reference(folder)
    assert weights_of(actor) == current
    with actor.reference_weights():
        return {name: tensor.clone().numpy() for name, tensor in actor.export()} if actor.participates_in_export else {}


@pytest.mark.extended
def test_the_reference_can_be_loaded_under_another_layout(run_ranks, tmp_path):
    make("moe", tmp_path / "model")
    make_other = tmp_path / "other"
    make("moe", make_other)
    first, second = ParallelDims(dp=2, ep=2), ParallelDims(tp=2)
    saved = run_ranks(first, train_with_reference, tmp_path / "model", tmp_path / "reference", True, first)[0]
    loaded = run_ranks(second, train_with_reference, make_other, tmp_path / "reference", False, second)[0]
    assert saved.keys() == loaded.keys() and saved
    for name, tensor in saved.items():
        assert loaded[name].tobytes() == tensor.tobytes(), name
