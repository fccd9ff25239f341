"""The end of a run: its deadline, and processes that have left their session and lost their parents."""

import inspect
import logging
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from mrl_runs import is_alive, signal_all, start_program

from mrl.core import processes
from mrl.core.processes import end_orphans, end_processes, shutdown_deadline, with_variable
from mrl.rewards import scorer as scorer_module
from mrl.rewards.reward_types import Response, Score
from mrl.rewards.scorer import Scorer


def start_daemon(pid_file: str, clear: bool = False) -> None:
    """Start a daemon by a double fork: it has its own session, and its parent has ended. `clear`: it has no environment."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for each in range(3):
                os.close(each)
            Path(f"{pid_file}.new").write_text(str(os.getpid()))
            os.rename(f"{pid_file}.new", pid_file)
            if clear:
                os.execve("/bin/sleep", ["sleep", "600"], {})
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not os.path.exists(pid_file):
        time.sleep(0.01)


DAEMON = f"import os, sys, time\nfrom pathlib import Path\n{inspect.getsource(start_daemon)}"


@pytest.fixture
def started():
    """A list of processes, which are killed after the test."""
    found: list[psutil.Process] = []
    yield found
    signal_all(found)


def daemon(pid_file: Path, started: list[psutil.Process]) -> psutil.Process | None:
    """Return the daemon that wrote its process id into the file; None if it has ended."""
    with suppress(psutil.NoSuchProcess):
        started.append(psutil.Process(int(pid_file.read_text())))
        return started[-1]
    return None


def ended(process: psutil.Process | None) -> bool:
    return process is None or not is_alive(process)


def sleeper(started: list[psutil.Process], **env: str) -> subprocess.Popen:
    process = start_program(["/bin/sleep", "600"], env=os.environ | env)
    started.append(psutil.Process(process.pid))
    return process


def run_daemon(tmp_path: Path, started: list[psutil.Process], name: str, **env: str) -> psutil.Process | None:
    """Start a daemon from another process. This process then ends."""
    code = f"{DAEMON}\nstart_daemon({str(tmp_path / name)!r})"
    subprocess.run([sys.executable, "-c", code], env=os.environ | env, check=True, timeout=120)
    return daemon(tmp_path / name, started)


# -- Processes that a run leaves behind -----------------------------------------------------------------------------------


@pytest.mark.extended
def test_orphans_of_a_run_are_ended_and_those_of_other_runs_are_not(tmp_path, started):
    run, other = uuid.uuid4().hex, uuid.uuid4().hex
    mine, of_another = (run_daemon(tmp_path, started, name, MRL_TEST_ID=name) for name in (run, other))
    child = sleeper(started, MRL_TEST_ID=run)
    assert mine and {each.pid for each in with_variable("MRL_TEST_ID", run)} == {mine.pid, child.pid}
    end_orphans("MRL_TEST_ID", run)
    assert ended(mine) and not ended(of_another)
    assert child.poll() is None, "a child of this process ends with this process"


def test_a_process_that_ignores_sigterm_is_killed(started, monkeypatch):
    monkeypatch.setattr(processes, "TERM_PATIENCE_S", 0.2)
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        started.append(psutil.Process(process.pid))
        assert process.stdout and process.stdout.readline()
        assert end_processes([started[0]], exit_patience_s=0) == [started[0]]
        assert process.wait(60) == -signal.SIGKILL


CHILD = f"{DAEMON}\nstart_daemon(sys.argv[1], clear=True)\n"
CHILD += "if sys.argv[2] == 'killed': os.kill(os.getpid(), 9)\nsys.exit(int(sys.argv[2]))"


@pytest.mark.extended
@pytest.mark.parametrize("how, status", [("0", 0), ("3", 3), ("killed", 137)])
def test_the_supervisor_ends_daemons_of_its_command_that_have_no_environment(tmp_path, started, how, status):
    """The environment and the session do not identify the daemon, but the daemon is a descendant of the supervisor."""
    (tmp_path / "child.py").write_text(CHILD)
    code = (
        "import sys\nfrom mrl.launch import supervisor\nsupervisor.MAX_RESTARTS = 0\n"
        "sys.exit(supervisor.supervise('child', sys.argv[1:]))"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    arguments = [sys.executable, "-c", code, str(tmp_path / "pid"), how]
    assert subprocess.run(arguments, env=os.environ | {"PYTHONPATH": path}, timeout=300).returncode == status
    assert ended(daemon(tmp_path / "pid", started))


def reward_with_daemon(responses: list[Response]) -> list[Score]:
    """A reward that starts a daemon. The text of the first response is the path of the daemon's file."""
    start_daemon(responses[0].text)
    return [Score(1.0) for _ in responses]


@pytest.mark.extended
def test_daemons_of_a_reward_end_with_its_worker_processes(tmp_path, started):
    """Another pool in the same process keeps its workers, although both pools have the same fork server."""
    with Scorer(reward_with_daemon, workers=1) as other:
        (kept,) = other([_response(str(tmp_path / "other"))])
        with Scorer(reward_with_daemon, workers=1) as scorer:
            (score,) = scorer([_response(str(tmp_path / "pid"))])
            process = daemon(tmp_path / "pid", started)
            assert (score.value, kept.value) == (1.0, 1.0) and not ended(process)
        assert ended(process)
        (again,) = other([_response(str(tmp_path / "again"))])
        assert again.value == 1.0
    assert ended(daemon(tmp_path / "again", started))


def _response(text: str) -> Response:
    return Response("", text, "")


# -- The deadline ---------------------------------------------------------------------------------------------------------


def test_a_stopped_process_is_named_and_ended_at_the_deadline(started, monkeypatch, caplog):
    monkeypatch.setattr(processes, "NOTICE_S", 0.2)
    monkeypatch.setattr(processes, "TIMEOUT_S", 5.0)
    earlier = sleeper(started)
    time.sleep(1.2)  # a process counts as earlier if it is more than one second older
    stopped = sleeper(started)
    stopped.send_signal(signal.SIGSTOP)
    since = psutil.Process(stopped.pid).create_time()
    with caplog.at_level(logging.WARNING), shutdown_deadline("the test", since):
        assert stopped.wait(60) in (-signal.SIGTERM, -signal.SIGKILL)
    assert earlier.poll() is None
    named = rf"sleep \(pid {stopped.pid}, stopped\)"
    waiting = rf"shutdown has taken \d+ s; waiting for the test to end\. 5 s after the start of the shutdown, mrl ends: {named}"
    assert re.search(waiting, caplog.text)
    assert f"the test did not end within 5 s; ending sleep (pid {stopped.pid}, stopped)" in caplog.text


def test_nothing_is_said_or_ended_before_the_deadline(started, caplog, own_records):
    child = sleeper(started)
    with caplog.at_level(logging.WARNING), shutdown_deadline("the test", 0.0):
        pass
    assert child.poll() is None and not own_records()


def test_a_process_that_still_waits_after_the_deadline_exits():
    code = (
        "import threading\nfrom mrl.core import processes as shutdown\nshutdown.TIMEOUT_S = shutdown.EXIT_S = 0.1\n"
        "with shutdown.shutdown_deadline('the test', 0.0): threading.Event().wait()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "the test still blocks this process" in result.stderr


HANGING = """
import threading
from mrl.core import processes as shutdown, run_errors
shutdown.TIMEOUT_S = shutdown.EXIT_S = 0.1
shutdown.call_before_exit(lambda: print("ended", flush=True))
try:
    {reason}
finally:
    with shutdown.shutdown_deadline("the test", 0.0): threading.Event().wait()
"""


@pytest.mark.extended_after(2)
@pytest.mark.parametrize(
    ("reason", "status", "said"),
    [
        ("raise run_errors.PreemptedError", 75, "ended\n"),
        ("raise run_errors.UnhealthyRunError", 3, "ended\n"),
        ("raise run_errors.StartError", 2, "ended\n"),
        ("raise SystemExit(143)", 143, "ended\n"),
        ("raise RuntimeError", 1, "ended\n"),
        ("raise run_errors.StartupLostError", 1, ""),
        ("pass", 1, ""),
    ],
)
def test_an_exit_at_the_deadline_has_the_status_of_the_runs_end(reason, status, said):
    """Without the message "ended", the supervisor starts the command again. After a success, the restart prints the result."""
    code = HANGING.format(reason=reason)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (status, said)


BESIDE = """
import os
from mrl_runs import start_program
from mrl.launch import supervisor
earlier = start_program(["/bin/sleep", "600"])
watcher = supervisor._ChildWatcher()
processes = [earlier, start_program(["/bin/sleep", "600"])]  # the second is like an orphan of another program
processes.append(start_program(["/bin/sleep", "600"], env=os.environ | {supervisor.RUN_VARIABLE: "1"}))
processes.append(start_program(["/bin/sleep", "600"], env={}))
left = [each.pid for each in watcher._left_by_child()]
print([each.pid in left for each in processes])
watcher.earlier = set()
print(len(watcher._left_by_child()))
for each in processes: each.kill()
"""


def test_the_supervisor_spares_processes_that_are_not_of_its_run():
    """A watcher that knows no earlier process takes all descendants as processes of the run."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", BESIDE], env=env, capture_output=True, text=True, timeout=120)
    assert result.stdout == "[False, False, True, True]\n4\n", result.stderr


def test_a_worker_that_is_not_registered_yet_is_no_leftover(started, monkeypatch):
    young = sleeper(started)
    registered: list[list[subprocess.Popen]] = [[], [young]]
    monkeypatch.setattr(scorer_module.multiprocessing.forkserver._forkserver, "_forkserver_pid", 1)
    monkeypatch.setattr(scorer_module, "descendants", lambda pid: [started[0]] if pid == 1 else [])
    monkeypatch.setattr(scorer_module, "REGISTRATION_S", 600.0)
    slept: list[float] = []
    monkeypatch.setattr(scorer_module.time, "sleep", slept.append)
    monkeypatch.setattr(scorer_module.multiprocessing, "active_children", lambda: registered.pop(0))
    assert scorer_module._leftovers() == [] and 500 < slept[0] <= 600
    registered[:] = [[], []]
    assert scorer_module._leftovers() == [started[0]], "a process that no pool registers"
