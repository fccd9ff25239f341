"""Messages for configs that Hydra cannot compose: one line with the file, the line number, the mistake and the remedy."""

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf.errors import OmegaConfBaseException

from mrl.config.validate import type_error_message

_LOCATION = re.compile(r"In '([^']+)':\s*")
_PACKAGE_LINE = re.compile(r"^\s*#\s*@package\s+\S", re.MULTILINE)
_WITHOUT_VALUE = re.compile(r"Error parsing override '(\S+)'\s+missing EQUAL")


def composition_message(error: Exception, folders: Sequence[Path]) -> str:
    """Return an error of Hydra, OmegaConf or yaml as one line.

    If a file of a config group is wrong, the message begins with this file and the line number. `folders`: folders with config
    groups.
    """
    if isinstance(error, yaml.YAMLError):
        return _yaml_message(error)
    if without_value := _WITHOUT_VALUE.search(str(error)):
        return f"{without_value[1]!r} has no value; write KEY=VALUE, as in optim.lr=1e-4."
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    file = _located_file(str(error), folders)
    if not (isinstance(cause, OmegaConfBaseException) and cause.full_key):
        return " ".join(str(error).split()).partition(" Config search path:")[0]
    if file is None:
        return type_error_message(cause)
    group = file.parent.name
    if cause.full_key.split(".")[0] == group and not _PACKAGE_LINE.search(file.read_text()):
        return (
            f"{file}, line 1: the line `# @package` is missing, so the keys of the file are read as {group}.KEY; write as its "
            "first line `# @package _global_` if it sets keys of several sections, or `# @package SECTION` for one section."
        )
    return f"{file}{_line_of(cause.full_key, file)}: {type_error_message(cause)}"


def _yaml_message(error: yaml.YAMLError) -> str:
    if not (isinstance(error, yaml.MarkedYAMLError) and error.problem_mark):
        return " ".join(str(error).split())
    mark, problem = error.problem_mark, f"{error.problem}"
    if "\\t" in problem:
        problem = "a tab; yaml indents with spaces"
    return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {problem}."


def _located_file(message: str, folders: Sequence[Path]) -> Path | None:
    """Return the file that Hydra's message names, such as experiment/mine for "In 'experiment/mine': ..."."""
    named = _LOCATION.match(message)
    files = [folder / f"{named[1]}.yaml" for folder in folders if named and "/" in named[1]]
    return next((file for file in files if file.is_file()), None)


def _line_of(key: str, file: Path) -> str:
    """Return ", line N" for the line of a file that sets the last part of a key, or "" if no line does."""
    name = re.compile(rf"\s*['\"]?{re.escape(key.split('.')[-1])}['\"]?\s*:")
    lines = file.read_text().splitlines()
    return next((f", line {number}" for number, line in enumerate(lines, 1) if name.match(line)), "")
