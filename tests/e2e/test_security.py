"""Processes of a run accept no request without a key, listen only on loopback, and write no secret to disk."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from mrl_runs import select_processes, tagged

from mrl.config.secrets import engine_key

pytestmark = pytest.mark.extended

OPEN_PATHS = ("/health", "/ready", "/metrics")
"""Paths that SGLang answers without a key; they only tell whether the engine works."""


def listening(processes: list[psutil.Process]) -> dict[str, set[str]]:
    """Return address -> names of the processes that listen on it."""
    found: dict[str, set[str]] = {}
    for process in processes:
        try:
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(connection.laddr.ip.removeprefix("::ffff:"), set()).add(process.name())
        except psutil.Error:  # the process ended meanwhile
            continue
    return found


def test_an_engine_refuses_requests_without_the_key(engine):
    url, key = engine.server.url, engine_key()
    paths = httpx.get(f"{url}/openapi.json", headers={"authorization": f"Bearer {key}"}, timeout=120).json()["paths"]
    closed = {path: methods for path, methods in paths.items() if not path.startswith(OPEN_PATHS)}
    assert {
        "/generate",
        "/update_weights_from_tensor",
        "/update_weights_from_disk",
        "/update_weight_version",
    } <= closed.keys()
    assert {"/pause_generation", "/begin_weight_update", "/flush_cache", "/server_info"} <= closed.keys()
    wrong = {"authorization": "Bearer wrong"}
    with httpx.Client(base_url=url, timeout=120) as no_key, httpx.Client(headers=wrong, timeout=120) as wrong_key:
        for path, methods in closed.items():
            for method in methods:
                assert no_key.request(method, path, json={}).status_code == 401, (method, path)
        assert wrong_key.post(f"{url}/generate", json={}).status_code == 401
    assert engine.client.health() and engine.client.weight_version()


def test_an_engine_does_not_reveal_its_key(engine):
    key = engine_key()
    assert key not in repr(engine.client.server_info())
    assert key not in engine.server.log_path.read_text(errors="replace")
    processes = engine.server.processes()
    assert len(processes) >= 3 and not select_processes(processes, lambda process: key in " ".join(process.cmdline()))
    assert set(listening(processes)) == {"127.0.0.1"}
    assert [
        path for path in engine.server._scratch.path.rglob("*") if path.is_file() and key.encode() in path.read_bytes()
    ] == []


LISTENERS = {"gcs_server", "raylet", "sglang::scheduler"}  # names of processes that listen on an address in every run
QUERY_RAY = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_keys(b"", timeout=20)
"""


def query_ray(address: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return subprocess.run(
        [sys.executable, "-c", QUERY_RAY, address], env=inherited | env, capture_output=True, text=True, timeout=400
    )


def ray_head(processes: list[psutil.Process]) -> tuple[str, Path]:
    """Return the address of the Ray head and the folder of Ray's logs."""
    (server,) = select_processes(processes, lambda process: process.name() == "gcs_server")
    (port,) = {c.laddr.port for c in server.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    (logs,) = [word.partition("=")[2] for word in server.cmdline() if word.startswith("--log_dir=")]
    return f"127.0.0.1:{port}", Path(logs)


def find_secrets(folder: Path, secrets: dict[str, str]) -> list[tuple[str, str]]:
    """Return (file, name of the secret) for each secret in a file."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [(str(path), name) for path in files for name, text in secrets.items() if text.encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def inspected(start_mrl, quickstart):
    """A run with verbose logs and with secrets in environment and config, and the observations while the run was alive."""
    planted = dict(
        JUDGE_API_KEY="planted-judge", MRL_ENGINE_KEY="planted-engine-key", RAY_AUTH_TOKEN="planted-" + "f" * 32
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in planted.items():
            patch.setenv(name, value)
        secret = "sglang.served_model_name='${oc.env:JUDGE_API_KEY}'"  # SGLang logs it, and wandb gets the config
        more = ["trainer.max_steps=100000", "trainer.save=false", "sglang.log_level=info", "tracking.backends=[wandb]"]
        run = start_mrl("train", *quickstart, secret, *more)
    end = time.monotonic() + 720
    while not (run.folder / "metrics.jsonl").exists() or not run.metrics():
        assert run.process.poll() is None and time.monotonic() < end, run.output()
        time.sleep(0.2)
    listeners: dict[str, set[str]] = {}
    while (
        not set().union(*listeners.values()) >= LISTENERS
    ):  # an engine that is being replaced does not listen for a while
        assert run.process.poll() is None and time.monotonic() < end, (listeners, run.output())
        for where, names in listening(tagged(run.tag)).items():
            listeners.setdefault(where, set()).update(names)
        time.sleep(0.2)
    address, logs = ray_head(tagged(run.tag))
    without_token, with_token = (
        query_ray(address, {"RAY_AUTH_MODE": "disabled"}),
        query_ray(address, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": planted["RAY_AUTH_TOKEN"]}),
    )
    run.process.terminate()
    run.finish(60)
    return dict(
        run=run, listeners=listeners, without_token=without_token, with_token=with_token, planted=planted, logs=logs
    )


def test_a_run_on_one_machine_listens_on_loopback_only(inspected):
    assert set(inspected["listeners"]) == {"127.0.0.1"}, inspected["listeners"]


def test_ray_refuses_requests_without_the_token_of_the_run(inspected):
    with_token, without_token = inspected["with_token"], inspected["without_token"]
    assert with_token.returncode == 0, with_token.stderr
    assert without_token.returncode != 0 and "InvalidAuthToken" in without_token.stderr


def test_other_users_cannot_enter_the_folder_of_ray(inspected):
    folder = next(path for path in inspected["logs"].parents if path.name.startswith("mrl-ray-"))
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.getuid())
    assert inspected["logs"].is_relative_to(folder) and len(list(inspected["logs"].iterdir())) > 3


def test_no_secret_is_written_by_a_run(inspected):
    run = inspected["run"]
    assert find_secrets(run.folder, inspected["planted"]) == []
    assert (inspected["logs"] / "gcs_server.out").exists() and find_secrets(
        inspected["logs"], inspected["planted"]
    ) == []
    assert "oc.env:JUDGE_API_KEY" in (run.folder / "hydra/config.yaml").read_text(), "the config names the variable"
    assert "server_args=" in (run.folder / "logs/engine_0.log").read_text(), "SGLang logged its arguments"
    assert list(run.folder.glob("wandb/offline-run-*")), "wandb recorded the config"
