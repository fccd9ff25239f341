"""Instantiates plug-ins, the objects that a config names by `_target_`, and checks them before any process starts."""

import difflib
import inspect
from collections.abc import Sequence
from functools import partial, update_wrapper
from typing import Any, Protocol

from hydra.utils import get_object

from mrl.config.schema import Node
from mrl.core.code_locations import describe_plug_in, location_suffix


def instantiate(node: Node, key: str) -> Any:
    """Return the object that a `_target_` node names. Nodes in the arguments are instantiated first.

    For a class, returns an instance. For a function, returns a function with the node's arguments bound.

    Raises ValueError for a mistake in the node or a nested node. The message names the key and the class. For an unknown
    argument, the message also names the nearest known argument.

    Args:
        node: The dict with `_target_` (dotted name of the class or function) and its arguments.
        key: Config key of the node, for error messages.
    """
    factory = import_target(node, key)
    arguments = instantiate_arguments(factory, node, key)
    if not isinstance(factory, type):  # the node names a function, which mrl calls later, with data
        return update_wrapper(partial(factory, **arguments), factory) if arguments else factory
    try:
        return factory(**arguments)
    except Exception as error:
        raise ValueError(f"{key}: {node['_target_']} rejects its arguments: {error}{location_suffix(error)}") from error


def import_target(node: Node, key: str) -> Any:
    """Import the class or function that a `_target_` node names. Raises ValueError if this is not possible.

    `key`: config key of the node, for error messages.
    """
    target = node.get("_target_")
    if not target:
        raise ValueError(f"{key}: _target_ is missing; expected the dotted name of a class, got {node}.")
    try:
        factory = get_object(target)
    except Exception as error:  # a user's module may raise any error on import
        raise ValueError(f"{key}._target_={target}: cannot be imported ({error}{location_suffix(error)}).") from error
    if not callable(factory):
        raise ValueError(
            f"{key}._target_={target}: is a {type(factory).__name__}; expected the dotted name of a class "
            f"or function{_example(factory, target)}."
        )
    return factory


def instantiate_arguments(factory: Any, node: Node, key: str) -> dict[str, Any]:
    """Return the arguments of a `_target_` node, with nested nodes instantiated. Raises ValueError for an unknown argument."""
    arguments = {name: value for name, value in node.items() if name != "_target_"}
    _check_arguments(factory, arguments, key)
    return {name: _instantiate_nested(value, f"{key}.{name}") for name, value in arguments.items()}


def _example(module: Any, target: str) -> str:
    """Return ", such as <class>" for the first class with `__call__` that a module defines, or "" if it defines none."""
    for name, value in vars(module).items() if inspect.ismodule(module) else ():
        plug_in = isinstance(value, type) and value.__module__ == module.__name__ and "__call__" in vars(value)
        if plug_in and Protocol not in value.__bases__:
            return f", such as {target}.{name}"
    return ""


def _instantiate_nested(value: Any, key: str) -> Any:
    """Instantiate all `_target_` nodes inside an argument."""
    if isinstance(value, dict) and "_target_" in value:
        return instantiate(value, key)
    if isinstance(value, dict):
        return {name: _instantiate_nested(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list):
        return [_instantiate_nested(inner, f"{key}.{index}") for index, inner in enumerate(value)]
    return value


def _check_arguments(factory: Any, arguments: Node, key: str) -> None:
    parameters = inspect.signature(factory).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    if not (unknown := [name for name in arguments if name not in parameters]):
        return
    name = unknown[0]
    near = difflib.get_close_matches(name, list(parameters), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(parameters) or 'nothing'}."
    # This hint is only for keys outside lists, because Hydra cannot remove elements of a list.
    if all(part.isidentifier() for part in key.split(".")):
        # Hydra merges config files: if one file replaces the class of another, the arguments of the replaced class remain.
        hint += f" If the config sets it for another class, remove it: {' '.join(f'~{key}.{each}' for each in unknown)}"
    raise ValueError(f"{key}.{name}: {factory.__module__}.{factory.__qualname__} has no argument {name!r}; {hint}")


def instantiate_callable(node: Node, key: str, arguments: Sequence[str] = ()) -> Any:
    """Instantiate a `_target_` node, and return the object.

    Raises ValueError if the object is not callable, or cannot take as many arguments as mrl passes to it. `arguments`: names of
    the arguments that mrl passes; if there are none, their number is not checked.
    """
    built = instantiate(node, key)
    if not callable(built):
        raise ValueError(f"{key}: {node['_target_']} gives {type(built).__name__}, which is not callable.")
    if arguments:
        _check_call(built, arguments, key)
    return built


def _check_call(built: Any, arguments: Sequence[str], key: str) -> None:
    # update_wrapper sets `built.__wrapped__`, so inspect.signature(built) would return the signature of the wrapped function,
    # including the arguments that are already bound.
    called = partial(built.func, **built.keywords) if isinstance(built, partial) else built
    try:
        signature = inspect.signature(called)
    except ValueError:  # for example a function of NumPy, which has no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{key}: {describe_plug_in(built)} takes {signature}, but mrl calls it with ({', '.join(arguments)}): {error}."
        ) from None
