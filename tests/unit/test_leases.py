"""Scratch directories are removed even if their supervisor was killed, but not while they are in use."""

import json
import os
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

from mrl.rollout.engines.server import EngineServer, ScratchDir


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("mrl.rollout.engines.server.MAX_PARENT_LENGTH", 1000)


@pytest.fixture
def left_over():
    """Create a file as a killed scheduler leaves it in shared memory."""
    path = Path(f"/dev/shm/sglang_loads_test_{uuid.uuid4().hex}")
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_the_next_scratch_dir_removes_one_whose_holder_was_killed(left_over, tmp_path):
    scratch = ScratchDir()
    kept = tmp_path / "not_ours"
    kept.touch()
    (scratch.path / "shared_memory").write_text(f"{left_over}\n{kept}\n")
    holder = subprocess.Popen(["sleep", "60"], pass_fds=[scratch.fd])
    scratch.hand_over()
    ScratchDir().hand_over()
    assert scratch.path.exists() and left_over.exists(), "its holder is alive"
    holder.kill()
    holder.wait()
    new = ScratchDir()
    assert not scratch.path.exists() and not left_over.exists() and kept.exists()
    assert new.path.exists()
    new.hand_over()


def test_a_directory_without_a_lock_file_yet_is_not_removed(tmp_path):
    new = tmp_path / "mrl-engine-new"
    new.mkdir()
    os.close(ScratchDir().fd)
    assert new.exists()


def test_the_rendezvous_file_of_a_server_is_in_its_own_scratch_dir(tmp_path, monkeypatch):
    """The file is not in a directory that all servers of the host share and to which any user can write."""
    written = {}
    server = EngineServer({"model_path": "m"}, tmp_path / "engine.log")
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: FakeSupervisor(written))
    server.start()
    (server._scratch.path / "rendezvous").touch()
    assert written["env"]["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{written['scratch']}/rendezvous"
    assert Path(written["scratch"]).parent == tmp_path
    server.stop()


class FakeSupervisor:
    """Stands in for the supervisor process. Records what it receives."""

    def __init__(self, sent: dict) -> None:
        self.pid, self.stdin, self._sent = 2**22 + 1, self, sent

    def write(self, line: bytes) -> None:
        self._sent |= json.loads(line)

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def poll(self) -> int:
        return 0

    def wait(self, timeout: float) -> int:
        return 0
