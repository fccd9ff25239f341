"""Limits of a process (ulimit)."""

from collections.abc import Iterator

from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen

NAME = "limits"
FILES, FILES_OF_A_CLUSTER = 1024, 4096
PROCESSES = 4096  # and threads: each process of Ray, torch and SGLang has dozens


def check(seen: Seen) -> Iterator[Finding]:
    """Open files and processes."""
    needed = FILES_OF_A_CLUSTER if seen.several or seen.gpus else FILES
    for host in seen.hosts:
        soft, hard = host.limits.get("nofile", (-1, -1))
        if 0 <= hard < needed:
            what = f"a process may open {hard} files and cannot raise that; {needed} are needed"
            why = (
                "each connection, object and log is an open file: 'Too many open files', mostly in the middle of a run"
            )
            yield error(
                NAME,
                [host.host],
                what,
                why,
                f"LimitNOFILE={needed * 16} in slurmd's unit; in a container --ulimit nofile=65536",
            )
        elif 0 <= soft < needed:
            what = f"a process may open {soft} files, {needed} are needed; it may be raised to {'any' if hard < 0 else hard}"
            why = (
                "each connection, object and log is an open file: 'Too many open files', mostly in the middle of a run"
            )
            yield warning(NAME, [host.host], what, why, f"ulimit -n {65536 if hard < 0 else min(hard, 65536)}")
        soft, hard = host.limits.get("nproc", (-1, -1))
        if 0 <= soft < PROCESSES:
            cure = (
                f"ulimit -u {PROCESSES * 4}" if hard < 0 or hard >= PROCESSES else "nproc in /etc/security/limits.conf"
            )
            what = f"a user may have {soft} processes and threads, {PROCESSES} are needed"
            yield warning(
                NAME, [host.host], what, "'Resource temporarily unavailable' when a pool of threads is made", cure
            )
