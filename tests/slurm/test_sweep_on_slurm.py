"""A sweep as an array job on a real Slurm cluster. Points run at the same time, and one point fails."""

import csv
import json
import sys

import pytest
from submitted_runs import LONG_S, SETTINGS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]


def test_a_sweep_runs_as_an_array_job_and_reports_the_failed_point(cluster, quickstart, tmp_path):
    folder, timeouts = tmp_path / "sweep", ("1800", "1700", "0.001", "1600")
    size = ["cluster=slurm", "cluster.gpus_per_node=1", "cluster.slurm.exclusive=null", "placement=colocated"]
    arguments = [
        *quickstart,
        *size,
        "trainer.max_steps=2",
        f"trainer.timeout_s={','.join(timeouts)}",
        "hydra.launcher.n_jobs=2",
    ]
    line = [sys.executable, "-m", "mrl.cli", "train", "-m", *arguments, f"run.dir={folder}"]
    output = cluster.run(*line, timeout_s=3 * LONG_S, status=1, **SETTINGS)
    (job_id,) = json.loads((folder / "jobs.json").read_text())
    script = (folder / "job.sbatch").read_text()
    assert "#SBATCH --array=0,1,2,3%2" in script and "#SBATCH --nodes=1" in script
    with (folder / "sweep.csv").open() as file:
        points = list(csv.DictReader(file))
    assert [point["trainer.timeout_s"] for point in points] == list(timeouts)
    assert [point["state"] for point in points] == ["done", "done", "failed", "done"], output
    assert [point["steps"] for point in points if point["state"] == "done"] == ["2"] * 3
    assert "point 2 failed, exit status 1: " in output and "0.001 s" in output and "best: point " in output
    groups = {json.loads((folder / str(n) / "run.json").read_text())["config"]["tracking"]["group"] for n in (0, 1, 3)}
    assert groups == {"quickstart-sweep"}
    assert "no finding in 22 checks" in (folder / f"logs/slurm_{job_id}_0.log").read_text()
    cluster.wait(lambda: not any(map(cluster.processes, cluster.nodes)), 120)
