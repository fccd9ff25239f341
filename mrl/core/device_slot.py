"""A device of the cluster, as whoever starts a process there needs to know it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slot:
    """A place for a process of one role."""

    node: str  # Ray's id of it
    host: str  # its address
    device: str  # the GPU's id on it; "" where a slot is a place on a CPU
    options: Mapping[str, Any]  # Ray actor options that start a process there
