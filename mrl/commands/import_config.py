"""`mrl import`: translates a config of verl, slime or trl into overrides of `mrl train`."""

import argparse
import difflib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from mrl.config import hydra_entry
from mrl.config.counterparts import SOURCES
from mrl.config.translation_rules import Note, Overrides, Rule, Values
from mrl.rollout.agents.tools import Calculator

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_ALL_OF_ARRAY = re.compile(r"\$(@|\{\w+\[[@*]\]\})")
_DOTTED_KEY = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=.*", re.DOTALL)
GROUPS = ("algorithm", "placement", "reward")
"""Overrides that select a config group. They come first, so that a reader sees them before the keys that they set."""


@dataclass
class Translation:
    """Translation of an imported config: overrides, notes, and keys that are not in mrl's table of the other trainer's keys."""

    overrides: Overrides = field(default_factory=dict)  # mrl key -> value
    translated: list[tuple[str, Overrides]] = field(default_factory=list)  # (foreign KEY=VALUE, its overrides)
    not_needed: list[tuple[str, str]] = field(default_factory=list)  # (foreign KEY=VALUE, reason)
    no_counterpart: list[tuple[str, str]] = field(default_factory=list)  # (foreign KEY=VALUE, reason)
    unknown: list[str] = field(default_factory=list)  # foreign KEY=VALUE


def translate(source: str, values: Values) -> Translation:
    """Translate the keys of a config of `source` ("verl", "slime" or "trl"), in the order in which the config has them."""
    rules, found = SOURCES[source], Translation()
    for key, value in values.items():
        shown = f"{key}={value}"
        result = _apply(rules, key, value, values)
        if result is None:
            found.unknown.append(shown)
        elif isinstance(result, Note):
            (found.no_counterpart if result.user_must_act else found.not_needed).append((shown, result.text))
        else:
            found.overrides |= result
            found.translated.append((shown, result))
    return found


def _name_in(rules: Mapping[str, Rule], key: str) -> str | None:
    """Return the name of the rule for `key`: the key itself, or the longest `START*` such that the key begins with START."""
    if key in rules:
        return key
    return max((name for name in rules if name.endswith("*") and key.startswith(name[:-1])), key=len, default=None)


def _apply(rules: Mapping[str, Rule], key: str, value: Any, values: Values) -> Overrides | Note | None:
    name = _name_in(rules, key)
    if name is None:
        return None
    rule = rules[name]
    if isinstance(rule, Note):
        return rule
    if value is None or value == "":
        return Note("empty: the default applies", user_must_act=False)
    if not isinstance(rule, str):
        try:
            return rule(value, values)
        except (TypeError, ValueError):  # for example, the value is a variable that the script does not assign
            return Note("the value cannot be read")
    if rule.endswith("*"):
        return {rule[:-1] + key.removeprefix(name[:-1]).replace("-", "_"): value}
    return {rule: value}


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of `mrl import`."""
    top = argparse.ArgumentParser(
        prog="mrl import",
        description="Translate a config of another trainer into overrides of `mrl train`. "
        "Prints tables of the translated keys, of the keys that have no counterpart in mrl, of the keys for which nothing has to "
        "be set, and of the keys that this command does not know. Then prints the command.",
        epilog="CONFIG is a YAML file or the shell script that starts the other trainer (SECTION.KEY=VALUE or --key value).",
    )
    top.add_argument("source", choices=sorted(SOURCES), help="the other trainer")
    top.add_argument("config", type=Path, metavar="CONFIG", help="YAML file or shell script")
    top.add_argument(
        "--overrides",
        action="store_true",
        help="print only the overrides, one per line: mrl import verl run.sh --overrides | xargs -d '\\n' mrl train",
    )
    return top


def main(argv: list[str]) -> int:
    """Entry point of `mrl import`. Returns 1 if mrl refuses the overrides, for example because of a contradiction."""
    args = parser().parse_args(argv)
    with hydra_entry.exit_on_user_error():
        values = read_config(args.config, args.source)
    found = translate(args.source, values)
    overrides = _format(found)
    if args.overrides:
        sys.stdout.write("".join(f"{each}\n" for each in overrides))
    else:
        _print(args.source, found, overrides)
    try:
        hydra_entry.compose_config(hydra_entry.check_overrides([*overrides, "run.dir=unused"]))
    except ValueError as error:
        sys.stderr.write(f"mrl: `mrl train` refuses these overrides: {error}\n")
        return 1
    return 0


def read_config(path: Path, source: str) -> dict[str, Any]:
    """Return the keys and values of a YAML file or of a shell script. Nested keys are joined by dots.

    Raises ValueError if the file is missing, is not valid YAML, or contains no key.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    values = _read_yaml(path, text) if path.suffix in (".yaml", ".yml") else dict(_read_script(text))
    if not values:
        raise ValueError(
            f"{path} contains no keys of {source}; expected a YAML file, or a script with SECTION.KEY=VALUE or --key value."
        )
    known = SOURCES[source]
    sep = "-" if source == "slime" else "_"  # character between the words of a key
    return {key if key in known else key.replace("-", sep).replace("_", sep): value for key, value in values.items()}


def _read_yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        loaded = OmegaConf.create(text)
        tree = OmegaConf.to_container(loaded, resolve=False)
        # If a reference names a key of another file, all references stay as they are written.
        with suppress(OmegaConfBaseException):
            tree = OmegaConf.to_container(loaded, resolve=True)
    except Exception as error:  # the errors of PyYAML, which OmegaConf passes on
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    return dict(_flatten(tree)) if isinstance(tree, dict) else {}


def _flatten(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if name in ("defaults", "hydra", "_target_") or (isinstance(value, dict) and not value):
            continue
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read_script(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a script: words KEY.KEY=VALUE, and options --key with the words that follow."""
    text = re.sub(r"\\\n", " ", text)
    variables: dict[str, str] = {}
    words = []
    for line in text.splitlines():
        assigned = _ASSIGNMENT.match(line)
        value = _split(assigned[2]) if assigned else []
        if assigned and len(value) <= 1:
            variables[assigned[1]] = _expand("".join(value), variables)
        else:  # a command, possibly with assignments before it, as in `A=1 python ...`
            words += [_expand(word, variables) for word in _words(line)]
    option: str | None = None
    arguments: list[str] = []
    for word in [*words, "--"]:
        if _ALL_OF_ARRAY.fullmatch(word):  # "$@" or a whole array: the words of the array were read at its definition
            word = "--"
        if word.startswith("--") and not _DOTTED_KEY.fullmatch(word):
            if option:
                yield option, _value_of(arguments)
            name, equals, value = word[2:].partition("=")
            option, arguments = name, [value] if equals else []
        elif _DOTTED_KEY.fullmatch(word):
            key, _, value = word.lstrip("+").partition("=")
            yield key, _value_of([value])
        elif option:
            arguments.append(word)


def _split(text: str) -> list[str]:
    """Return the words of a line of shell. $((...)) is one word. If the line alone is not valid shell syntax, return []."""
    text = re.sub(r"\$\(\((.*?)\)\)", lambda match: "$((" + match[1].replace(" ", "") + "))", text)
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # for example, a quotation that goes on in the next line
        return []


def _words(line: str) -> list[str]:
    """Return the words of a line without the brackets of an array. If the line is empty or ends with ")", add "--".

    The word "--" ends the option before it: later words are not arguments of this option.
    """
    ends = not line.strip() or line.rstrip().endswith(")")
    return [*_split(re.sub(r"^\s*\w+=\(|(?<!\))\)\s*$", " ", line)), *(["--"] if ends else [])]


def _expand(word: str, variables: dict[str, str]) -> str:
    """Replace $NAME, ${NAME} and ${NAME:-default} by the values that the script assigns, and compute $((...))."""

    def replace(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, default if default is not None else match[0])

    def compute(match: re.Match[str]) -> str:
        try:
            names = re.sub(r"\b[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
            return Calculator()(names.replace("/", "//"))
        except (ValueError, ArithmeticError):
            return match[0]

    return re.sub(r"\$\(\((.*?)\)\)", compute, re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", replace, word))


def _value_of(words: list[str]) -> Any:
    """Return the value of an option: True if no word follows the option, and a list if several words follow it."""
    values = [_parse(word) for word in words]
    return True if not values else values[0] if len(values) == 1 else values


def _parse(text: str) -> Any:
    """Return a word as a number, bool, list or None if it has this form, otherwise as a string."""
    try:
        parsed = OmegaConf.from_dotlist([f"value={text}"])
        value = OmegaConf.to_container(parsed).get("value")  # type: ignore[missing-attribute]
    except Exception:  # not YAML, such as a bracket of a shell script
        return text
    return value if isinstance(value, int | float | bool | list) or value is None else text


def _format(found: Translation) -> list[str]:
    ordered = sorted(found.overrides.items(), key=lambda item: item[0] not in GROUPS)
    return [hydra_entry.format_override(key, value) for key, value in ordered]


def _print(source: str, found: Translation, overrides: list[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False)
    translated = [
        (key, " ".join(hydra_entry.format_override(*each) for each in result.items()))
        for key, result in found.translated
    ]
    unknown = [(key, _nearest(key, source)) for key in found.unknown]
    sections = [
        (f"{source} -> mrl", translated),
        ("no counterpart", found.no_counterpart),
        ("nothing to set", found.not_needed),
        (f"not in mrl's table of {source}'s keys", unknown),
    ]
    for title, rows in sections:
        if rows:
            table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 2))
            for row in rows:
                table.add_row(*row)
            console.print(table)
            console.print()
    command = " \\\n    ".join(["mrl train", *map(shlex.quote, overrides)])
    sys.stdout.write(f"{command}\n")


def _nearest(shown: str, source: str) -> str:
    """Return "did you mean KEY?" with the key of `source` that is most similar to the key in `shown`; "" if none is similar."""
    found = difflib.get_close_matches(shown.partition("=")[0], SOURCES[source], n=1, cutoff=0.8)
    return f"did you mean {found[0]}?" if found else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
