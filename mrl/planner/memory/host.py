"""What a run needs beside its GPUs: memory of the machines, and room on the disk."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.planner.memory.shape import ModelShape
from mrl.planner.memory.weights import StateBytes, state_bytes

PINNED_BLOCK = 1 << 26  # bytes; sleeping models take pinned memory in such blocks (parallel.offload)
PROCESS = 3 << 30  # bytes of a process with torch, CUDA and its libraries loaded; measured on no GPU machine
TOKEN = 24  # bytes of a sampled token in the object store: id, log-probability, mask, and columns that are added


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the machine of the busiest node."""

    processes: int
    asleep: int  # models that gave their GPU to others, in pinned memory
    reference: int  # weights that reinforcement started from
    checkpoint: int  # copy that a checkpoint is written from
    delta: int  # what was sent last, where the weight sync sends differences
    rollouts: int  # tokens of the steps on their way, in Ray's object store

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def asleep(state: StateBytes) -> int:
    """Bytes of pinned memory that a rank's model takes while it sleeps: gradients are dropped."""
    return sum(-(-part // PINNED_BLOCK) * PINNED_BLOCK for part in (state.weights, state.optimizer))


def checkpoint_bytes(shape: ModelShape, itemsize: int) -> int:
    """A checkpoint on the disk: weights, main weights and moments, without padding."""
    return shape.num_parameters * (itemsize + state_bytes(itemsize))


def rollout_bytes(responses: int, tokens: int, steps: int) -> int:
    """Of `responses` of so many tokens, prompts included, of each of `steps` steps that are on their way."""
    return responses * tokens * TOKEN * steps
