"""A run that ends leaves no process behind, even if rewards have started daemons or if a process of Ray is stopped."""

import os
import subprocess
import time

import pytest
from mrl_runs import is_alive, select_processes, signal_all, tagged, wait_until

from mrl.checkpoint.run_dir import RUN_DIR_VARIABLE

pytestmark = pytest.mark.extended

REWARD = """
import os, subprocess, time

def note(pid):
    with open(os.environ["PIDS"], "a") as file:
        file.write(f"{pid}\\n")

def daemon(clear):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(os.getpid())
            for each in range(256):
                try: os.close(each)
                except OSError: pass
            if clear:
                os.execve("/bin/sleep", ["sleep", "86400"], {})
            time.sleep(86400)
        os._exit(0)
    os.wait()

def compute_score(data_source, solution_str, ground_truth, extra_info):
    # Daemons are started for the first responses of the check before the run, and of the run.
    if not os.path.exists(os.environ["PIDS"]) or len(open(os.environ["PIDS"]).readlines()) < 40:
        daemon(clear=False)
        daemon(clear=True)
        note(subprocess.Popen(["/bin/sleep", "86400"], start_new_session=True).pid)
        note(subprocess.Popen(["/bin/sleep", "86400"], start_new_session=True, env={}).pid)
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def options(inputs) -> list[str]:
    return [
        "experiment=quickstart",
        f"data.inputs.folder={inputs}",
        "sft.train=null",
        f"model.path={inputs}/model",
        "rollout.prompts_per_step=2",
        "rollout.responses_per_prompt=2",
        "trainer.stop_reward=null",
        "trainer.eval_rows=2",
        "tracking.backends=[]",
    ]


def test_daemons_of_rewards_end_with_the_run_and_those_of_other_runs_do_not(start_mrl, options, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(REWARD)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    reward = ["reward=function", f"reward.path={tmp_path}/mine.py"]
    other = subprocess.Popen(["/bin/sleep", "86400"], env=os.environ | {RUN_DIR_VARIABLE: str(tmp_path / "other")})
    try:
        run = start_mrl("train", *options, *reward, "trainer.max_steps=1").finish()
        pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
        alive = select_processes(pids, is_alive)
        signal_all(alive)
        assert run.process.returncode == 0, run.output()
        assert len(pids) >= 20 and alive == []
        assert tagged(run.tag) == [] and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_stopped_process_of_ray_is_named_and_ended_at_the_end_of_a_run(start_mrl, options):
    run = start_mrl("train", *options, "trainer.max_steps=2")
    wait_until(lambda: run.process.poll() is not None or len(_steps(run)) >= 1)
    (gcs,) = select_processes(tagged(run.tag), lambda process: process.name() == "gcs_server")
    gcs.suspend()
    start = time.monotonic()
    run.finish()
    assert run.process.returncode == 0, run.output()
    assert len(_steps(run)) == 2 and time.monotonic() - start > 60, "the step ended, and then the deadline passed"
    assert f"gcs_server (pid {gcs.pid}, stopped)" in run.output()
    assert "did not end within 60 s" in run.output() and "mean reward" in run.output()
    assert run.leftovers(within_s=10) == []


def _steps(run) -> list[dict]:
    return run.metrics() if (run.folder / "metrics.jsonl").exists() else []
