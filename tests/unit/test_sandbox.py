"""Ordinary programs run in the sandbox, and each limit ends a program that exceeds it."""

import marshal
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time

import psutil
import pytest
from mrl_runs import is_alive, select_processes, wait_until

from mrl.rewards import sandbox, sandbox_child
from mrl.rewards.sandbox import SandboxLimits, SandboxResult, run, run_python

pytestmark = pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason=str(sandbox.unavailable_reason()))


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """Check that a test leaves no process and no folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    yield
    assert not list((tmp_path / "runs").iterdir())
    assert not select_processes(psutil.process_iter(), lambda process: _runs_program_of(process, os.getpid()))


def _runs_program_of(process: psutil.Process, parent: int) -> bool:
    """Return whether the process `parent` started this sandbox. Other tests may run programs at the same time."""
    command = process.cmdline()
    return sandbox_child.__file__ in command and marshal.loads(bytes.fromhex(command[-1]))["parent"] == parent


def short(source: str, wall_s: float = 20.0, **limits) -> SandboxResult:
    """Run a program with short limits, so that it always ends in time."""
    begun = time.monotonic()
    outcome = run_python(source, SandboxLimits(wall_s=wall_s, **limits))
    assert time.monotonic() - begun < wall_s + 10  # a busy machine starts processes slowly
    return outcome


# -- Good programs --------------------------------------------------------------------------------------------------------


def test_a_program_reads_stdin_and_prints():
    outcome = run("import sys\nprint(sum(int(x) for x in sys.stdin.read().split()))", "1 2\n3\n", SandboxLimits())
    assert (outcome.reason, outcome.stdout, outcome.returncode, outcome.failure) == ("ok", "6\n", 0, None)


@pytest.mark.parametrize(
    "read", ["input()", "open(0).readline()", "open('/dev/stdin').readline()", "__import__('sys').stdin.readline()"]
)
def test_all_ways_to_read_a_line_of_stdin_work(read):
    outcome = run(f"print({read}.strip() + '!')", "hello\nrest\n", SandboxLimits())
    assert outcome.stdout == "hello!\n", outcome


def test_the_usual_modules_can_be_imported():
    source = """
import math, collections, itertools, re, heapq, json, random, bisect, functools, string, decimal, fractions, datetime, typing
import dataclasses, statistics, operator, copy, sys, hashlib, zlib, asyncio, concurrent.futures, sqlite3, unittest

@dataclasses.dataclass
class Point:
    x: int

async def later():
    await asyncio.sleep(0)
    return Point(3).x

heap = [3, 1, 2]
heapq.heapify(heap)
print(heap[0], math.comb(4, 2), json.dumps(sorted({'b': 1})), asyncio.run(later()), 0 <= random.random() < 1, __name__)
"""
    assert short(source).stdout == '1 6 ["b"] 3 True __main__\n'


def test_a_few_threads_and_deep_recursion_work():
    threads = """
from concurrent.futures import ThreadPoolExecutor
print(sum(ThreadPoolExecutor(8).map(lambda x: x * x, range(10))))
"""
    deep = """
import sys, threading
sys.setrecursionlimit(10**6)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
threading.stack_size(1 << 27)
thread = threading.Thread(target=lambda: print(depth(50000)))
thread.start()
thread.join()
"""
    assert short(threads).stdout == "285\n"
    assert short(deep).stdout == "50000\n"


def test_a_program_can_write_files_in_its_own_folder():
    source = """
import os, tempfile
open('a.txt', 'w').write('one')
os.rename('a.txt', 'b.txt')
with tempfile.NamedTemporaryFile('w+') as file:
    file.write('two'); file.seek(0)
    print(open('b.txt').read(), file.read(), os.listdir('.') != [])
os.remove('b.txt')
print(os.listdir('.'))
"""
    assert short(source).stdout == "one two True\n[]\n"


def test_exit_and_quit_are_available():
    assert short("print(1)\nexit()\nprint(2)").stdout == "1\n"
    assert short("quit(3)").failure == "wrong exit: status 3"


def test_invalid_utf8_output_becomes_replacement_characters():
    outcome = short("import os\nos.write(1, b'a\\xff\\x00b')")
    assert (outcome.reason, outcome.stdout) == ("ok", "a\N{REPLACEMENT CHARACTER}\x00b")


def test_a_lone_surrogate_in_the_source_is_harmless():
    assert short("print('\udc80')").stdout == "?\n"


def test_a_traceback_shows_only_lines_of_the_program():
    outcome = short("def f(x):\n    return 1 / x\nf(0)\n")
    assert outcome.failure == "wrong exit: status 1, ZeroDivisionError: division by zero"
    assert "return 1 / x" in outcome.stderr and "sandbox_child" not in outcome.stderr
    assert short("x = = 1").failure == "wrong exit: status 1, SyntaxError: invalid syntax"


def test_an_additional_folder_can_be_imported_from(tmp_path):
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "helper.py").write_text("value = 7")
    source = "import helper\nprint(helper.value)"
    assert "No module named 'helper'" in short(source).detail
    assert run(source, "", SandboxLimits(), path=(str(tmp_path / "library"),)).stdout == "7\n"


# -- SandboxLimits ---------------------------------------------------------------------------------------------------------------


def test_an_endless_loop_and_an_endless_sleep_end_at_their_limits():
    assert short("while True: pass", wall_s=0.3).failure == "time limit: more than 0.3 s"
    assert short("import time\ntime.sleep(1e6)", wall_s=0.3).reason == "time limit"
    assert short("while True: pass", cpu_s=1).failure == "cpu limit: more than 1 s"
    ignored = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert short(ignored, cpu_s=1).reason == "cpu limit"


def test_closed_descriptors_do_not_hide_a_program_from_its_time_limit():
    closing = (
        "import os, time\nfor each in range(64):\n    try: os.close(each)\n    except OSError: pass\ntime.sleep(1e6)"
    )
    assert short(closing, wall_s=0.3).reason == "time limit"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_too_much_output_is_cut_at_the_limit(stream):
    outcome = short(f"import sys\nwhile True: sys.{stream}.write('x' * 100_000)", output_bytes=50_000)
    assert outcome.failure == "too much output: more than 50000 bytes"
    assert len(getattr(outcome, stream)) == 50_000


@pytest.mark.parametrize(
    "source",
    ["bytearray(1 << 33)", "x = []\nwhile True: x.append(' ' * (1 << 22))", "import mmap\nmmap.mmap(-1, 1 << 33)"],
)
def test_more_memory_than_allowed_is_refused(source):
    assert short(source, memory_bytes=256 << 20).reason == "memory"


@pytest.mark.parametrize(
    "source",
    [
        "file = open('a', 'wb')\nwhile True: file.write(bytes(1 << 20))",
        "for i in range(10**6): open(str(i), 'wb').write(bytes(1 << 20))",
        "for i in range(10**6): open(str(i), 'wb')",
        "import os\nkept = []\nfor i in range(60):\n"
        "    kept.append(open('a', 'wb')); kept[-1].write(bytes(1 << 20)); os.remove('a')\nimport time\ntime.sleep(19)",
    ],
    ids=["one", "many", "empty", "removed"],
)
def test_more_files_than_allowed_end_the_run(source):
    assert short(source, disk_bytes=4 << 20).reason == "too much on disk"


MAPPED = """
import mmap, os, time
file = os.open("a", os.O_RDWR | os.O_CREAT, 0o600)
os.posix_fallocate(file, 0, 1 << 20)
kept = mmap.mmap(file, 4096)
for each in range(3, 40):
    try: os.close(each)
    except OSError: pass
REMOVE
time.sleep(PAUSE)
"""


def test_a_removed_file_cannot_hide_in_memory():
    """A file that was removed or replaced is found. A mapped file that still has its name counts like any other file."""
    for remove in ('os.remove("a")', 'open("b", "w").close(); os.replace("b", "a")'):
        outcome = short(MAPPED.replace("REMOVE", remove).replace("PAUSE", "19"))
        assert outcome.failure == "too much on disk: a removed file is still mapped into memory"
    assert short(MAPPED.replace("REMOVE", "").replace("PAUSE", "0.1")).reason == "ok"


HIDDEN = """
import ctypes, os, threading, time
def later():
    time.sleep(0.3)  # the first thread has ended, and /proc shows nothing of it
    for each in range(6):
        file = os.open("a", os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(file, 0, 1 << 20)
        os.remove("a")
    time.sleep(19)
threading.Thread(target=later).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # exit: of this thread alone
"""


def test_files_of_a_thread_that_outlives_the_main_thread_are_counted():
    assert short(HIDDEN, disk_bytes=4 << 20).failure == "too much on disk: more than 4194304 bytes"


def test_a_file_with_two_names_is_counted_once():
    source = "import os\nopen('a', 'wb').write(bytes(3 << 20))\nos.link('a', 'b')\nimport time\ntime.sleep(0.2)"
    assert short(source, disk_bytes=4 << 20).reason == "ok"


def test_a_program_that_hides_its_open_files_is_stopped(monkeypatch):
    real = os.scandir

    def refused(path):
        if str(path).endswith("/fd"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(sandbox.os, "scandir", refused)
    assert (
        short("import time\ntime.sleep(19)").failure == "forbidden: the open files of the process cannot be inspected"
    )


def test_many_open_files_of_the_parent_are_harmless():
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1300:
        pytest.skip("a process may not have so many files here")
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]  # more than select() could handle
    try:
        assert short("print(1)").stdout == "1\n"
    finally:
        for each in kept:
            os.close(each)


COUNTING = """
import os
from mrl.rewards import sandbox, sandbox_child
ways = {
    "ok": ("print(1)", {}),
    "wrong exit": ("1 / 0", {}),
    "forbidden": ("open('/etc/passwd')", {}),
    "time limit": ("import time; time.sleep(60)", {"wall_s": 0.3}),
    "cpu limit": ("while True: pass", {"cpu_s": 1}),
    "memory": ("bytearray(1 << 33)", {"memory_bytes": 256 << 20}),
    "too much output": ("while True: print('x' * 100_000)", {"output_bytes": 50_000}),
    "too much on disk": ("for i in range(10**6): open(str(i), 'wb')", {"disk_bytes": 4 << 20}),
    "too many threads": ("import threading, time\\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()", {}),
    "killed": ("import os; os.abort()", {}),
}
sandbox.run_python("")
before = sorted(os.listdir("/proc/self/fd"))
for reason, (source, limits) in ways.items():
    outcome = sandbox.run_python(source, sandbox.SandboxLimits(**limits))
    assert outcome.reason == reason, (reason, outcome)
    assert sorted(os.listdir("/proc/self/fd")) == before, reason
sandbox_child.__file__ = os.devnull  # the program ends before it applies its restrictions
try:
    sandbox.run_python("")
except RuntimeError:
    assert sorted(os.listdir("/proc/self/fd")) == before, "RuntimeError"
    print("no ending left a file open")
"""


@pytest.mark.extended
def test_no_ending_of_a_program_leaves_a_file_open():
    """A separate process counts, because in this process threads of other tests may open files at any time."""
    counted = subprocess.run([sys.executable, "-c", COUNTING], capture_output=True, text=True, timeout=300)
    assert (counted.stdout, counted.stderr) == ("no ending left a file open\n", "")


@pytest.mark.parametrize("stack", ["", "threading.stack_size(1 << 15)"])
def test_a_thread_bomb_is_stopped(stack):
    source = f"import threading, time\n{stack}\nwhile True: threading.Thread(target=time.sleep, args=(1e6,)).start()"
    assert short(source).reason == "too many threads"


@pytest.mark.parametrize(
    "limits, message",
    [
        ({"wall_s": 0}, r"wall_s=0: expected a number above 0"),
        ({"cpu_s": 1.5}, r"cpu_s=1.5: expected a whole number"),
        ({"memory_bytes": 1000}, r"memory_bytes=1000: expected a whole number above 67108864"),
        ({"wal_s": 3}, r"'wal_s' is not a limit of the sandbox; did you mean 'wall_s'"),
    ],
)
def test_limits_that_are_too_small_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        SandboxLimits.of(limits)


def test_a_crash_and_a_signal_to_itself_have_their_own_reasons():
    assert short("import ctypes\nctypes.string_at(0)").failure == "killed: signal 11 (Segmentation fault)"
    assert short("import os\nos.kill(os.getpid(), 9)").failure == "killed: signal 9 (Killed)"
    assert short("import os\nos.abort()").failure == "killed: signal 6 (Aborted)"


def test_a_limit_cannot_be_raised_again():
    outcome = short("import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))")
    assert "not allowed to raise maximum limit" in outcome.detail


def test_the_program_ends_when_its_parent_dies(tmp_path):
    program = "import time\ntime.sleep(100)"
    starter = f"from mrl.rewards.sandbox import *\nrun_python({program!r}, SandboxLimits(wall_s=100))"
    process = subprocess.Popen([sys.executable, "-c", starter], env={**os.environ, "TMPDIR": str(tmp_path)})

    def programs() -> list[psutil.Process]:
        children = psutil.Process(process.pid).children()
        return select_processes(children, lambda child: _runs_program_of(child, process.pid))

    try:
        wait_until(programs, 20)
        inside = programs()
        time.sleep(0.3)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not select_processes(inside, is_alive), 3)


def test_concurrent_runs_do_not_affect_each_other():
    outcomes: dict[int, SandboxResult] = {}
    threads = [
        threading.Thread(
            target=lambda i=i: outcomes.update({i: run(f"print(int(input()) * {i})", "7", SandboxLimits())})
        )
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcomes[i].stdout for i in range(12)] == [f"{7 * i}\n" for i in range(12)]
