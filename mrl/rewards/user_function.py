"""A user-defined function as a reward, with the signature of verl's compute_score."""

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

from mrl.rewards.reward_types import Response, Score, as_number, as_score, gather_scores

RESPONSE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of the function for each response, in addition to `args`."""


@dataclass(frozen=True)
class Function:
    """Scores each response by `compute_score(data_source, solution_str, ground_truth, extra_info, **args)`.

    The function returns a number, a bool, or a dict with `score`; other numbers in the dict become parts. A coroutine
    function is called for up to `concurrency` responses at the same time, each call for at most `timeout_s`.

    Raises ValueError if the file or module cannot be imported or has no such function, or if the function does not take
    these arguments.
    """

    path: str  # path of a Python file ending in .py, or a dotted module name
    name: str = "compute_score"
    args: dict[str, Any] = field(default_factory=dict)  # additional keyword arguments
    concurrency: int = 64  # concurrent calls of a coroutine function
    timeout_s: float = 60.0  # seconds per response, for a coroutine function

    def __post_init__(self) -> None:
        if self.path.endswith(".py"):
            # an absolute path, because workers may have another working directory
            object.__setattr__(self, "path", str(Path(self.path).expanduser().resolve()))
        _check_signature(_load(self.path, self.name), self.name, self.args)

    @property
    def per_sample(self) -> bool:
        """Whether each worker call gets one response. A coroutine function gets many, and scores them concurrently."""
        return not inspect.iscoroutinefunction(_load(self.path, self.name))

    def __call__(self, responses: list[Response]) -> Any:
        """Return the scores; for a coroutine function, return an awaitable of the scores."""
        function = _load(self.path, self.name)
        if not self.per_sample:
            calls = [partial(self._wait, function, response) for response in responses]
            return gather_scores(calls, concurrency=self.concurrency, timeout_s=self.timeout_s)
        return [_as_score(function(**self._arguments(response)), response) for response in responses]

    async def _wait(self, function: Callable[..., Any], response: Response) -> Score:
        return _as_score(await function(**self._arguments(response)), response)

    def _arguments(self, response: Response) -> dict[str, Any]:
        values = (response.data_source, response.text, response.ground_truth, response.extra_info)
        return dict(zip(RESPONSE_ARGUMENTS, values, strict=True)) | self.args


def _as_score(result: Any, response: Response) -> Score:
    """Return a Score from the result of the function: a number, a bool, or a dict with `score`."""
    if not isinstance(result, dict):
        return as_score(result, response)
    if "score" not in result:
        return Score.failed(f"the function returned a dict without 'score'; it has {', '.join(map(str, result))}.")
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
    module = _module(path)
    if name not in vars(module):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(name, functions, n=1)
        has = f"it has {', '.join(functions)}." if functions else "it has no function."
        raise ValueError(f"name={name}: {path} has no such function; {f'did you mean {near[0]!r}?' if near else has}")
    found = vars(module)[name]
    if not callable(found):
        raise ValueError(f"name={name}: in {path} this is {type(found).__name__}, not a function.")
    return found


def _module(path: str) -> ModuleType:
    if path.endswith(".py") and not Path(path).is_file():
        raise ValueError(f"path={path}: there is no such file.")
    try:
        return _from_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ValueError(f"path={path}: cannot be imported ({type(error).__name__}: {error}).") from error


def _from_file(path: Path) -> ModuleType:
    name = "mrl_reward_of" + re.sub(r"\W", "_", str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, f"{path} is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def _check_signature(function: Callable[..., Any], name: str, args: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    for key in RESPONSE_ARGUMENTS:
        if key in args:
            raise ValueError(f"args.{key}: {name} gets this for each response; remove it from args.")
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
            f"{name}({', '.join((*RESPONSE_ARGUMENTS, *args))}), by keyword: {error}."
        ) from error
