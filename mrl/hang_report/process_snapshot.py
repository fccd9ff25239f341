"""Takes snapshots of a run's other processes on this host: kernel state, stacks, activities and last collectives.

The module parses faulthandler's stack dumps, and its tables describe a stack in words. To make hang reports recognize more code,
add a line to WAITS if the code waits, or to PURPOSES to name the work that it does.
"""

import os
import re
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from mrl.hang_report.process_registry import (
    DUMP_SIGNAL,
    Activity,
    ProcessRecord,
    process_start_ticks,
    read_activities,
)
from parallel.collective_log import LastCollective, read_collective_log

# lines of a stack dump: the header of a thread's stack, and a frame (file, line, function)
HEADER = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\)")
FRAME = re.compile(r'\s*File "(.*)", line (\d+) in (.*)')
LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))  # folders of library code
NUM_WAITING_FRAMES = 4  # largest number of innermost frames that are compared with WAITS

# (part of the file's path, prefix of the function's name) -> what a process waits for in that code
WAITS = {
    ("distributed/distributed_c10d.py", ""): "other ranks",
    ("distributed/rendezvous.py", ""): "other ranks",
    ("pipeline_parallel/p2p_communication.py", ""): "other ranks",
    ("distributed/param_and_grad_buffer.py", "finish_grad_sync"): "other ranks",
    ("distributed/param_and_grad_buffer.py", "finish_param_sync"): "other ranks",
    ("mrl/weight_sync/control_channel.py", ""): "a message on the control channel",
    ("torch/cuda/", ""): "its GPU",
    ("httpcore/", ""): "an answer over HTTP",
    ("httpx/", ""): "an answer over HTTP",
    ("urllib/request.py", ""): "an answer over HTTP",
    ("asyncio/base_events.py", ""): "an answer over the network",
    ("mrl/rollout/engine_pool.py", "_wait"): "an answer over the network",  # uvloop waits without Python frames
    ("mrl/rollout/client.py", "_run_loop"): "an answer over the network",  # uvloop waits without Python frames
    ("mrl/rollout/rollout_pipeline.py", "wait_step"): "another thread",
    ("mrl/rollout/rollout_pipeline.py", "_take_unscored"): "another thread",
    ("uvicorn/", ""): "a call",  # uvloop waits without Python frames
    ("zmq/", ""): "a call",
    ("ray/_private/worker.py", "main_loop"): "a call",
    ("ray/_private/worker.py", "get_objects"): "an object of Ray's store",
    ("concurrent/futures/", ""): "another thread",
    ("pebble/", ""): "another thread",
}

# (part of the file's path, prefix of the function's name) -> the work that the code does. For each frame, the first entry
# that matches is used. The innermost frame with a non-empty text determines the purpose. A frame with an empty text is skipped,
# because its caller describes the work better.
PURPOSES = {
    ("<frozen importlib", ""): "its imports",
    ("distributed/finalize_model_grads.py", ""): "the gradient reduction",
    ("distributed/param_and_grad_buffer.py", "finish_grad_sync"): "the gradient reduction",
    ("distributed/param_and_grad_buffer.py", "start_grad_sync"): "the gradient reduction",
    ("moe/token_dispatcher.py", ""): "the token exchange between experts",
    ("p2p_communication.py", "send_forward_"): "an exchange with the neighboring pipeline stages",
    ("p2p_communication.py", "send_backward_"): "an exchange with the neighboring pipeline stages",
    ("p2p_communication.py", "recv_forward"): "receiving the previous pipeline stage's activations",
    ("p2p_communication.py", "recv_backward"): "receiving the next pipeline stage's gradients",
    ("p2p_communication.py", "send_forward"): "sending activations to the next pipeline stage",
    ("p2p_communication.py", "send_backward"): "sending gradients to the previous pipeline stage",
    ("megatron/core/tensor_parallel/", ""): "the communication of a tensor-parallel layer",
    ("optimizer/clip_grads.py", ""): "the gradient norm",
    ("megatron/core/optimizer/", ""): "the optimizer step",
    ("parallel/checkpoint.py", ""): "the checkpoint",
    ("parallel/checkpoint_writer.py", ""): "the checkpoint",
    ("dist_checkpointing/", ""): "the checkpoint",
    ("parallel/logprobs.py", ""): "the log-probabilities",
    ("parallel/attention.py", ""): "attention",
    ("parallel/collectives.py", "init_process_group"): "the initialization of torch.distributed",
    ("parallel/groups.py", "initialize"): "the creation of process groups",
    ("mrl/weight_sync/session.py", "on_"): "",
    ("mrl/weight_sync/session.py", "_try"): "",
    ("mrl/weight_sync/session.py", "<"): "",
    ("mrl/weight_sync/session.py", "__init__"): "opening the weight sync",
    ("mrl/weight_sync/session.py", "_begin_session"): "opening the weight sync",
    ("mrl/weight_sync/coordinator.py", "common_server_info"): "opening the weight sync",
    ("mrl/weight_sync/session.py", "join_channel"): "opening the weight sync",
    ("mrl/weight_sync/session.py", "distribute_plan"): "opening the weight sync",
    ("mrl/weight_sync/session.py", "open_transport"): "opening the weight sync",
    ("mrl/weight_sync/session.py", "_open_"): "opening the weight sync",
    ("mrl/weight_sync/session.py", "_connect_receivers"): "opening the weight sync",
    ("mrl/weight_sync/session.py", "_wait_connected"): "opening the weight sync",
    ("mrl/weight_sync/engine_control.py", ""): "",
    ("mrl/weight_sync/", ""): "the weight sync",
    ("mrl/workers/micro_batch.py", ""): "data loading",
    ("mrl/workers/megatron_model.py", "micro_batches"): "data loading",
    ("mrl/data/", ""): "data loading",
    ("mrl/rewards/", ""): "scoring",
    ("mrl/rollout/client.py", ""): "sampling",
    ("mrl/rollout/agents/tool_agent.py", ""): "sampling",
    ("mrl/rollout/client.py", "_run_loop"): "sampling",
    ("mrl/rollout/worker.py", "evaluate"): "sampling",
    ("mrl/rollout/worker.py", "sample"): "sampling",
    ("mrl/rollout/worker.py", "_score"): "scoring",
    ("mrl/rollout/worker.py", "estimate"): "the advantages",
    ("mrl/rollout/worker.py", "wait_ready"): "the start of the engines",
    ("mrl/workers/worker.py", "connect_engines"): "opening the weight sync",
    ("mrl/workers/worker.py", "push_weights"): "the weight sync",
    ("mrl/workers/worker.py", "update"): "the update",
    ("mrl/workers/worker.py", "compute"): "the forward passes",
    ("mrl/workers/worker.py", "setup"): "building the model",
    ("managers/scheduler.py", "event_loop"): "the scheduler's loop",
}


@dataclass(frozen=True)
class StackFrame:
    """One frame of a Python stack."""

    file: str
    line: int
    function: str

    @property
    def in_library(self) -> bool:
        """Whether the frame belongs to a library: neither to mrl nor to the user's code."""
        return self.file.startswith((*LIBRARIES, "<")) or "/site-packages/" in self.file

    def __str__(self) -> str:
        parts = self.file.split("/")
        own = next((i for i, part in enumerate(parts) if part in ("mrl", "models", "parallel", "site-packages")), None)
        short = parts[own + (parts[own] == "site-packages") :] if own is not None else parts[-2:]
        return f"{'/'.join(short)}:{self.line}"


@dataclass(frozen=True)
class StackSummary:
    """What a process is doing and waiting for, derived from its stacks."""

    purpose: str  # entry of PURPOSES, such as "the gradient reduction"; "" if no entry matches
    waits_for: str  # entry of WAITS, such as "other ranks"; "" if the process does not wait
    frame: StackFrame | None  # innermost frame that belongs to mrl or to the user's code

    def __str__(self) -> str:
        where = f" ({self.frame})" if self.frame else ""
        if self.waits_for == "a call":
            return "is idle"
        purpose = self.purpose or (f"`{self.frame.function}`" if self.frame else "library code")
        if not self.waits_for:
            return f"is in {purpose}{where}"
        return f"waits for {self.waits_for} in {purpose}{where}"


def parse_stack_dump(dump: str) -> list[list[StackFrame]]:
    """Return the stacks in a dump, the main thread's stack first. Each stack begins with its innermost frame."""
    stacks: list[list[StackFrame]] = []
    for line in dump.splitlines():
        if HEADER.match(line):
            stacks.append([])
        elif stacks and (match := FRAME.match(line)):
            stacks[-1].append(StackFrame(match[1], int(match[2]), match[3]))
    stacks = [stack for stack in stacks if stack]
    # `_bootstrap` is the outermost frame of every thread of the module threading except the main thread.
    return sorted(stacks, key=lambda stack: stack[-1].function == "_bootstrap")


def summarize_stacks(stacks: Sequence[list[StackFrame]]) -> StackSummary:
    """Summarize the main thread. If it waits for another thread, summarize instead a helper thread whose work is known."""
    if not stacks:
        return StackSummary("", "", None)
    main = _summarize(stacks[0])
    if main.waits_for == "another thread":
        others = [_summarize(stack) for stack in stacks[1:]]
        helpers = [other for other in others if other.purpose and other.waits_for != "another thread"]
        # A thread that does not wait is preferred.
        return min(helpers, key=lambda other: bool(other.waits_for), default=main)
    return main


def _summarize(stack: list[StackFrame]) -> StackSummary:
    purpose, waits_for = _lookup(stack, PURPOSES), _lookup(_waiting_frames(stack), WAITS)
    return StackSummary(purpose, waits_for, next((frame for frame in stack if not frame.in_library), None))


def _waiting_frames(stack: list[StackFrame]) -> list[StackFrame]:
    """Return the innermost frames, up to and including the first frame outside of libraries: at most NUM_WAITING_FRAMES.

    Library code that called this first frame is omitted, because it only started the work in which the process waits.
    """
    frames = []
    for frame in stack[:NUM_WAITING_FRAMES]:
        frames.append(frame)
        if not frame.in_library:
            break
    return frames


def _lookup(stack: Sequence[StackFrame], table: dict[tuple[str, str], str]) -> str:
    """Return the table's text for the innermost frame that has a non-empty text; "" if there is no such frame."""
    for frame in stack:
        if frame.function == "<module>":  # an import, or the program's entry point
            continue
        texts = (text for (file, name), text in table.items() if file in frame.file and frame.function.startswith(name))
        if text := next(texts, ""):
            return text
    return ""


DUMP_TIMEOUT_S = 2.0  # longest wait for a process to write its stacks
POLL_S = 0.02  # time between two reads of the size of the file with the stacks
FATAL_ERROR = "Fatal Python error: "  # prefix of faulthandler's line on a crash
# letter of the state in /proc/PID/stat -> state in reports
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep in the kernel",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
STOPPED, DEAD = ("stopped", "stopped by a debugger"), "dead"
UNREACHABLE = "unreachable"  # state of a process whose host did not answer


@dataclass(frozen=True)
class ProcessSnapshot:
    """State of one process at the time of a hang report."""

    record: ProcessRecord
    state: str  # a value of STATES, or UNREACHABLE
    wchan: str = ""  # kernel function in which the process sleeps
    stacks: tuple[tuple[StackFrame, ...], ...] = ()  # one stack per thread, the stack of the main thread first
    activities: tuple[Activity, ...] = ()  # work that the process has begun and not finished
    collectives: tuple[LastCollective, ...] = ()  # the last collective in each process group of a trainer rank
    crash: str = ""  # crash message that a dead process left; "" if it left none

    @property
    def summary(self) -> StackSummary:
        """What the process is doing and waiting for."""
        return summarize_stacks([list(stack) for stack in self.stacks])

    @property
    def dead(self) -> bool:
        return self.state == DEAD

    @property
    def stopped(self) -> bool:
        return self.state in STOPPED

    @property
    def title(self) -> str:
        return self.record.title


def snapshot_processes(folder: str, records: list[ProcessRecord]) -> list[ProcessSnapshot]:
    """Take snapshots of these processes, which run on this host and are registered in `folder`.

    The result includes the child processes of engines. Each snapshot takes at most DUMP_TIMEOUT_S, even if the process hangs.
    """
    children = [child for record in records if record.role == "engine" for child in _engine_children(record)]
    return [_snapshot(Path(folder), record) for record in [*records, *children]]


def _engine_children(server: ProcessRecord) -> list[ProcessRecord]:
    """Return the child processes of an engine's server whose titles begin with `sglang::`. SGLang sets these titles.

    The children write their stacks to the server's file, so their records have the server's `name`.
    """
    children = []
    with suppress(psutil.Error, OSError):
        for child in psutil.Process(server.pid).children() if _process_state(server) != DEAD else ():
            title = " ".join(child.cmdline()).strip()
            if title.startswith("sglang::"):
                name = f"{server.title.removesuffix(' server')} {title.removeprefix('sglang::')}"
                children.append(replace(server, title=name, pid=child.pid, started=process_start_ticks(child.pid)))
    return children


def _snapshot(folder: Path, record: ProcessRecord) -> ProcessSnapshot:
    files = folder / record.name
    activities = tuple(read_activities(files.with_suffix(".activities")))
    collectives = tuple(read_collective_log(files.with_suffix(".ops")))
    state = _process_state(record)
    if state == DEAD:
        crash = _crash_message(files.with_suffix(".txt"))
        return ProcessSnapshot(record, state, activities=activities, collectives=collectives, crash=crash)
    dump = "" if state in STOPPED else _request_stack_dump(record, files.with_suffix(".txt"))
    stacks = tuple(tuple(stack) for stack in parse_stack_dump(dump))
    return ProcessSnapshot(record, _process_state(record), _wchan(record.pid), stacks, activities, collectives)


def _process_state(record: ProcessRecord) -> str:
    with suppress(OSError, IndexError):
        if process_start_ticks(record.pid) == record.started:
            letter = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return STATES.get(letter, "sleeping")
    return DEAD


def _wchan(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().strip("0")
    return ""


def _request_stack_dump(record: ProcessRecord, path: Path) -> str:
    """Send a process the signal to write its stacks, and return the text that it writes.

    Returns "" if the process does not handle the signal or writes nothing. The file may disappear at any moment, for
    example because an engine is replaced.
    """
    with suppress(OSError):
        if not _handles_dump_signal(record.pid):
            return ""
        before = size = path.stat().st_size
        deadline = time.monotonic() + DUMP_TIMEOUT_S
        with suppress(ProcessLookupError):
            os.kill(record.pid, DUMP_SIGNAL)
        while time.monotonic() < deadline and _process_state(record) not in (*STOPPED, DEAD):
            time.sleep(POLL_S)
            last, size = size, path.stat().st_size
            if size == last > before:  # the file has stopped growing
                break
        with path.open("rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")
    return ""


def _handles_dump_signal(pid: int) -> bool:
    """Return whether a process handles DUMP_SIGNAL. The signal would kill a process that does not handle it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (DUMP_SIGNAL - 1) & 1)
    return False


def _crash_message(path: Path) -> str:
    with suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith(FATAL_ERROR)]
        return lines[-1].removeprefix(FATAL_ERROR) if lines else ""
    return ""
