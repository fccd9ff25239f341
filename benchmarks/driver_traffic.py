"""Counts what this process exchanges with other processes through Ray: actor calls, bytes, and the objects themselves."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray


@dataclass
class Traffic:
    """Context that counts the Ray traffic of this process. If the context is entered again, the counts continue."""

    keeps_objects: bool = False  # keep the objects; `arrays` needs them
    calls: int = 0  # number of calls of actor methods
    sent_bytes: int = 0  # size of serialized arguments and of serialized objects in the object store
    received_bytes: int = 0  # size of the data that was deserialized
    objects: list[Any] = field(default_factory=list)  # objects that were sent or received
    _patches: ExitStack = field(default_factory=ExitStack)

    @property
    def bytes(self) -> int:
        """Sum of the sent and the received bytes."""
        return self.sent_bytes + self.received_bytes

    def arrays(self) -> list[NDArray]:
        """Return all numpy arrays in the kept objects, at any depth."""
        return [array for value in self.objects for array in _arrays(value)]

    def __enter__(self) -> Self:
        from ray._private.serialization import SerializationContext
        from ray.actor import ActorHandle

        serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects
        call = ActorHandle._actor_method_call

        def counted_serialize(context: Any, value: Any) -> Any:
            packed = serialize(context, value)
            self.sent_bytes += packed.total_bytes
            self._keep([value])
            return packed

        def counted_deserialize(context: Any, packed: Any, refs: Any, *rest: Any) -> list[Any]:
            values = deserialize(context, packed, refs, *rest)
            self.received_bytes += sum(len(one.data or b"") for one in packed)
            self._keep(values)
            return values

        def counted_call(handle: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return call(handle, *args, **kwargs)

        self._patches.enter_context(patch.object(SerializationContext, "serialize", counted_serialize))
        self._patches.enter_context(patch.object(SerializationContext, "deserialize_objects", counted_deserialize))
        self._patches.enter_context(patch.object(ActorHandle, "_actor_method_call", counted_call))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def _keep(self, values: list[Any]) -> None:
        if self.keeps_objects:
            self.objects += values


def _arrays(value: Any) -> list[NDArray]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return [a for item in value for a in _arrays(item)] if isinstance(value, (list, tuple)) else []
