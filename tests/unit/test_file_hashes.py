"""Hashes of files: every damage to a folder or to a sealed JSON file is found, and the message names the file and the cause."""

import json
import time

import pytest

from mrl.diagnostics.step_dump import StepDump, WeightsLocation
from parallel import checkpoint_writer, durable_files


@pytest.fixture
def folder(tmp_path):
    for name in ("a", "b", "empty"):
        (tmp_path / name).write_text(name * 1000 if name != "empty" else "")
    durable_files.write_hashes(tmp_path, {})
    return tmp_path


DAMAGES = {
    "a is missing but was written with 1000 bytes": lambda folder: (folder / "a").unlink(),
    "a has 10 bytes but was written with 1000 bytes": lambda folder: (folder / "a").write_text("a" * 10),
    "a is damaged: its hash is": lambda folder: (folder / "a").write_text("a" * 999 + "b"),
    "empty has 1 bytes": lambda folder: (folder / "empty").write_text("x"),
    "mrl_hashes.json is damaged": lambda folder: (folder / durable_files.HASHES_FILE).write_text(""),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_file_of_a_folder_is_named(folder, message):
    durable_files.check_folder(folder)
    DAMAGES[message](folder)
    with pytest.raises(ValueError, match=message):
        durable_files.check_folder(folder)


def test_files_that_were_added_later_and_folders_without_hashes_are_not_checked(folder):
    (folder / "notes").write_text("mine")
    durable_files.check_folder(folder)
    (folder / durable_files.HASHES_FILE).unlink()
    (folder / "a").write_text("changed")
    durable_files.check_folder(folder)


def test_an_error_does_not_wait_until_large_files_are_read(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(60 << 30)  # a sparse file, which takes no space
    start = time.monotonic()
    with pytest.raises(FileNotFoundError):
        durable_files.hash_files(tmp_path, ["missing", "large"])
    assert time.monotonic() - start < 1


def test_every_changed_bit_of_a_sealed_file_is_found(tmp_path):
    path, content = tmp_path / "run.json", {"command": "train", "config": {"seed": 1, "lr": float("nan")}}
    text = durable_files.sealed_json(content)
    path.write_text(text)
    assert json.dumps(durable_files.read_sealed_json(path, content.keys())) == json.dumps(content)
    for position in range(len(text) * 8):
        damaged = bytearray(text.encode())
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"run\.json is damaged: .*\.$"):
            durable_files.read_sealed_json(path, content.keys())
    path.write_text(durable_files.sealed_json({"files": {}}))
    with pytest.raises(
        ValueError, match=r"has the keys \['files'\] of another file instead of \['command', 'config'\]"
    ):
        durable_files.read_sealed_json(path, content.keys())


def test_the_writer_of_a_rank_hashes_its_files(tmp_path):
    path = tmp_path / "rng_00000.safetensors"
    written = checkpoint_writer._write_files([], None, {path: b"states"})
    assert (written.results, written.hashes) == ([], {path.name: durable_files.hash_file(path)})


def test_a_replay_never_loads_a_damaged_checkpoint(folder):
    dump = StepDump(folder.parent, None, {})
    location = WeightsLocation(str(folder), 3, checkpoint=True)
    assert dump.weights_folder(location) == folder
    (folder / "a").write_text("b" * 1000)
    with pytest.raises(ValueError, match="a is damaged"):
        dump.weights_folder(location)
