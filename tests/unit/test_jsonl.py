"""JSON Lines files of a resumed run and on a full disk, and the sample ledger, which is such a file."""

import json

import numpy as np
import pytest

from mrl.checkpoint.run_dir import SampleLedger
from mrl.core.jsonl import CHUNK_BYTES, JsonLinesFile, last_lines
from mrl.core.types import Rollouts


def steps(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_file_continues_after_the_resumed_step(tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = JsonLinesFile(path)
    for step in (1, 2, 3):
        lines.write(step, {"x": float("nan")})
    lines.close()
    path.write_bytes(path.read_bytes() + b'{"step": 2, "x"')  # a line cut by a kill
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


class FullDisk:
    """A file on a disk that has room for a number of bytes."""

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
    disk = FullDisk(lines._file, room=25)
    lines._file = disk
    for step in range(1, 5):
        lines.write(step, {"reward/mean": 0.5})
    assert steps(lines.path) == [] and caplog.text.count("lines cannot be written") == 1
    disk.room = 10_000
    lines.write(5, {"reward/mean": 0.5})
    assert steps(lines.path) == [1, 2, 3, 4, 5]


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
