"""`mrl train cluster=slurm` from the command line: mistakes are reported before anything is submitted."""

import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """`train(argument, ..., command="train")` -> (status, output, whether the stand-in for sbatch was called)."""
    base = tmp_path_factory.mktemp("submission")
    (base / "bin").mkdir()
    (base / "bin/sbatch").write_text(f'#!/bin/sh\necho "$@" >>{base}/submitted; echo 77\n')
    (base / "bin/sbatch").chmod(0o755)

    def run(*arguments: str, command: str = "train") -> tuple[int, str, bool]:
        (base / "submitted").unlink(missing_ok=True)
        line = [
            sys.executable,
            "-m",
            "mrl.cli",
            command,
            "experiment=quickstart",
            f"run.dir={base / 'run'}",
            *arguments,
        ]
        env = os.environ | {"PATH": f"{base / 'bin'}:{os.environ['PATH']}"}
        env |= {"RAY_ADDRESS": "unreachable:1"}  # a connection to Ray would fail
        done = subprocess.run(
            [*line, f"data.inputs.folder={base / 'inputs'}"], env=env, capture_output=True, text=True, timeout=300
        )
        return done.returncode, done.stdout + done.stderr, (base / "submitted").exists()

    return run


JOB = ("cluster=slurm", "cluster.nodes=1", "cluster.gpus_per_node=2")


@pytest.mark.extended
def test_a_job_is_submitted_and_the_output_says_how_to_follow_it(train):
    status, said, submitted = train(*JOB, "cluster.slurm.time=1:00:00")
    assert (status, submitted) == (0, True), said
    assert "job 77 is submitted" in said and "scancel 77" in said and "slurm_77.log" in said


@pytest.mark.extended
def test_a_dry_run_prints_the_job_and_submits_nothing(train):
    status, said, submitted = train("--dry-run", *JOB, "+cluster.slurm.account=lab")
    assert (status, submitted) == (0, False), said
    assert said.startswith("#!/usr/bin/env bash") and "#SBATCH --account=lab" in said and "dry" not in said
    assert "#SBATCH --signal=B:USR1@300\n#SBATCH --requeue\n" in said, "of conf/cluster/slurm.yaml"


@pytest.mark.extended
def test_a_job_has_as_many_nodes_as_the_run_needs(train):
    status, said, _ = train("--dry-run", "cluster=[slurm,h100]", "parallel.dp=8")
    assert status == 0 and "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n" in said, "8 trainers and an engine"
    assert "mrl: 7 of the job's 16 GPUs stay idle in the whole run, because no role uses them: node 1 GPU 1-7" in said


@pytest.mark.extended
def test_the_memory_check_can_be_disabled(train):
    status, said, _ = train(
        "--dry-run", "cluster=[slurm,h100]", "cluster.hardware.gpu_memory_gb=2.1", "plan.check_memory=false"
    )
    assert status == 0, said


ENGINES = ("cluster=[slurm,h100]", "rollout.num_engines=6", "rollout.engine_tp=2")


@pytest.mark.extended
def test_a_generation_is_submitted_with_as_many_nodes_as_its_engines_need(train):
    status, said, submitted = train("--dry-run", *ENGINES, "generate.rows=4", command="generate")
    assert (status, submitted) == (0, False), said
    assert "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n" in said, "12 engine ranks"
    assert "export MRL_COMMAND=generate\n" in said and "generate.rows=4" in said and "dry" not in said
    assert "mrl: 4 of the job's 16 GPUs stay idle" in said
    status, said, submitted = train(*JOB, command="generate")
    assert (status, submitted) == (0, True), said
    assert "job 77 is submitted" in said and "run the same `mrl generate` command again with run.dir=" in said


@pytest.mark.extended
def test_an_evaluation_is_submitted_unless_its_responses_exist(train, tmp_path):
    status, said, submitted = train("--dry-run", *ENGINES, command="evaluate")
    assert (status, submitted) == (0, False) and "export MRL_COMMAND=evaluate\n" in said, said
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1+1=", "response": "2", "ground_truth": "2"}\n')
    status, said, submitted = train(*ENGINES, f"evaluate.input={tmp_path / 'mine.jsonl'}", command="evaluate")
    assert (status, submitted) == (0, False) and "mine: 1 responses" in said, said


@pytest.mark.extended
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*JOB, "rollout.num_engines=4"], "the pools need 4 GPUs, but the cluster has 2 GPUs on 1 node"),
        ([*JOB, "rollout.engine_urls=[http://host:1]"], "servers that already run need no devices of a cluster"),
        ([*JOB, "data.test=[none.parquet]"], "data.test or data.test_sets: none.parquet: no such file"),
    ],
    ids=["too few GPUs", "external servers", "no data"],
)
def test_mistakes_of_a_generation_are_reported_before_submission(train, arguments, message):
    status, said, submitted = train(*arguments, command="generate")
    assert (status, submitted) == (2, False) and message in said and "Traceback" not in said, said


LOCAL = "applies only to a Slurm job, but this run starts on this machine; add cluster=slurm"
MISTAKES = {
    "too few GPUs": ([*JOB, "parallel.dp=4"], "the pools need 5 GPUs, but the cluster has 2 GPUs on 1 node"),
    "no model": ([*JOB, "model.path=/nowhere"], "/nowhere: the folder is missing"),
    "another key for nodes": ([*JOB, "cluster.slurm.nodes=2"], "use cluster.nodes"),
    "nodes without Slurm": (["cluster.nodes=2"], f"cluster.nodes=2: {LOCAL}"),
    "too little memory": (
        ["cluster=[slurm,h100]", "cluster.hardware.gpu_memory_gb=2.1"],
        "memory: the run does not fit",
    ),
    "a dry run without Slurm": (["--dry-run"], f"cluster.dry_run=True: {LOCAL}"),
}


@pytest.mark.extended
@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_reported_before_submission(train, arguments, message):
    status, said, submitted = train(*arguments)
    assert (status, submitted) == (2, False), said
    assert message in said and "Traceback" not in said
