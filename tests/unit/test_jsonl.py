"""JSON Lines files after a resume, after damage and on a full disk. The sample ledger is such a file."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mrl.checkpoint.run_dir import SampleLedger
from mrl.core.jsonl import CHUNK_BYTES, JsonLinesFile, check_lines, last_lines
from mrl.core.run_errors import RunDirMovedError
from mrl.core.types import Rollouts


def steps(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_file_continues_after_the_resumed_step(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = JsonLinesFile(path)
    for step in (1, 2, 3):
        lines.write(step, {"x": float("nan")})
    lines.close()
    path.write_bytes(path.read_bytes() + b'{"step": 2, "x"')  # a kill has cut this line
    lines = JsonLinesFile(path, last_step=2)
    lines.write(3, {"x": 1.0})
    assert steps(path) == [1, 2, 3] and json.loads(path.read_text().splitlines()[0])["x"] is None
    lines.rewind(1)
    assert steps(path) == [1]
    lines.write(2, {})
    lines.close()
    assert steps(path) == [1, 2]


def test_a_new_run_keeps_no_old_lines(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"step": 1}\n')
    JsonLinesFile(tmp_path / "lines.jsonl").close()
    assert steps(tmp_path / "lines.jsonl") == []


def damaged_file(tmp_path, damage, last_step: int = 4) -> JsonLinesFile:
    """Write the lines of five steps, damage the file or its hashes, and open the file again."""
    lines = JsonLinesFile(tmp_path / "lines.jsonl")
    for step in range(1, 6):
        lines.write(step, {"reward/mean": 0.5 + step})
    lines.close()
    damage(lines.path, tmp_path / ".lines.jsonl.hashes")
    return JsonLinesFile(lines.path, last_step, every_step=True)


def change(old: bytes, new: bytes):
    return lambda path, hashes: path.write_bytes(path.read_bytes().replace(old, new))


DAMAGES = {
    "a changed number": (change(b"3.5", b"3.7"), [1, 2, 4], "damaged or missing: [3]"),
    "a line without its end": (change(b"3.5}\n", b"3.5"), [1, 2], "damaged or missing: [3, 4]"),
    "a missing line": (change(b'{"step":2,"reward/mean":2.5}\n', b""), [1, 3, 4], "damaged or missing: [2]"),
    "another step": (change(b'"step":2', b'"step":9'), [1, 3, 4], "damaged or missing: [2]"),
    "an empty file": (lambda path, hashes: path.write_bytes(b""), [], "damaged or missing: [1, 2, 3, 4]"),
    "no file": (lambda path, hashes: path.unlink(), [], "damaged or missing: [1, 2, 3, 4]"),
    "no hashes": (lambda path, hashes: hashes.unlink(), [1, 2, 3, 4], "no hashes of its 5 lines"),
    "the last hashes are lost": (
        lambda path, hashes: hashes.write_bytes(hashes.read_bytes()[:38]),
        [1, 2, 3, 4],
        "have no hash and are used unchecked: [3, 4]\n",
    ),
    "a hash between others is lost": (
        lambda path, hashes: hashes.write_bytes(hashes.read_bytes()[:38] + hashes.read_bytes()[57:]),
        [1, 2, 4],
        "damaged or missing: [3]",
    ),
    "hashes and lines are cut": (
        lambda path, hashes: [file.write_bytes(file.read_bytes()[:60]) for file in (path, hashes)],
        [1, 2],
        "damaged or missing: [3, 4]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_and_missing_lines_are_left_out_and_their_steps_are_named(tmp_path, caplog, damage):
    act, left, message = DAMAGES[damage]
    lines = damaged_file(tmp_path, act)
    assert steps(lines.path) == left and message in caplog.text
    lines.write(5, {"x": 1})
    lines.close()
    caplog.clear()
    JsonLinesFile(lines.path, 5).close()
    assert steps(lines.path) == [*left, 5] and "moved" not in caplog.text and "no hashes" not in caplog.text


def test_damaged_lines_are_kept_in_another_file(tmp_path, caplog):
    lines = damaged_file(tmp_path, change(b"3.5", b"3.7"))
    assert "1 damaged lines were moved to lines.jsonl.damaged" in caplog.text
    assert json.loads((tmp_path / "lines.jsonl.damaged").read_text()) == {"step": 3, "reward/mean": 3.7}
    lines.close()


@pytest.mark.parametrize(("old", "new"), [(b"5.5", b"5.7"), (b'"step":5', b'"step":7')])
def test_a_damaged_last_line_is_found_by_its_hash(tmp_path, caplog, old, new):
    lines = damaged_file(tmp_path, change(old, new), last_step=9)
    assert steps(lines.path) == [1, 2, 3, 4] and "1 damaged lines were moved" in caplog.text


def test_a_line_after_the_resumed_step_is_removed_in_silence_if_a_kill_has_prevented_its_hash(tmp_path, own_records):
    lines = damaged_file(tmp_path, lambda path, hashes: hashes.write_bytes(hashes.read_bytes()[:76]))
    assert steps(lines.path) == [1, 2, 3, 4] and not own_records()


def test_a_line_that_is_written_while_another_process_reads_is_not_lost(tmp_path, monkeypatch, own_records):
    lines, read, written = damaged_file(tmp_path, lambda path, hashes: None), Path.read_bytes, []

    def read_and_write(path):
        content = read(path)
        if not written:
            lines.write(written.append(5) or 5, {})
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_write)
    checked = check_lines(lines.path)
    assert not (checked.damaged or checked.lost_steps or own_records())
    assert [step for step, _ in checked.lines] == [1, 2, 3, 4, 5] and checked.unchecked_steps == [5]


def test_damaged_lines_stay_in_the_file_until_they_are_in_the_other_one(tmp_path):
    def damage(path, hashes):
        change(b"3.5", b"3.7")(path, hashes)
        path.with_name("lines.jsonl.damaged").mkdir()  # a folder of this name prevents the write

    with pytest.raises(IsADirectoryError):
        damaged_file(tmp_path, damage)
    assert steps(tmp_path / "lines.jsonl") == [1, 2, 3, 4, 5]


def test_an_intact_file_is_opened_without_a_warning(tmp_path, own_records):
    lines = damaged_file(tmp_path, lambda path, hashes: None)
    lines.rewind(2)
    assert steps(lines.path) == [1, 2] and not own_records() and not list(tmp_path.glob("*.damaged"))


def test_the_last_lines_of_a_damaged_file_leave_out_damaged_lines(tmp_path, caplog):
    lines = damaged_file(tmp_path, lambda path, hashes: None)
    lines.path.write_bytes(lines.path.read_bytes().replace(b"3.5", b"3.7"))
    assert [json.loads(line)["step"] for line in last_lines(lines.path, 3)] == [2, 4]
    assert "1 of its last 3 lines are damaged" in caplog.text


def move_folder(folder):
    folder.rename(folder.with_name("moved"))


def replace_folder(folder):
    move_folder(folder)
    shutil.copytree(folder.with_name("moved"), folder)


def remove_file(folder):
    (folder / "lines.jsonl").unlink()


@pytest.mark.parametrize("act", [move_folder, replace_folder, remove_file])
def test_a_file_that_was_moved_or_replaced_is_noticed_at_the_next_write(tmp_path, act):
    folder = tmp_path / "run"
    lines = JsonLinesFile(folder / "lines.jsonl")
    lines.write(1, {})
    act(folder)
    with pytest.raises(
        RunDirMovedError, match=r"lines\.jsonl was moved, deleted or replaced while the run was writing"
    ):
        lines.write(2, {})
    assert not (folder / "lines.jsonl").exists() or steps(folder / "lines.jsonl") == [1]


class FullDisk:
    """A file on a disk that has room for `room` bytes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        taken = min(len(data), self.room)
        self.room -= taken
        if not taken:
            raise OSError(28, "No space left on device")
        return self.file.write(data[:taken])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_loses_no_line_and_leaves_no_incomplete_line(tmp_path, caplog):
    lines = JsonLinesFile(tmp_path / "lines.jsonl")
    disk = FullDisk(lines._lines._file, room=25)
    lines._lines._file = disk
    for step in range(1, 5):
        lines.write(step, {"reward/mean": 0.5})
    assert steps(lines.path) == [] and caplog.text.count("lines cannot be written") == 1
    disk.room = 10_000
    lines.write(5, {"reward/mean": 0.5})
    assert steps(lines.path) == [1, 2, 3, 4, 5]


def test_a_rewind_keeps_the_lines_that_a_full_disk_left_in_memory(tmp_path, caplog, own_records):
    lines = JsonLinesFile(tmp_path / "lines.jsonl", every_step=True)
    lines.write(1, {})
    disk = lines._lines._file = FullDisk(lines._lines._file, room=0)
    for step in (2, 3, 4):
        lines.write(step, {})
    caplog.clear()
    disk.room = 10_000
    lines.rewind(3)
    lines.write(4, {})
    lines.close()
    JsonLinesFile(lines.path, 4, every_step=True).close()
    assert steps(lines.path) == [1, 2, 3, 4] and not own_records()


def rollouts(rows: list[int], digests: list[int]) -> Rollouts:
    count = len(rows)
    return Rollouts(
        block=None,
        prompt_lengths=np.ones(count, int),
        response_lengths=np.ones(count, int),
        sampled_lengths=np.ones(count, int),
        rows=np.array(rows),
        groups=np.array([rows.index(row) for row in rows]) // 2,
        digests=np.array(digests, np.uint64),
        truncated=np.zeros(count, bool),
        weight_versions=np.full(count, 4),
        rewards=np.zeros(count),
        request_numbers=np.array([4, 9])[: count // 2],
        version_spans=np.array(
            [(response, version, 3) for response in range(count) for version in (2, 4)][: 2 * count - 1]
        ),
    )


def test_the_ledger_identifies_each_group_by_its_row_and_its_samples(tmp_path):
    ledger = SampleLedger(tmp_path / "ledger.jsonl", 0)
    ledger.record(5, rollouts([7, 7, 3, 3], [1, 2, 3, 4]), drawn=[20])
    weights = [np.array([0.1, 0.1, 0.0, 0.0]), np.array([0.0, 0.0, 0.2, 0.4])]
    ledger.record(6, rollouts([7, 7, 3, 3], [1, 2, 3, 5]), [22], weights)
    ledger.close()
    first, second = (json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines())
    assert (first["step"], first["drawn"], first["weight_version"]) == (5, [20], 4)
    assert [row for row, _ in first["groups"]] == [7, 3]
    assert second["requests"] == [4, 9] and second["lengths"] == [[1, 1], [1, 1]]
    assert second["updates"] == [{"2": [6, 0.5], "4": [6, 0.5]}, {"2": [6, 0.75], "4": [3, 0.25]}], "by weight version"
    assert first["groups"][0] == second["groups"][0] and first["groups"][1] != second["groups"][1]


@pytest.mark.parametrize("last_step", [0, 5])
def test_a_rewind_removes_later_steps_from_the_ledger(tmp_path, last_step):
    ledger = SampleLedger(tmp_path / "ledger.jsonl", 0)
    for step in (5, 6):
        ledger.record(step, rollouts([7, 7], [1, 2]), drawn=[step])
    ledger.rewind(last_step)
    assert steps(tmp_path / "ledger.jsonl") == [step for step in (5,) if step <= last_step]


@pytest.mark.parametrize("size", [1, CHUNK_BYTES // 3, CHUNK_BYTES, 3 * CHUNK_BYTES])
def test_last_lines_are_complete_whatever_their_length(tmp_path, size):
    path = tmp_path / "lines.jsonl"
    assert last_lines(path, 2) == []
    lines = [f"{number}{'x' * size}\n".encode() for number in range(5)]
    path.write_bytes(b"".join(lines) + b"torn")
    assert last_lines(path, 2) == lines[-2:] and last_lines(path, 5) == last_lines(path, 9) == lines
