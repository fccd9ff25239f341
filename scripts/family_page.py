"""Writes docs/reference/families.md: for each model family, which tests prove what. scripts/proven.py runs it.

scripts/families.json has the columns of the page and the patterns of their tests, in the form of scripts/proven.json. "@NAME"
stands for the patterns in `groups`. A test counts for the families that its cases cover (scripts/family_tests.py). With
`axis`, only cases whose layout uses this parallel axis count. `refusals` and `remarks` name messages of the code: a message is
the text in `file` that contains `words`. The message applies to the families for which `if` holds (see Row.facts), or to the
families in `families`; the tests in `tests` must cover these families. `others` lists further models. For each library, it says
what the library `has` of the model, and which words in which files of the library prove this.
"""

import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from family_tests import Case, CoverageReader
from found_tests import NO_TEST, TARGETS, FoundTest, matches
from source_values import Module, Placeholder, UnreadableError, read_module

PAGE = Path("docs/reference/families.md")
TABLE = Path("scripts/families.json")
REFUSED = "refused"
LIBRARIES = ("transformers", "sglang", "megatron")

HEADER = """\
# Which model families are proven

This page is generated: `python scripts/proven.py` writes it from `scripts/families.json`, the tests, and the tables in
`models/families`. It says for each family which tests prove what. To find the row of your model, look at `architectures` in its
config.json.

A cell is the command that runs the test. CI runs `make test`; `make test-all` runs more tests. "no test" means that no test
covers the family. It does not mean that mrl refuses the model. "refused" means that mrl stops with the message in the note before
any process starts. "refused on CPUs" means that mrl allows it on GPUs, and that no test covers it there. Numbers in parentheses
refer to the [notes](#notes), which also say what mrl refuses for some models.

The tests of the column "config" read published configs. All other tests use tiny random models with the parts of the family, and
run on a CPU. [What is proven where](proven.md) says what has been run on GPUs.
"""
OTHERS = """\
## Other models

The table says what transformers {transformers}, SGLang {sglang} and Megatron-Core {megatron} implement for further models, and
what mrl lacks. Kimi K2 and Phi-4 are also in the tables above. A test compares the table with the source of these versions.
If an architecture is not in the tables above, mrl refuses the model, unless `model.family` names
[a family of your own](../tutorials/model.md#a-family-of-your-own).

| Model | Architecture | transformers | SGLang | Megatron-Core | Missing in mrl |
|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Column:
    """A column of the page."""

    shows: str  # what its tests show
    tests: Sequence[str]
    axis: str | None = None  # only cases with more than one rank on this axis count
    refusals: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def counts(self, case: Case, dims: type) -> bool:
        """Return whether a case of a test counts in this column."""
        name = "expert_tp" if self.axis == "etp" else self.axis
        return name is None or any(getattr(layout, name) > 1 for layout in case.layouts(dims))


@dataclass(frozen=True)
class Row:
    """A model family."""

    models: str
    prefix: str  # of the class names in transformers
    architecture: str
    fields: frozenset[str]  # config fields of the tiny models
    settings: Mapping[str, Any]  # arguments of its Family in models/families

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts about the family on which a refusal or a remark can depend: name -> value."""
        has_experts = any("experts" in name for name in self.fields)
        return {**self.settings} | {
            "not supported_by_sglang": self.settings.get("supported_by_sglang") is False,
            "experts": has_experts,
            "no experts": not has_experts,
            "recurrent layers": bool({"linear_num_key_heads", "mamba_num_heads"} & self.fields),
            "images": self.architecture.endswith("ForConditionalGeneration"),
        }


@dataclass
class FamilyPage:
    """The page, and the mistakes that were found while it was written."""

    root: Path
    tests: Sequence[FoundTest]
    table: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    uncovered: dict[str, int] = field(default_factory=dict)  # column -> number of cells without a test

    @cached_property
    def reader(self) -> CoverageReader:
        """Reads the tests."""
        return CoverageReader(self.root)

    @cached_property
    def rows(self) -> list[Row]:
        """The model families in the order of the table."""
        settings, fields = self._settings(), self._fields()
        known, named = set(fields), set(self.table["models"])
        self.problems += [f"{TABLE}: add the models of {name}." for name in sorted(known - named)]
        self.problems += [f"{TABLE}: there is no tiny model of {name}." for name in sorted(named - known)]
        found = []
        for prefix in (name for name in self.table["models"] if name in fields):
            architecture = next((name for name in settings if name.partition("For")[0] == prefix), f"{prefix}For?")
            names = frozenset(fields[prefix])
            found.append(Row(self.table["models"][prefix], prefix, architecture, names, settings.get(architecture, {})))
        missing = settings.keys() - {row.architecture for row in found}
        self.problems += [f"{TABLE}: {name} has no row." for name in sorted(missing)]
        return found

    def _fields(self) -> dict[str, set[str]]:
        """Return prefix -> config fields of the tiny models of the family."""
        found: dict[str, set[str]] = {}
        for table in ("FAMILIES", "IMAGE_FAMILIES"):
            for prefix, *parts in self.reader.tiny.value(table).values():
                found.setdefault(prefix, set()).update(name for part in parts for name in part)
        return found

    def _settings(self) -> dict[str, dict[str, Any]]:
        """Return architecture -> those arguments of its Family on which a refusal or a remark depends."""
        found = {}
        for path in sorted((self.root / "models/families").glob("*.py")):
            module = read_module(self.root, path.relative_to(self.root))
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "Family":
                    keywords = {keyword.arg or "": keyword.value for keyword in node.keywords}
                    own = {n: v for n, v in keywords.items() if n in self._conditions}
                    values = {name: module.evaluate(value) for name, value in own.items()}
                    found[module.evaluate(keywords["architecture"])] = values | _reading(module, keywords["translate"])
        return found

    @cached_property
    def _conditions(self) -> set[str]:
        """The names in `if` of the refusals and remarks."""
        entries = [*self.table["refusals"].values(), *self.table["remarks"].values()]
        return {str(entry["if"]).removeprefix("not ") for entry in entries if "if" in entry}

    def columns(self, name: str) -> dict[str, Column]:
        """Return the columns of a table of the page."""
        found = {}
        for column, fields in self.table["tables"][name].items():
            patterns = [p for each in fields["tests"] for p in self._patterns(each)]
            found[column] = Column(**fields | dict(tests=patterns))
        return found

    def _patterns(self, pattern: str) -> list[str]:
        return self.table["groups"][pattern[1:]] if pattern.startswith("@") else [pattern]

    def covered(self, patterns: Iterable[str], column: Column | None = None) -> dict[str, str]:
        """Return family -> target of the first command that runs a case of the tests that match the patterns."""
        targets: dict[str, int] = {}
        for pattern in patterns:
            found = [test for test in self.tests if matches(test, [pattern])]
            if not found:
                self.problems.append(f"{TABLE}: the pattern {pattern!r} matches no test: correct it.")
            for case, families in (pair for test in found for pair in self._coverage(test)):
                for family in families if column is None or column.counts(case, self.reader.dims) else ():
                    targets[family] = min(targets.get(family, len(TARGETS)), TARGETS.index(case.target))
        if column is not None and column.axis == "etp":  # without experts, nothing is split
            targets = {name: target for name, target in targets.items() if name in self._with_experts}
        return {family: TARGETS[number] for family, number in targets.items()}

    @cached_property
    def _with_experts(self) -> set[str]:
        return {row.prefix for row in self.rows if row.facts["experts"]}

    def _coverage(self, test: FoundTest) -> list[tuple[Case, set[str]]]:
        try:
            found = self.reader.coverage(test)
        except UnreadableError as error:
            self.problems.append(f"{TABLE}: {test.id} cannot be read: {error}")
            return []
        if not any(families for _, families in found):
            self.problems.append(f"{TABLE}: {test.id} names no model family.")
        return found

    def cell(self, row: Row, column: Column, covered: Mapping[str, str]) -> str:
        """Return the text of a cell, with the numbers of its notes."""
        refused = [entry for name in column.refusals if self._applies(row, entry := self.table["refusals"][name])]
        remarks = [entry for name in column.remarks if self._applies(row, entry := self.table["remarks"][name])]
        text = covered.get(row.prefix, NO_TEST)
        if refused:
            if text != NO_TEST:
                self.problems.append(f"{TABLE}: {row.architecture} is refused, but a test covers it: {column.shows}")
            text = refused[0].get("cell", REFUSED)
            remarks = [refused[0], *(remarks if text != REFUSED else ())]
        return " ".join([text, *(self._note(row, entry) for entry in remarks)])

    def _applies(self, row: Row, entry: Mapping[str, Any]) -> bool:
        if "families" not in entry:
            return bool(row.facts.get(entry["if"]))
        if missing := set(entry["families"]) - self.covered(entry["tests"]).keys():
            self.problems.append(f"{TABLE}: {entry['tests']} do not cover {', '.join(sorted(missing))}.")
        return row.prefix in entry["families"]

    def _note(self, row: Row, entry: Mapping[str, Any]) -> str:
        """Return the number of a note, in parentheses. The note has a message of the code and the values that it concerns."""
        value = row.facts.get(entry.get("if", ""))
        values = sorted(value) if isinstance(value, frozenset | tuple) else []
        message = find_message(read_module(self.root, Path(entry["file"])), entry["words"])
        if message is None:
            self.problems.append(f"{TABLE}: {entry['file']} has no message with {entry['words']!r}: correct it.")
        says = entry.get("says", "").format(values="; ".join(values))
        text = f"{says + ': ' if says else ''}`{message}` (`{entry['file']}`)"
        if text not in self.notes:
            self.notes.append(text)
        return f"({self.notes.index(text) + 1})"

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page."""
        yield HEADER
        for name in self.table["tables"]:
            yield from self._lines_of_table(name, self.columns(name))
        yield "## Notes\n"
        yield from (f"{number}. {note}" for number, note in enumerate(self.notes, start=1))
        yield ""
        yield OTHERS.format(**self.table["versions"])
        yield from map(self._line_of_other, self.table["others"])

    def _lines_of_table(self, name: str, columns: Mapping[str, Column]) -> Iterator[str]:
        yield f"## {name}\n"
        yield "| Column | What the tests show | Files |\n|---|---|---|"
        covered = {}
        for title, column in columns.items():
            covered[title] = self.covered(column.tests, column)
            files = dict.fromkeys(f"`{Path(t.path).name}`" for t in self.tests if matches(t, column.tests))
            yield f"| {title} | {column.shows} | {', '.join(files)} |"
        yield f"\n| Family | Architecture | {' | '.join(columns)} |\n|{'---|' * (2 + len(columns))}"
        for row in self.rows:
            cells = {title: self.cell(row, column, covered[title]) for title, column in columns.items()}
            for title, text in cells.items():
                self.uncovered[title] = self.uncovered.get(title, 0) + text.startswith(NO_TEST)
            yield f"| {row.models} | `{row.architecture}` | {' | '.join(cells.values())} |"
        yield ""

    def _line_of_other(self, other: Mapping[str, Any]) -> str:
        is_built_in = other["architecture"] in {row.architecture for row in self.rows}
        if is_built_in != other["missing"].startswith("nothing"):
            self.problems.append(f"{TABLE}: correct what is missing for {other['model']}.")
        has = [other[library]["has"] for library in LIBRARIES]
        return f"| {other['model']} | `{other['architecture']}` | {' | '.join(has)} | {other['missing']} |"


def _reading(module: Module, translate: ast.expr) -> dict[str, bool]:
    """Return {"sliding windows": whether the function that reads a config reads sliding windows and no attention sinks}."""
    function = module.function(ast.unparse(translate))
    nodes = list(ast.walk(function)) if function else []
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    has_sinks = any(isinstance(node, ast.keyword) and node.arg == "softmax_type" for node in nodes)
    return {"sliding windows": "read_windows" in names and not has_sinks}


def find_message(module: Module, words: str) -> str | None:
    """Return the text with `words` that a `raise` in a file contains. A value in the text appears as <name> or as "…"."""
    for node in (inner for outer in ast.walk(module.tree) if isinstance(outer, ast.Raise) for inner in ast.walk(outer)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(_text_of(module, part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if words in text:
            return text
    return None


def _text_of(module: Module, part: ast.expr) -> str:
    """Return the text of a part of an f-string."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    node = part.value
    if isinstance(node, ast.Name) and node.id in module.statements:
        value = module.value(node.id)
        return f"<{node.id}>" if isinstance(value, Placeholder) else str(value)
    if isinstance(node, ast.Name | ast.Attribute):
        return f"<{ast.unparse(node).rpartition('.')[2]}>"
    return "…"


def write(root: Path, tests: Sequence[FoundTest]) -> tuple[str, list[str]]:
    """Return (text of the page, mistakes in the table)."""
    page = FamilyPage(root, tests, json.loads((root / TABLE).read_text()))
    return "\n".join(page.lines()) + "\n", list(dict.fromkeys(page.problems))
