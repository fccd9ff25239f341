"""`mrl.train` from a script, with and without an initialized Ray; `mrl.evaluate` and `mrl.convert`."""

import json
import os
import subprocess
import sys
import tempfile

import pytest

from mrl.checkpoint.run_dir import RUN_RECORD

pytestmark = pytest.mark.extended

SCRIPT = """
import json, sys
import mrl

overrides = sys.argv[1:]
result = mrl.train([*overrides, "trainer.max_steps=2"])
evaluation = mrl.evaluate([*overrides, f"model.path={result.model}", "generate.samples=2", "generate.rows=8",
                           "generate.output=answers", "evaluate.output=evaluation"])
mrl.convert("to-megatron", model_path=result.model, output="megatron")
print("RESULT", json.dumps(dict(
    steps=[step["step"] for step in result.metrics], reward=result.reward, model=result.model.is_dir(),
    prompts=evaluation.summaries[-1]["prompts"])))
"""
IN_RAY = """
import json, sys, time
import ray
from ray._private.state import actors  # the public list of actors needs Ray's dashboard
import mrl

@ray.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count

ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
here, counter = ray.get_runtime_context(), Counter.remote()
ray.get(counter.add.remote())
result = mrl.train([*sys.argv[1:], "trainer.max_steps=1", "trainer.save=false"])

def of_the_run():
    return [actor for actor in actors().values() if actor["JobID"] != here.get_job_id()]

end = time.monotonic() + 60  # Ray ends the actors of a driver soon after the driver has ended
while (left := [actor for actor in of_the_run() if actor["State"] != "DEAD"]) and time.monotonic() < end:
    time.sleep(0.2)
print("RESULT", json.dumps(dict(
    steps=len(result.metrics), address=here.gcs_address, actors=sorted({actor["ActorClassName"] for actor in of_the_run()}),
    left=len(left), count=ray.get(counter.add.remote(), timeout=60))))
"""


def run_script(text, folder, *overrides):
    (folder / "script.py").write_text(text)
    line = [sys.executable, "script.py", *overrides, "run.dir=mine"]
    # Without a folder of its own, ray.init would connect to the Ray of another test. The path must be short, because it is a
    # part of socket names.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        # Without a token, Ray would write a token into the home directory.
        env = os.environ | {"RAY_TMPDIR": ray_folder, "RAY_AUTH_TOKEN": "a" * 64}
        done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(found.removeprefix("RESULT "))


def test_a_script_trains_evaluates_and_converts(quickstart, tmp_path):
    result = run_script(SCRIPT, tmp_path, *quickstart)
    assert result["steps"] == [1, 2] and result["model"] and result["prompts"] == 8 and 0 <= result["reward"] <= 1
    assert (tmp_path / "megatron").is_dir() and (tmp_path / "mine" / "mrl.log").exists()


def test_a_run_joins_the_ray_that_a_script_has_initialized(quickstart, tmp_path):
    """The run's processes are actors of the script's Ray. After the run, this Ray still has the script's own actors."""
    result = run_script(IN_RAY, tmp_path, *quickstart)
    assert result["steps"] == 1
    record = json.loads((tmp_path / "mine" / RUN_RECORD).read_text())
    assert record["config"]["cluster"]["address"] == result["address"]
    assert {"TrainWorker", "RolloutWorker"} <= set(result["actors"])
    assert (result["left"], result["count"]) == (0, 2)
