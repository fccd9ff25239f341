"""Stacks that faulthandler wrote -> where a process is, in words. The tables are the place to teach it more."""

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\)")
FRAME = re.compile(r'\s*File "(.*)", line (\d+) in (.*)')
LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib"))
NEAR = 4  # innermost frames that say what a process waits for

# (part of the file's path, function or "" for any) -> for whom a process waits there
WAITS = {
    ("distributed/distributed_c10d.py", ""): "other ranks",
    ("distributed/rendezvous.py", ""): "other ranks",
    ("pipeline_parallel/p2p_communication.py", ""): "other ranks",
    ("distributed/param_and_grad_buffer.py", "finish_grad_sync"): "other ranks",
    ("distributed/param_and_grad_buffer.py", "finish_param_sync"): "other ranks",
    ("mrl/weight_sync/channel.py", ""): "the other side",
    ("torch/cuda/", ""): "its GPU",
    ("httpcore/", ""): "an answer over HTTP",
    ("httpx/", ""): "an answer over HTTP",
    ("urllib/request.py", ""): "an answer over HTTP",
    ("asyncio/base_events.py", ""): "an answer over the network",
    ("mrl/rollout/engines.py", "_round"): "an answer over the network",  # in uvloop, which has no frames
    ("mrl/rollout/loop.py", "_run"): "an answer over the network",  # the same
    ("mrl/rollout/stream.py", "wait"): "another thread",
    ("mrl/rollout/stream.py", "_take"): "another thread",
    ("uvicorn/", ""): "a call",  # the same
    ("zmq/", ""): "a call",
    ("ray/_private/worker.py", "main_loop"): "a call",
    ("ray/_private/worker.py", "get_objects"): "an object of Ray's store",
    ("concurrent/futures/", ""): "another thread",
    ("pebble/", ""): "another thread",
}

# The same -> what it is about; the innermost frame that is in the table counts, of several lines for it the first. One with
# no words is passed over: whoever called it knows more.
PURPOSES = {
    ("<frozen importlib", ""): "its imports",
    ("distributed/finalize_model_grads.py", ""): "the gradient all-reduce",
    ("distributed/param_and_grad_buffer.py", "finish_grad_sync"): "the gradient all-reduce",
    ("distributed/param_and_grad_buffer.py", "start_grad_sync"): "the gradient all-reduce",
    ("moe/token_dispatcher.py", ""): "the experts' token exchange",
    ("p2p_communication.py", "send_forward_"): "an exchange with the neighbouring pipeline stages",
    ("p2p_communication.py", "send_backward_"): "an exchange with the neighbouring pipeline stages",
    ("p2p_communication.py", "recv_forward"): "receiving the previous pipeline stage's activations",
    ("p2p_communication.py", "recv_backward"): "receiving the next pipeline stage's gradients",
    ("p2p_communication.py", "send_forward"): "sending activations to the next pipeline stage",
    ("p2p_communication.py", "send_backward"): "sending gradients to the previous pipeline stage",
    ("megatron/core/tensor_parallel/", ""): "a tensor-parallel layer's exchange",
    ("optimizer/clip_grads.py", ""): "the gradient norm",
    ("megatron/core/optimizer/", ""): "the optimizer step",
    ("parallel/checkpoint.py", ""): "the checkpoint",
    ("dist_checkpointing/", ""): "the checkpoint",
    ("parallel/logprobs.py", ""): "the log-probabilities",
    ("parallel/attention.py", ""): "attention",
    ("parallel/device.py", "init_process_group"): "the start of torch.distributed",
    ("parallel/groups.py", "initialize"): "the making of process groups",
    ("mrl/weight_sync/opening.py", ""): "opening the weight sync",
    ("mrl/weight_sync/control.py", ""): "",
    ("mrl/weight_sync/", ""): "the weight sync",
    ("mrl/workers/batch.py", ""): "data loading",
    ("mrl/workers/model.py", "micro_batches"): "data loading",
    ("mrl/data/", ""): "data loading",
    ("mrl/rewards/", ""): "scoring",
    ("mrl/rollout/client.py", ""): "sampling",
    ("mrl/rollout/agent.py", ""): "sampling",
    ("mrl/rollout/loop.py", "_run"): "sampling",
    ("mrl/rollout/worker.py", "evaluate"): "sampling",
    ("mrl/rollout/worker.py", "gather"): "sampling",
    ("mrl/rollout/worker.py", "_score"): "scoring",
    ("mrl/rollout/worker.py", "estimate"): "the advantages",
    ("mrl/rollout/worker.py", "wait_ready"): "the start of the engines",
    ("mrl/workers/worker.py", "connect_engines"): "opening the weight sync",
    ("mrl/workers/worker.py", "push_weights"): "the weight sync",
    ("mrl/workers/worker.py", "update"): "the update",
    ("mrl/workers/worker.py", "compute"): "the forward passes",
    ("mrl/workers/worker.py", "setup"): "the building of the model",
    ("managers/scheduler.py", "event_loop"): "the scheduler's loop",
}


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def of_library(self) -> bool:
        """Whether it is neither ours nor the user's."""
        return self.file.startswith((*LIBRARIES, "<")) or "/site-packages/" in self.file

    def __str__(self) -> str:
        parts = self.file.split("/")
        own = next((i for i, part in enumerate(parts) if part in ("mrl", "models", "parallel", "site-packages")), None)
        short = parts[own + (parts[own] == "site-packages") :] if own is not None else parts[-2:]
        return f"{'/'.join(short)}:{self.line}"


@dataclass(frozen=True)
class Place:
    """Where a process is."""

    purpose: str  # "the gradient all-reduce"; "" where the tables do not say
    waits_for: str  # "other ranks"; "" where it does not wait
    frame: Frame | None  # the innermost one of ours or the user's

    def __str__(self) -> str:
        where = f" ({self.frame})" if self.frame else ""
        if self.waits_for == "a call":
            return "has nothing to do"
        purpose = self.purpose or (f"`{self.frame.function}`" if self.frame else "code of a library")
        if not self.waits_for:
            return f"is in {purpose}{where}"
        return f"waits for {self.waits_for} in {purpose}{where}"


def threads(dump: str) -> list[list[Frame]]:
    """The stacks of a dump, innermost frame first; the main thread's stack is the first."""
    found: list[list[Frame]] = []
    for line in dump.splitlines():
        if HEADER.match(line):
            found.append([])
        elif found and (match := FRAME.match(line)):
            found[-1].append(Frame(match[1], int(match[2]), match[3]))
    found = [stack for stack in found if stack]
    return sorted(found, key=lambda stack: stack[-1].function == "_bootstrap")  # other threads begin in threading.py


def place(stacks: Sequence[list[Frame]]) -> Place:
    """Where the main thread is; where it waits for another one, the place of that which is in the same code."""
    if not stacks:
        return Place("", "", None)
    main = _place(stacks[0])
    if main.waits_for == "another thread":
        others = [_place(stack) for stack in stacks[1:]]
        helpers = [other for other in others if other.purpose and other.waits_for != "another thread"]
        return min(helpers, key=lambda other: bool(other.waits_for), default=main)  # first one that does not wait
    return main


def _place(stack: list[Frame]) -> Place:
    purpose, waits_for = _said(stack, PURPOSES), _said(_near(stack), WAITS)
    return Place(purpose, waits_for, next((frame for frame in stack if not frame.of_library), None))


def _near(stack: list[Frame]) -> list[Frame]:
    """The innermost frames, up to the first that is the user's or ours: a library above it does not wait."""
    near = []
    for frame in stack[:NEAR]:
        near.append(frame)
        if not frame.of_library:
            break
    return near


def _said(stack: Sequence[Frame], table: dict[tuple[str, str], str]) -> str:
    """The words for the innermost frame that has some; "" where none has."""
    for frame in stack:
        if frame.function == "<module>":  # being imported, or the start of everything
            continue
        words = (said for (file, name), said in table.items() if file in frame.file and frame.function.startswith(name))
        if said := next(words, ""):
            return said
    return ""
