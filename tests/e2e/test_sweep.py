"""`mrl train -m`: two concurrent points of a sweep, one of which fails, and the report of the sweep."""

import csv
import json

import pytest


@pytest.mark.extended
def test_a_sweep_reports_its_points_and_why_one_failed(start_mrl, quickstart, tmp_path):
    folder = tmp_path / "sweep"
    arguments = [
        "-m",
        *quickstart,
        "trainer.max_steps=2",
        "cluster.start_timeout_s=600,0.01",
        "hydra.launcher.n_jobs=2",
    ]
    run = start_mrl("train", *arguments, f"run.dir={folder}").finish(300)
    output = run.output()
    assert run.process.returncode == 1, output
    with (folder / "sweep.csv").open() as file:
        good, bad = csv.DictReader(file)
    assert good["state"] == "done" and int(good["steps"]) == 2 and good["cluster.start_timeout_s"] == "600"
    assert bad["state"] == "failed" and "exit status" in bad["reason"] and bad["reward/mean"] == ""
    assert "point 1 failed" in output and "best: point 0, reward/mean" in output
    (command,) = [line for line in output.splitlines() if line.startswith("  mrl train experiment=quickstart")]
    assert command.endswith("cluster.start_timeout_s=600") and "run.dir" not in command
    run_json = json.loads((folder / "0/run.json").read_text())
    assert run_json["config"]["tracking"]["group"] == "quickstart-sweep"
    assert run.leftovers() == []
