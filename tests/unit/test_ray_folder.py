import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest
from ray._common.utils import try_to_create_directory

from mrl.config.process_schema import ClusterConfig
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


@pytest.mark.parametrize(("timeout_s", "node_start_s"), [(600.0, 600.0), (1.0, ray_cluster.MIN_NODE_START_S)])
def test_a_node_that_does_not_start_in_time_is_reported_with_its_logs_and_the_key(monkeypatch, timeout_s, node_start_s):
    limits = []

    def local_start(log_to_driver: bool, node_start_s: float):
        limits.append(node_start_s)
        return nullcontext()

    def init(**options):
        raise RuntimeError("The current node timed out.")

    monkeypatch.setattr(ray_cluster, "_local_start", local_start)
    monkeypatch.setattr(ray_cluster.ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_restrict_to_loopback", lambda: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    message = f"did not start .* timed out.*{ray_cluster.RAY}/session_latest/logs.*raise cluster.start_timeout_s={timeout_s:g}"
    config = ClusterConfig(start_timeout_s=timeout_s)
    with pytest.raises(ProcessesLostError, match=message), ray_cluster.ray_cluster(config):
        pass
    assert limits == [node_start_s]


@pytest.mark.parametrize(("attempts", "limit_s"), [(4, 60.0), (10**9, 0.5)], ids=["in time", "too late"])
def test_ray_waits_for_a_slow_node_up_to_a_limit(monkeypatch, attempts, limit_s):
    calls = []

    def get_node(address: str, node: str) -> str:
        calls.append((address, node))
        if len(calls) < attempts:
            raise RuntimeError("no node yet")
        return "node"

    monkeypatch.setattr(ray_cluster.services, "get_node", get_node)
    with ray_cluster._local_start(log_to_driver=False, node_start_s=limit_s):
        if limit_s > 1:
            assert ray_cluster.services.get_node("address", "node") == "node" and len(calls) == attempts
        else:
            with pytest.raises(RuntimeError, match="no node yet"):
                ray_cluster.services.get_node("address", "node")
    assert ray_cluster.services.get_node is get_node and set(calls) == {("address", "node")}
