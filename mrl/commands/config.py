"""`mrl config`: describes the config keys, and generates the reference pages of keys and metrics."""

import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import EnumType
from typing import Any, get_args

from omegaconf import OmegaConf

from mrl.config.schema import Config
from mrl.config.validate import RENAMED_KEYS, bounds_text, section_type
from mrl.core import metrics
from mrl.core.code_locations import CONF

USAGE = """usage: mrl config [WORD ...] [--markdown | --metrics]

Describes config keys: default, unit, allowed values, description, and the config groups whose files set the key.

  mrl config                describes all keys
  mrl config WORD ...       describes the keys whose name or description contains all these words
  mrl config --markdown     prints the page docs/reference/config.md
  mrl config --metrics      prints the page docs/reference/metrics.md
"""

PAGE_START = """# Config keys

`mrl config --markdown > docs/reference/config.md` generates this page. `mrl config WORD` searches the keys in a terminal.

Any key can be set on the command line (`optim.lr=3e-4`) or in a YAML file of a config group. `experiment=NAME` selects the file
`conf/experiment/NAME.yaml`. An unknown key is an error, and the message names the nearest known key.

The value of some keys names a class or function, which is called a plug-in. In such a value, `_target_` is the dotted name of the
class or function, and the other entries are the arguments.

These are the config groups and their files:
"""


METRICS_START = """# Metrics

This page is generated: `mrl config --metrics > docs/reference/metrics.md`. The metrics are declared in
mrl/core/metrics.py. A run writes metrics of evaluation (`eval/*`) to `eval.jsonl` in the run directory, and all other metrics to
`metrics.jsonl`. The run also sends all metrics to the trackers in `tracking.backends`. `mrl wandb-report` makes a
workspace in wandb with the same sections. The column "Over steps" says how the values of several steps become one number, for
tables of runs.
"""
# (name, meaning) of metrics whose names have a variable part <...>
METRIC_FAMILIES = (
    ("time/<phase>_s", "wall time of the phase `<phase>` of the training loop"),
    ("reward/<part>_mean", "mean of the reward's part `<part>`"),
    ("reward/<source>/mean", "mean reward for the data source `<source>`, if the training data has several sources"),
    ("reward/<source>/<part>_mean", "mean of the reward's part `<part>` for the data source `<source>`"),
    ("reward/<source>/failed_fraction", "`reward/failed_fraction` for the data source `<source>`"),
    ("eval/<set>/reward_sampled", "`eval/reward_sampled` for the set `<set>` of data.test_sets"),
    ("eval/<set>/reward_greedy", "`eval/reward_greedy` for the set `<set>` of data.test_sets"),
    ("eval/<set>/accuracy_sampled", "`eval/accuracy_sampled` for the set `<set>` of data.test_sets"),
    ("eval/<set>/accuracy_greedy", "`eval/accuracy_greedy` for the set `<set>` of data.test_sets"),
    ("eval/<set>/reward", "mean reward for a set `<set>` with sampling settings of its own"),
    ("eval/<set>/accuracy", "fraction of correct responses for a set `<set>` with sampling settings of its own"),
    (
        "eval/<set>/pass_at_<k>",
        "probability that at least one of `k` responses to a prompt of the set `<set>` is correct",
    ),
    (
        "eval/<set>/maj_at_<k>",
        "probability that the most frequent of `k` answers to a prompt of the set `<set>` is correct",
    ),
    ("own/<name>", "metric `<name>` of a user's plug-in"),
)


@dataclass(frozen=True)
class KeyEntry:
    """Description of one key."""

    name: str
    type: str
    default: str
    unit: str
    allowed: str
    description: str
    groups: tuple[str, ...]  # config groups (folders of conf/) with a file that sets the key

    def matches(self, words: list[str]) -> bool:
        """Return whether each word is in the name or the description."""
        text = f"{self.name} {self.description}".lower()
        return all(word.lower() in text for word in words)


def describe_keys() -> list[KeyEntry]:
    """Return the entries of all keys, in the order of the schema."""
    groups = _groups_by_key()
    return list(_describe_section(Config, Config, "", groups))


def _describe_section(schema: type, default: Any, prefix: str, groups: dict[str, set[str]]) -> Iterator[KeyEntry]:
    instance = default() if isinstance(default, type) else default
    for field in fields(schema):
        name, value = f"{prefix}{field.name}", getattr(instance, field.name)
        if section := section_type(field.type):
            yield from _describe_section(section, value, f"{name}.", groups)
            continue
        assert field.metadata.get("description"), f"{name} has no description in the schema"
        setting_groups = {
            group for key, found in groups.items() if key == name or key.startswith(f"{name}.") for group in found
        }
        yield KeyEntry(
            name,
            _type_text(field.type),
            _default_text(value),
            field.metadata["unit"],
            _allowed_text(field),
            field.metadata["description"],
            tuple(sorted(setting_groups)),
        )


def _groups_by_key() -> dict[str, set[str]]:
    """Return dotted key -> groups in conf/ with a file that sets the key."""
    found: dict[str, set[str]] = {}
    for path in sorted(CONF.glob("*/*.yaml")):
        group, text = path.parent.name, path.read_text()
        package = found_package[1] if (found_package := re.search(r"@package (\S+)", text)) else group
        prefix = "" if package == "_global_" else f"{package}."
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        for key in _leaf_keys(content, prefix):
            found.setdefault(key, set()).add(group)
    return found


def _leaf_keys(node: Any, prefix: str) -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaf_keys(value, f"{prefix}{name}.")
        elif name != "defaults":
            yield f"{prefix}{name}"


def _type_text(annotation: Any) -> str:
    if annotation is Any:
        return "name or mapping"
    options = [option for option in get_args(annotation) if option is not type(None)]
    if annotation is dict or "dict" in str(annotation).lower():
        return "mapping" if "list" not in str(annotation).lower() else "list of mappings"
    if "list" in str(annotation) or "tuple" in str(annotation):
        return f"list of {_type_text(options[0])}"
    single = options[0] if options else annotation
    return "choice" if isinstance(single, EnumType) else {"str": "text"}.get(single.__name__, single.__name__)


def _default_text(value: Any) -> str:
    if value == "???":
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, tuple | list):
        return str([getattr(item, "value", item) for item in value])
    return f"{value:g}" if isinstance(value, float) else str(value)


def _allowed_text(field: Any) -> str:
    for option in (field.type, *get_args(field.type)):
        if isinstance(option, EnumType):
            return ", ".join(option)
    return bounds_text(field)


def print_entries(entries: list[KeyEntry]) -> None:
    """Print entries as text for a terminal."""
    for entry in entries:
        unit = f" {entry.unit}" if entry.unit else ""
        allowed = f"; {entry.allowed}" if entry.allowed else ""
        groups = f"; set by the groups {', '.join(entry.groups)}" if entry.groups else ""
        sys.stdout.write(f"{entry.name}={entry.default}{unit}\n")
        sys.stdout.write(f"    {entry.description}\n    {entry.type}{allowed}{groups}\n")


def markdown_page() -> str:
    """Return the text of docs/reference/config.md."""
    entries, lines = describe_keys(), [PAGE_START]
    lines += ["| config group | options |", "|---|---|"]
    for folder in sorted(path for path in CONF.iterdir() if path.is_dir() and path.name != "hydra"):
        options = ", ".join(f"`{path.stem}`" for path in sorted(folder.glob("*.yaml")))
        lines.append(f"| `{folder.name}` | {options} |")
    for field in fields(Config):
        own = [entry for entry in entries if entry.name == field.name or entry.name.startswith(f"{field.name}.")]
        section = section_type(field.type)
        about = field.metadata.get("description") or (section.__doc__ if section else "")
        lines += ["", f"## {field.name}", "", _sentence(about), "", *_markdown_table(own)]
    return "\n".join(lines) + "\n"


def _sentence(text: str | None) -> str:
    first = (text or "").strip().split("\n\n")[0]
    return f"{first[:1].upper()}{first[1:].rstrip('.')}."


def _markdown_table(entries: list[KeyEntry]) -> list[str]:
    rows = ["| key | default | unit | allowed | description | set by groups |", "|---|---|---|---|---|---|"]
    for entry in entries:
        cells = (f"`{entry.name}`", f"`{entry.default}`", entry.unit, entry.allowed or entry.type, entry.description)
        texts = [cell.replace("|", "\\|") for cell in (*cells, ", ".join(entry.groups))]
        rows.append(f"| {' | '.join(texts)} |")
    return rows


def metrics_page() -> str:
    """Return the text of docs/reference/metrics.md."""
    text = METRICS_START
    for area, title in metrics.SECTIONS.items():
        rows = [
            f"| `{name}` | {metric.unit} | {metric.meaning} | {metric.good} | {metric.reduction} |"
            for name, metric in [*metrics.METRICS.items(), *_metric_families()]
            if name.startswith(f"{area}/")
        ]
        lines = [
            "",
            f"## {title}",
            "",
            "| Metric | Unit | Meaning | Good values | Over steps |",
            "|---|---|---|---|---|",
            *rows,
        ]
        text += "\n".join(lines) + "\n"
    return text


def _metric_families() -> list[tuple[str, metrics.Metric]]:
    """Return (name, declaration) of the metrics whose names have a variable part <...>."""
    examples = {name: re.sub(r"<(\w+)>", r"\1", name.replace("<k>", "2")) for name, _ in METRIC_FAMILIES}
    declared = ((name, metrics.find(example)) for name, example in examples.items())
    return [
        (name, replace(metric, meaning=meaning))
        for (name, metric), (_, meaning) in zip(declared, METRIC_FAMILIES, strict=True)
    ]


def main(argv: list[str]) -> int:
    """Entry point of `mrl config`. Returns the exit status, which is 1 if no key matches."""
    if any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(USAGE)
        return 0
    if argv in (["--markdown"], ["--metrics"]):
        sys.stdout.write(markdown_page() if argv == ["--markdown"] else metrics_page())
        return 0
    if flags := [word for word in argv if word.startswith("-")]:
        sys.stderr.write(f"mrl config: unknown option {flags[0]}; see mrl config --help\n")
        return 2
    entries = [entry for entry in describe_keys() if entry.matches(argv)]
    if not entries:
        names = [entry.name for entry in describe_keys()]
        near = [RENAMED_KEYS[argv[0]]] if argv[0] in RENAMED_KEYS else difflib.get_close_matches(argv[0], names, n=3)
        sys.stderr.write(f"mrl config: no key matches{'; similar: ' + ', '.join(near) if near else ''}\n")
        return 1
    print_entries(entries)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
