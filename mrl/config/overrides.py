"""Overrides, as `mrl train` takes them: `key=value` in Hydra's grammar."""

import re

from hydra.core.override_parser.types import Quote, QuotedString

_PLAIN = re.compile(r"[A-Za-z0-9_./:-]+")


def key_of(line: str) -> str:
    """The key of an override: that of `++a.b=1` is a.b."""
    return line.lstrip("+").split("=")[0]


def sets(line: str, key: str, value: str) -> bool:
    """Whether an override gives this key this plain value."""
    return key_of(line) == key and line.partition("=")[2].strip("'\"") == value


def override(key: str, value: object) -> str:
    """`key=value` as Hydra reads it, with quotes where the value has characters of its grammar."""
    text = str(value)
    return f"{key}={text if _PLAIN.fullmatch(text) else QuotedString(text, Quote.double).with_quotes()}"
