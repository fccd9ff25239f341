"""Locations of mrl's own files and of the user's code, and how processes import them.

A checkout has the folders `conf` and `slurm` and the lock files at its root. `setup.py` installs them into the package `mrl`.
Errors of the user's code, such as a reward or a loss, are reported with the user's own file, line and function.
"""

import gc
import importlib.metadata
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""Folder that contains the packages mrl, models and parallel: the root of a checkout, or site-packages."""
IS_CHECKOUT = not (PACKAGE_ROOT / "mrl" / "conf").is_dir()
"""Whether mrl runs from a checkout, and not from an installed package."""
DATA_ROOT = PACKAGE_ROOT if IS_CHECKOUT else PACKAGE_ROOT / "mrl"
"""Folder that contains `conf`, `slurm` and the lock files."""
CONF = DATA_ROOT / "conf"
"""Folder of the config groups."""
SLURM = DATA_ROOT / "slurm"
"""Folder of the Slurm scripts."""
WORKING_DIRECTORY = "MRL_WORKING_DIRECTORY"
"""Environment variable with the folder of a user's modules. Each process that imports mrl appends this folder to `sys.path`."""

SAFE_PATH = "mrl"
"""Value of the environment variable PYTHONSAFEPATH with which mrl starts Ray's processes.

Python then does not put the working directory first in `sys.path`. Importing mrl deletes the variable if it has this value,
so that programs that a user's own code starts do not inherit it."""


def python_path() -> str:
    """Return the PYTHONPATH with which processes on other hosts import this mrl. An installed package needs no entry."""
    entries = [str(PACKAGE_ROOT)] if IS_CHECKOUT else []
    return os.pathsep.join([*entries, *filter(None, [os.environ.get("PYTHONPATH")])])


def import_environment() -> dict[str, str]:
    """Return variables that make Ray's processes import from the working directory last."""
    return {"PYTHONSAFEPATH": SAFE_PATH, WORKING_DIRECTORY: os.environ.get(WORKING_DIRECTORY) or os.getcwd()}


def add_working_directory() -> None:
    """Make the modules in the working directory importable in this process and in all processes that it starts.

    The folder is appended to `sys.path` if it is not there yet. At the end of the path, its modules hide no modules of mrl or
    of installed packages.
    """
    os.environ[WORKING_DIRECTORY] = folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in the block, also for the processes that it starts, and restore their values afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def quick_imports() -> Iterator[None]:
    """Turn garbage collection off while the block imports large packages. The imports then take about a fifth less CPU time.

    Imports create many objects and hardly any garbage. After the block, the garbage collector skips all objects that exist by
    then. `quick_package_metadata` is also active in the block.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with quick_package_metadata():
            yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


_STANDARD_DISTRIBUTIONS = importlib.metadata.packages_distributions


@contextmanager
def quick_package_metadata() -> Iterator[None]:
    """Make the first import of transformers, inside the block, take 1 to 2 CPU-seconds less.

    transformers calls importlib.metadata.packages_distributions, which checks whether the files of packages exist. In the
    block, `packages_distributions` below replaces this function. The end of each block restores the original function, even if
    blocks of several threads overlap.
    """
    importlib.metadata.packages_distributions = packages_distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = _STANDARD_DISTRIBUTIONS


def packages_distributions() -> dict[str, list[str]]:
    """Return what importlib.metadata.packages_distributions returns: importable name -> distributions that install it.

    It reads the list of installed files (RECORD), but does not check whether the files exist. So the result may have more names.
    """
    found = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        declared = (distribution.read_text("top_level.txt") or "").split()
        distribution_name = distribution.name  # parses the metadata of the distribution
        for name in declared or _importable_names(distribution):
            found[name].append(distribution_name)
    return dict(found)


def _importable_names(distribution: importlib.metadata.Distribution) -> set[str]:
    """Return the names of a distribution's top-level modules and folders. Each line of RECORD begins with a file's path."""
    record = distribution.read_text("RECORD")
    lines = map(str, distribution.files or ()) if record is None else record.splitlines()
    folders_and_files = {line[: line.find("/") + 1] or line.partition(",")[0] for line in lines}
    names = {path[:-1] if path.endswith("/") else inspect.getmodulename(path) for path in folders_and_files}
    return {name for name in names if name and "." not in name}


_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?', re.MULTILINE)
_PACKAGES = ("mrl", "models", "parallel")
MAX_MESSAGE = 300  # largest length of an exception's message in `describe_error`


def describe_error(error: BaseException) -> str:
    """Return type and message of an exception, and its location in the user's code, if it was raised there."""
    message = str(error)
    message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
    return f"{type(error).__name__}: {message}{location_suffix(error)}"


def location_suffix(error: BaseException) -> str:
    """Return ` (FILE:LINE, in FUNCTION)` for an exception that was raised in the user's code, otherwise an empty string."""
    location = user_location(error)
    return f" ({location})" if location and location not in str(error) else ""


def user_location(error: BaseException) -> str | None:
    """Return `FILE:LINE, in FUNCTION` of the innermost frame in the user's code; None if no frame is in the user's code.

    If the traceback of the exception has no such frame, the exceptions that caused it are searched.
    """
    for each in error_chain(error):
        frames = [frame for frame in _FRAME.finditer(own_traceback(each)) if is_user_file(frame["file"])]
        if frames:
            last = frames[-1]
            function = f", in {last['function']}" if last["function"] else ""
            return f"{last['file']}:{last['line']}{function}"
    return None


def source_line(location: str) -> str | None:
    """Return the source text at a location that `user_location` returned; None if the file cannot be read."""
    file, _, line = location.partition(", in ")[0].rpartition(":")
    try:
        return Path(file).read_text().splitlines()[int(line) - 1].strip()
    except (OSError, UnicodeDecodeError, IndexError):
        return None


def plug_in_name(plug_in: object) -> str:
    """Return the name of a plug-in: the name of the function, or for an object the name of its class."""
    return getattr(_function_of(plug_in), "__name__", None) or type(plug_in).__name__


def describe_plug_in(plug_in: object) -> str:
    """Return the name of a plug-in, followed by ` (FILE:LINE)` if its function or its `__call__` is in the user's code."""
    function = _function_of(plug_in) or inspect.getattr_static(type(plug_in), "__call__", None)
    code = getattr(function, "__code__", None)
    location = f" ({code.co_filename}:{code.co_firstlineno})" if code and is_user_file(code.co_filename) else ""
    return f"{plug_in_name(plug_in)}{location}"


def _function_of(plug_in: object) -> object | None:
    """Return the function of a plug-in, without bound arguments; None if the plug-in is an object of a class."""
    function = plug_in.func if isinstance(plug_in, partial) else plug_in
    return function if inspect.isroutine(function) else None


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions that caused it, the outermost first. A RayTaskError is followed by its `cause`."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        inner = getattr(current, "cause", None)  # Ray's wrapper of an exception in another process
        inner = inner if isinstance(inner, BaseException) else current.__cause__
        current = inner or (None if current.__suppress_context__ else current.__context__)


def is_ray_task_error(error: BaseException) -> bool:
    """Return whether an exception is a RayTaskError, with which Ray wraps an exception of another process.

    Such an exception may also be of a class that Ray derives from both RayTaskError and the type of the wrapped exception.
    """
    return any(each.__name__ == "RayTaskError" for each in type(error).__mro__)


def own_traceback(error: BaseException) -> str:
    """Return the traceback of an exception as text, without its causes.

    For a RayTaskError, this is the traceback in the other process.
    """
    if is_ray_task_error(error):
        return str(error)
    return "".join(traceback.format_exception(type(error), error, error.__traceback__, chain=False))


@cache
def is_user_file(file: str) -> bool:
    """Return whether a file belongs to neither mrl, nor Python's standard library, nor an installed package."""
    if file.startswith("<"):
        return False
    path = Path(file).resolve()
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    known = [PACKAGE_ROOT / package for package in _PACKAGES] + [Path(place).resolve() for place in places]
    return not any(path.is_relative_to(folder) for folder in known)
