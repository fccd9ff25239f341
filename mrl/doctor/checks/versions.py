"""Versions: those of the lock, and the same on all hosts."""

from collections.abc import Iterator, Mapping

from mrl.doctor import lock
from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen, unlike, usual

NAME = "versions"


def check(seen: Seen, matrix: Mapping[bool, Mapping[str, str]] | None = None) -> Iterator[Finding]:
    """`matrix`: whether there are GPUs -> distribution -> tested version; default: the locks'."""
    matrix = matrix or {gpu: lock.tested(gpu) for gpu in (False, True)}
    for host in seen.hosts:
        gpu = bool(host.gpus.cards)
        cure = f"make setup LOCK={lock.GPU_LOCK if gpu else lock.CPU_LOCK}"
        for name, tested in matrix[gpu].items():
            yield from _judge(host.host, name, host.software.packages.get(name), tested, cure)
        torch = host.software.packages.get("torch") or ""
        if gpu and "+cpu" in torch:
            yield error(
                NAME, [host.host], f"torch {torch} is built without CUDA", "the GPUs here would not be used", cure
            )
    yield from _differences(seen)


def _judge(host: str, name: str, found: str | None, tested: str, cure: str) -> Iterator[Finding]:
    if found is None:
        yield error(NAME, [host], f"{name} is not installed; {tested} is tested", "a run imports it", cure)
    elif found.partition("+")[0] != tested.partition("+")[0]:
        why = "the tested versions move together: sglang pins torch and transformers, Megatron reads torch's internals"
        yield warning(NAME, [host], f"{name} {found} is installed; {tested} is tested", why, cure)


def _differences(seen: Seen) -> Iterator[Finding]:
    pythons = {one.host: one.software.python for one in seen.hosts}
    why = "processes on different hosts exchange pickles: Ray refuses such nodes, and other libraries fail later"
    for host, found in unlike(pythons).items():
        mend = f"use the same environment on all hosts: install Python {usual(pythons)} here, then make setup"
        yield error(NAME, [host], f"Python {found}; the other hosts have {usual(pythons)}", why, mend)
    for name in sorted({name for one in seen.hosts for name in one.software.packages}):
        versions = {one.host: one.software.packages.get(name) for one in seen.hosts}
        for host, found in unlike(versions).items():
            what = f"{name} {found or 'is missing'}; the other hosts have {usual(versions) or 'none'}"
            yield error(
                NAME, [host], what, why, "use one environment that all hosts share, or run make setup on this one"
            )
    sources = {one.host: one.software.source for one in seen.hosts}
    for host, found in unlike(sources).items():
        what = f"the code here is another ({found}) than on the other hosts ({usual(sources)})"
        mend = (
            "start from one checkout that all hosts share; where it is copied: git status && git rev-parse HEAD on both"
        )
        yield error(
            NAME,
            [host],
            what,
            "ranks of different code wait for each other for ever, or compute different things",
            mend,
        )
