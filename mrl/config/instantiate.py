"""Plug-ins: the objects that a config names by `_target_`, built and checked before any process starts."""

import difflib
import inspect
from functools import partial, update_wrapper
from typing import Any

from hydra.utils import get_object

from mrl.config.schema import Node


def construct(node: Node, key: str) -> Any:
    """Build the object that a `_target_` node names, and before it those that its arguments name in the same way.

    Raises: ValueError naming key, class and nearest argument, at whatever depth the mistake is.
    """
    target = node.get("_target_")
    if not target:
        raise ValueError(f"{key}: _target_ is missing; expected the dotted name of a class, got {node}.")
    try:
        found = get_object(target)
    except Exception as error:  # any failure of a user's module: shown with the key that named it
        raise ValueError(f"{key}._target_={target}: cannot be imported ({error}).") from error
    arguments = {name: value for name, value in node.items() if name != "_target_"}
    _check_arguments(found, arguments, key)
    arguments = {name: _inner(value, f"{key}.{name}") for name, value in arguments.items()}
    if not isinstance(found, type):  # a function is called with the data, not now
        return update_wrapper(partial(found, **arguments), found) if arguments else found
    try:
        return found(**arguments)
    except Exception as error:
        raise ValueError(f"{key}: {target} refused its arguments: {error}") from error


def _inner(value: Any, key: str) -> Any:
    """An argument with every node in it built."""
    if isinstance(value, dict) and "_target_" in value:
        return construct(value, key)
    if isinstance(value, dict):
        return {name: _inner(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list):
        return [_inner(inner, f"{key}.{place}") for place, inner in enumerate(value)]
    return value


def _check_arguments(found: Any, arguments: Node, key: str) -> None:
    parameters = inspect.signature(found).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in arguments.keys() - parameters.keys():
        near = difflib.get_close_matches(name, list(parameters), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(parameters) or 'nothing'}."
        raise ValueError(f"{key}.{name}: {found.__module__}.{found.__qualname__} has no argument {name!r}; {hint}")


def plug_in(node: Node, key: str, needs: tuple[str, ...] = ()) -> Any:
    """Build a behaviour; raises ValueError unless it can be called and has the class attributes it `needs`."""
    built = construct(node, key)
    if not callable(built):
        raise ValueError(f"{key}: {node['_target_']} gives {type(built).__name__}, which cannot be called.")
    for name in needs:
        if not hasattr(built, name):
            raise ValueError(
                f"{key}: {node['_target_']} must have the class attribute {name!r} (see mrl/algorithms/losses.py)."
            )
    return built
