"""What the seccomp filter of the sandbox refuses."""

import errno
import fcntl
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from mrl.rewards import sandbox, sandbox_filter
from mrl.rewards.sandbox import SandboxLimits, SandboxResult, run
from mrl.rewards.sandbox_filter import ALLOWED, ARCHITECTURES, IGNORED, RULES, numbers_of, seccomp_program

pytestmark = pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason=str(sandbox.unavailable_reason()))

MACHINE = os.uname().machine
COLUMN = ARCHITECTURES[MACHINE][1] if MACHINE in ARCHITECTURES else 0
REFUSED = {errno.EPERM, errno.ENOSYS}
LAST_NUMBER = 480  # larger than the number of any system call of Linux 6.18


@pytest.fixture
def outside(tmp_path) -> Path:
    """Create a file that the program may read but does not own, like the files of the Python installation."""
    folder = tmp_path / "readable"
    folder.mkdir()
    (folder / "outside").write_bytes(b"outside" * 1000)
    return folder / "outside"


def attempt(calls: list[tuple], outside: Path) -> list[tuple[int, int]]:
    """Return (result, errno) of raw system calls (number, arguments...) in one program.

    In the arguments, "file" is a descriptor of `outside` that is open for reading, "page" is the address of a mapped page of
    `outside`, and "own" is the address of a buffer.
    """
    source = f"""
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.syscall.restype = ctypes.c_long
file = os.open({str(outside)!r}, os.O_RDONLY)
buffer = ctypes.create_string_buffer(4096)
values = dict(file=file, page=libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file, 0), own=ctypes.addressof(buffer))
values |= dict(path=ctypes.addressof(path := ctypes.create_string_buffer({os.fsencode(outside)!r})))
values |= dict(parent=os.getppid(), pid=os.getpid())
for call in {calls!r}:
    ctypes.set_errno(0)
    result = libc.syscall(*[ctypes.c_long(values.get(each, each)) for each in call])
    print(result, ctypes.get_errno(), flush=True)
"""
    outcome = run_beside(source, outside)
    assert outcome.reason == "ok", outcome
    found = [tuple(map(int, line.split())) for line in outcome.stdout.splitlines()]
    assert len(found) == len(calls), outcome
    return found


def run_beside(source: str, outside: Path, **limits) -> SandboxResult:
    """Run a program that may read the folder of `outside`."""
    return run(source, "", SandboxLimits(wall_s=60.0, **limits), path=(str(outside.parent),))


# -- The calls and arguments that are refused -----------------------------------------------------------------------------


def test_every_system_call_that_is_not_listed_is_refused(outside):
    """Each call gets the arguments that could harm most: a file outside, a page of this file, or the parent process."""
    known = {*numbers_of(ALLOWED, COLUMN).values(), *numbers_of(IGNORED, COLUMN).values()}
    known |= {rule.numbers[COLUMN] for rule in RULES}
    # The kernel of x86_64 handles uretprobe and uprobe before the filter. They crash a program that has no such probe.
    known |= {335, 336} if MACHINE == "x86_64" else set()
    others = [number for number in range(LAST_NUMBER) if number not in known]
    calls = [(number, first, 0, 0, 0, 0, 0) for number in others for first in ("file", "page", "parent")]
    found = attempt(calls, outside)
    assert len(others) > 250
    assert [
        call for call, (result, error) in zip(calls, found, strict=True) if result != -1 or error not in REFUSED
    ] == []


@pytest.mark.skipif(MACHINE != "x86_64", reason="only x86_64 has x32 calls")
def test_every_x32_call_is_refused(outside):
    calls = [(number | 0x40000000, "file", 0, 0, 0, 0, 0) for number in range(LAST_NUMBER + 80)]
    assert set(attempt(calls, outside)) == {(-1, errno.ENOSYS)}


def calls_by_argument() -> list[tuple]:
    """Return raw system calls with arguments that an ordinary program does not use."""
    number = {rule.name: rule.numbers[COLUMN] for rule in RULES}
    allowed_fcntl, allowed_ioctl = (
        {*conditions[0].values} for conditions in (_conditions("fcntl"), _conditions("ioctl"))
    )
    calls: list[tuple] = [
        (number["fcntl"], "file", command, 0)
        for command in [*range(48), *range(1024, 1045)]
        if command not in allowed_fcntl
    ]
    get_flags, set_flags, get_attributes, set_attributes = 0x80086601, 0x40086602, 0x801C581F, 0x401C5820
    clone_range, clone, dedupe, freeze, fiosetown, siocspgrp = (
        0x4020940D,
        0x40049409,
        0xC0189436,
        0xC0045877,
        0x8901,
        0x8902,
    )
    version, fibmap, fiemap, tiocsti, async_io, uuid = 0x40087602, 1, 0xC020660B, 0x5412, 0x5452, 0x80111500
    harmful = {
        get_flags,
        set_flags,
        get_attributes,
        set_attributes,
        clone_range,
        clone,
        dedupe,
        freeze,
        fiosetown,
        siocspgrp,
    }
    harmful |= {version, fibmap, fiemap, tiocsti, async_io, uuid, *range(0x5402, 0x5410)}
    assert not harmful & allowed_ioctl
    calls += [(number["ioctl"], "file", command, "own") for command in sorted(harmful)]
    calls += [
        (number["socketpair"], family, kind, protocol, "own")
        for family in range(46)
        for kind, protocol in ((1, 0), (2, 0), (3, 0), (5, 0), (1, 1))
        if (family, kind, protocol) != (1, 1, 0)
    ]
    calls += [(number["prctl"], option, 0, 0, 0, 0) for option in range(80) if option not in (15, 16)]
    calls += [
        (number["madvise"], "page", 4096, advice)
        for advice in (9, 10, 11, 12, 13, 16, 17, 18, 19, 20, 21, 22, 23, 25, 100, 101)
    ]
    calls += [
        (number["clone"], flags, 0, 0, 0, 0)
        for flags in (17, 0, 0x10000, 0x10900, 0x3D0B00, 0x7E0F0011, 0x4111, 0x100, 0x80000000)
    ]
    calls += [(number["kill"], pid, 0) for pid in ("parent", 0, -1, 1, 2)]
    calls += [(number["tgkill"], pid, pid, 0) for pid in ("parent", 1)]
    calls += [(number["prlimit64"], pid, 0, 0, 0) for pid in ("parent", 1)]
    calls += [(number["sched_getaffinity"], "parent", 8, "own")]
    calls += [(number["sendto"], 0, "own", 1, 0, address, 16) for address in ("own", 1 << 32, (1 << 32) + 5)]
    calls += [(number["mmap"], 0, 1 << 21, 3, 0x40000 | 0x22, -1, 0)]
    calls += [(number["openat"], -100, "path", mode) for mode in (os.O_TRUNC, 3, 3 | os.O_TRUNC)]
    return calls


def _conditions(name: str) -> tuple[sandbox_filter.ArgumentCondition, ...]:
    return next(rule.conditions for rule in RULES if rule.name == name)


def state_of(path: Path) -> tuple[int, ...]:
    """Return the attributes of a file that reading does not change. So the time of the last access is missing."""
    found = path.stat()
    return found.st_ino, found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def test_arguments_that_no_ordinary_program_uses_are_refused(outside):
    before = state_of(outside)
    calls = calls_by_argument()
    found = attempt(calls, outside)
    assert len(calls) > 300
    assert [call for call, error in zip(calls, found, strict=True) if error != (-1, errno.EPERM)] == []
    assert state_of(outside) == before and outside.read_bytes() == b"outside" * 1000


# -- What a program tries to do to processes beside it --------------------------------------------------------------------

ATTACKS = """
import ctypes, fcntl, os, socket, sys, termios, threading, time, mmap
libc = ctypes.CDLL(None, use_errno=True)
path = PATH
file = os.open(path, os.O_RDONLY)
mapped = mmap.mmap(file, 4096, access=mmap.ACCESS_READ)
def notify(): fcntl.fcntl(file, fcntl.F_NOTIFY, fcntl.DN_ACCESS)
attacks = dict(
    lease_read=lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    lease_write=lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK),
    lease_of_the_interpreter=lambda: fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK),
    notify_file=notify,
    notify_folder=lambda: fcntl.fcntl(os.open(os.path.dirname(path), os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS),
    flock_shared=lambda: fcntl.flock(file, fcntl.LOCK_SH),
    flock_exclusive=lambda: fcntl.flock(file, fcntl.LOCK_EX),
    flock_interpreter=lambda: fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX),
    record_lock=lambda: fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB),
    owner=lambda: fcntl.fcntl(file, fcntl.F_SETOWN, os.getppid()),
    signal_of_events=lambda: fcntl.fcntl(file, 10, 9),
    larger_pipe=lambda: fcntl.fcntl(1, 1031, 1 << 20),
    write_hint=lambda: fcntl.fcntl(file, 1036, bytes(8)),
    immutable=lambda: fcntl.ioctl(file, 0x40086602, (0x10).to_bytes(8, "little")),
    no_dump=lambda: fcntl.ioctl(file, 0x40086602, (0x40).to_bytes(8, "little")),
    project=lambda: fcntl.ioctl(file, 0x401C5820, bytes(28)),
    immutable_interpreter=lambda: fcntl.ioctl(os.open(os.__file__, os.O_RDONLY), 0x40086602, (0x10).to_bytes(8, "little")),
    evict=lambda: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED),
    page_out=lambda: mapped.madvise(21),
    cold=lambda: mapped.madvise(20),
    huge_pages=lambda: mmap.mmap(-1, 1 << 21, flags=0x40022),
    other_family=lambda: socket.socketpair(socket.AF_TIPC, socket.SOCK_STREAM),
    datagrams=lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    packets=lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
    internet=lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    netlink=lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    filter_of_a_socket=lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, 26, bytes(16)),
    fork=os.fork,
    forkpty=os.forkpty,
    session=os.setsid,
    group=lambda: os.setpgid(0, 0),
    spawn=lambda: os.posix_spawn("/bin/true", ["true"], {}),
    execute=lambda: os.execv("/bin/true", ["true"]),
    memory_file=lambda: os.memfd_create("a"),
    pidfd=lambda: os.pidfd_open(os.getppid()),
    kill_parent=lambda: os.kill(os.getppid(), 9),
    kill_all=lambda: os.kill(-1, 9),
    kill_group=lambda: os.killpg(0, 9),
    stop_parent=lambda: os.kill(os.getppid(), 19),
    priority=lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
    nice=lambda: os.nice(-1),
    affinity=lambda: os.sched_setaffinity(os.getppid(), {0}),
    real_time=lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    truncate=lambda: os.truncate(path, 0),
    truncate_by_open=lambda: os.open(path, os.O_RDONLY | os.O_TRUNC),
    truncate_by_mode_3=lambda: os.open(path, 3 | os.O_TRUNC),
    write=lambda: os.open(path, os.O_WRONLY),
    append=lambda: os.open(path, os.O_RDWR | os.O_APPEND),
    mode=lambda: os.chmod(path, 0o777),
    mode_of_descriptor=lambda: os.fchmod(file, 0o777),
    owner_of_file=lambda: os.chown(path, 1, 1),
    times=lambda: os.utime(path, (0, 0)),
    attribute=lambda: os.setxattr(path, "user.a", b"1"),
    remove=lambda: os.remove(path),
    rename=lambda: os.rename(path, "mine"),
    unnamed_file_outside=lambda: os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR),
    device=lambda: os.mknod("device", 0o600 | 0o60000, os.makedev(1, 1)),
    fifo=lambda: os.mkfifo("fifo"),
    folder=lambda: os.mkdir(os.path.dirname(path) + "/new"),
    environment_of_parent=lambda: open(f"/proc/{os.getppid()}/environ").read(),
    memory_of_parent=lambda: open(f"/proc/{os.getppid()}/mem"),
    folder_of_parent=lambda: os.readlink(f"/proc/{os.getppid()}/cwd"),
    chroot=lambda: os.chroot("."),
    sync=lambda: libc.syscall(SYNC) + 1 or os.open(path, os.O_WRONLY),
)
for name, attack in attacks.items():
    try:
        print(name, "returned", attack(), flush=True)
    except OSError as error:
        print(name, error.errno, flush=True)
print("all tried", flush=True)
time.sleep(PAUSE)
"""


@pytest.mark.extended
@pytest.mark.parametrize("abi", [1, None])
def test_no_attack_changes_reads_stalls_or_outlives_anything(outside, monkeypatch, tmp_path, abi):
    """Version 1 of Landlock protects less, so the filter must protect more. During the attacks, the test uses the file."""
    if abi:
        older = tmp_path / "sandbox_child.py"
        source = Path(sandbox.sandbox_child.__file__).read_text()
        older.write_text(source.replace("return max(0, ", f"return min({abi}, "))
        monkeypatch.setattr(sandbox.sandbox_child, "__file__", str(older))
    before, content = state_of(outside), outside.read_bytes()
    attributes = _file_attributes(outside)
    pause = 1.5
    sync = {"x86_64": 162, "aarch64": 81}[MACHINE]
    source = ATTACKS.replace("PATH", repr(str(outside))).replace("PAUSE", str(pause)).replace("SYNC", str(sync))
    results: list[SandboxResult] = []
    program = threading.Thread(target=lambda: results.append(run_beside(source, outside)))
    program.start()
    while (
        program.is_alive()
    ):  # this process opens and locks the file again and again; a lease or a lock of the program would stop it
        with open(outside, "rb+", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    program.join()
    lines = results[0].stdout.splitlines()
    assert lines[-1:] == ["all tried"] and len(lines) > 60, results[0]
    refused = REFUSED | {errno.EACCES}
    assert [line for line in lines[:-1] if not (line.split()[1].isdigit() and int(line.split()[1]) in refused)] == []
    assert state_of(outside) == before
    assert outside.read_bytes() == content and os.listdir(outside.parent) == ["outside"]
    assert _file_attributes(outside) == attributes


def _file_attributes(path: Path) -> bytes:
    """Return the flags that chattr changes, or nothing if the file system has no such flags."""
    with open(path, "rb") as file:
        try:
            return fcntl.ioctl(file, 0x80086601, bytes(8))
        except OSError:
            return b""


RACE = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None, use_errno=True)
own, secret = b"own", SECRET
open("own", "w").write("mine")
path = ctypes.create_string_buffer(max(len(own), len(secret)) + 1)
numbers = (ctypes.c_int * 2)(1, 0)
end = time.monotonic() + 1.0
opened, others = set(), set()
def swap_path():
    while time.monotonic() < end:
        for value in (own, secret): path.value = value
def swap_link():
    while time.monotonic() < end:
        for target in (own, secret):
            for make in (os.symlink, os.link):
                try:
                    make(target, "new")
                    os.replace("new", "link")
                except OSError: pass
def open_path():
    while time.monotonic() < end:
        for name in (path, b"link", b"new"):
            for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT):
                file = libc.open(name, flags, 0o600)
                if file >= 0:
                    try: opened.add(os.pread(file, 100, 0) or b"mine")
                    except OSError: pass
                    os.close(file)
def make_processes():
    while time.monotonic() < end:
        others.add(libc.syscall(CLONE, 17, 0, 0, 0, 0))
        others.add(libc.kill(os.getppid(), 9))
threads = [threading.Thread(target=each) for each in (swap_path, swap_link, open_path, open_path, make_processes)]
for each in threads: each.start()
for each in threads: each.join()
print(sorted(opened), sorted(others))
"""


def test_no_race_between_threads_opens_a_file_outside_or_creates_a_process(tmp_path, outside):
    """The filter checks only values, which no thread can change afterwards. Landlock checks the file that is in fact opened."""
    secret = tmp_path / "secret"
    secret.write_text("do-not-tell")
    clone = {"x86_64": 56, "aarch64": 220}[MACHINE]
    source = RACE.replace("SECRET", repr(os.fsencode(secret))).replace("CLONE", str(clone))
    outcome = run_beside(source, outside)
    assert outcome.reason == "ok" and outcome.stdout == "[b'mine'] [-1]\n" and secret.read_text() == "do-not-tell", (
        outcome
    )


def test_a_thread_that_stays_while_the_main_thread_exits_ends_with_the_run(outside):
    source = """
import ctypes, os, threading, time
def stay():
    while True:
        try: time.sleep(1e6)
        except BaseException: pass
for _ in range(4): threading.Thread(target=stay).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""
    outcome = run(source, "", SandboxLimits(wall_s=0.5), path=(str(outside.parent),))
    assert outcome.reason == "time limit"


def test_the_score_of_a_refused_call_says_why(outside):
    outcome = run_beside(f"import fcntl\nfcntl.flock(open({str(outside)!r}), fcntl.LOCK_EX)", outside)
    assert outcome.failure == "forbidden: PermissionError: [Errno 1] Operation not permitted"


# -- The filter itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header, column",
    [("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0), ("/usr/include/asm-generic/unistd.h", 1)],
)
def test_system_call_numbers_equal_those_of_the_kernel_headers(header, column):
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text())
    numbers = {name: int(number) for name, number in found}
    numbers.setdefault("newfstatat", numbers.get("fstatat", 0))  # aarch64 has this call under another name
    newest = max(numbers.values())
    listed = numbers_of(ALLOWED, column) | numbers_of(IGNORED, column)
    listed |= {rule.name: rule.numbers[column] for rule in RULES if rule.numbers[column] is not None}
    assert len(listed) > 90
    assert {name: number for name, number in listed.items() if number <= newest and numbers.get(name) != number} == {}
    both = set(numbers_of(ALLOWED, 0)) | {rule.name for rule in RULES if rule.numbers[0] is not None}
    assert {name for name in both - set(listed) if name in numbers and column == 1} <= {"getrlimit"}, (
        "an entry has no number"
    )


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_jumps_of_the_filter_stay_inside_it(machine):
    program = seccomp_program(machine)
    steps = [program.code[i : i + 8] for i in range(0, len(program.code), 8)]
    assert len(program.code) % 8 == 0 and len(steps) < 4096
    for at, step in enumerate(steps):
        code, if_true, if_false = int.from_bytes(step[:2], sys.byteorder), step[2], step[3]
        if code in (0x15, 0x35):
            assert at + 1 + max(if_true, if_false) < len(steps)
    assert int.from_bytes(steps[-1][:2], sys.byteorder) == 0x06
    assert all(program.code[offset : offset + 4] == bytes(4) for offset in program.own_pid_offsets)
    assert len(program.own_pid_offsets) == 4
