"""The supervisor of a command: when it restarts the command, and which signals it forwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mrl_runs import is_alive, wait_until

CHILD = """
import os, signal, sys, time
from pathlib import Path
from mrl.launch import supervisor
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
    os._exit(1)  # what Ray does to a driver whose raylet died
if how == "no start" and starts <= int(sys.argv[3]):
    supervisor.request_restart()
    raise ValueError("gone")
if how == "placed":
    supervisor.tell_supervisor("run.dir=/the/first")
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
from mrl.launch import supervisor
supervisor.BACKOFF_S, supervisor.MAX_RESTARTS = 0.2, 3
sys.exit(supervisor.supervise("child", sys.argv[1:]))
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


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    "argv, status", [(("exit", "0"), 0), (("exit", "2"), 2), (("exit", "75"), 75), (("raise",), 1)]
)
def test_a_command_that_exits_in_an_orderly_way_is_not_restarted(run, tmp_path, argv, status):
    assert run(*argv).wait(60) == status and len(starts(tmp_path)) == 1


def test_an_error_in_the_imports_of_a_command_is_not_a_crash(run, tmp_path):
    (tmp_path / "child.py").write_text("import a_missing_module")
    process = run("exit", "0")
    assert process.wait(60) == 1
    output = process.stderr.read()
    assert "No module named 'a_missing_module'" in output and "restart" not in output


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("how", ["killed", "quick", "no start"])
def test_a_command_that_vanishes_is_restarted(run, tmp_path, how):
    process = run(how, "2")
    assert process.wait(60) == 0 and len(starts(tmp_path)) == 3
    assert process.stderr.read().count("ended without finishing") == 2


def test_the_number_of_restarts_is_limited(run, tmp_path):
    process = run("killed", "99")
    assert process.wait(60) == 128 + 9 and len(starts(tmp_path)) == 4
    assert "no restart is left" in process.stderr.read()


def test_a_restart_continues_in_the_first_run_directory(run):
    """The name of the default run directory contains the time of the start, so a restart must name the first directory."""
    process = run("placed", "trainer.max_steps=3")
    assert process.wait(60) == 0
    assert process.stdout.read() == "['trainer.max_steps=3', 'run.dir=/the/first']\n"


def test_a_signal_before_a_restart_prevents_it(run, tmp_path):
    process = run("killed", "99")
    while "ended without finishing" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75
    assert len(starts(tmp_path)) < 4, "no restart after the signal"


EARLY_SIGNAL = """
import os, signal, subprocess
from mrl.launch import supervisor
class Ended(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
older = subprocess.Popen(["/bin/sleep", "300"])
watcher = supervisor._ChildWatcher()
watcher.signals.append(signal.SIGTERM)
subprocess.Popen = Ended
print(watcher.run("colorsys", [])[0])
older.kill()
"""


def test_a_child_that_has_ended_before_it_gets_an_early_signal_is_not_waited_for():
    """The process has another child, which still runs. The command ends at once."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", EARLY_SIGNAL], env=env, capture_output=True, text=True, timeout=60)
    assert result.stdout == "0\n", result.stderr


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("number, status", [(signal.SIGUSR1, 75), (signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_signals_are_forwarded_once_and_end_the_command(run, tmp_path, number, status):
    process = run("wait")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.wait(60) == status and len(starts(tmp_path)) == 1


def test_the_command_does_not_outlive_its_supervisor(run, tmp_path):
    process = run("wait")
    assert process.stdout.readline() == "ready\n"
    process.kill()
    (child,) = starts(tmp_path)
    wait_until(lambda: not is_alive(child), 20)


def test_the_supervising_process_imports_nothing_heavy():
    line = "import sys; import mrl.commands.train; print({'torch', 'ray', 'hydra'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", line], capture_output=True, text=True).stdout == "set()\n"
