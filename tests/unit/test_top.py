"""`mrl top`: the state of a run in each phase of its life, and how the frame shows it."""

import ctypes
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from mrl_runs import descendants, signal_all, start_program, wait_until
from rich.console import Console

from mrl import cli
from mrl.hang_report.process_registry import ProcessRecord, process_start_ticks, registry_folder
from mrl.tracking import process_use
from mrl.tracking.live_view import LiveRun, frame, sparkline
from mrl.tracking.process_use import Gpus, GpuUse, UseMeter, lock_holder, read_engine_load, read_process

HOST = socket.gethostname()
LOG = """\
[2026-01-02 03:04:05,678][mrl.tracking.console][INFO] - trainer ready
[2026-01-02 03:04:06,678][mrl.rollout][WARNING] - engine http://x is \x1b[31mreplaced
[2026-01-02 03:04:07,678][mrl.commands][ERROR] - ValueError: no more disk
"""


def register(run_dir, name, role, pid, *, host=HOST, started=None, activities=(), **fields):
    folder = registry_folder(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    record = ProcessRecord(name, name, role, host, pid, started or process_start_ticks(pid), **fields)
    (folder / f"{name}.json").write_text(json.dumps(vars(record)))
    lines = [json.dumps([text, time.time() - age]) for text, age in activities]
    (folder / f"{name}.activities").write_bytes("\n".join(lines).encode().ljust(4096, b"\0"))


def write_steps(run_dir, count):
    names = {"reward/mean": 0.1, "time/step_s": 2.0, "throughput/tokens_per_s": 1000, "rollout/staleness_max": 1}
    lines = [{"step": step, **names, "weight_sync/version": step} for step in range(1, count + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def write_events(run_dir, *events):
    lines = [json.dumps(dict(event=event, time=at, step=0, outcome=outcome)) for event, at, outcome in events]
    (run_dir / "starts.jsonl").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def run_dir(tmp_path):
    """Write the directory of a run that was started 100 s ago and has no process and no step."""
    config = dict(run=dict(name="demo"), trainer=dict(max_steps=40))
    (tmp_path / "run.json").write_text(json.dumps(dict(command="train", config=config)))
    os.utime(tmp_path / "run.json", (time.time() - 100,) * 2)
    (tmp_path / "mrl.log").write_text(LOG)
    write_events(tmp_path, ("start", time.time() - 100, None))
    return tmp_path


@pytest.fixture
def child():
    """Start a process that sleeps and stands in for a process of the run."""
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


def text_of(view, width=80, height=None):
    console = Console(file=io.StringIO(), width=width)
    console.print(frame(view, height))
    return console.file.getvalue()


def test_a_run_without_steps_is_starting(run_dir, child):
    register(run_dir, "trainer_0", "rank", child.pid, rank=0)
    view = LiveRun(run_dir).read()
    assert (view.state, view.step, view.num_steps, view.remaining_s) == ("starting", 0, 40, None)
    assert "step 0 of 40" in text_of(view)
    assert view.now == [
        "driver: not found on this host; it runs on another host, or has died",
        "trainer ranks: idle",
    ]


def test_a_warm_start_shows_its_step(run_dir, child):
    register(run_dir, "trainer_0", "rank", child.pid, rank=0)
    (run_dir / "sft.jsonl").write_text('{"step": 7, "loss/sft": 1.0}\n')
    assert "step 0 of 40, warm start step 7" in text_of(LiveRun(run_dir).read())


def test_a_running_run_shows_processes_activities_and_the_time_left(run_dir, child):
    write_steps(run_dir, 30)
    register(run_dir, "trainer_0", "rank", child.pid, rank=0, activities=[("updating the weights", 5)])
    register(run_dir, "critic_0", "rank", child.pid, rank=0, model="critic")
    register(run_dir, "rollout", "rollout", child.pid, activities=[("sampling 8 responses", 90), ("scoring", 1)])
    run = LiveRun(run_dir)
    run.read()
    time.sleep(0.02)
    view = run.read()
    assert (view.state, view.step) == ("running", 30)
    assert view.remaining_s == pytest.approx(20) and view.elapsed_s == pytest.approx(100, abs=5)
    assert [process.name for process in view.processes] == ["actor 0", "critic 0", "rollout"]
    assert all(process.use.rss_bytes > 0 and process.use.cpu_percent >= 0 for process in view.processes)
    shown = text_of(view)
    assert re.search(r"trainer ranks \(1 of 2\): updating the weights for 5\.\d s", shown)
    assert re.search(r"rollout worker: sampling 8 responses for 1:3\d", shown)
    assert "sampling 8 responses and 1 more" in shown and "about 20.0 s left" in shown
    assert "engines serve weight version 30" in shown and "largest staleness 1" in shown
    assert "steps 7 to 30" in shown and "GPU" not in shown
    assert "\x1b" not in shown and "engine http://x is  [31mreplaced" in shown and "error: ValueError: no more" in shown


def test_the_driver_is_found_by_its_lock(run_dir):
    (run_dir / "lock").touch()
    code = (
        f"import fcntl, time; f = open({str(run_dir / 'lock')!r}); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", f"{code}; time.sleep(99)"], stdout=subprocess.PIPE) as driver:
        try:
            driver.stdout.readline()
            if lock_holder(run_dir / "lock") is None:
                pytest.skip("this kernel does not list locks")
            write_events(run_dir, ("start", time.time() - 300, None), ("end", time.time() - 200, "failed"))
            view = LiveRun(run_dir).read()
            assert view.processes[0].name == "driver" and view.processes[0].pid == driver.pid
            assert view.now == [] and view.state == "starting", "the recorded end is that of an earlier attempt"
            with open(run_dir / "lock") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            driver.kill()
    assert lock_holder(run_dir / "lock") is None


@pytest.mark.parametrize("outcome", ["finished", "failed", "preempted", "interrupted", "unhealthy"])
def test_an_ended_run_shows_its_outcome(run_dir, outcome):
    write_steps(run_dir, 40)
    write_events(run_dir, ("start", 1000.0, None), ("end", 1060.0, outcome))
    view = LiveRun(run_dir).read()
    assert (view.state, view.elapsed_s, view.remaining_s, view.now) == (outcome, 60, None, [])
    assert f"{outcome}, step 40 of 40" in text_of(view) and "no process is registered" in text_of(view)


def test_after_a_kill_the_registered_processes_are_dead(run_dir, child):
    write_steps(run_dir, 3)
    register(run_dir, "trainer_0", "rank", child.pid, rank=0, activities=[("updating the weights", 5)])
    register(run_dir, "trainer_1", "rank", os.getpid(), rank=1, started=1)  # another process has the pid now
    child.send_signal(signal.SIGKILL)
    child.wait()
    view = LiveRun(run_dir).read()
    assert view.state == "no process alive" and {process.state for process in view.processes} == {"dead"}
    assert "dead; last updating the weights" in text_of(view)


def test_a_stopped_process_is_named(run_dir, child):
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    register(run_dir, "trainer_0", "rank", child.pid, rank=0)
    assert LiveRun(run_dir).read().processes[0].doing == "stopped"
    child.send_signal(signal.SIGCONT)


def test_processes_of_other_hosts_are_remote_and_have_no_cpu(run_dir):
    register(run_dir, "trainer_0", "rank", 1, host="node7", started=5, rank=0, activities=[("updating the weights", 5)])
    view = LiveRun(run_dir).read()
    assert (view.processes[0].state, view.processes[0].use) == ("remote", None)
    assert view.state == "unknown: all processes are on other hosts"
    assert "node7" in text_of(view) and "remote; updating the weights" in text_of(view, 120)


def test_damaged_files_are_left_out(run_dir, child):
    write_steps(run_dir, 3)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe not json\n[1, 2]\n{"step": "x"}\n{"reward/mean": 1}\n{"step": 4, "reward/me')
    (run_dir / "run.json").write_bytes(b"\xff\x00")
    (run_dir / "starts.jsonl").write_bytes(b'{"event": "start"\n\xff\n{"event": "start", "time": "x"}\n')
    register(run_dir, "trainer_0", "rank", child.pid, rank=0)
    (registry_folder(run_dir) / "trainer_0.activities").write_bytes(b'["updating", \xff')
    (registry_folder(run_dir) / "engine_0.json").write_text("{}")
    view = LiveRun(run_dir).read()
    assert (view.state, view.step, view.num_steps, len(view.processes)) == ("running", 3, None, 1)
    assert "step 3 of ?" in text_of(view)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(run_dir, child, width):
    write_steps(run_dir, 30)
    register(run_dir, "trainer_0", "rank", child.pid, rank=0, activities=[("x" * 400, 5)])
    shown = text_of(LiveRun(run_dir).read(), width)
    assert max(map(len, shown.splitlines())) <= width and (width < 80 or str(child.pid) in shown)


def test_a_small_terminal_shows_some_of_many_processes(run_dir, child):
    for rank in range(50):
        register(run_dir, f"trainer_{rank}", "rank", child.pid, rank=rank)
    shown = text_of(LiveRun(run_dir).read(), height=20)
    assert "actor 3" in shown and "actor 4" not in shown and "and 46 more processes; --json has all" in shown


def test_warnings_are_newest_first_and_repeats_of_a_process_are_shown_once(run_dir):
    lines = [json.dumps(dict(process="rollout worker", text=text, count=1)) for text in ("slow", "lost", "slow")]
    (run_dir / "logs").mkdir()
    (run_dir / "logs/warnings.jsonl").write_text("\n".join([*lines, "{damaged", ""]))
    view = LiveRun(run_dir).read()
    assert view.problems[0] == "03:04:07 error: ValueError: no more disk" and "warning" in view.problems[1]
    assert view.problems[2:] == ["rollout worker: slow", "rollout worker: lost"]


def test_gpus_have_columns_and_lines(run_dir, child, monkeypatch):
    monkeypatch.setattr(Gpus, "read", lambda self: [GpuUse(0, 97, 60 * 10**9, 80 * 10**9)])
    monkeypatch.setattr(Gpus, "memory_by_process", lambda self: {child.pid: {0: 50 * 10**9}})
    register(run_dir, "trainer_0", "rank", child.pid, rank=0)
    shown = text_of(LiveRun(run_dir).read())
    assert "GPU 0: 97 % busy, 60.0 GB of 80.0 GB" in shown and re.search(r"0: 97 %\s+50\.0 GB", shown)


class LibraryWithoutUtilization:
    """A management library that knows one GPU and its memory, but not how busy the GPU is."""

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total, memory._obj.used = 80 * 10**9, 60 * 10**9
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, rates):
        return 3  # NVML_ERROR_NOT_SUPPORTED


def test_a_gpu_that_does_not_report_how_busy_it_is_has_only_its_memory(run_dir, child, monkeypatch):
    gpus = Gpus("no such library")
    gpus._nvml, gpus._handles = LibraryWithoutUtilization(), [ctypes.c_void_p()]
    (found,) = gpus.read()
    assert found == GpuUse(0, None, 60 * 10**9, 80 * 10**9)
    monkeypatch.setattr(Gpus, "read", lambda self: [found])
    monkeypatch.setattr(Gpus, "memory_by_process", lambda self: {child.pid: {0: 50 * 10**9}})
    register(run_dir, "trainer_0", "rank", child.pid, rank=0)
    shown = text_of(LiveRun(run_dir).read())
    assert "GPU 0: 60.0 GB of 80.0 GB" in shown and re.search(r" 0\s+50\.0 GB", shown) and "0 %" not in shown


def test_a_management_library_that_fails_counts_as_no_gpu():
    gpus = Gpus("libc.so.6")  # a library without the functions
    assert gpus.read() == [] and gpus.memory_by_process() == {} and Gpus("no such library").read() == []
    assert ctypes.sizeof(process_use._Process) == 24


def sleeps(pid: int) -> bool:
    """Return whether a process runs `sleep` and has memory. Before that, it is a copy of the shell, or has no memory yet."""
    process = read_process(pid)
    return process is not None and process.rss_bytes > 0 and Path(f"/proc/{pid}/comm").read_text() == "sleep\n"


def test_the_use_of_an_engine_includes_its_children():
    if not Path("/proc/thread-self/children").exists():
        pytest.skip("this kernel does not list children")
    with subprocess.Popen(["sh", "-c", "sleep 100 & wait"]) as server:
        try:
            wait_until(lambda: [sleeps(child) for child in process_use._children(server.pid)] == [True], 60)
            (child,) = process_use._children(server.pid)
            alone = UseMeter().measure(server.pid, {}, with_children=False)
            both = UseMeter().measure(server.pid, {child: {3: 7}}, with_children=True)
        finally:
            signal_all([*descendants(psutil.Process(server.pid)), psutil.Process(server.pid)])
    assert both.rss_bytes > alone.rss_bytes and (both.gpus, both.gpu_bytes) == ((3,), 7)


def test_the_load_of_an_engine_is_the_sum_over_its_schedulers(tmp_path):
    header, length = process_use.LOAD_HEADER, process_use.LOAD_LENGTH
    loads = [dict(num_running_reqs=3, num_waiting_reqs=1, gen_throughput=50.0), dict(num_running_reqs=2), None]
    content = header.pack(b"SLNS", 2, 3, 256)
    for load in loads:
        payload = msgspec.msgpack.encode(load) if load else b"\xc1"
        content += (length.pack(len(payload)) + payload).ljust(256, b"\0")
    (tmp_path / "load").write_bytes(content)
    (tmp_path / "shared_memory").write_text(f"{tmp_path / 'load'}\n")
    with start_program(["sleep", "100"], env={"MRL_ENGINE_SCRATCH": str(tmp_path)}) as server:
        try:
            load = read_engine_load(server.pid)
            (tmp_path / "load").write_bytes(content[:4] + b"\x09" + content[5:])  # another version of the layout
            assert read_engine_load(server.pid) is None and read_engine_load(os.getpid()) is None
        finally:
            server.kill()
    assert (load.running, load.waiting, load.tokens_per_s) == (5, 1, 50.0)


@pytest.mark.parametrize("form", ["{}", "run.dir={}"])
def test_without_a_terminal_one_frame_without_colors_is_printed(run_dir, capsys, form):
    write_steps(run_dir, 2)
    assert cli.main(["top", form.format(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "demo" in shown and "\x1b" not in shown and max(map(len, shown.splitlines())) <= 80


def test_json_has_the_whole_state(run_dir, child, capsys):
    write_steps(run_dir, 2)
    register(run_dir, "trainer_0", "rank", child.pid, rank=0, activities=[("updating the weights", 5)])
    assert cli.main(["top", str(run_dir), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["state"], state["step"], state["series"]["reward/mean"]) == ("running", 2, [0.1, 0.1])
    (process,) = state["processes"]
    assert process["activity"] == "updating the weights" and process["use"]["cpu_percent"] >= 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["/no/such/folder"], "mrl: /no/such/folder: there is no such folder"),
        (["run.dir=/no/such/folder"], "mrl: /no/such/folder: there is no such folder"),
        (["."], "mrl: .: not the folder of a run: expected a folder with one of run.json"),
        ([".", "--every", "0"], "mrl: --every 0: expected 0.2 seconds or more."),
        ([".", "--every", "nan"], "mrl: --every nan: expected 0.2 seconds or more."),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["top", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(message) and err.count("\n") == 1


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_the_live_display_ends_with_q_and_ctrl_c(run_dir, key):
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell starts its background jobs with SIGINT ignored
        os.execve(
            sys.executable, [sys.executable, "-m", "mrl.cli", "top", str(run_dir)], os.environ | {"TERM": "xterm"}
        )
    shown, deadline = b"", time.monotonic() + 60
    while b"step 0 of 40" not in shown and time.monotonic() < deadline and select.select([terminal], [], [], 60)[0]:
        shown += os.read(terminal, 65536)
    os.write(terminal, key)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and select.select([terminal], [], [], 60)[0]:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # the process has closed the terminal
            break
    else:
        os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"\x1b[?1049l" in shown and b"Traceback" not in shown, "the display leaves the alternate screen"


def test_a_sparkline_has_one_character_per_value():
    assert sparkline([0, 7]) == "▁█" and sparkline([3, 3]) == "▄▄"
