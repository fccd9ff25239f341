"""The process that watches over a command: what it starts again, what it passes on, and when it stops."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = """
import os, signal, sys, time
from pathlib import Path
from mrl.commands import supervised
supervised.register()
log, how = Path(sys.argv[1]), sys.argv[2]
with log.open("a") as file:
    file.write(f"{os.getpid()}\\n")
starts = len(log.read_text().splitlines())
if how == "exit":
    sys.exit(int(sys.argv[3]))
if how == "raise":
    raise ValueError("a mistake")
if how == "killed" and starts <= int(sys.argv[3]):
    os.kill(os.getpid(), signal.SIGKILL)
if how == "quick" and starts <= int(sys.argv[3]):
    os._exit(1)  # as Ray ends a driver whose raylet is gone
if how == "no start" and starts <= int(sys.argv[3]):
    supervised.start_again()
    raise ValueError("gone")
if how == "placed":
    supervised.say("run.dir=/the/first")
    if starts < 3:
        os.kill(os.getpid(), signal.SIGKILL)
    print(sys.argv[3:], flush=True)
if how == "wait":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    print("ready", flush=True)
    time.sleep(60)
"""
PARENT = """
import sys
from mrl.commands import supervised
supervised.BACKOFF_S, supervised.TIMES = 0.2, 3
sys.exit(supervised.supervise("child", sys.argv[1:]))
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    started = []

    def start(*argv: str) -> subprocess.Popen:
        line = [sys.executable, "-c", PARENT, str(tmp_path / "starts"), *argv]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(line, env=os.environ | {"PYTHONPATH": path}, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def starts(tmp_path) -> list[int]:
    return [int(line) for line in (tmp_path / "starts").read_text().splitlines()]


@pytest.mark.parametrize(
    "argv, status", [(("exit", "0"), 0), (("exit", "2"), 2), (("exit", "75"), 75), (("raise",), 1)]
)
def test_an_orderly_end_is_the_end(run, tmp_path, argv, status):
    assert run(*argv).wait(60) == status and len(starts(tmp_path)) == 1


@pytest.mark.parametrize("how", ["killed", "quick", "no start"])
def test_a_command_that_vanishes_is_started_again(run, tmp_path, how):
    process = run(how, "2")
    assert process.wait(60) == 0 and len(starts(tmp_path)) == 3
    assert process.stderr.read().count("vanished") == 2


def test_new_starts_are_limited(run, tmp_path):
    process = run("killed", "99")
    assert process.wait(60) == 128 + 9 and len(starts(tmp_path)) == 4
    assert "no new start is left" in process.stderr.read()


def test_a_new_start_goes_on_in_the_folder_of_the_first(run):
    """The default one is named by the time."""
    process = run("placed", "trainer.max_steps=3")
    assert process.wait(60) == 0
    assert process.stdout.read() == "['trainer.max_steps=3', 'run.dir=/the/first']\n"


def test_a_signal_between_two_starts_is_heeded(run, tmp_path):
    process = run("killed", "99")
    while "vanished" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75
    assert len(starts(tmp_path)) < 4, "no new start once it was asked to leave"


@pytest.mark.parametrize("number, status", [(signal.SIGUSR1, 75), (signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_signals_are_passed_on_once_and_end_it(run, tmp_path, number, status):
    process = run("wait")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(60) == status and len(starts(tmp_path)) == 1


def test_the_command_does_not_outlive_its_watcher(run, tmp_path):
    process = run("wait")
    assert process.stdout.readline() == "ready\n"
    process.kill()
    (child,) = starts(tmp_path)
    end = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def test_watching_costs_no_imports():
    line = "import sys; import mrl.commands.train; print({'torch', 'ray', 'hydra'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", line], capture_output=True, text=True).stdout == "set()\n"
