"""What of a sleeping model's memory each call to a trainer process needs on the device."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Protocol

from parallel.trainer_config import OffloadLevel

NEEDS = {
    **dict.fromkeys(
        ("reset_optimizer", "update", "trace", "trace_layers", "begin_from", "save", "load", "begin_save"),
        OffloadLevel.FULLY_LOADED,
    ),
    **dict.fromkeys(
        (
            "keep_reference",
            "compute",
            "keep_step",
            "look",
            "push_weights",
            "export_hf",
            "save_reference",
            "load_reference",
        ),
        OffloadLevel.WEIGHTS_LOADED,
    ),
}
"""By the method's name; all others need nothing of it."""


class Worker(Protocol):
    """A process with a model that can sleep."""

    model: Any


def awake[W: Worker, **P, R](method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
    """Have the method raise RuntimeError where the model's memory is not on the device: it would compute with nothing."""
    name, needed = method.__name__, NEEDS[method.__name__]

    @wraps(method)
    def checked(self: W, *args: P.args, **kwargs: P.kwargs) -> R:
        there = self.model.offloader.level
        if there < needed:
            raise RuntimeError(
                f"{name}() needs {needed.name.lower()} of the model on its device, where {there.name.lower()} is: it sleeps. "
                "wake() comes first."
            )
        return method(self, *args, **kwargs)

    return checked
