"""`mrl train -m`: points that run beside each other, one of which fails, as a user sees them."""

import csv
import json


def test_a_sweep_tells_of_its_points_and_of_the_one_that_failed(start_mrl, quickstart, tmp_path):
    folder = tmp_path / "sweep"
    words = ["-m", *quickstart, "trainer.max_steps=2", "trainer.timeout_s=1800,0.001", "hydra.launcher.n_jobs=2"]
    run = start_mrl("train", *words, f"run.dir={folder}").finish(300)
    said = run.output()
    assert run.process.returncode == 1, said
    with (folder / "sweep.csv").open() as file:
        good, bad = csv.DictReader(file)
    assert good["state"] == "done" and int(good["steps"]) == 2 and good["trainer.timeout_s"] == "1800"
    assert bad["state"] == "failed" and "exit status" in bad["reason"] and bad["reward/mean"] == ""
    assert "point 1 failed" in said and "best: point 0, reward/mean" in said
    (again,) = [line for line in said.splitlines() if line.startswith("  mrl train experiment=quickstart")]
    assert again.endswith("trainer.timeout_s=1800") and "run.dir" not in again
    began = json.loads((folder / "0/run.json").read_text())
    assert began["config"]["tracking"]["group"] == "quickstart-sweep"
    assert run.leftovers() == []
