"""The current state of a run, and a frame that shows this state on the terminal (`mrl top`).

The state is read from the run directory and from this host. Reading does not disturb the run: `mrl top` opens no connection to
Ray or to an engine, takes no lock and writes no file.
"""

import math
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mrl.checkpoint.run_dir import RUN_RECORD, STARTS_FILE, read_run_record
from mrl.core import metrics as declared
from mrl.core.run_warnings import WARNINGS_FILE
from mrl.hang_report.process_registry import ProcessRecord, read_activities, read_process_records, registry_folder
from mrl.hang_report.process_snapshot import DEAD, STATES, STOPPED
from mrl.tracking.process_use import (
    EngineLoad,
    Gpus,
    GpuUse,
    Use,
    UseMeter,
    lock_holder,
    read_engine_load,
    read_process,
)
from mrl.tracking.report.recorded_run import LOG_FILE

TAIL_BYTES = 200_000  # number of bytes that are read, at the end of a file
SHOWN_STEPS = 24  # number of last steps that are shown
ETA_STEPS = 10  # the mean time of this number of last steps predicts the remaining time
# largest number of warnings and errors that are shown: of the driver, and of all other processes together
SHOWN_PROBLEMS = 5
SERIES = {
    "reward/mean": "mean reward",
    "throughput/tokens_per_s": "throughput",
    "time/step_s": "time of a step",
    "rollout/staleness_mean": "mean staleness",
}
"""Metric -> its name in the table of the last steps."""
CLOCK_STEP_S = 1.0  # two changes of a folder within this time may get the same modification time
OTHER_LINES = 18  # usual number of lines of a frame outside the table of processes; a frame with many problems has more
MIN_PROCESSES = 4  # number of processes that even a small terminal shows
BLOCKS = "▁▂▃▄▅▆▇█"  # characters of a sparkline, from the lowest to the highest value
REMOTE, RUNNING = "remote", "running"  # states of a process in addition to DEAD and STOPPED
# A warning or an error in the log. Groups: time, level, text.
_PROBLEM = re.compile(r"^\[\d+-\d+-\d+ ([\d:]+),\d+\]\[[^]]*\]\[(WARNING|ERROR|CRITICAL)\] - (.*)")


@dataclass(frozen=True)
class ProcessView:
    """One process of the run."""

    name: str  # such as "actor 0", "engine 1"
    role: str  # driver, rank, rollout or engine
    rank: int  # index of a trainer rank; -1 for other processes
    host: str
    pid: int
    state: str  # RUNNING, REMOTE, DEAD or one of the states in STOPPED
    activity: str = ""  # oldest activity that the process has not finished; "" if it has none
    other_activities: int = 0  # number of further unfinished activities
    activity_s: float | None = None  # how long the activity has lasted; None without one, and for a dead process
    use: Use | None = None  # None for a dead process, and for a process of another host
    load: EngineLoad | None = None  # load of an engine on this host; None if unknown, and for other processes

    @property
    def runs_here(self) -> bool:
        return self.state not in (REMOTE, DEAD)

    @property
    def doing(self) -> str:
        """What the process does, in words."""
        more = f" and {self.other_activities} more" if self.other_activities else ""
        words = [self.state] if self.state != RUNNING else []
        if self.activity:
            words.append(f"{'last ' if self.state == DEAD else ''}{self.activity}{more}")
        if self.load:
            rate = f", {self.load.tokens_per_s:,.0f} tokens/s" if self.load.tokens_per_s else ""
            words.append(f"{self.load.running} running, {self.load.waiting} waiting{rate}")
        return "; ".join(words) or "–"


@dataclass(frozen=True)
class RunView:
    """Everything that one frame shows."""

    name: str
    folder: str
    host: str  # name of this host
    state: str  # see `_state`
    step: int  # number of finished steps
    num_steps: int | None  # None if the config cannot be read
    sft_step: int  # number of finished steps of the warm start; 0 without a warm start, or after it
    elapsed_s: float | None  # see LiveRun._elapsed_s
    remaining_s: float | None
    now: list[str]  # lines about what the processes do now; see `_now`
    processes: list[ProcessView]
    gpus: list[GpuUse]
    metrics: dict[str, float]  # of the last step
    series: dict[str, list[float]]  # metric -> its values in the last SHOWN_STEPS steps
    problems: list[str]  # last warnings and errors


class _CachedTail:
    """The last lines of files. A file is read again only after it has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], list[bytes]]] = {}  # file -> (its stat values, its lines)

    def lines(self, path: Path) -> list[bytes]:
        """Return the lines in the last TAIL_BYTES of a file; [] if it cannot be read. The first line may be cut."""
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            if path not in self._known or self._known[path][0] != stamp:
                with path.open("rb") as file:
                    file.seek(max(0, status.st_size - TAIL_BYTES))
                    self._known[path] = stamp, file.read().splitlines()
            return self._known[path][1]
        except OSError:
            return []

    def records(self, path: Path) -> list[dict[str, Any]]:
        """Return the JSON objects in the lines that `lines` returns. Damaged lines are skipped."""
        found = []
        for line in self.lines(path):
            with suppress(orjson.JSONDecodeError):
                found.append(orjson.loads(line))
        return [each for each in found if isinstance(each, dict)]


class LiveRun:
    """Reads the state of one run. `read` may be called again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, socket.gethostname()
        self._files, self._meter, self._gpus = _CachedTail(), UseMeter(), Gpus()
        self._config: dict[str, Any] = {}
        self._registered: tuple[float, list[ProcessRecord]] = (0.0, [])  # (last change of the registry, its records)

    def read(self) -> RunView:
        """Return the state of the run now."""
        steps = [line for line in self._files.records(self.folder / "metrics.jsonl") if _is_step(line)][-SHOWN_STEPS:]
        supervised = [line for line in self._files.records(self.folder / "sft.jsonl") if _is_step(line)]
        events = self._files.records(self.folder / STARTS_FILE)
        driver, started_at = lock_holder(self.folder / "lock"), _modified(self.folder / RUN_RECORD)
        processes = self._processes(driver)
        state = _state(events, driver, started_at, processes, bool(steps))
        step, total = (steps[-1]["step"] if steps else 0), self._num_steps(steps)
        is_live = state in ("starting", RUNNING)
        return RunView(
            name=str(self._setting("run", "name") or self.folder.resolve().name),
            folder=str(self.folder),
            host=self.host,
            state=state,
            step=step,
            num_steps=total,
            sft_step=supervised[-1]["step"] if supervised and not steps else 0,
            elapsed_s=self._elapsed_s(events, started_at if driver else None, is_live),
            remaining_s=_remaining_s(steps, total - step) if is_live and total is not None else None,
            now=_now(processes) if is_live else [],
            processes=processes,
            gpus=self._gpus.read(),
            metrics=_numbers_of(steps[-1]) if steps else {},
            series={name: [line[name] for line in steps if _is_number(line.get(name))] for name in SERIES},
            problems=self._problems(),
        )

    def _num_steps(self, steps: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the number of steps: the minimum of trainer.max_steps and an estimate for trainer.epochs; None if unknown."""
        total, epochs = self._setting("trainer", "max_steps"), self._setting("trainer", "epochs")
        if not isinstance(total, int):
            return None
        passes = steps[-1].get("rollout/epoch") if steps else None
        return (
            min(total, max(steps[-1]["step"], math.ceil(steps[-1]["step"] * epochs / passes)))
            if epochs and passes
            else total
        )

    def _setting(self, section: str, key: str) -> Any:
        if not self._config:
            with suppress(ValueError, OSError):
                self._config = dict((read_run_record(self.folder) or {}).get("config") or {})
        values = self._config.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def _processes(self, driver: int | None) -> list[ProcessView]:
        """Return the driver and the registered processes."""
        memory = self._gpus.memory_by_process()
        found = []
        if driver is not None and (use := self._meter.measure(driver, memory, with_children=False)):
            found.append(ProcessView("driver", "driver", -1, self.host, driver, RUNNING, use=use))
        folder = registry_folder(self.folder)
        changed = _modified(folder) or 0.0  # a process registers by writing a new file
        if changed != self._registered[0] or time.time() - changed < CLOCK_STEP_S:
            self._registered = changed, read_process_records(folder)
        return found + [self._process(folder, record, memory) for record in self._registered[1]]

    def _process(self, folder: Path, record: ProcessRecord, memory: dict[int, dict[int, int]]) -> ProcessView:
        name = f"{record.model or 'actor'} {record.rank}" if record.role == "rank" else record.name.replace("_", " ")
        activities = read_activities(folder / f"{record.name}.activities")
        use, load, state = None, None, REMOTE
        if record.host == self.host:
            times = read_process(record.pid)
            is_same = times is not None and times.started == record.started  # a pid may be reused
            word = STATES.get(times.letter, RUNNING) if times and is_same else DEAD
            state = word if word == DEAD or word in STOPPED else RUNNING
        if state not in (REMOTE, DEAD):
            use = self._meter.measure(record.pid, memory, with_children=record.role == "engine")
            load = read_engine_load(record.pid) if record.role == "engine" else None
        since = time.time() - activities[0].since if activities and state != DEAD else None
        text = _printable(activities[0].text) if activities else ""
        others = max(0, len(activities) - 1)
        identity = (name, record.role, record.rank, record.host, record.pid, state)
        return ProcessView(*identity, text, others, since, use, load)

    def _elapsed_s(self, events: Sequence[dict[str, Any]], started_at: float | None, is_live: bool) -> float | None:
        """Return the time since the last start; for an ended run, until its recorded end, or else until its last step."""
        starts = [each["time"] for each in events if each.get("event") != "end" and _is_number(each.get("time"))]
        begin = started_at if started_at is not None else starts[-1] if starts else None
        if begin is None:
            return None
        if is_live:
            return max(0.0, time.time() - begin)
        end = events[-1].get("time") if events and events[-1].get("event") == "end" else None
        last = end if _is_number(end) else _modified(self.folder / "metrics.jsonl")
        return max(0.0, last - begin) if last else None

    def _problems(self) -> list[str]:
        """Return the last warnings and errors: those in the driver's log, then those of other processes, each newest first."""
        logged, others = [], []
        for line in self._files.lines(self.folder / LOG_FILE):
            if match := _PROBLEM.match(line.decode(errors="replace")):
                logged.append(_printable(f"{match[1]} {match[2].lower()}: {match[3]}"))
        for record in self._files.records(self.folder / WARNINGS_FILE):
            others.append(_printable(f"{record.get('process', '')}: {record.get('text', '')}"))
        distinct = list(dict.fromkeys(reversed(others)))  # the file may have several lines for one repeated warning
        return logged[: -SHOWN_PROBLEMS - 1 : -1] + distinct[:SHOWN_PROBLEMS]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers_of(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if name != "step" and _is_number(value)}


def _is_step(line: dict[str, Any]) -> bool:
    return isinstance(line.get("step"), int)


def _modified(path: Path) -> float | None:
    """Return the time of the last change of a file; None if there is no file."""
    try:
        return path.stat().st_mtime_ns / 1e9
    except OSError:
        return None


def _printable(text: str) -> str:
    """Return the text without characters that would control the terminal."""
    return "".join(character if character.isprintable() else " " for character in text[:500])


def _state(
    events: Sequence[dict[str, Any]],
    driver: int | None,
    started_at: float | None,
    processes: Sequence[ProcessView],
    has_steps: bool,
) -> str:
    """Return the state of the run: "starting", "running", an outcome, or a note that no process runs here.

    mrl.checkpoint.run_dir.RunEvent lists the outcomes.

    `events`: lines of starts.jsonl. `driver`: pid of the process that locks the run directory. `started_at`: time at which
    run.json was written.
    """
    last = events[-1] if events else {}
    # whether the recorded end belongs to an earlier attempt
    is_new = driver is not None and (started_at or 0) > (last.get("time") or 0)
    if last.get("event") == "end" and not is_new:
        return str(last.get("outcome"))
    if any(process.runs_here for process in processes):
        return RUNNING if has_steps else "starting"
    if any(process.state == REMOTE for process in processes):
        return "unknown: all processes are on other hosts"
    return "no process alive"


def _remaining_s(steps: Sequence[dict[str, Any]], num_remaining: int) -> float | None:
    """Return the predicted time of the remaining steps; None before the first step."""
    names = ("time/step_s", "time/evaluate_s", "time/checkpoint_s")  # time/step_s includes neither of the other two
    times = [sum(line[name] for name in names if _is_number(line.get(name))) for line in steps[-ETA_STEPS:]]
    return max(0, num_remaining) * sum(times) / len(times) if times else None


def _now(processes: Sequence[ProcessView]) -> list[str]:
    """Return what the trainer ranks and the rollout worker do now, one line each, and whether the driver is missing."""
    has_driver = any(process.role == "driver" for process in processes)
    lines = [] if has_driver else ["driver: not found on this host; it runs on another host, or has died"]
    for role, title in (("rank", "trainer ranks"), ("rollout", "rollout worker")):
        group = [process for process in processes if process.role == role and process.state != DEAD]
        busy = [process for process in group if process.activity and process.activity_s is not None]
        if busy:
            first = max(busy, key=lambda process: process.activity_s or 0)
            count = f" ({len(busy)} of {len(group)})" if role == "rank" else ""
            lines.append(f"{title}{count}: {first.activity} for {_duration(first.activity_s)}")
        elif group:
            lines.append(f"{title}: idle")
    return lines


def frame(view: RunView, height: int | None = None) -> RenderableType:
    """Return one frame. `height`: number of lines of the terminal, which limits the shown processes; None: show everything."""
    max_processes = None if height is None else max(MIN_PROCESSES, height - OTHER_LINES)
    is_cut = height is not None  # whether each warning gets only one line
    parts = [
        _header(view),
        *(Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in view.now),
        Text(),
        _process_table(view, max_processes),
    ]
    for gpu in view.gpus:
        memory = f"{_size(gpu.used_bytes)} of {_size(gpu.total_bytes)}"
        busy = "" if gpu.busy_percent is None else f"{gpu.busy_percent} % busy, "
        parts.append(Text(f"GPU {gpu.index}: {busy}{memory}", no_wrap=True, overflow="ellipsis"))
    if view.metrics:
        parts += [Text(), _step_table(view), _staleness(view)]
    if view.problems:
        parts += [Text(), Text("last warnings and errors: driver, then others, each newest first", style="bold")]
        for line in view.problems:
            style = "red" if " error" in line[:20] else "yellow"
            parts.append(Text(line, style=style, no_wrap=is_cut, overflow="ellipsis" if is_cut else "fold"))
    return Group(*parts)


def _header(view: RunView) -> RenderableType:
    color = {"running": "green", "finished": "green", "starting": "cyan"}.get(view.state, "red")
    title = Text.assemble((view.name, "bold"), f"  {view.folder}", no_wrap=True, overflow="ellipsis")
    warm_start = f", warm start step {view.sft_step}" if view.sft_step else ""
    total = "?" if view.num_steps is None else view.num_steps
    words = [f"step {view.step} of {total}{warm_start}"]
    words += [f"elapsed {_duration(view.elapsed_s)}"] if view.elapsed_s is not None else []
    words += [f"about {_duration(view.remaining_s)} left"] if view.remaining_s is not None else []
    words.append(f"host {view.host}")
    status = Text.assemble((view.state, color), ", ", ", ".join(words), no_wrap=True, overflow="ellipsis")
    return Group(title, status)


def _process_table(view: RunView, max_processes: int | None) -> RenderableType:
    """Return the table of processes. It has a host column if there are several hosts, and GPU columns if there are GPUs."""
    if not view.processes:
        return Text("no process is registered")
    has_hosts = any(process.host != view.host for process in view.processes)
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="bold")
    table.add_column("process", no_wrap=True)
    if has_hosts:
        table.add_column("host", no_wrap=True, max_width=14, overflow="ellipsis")
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("activity", no_wrap=True, overflow="ellipsis", ratio=1)
    titles = ("for", "CPU %", "RSS", *(("GPU", "GPU memory") if view.gpus else ()))
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    shown = view.processes[:max_processes]
    for process in shown:
        cells = [process.name, *([process.host] if has_hosts else []), str(process.pid), process.doing]
        numbers = _numbers(process, view.gpus)
        style = "red" if process.state == DEAD or process.state in STOPPED else None
        table.add_row(*map(Text, [*cells, *numbers[: len(titles)]]), style=style)
    left_out = len(view.processes) - len(shown)
    return Group(table, Text(f"and {left_out} more processes; --json has all")) if left_out else table


def _numbers(process: ProcessView, gpus: Sequence[GpuUse]) -> list[str]:
    """Return the last cells in the row of a process: time, CPU, memory, GPU, GPU memory."""
    duration = _duration(process.activity_s) if process.activity_s is not None else ""
    if process.use is None:
        return [duration, "", "", "", ""]
    cpu = f"{process.use.cpu_percent:.0f}" if process.use.cpu_percent is not None else ""
    busy = {gpu.index: f"{gpu.index}: {gpu.busy_percent} %" for gpu in gpus if gpu.busy_percent is not None}
    cards = " ".join(busy.get(index, str(index)) for index in process.use.gpus)
    gpu_memory = _size(process.use.gpu_bytes) if process.use.gpus else ""
    return [duration, cpu, _size(process.use.rss_bytes), cards, gpu_memory]


def _step_table(view: RunView) -> RenderableType:
    longest = max((len(values) for values in view.series.values()), default=1)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("metric", no_wrap=True)
    table.add_column("last", justify="right", no_wrap=True)
    table.add_column(f"steps {view.step - longest + 1} to {view.step}", no_wrap=True)
    for name, values in view.series.items():
        if values:
            table.add_row(SERIES[name], declared.find(name).text(values[-1]), sparkline(values))
    return table


def _staleness(view: RunView) -> RenderableType:
    """Return a line about weight versions and the staleness buffer."""
    texts = {
        "weight_sync/version": "engines serve weight version {:.0f}",
        "rollout/weight_version": "the last step was sampled by version {:.0f}",
        "rollout/staleness_max": "largest staleness {:.0f}",
        "rollout/waiting_groups": "{:.0f} groups in the staleness buffer",
    }
    words = [text.format(view.metrics[name]) for name, text in texts.items() if name in view.metrics]
    return Text(", ".join(words))


def sparkline(values: Sequence[float]) -> str:
    """Return one block character per value. The block's height shows where the value is between the lowest and highest value."""
    low, width = min(values), max(values) - min(values)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((value - low) / width * top) if width else top // 2] for value in values)


def _duration(seconds: float | None) -> str:
    """Return a duration such as 4.2 s, 12:05 or 3:00:00."""
    seconds = max(0.0, seconds or 0.0)
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
