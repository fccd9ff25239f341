"""A user's own config folders: `--config-dir FOLDER` and `hydra.searchpath=[FOLDER,...]`.

Each command turns both forms into one override with absolute paths, so that Slurm jobs and the runs of a sweep find the same
folders.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from mrl.core.code_locations import CONF

SEARCH_PATH = "hydra.searchpath"
"""Key with the folders in which Hydra searches for files of config groups, after mrl's own folder conf/."""
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_./:-]+")
_OPTION = re.compile(r"(--config-dir|-cd)(?:=(.*))?", re.DOTALL)


def quote(value: object) -> str:
    """Return a value as text for an override: null, true, a number, [list], {dict} or text.

    Only a text with special characters is quoted.
    """
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{quote(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(quote, value)) + "]"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else QuotedString(text, Quote.double).with_quotes()


def with_absolute_search_path(argv: Sequence[str]) -> list[str]:
    """Return one override of hydra.searchpath with all config folders, followed by the other arguments.

    Raises ValueError if a folder does not exist, or if hydra.searchpath is not a list of folders.
    """
    folders, others, words = list[str](), list[str](), iter(argv)
    for word in words:
        if option := _OPTION.fullmatch(word):
            folder = option[2] if option[2] is not None else next(words, "")
            folders.append(_absolute(folder, f"{option[1]} {folder}"))
        elif _key(word) == SEARCH_PATH:
            folders += [_absolute(folder, word) for folder in _listed_folders(word)]
        else:
            others.append(word)
    return [*search_path_override(folders), *others]


def search_path_override(folders: Sequence[str]) -> list[str]:
    """Return the override that sets hydra.searchpath to these folders, or an empty list if there are none."""
    listed = ",".join(map(quote, dict.fromkeys(folders)))
    return [f"{SEARCH_PATH}=[{listed}]"] if folders else []


def config_folders(overrides: Sequence[str]) -> list[Path]:
    """Return mrl's own folder with config groups, then the folders that the overrides add to the search path.

    The result does not contain folders in other packages (pkg://).
    """
    listed = [folder for word in overrides if _key(word) == SEARCH_PATH for folder in _listed_folders(word)]
    return [CONF, *(Path(folder.removeprefix("file://")) for folder in listed if not _is_package(folder))]


def group_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of the config groups in these folders."""
    return sorted({path.name for folder in folders for path in folder.iterdir() if path.is_dir()} - {"hydra"})


def group_files(group: str, folders: Sequence[Path]) -> list[str]:
    """Return the names of the files of a config group, without `.yaml`."""
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def own_group_override(argument: str, group: str, folders: Sequence[Path]) -> str | None:
    """Return `argument`, which selects a file of a user's own config group, in the form that Hydra needs.

    Hydra needs the prefix `+` if no defaults list names the group. Returns None if no folder has this group.
    """
    if not any((folder / group).is_dir() for folder in folders):
        return None
    return argument if argument.startswith(("+", "~")) or _is_default(group, folders) else f"+{argument}"


def _is_default(group: str, folders: Sequence[Path]) -> bool:
    """Return whether a defaults list in one of the folders names the group."""
    entry = re.compile(rf"^\s*-\s*(override\s+)?/?{re.escape(group)}(@\S*)?\s*:", re.MULTILINE)
    # Only three levels are searched, because the folder may be a working directory with many runs.
    files = (path for folder in folders for level in ("*", "*/*", "*/*/*") for path in folder.glob(f"{level}.yaml"))
    return any(entry.search(path.read_text(errors="replace")) for path in files)


def _key(word: str) -> str:
    return "" if word.startswith("-") else word.lstrip("+").partition("=")[0]


def _listed_folders(override: str) -> list[str]:
    try:
        value = OverridesParser.create().parse_override(override).value()
    except HydraException as error:
        raise ValueError(f"{override!r} cannot be parsed: {str(error).splitlines()[0]}") from None
    if not isinstance(value, list):
        raise ValueError(f"{override}: expected a list of folders, such as {SEARCH_PATH}=[my_conf].")
    return [item.text if isinstance(item, QuotedString) else str(item) for item in value]


def _is_package(folder: str) -> bool:
    return "://" in folder and not folder.startswith("file://")


def _absolute(folder: str, argument: str) -> str:
    """Return the absolute path of a config folder. `argument` is the command-line argument that names this folder."""
    if _is_package(folder):
        return folder
    path = Path(folder.removeprefix("file://")).absolute()
    if not folder or not path.is_dir():
        raise ValueError(f"{argument}: expected a folder with config groups, but {str(path)!r} is no folder.")
    return str(path)
