"""Whether a GPU's memory holds a trainer, as the search asks. Pure."""

from __future__ import annotations

import numpy as np

from mrl.planner.machine import Machine
from mrl.planner.search import Fits
from mrl.planner.sizes import ModelSizes
from mrl.planner.times import GRADIENT, WEIGHT, Layout, Trainer
from mrl.planner.workload import Workload

ACTIVATIONS = 34  # bytes of a token in a layer for each of its hidden numbers, Korthikanti et al. 2022
RESERVED = 0.1  # of a GPU's memory: CUDA's context, NCCL's buffers, fragments


def fits_of(sizes: ModelSizes, machine: Machine, work: Workload) -> Fits:
    """State, gradients and the activations of all micro-batches that a stage has in flight."""
    tokens = max(work.max_tokens, work.lengths.longest)

    def fits(layout: Layout, replicas: int) -> bool:
        trainer = Trainer(sizes, layout, machine, work)
        state = float(trainer.state_bytes(np.array([replicas]))[0])
        gradients = GRADIENT * sum(trainer.stage_parameters)
        in_a_layer = tokens / (layout.tp * layout.cp) * sizes.hidden * (WEIGHT if layout.recompute else ACTIVATIONS)
        activations = in_a_layer * sizes.layers  # of pp micro-batches of a pp-th of the layers
        return state + gradients + activations < machine.memory_bytes * (1 - RESERVED)

    return fits
