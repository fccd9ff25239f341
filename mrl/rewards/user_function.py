"""A user's own function as a reward, in verl's form, by file or module and name."""

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

from mrl.rewards.reward_calls import gather_scores
from mrl.rewards.reward_types import Response, Score, as_number, as_score

GIVEN = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What the function is called with, by keyword, for each response; `args` come on top."""


@dataclass(frozen=True)
class Function:
    """Scores each response by `compute_score(data_source, solution_str, ground_truth, extra_info, **args)`.

    The function gives a number, a bool, or a dict with `score`, whose other numbers become parts. It may be a coroutine
    function: then `concurrency` responses are scored at a time, each within `timeout_s`.

    Raises: ValueError when the file or module cannot be loaded, has no such function, or the function cannot be called
    with these arguments.
    """

    path: str  # of a Python file (ending in .py), or a dotted module
    name: str = "compute_score"
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments
    concurrency: int = 64  # of a coroutine function
    timeout_s: float = 60.0  # for one response, of a coroutine function

    def __post_init__(self) -> None:
        if self.path.endswith(".py"):
            object.__setattr__(self, "path", str(Path(self.path).expanduser().resolve()))  # workers may run elsewhere
        _check_signature(_load(self.path, self.name), self.name, self.args)

    @property
    def per_sample(self) -> bool:
        """A function is called in the worker processes; calls of a coroutine function wait together in one of them."""
        return not inspect.iscoroutinefunction(_load(self.path, self.name))

    def __call__(self, responses: list[Response]) -> Any:
        """Scores, or for a coroutine function an awaitable of them."""
        function = _load(self.path, self.name)
        if not self.per_sample:
            calls = [partial(self._wait, function, response) for response in responses]
            return gather_scores(calls, concurrency=self.concurrency, timeout_s=self.timeout_s)
        return [_as_score(function(**self._arguments(response)), response) for response in responses]

    async def _wait(self, function: Callable[..., Any], response: Response) -> Score:
        return _as_score(await function(**self._arguments(response)), response)

    def _arguments(self, response: Response) -> dict[str, Any]:
        values = (response.data_source, response.text, response.ground_truth, response.extra_info)
        return dict(zip(GIVEN, values, strict=True)) | self.args


def _as_score(result: Any, response: Response) -> Score:
    """A Score of what verl's functions give: a number, a bool, or a dict with `score`."""
    if not isinstance(result, dict):
        return as_score(result, response)
    if "score" not in result:
        return Score.failed(f"the function gave a dict without 'score'; it has {', '.join(map(str, result))}.")
    parts: dict[str, float] = {}
    for name, value in result.items():
        try:
            parts[str(name)] = as_number(value)
        except ValueError:
            continue  # a text to look at, or the like
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
    except (Exception, SystemExit) as error:  # anything a user's module can raise
        raise ValueError(f"path={path}: cannot be imported ({type(error).__name__}: {error}).") from error


def _from_file(path: Path) -> ModuleType:
    name = "mrl_reward_of" + re.sub(r"\W", "_", str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, f"{path} is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _check_signature(function: Callable[..., Any], name: str, args: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions written in C
        return
    for key in GIVEN:
        if key in args:
            raise ValueError(f"args.{key}: {name} gets this for each response; leave it out of args.")
    open_end = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in () if open_end else args.keys() - signature.parameters.keys():
        near = difflib.get_close_matches(key, list(signature.parameters), n=1)
        raise ValueError(
            f"args.{key}: {name}{signature} has no such argument{f'; did you mean {near[0]!r}?' if near else '.'}"
        )
    try:
        signature.bind(**dict.fromkeys((*GIVEN, *args)))
    except TypeError as error:
        raise ValueError(
            f"name={name}: {name}{signature} cannot be called as {name}({', '.join((*GIVEN, *args))}), by keyword: {error}."
        ) from error
