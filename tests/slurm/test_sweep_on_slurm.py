"""A sweep as an array of a real Slurm cluster: points beside each other, one that fails, and the table of them all."""

import csv
import json
import sys

import pytest
from submitted_runs import LONG_S, SETTINGS

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]


def test_four_points_are_an_array_and_the_one_that_fails_is_reported(lab, quickstart, tmp_path):
    folder, timeouts = tmp_path / "sweep", ("1800", "1700", "0.001", "1600")
    size = ["cluster=slurm", "cluster.gpus_per_node=1", "cluster.slurm.exclusive=null", "placement=colocated"]
    words = [
        *quickstart,
        *size,
        "trainer.max_steps=2",
        f"trainer.timeout_s={','.join(timeouts)}",
        "hydra.launcher.n_jobs=2",
    ]
    line = [sys.executable, "-m", "mrl.cli", "train", "-m", *words, f"run.dir={folder}"]
    said = lab.run(*line, timeout_s=3 * LONG_S, status=1, **SETTINGS)
    (job_id,) = json.loads((folder / "jobs.json").read_text())
    script = (folder / "job.sbatch").read_text()
    assert "#SBATCH --array=0,1,2,3%2" in script and "#SBATCH --nodes=1" in script
    with (folder / "sweep.csv").open() as file:
        points = list(csv.DictReader(file))
    assert [point["trainer.timeout_s"] for point in points] == list(timeouts)
    assert [point["state"] for point in points] == ["done", "done", "failed", "done"], said
    assert [point["steps"] for point in points if point["state"] == "done"] == ["2"] * 3
    assert "point 2 failed, exit status 1: " in said and "0.001 s" in said and "best: point " in said
    groups = {json.loads((folder / str(n) / "run.json").read_text())["config"]["tracking"]["group"] for n in (0, 1, 3)}
    assert groups == {"quickstart-sweep"}
    assert "no finding in 22 checks" in (folder / f"logs/slurm_{job_id}_0.log").read_text()
    lab.wait(lambda: not any(map(lab.processes, lab.nodes)), 120)
