"""Hydra reads the overrides that mrl writes as the original values."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from mrl.config.hydra_entry import format_override, is_override_to, override_key

VALUES = [
    "outputs/x",
    "/a b/c",
    "lr=1e-4",
    "a,b",
    "[x]",
    "{x: 1}",
    "ü",
    "it's",
    'a "b"',
    "a\\b",
    "~x",
    "1",
    "null",
    "",
    "x#y",
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_survives(value):
    read = OverridesParser.create().parse_override(format_override("run.dir", value))
    assert read.key_or_group == "run.dir" and not read.is_sweep_override()
    assert str(read.value()) == value or (value, read.value()) == ("null", None)


def test_keys_and_plain_values():
    assert [override_key(line) for line in ("a.b=1", "++a.b='x=y'", "+a=")] == ["a.b", "a.b", "a"]
    assert is_override_to("resume=never", "resume", "never") and is_override_to("++resume='never'", "resume", "never")
    assert not is_override_to("resume=auto", "resume", "never") and not is_override_to(
        "resumed=never", "resume", "never"
    )
