"""The seccomp filter of the sandbox: a list of the system calls, and of the arguments, that a program may use.

The filter is an allow-list. A call that is not listed fails with EPERM, or with ENOSYS if its number is FIRST_UNKNOWN or larger.
All x32 calls have such numbers. A call through another ABI, such as 32-bit x86, kills the program.

Landlock restricts only how a process opens files. A program may open the files of the Python installation for reading, so the
filter refuses every call that affects other processes through a file that is open for reading: locks, leases, notifications,
changes of file attributes, and the eviction of pages from the page cache.
"""

import os
import struct
from dataclasses import dataclass

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # machine -> (AUDIT_ARCH, column of numbers)

# System calls that are allowed with any arguments, by category. Each entry has a name, the number on x86_64 and the number on
# aarch64. `-` means that there is no such call.
ALLOWED = """
files        read 0 63, write 1 64, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, lseek 8 62, pread64 17 67, pwrite64 18 68,
             readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70, access 21 -, faccessat 269 48, faccessat2 439 439,
             newfstatat 262 79, statx 332 291, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, sendfile 40 71,
             copy_file_range 326 285, ftruncate 77 46, fallocate 285 47, getdents 78 -, getdents64 217 61, getcwd 79 17,
             chdir 80 49, rename 82 -, renameat 264 38, renameat2 316 276, unlink 87 -, unlinkat 263 35, link 86 -,
             linkat 265 37, readlink 89 -, readlinkat 267 78, umask 95 166
waiting      poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20,
             epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, nanosleep 35 101,
             clock_nanosleep 230 115, pause 34 -, sched_yield 24 124, restart_syscall 219 128
memory       mprotect 10 226, munmap 11 215, brk 12 214, mremap 25 216, map_shadow_stack 453 453
threads      futex 202 98, futex_waitv 449 449, futex_wake 454 454, futex_wait 455 455, futex_requeue 456 456,
             set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, gettid 186 178, exit 60 93, exit_group 231 94
signals      rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
             rt_sigtimedwait 128 137, sigaltstack 131 132, alarm 37 -, getitimer 36 102, setitimer 38 103
information  getpid 39 172, getppid 110 173, getpgrp 111 -, getpgid 121 155, getsid 124 156, getuid 102 174, getgid 104 176,
             geteuid 107 175, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, uname 63 160,
             sysinfo 99 179, times 100 153, getrusage 98 165, getrlimit 97 163, time 201 -, gettimeofday 96 169,
             clock_gettime 228 113, clock_getres 229 114, getcpu 309 168, getrandom 318 278
sockets      recvfrom 45 207, shutdown 48 210, getsockname 51 204
"""

# System calls that return 0 without an effect. A flush is useless, because the temporary folder is removed when the program ends.
# It would also delay other processes that write to the same disk.
IGNORED = "fsync 74 82, fdatasync 75 83"

FIRST_UNKNOWN = 424
"""From this number on, both architectures use the same numbers, and calls that are not listed fail with ENOSYS. Programs then
use older calls: for example, the C library creates threads with clone instead of clone3."""

OWN_PID = -1  # stands in RULES for the program's own process id, which is unknown before the process starts
_ALL = 0xFFFFFFFF  # mask of all 32 bits
_AF_UNIX, _SOCK_STREAM, _SOCK_FLAGS = 1, 1, os.O_NONBLOCK | os.O_CLOEXEC
_MAP_HUGETLB = 0x40000
_OPEN_MODES = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC)
# Flags of clone with which glibc and musl create a thread. The thread shares memory, open files and signal handlers.
_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_GET_SEALS
_FCNTL = (0, 1, 2, 3, 4, 1030, 1032, 1034)
# TCGETS, TCGETS2, TIOCGWINSZ (properties of a terminal), FIONREAD (number of bytes that can be read), FIONBIO, FIONCLEX and
# FIOCLEX (flags of a descriptor).
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_PRCTL = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA: names of threads and of memory
# hints, DONTNEED, FREE, huge pages, guard pages; not COLD and PAGEOUT, which evict pages of the page cache
_MADVISE = (0, 1, 2, 3, 4, 8, 14, 15, 102, 103)


@dataclass(frozen=True)
class ArgumentCondition:
    """Condition on one argument of a system call: the bitwise AND of the argument and `mask` is one of the values."""

    argument: int  # index
    values: tuple[int, ...]
    mask: int = _ALL
    is_64_bit: bool = False  # True for pointers: the upper half of the argument must be zero


@dataclass(frozen=True)
class CallRule:
    """A system call that is allowed if all conditions hold. Otherwise it fails with EPERM."""

    name: str
    numbers: tuple[int, int | None]  # on x86_64 and aarch64; None: there is no such call
    conditions: tuple[ArgumentCondition, ...]


RULES = (  # further allowed calls, most of them only with certain arguments
    CallRule("open", (2, None), (ArgumentCondition(1, _OPEN_MODES, os.O_ACCMODE | os.O_TRUNC),)),
    CallRule("openat", (257, 56), (ArgumentCondition(2, _OPEN_MODES, os.O_ACCMODE | os.O_TRUNC),)),
    CallRule(
        "mmap", (9, 222), (ArgumentCondition(3, (0,), _MAP_HUGETLB),)
    ),  # without huge pages, because all processes of the machine share a fixed number of them
    CallRule("madvise", (28, 233), (ArgumentCondition(2, _MADVISE),)),
    CallRule("clone", (56, 220), (ArgumentCondition(0, _THREAD_FLAGS),)),
    CallRule("kill", (62, 129), (ArgumentCondition(0, (OWN_PID,)),)),
    CallRule("tgkill", (234, 131), (ArgumentCondition(0, (OWN_PID,)),)),
    CallRule("prlimit64", (302, 261), (ArgumentCondition(0, (0, OWN_PID)),)),
    CallRule("setrlimit", (160, 164), ()),
    CallRule("sched_getaffinity", (204, 123), (ArgumentCondition(0, (0, OWN_PID)),)),
    CallRule("fcntl", (72, 25), (ArgumentCondition(1, _FCNTL),)),
    CallRule("ioctl", (16, 29), (ArgumentCondition(1, _IOCTL),)),
    CallRule("prctl", (157, 167), (ArgumentCondition(0, _PRCTL),)),
    CallRule(
        "socketpair",
        (53, 199),
        (
            ArgumentCondition(0, (_AF_UNIX,)),
            ArgumentCondition(1, (_SOCK_STREAM,), _ALL & ~_SOCK_FLAGS),
            ArgumentCondition(2, (0,)),
        ),
    ),
    CallRule(
        "sendto", (44, 206), (ArgumentCondition(4, (0,), is_64_bit=True),)
    ),  # only on a socket pair: an address is not allowed
)

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # codes of BPF instructions
_ALLOW, _KILL, _EPERM, _ENOSYS, _SUCCESS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026, 0x00050000  # verdicts
_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter: code, jump if true, jump if false, value


@dataclass(frozen=True)
class SeccompProgram:
    """A BPF program as an array of `struct sock_filter`, in which the process id is still missing."""

    code: bytes
    own_pid_offsets: tuple[int, ...]  # offsets in `code` at which the sandboxed process writes its process id (4 bytes)

    @classmethod
    def of(cls, instructions: list[tuple[int, int, int, int]]) -> "SeccompProgram":
        """Encode instructions (code, jump if true, jump if false, value). The value OWN_PID becomes 0."""
        code = b"".join(_INSTRUCTION.pack(*each[:3], max(0, each[3])) for each in instructions)
        offsets = [i * _INSTRUCTION.size + 4 for i, each in enumerate(instructions) if each[3] == OWN_PID]
        return cls(code, tuple(offsets))


def numbers_of(table: str, column: int) -> dict[str, int]:
    """Return a dict from a table: name of a call -> its system call number. `column` is 0 for x86_64, and 1 for aarch64."""
    entries = [entry.split()[-3:] for entry in table.replace(",\n", ",").replace("\n", ",").split(",") if entry.strip()]
    return {entry[0]: int(entry[1 + column]) for entry in entries if entry[1 + column] != "-"}


def _check(condition: ArgumentCondition) -> list[tuple[int, int, int, int]]:
    """Return instructions that return EPERM if the condition does not hold. Otherwise the next instruction of the filter runs."""
    low, values = 16 + 8 * condition.argument, condition.values  # offset of the argument's lower half in seccomp_data
    upper = [(_LOAD, 0, 0, low + 4), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _EPERM)] if condition.is_64_bit else []
    compare = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*upper, (_LOAD, 0, 0, low), (_AND, 0, 0, condition.mask), *compare, (_RETURN, 0, 0, _EPERM)]


def seccomp_program(machine: str) -> SeccompProgram:
    """Return the filter for the system calls of programs on `machine`, which is a key of ARCHITECTURES."""
    audit, column = ARCHITECTURES[machine]
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for table, verdict in ((ALLOWED, _ALLOW), (IGNORED, _SUCCESS)):
        for number in numbers_of(table, column).values():
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, verdict)]
    for rule in RULES:
        if (number := rule.numbers[column]) is not None:
            body = [step for condition in rule.conditions for step in _check(condition)] + [(_RETURN, 0, 0, _ALLOW)]
            program += [(_EQUAL, 0, len(body), number), *body]
    program += [(_AT_LEAST, 0, 1, FIRST_UNKNOWN), (_RETURN, 0, 0, _ENOSYS), (_RETURN, 0, 0, _EPERM)]
    return SeccompProgram.of(program)
