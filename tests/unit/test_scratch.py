"""What a server leaves behind is removed also where its supervisor was killed; what is in use is not."""

import json
import os
import subprocess
import tempfile
import uuid
from pathlib import Path

import pytest

from mrl.rollout.engines.leases import ScratchDir
from mrl.rollout.engines.server import EngineServer


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("mrl.rollout.engines.leases.MAX_PATH", 1000)


@pytest.fixture
def left_over():
    """A file that a killed scheduler left in shared memory."""
    path = Path(f"/dev/shm/sglang_loads_test_{uuid.uuid4().hex}")
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_a_folder_whose_holder_was_killed_goes_when_the_next_is_made(left_over, tmp_path):
    scratch = ScratchDir()
    kept = tmp_path / "not_ours"
    kept.touch()
    (scratch.path / "shared_memory").write_text(f"{left_over}\n{kept}\n")
    holder = subprocess.Popen(["sleep", "60"], pass_fds=[scratch.fd])
    scratch.release()
    ScratchDir().release()
    assert scratch.path.exists() and left_over.exists(), "its holder lives"
    holder.kill()
    holder.wait()
    new = ScratchDir()
    assert not scratch.path.exists() and not left_over.exists() and kept.exists()
    assert new.path.exists()
    new.release()


def test_a_folder_that_is_just_being_made_is_left_alone(tmp_path):
    made = tmp_path / "mrl-engine-new"
    made.mkdir()
    os.close(ScratchDir().fd)
    assert made.exists()


def test_the_ranks_of_a_server_meet_in_its_own_folder(tmp_path, monkeypatch):
    """Not in one that every server of the host shares, and any user of it can write to."""
    written = {}
    server = EngineServer({"model_path": "m"}, tmp_path / "engine.log")
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: Supervisor(written))
    server.start()
    (server._scratch.path / "rendezvous").touch()
    assert written["env"]["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"file://{written['scratch']}/rendezvous"
    assert Path(written["scratch"]).parent == tmp_path
    server.stop()


class Supervisor:
    """Takes what a server's supervisor is told; there is no server."""

    def __init__(self, told: dict) -> None:
        self.pid, self.stdin, self._told = 2**22 + 1, self, told

    def write(self, line: bytes) -> None:
        self._told |= json.loads(line)

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def poll(self) -> int:
        return 0

    def wait(self, timeout: float) -> int:
        return 0
