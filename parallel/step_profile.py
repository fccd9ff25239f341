"""Profiles whole training steps of a process with torch.profiler. Perfetto and chrome://tracing open the profiles."""

import logging
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallel import spans
from parallel.device import has_cuda, synchronize

logger = logging.getLogger(__name__)
MAX_MEMORY_EVENTS = 1_000_000  # allocations and releases in a memory snapshot of a GPU


class StepProfiler:
    """Writes FOLDER/step<step>-<process>.json.gz for each step that is profiled. The profile shows the spans of mrl, too."""

    def __init__(self, folder: Path, process: str) -> None:
        """`process`: part of the file names, such as "actor-rank0"."""
        self._folder, self._process = folder, process
        self._running: profile | None = None
        self._path, self._memory = folder, False

    def begin_step(self, step: int, enabled: bool, memory: bool = False) -> None:
        """Write the profile of the previous step if it was profiled. Profile the step that begins now if `enabled` is true.

        With `memory` on a CPU, the profile contains the allocations of each operator. With `memory` on a GPU, a second file
        contains the history of the allocator, which pytorch.org/memory_viz shows.
        """
        self.finish()
        if not enabled:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path, self._memory = self._folder / f"step{step}-{self._process}.json.gz", memory
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda() else [])]
        self._running = profile(activities=activities, profile_memory=memory and not has_cuda())
        if memory and has_cuda():
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        self._running.start()
        spans.annotate(record_function)

    def finish(self) -> None:
        """Write the running profile, if there is one."""
        running, self._running = self._running, None
        if running is None:
            return
        start = time.perf_counter()
        spans.annotate(spans.device_range() if spans.is_recording() else None)
        synchronize()
        running.stop()
        incomplete = self._path.with_name(f".{self._path.name}")  # ends with .gz, too, so torch compresses the file
        running.export_chrome_trace(str(incomplete))
        incomplete.rename(self._path)
        if self._memory and has_cuda():
            torch.cuda.memory._dump_snapshot(str(self._path).replace(".json.gz", "-memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("%s was written in %.1f s", self._path, time.perf_counter() - start)
