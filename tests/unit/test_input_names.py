"""Names of models and data: ids of the Hub that are in its cache, URLs, and paths. No test needs a network."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from planned_runs import MODELS
from published_dense_configs import published

from mrl.config import hydra_entry
from mrl.config.input_names import resolve_data, resolve_inputs, resolve_model
from mrl.sweep import launcher

FIRST, SECOND = "1" * 40, "2" * 40  # commits

PROGRAM = """
import json, sys
from mrl.config.input_names import resolve_data, resolve_model
for line in sys.stdin:
    kind, name = json.loads(line)
    try:
        found = resolve_model(name) if kind == "model" else resolve_data(name, "data." + kind, kind)
    except ValueError as error:
        found = str(error)
    print(json.dumps(found))
"""


def cache_repository(home: Path, kind: str, repo_id: str, commits: dict[str, dict[str, str]]) -> None:
    """Write commits (name -> files) as the Hub's cache stores them: blobs, snapshots with links to blobs, and refs.

    The branch main is the last commit.
    """
    folder = home / "hub" / f"{kind}--{repo_id.replace('/', '--')}"
    for commit, files in commits.items():
        for name, content in files.items():
            blob = folder / "blobs" / hashlib.sha256(content.encode()).hexdigest()
            link = folder / "snapshots" / commit / name
            for path in (blob, link):
                path.parent.mkdir(parents=True, exist_ok=True)
            blob.write_text(content)
            link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(list(commits)[-1])


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Return HF_HOME with a model and a data set in its cache."""
    home = tmp_path_factory.mktemp("hf")
    config = json.dumps(published(MODELS["Qwen3-0.6B"]))
    cache_repository(home, "models", "lab/tiny", {commit: {"config.json": config} for commit in (FIRST, SECOND)})
    names = (
        "main/train-0.parquet",
        "main/train-1.parquet",
        "main/test-0.parquet",
        "other/train-0.parquet",
        "README.md",
    )
    cache_repository(home, "datasets", "lab/sums", {FIRST: {name: name for name in names}})
    return home


def offline(home: Path) -> dict[str, str]:
    return {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def resolved(home):
    """Resolve all names in one new process, because huggingface_hub reads HF_HOME only at its import."""
    (home / "work/lab").mkdir(parents=True)
    (home / "work/lab/local").mkdir()
    names = [
        ("model", "lab/tiny"),
        ("model", f"lab/tiny@{FIRST}"),
        ("model", "lab/tiny@v9"),
        ("model", "lab/unknown"),
        ("model", "lab/local"),
        ("train", "lab/sums"),
        ("test", "lab/sums"),
        ("train", "lab/sums@main:main/train*"),
        ("train", "lab/sums:none*"),
        ("train", "lab/missing"),
        ("train", "data/missing.jsonl"),
    ]
    words = "".join(json.dumps(pair) + "\n" for pair in names)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=words,
        env=offline(home),
        cwd=home / "work",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.extended
def test_an_id_is_the_snapshot_in_the_cache(home, resolved):
    snapshots = home / "hub/models--lab--tiny/snapshots"
    assert resolved["model", "lab/tiny"] == str(snapshots / SECOND)
    assert resolved["model", f"lab/tiny@{FIRST}"] == str(snapshots / FIRST)
    assert resolved["model", "lab/local"] == "lab/local", "a folder on this machine comes first"


@pytest.mark.extended
def test_an_id_of_data_is_the_files_that_match(home, resolved):
    folder = home / f"hub/datasets--lab--sums/snapshots/{FIRST}"
    names = lambda *names: [str(folder / name) for name in names]  # noqa: E731
    train = names("main/train-0.parquet", "main/train-1.parquet")
    assert resolved["train", "lab/sums"] == [*train, *names("other/train-0.parquet")]
    assert resolved["test", "lab/sums"] == names("main/test-0.parquet")
    assert resolved["train", "lab/sums@main:main/train*"] == train
    assert "no parquet or jsonl file of lab/sums matches 'none*'" in resolved["train", "lab/sums:none*"]
    assert resolved["train", "data/missing.jsonl"] == ["data/missing.jsonl"], "later checks say that it is missing"


@pytest.mark.extended
def test_without_a_network_one_line_says_how_to_fetch(resolved):
    for (kind, name), command in {
        ("model", "lab/unknown"): "hf download lab/unknown",
        ("model", "lab/tiny@v9"): "hf download lab/tiny --revision v9",
        ("train", "lab/missing"): "hf download lab/missing --repo-type dataset",
    }.items():
        said = resolved[kind, name]
        assert f"={name}: there is no such path" in said and f"run `{command}`" in said and "\n" not in said


@pytest.mark.extended
def test_commands_take_an_id(home):
    def run(*words: str):
        command = [sys.executable, "-m", "mrl.cli", *words]
        return subprocess.run(
            command, env=offline(home), cwd=home / "work", capture_output=True, text=True, timeout=120
        )

    done = run("plan", "memory", "model.path=lab/tiny", "cluster=h100")
    assert done.returncode == 0 and "weights" in done.stdout, done.stderr
    refused = run("train", "model.path=lab/unknown", "data.train=[x.jsonl]", "algorithm=grpo", "reward=gsm8k")
    assert refused.returncode == 2 and "run `hf download lab/unknown`" in refused.stderr
    assert len([line for line in refused.stderr.splitlines() if line.startswith("mrl: ")]) == 1, refused.stderr
    assert len(refused.stderr.splitlines()) <= 3, refused.stderr


def test_a_url_is_copied_once_and_again_after_a_change(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remote = fsspec.filesystem("memory")
    remote.pipe({"/names/model/config.json": b"{}", "/names/model/inner/x.txt": b"x", "/names/rows.jsonl": b"1"})
    folder = Path(resolve_model("memory://names/model"))
    assert (folder / "config.json").read_text() == "{}" and (folder / "inner/x.txt").read_text() == "x"
    assert resolve_model("memory://names/model") == str(folder)
    (file,) = resolve_data("memory://names/rows.jsonl", "data.train", "train")
    assert Path(file).name == "rows.jsonl" and Path(file).read_text() == "1"
    remote.pipe("/names/rows.jsonl", b"22")
    (changed,) = resolve_data("memory://names/rows.jsonl", "data.train", "train")
    assert changed != file and Path(changed).read_text() == "22"
    assert resolve_model(f"file://{tmp_path}") == str(tmp_path)


@pytest.mark.parametrize("url", ["memory://names/nothing", "nosuch://host/file", "wandb://run/file"])
def test_a_url_that_cannot_be_read_is_an_error_with_the_key(url, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=f"^data.train={url}: "):
        resolve_data(url, "data.train", "train")


@pytest.mark.extended
def test_all_keys_of_a_config_are_resolved_except_files_that_data_inputs_makes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec.filesystem("memory").pipe({f"/all/{name}.jsonl": b"1" for name in "abcde"} | {"/all/m/config.json": b"{}"})
    keys = ["experiment=quickstart", "run.dir=x", "data.inputs.folder=made/here"]
    untouched = hydra_entry.compose_config(hydra_entry.check_overrides(keys))
    assert resolve_inputs(untouched) == untouched and untouched.model.path == "made/here/model"
    url = lambda name: f"memory://all/{name}"  # noqa: E731
    keys += [f"{key}={url('m')}" for key in ("model.path", "roles.teacher.path", "critic.path")]
    keys += [f"data.test=[{url('a.jsonl')}]", f"sft.train={url('b.jsonl')}", f"sft.test={url('e.jsonl')}"]
    keys += [f"data.test_sets.one=[{url('c.jsonl')}]", f"data.mixture.two.files=[{url('d.jsonl')}]"]
    config = resolve_inputs(hydra_entry.compose_config(hydra_entry.check_overrides(keys)))
    models = {config.model.path, config.roles["teacher"]["path"], config.critic.path}
    files = [*config.data.test, config.sft.train, *config.data.test_sets["one"], *config.data.mixture["two"]["files"]]
    files.append(config.sft.test or "")
    assert {Path(path).name for path in models} == {"m"} and all(map(os.path.isdir, models))
    assert [Path(path).name for path in files] == [f"{name}.jsonl" for name in "abcde"] and all(
        map(os.path.isfile, files)
    )


def test_the_tokenizer_of_a_served_reward_model_is_in_the_fetched_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec.filesystem("memory").pipe({"/served/m/config.json": b"{}"})
    keys = [
        "experiment=quickstart",
        "run.dir=x",
        "reward=served_reward_model",
        "roles.reward_model.path=memory://served/m",
    ]
    keys += ["data.test_sets.one={files: [a.jsonl], reward: ${reward}}"]
    config = resolve_inputs(hydra_entry.compose_config(hydra_entry.check_overrides(keys)))
    folder = config.roles["reward_model"]["path"]
    assert (
        Path(folder).is_dir()
        and config.reward["tokenizer"] == config.data.test_sets["one"]["reward"]["tokenizer"] == folder
    )


@pytest.mark.parametrize("etag", [True, False], ids=["with ETag", "without ETag"])
def test_a_file_of_a_web_server_is_fetched_again_after_a_change(etag, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content, fetched = [b'{"a": 1}\n'], []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content[0])))
            if etag:
                self.send_header("ETag", hashlib.md5(content[0]).hexdigest())
            self.end_headers()

        def do_GET(self):
            fetched.append(self.path)
            self.do_HEAD()
            self.wfile.write(content[0])

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/rows.jsonl"
        (first,) = resolve_data(url, "data.train", "train")
        assert Path(first).read_bytes() == content[0] and len(fetched) == 1
        (again,) = resolve_data(url, "data.train", "train")
        assert Path(again).read_bytes() == content[0] and len(fetched) == (1 if etag else 2)
        content[0] = b'{"a": 2}\n'
        (changed,) = resolve_data(url, "data.train", "train")
        assert Path(changed).read_bytes() == content[0]
        server.shutdown()


def test_the_points_of_a_sweep_take_the_same_names(tmp_path, monkeypatch):
    planned = []

    def plan(config):
        planned.append(config.model.path)
        raise ValueError("enough")

    monkeypatch.setattr(launcher, "plan_fitting_run", plan)
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="enough"):
        launcher.validate_point(tmp_path, [f"model.path=file://{tmp_path}/model", "run.dir=x"])
    assert planned == [str(tmp_path / "model")]
