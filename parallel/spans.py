"""Records spans: pieces of work with start and duration. Each process writes its spans to a file of its own.

    with span("optimizer step"):
        ...

Before `start` or `annotate` is called, `span` costs almost nothing: it only tests one variable. If the file cannot be written,
one warning is logged and the recording ends. Spans are never sent to another process. A file has JSON lines: a header for each
process that wrote to the file, the spans, a line whenever a process begins a step again, and the number of dropped spans if there
are any. The module assumes that the clocks of all machines are synchronized.
"""

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import orjson

logger = logging.getLogger(__name__)

Kind = Literal["phase", "micro_batch", "collective", "engine_batch", "request", "weight_sync", "checkpoint", "reward"]
FOLDER = "timeline"  # folder in the run directory
PROCESS_ENV = "MRL_TIMELINE"  # environment variable of a child process: JSON of the arguments of `child_environment`
MAX_FILE_BYTES = 256 * 1024 * 1024  # a process stops recording when its file is this large
MAX_WAITING_SPANS = 100_000  # spans that wait in memory to be written; further spans are dropped
WRITE_INTERVAL_S = 1.0
MAX_JOINED_S, MAX_JOINED_GAP_S = 0.25, 0.01  # limits for joining engine batches: total duration, pause between two
CLOSE_TIMEOUT_S = 5.0


class _Recorder:
    """The spans of this process. A thread writes them to the file, so that a slow disk does not slow the process."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.step = path, 0
        self._spans: deque[dict[str, Any]] = deque()  # spans that are not written yet
        self._dropped = 0  # number of spans that were dropped because the file was full or the disk was too slow
        self._size = path.stat().st_size if path.exists() else 0
        # An earlier process that was killed may have left an incomplete line.
        self._write((b"\n" if self._size else b"") + orjson.dumps(header))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, name="timeline", daemon=True)
        self._thread.start()

    def add(self, name: str, kind: Kind, start: float, seconds: float, args: Mapping[str, Any]) -> None:
        """Add a span. `start`: seconds since 1970, as time.time() returns them."""
        if len(self._spans) >= MAX_WAITING_SPANS:
            self._dropped += 1
            return
        line = dict(name=name, kind=kind, start=round(start, 6), seconds=round(seconds, 6), step=self.step, args=args)
        if (thread := threading.current_thread()) is not threading.main_thread():
            line["thread"] = thread.name
        self._spans.append(line)

    def begin_step(self, step: int) -> None:
        if step <= self.step:
            self._spans.append(dict(repeats=step, kind="repeats", start=0.0, seconds=0.0))
        self.step = step

    def close(self) -> None:
        """Write all spans, and the number of spans that were dropped. Waits at most CLOSE_TIMEOUT_S for the disk."""
        self._ending.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        try:
            while not self._ending.wait(WRITE_INTERVAL_S):
                self._write_spans()
            self._write_spans()
            if self._dropped:
                self._write(orjson.dumps(dict(dropped=self._dropped)))
        except Exception as error:
            logger.warning("the timeline of this process ends: %s: %s", type(error).__name__, error)
            _forget(self)

    def _write_spans(self) -> None:
        spans = join_batches([self._spans.popleft() for _ in range(len(self._spans))])
        lines = [orjson.dumps(each, default=str) for each in spans]
        if self._size > MAX_FILE_BYTES:
            self._dropped += len(lines)
        elif lines:
            self._write(b"\n".join(lines))

    def _write(self, lines: bytes) -> None:
        with self.path.open("ab") as file:
            self._size += file.write(lines + b"\n")


def join_batches(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join successive engine batches with the same name and step. Otherwise an engine would write a line for each decode batch.

    In `args`, the joined span has the total numbers of `batches` and `tokens`, and the largest numbers of `responses` in a batch
    and of `waiting` requests.
    """
    joined: list[dict[str, Any]] = []
    for span in spans:
        last, end = joined[-1] if joined else span, span["start"] + span["seconds"]
        same = span["kind"] == last["kind"] == "engine_batch" and all(
            span[key] == last[key] for key in ("name", "step")
        )
        gap_s = span["start"] - last["start"] - last["seconds"]
        if last is span or not same or gap_s > MAX_JOINED_GAP_S or end - last["start"] > MAX_JOINED_S:
            joined.append(span)
            continue
        first, second = last["args"], span["args"]
        last["args"] = {key: first[key] + second[key] for key in ("batches", "tokens")} | {
            key: max(first[key], second[key]) for key in ("responses", "waiting")
        }
        last["seconds"] = round(end - last["start"], 6)
    return joined


_recorder: _Recorder | None = None
_annotate: Callable[[str], AbstractContextManager[Any]] | None = None  # shows each span in a profiler, too
_is_on = False  # whether `span` does anything
_OFF = nullcontext()


def start(folder: str | Path, role: str, rank: int, process: str, **fields: Any) -> None:
    """Record the spans of this process in the file `folder`/ROLE-RANK.jsonl from now on. A second call does nothing.

    `process` is the name that people read, such as "actor rank 0". `fields` are further values of the file's header.
    """
    global _recorder
    if _recorder is not None:
        return
    header = dict(process=process, role=role, rank=rank, host=socket.gethostname(), pid=os.getpid(), **fields)
    try:
        _recorder = _Recorder(Path(folder) / f"{role}-{rank}.jsonl", header)
    except OSError as error:
        logger.warning("this process records no timeline: %s", error)
        return
    atexit.register(stop)
    _update_state()
    annotate(device_range())


def stop() -> None:
    """Write all spans and end the recording."""
    if (recorder := _recorder) is not None:
        _forget(recorder)
        atexit.unregister(stop)
        recorder.close()


def _forget(recorder: _Recorder) -> None:
    global _recorder
    if _recorder is recorder:
        _recorder = None
    _update_state()


def annotate(make_range: Callable[[str], AbstractContextManager[Any]] | None) -> None:
    """Enter the context `make_range(name)` during each span, so that a profiler shows the span. None: no context."""
    global _annotate
    _annotate = make_range
    _update_state()


def device_range() -> Callable[[str], AbstractContextManager[Any]] | None:
    """Return torch.cuda.nvtx.range, with which NVIDIA's profilers show a span. Returns None in a process without a GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda.nvtx.range if torch is not None and torch.cuda.is_available() else None


def _update_state() -> None:
    global _is_on
    _is_on = _recorder is not None or _annotate is not None


def begin_step(step: int) -> None:
    """Assign the spans of this process to training step `step` from now on. The first step is 1.

    If the process has already begun this step or a later step, it now repeats `step`. Readers of the file then ignore the spans
    of the earlier attempt.
    """
    if (recorder := _recorder) is not None:
        recorder.begin_step(step)


def record(name: str, kind: Kind, start: float, seconds: float, **args: Any) -> None:
    """Record a span that has ended. Coroutines use this function, because their spans overlap.

    `start`: seconds since 1970, as time.time() returns them.
    """
    if (recorder := _recorder) is not None:
        recorder.add(name, kind, start, seconds, args)


def is_recording() -> bool:
    """Return whether `record` writes spans."""
    return _recorder is not None


def span(name: str, kind: Kind = "phase", **args: Any) -> AbstractContextManager[Any]:
    """Return a context that records its duration as a span. `args` are values that the timeline shows beside the span.

    The duration is measured on the host. On a GPU, an operation may run after its span has ended.
    """
    return _Span(name, kind, args) if _is_on else _OFF


class _Span:
    __slots__ = ("_args", "_kind", "_name", "_range", "_since", "_start")

    def __init__(self, name: str, kind: Kind, args: dict[str, Any]) -> None:
        self._name, self._kind, self._args = name, kind, args

    def __enter__(self) -> None:
        self._range = _annotate(self._name) if _annotate is not None else None
        if self._range is not None:
            self._range.__enter__()
        self._start, self._since = time.time(), time.perf_counter()

    def __exit__(self, *error: object) -> None:
        record(self._name, self._kind, self._start, time.perf_counter() - self._since, **self._args)
        if self._range is not None:
            self._range.__exit__(None, None, None)


def child_environment(folder: str | Path, role: str, first_rank: int) -> dict[str, str]:
    """Return the environment variable with which a child process can call `start_from_environment`.

    `first_rank`: rank of the first process that the child starts, among all processes with this role.
    """
    return {PROCESS_ENV: json.dumps([str(folder), role, first_rank])}


def start_from_environment(rank: int = 0) -> None:
    """Start to record if the parent process has set the variable that `child_environment` returns.

    The rank of this process is `rank` plus the `first_rank` that the parent has passed.
    """
    if _recorder is None and PROCESS_ENV in os.environ:
        folder, role, first_rank = json.loads(os.environ[PROCESS_ENV])
        start(folder, role, first_rank + rank, f"{role} rank {first_rank + rank}")
