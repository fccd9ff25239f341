"""The child process of the sandbox: it restricts itself permanently, and then runs an untrusted program.

`mrl.rewards.sandbox` runs this file as a script without site packages (`python -I -S sandbox_child.py CONFIG`). The file
imports only modules of the standard library that load fast (not json, signal or typing).

The order of the steps matters: resource limits, Landlock, capabilities, seccomp, and last the compilation of the program.
If a step fails, the process ends before it writes `RESTRICTED`, and the sandbox reports that the program was not run.
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

# -- seccomp: system calls ------------------------------------------------------------------------------------------------

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # machine -> (AUDIT_ARCH, column in DENIED)

# System calls that fail with EPERM, by category. Each entry has a name, the number on x86_64 and the number on aarch64. `-` means
# that there is no such call.
DENIED = """
network      socket 41 198, connect 42 203, accept 43 202, accept4 288 242, bind 49 200, listen 50 201,
             sendmsg 46 211, sendmmsg 307 269
processes    fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, tkill 200 130, rt_sigqueueinfo 129 138,
             rt_tgsigqueueinfo 297 240, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272,
             setpriority 141 140, ioprio_set 251 30, sched_setparam 142 118, sched_setscheduler 144 119,
             sched_setattr 314 274, sched_setaffinity 203 122, migrate_pages 256 238, move_pages 279 239
metadata     chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
             utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6,
             fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, getxattr 191 8, lgetxattr 192 9,
             listxattr 194 11, llistxattr 195 12, truncate 76 45,
             name_to_handle_at 303 264, open_by_handle_at 304 265, inotify_init 253 -, inotify_init1 294 26,
             inotify_add_watch 254 27, fanotify_init 300 262
persistent   memfd_create 319 279, shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semctl 66 191,
             semtimedop 220 192, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181
kernel       keyctl 250 219, add_key 248 217, request_key 249 218, bpf 321 280, perf_event_open 298 241,
             userfaultfd 323 282, personality 135 92, modify_ldt 154 -, iopl 172 -, ioperm 173 -, syslog 103 116,
             init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294,
             seccomp 317 277, io_setup 206 0, splice 275 76, tee 276 77, vmsplice 278 75, sync 162 81, syncfs 306 267
machine      mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, unshare 272 97, setns 308 268,
             quotactl 179 60, swapon 167 224, swapoff 168 225, acct 163 89, reboot 169 142, vhangup 153 58,
             sethostname 170 161, setdomainname 171 162, settimeofday 164 170, clock_settime 227 112,
             adjtimex 159 171, clock_adjtime 305 266
"""

# From this number on, both architectures use the same numbers. Of these calls, only those in ALLOWED_COMMON work. Others fail
# with ENOSYS: io_uring, clone3, openat2, pidfds, new mounts, and calls of later kernels. The x32 calls of x86_64 have larger
# numbers, so they fail too.
FIRST_COMMON = 424
ALLOWED_COMMON = {
    "faccessat2": 439,
    "epoll_pwait2": 441,
    "futex_waitv": 449,
    "map_shadow_stack": 453,
    "futex_wake": 454,
    "futex_wait": 455,
    "futex_requeue": 456,
    "mseal": 462,
}

# Constants of Linux, for argument_rules.
_SOCK_STREAM, _F_SETOWN, _F_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 1, 8, 15, 0x8901, 0x8902
_THREAD = 0x10000 | 0x400  # CLONE_THREAD and CLONE_FILES; a thread with its own descriptors could hide open files
_ALL_BITS = 0xFFFFFFFF
_TRUNCATES, _OPEN_MASK = os.O_TRUNC, os.O_TRUNC | os.O_ACCMODE


# Rule for a system call that depends on the value of an argument: (numbers of the call on x86_64 and aarch64, index of the
# argument, mask for its value, values, allowed). If `allowed` is True, only these values are allowed. If it is False, only these
# values are refused.
Rule = tuple[tuple[int, int | None], int, int, tuple[int, ...], bool]


def argument_rules(pid: int) -> list[Rule]:
    """Return the rules for the system calls of process `pid` that depend on an argument."""
    return [
        ((56, 220), 0, _THREAD, (_THREAD,), True),  # clone: it may create threads, but no processes
        ((62, 129), 0, _ALL_BITS, (pid,), True),  # kill: only the process itself
        ((234, 131), 0, _ALL_BITS, (pid,), True),  # tgkill: only the process itself
        ((302, 261), 0, _ALL_BITS, (0,), True),  # prlimit64: only limits of the process itself
        ((53, 199), 1, 0xF, (_SOCK_STREAM,), True),  # socketpair: only streams, which cannot reach another process
        ((72, 25), 1, _ALL_BITS, (_F_SETOWN, _F_SETOWN_EX), False),  # fcntl: no signals to other processes
        ((16, 29), 1, _ALL_BITS, (_FIOSETOWN, _SIOCSPGRP), False),  # ioctl: no signals to other processes
        # prctl: the process cannot outlive its parent, and cannot hide its open files
        ((157, 167), 0, _ALL_BITS, (_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE), False),
        # open and openat: no truncation of files that are opened for reading; Landlock prevents this only from ABI 3 on
        ((2, None), 1, _OPEN_MASK, (_TRUNCATES,), False),
        ((257, 56), 2, _OPEN_MASK, (_TRUNCATES,), False),
    ]


_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # codes of BPF instructions
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026  # verdicts of a seccomp filter


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Return one BPF instruction. A comparison skips `if_true` or `if_false` of the following instructions."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def denied(column: int) -> list[int]:
    """Return the numbers of the calls in DENIED. `column` is 0 for x86_64, and 1 for aarch64."""
    entries = [entry.split()[-3:] for entry in DENIED.replace(",\n", ",").replace("\n", ",").split(",") if entry]
    return [int(entry[1 + column]) for entry in entries if entry[1 + column] != "-"]


def _argument_filter(number: int, argument: int, mask: int, values: tuple[int, ...], allowed: bool) -> list[bytes]:
    match, other = (_ALLOW, _EPERM) if allowed else (_EPERM, _ALLOW)
    # Load the lower 32 bits of seccomp_data.args[argument].
    body = [_instruction(_LOAD, 16 + 8 * argument), _instruction(_AND, mask)]
    body += [_instruction(_EQUAL, value, len(values) - i) for i, value in enumerate(values)]
    body += [_instruction(_RETURN, other), _instruction(_RETURN, match)]
    return [_instruction(_EQUAL, number, 0, len(body)), *body]


def seccomp_program(machine: str, pid: int) -> bytes:
    """Return the BPF program that filters every system call of process `pid`, as an array of `struct sock_filter`."""
    audit, column = ARCHITECTURES[machine]
    common = sorted(ALLOWED_COMMON.values())
    program = [
        _instruction(_LOAD, 4),
        _instruction(_EQUAL, audit, 1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, 0),
    ]
    program += [_instruction(_AT_LEAST, FIRST_COMMON, 0, len(common) + 2)]
    program += [_instruction(_EQUAL, number, len(common) - i) for i, number in enumerate(common)]
    program += [_instruction(_RETURN, _ENOSYS), _instruction(_RETURN, _ALLOW)]
    for number in denied(column):
        program += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _EPERM)]
    for numbers, argument, mask, values, allowed in argument_rules(pid):
        if (number := numbers[column]) is not None:
            program += _argument_filter(number, argument, mask, values, allowed)
    return b"".join([*program, _instruction(_RETURN, _ALLOW)])


# -- Landlock: files ------------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls of Landlock
# File rights of Landlock.
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14
# ABI version of Landlock -> bit mask of all file rights that exist from this version on.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
# Rights in the temporary folder: they allow plain files, but no subfolders.
_WORK_RIGHTS = _READ_FILE | _READ_DIR | _WRITE_FILE | _REMOVE_FILE | _MAKE_REG | _TRUNCATE

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SIGKILL = 1, 4, 22, 38, 9
_libc = ctypes.CDLL(None, use_errno=True)


def _require_success(result: int, what: str) -> int:
    """Return the result of a system call. Raises OSError if the call has failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def landlock_abi() -> int:
    """Return the ABI version of Landlock in the running kernel, or 0 if there is no Landlock."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def seccomp_works() -> bool:
    """Return whether the kernel supports seccomp filters that kill the process."""
    numbers = {"x86_64": 317, "aarch64": 277}
    action = ctypes.c_uint32(_KILL)
    return _libc.syscall(numbers.get(os.uname().machine, -1), 2, 0, ctypes.byref(action)) == 0


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = struct.pack("=Qi", rights, beneath)
    _require_success(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock rule for {path}")
    os.close(beneath)


def restrict_files(work: str, readable: list[str]) -> None:
    """Restrict access to files.

    After this call, the process can read only the paths `readable`, plain files in the folder `work`, and /dev/null. It can
    write only plain files in `work`, and /dev/null.
    """
    abi = landlock_abi()
    handled = _FILE_RIGHTS[max(known for known in _FILE_RIGHTS if known <= abi)]
    # Refuse TCP (from ABI 4 on), and abstract sockets and signals (from ABI 6 on).
    tcp, scope = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
    attributes = struct.pack("QQQ", handled, tcp, scope)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _require_success(
        _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "Landlock"
    )
    _allow_path(ruleset, work, _WORK_RIGHTS & handled)
    for path in readable:
        _allow_path(ruleset, path, _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE)
    _allow_path(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    _require_success(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


# -- Resource limits, capabilities, start ------------------------------------------------------------------------------


def limit_resources(limits: dict[str, int]) -> None:
    """Set hard resource limits.

    The limit of core dumps is 1 byte, because with any other limit the kernel may start a handler of core dumps.
    """
    for name, value in {"CORE": 1, "NOFILE": 64, "MEMLOCK": 0, "MSGQUEUE": 0, **limits}.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (max(1, soft - 1), hard))  # SIGXCPU is sent one second before SIGKILL


def drop_capabilities() -> None:
    """Drop all capabilities, so that root has only the file permissions of its user id."""
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _require_success(_libc.capset(header, nothing), "capset")


def restrict_system_calls() -> None:
    """Install the seccomp filter, permanently."""
    program = seccomp_program(os.uname().machine, os.getpid())
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    _require_success(_libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")


def restrict_process(config: dict) -> None:
    """Apply all restrictions to this process. Raises OSError if the kernel refuses a restriction."""
    limit_resources(config["limits"])
    _libc.mallopt(-8, 1)  # only one malloc arena, because each arena reserves 64 MiB of the limited address space
    _require_success(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    restrict_files(os.getcwd(), config["readable"])
    drop_capabilities()
    _require_success(_libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "parent death signal")
    assert os.getppid() == config["parent"], f"process {config['parent']}, which started this process, has ended"
    restrict_system_calls()


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
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # normally the module `site` sets them, but -S disables it
    sys.excepthook = _excepthook(source)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, "program.py", "exec"), module.__dict__)


if __name__ == "__main__":
    main()
