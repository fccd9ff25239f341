"""Reward that calls a function of the user. The function has the signature of verl's compute_score."""

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from mrl.core.code_locations import describe_error
from mrl.rewards.reward_types import INVALID_RESULT, Response, Score, as_number, as_score, gather_scores

RESPONSE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments that the function gets for each response, in addition to `Function.args`."""


@dataclass(frozen=True)
class Function:
    """Scores each response by `compute_score(data_source, solution_str, ground_truth, extra_info, **args)`.

    The function returns a number, a bool, or a dict with the key `score`. Other numbers in the dict become named parts
    of the score, which appear in the metrics and samples. A coroutine function is called for up to `concurrency` responses
    at the same time, and each call may take `timeout_s` seconds.

    Raises ValueError if the file or module cannot be imported or has no function `name`, or if the function does not accept these
    arguments.
    """

    path: str  # path of a Python file that ends in .py, or a dotted module name
    name: str = "compute_score"
    args: dict[str, Any] = field(default_factory=dict)  # additional keyword arguments of the function
    concurrency: int = 64  # number of concurrent calls of a coroutine function
    timeout_s: float = 60.0  # time limit in seconds of one call of a coroutine function

    def __post_init__(self) -> None:
        if self.path.endswith(".py"):
            # The path is made absolute, because workers may have another working directory.
            object.__setattr__(self, "path", str(Path(self.path).expanduser().resolve()))
        _check_signature(_load(self.path, self.name), self.name, self.args)

    @property
    def per_sample(self) -> bool:
        """Whether each call of this reward gets only one response. False if the user's function is a coroutine function."""
        return not inspect.iscoroutinefunction(_load(self.path, self.name))

    def __call__(self, responses: list[Response]) -> Any:
        """Return the scores. For a coroutine function, return an awaitable of the scores."""
        function = _load(self.path, self.name)
        if not self.per_sample:
            calls = [partial(self._await_score, function, response) for response in responses]
            return gather_scores(calls, concurrency=self.concurrency, timeout_s=self.timeout_s)
        return [_as_score(function(**self._arguments(response)), response) for response in responses]

    async def _await_score(self, function: Callable[..., Any], response: Response) -> Score:
        return _as_score(await function(**self._arguments(response)), response)

    def _arguments(self, response: Response) -> dict[str, Any]:
        values = (response.data_source, response.text, response.ground_truth, response.extra_info)
        return dict(zip(RESPONSE_ARGUMENTS, values, strict=True)) | self.args


def _as_score(result: Any, response: Response) -> Score:
    """Return the Score for a result of the function, which should be a number, a bool, or a dict with the key `score`."""
    if not isinstance(result, dict):
        return as_score(result, response)
    if "score" not in result:
        return Score.failed(
            f"{INVALID_RESULT}a dict without the key 'score', got the keys {', '.join(map(str, result)) or 'none'}."
        )
    parts: dict[str, float] = {}
    for name, value in result.items():
        try:
            parts[str(name)] = as_number(value)
        except ValueError:
            continue  # not a number, such as a text for the logs
    if "score" not in parts:
        return as_score(result["score"], response)
    return Score(parts.pop("score"), parts=parts)


@cache
def _load(path: str, name: str) -> Callable[..., Any]:
    module = _import(path)
    if name not in vars(module):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, functions, n=1)
        names = f"it has {', '.join(functions)}." if functions else "it has no function."
        raise ValueError(
            f"name={name}: {path} has no function of this name; {f'did you mean {near[0]!r}?' if near else names}"
        )
    function = vars(module)[name]
    if not callable(function):
        raise ValueError(
            f"name={name}: in {path}, {name} is an object of type {type(function).__name__}; expected a function."
        )
    return function


def _import(path: str) -> ModuleType:
    if path.endswith(".py") and not Path(path).is_file():
        raise ValueError(
            f"path={path}: there is no such file; expected a Python file that ends in .py, or a dotted module name."
        )
    try:
        return _import_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ValueError(f"path={path}: cannot be imported ({describe_error(error)}).") from error


def _import_file(path: Path) -> ModuleType:
    name = "mrl_reward_of" + re.sub(r"\W", "_", str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, f"{path} is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module in sys.modules
    spec.loader.exec_module(module)
    return module


def _check_signature(function: Callable[..., Any], name: str, args: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    for key in RESPONSE_ARGUMENTS:
        if key in args:
            raise ValueError(f"args.{key}: {name} gets this argument for each response; remove it from args.")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in () if takes_any else args.keys() - signature.parameters.keys():
        near = difflib.get_close_matches(key, list(signature.parameters), n=1)
        raise ValueError(
            f"args.{key}: {name}{signature} has no such argument{f'; did you mean {near[0]!r}?' if near else '.'}"
        )
    try:
        signature.bind(**dict.fromkeys((*RESPONSE_ARGUMENTS, *args)))
    except TypeError as error:
        raise ValueError(
            f"name={name}: {name}{signature} cannot be called as "
            f"{name}({', '.join((*RESPONSE_ARGUMENTS, *args))}): {error}. mrl passes these arguments by keyword."
        ) from error
