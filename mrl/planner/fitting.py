"""Whether a GPU's memory holds a trainer, as the search asks. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from mrl.planner.machine import Machine
from mrl.planner.memory.shape import ModelShape
from mrl.planner.memory.trainer import SLOTS, TrainerSettings, trainer_memory
from mrl.planner.times import Layout

PREFIX = "megatron."


def fits_of(shape: ModelShape, machine: Machine, settings: TrainerSettings) -> Callable[[Layout, int], bool]:
    """Whether the busiest phase of the busiest rank fits, by mrl.planner.memory, under a layout with so many replicas."""
    room = machine.memory_bytes - SLOTS * settings.bucket_bytes

    @cache
    def settings_of(last_layers: int, recompute: bool) -> TrainerSettings:
        keys = Layout(last_layers=last_layers, recompute=recompute).overrides(1, False)
        fields = {key.removeprefix(PREFIX): value for key, value in keys.items() if key.startswith(PREFIX)}
        found = TrainerSettings.with_megatron(fields)
        return replace(settings, recompute=found.recompute, uneven=found.uneven)

    def fits(layout: Layout, replicas: int) -> bool:
        asked = settings_of(layout.last_layers, layout.recompute)
        return max(trainer_memory(shape, layout.dims(replicas), asked).by_phase.values()) <= room

    return fits
