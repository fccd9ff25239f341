"""`mrl train cluster=slurm`: the batch script that is written, and how it is submitted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config import hydra_entry
from mrl.config.process_schema import ClusterConfig
from mrl.config.schema import Config
from mrl.config.validate import check_cluster
from mrl.core.code_locations import PACKAGE_ROOT, SLURM
from mrl.launch import slurm_job
from mrl.placement.ray_cluster import missing_nodes
from mrl.placement.resource_pools import gpus_of_nodes

SIZE = dict(scheduler="slurm", nodes=2, gpus_per_node=4)


def job(run_dir=Path("/runs/mine"), overrides=(), **keys):
    return slurm_job.make_job(ClusterConfig(**SIZE | keys), "mine", run_dir, overrides)


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_options_are_those_of_the_config_as_sbatch_has_them():
    own = dict(
        account="lab", open_mode="append", exclusive=True, requeue=False, mail_type=None, nice=0, comment='a "b"'
    )
    options = directives(job(slurm=own | dict(partition="gpu", time="2-12")).script)
    assert sorted(options) == sorted(
        [
            "--job-name=mrl-mine",
            f"--chdir={os.getcwd()}",
            "--output=/runs/mine/logs/slurm_%j.log",
            "--nodes=2",
            "--gpus-per-node=4",
            "--ntasks-per-node=1",
            "--partition=gpu",
            "--time=2-12",
            "--account=lab",
            "--open-mode=append",
            "--exclusive",
            "--nice=0",
            r'--comment="a \"b\""',
        ]
    )


def test_without_gpus_none_are_asked_for():
    assert not any("gpus" in option for option in directives(job(gpus_per_node=0).script))


def test_parts_of_a_heterogeneous_job_differ_in_what_they_say():
    text = job(slurm=dict(account="lab"), components=[dict(constraint="l40s", gpus_per_node=8), dict(nodes=3)]).script
    first, second, third = (directives(part) for part in text.split("#SBATCH hetjob"))
    assert {"--nodes=2", "--gpus-per-node=4", "--account=lab", "--job-name=mrl-mine"} <= set(first)
    assert set(second) == {
        "--nodes=1",
        "--gpus-per-node=8",
        "--ntasks-per-node=1",
        "--account=lab",
        "--constraint=l40s",
    }
    assert {"--nodes=3", "--gpus-per-node=4"} <= set(third)
    parts = [dict(constraint="l40s", gpus_per_node=8), dict(nodes=3)]
    assert gpus_of_nodes(ClusterConfig(**SIZE, components=parts)) == [4, 4, 8, 4, 4, 4]


ODD = [
    "a=b c",
    "reward.url='http://x/?a=1&b=2'",
    "data.columns={prompt: q}",
    "key=${oc.env:HOME}",
    'x="$(exit 1)" `x`',
    "--",
]


def test_the_job_calls_the_command_with_the_very_arguments(tmp_path, monkeypatch):
    """The arguments have quotes, spaces and characters that a shell expands. Bash runs the script, as under Slurm."""
    (tmp_path / "slurm").mkdir()
    target = tmp_path / "slurm/train.sbatch"
    target.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    target.chmod(0o755)
    monkeypatch.setattr(slurm_job, "SLURM", tmp_path / "slurm")
    monkeypatch.setenv("MRL_MOUNTS", "/data,/my scratch")
    monkeypatch.delenv("MRL_CONTAINER", raising=False)
    script = slurm_job.write_script(job(tmp_path / "run", ODD))
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MRL_")}
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, env=plain, check=True, timeout=60)
    arguments, env = json.loads(done.stdout)
    assert arguments == [*ODD, f"run.dir={tmp_path / 'run'}"]
    assert (
        env["MRL_SCRIPTS"] == str(tmp_path / "slurm")
        and env["MRL_CHECKOUT"] == str(PACKAGE_ROOT)
        and env["MRL_PYTHON"] == sys.executable
    )
    assert env["MRL_MOUNTS"] == "/data,/my scratch"


def test_in_a_container_python_is_its_own(monkeypatch):
    monkeypatch.setenv("MRL_CONTAINER", "/images/mrl.sif")
    text = job().script
    assert "export MRL_CONTAINER=/images/mrl.sif" in text and "MRL_PYTHON" not in text


def test_every_setting_of_a_job_is_written_into_its_script():
    text = (SLURM / "env.sh").read_text()
    assert set(re.findall(r'^: "\$\{MRL_(\w+):=', text, re.MULTILINE)) - {"CHECKOUT"} == set(slurm_job.SETTINGS)


def test_a_folder_of_any_name_is_written_so_that_it_is_read(tmp_path):
    made = job(tmp_path / "50% lr=1")
    (run_dir,) = [line for line in made.arguments if line.startswith("run.dir=")]
    assert run_dir == f'run.dir="{tmp_path}/50% lr=1"'
    assert made.components[0]["output"] == f"{tmp_path}/50%% lr=1/logs/slurm_%j.log"
    assert f"{tmp_path}/50% lr=1/logs/slurm_7.log" in slurm_job.submission_message(made, "7")


def test_what_was_heeded_at_submission_is_not_in_the_job():
    overrides = ["run.dir=old", "++resume='never'", "cluster.dry_run=true", "optim.lr=1", "resume=other/run"]
    assert job(overrides=overrides).arguments == ("optim.lr=1", "resume=other/run", "run.dir=/runs/mine")


def test_a_job_of_another_command_says_so_to_the_batch_script_and_to_the_user():
    made = slurm_job.make_job(ClusterConfig(**SIZE), "mine", Path("/runs/mine"), ["generate.samples=4"], "generate")
    assert "export MRL_COMMAND=generate\n" in made.script and "# Written by `mrl generate`." in made.script
    told = slurm_job.submission_message(made, "7")
    assert "(finished files are kept; then the job is queued again)" in told
    assert "run the same `mrl generate` command again with run.dir=/runs/mine)" in told
    assert "MRL_COMMAND" not in job().script and "saves a checkpoint" in slurm_job.submission_message(job(), "7")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(slurm=dict(nodes=3)), "cluster.slurm.nodes=3: this option has its own key; use cluster.nodes"),
        (dict(slurm=dict(array="0-9")), "cluster.slurm.array: not allowed, because a job trains one run"),
        (dict(slurm={"a b": 1}), "expected the name of an option of sbatch"),
        (dict(slurm=dict(comment="a\nb")), "a value in one line"),
        (dict(components=[dict(constraint=["x"])]), "cluster.components.constraint"),
    ],
)
def test_options_that_cannot_be_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        job(**keys)


@pytest.mark.parametrize("time", ["0:30:00", "24:00:00", "2-12", "2-12:30", "1-00:00:00", "UNLIMITED", None])
def test_time_limits(time):
    check_cluster(ClusterConfig(**SIZE, slurm=dict(time=time)))


@pytest.mark.parametrize("time", ["14400", "4:00", "4h", "1 day"])
def test_a_time_limit_that_could_mean_something_else_is_refused(time):
    """YAML reads 4:00:00 as 14400, and Slurm would read this number as minutes. Slurm would read 4:00 as four minutes."""
    with pytest.raises(ValueError, match="expected hours:minutes:seconds"):
        check_cluster(ClusterConfig(**SIZE, slurm=dict(time=time)))


@pytest.mark.parametrize(
    "keys", [dict(slurm=dict(time="1:00:00")), dict(slurm=dict(qos="x")), dict(components=[{}]), dict(dry_run=True)]
)
def test_keys_of_a_job_without_a_job_are_refused(keys):
    check_cluster(Config().cluster)
    with pytest.raises(ValueError, match="add cluster=slurm"):
        check_cluster(ClusterConfig(**keys))


def test_another_scheduler_is_refused():
    with pytest.raises(ValueError, match=r"cluster.scheduler='pbs': expected slurm"):
        hydra_entry.compose_config(["cluster.scheduler=pbs"])


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """`sbatch(text)` puts a program `sbatch` with this shell code into the search path."""

    def put(text: str) -> None:
        (tmp_path / "bin").mkdir()
        (path := tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return put


def test_a_job_is_submitted_with_the_environment_of_the_command(sbatch, tmp_path, monkeypatch):
    sbatch(f'echo "$2" >{tmp_path}/script; env >{tmp_path}/env; echo "77;cluster"')
    monkeypatch.setenv("SET_BY_A_LIBRARY", "1")
    found = job(tmp_path / "run")
    assert slurm_job.submit(found) == "77"
    assert (tmp_path / "script").read_text().strip() == str(tmp_path / "run/job.sbatch")
    assert (tmp_path / "run/job.sbatch").read_text() == found.script and (tmp_path / "run/logs").is_dir()
    assert "SET_BY_A_LIBRARY" not in (tmp_path / "env").read_text()
    told = slurm_job.submission_message(found, "77")
    assert f"tail -F {tmp_path / 'run/logs/slurm_77.log'}" in told and "scancel 77" in told


def test_what_sbatch_refuses_is_a_mistake_of_the_users(sbatch, tmp_path):
    sbatch('echo "sbatch: error: invalid partition specified: gp" >&2; exit 1')
    with pytest.raises(ValueError, match=r"refused .*job.sbatch: sbatch: error: invalid partition specified: gp"):
        slurm_job.submit(job(tmp_path / "run"))


def test_without_sbatch_the_message_says_where_to_call_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="on a login node of the cluster, or add --dry-run"):
        slurm_job.submit(job(tmp_path / "run"))


def test_nodes_that_have_not_joined_are_named():
    seen = iter([set(), {"n1"}, {"n1", "n3", "other"}])
    assert missing_nodes(["n1", "n3"], lambda: next(seen), timeout_s=60) == []
    assert missing_nodes(["n1", "n2", "n3"], lambda: {"n1"}, timeout_s=0) == ["n2", "n3"]
