import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from ray._common.utils import try_to_create_directory

from mrl.config.process_schema import ClusterConfig
from mrl.core.processes import FIRST_PORT, LAST_PORT
from mrl.core.run_errors import ProcessesLostError
from mrl.placement import ray_cluster
from mrl.placement.ray_cluster import private_ray_folder


@pytest.fixture
def short_folder(monkeypatch, tmp_path_factory):
    """Make a folder with a short path. Others can enter it, so private_ray_folder creates a private folder inside."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="m") as folder:
        Path(folder).chmod(0o755)
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def test_the_folder_of_ray_is_private_and_is_used_again(short_folder):
    previous = os.umask(0)
    try:
        folder = private_ray_folder()
    finally:
        os.umask(previous)
    assert folder == short_folder / f"mrl-ray-{os.getuid()}/r"
    assert stat.filemode(folder.parent.stat().st_mode) == "drwx------"
    try_to_create_directory(str(folder))  # Ray calls this function, which gives the folder the mode 777
    assert folder.is_dir() and private_ray_folder() == folder
    assert stat.filemode(folder.parent.stat().st_mode) == "drwx------"


def test_a_folder_that_only_its_user_can_enter_is_used_itself(short_folder, monkeypatch):
    """A site may give each job a private folder. Its path may be so long that there is no room for one more name."""
    chosen = short_folder / "job_12345678".ljust(ray_cluster.MAX_PATH_BYTES - len(f"{short_folder}//r"), "x")
    chosen.mkdir(mode=0o700)
    monkeypatch.setenv("RAY_TMPDIR", str(chosen))
    assert private_ray_folder() == chosen / "r"
    chosen.chmod(0o750)
    with pytest.raises(ValueError, match="run `chmod 700` on it"):
        private_ray_folder()


def test_a_socket_of_ray_fits_below_the_longest_folder():
    longest = "/" + "x" * (ray_cluster.MAX_PATH_BYTES - 1)
    assert len(f"{longest}/session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store.9") <= 107


def test_a_folder_that_others_can_enter_or_have_prepared_is_refused(short_folder, tmp_path):
    folder = short_folder / f"mrl-ray-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ValueError, match=r"has the mode drwxr-xr-x .* expected a folder with the mode drwx------"):
        private_ray_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="has the mode lrwxrwxrwx"):
        private_ray_folder()


def test_a_long_ray_tmpdir_is_refused_and_a_long_tmpdir_is_replaced(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 60)
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(ValueError, match="Set RAY_TMPDIR to a shorter path"):
        private_ray_folder()
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setattr(ray_cluster.tempfile, "gettempdir", lambda: str(long))
    assert private_ray_folder() == Path(f"/tmp/mrl-ray-{os.getuid()}/r")


def test_a_local_cluster_writes_into_the_private_folder(short_folder, monkeypatch):
    """ray.init gets the folder. The test does not start Ray."""
    given = {}

    def init(**options):
        given.update(options)
        raise ValueError("no cluster in this test")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_restrict_to_loopback", lambda: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(ValueError, match="no cluster in this test"), ray_cluster.ray_cluster(ClusterConfig()):
        pass
    assert given["_temp_dir"] == str(short_folder / f"mrl-ray-{os.getuid()}/r")


def test_a_local_cluster_gets_an_object_store_of_that_size(short_folder, monkeypatch):
    given = {}

    def init(**options):
        given.update(options)
        raise ValueError("no cluster in this test")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_restrict_to_loopback", lambda: None)
    monkeypatch.setattr(ray_cluster, "estimate_available_memory", lambda: 2000 * 2**30)
    monkeypatch.setattr(ray_cluster, "_free_bytes", lambda folder: 1000 * 2**30)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(ValueError, match="no cluster in this test"), ray_cluster.ray_cluster(ClusterConfig()):
        pass
    assert given["object_store_memory"] == 200 * 2**30


def test_the_object_store_grows_with_the_machine_but_is_never_smaller_than_512_mib():
    gib = 2**30
    assert ray_cluster.object_store_bytes(2000 * gib, 1000 * gib) == 200 * gib
    assert ray_cluster.object_store_bytes(2000 * gib, 64 * gib) == 32 * gib
    for memory, shared_memory in ((2000 * gib, 64 * 2**20), (2 * gib, 2 * gib), (64 * gib, 0), (-gib, gib)):
        assert ray_cluster.object_store_bytes(memory, shared_memory) == gib // 2


NODE_ID = "7" * 56


class Raylet:
    """A process of which Ray has started; `returncode` None: it is alive."""

    def __init__(self, returncode: int | None) -> None:
        self.process, self.returncode = self, returncode

    def poll(self) -> int | None:
        return self.returncode


@pytest.mark.parametrize(
    ("attempts", "limit_s", "status", "message"),
    [
        (4, 60.0, None, None),
        (
            10**9,
            0.3,
            None,
            r"did not start on this machine: raylet did not register its node within 0.3 s\. Ray's logs are in",
        ),
        (
            10**9,
            60.0,
            -6,
            r"did not start on this machine: raylet ended with status -6; raylet\.err says why\. Ray's logs are in",
        ),
    ],
    ids=["in time", "too late", "raylet ended"],
)
def test_ray_init_waits_for_a_slow_node_up_to_a_limit_and_as_long_as_raylet_lives(
    monkeypatch, tmp_path, attempts, limit_s, status, message
):
    calls, given_ports = [], []

    def get_node(address: str, node: str) -> str:
        calls.append((address, node))
        if len(calls) < attempts:
            raise RuntimeError("no node yet")
        return "node"

    def start_raylet(node_id: str, session_dir: str, runtime_env_agent_port: int) -> Raylet:
        given_ports.append(runtime_env_agent_port)
        return Raylet(status)

    def init(**options):
        node_params = ray_cluster.parameter.RayParams()
        ray_cluster.services.start_raylet(
            NODE_ID, str(tmp_path), runtime_env_agent_port=node_params.runtime_env_agent_port
        )
        assert ray_cluster.services.get_node("address", "node") == "node"
        raise ValueError("the node has started")

    monkeypatch.setattr(ray_cluster, "NODE_START_S", limit_s)
    monkeypatch.setattr(ray_cluster.services, "get_node", get_node)
    monkeypatch.setattr(ray_cluster.services, "start_raylet", start_raylet)
    monkeypatch.setattr(ray_cluster.ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_restrict_to_loopback", lambda: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    expected = (
        pytest.raises(ProcessesLostError, match=message) if message else pytest.raises(ValueError, match="has started")
    )
    with expected, ray_cluster.ray_cluster(ClusterConfig()):
        pass
    assert ray_cluster.services.get_node is get_node and set(calls) == {("address", "node")}
    assert len(calls) == attempts or message
    written = {path.name: int(path.read_text()) for path in tmp_path.iterdir()}
    runtime_env_agent = written.pop(f"runtime_env_agent_port_{NODE_ID}")
    assert (
        runtime_env_agent in range(FIRST_PORT, LAST_PORT)
        and given_ports == [runtime_env_agent]
        and set(written.values()) == {-1}
        and len(written) == 3
    )


SLOW_AGENTS = """
import sys, time
if any(name in argument for argument in sys.orig_argv for name in ("dashboard/agent.py", "runtime_env/agent/main.py")):
    time.sleep(600)
"""


@pytest.mark.extended
def test_ray_starts_although_its_agents_are_slow(tmp_path):
    """Without the files that mrl writes, raylet ends after 15 s."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    code = (
        "import ray; from mrl.placement.ray_cluster import *\n"
        "with ray_cluster(ClusterConfig(), 1):\n"
        "    print(ray.get(ray.remote(lambda: 42).remote()))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and result.stdout.split() == ["42"], result.stderr
