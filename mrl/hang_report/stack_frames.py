"""Parser of faulthandler's stack dumps, and tables that describe a stack in words.

To make hang reports recognize more code, add a line to WAITS if the code waits, or to PURPOSES to name the work that it does.
"""

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

# lines of a stack dump: the header of a thread's stack, and a frame (file, line, function)
HEADER = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\)")
FRAME = re.compile(r'\s*File "(.*)", line (\d+) in (.*)')
LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
NUM_WAITING_FRAMES = 4  # number of innermost frames that are compared with WAITS

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
    ("mrl/rollout/engine_pool.py", "_run_loop"): "an answer over the network",  # uvloop waits without Python frames
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
    ("distributed/finalize_model_grads.py", ""): "the gradient all-reduce",
    ("distributed/param_and_grad_buffer.py", "finish_grad_sync"): "the gradient all-reduce",
    ("distributed/param_and_grad_buffer.py", "start_grad_sync"): "the gradient all-reduce",
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
    ("mrl/weight_sync/session.py", "_common_topology"): "opening the weight sync",
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
    ("mrl/rollout/engine_pool.py", "_run_loop"): "sampling",
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

    purpose: str  # entry of PURPOSES, such as "the gradient all-reduce"; "" if no entry matches
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
    # `_bootstrap` is the outermost frame of every thread except the main thread.
    return sorted(stacks, key=lambda stack: stack[-1].function == "_bootstrap")


def summarize_stacks(stacks: Sequence[list[StackFrame]]) -> StackSummary:
    """Summarize the main thread. If it waits for another thread, summarize a helper thread whose work is known instead."""
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
    """Return the innermost frames, up to and including the first frame outside of libraries.

    The result omits library code that called this first frame, because that code only started the work in which the process
    waits.
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
