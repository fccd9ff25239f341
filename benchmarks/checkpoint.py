"""Seconds and memory of a checkpoint beside a plain write of as many bytes, and what a step costs while one is written.

    python benchmarks/checkpoint.py [--hidden 512] [--repeats 5] [--folder /tmp]

One process, float32: weights, optimizer state and random number generators. A plain write takes as many bytes from memory to
one file and syncs it. All ways run in turn. Memory is the proportional set size (PSS) of this process and its writer,
sampled every 20 ms in runs of their own, less what it was before; the page cache is in no process.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import one_process
from one_process import Sizes
from rich.console import Console
from rich.table import Table

TIMEOUT_S = 600.0


@dataclass
class Seconds:
    """Of each repeat."""

    plain: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)  # a save that training waits for
    idle: list[float] = field(default_factory=list)  # an asynchronous one, of a process that does nothing meanwhile
    begin: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)  # CPU-seconds of this process, no save on its way
    beside: list[float] = field(default_factory=list)  # the same of steps that began while the writer wrote, mean


def seconds_of(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    action()
    return clock() - start


def cpu_seconds_of(action: Callable[[], object]) -> float:
    """Of this process, time in the kernel included: the copies of pages that its writer holds."""
    return seconds_of(action, time.process_time)


def plain_write(path: Path, content: np.ndarray) -> None:
    with path.open("wb") as file:
        content.tofile(file)
        os.fsync(file.fileno())
    path.unlink()


def save(actor, folder: Path, asynchronous: bool) -> None:
    actor.begin_save(folder, asynchronous)
    actor.finish_save(TIMEOUT_S)


def save_beside(actor, folder: Path, step: Callable[[], object], seconds: Seconds | None = None) -> None:
    """Begin, take steps until the writer has ended, finish."""
    begin, steps = seconds_of(lambda: actor.begin_save(folder, asynchronous=True)), [cpu_seconds_of(step)]
    while not actor.save_finished():
        steps.append(cpu_seconds_of(step))
    finish = seconds_of(lambda: actor.finish_save(TIMEOUT_S))
    if seconds:
        seconds.begin.append(begin)
        seconds.finish.append(finish)
        seconds.beside.append(statistics.mean(steps))


def pss_bytes() -> int:
    """Of this process and its children."""
    total = 0
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for pid in (str(os.getpid()), *children):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


@contextmanager
def peak_of(peaks: list[int]) -> Iterator[None]:
    """Append the largest extra memory seen inside."""
    before, seen, stop = pss_bytes(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            seen.append(pss_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    peaks.append(max(0, max(seen) - before))


def measure(actor, step: Callable[[], object], folder: Path, repeats: int) -> tuple[Seconds, dict[str, list[int]], int]:
    """(seconds, peaks of extra memory by way, bytes of the checkpoint)."""
    step()
    save(actor, folder / "first", asynchronous=False)
    size = sum(path.stat().st_size for path in (folder / "first").iterdir())
    seconds, peaks = Seconds(), {"step": [], "waited": [], "idle": [], "beside": []}
    ways = {
        "step": lambda path: step(),
        "waited": lambda path: save(actor, path, asynchronous=False),
        "idle": lambda path: save(actor, path, asynchronous=True),
        "beside": lambda path: save_beside(actor, path, step),
    }
    for repeat in range(repeats):
        content = np.random.default_rng(repeat).integers(0, 256, size, np.uint8)
        seconds.plain.append(seconds_of(lambda content=content: plain_write(folder / "plain", content)))
        del content
        names = {name: folder / f"{name}{repeat}" for name in ("waited", "idle", "beside")}
        seconds.waited.append(seconds_of(lambda names=names: save(actor, names["waited"], asynchronous=False)))
        seconds.idle.append(seconds_of(lambda names=names: save(actor, names["idle"], asynchronous=True)))
        seconds.step.append(cpu_seconds_of(step))
        save_beside(actor, names["beside"], step, seconds)
        for path in names.values():
            shutil.rmtree(path)
    for _ in range(min(3, repeats)):
        for name, way in ways.items():
            with peak_of(peaks[name]):
                way(folder / "watched")
            shutil.rmtree(folder / "watched", ignore_errors=True)
    return seconds, peaks, size


def show(seconds: Seconds, peaks: dict[str, list[int]], size: int, console: Console) -> None:
    def median(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    table = Table("", "s", "of a plain write", "extra memory, of the bytes", title=f"{size / 1e6:.0f} MB")
    table.add_row("plain write", median(seconds.plain), "1", "")
    for name, what in (("waited", "save, waited for"), ("idle", "asynchronous, idle meanwhile")):
        values = getattr(seconds, name)
        memory = max(peaks[name]) / size
        table.add_row(what, median(values), one_process.ratio(values, seconds.plain), f"{memory:.2f}")
    memory = max(peaks["beside"]) / size
    table.add_row("beside steps: begin", median(seconds.begin), one_process.ratio(seconds.begin, seconds.plain), "")
    table.add_row("finish", median(seconds.finish), one_process.ratio(seconds.finish, seconds.plain), f"{memory:.2f}")
    table.add_row("step, CPU-s", median(seconds.step), "", f"{max(peaks['step']) / size:.2f}")
    table.add_row(
        "step while writing, CPU-s",
        median(seconds.beside),
        f"of a step: {one_process.ratio(seconds.beside, seconds.step)}",
    )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the disk is")
    given = parser.parse_args()
    one_process.start()
    from mrl.algorithms.losses import PPOClip
    from mrl.workers.actor import MegatronActor

    sizes = Sizes(given.hidden, 4, 8192, groups=1, responses=2, prompt=(8, 16), response=(16, 32))
    block, batch = one_process.make_batch(sizes)
    actor = MegatronActor(one_process.spec_of(one_process.write_model(sizes)))
    share = one_process.planned(batch, sizes.max_tokens, share_prompts=True).rank_batches[0]
    with tempfile.TemporaryDirectory(prefix="mrl_benchmark_", dir=given.folder) as folder:
        found = measure(actor, lambda: actor.update(block, [share], PPOClip(), [1e-9]), Path(folder), given.repeats)
    show(*found, Console(width=130))


if __name__ == "__main__":
    main()
