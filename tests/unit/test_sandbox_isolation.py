"""What a program in the sandbox cannot reach: other processes, files, the network. Without kernel support, it does not run."""

import os
import socket
from pathlib import Path

import pytest
from test_sandbox import nothing_left, short  # noqa: F401

from mrl.rewards import sandbox, sandbox_child
from mrl.rewards.sandbox import run_python

pytestmark = pytest.mark.skipif(sandbox.unavailable_reason() is not None, reason=str(sandbox.unavailable_reason()))


# -- What is forbidden ----------------------------------------------------------------------------------------------------


@pytest.mark.extended_after(5)
@pytest.mark.parametrize(
    "source",
    [
        "import os\nwhile True: os.fork()",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import subprocess\nsubprocess.run(['/bin/ls'])",
        "import os\nos.system('ls') and os.fork()",
        "import os\nos.execv('/bin/ls', ['ls'])",
        "import os\nos.posix_spawn('/bin/ls', ['ls'], {})",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(-1, 9)",
        "import os\nos.kill(0, 9)",
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "import fcntl, os\nfcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "import os\nos.sched_setaffinity(os.getppid(), [0])",
        "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import os\nos.memfd_create('a')",
        "import os\nos.pidfd_open(os.getppid())",
        "import socket\nsocket.socketpair(type=socket.SOCK_DGRAM)",
    ],
)
def test_other_processes_cannot_be_reached(source):
    outcome = short(source)
    assert outcome.reason == "forbidden", outcome
    assert "Error" in outcome.detail


def test_raw_system_calls_are_filtered_too():
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
SIGCHLD, PARENT = 17, os.getppid()
for call in CALLS:
    result = libc.syscall(*call)
    print(call[0], result, ctypes.get_errno())
"""
    calls = {  # fork, vfork, clone, clone3, clone under x32, io_uring_setup, pidfd_open, ptrace, bpf, unshare, keyctl, mount;
        # a thread with descriptors of its own (clone, close_range), and what would hide them (prctl)
        "x86_64": "[(57,), (58,), (56, SIGCHLD, 0, 0, 0, 0), (435, 0, 0), (0x40000039,), (425, 8, 0), (434, PARENT, 0),"
        " (101, 16, PARENT, 0, 0), (321, 0, 0, 0), (272, 0x10000000), (250, 0, 0), (165, 0, 0, 0, 0, 0),"
        " (56, 0x10900, 0, 0, 0, 0), (436, 50, 60, 2), (157, 4, 0)]",
        "aarch64": "[(220, SIGCHLD, 0, 0, 0, 0), (435, 0, 0), (425, 8, 0), (434, PARENT, 0), (117, 16, PARENT, 0, 0),"
        " (280, 0, 0, 0), (97, 0x10000000), (219, 0, 0), (40, 0, 0, 0, 0, 0), (220, 0x10900, 0, 0, 0, 0), (436, 50, 60, 2),"
        " (167, 4, 0)]",
    }[os.uname().machine]
    outcome = short(source.replace("CALLS", calls))
    lines = [line.split() for line in outcome.stdout.splitlines()]
    assert outcome.reason == "ok" and len(lines) >= 9, outcome
    assert all((result, error) in {("-1", "1"), ("-1", "38")} for _, result, error in lines), outcome.stdout


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86_64 alone has a second way into the kernel")
def test_32_bit_system_calls_are_refused():
    source = """
import ctypes, mmap
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex("b802000000 cd80 c3"))  # mov eax, 2 (fork); int 0x80; ret
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))())
"""
    assert short(source).failure == "forbidden: a system call of another architecture"


@pytest.mark.parametrize(
    "way",
    [
        "open({!r}).read()",
        "import os\nos.symlink({!r}, 'a')\nopen('a').read()",
        "import os\nos.link({!r}, 'a')\nopen('a').read()",
    ],
)
def test_a_secret_outside_cannot_be_read(tmp_path, way):
    secret = tmp_path / "secret"
    secret.write_text("do-not-tell")
    outcome = short(way.format(str(secret)))
    assert outcome.reason == "forbidden" or "cross-device link" in outcome.detail  # Landlock's error for hard links
    assert str(secret) in outcome.detail and "do-not-tell" not in outcome.stdout + outcome.stderr


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/etc/shadow",
        "../" * 12 + "etc/hosts",
        "/proc/self/environ",
        "/proc/self/mem",
        "/proc/1/cmdline",
        str(Path(__file__)),
    ],
)
def test_files_of_the_machine_cannot_be_read(path):
    assert (
        short(f"open({path!r}, 'rb').read(1)").failure
        == f"forbidden: PermissionError: [Errno 13] Permission denied: {path!r}"
    )


@pytest.mark.parametrize("folder", ["/", "..", "/proc", "/root", "/etc", "/tmp"])
def test_folders_of_the_machine_cannot_be_listed(folder):
    if Path(folder).exists():
        assert short(f"import os\nos.listdir({folder!r})").reason == "forbidden"


def test_the_environment_of_the_parent_is_not_visible(monkeypatch):
    monkeypatch.setenv("MRL_TEST_SECRET", "do-not-tell")
    outcome = short("import os\nprint(dict(os.environ))\nopen(f'/proc/{os.getppid()}/environ').read()")
    assert outcome.reason == "forbidden"
    assert "do-not-tell" not in outcome.stdout and set(eval(outcome.stdout)) <= {"LC_CTYPE"}


def test_a_descriptor_of_the_parent_is_not_inherited(tmp_path):
    (tmp_path / "open").write_text("do-not-tell")
    with open(tmp_path / "open") as file:
        os.set_inheritable(file.fileno(), True)
        source = "import os\nfor each in range(3, 256):\n    try: print(each, os.fstat(each).st_mode)\n    except OSError: pass"
        assert short(source).stdout == ""


@pytest.mark.parametrize(
    "way",
    [
        "open({!r}, 'w')",
        "open({!r}, 'a')",
        "import os\nos.open({!r}, os.O_RDONLY | os.O_TRUNC)",
        "import os\nos.truncate({!r}, 0)",
        "import os\nos.remove({!r})",
        "import os\nos.rename({!r}, 'mine')",
        "import os\nos.chmod({!r}, 0o777)",
        "import os\nos.chown({!r}, 1, 1)",
        "import os\nos.utime({!r}, (0, 0))",
        "import os\nos.setxattr({!r}, 'user.a', b'1')",
        "open({!r} + '-new', 'w')",
        "import os\nos.mkdir({!r} + '-new')",
    ],
)
def test_nothing_outside_can_be_changed(tmp_path, way):
    target = tmp_path / "kept"
    target.write_text("kept")
    before = target.stat()
    outcome = short(way.format(str(target)))
    after = target.stat()
    assert outcome.reason == "forbidden", outcome
    assert target.read_text() == "kept"
    assert (before.st_mode, before.st_mtime, before.st_uid) == (after.st_mode, after.st_mtime, after.st_uid)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept", "runs"]


def test_the_standard_library_cannot_be_truncated():
    outcome = short("import os\nos.open(os.__file__, os.O_RDONLY | os.O_TRUNC)")
    assert outcome.reason == "forbidden" and Path(os.__file__).stat().st_size > 0


@pytest.mark.parametrize(
    "source",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', {}))",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{}')",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'a', ('127.0.0.1', {}))",
    ],
)
def test_a_local_server_is_not_reached(source):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        outcome = short(source.format(server.getsockname()[1]))
        assert outcome.reason != "ok" and "Operation not permitted" in outcome.detail
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_socket_of_the_machine_is_not_reached(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        server.listen()
        outcome = short(f"import socket\na, b = socket.socketpair()\na.connect({str(tmp_path / 'socket')!r})")
    assert outcome.failure == "forbidden: PermissionError: [Errno 1] Operation not permitted"


# -- Fails closed ---------------------------------------------------------------------------------------------------------


def test_without_kernel_support_nothing_is_run(monkeypatch):
    monkeypatch.setattr(sandbox_child, "landlock_abi", lambda: 0)
    sandbox.unavailable_reason.cache_clear()
    try:
        with pytest.raises(ValueError, match="cannot be run on this machine: the kernel offers no Landlock"):
            run_python("print(1)")
    finally:
        monkeypatch.undo()
        sandbox.unavailable_reason.cache_clear()
    assert sandbox.unavailable_reason() is None


def test_a_failed_lock_is_an_error_and_not_a_result(monkeypatch, tmp_path):
    broken = tmp_path / "sandbox_child.py"
    broken.write_text(
        Path(sandbox_child.__file__).read_text().replace("(_RESTRICT_SELF, ruleset, 0)", "(_RESTRICT_SELF, 999, 0)")
    )
    monkeypatch.setattr(sandbox_child, "__file__", str(broken))
    with pytest.raises(
        RuntimeError,
        match=r"could not be applied, so the program was not run: OSError: .*Landlock: Bad file descriptor",
    ):
        run_python(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert not (tmp_path / "ran").exists()


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("abi", [1, 2, 3, 4, 5])
def test_older_landlock_versions_protect_too(monkeypatch, tmp_path, abi):
    older = tmp_path / "sandbox_child.py"
    older.write_text(Path(sandbox_child.__file__).read_text().replace("return max(0, ", f"return min({abi}, "))
    monkeypatch.setattr(sandbox_child, "__file__", str(older))
    (tmp_path / "kept").write_text("kept")
    ways = [
        "open(path)",
        "open(path, 'a')",
        "os.truncate(path, 0)",
        "os.open(os.__file__, os.O_TRUNC)",
        "os.remove(path)",
    ]
    for way in [*ways, "os.kill(os.getppid(), 9)", "__import__('socket').socket()"]:
        assert short(f"import os\npath = {str(tmp_path / 'kept')!r}\n{way}").reason == "forbidden", way
    assert (tmp_path / "kept").read_text() == "kept" and Path(os.__file__).stat().st_size > 0
    assert short("open('a', 'w').write('b')\nprint(open('a').read())").stdout == "b\n"
