"""Compares a checkpoint with a plain write of the same number of bytes, and measures a training step during a save.

    python benchmarks/checkpoint.py [--hidden 512] [--repeats 5] [--folder /tmp] [--json FILE]

One process saves float32 weights, their optimizer state, and the states of its random number generators. The plain write takes
the same number of bytes from memory, writes them to one file and syncs the file. The methods alternate. Memory is the
proportional set size (PSS) of this process and of the process that writes the checkpoint, minus the PSS before the save. Memory
is sampled every 20 ms, in separate runs, and does not include the page cache.
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

from benchmarks import measurements

TIMEOUT_S = 600.0


@dataclass
class Seconds:
    """Measured seconds, one value per repeat."""

    plain: list[float] = field(default_factory=list)  # a plain write
    waited: list[float] = field(default_factory=list)  # a save that training waits for
    idle: list[float] = field(default_factory=list)  # an asynchronous save while the process does nothing else
    begin: list[float] = field(default_factory=list)  # `begin_save` of an asynchronous save during training
    finish: list[float] = field(default_factory=list)  # `finish_save` after the writing process has ended
    step: list[float] = field(default_factory=list)  # CPU-seconds of this process for a training step without a save
    during: list[float] = field(default_factory=list)  # mean CPU-seconds of this process for a step during a save


def seconds_of(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that `action` takes."""
    start = clock()
    action()
    return clock() - start


def cpu_seconds_of(action: Callable[[], object]) -> float:
    """Return the CPU-seconds that this process spends in `action`.

    They include kernel time, because the kernel copies pages that the writing process shares.
    """
    return seconds_of(action, time.process_time)


def plain_write(path: Path, content: np.ndarray) -> None:
    with path.open("wb") as file:
        content.tofile(file)
        os.fsync(file.fileno())
    path.unlink()


def save(actor, folder: Path, asynchronous: bool) -> None:
    actor.begin_save(folder, asynchronous)
    actor.finish_save(TIMEOUT_S)


def save_during_steps(actor, folder: Path, step: Callable[[], object], seconds: Seconds | None = None) -> None:
    """Begin an asynchronous save, run steps until the writing process has ended, and finish the save."""
    begin, steps = seconds_of(lambda: actor.begin_save(folder, asynchronous=True)), [cpu_seconds_of(step)]
    while not actor.save_has_ended():
        steps.append(cpu_seconds_of(step))
    finish = seconds_of(lambda: actor.finish_save(TIMEOUT_S))
    if seconds:
        seconds.begin.append(begin)
        seconds.finish.append(finish)
        seconds.during.append(statistics.mean(steps))


def pss_bytes() -> int:
    """Return the PSS of this process and its children."""
    total = 0
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for pid in (str(os.getpid()), *children):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # this child has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


@contextmanager
def record_peak(peaks: list[int]) -> Iterator[None]:
    """Measure the peak memory inside the context. Appends one number to `peaks`: the peak minus the memory before the context."""
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
    """Return the seconds, the peaks of additional memory by method, and the size of the checkpoint in bytes."""
    step()
    save(actor, folder / "first", asynchronous=False)
    size = sum(path.stat().st_size for path in (folder / "first").iterdir())
    seconds, peaks = Seconds(), {"step": [], "waited": [], "idle": [], "during": []}
    methods = {
        "step": lambda path: step(),
        "waited": lambda path: save(actor, path, asynchronous=False),
        "idle": lambda path: save(actor, path, asynchronous=True),
        "during": lambda path: save_during_steps(actor, path, step),
    }
    for repeat in range(repeats):
        content = np.random.default_rng(repeat).integers(0, 256, size, np.uint8)
        seconds.plain.append(seconds_of(lambda content=content: plain_write(folder / "plain", content)))
        del content
        names = {name: folder / f"{name}{repeat}" for name in ("waited", "idle", "during")}
        seconds.waited.append(seconds_of(lambda names=names: save(actor, names["waited"], asynchronous=False)))
        seconds.idle.append(seconds_of(lambda names=names: save(actor, names["idle"], asynchronous=True)))
        seconds.step.append(cpu_seconds_of(step))
        save_during_steps(actor, names["during"], step, seconds)
        for path in names.values():
            shutil.rmtree(path)
    for _ in range(min(3, repeats)):
        for name, method in methods.items():
            with record_peak(peaks[name]):
                method(folder / "watched")
            shutil.rmtree(folder / "watched", ignore_errors=True)
    return seconds, peaks, size


def show(seconds: Seconds, peaks: dict[str, list[int]], size: int, console: Console) -> None:
    def median(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    table = Table("", "s", "over a plain write", "extra memory over bytes", title=f"{size / 1e6:.0f} MB")
    table.add_row("plain write", median(seconds.plain), "1", "")
    for name, what in (("waited", "save, training waits"), ("idle", "asynchronous save, process idle")):
        values = getattr(seconds, name)
        memory = max(peaks[name]) / size
        table.add_row(what, median(values), one_process.ratio(values, seconds.plain), f"{memory:.2f}")
    memory = max(peaks["during"]) / size
    table.add_row("during steps: begin", median(seconds.begin), one_process.ratio(seconds.begin, seconds.plain), "")
    table.add_row("finish", median(seconds.finish), one_process.ratio(seconds.finish, seconds.plain), f"{memory:.2f}")
    table.add_row("step, CPU-s", median(seconds.step), "", f"{max(peaks['step']) / size:.2f}")
    table.add_row(
        "step during a save, CPU-s",
        median(seconds.during),
        f"over a step alone: {one_process.ratio(seconds.during, seconds.step)}",
    )
    console.print(table)


def measurements_of(seconds: Seconds, peaks: dict[str, list[int]], size: int) -> list[measurements.Measurement]:
    """Return ratios of saves to plain writes, ratios of steps during a save to steps without a save, and the memory."""
    saves = {"save, training waits": seconds.waited, "asynchronous save": seconds.idle, "begin": seconds.begin}
    result = [
        measurements.paired_ratio(f"{name}: seconds over a plain write", values, seconds.plain)
        for name, values in saves.items()
    ]
    result.append(measurements.of_repeats("step: CPU-s", seconds.step, "CPU-s", "cpu_s"))
    result.append(
        measurements.paired_ratio("step during a save: CPU-s over a step alone", seconds.during, seconds.step)
    )
    memory = [1 + peak / size for peak in peaks["during"]]
    name = "save during steps: checkpoint and extra memory over checkpoint"
    return [*result, measurements.of_repeats(name, memory, "ratio", "ratio")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk to measure"
    )
    measurements.add_json_option(parser)
    given = parser.parse_args()
    one_process.start()
    from mrl.algorithms.losses import PPOClip
    from mrl.workers.actor_critic import MegatronActor

    sizes = Sizes(given.hidden, 4, 8192, groups=1, responses=2, prompt=(8, 16), response=(16, 32))
    block, batch = one_process.make_batch(sizes)
    actor = MegatronActor(one_process.spec_of(one_process.write_model(sizes)))
    replica_batch = one_process.partition(batch, sizes.max_tokens, share_prompts=True).replica_batches[0]
    with tempfile.TemporaryDirectory(prefix="mrl_benchmark_", dir=given.folder) as folder:
        found = measure(
            actor, lambda: actor.update(block, [replica_batch], PPOClip(), [1e-9]), Path(folder), given.repeats
        )
    show(*found, Console(width=130))
    measurements.write(given.json, measurements_of(*found))


if __name__ == "__main__":
    main()
