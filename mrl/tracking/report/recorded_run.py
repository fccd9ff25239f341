"""Reads everything that a run directory contains, for the page of `mrl report`. Missing files count as not recorded."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import orjson
import yaml

from mrl.checkpoint.run_dir import (
    OUTPUTS,
    STARTS_FILE,
    RunEvent,
    check_not_in_use,
    read_events,
    read_run_record,
)
from mrl.core.jsonl import check_lines
from mrl.core.metrics import Metrics
from mrl.core.run_errors import StartError
from mrl.core.sample_file import SAMPLES_FILE
from mrl.tracking.timeline import ProcessTimeline, RankWork, read_timeline, summarize, trainer_ranks

logger = logging.getLogger(__name__)

LOG_FILE = "mrl.log"  # log of the driver, in the run directory
ERROR_MARK = "[ERROR]"  # a line of LOG_FILE with this text begins the report of an error
MAX_LOG_BYTES = 200_000  # number of bytes that are searched for an error, at the end of the log
Sample = dict[str, Any]  # one sample of samples.jsonl


@dataclass(frozen=True)
class RecordedRun:
    """What a run directory contains, in the order of the steps."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)  # {} if it was not recorded
    metrics: dict[int, Metrics] = field(default_factory=dict)  # step -> metrics
    evaluations: dict[int, Metrics] = field(default_factory=dict)  # step -> metrics eval/*
    samples: list[tuple[int, list[Sample]]] = field(default_factory=list)  # (step, samples of the step, best first)
    lengths: dict[int, list[int]] = field(default_factory=dict)  # step -> number of sampled tokens of each response
    events: list[RunEvent] = field(default_factory=list)  # lines of STARTS_FILE
    overrides: list[str] = field(default_factory=list)  # overrides of the command line
    timeline: list[str] = field(default_factory=list)  # summary of the timeline
    ranks: list[RankWork] = field(default_factory=list)  # times of the trainer ranks in the timeline
    damaged: list[str] = field(default_factory=list)  # one text for each file with damaged lines
    is_running: bool = False  # whether a process holds the lock of the folder
    logged_error: str = ""  # last error in the log

    @property
    def name(self) -> str:
        """Return the name of the run and the name of its folder; only the name of the folder if it contains the run's name."""
        name, folder = str(self.config.get("run", {}).get("name", "")), self.folder.resolve().name
        return folder if name in folder else f"{name} {folder}"

    @property
    def last(self) -> Metrics:
        """Return the metrics of the last step; {} before the first one."""
        return self.metrics[max(self.metrics)] if self.metrics else {}

    @property
    def outcome(self) -> str:
        """Return how the run ended: "running", "finished", "failed", another outcome of STARTS_FILE, or "not recorded"."""
        if self.is_running:
            return "running"
        ended = self.events[-1].outcome if self.events and self.events[-1].event == "end" else None
        return ended or ("failed" if self.logged_error and not self.metrics else "not recorded")

    @property
    def error(self) -> str:
        """Return the error that ended the run, or ""."""
        if self.is_running or self.outcome in ("finished", "preempted", "not recorded"):
            return ""
        return self.logged_error or (self.events[-1].error if self.events else None) or ""

    @property
    def reached_goal(self) -> bool:
        """Return whether the run ended early because its reward reached trainer.stop_reward."""
        is_early = max(self.metrics, default=0) < self.setting("trainer.max_steps", 0) and not self.used_epochs
        return self.outcome == "finished" and is_early and self.setting("trainer.stop_reward") is not None

    @property
    def used_epochs(self) -> bool:
        """Return whether the run has finished the number of passes over the data that trainer.epochs sets."""
        epochs = self.setting("trainer.epochs")
        return epochs is not None and (self.last.get("rollout/epoch") or 0.0) >= epochs

    @property
    def has_one_rank(self) -> bool:
        """Return whether the config says that the run has one trainer rank."""
        sizes = [self.setting(f"parallel.{name}", 1) for name in ("tp", "pp", "cp", "ep", "dp", "world_size")]
        return (
            "parallel" in self.config
            and all(size == 1 for size in sizes)
            and "component_time/critic_s" not in self.last
        )

    @property
    def start(self) -> RunEvent | None:
        """Return the latest start or resume: commit, packages, hosts, command. None if it was not recorded."""
        return next((event for event in reversed(self.events) if event.event in ("start", "resume")), None)

    @property
    def packages(self) -> Mapping[str, str]:
        """Return name -> version of the packages at the latest start."""
        return self.start.packages if self.start else {}

    @property
    def resumed_steps(self) -> list[int]:
        """Return the steps after which the run was resumed."""
        return [event.step for event in self.events if event.event == "resume"]

    def series(self, name: str) -> dict[int, float]:
        """Return step -> value of a metric. The result omits steps without a finite value."""
        steps = self.evaluations if name.startswith("eval/") else self.metrics
        return {step: values[name] for step, values in steps.items() if values.get(name) is not None}

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted config key, or `default` if it was not recorded."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return default if node is None else node


def read_run(folder: Path) -> RecordedRun:
    """Read a run directory. Raises ValueError if the folder is no run directory."""
    damaged: list[str] = []
    check_is_run(folder)
    samples = _steps(folder / SAMPLES_FILE, damaged)
    ledger = _steps(folder / "ledger.jsonl", damaged)
    timelines = _timelines(folder)
    return RecordedRun(
        folder,
        config=_read_config(folder, damaged),
        metrics={step: _numbers(line) for step, line in _steps(folder / "metrics.jsonl", damaged)},
        evaluations={step: _numbers(line) for step, line in _steps(folder / "eval.jsonl", damaged)},
        samples=[(step, [one for one in line.get("samples", []) if isinstance(one, dict)]) for step, line in samples],
        lengths={step: [length for group in line.get("lengths", []) for length in group] for step, line in ledger},
        events=[replace(event, error=event.error and plain_text(event.error)) for event in read_events(folder)],
        overrides=_read_overrides(folder),
        timeline=_timeline_sentences(timelines),
        ranks=trainer_ranks(timelines),
        damaged=damaged,
        is_running=is_running(folder),
        logged_error=_last_error(folder / LOG_FILE),
    )


def check_is_run(folder: Path) -> None:
    """Raise ValueError if the folder is no run directory."""
    known = (*OUTPUTS, STARTS_FILE, SAMPLES_FILE, LOG_FILE)
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; name the run.dir of `mrl train`.")
    if not any((folder / name).exists() for name in known):
        raise ValueError(
            f"{folder}: not the folder of a run: expected a folder with one of {', '.join(known)}. Name the run.dir of "
            "`mrl train`, or the folder of a sweep."
        )


def is_running(folder: Path) -> bool:
    """Return whether a process holds the lock of the run directory."""
    try:
        check_not_in_use(folder)
    except StartError:
        return True
    except OSError:  # a folder that cannot be written
        return False
    return False


def _steps(path: Path, damaged: list[str]) -> list[tuple[int, dict[str, Any]]]:
    """Return (step, line) of the intact lines in order. Adds the file to `damaged` if lines are damaged or missing."""
    if not path.exists():
        return []
    checked, found = check_lines(path), {}
    if lost := len(set(checked.lost_steps)) or len(checked.damaged):
        damaged.append(f"{path.name}: {lost} damaged or missing lines")
    for step, line in checked.lines:
        content = _parsed(line)
        if content is not None:
            found[step] = content
    return sorted(found.items())


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return content if isinstance(content, dict) else None


def _numbers(line: dict[str, Any]) -> Metrics:
    return {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}


def plain_text(text: str) -> str:
    """Return an error without the colors of a terminal and without lines that only mark a place in a traceback."""
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).splitlines()
    return "\n".join(line for line in lines if not line.strip() or line.strip(" ^~"))


def _read_config(folder: Path, damaged: list[str]) -> dict[str, Any]:
    """Return the config in run.json, or the one that Hydra recorded if the run failed before it wrote run.json."""
    try:
        recorded = dict((read_run_record(folder) or {}).get("config") or {})
    except ValueError:
        damaged.append("run.json")
        recorded = {}
    return recorded or dict(_read_yaml(folder / "hydra" / "config.yaml") or {})


def _read_overrides(folder: Path) -> list[str]:
    return [str(word) for word in _read_yaml(folder / "hydra" / "overrides.yaml") or []]


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text()) if path.exists() else None
    except (yaml.YAMLError, OSError, UnicodeDecodeError):
        return None


def _timelines(folder: Path) -> list[ProcessTimeline]:
    """Return the timelines of the processes; [] if no timeline can be read."""
    try:
        return read_timeline(folder)
    except (ValueError, OSError, KeyError, json.JSONDecodeError):
        return []


def _timeline_sentences(timelines: Sequence[ProcessTimeline]) -> list[str]:
    """Return the summary of the timelines; [] before the first complete step."""
    try:
        return summarize(timelines)
    except (ValueError, KeyError):
        return []


def _last_error(path: Path) -> str:
    """Return the last error in the log with its continuation lines, or ""."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    starts = [n for n, line in enumerate(lines) if ERROR_MARK in line]
    if not starts:
        return ""
    first = lines[starts[-1]].partition(ERROR_MARK)[2].lstrip(" -")
    more = takewhile(lambda line: line.startswith(" "), lines[starts[-1] + 1 :])
    texts = (text.strip().rstrip(".") for text in plain_text("\n".join([first, *more])).splitlines())
    return ". ".join(texts)[:2000]
