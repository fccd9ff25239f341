"""The child process of the sandbox: it restricts itself permanently, and then runs an untrusted program.

`mrl.rewards.sandbox` runs this file as a script without site packages (`python -I -S sandbox_child.py CONFIG`). The file
imports only modules of the standard library that load fast (not json, signal or typing).

The process sets resource limits, restricts itself with Landlock, drops its capabilities, installs the seccomp filter, and then
compiles and runs the program. The filter comes after the other restrictions, because the filter refuses the system calls that set
them. The compilation comes last, because a hostile program may attack or exhaust the compiler. If a restriction fails, the
process ends before it writes `RESTRICTED`, and the sandbox reports that the program was not run.
"""

import builtins
import ctypes
import marshal
import os
import resource
import struct
import sys
import types

RESTRICTED = b"restricted"  # message on the status pipe: all restrictions are in force

# -- Landlock: files ------------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls of Landlock
# File rights of Landlock.
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14
# ABI version of Landlock that adds file rights -> bit mask of all file rights that exist in this version.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
# Rights in the temporary folder: they allow plain files, but no subfolders.
_WORK_RIGHTS = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SIGKILL = 1, 22, 38, 9  # options of prctl, and a signal
_libc = ctypes.CDLL(None, use_errno=True)


def _require_success(result: int, what: str) -> int:
    """Return the result of a system call. Raises OSError if the call has failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def landlock_abi() -> int:
    """Return the ABI version of Landlock in the running kernel, or 0 if there is no Landlock."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))  # 1: only ask for the version


def seccomp_works() -> bool:
    """Return whether the kernel supports seccomp filters that kill the process."""
    call_numbers = {"x86_64": 317, "aarch64": 277}  # machine -> number of the system call seccomp
    action = ctypes.c_uint32(0x80000000)  # SECCOMP_RET_KILL_PROCESS
    # 2: SECCOMP_GET_ACTION_AVAIL
    return _libc.syscall(call_numbers.get(os.uname().machine, -1), 2, 0, ctypes.byref(action)) == 0


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = struct.pack("=Qi", rights, beneath)
    _require_success(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock rule for {path}")  # 1: rule for a path
    os.close(beneath)


def restrict_files(work: str, readable: list[str]) -> None:
    """Restrict access to files, and with newer kernels also to sockets and other processes, by Landlock.

    After this call, the process can read only the paths `readable`, plain files in the folder `work`, and /dev/null. It can
    write only plain files in `work`, and /dev/null. If the kernel's Landlock supports this, the process also cannot bind or
    connect TCP sockets, connect to abstract sockets of other processes, or send signals to other processes. Raises OSError if the
    kernel refuses a rule.
    """
    abi = landlock_abi()
    restricted_rights = _FILE_RIGHTS[max(known for known in _FILE_RIGHTS if known <= abi)]
    # Bit masks. In `tcp`, 3 refuses to bind and to connect TCP sockets (from ABI 4 on). In `scope`, 3 refuses connections to
    # abstract sockets of other processes, and signals to other processes (from ABI 6 on).
    tcp, scope = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
    attributes = struct.pack("QQQ", restricted_rights, tcp, scope)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _require_success(
        _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "Landlock"
    )
    _allow_path(ruleset, work, _WORK_RIGHTS & restricted_rights)
    for path in readable:
        _allow_path(ruleset, path, _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE)
    _allow_path(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    _require_success(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


# -- Resource limits, capabilities, start ------------------------------------------------------------------------------


def limit_resources(limits: dict[str, int]) -> None:
    """Set the soft and hard limits of resources. If the hard limit is already lower, it stays, and the soft limit gets its value.

    `limits`: name of a resource without the prefix RLIMIT_ -> limit. The soft limit of the CPU time is one second lower, but at
    least 1 s. The limit of core dumps is 1 byte. With any other limit, even 0, the kernel may start a program that handles core
    dumps.
    """
    for name, value in {"CORE": 1, "NOFILE": 64, "MEMLOCK": 0, "MSGQUEUE": 0, **limits}.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (max(1, soft - 1), hard))  # SIGXCPU comes one second before SIGKILL


def drop_capabilities() -> None:
    """Drop all capabilities, so that root has only the file permissions of its user id."""
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)  # version 3, this process; empty sets
    _require_success(_libc.capset(header, nothing), "capset")


def restrict_system_calls(code: bytes, own_pid_offsets: tuple[int, ...]) -> None:
    """Install the seccomp filter, permanently. The arguments are the fields of mrl.rewards.sandbox_filter.SeccompProgram."""
    buffer = ctypes.create_string_buffer(code, len(code))
    for offset in own_pid_offsets:
        struct.pack_into("I", buffer, offset, os.getpid())
    header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    _require_success(_libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")  # 2: SECCOMP_MODE_FILTER


def restrict_process(config: dict) -> None:
    """Apply all restrictions to this process.

    Raises OSError or ValueError if the kernel refuses a restriction, and AssertionError if the parent process has ended.
    """
    limit_resources(config["limits"])
    _libc.mallopt(-8, 1)  # only one malloc arena, because each arena reserves 64 MiB of the limited address space
    _require_success(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    restrict_files(os.getcwd(), config["readable"])
    drop_capabilities()
    _require_success(_libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "parent death signal")
    assert os.getppid() == config["parent"], f"process {config['parent']}, which started this process, has ended"
    restrict_system_calls(*config["filter"])


def _excepthook(source: str):
    """Return a function for sys.excepthook. It prints the traceback of the program, without the frames of this file."""

    def show(kind, error, trace) -> None:
        import linecache
        import traceback

        linecache.cache["program.py"] = (len(source), None, source.splitlines(keepends=True), "program.py")
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace)

    return show


def main() -> None:
    """Restrict this process, report `RESTRICTED`, and run the program as `__main__`."""
    config = marshal.loads(bytes.fromhex(sys.argv[1]))
    restrict_process(config)
    os.write(config["status_fd"], RESTRICTED)
    os.close(config["status_fd"])
    with open(config["source_fd"], encoding="utf-8") as file:
        source = file.read()
    sys.argv, sys.path = ["program.py"], sys.path + config["path"]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # the module `site` would set them, but -S disables `site`
    sys.excepthook = _excepthook(source)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, "program.py", "exec"), module.__dict__)


if __name__ == "__main__":
    main()
