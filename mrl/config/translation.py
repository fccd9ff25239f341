"""Translation of a config of verl, slime or trl into overrides of mrl, and the mrl key for a foreign key.

The tables of keys are in mrl/config/counterparts.py.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mrl.config.counterparts import SOURCES, TARGETS
from mrl.config.translation_rules import Note, Overrides, Rule, Values


@dataclass
class Translation:
    """What an imported config becomes: overrides, notes, and keys that no table contains."""

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
            (found.no_counterpart if result.needed else found.not_needed).append((shown, result.text))
        else:
            found.overrides |= result
            found.translated.append((shown, result))
    return found


def _name_in(rules: Mapping[str, Rule], key: str) -> str | None:
    """Return the name that covers `key` in a table: the key itself, or else the longest name with `*`."""
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
        return Note("empty: the default applies", needed=False)
    if not isinstance(rule, str):
        try:
            return rule(value, values)
        except (TypeError, ValueError):  # for example, the value is a variable that the script does not assign
            return Note("the value cannot be read")
    if rule.endswith("*"):
        return {rule[:-1] + key.removeprefix(name[:-1]).replace("-", "_"): value}
    return {rule: value}


def counterpart_of(key: str) -> tuple[str, str] | None:
    """Return (mrl key, other trainer) for a key that has the name of a verl, slime or trl key; None if there is none.

    The key may lack its first parts, as in `rollout.n`, and may begin with dashes, as in `--rm-type`.
    """
    name = key.lstrip("-+").replace("-", "_")
    for source, rules in SOURCES.items():
        for foreign, rule in rules.items():
            known = foreign.replace("-", "_")
            if known == name or known.endswith(f".{name}"):
                target = rule if isinstance(rule, str) else TARGETS.get(foreign)
                if target:
                    return target, source
    return None


def nearest_key(key: str, source: str) -> str | None:
    """Return the key of `source` whose name is nearest to `key`, or None if none is near."""
    found = difflib.get_close_matches(key, SOURCES[source], n=1, cutoff=0.8)
    return found[0] if found else None
