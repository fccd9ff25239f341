"""Finds out which model families a test covers, case by case, from the source of the test.

A case covers a family if one of its parameters names a tiny model of the family, or is a config whose `architectures` name a
class of the family. tests/tiny_families.py and tables in other files of tests/ have the names of the tiny models. For a case
without such a parameter, the script reads the function of the test, its helpers and its fixtures. The case covers the families

- whose tiny models these functions name in calls, such as `make_family("qwen3", ...)`,
- whose classes of transformers they use, such as `Qwen3Config`,
- whose tiny models are defaults of the project's functions that they call.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from found_tests import TARGETS, FoundTest
from source_values import Module, Param, Placeholder, UnreadableError, find_module, imported_names, read_module

TABLES = ("KINDS", "FAMILIES", "IMAGE_FAMILIES")  # names of tables of tiny models in tests
MODEL_OVERRIDE = re.compile(r"model=(\w+)")  # selects a file of conf/model, whose key `model` names a tiny model
_TRANSFORMERS_CLASS = re.compile(r"(\w+?)(?:Text)?(?:Config|ForCausalLM)")
_ANY_ARCHITECTURE = re.compile(r"(\w+)For(?:CausalLM|ConditionalGeneration)")


@dataclass(frozen=True)
class Case:
    """One set of parameters of a test."""

    id: str
    values: tuple[Any, ...]
    target: str  # see found_tests.TARGETS

    def layouts(self, dims: type) -> list[Any]:
        """Return the parallel layouts among the parameters."""
        return [value for value in self.values if isinstance(value, dims)]


@dataclass(frozen=True)
class CoverageReader:
    """Reads the tests of a checkout."""

    root: Path

    @cached_property
    def tiny(self) -> Module:
        """The file with the tiny models."""
        return read_module(self.root, Path("tests/tiny_families.py"))

    @cached_property
    def prefixes(self) -> dict[str, str]:
        """Name of each tiny model -> its family, as the prefix of the class names in transformers."""
        return {name: entry[0] for table in TABLES[1:] for name, entry in self.tiny.value(table).items()}

    @cached_property
    def dims(self) -> type:
        """The class of parallel layouts."""
        module = find_module(self.root, "parallel.dims")
        assert module is not None
        return module.value("ParallelDims")

    def coverage(self, test: FoundTest) -> list[tuple[Case, set[str]]]:
        """Return (case, families that it covers) for each case of a test.

        Raises:
            UnreadableError: the parameters of the test need a library, or a marker names a case that does not exist.
        """
        module = read_module(self.root, Path(test.path))
        function = module.function(test.name)
        assert function is not None, test.id
        named = self._named_by(module, function, set())
        return [(case, self._of_values(module, case.values) or named) for case in cases_of(module, function, test)]

    def _of_values(self, module: Module, values: Iterable[Any]) -> set[str]:
        found = set()
        for value in values:
            if isinstance(value, str):
                found |= self.families_named(module, value)
            elif isinstance(value, dict) and value.get("architectures"):
                found |= {match[1] for name in value["architectures"] if (match := _ANY_ARCHITECTURE.fullmatch(name))}
        return found

    def families_named(self, module: Module, name: str) -> set[str]:
        """Return the family of the tiny model that a test file calls `name`, if there is one."""
        for table in self._tables(module):
            if name in table:
                first = table[name][0]
                return {self.prefixes.get(first, first)}
        return {self.prefixes[name]} if name in self.prefixes else set()

    def _tables(self, module: Module) -> list[dict[str, Any]]:
        """Return the tables of names of tiny models in a test file and in the files of tests/ that it imports."""
        found, seen = [], set()

        def visit(source: Module | None) -> None:
            if source is None or source.path in seen or source.path.parts[0] != "tests":
                return
            seen.add(source.path)
            found.extend(source.value(name) for name in TABLES if name in source.statements)
            for imported, _ in source.imports.values():
                visit(find_module(self.root, imported))

        visit(module)
        return [table for table in found if isinstance(table, dict)]

    def _named_by(self, module: Module, function: ast.FunctionDef, seen: set[tuple[Path, str]]) -> set[str]:
        """Return the families that a function, its helpers and its fixtures name."""
        if (module.path, function.name) in seen:
            return set()
        seen.add((module.path, function.name))
        constants = set(_constants(function))
        if overrides := [match[1] for text in constants if (match := MODEL_OVERRIDE.fullmatch(text))]:
            return {family for name in overrides for family in self._of_override(module, name)}
        imports = module.imports | imported_names([n for n in _body(function) if isinstance(n, ast.stmt)])
        found = {family for text in constants for family in self.families_named(module, text)}
        found |= self._of_loops(module, function) | self._of_imports(module, function, imports)
        for name in _loaded_names(function):
            if helper := module.function(name):
                found |= self._named_by(module, helper, seen)
        uses_fixtures = function.name.startswith("test_") or _is_fixture(function)
        for argument in function.args.args if uses_fixtures else ():
            if fixture := self._fixture(module, argument.arg):
                found |= self._named_by(*fixture, seen)
        return found

    def _of_override(self, module: Module, name: str) -> set[str]:
        path = self.root / f"conf/model/{name}.yaml"
        models = re.findall(r"^ +model: (\w+)$", path.read_text(), re.MULTILINE) if path.exists() else []
        return {family for model in models for family in self.families_named(module, model)}

    def _of_loops(self, module: Module, function: ast.FunctionDef) -> set[str]:
        """Return the families in tables over which a function loops."""
        loops = (node.iter for node in _body(function) if isinstance(node, ast.For | ast.comprehension))
        names = {loop.id for loop in loops if isinstance(loop, ast.Name)}
        known = [module.value(name) for name in names if name in module.statements or name in module.imports]
        texts = [text for value in known if isinstance(value, dict | list | tuple) for text in value]
        return {family for text in texts if isinstance(text, str) for family in self.families_named(module, text)}

    def _of_imports(self, module: Module, function: ast.FunctionDef, imports: dict[str, tuple[str, str]]) -> set[str]:
        """Return the families of the transformers classes that a function uses, and of the default arguments of its calls."""
        found: set[str] = set()
        calls = (node for node in _body(function) if isinstance(node, ast.Call))
        given = {id(call.func): {keyword.arg for keyword in call.keywords} for call in calls}
        for node in (n for n in _body(function) if isinstance(n, ast.Name) and n.id in imports):
            source, name = imports[node.id]
            if source == "transformers" and (match := _TRANSFORMERS_CLASS.fullmatch(name)):
                found |= {match[1]} & set(self.prefixes.values())
            elif source.partition(".")[0] in ("mrl", "models") and (file := find_module(self.root, source)):
                defaults = _string_defaults(file.function(name))
                chosen = [text for parameter, text in defaults.items() if parameter not in given.get(id(node), ())]
                found |= {family for text in chosen for family in self.families_named(module, text)}
        return found

    def _fixture(self, module: Module, name: str) -> tuple[Module, ast.FunctionDef] | None:
        """Return the function of a fixture that a test file can use."""
        files = [module.path, *(folder / "conftest.py" for folder in module.path.parents)]
        for path in (path for path in files if (self.root / path).is_file()):
            source = read_module(self.root, path)
            if (function := source.function(name)) and _is_fixture(function):
                return source, function
        return None


def cases_of(module: Module, function: ast.FunctionDef, test: FoundTest) -> list[Case]:
    """Return the cases of a test, with the ids that pytest gives them."""
    axes = [
        _axis(module, node)
        for node in reversed(function.decorator_list)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize"
    ]
    combinations = list(product(*axes))  # the first decorator in the file varies fastest
    ids = ["-".join(name for name, _ in parts) for parts in combinations]
    extended, found = _extended(module, function, ids), []
    for number, (name, parts) in enumerate(zip(ids, combinations, strict=True)):
        target = TARGETS[max(TARGETS.index(test.target), int(number in extended))]
        found.append(Case(name, tuple(value for _, values in parts for value in values), target))
    return found


def _axis(module: Module, decorator: ast.Call) -> list[tuple[str, tuple[Any, ...]]]:
    """Return (id, values) for each set of values of a parametrize decorator."""
    keywords = {keyword.arg: keyword.value for keyword in decorator.keywords}
    names, rows = (module.evaluate(argument) for argument in decorator.args[:2])
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    ids = module.evaluate(keywords["ids"]) if "ids" in keywords else None
    if isinstance(ids, Placeholder) or isinstance(rows, Placeholder):
        raise UnreadableError(f"{module.path}:{decorator.lineno}: the parameters need a library")
    found = []
    listed = list(ids) if ids is not None and not callable(ids) else None
    for number, row in enumerate(rows):
        values = row.values if isinstance(row, Param) else tuple(row) if len(names) > 1 else (row,)
        own = row.id if isinstance(row, Param) else None
        given = listed[number] if listed else None
        texts = (_id_of(value, name, number, ids) for name, value in zip(names, values, strict=True))
        found.append((own or given or "-".join(texts), values))
    return list(zip(_unique([name for name, _ in found]), (values for _, values in found), strict=True))


def _unique(ids: list[str]) -> list[str]:
    """Return the ids with a number after each id that occurs several times, as pytest does."""
    found: list[str] = []
    for name in ids:
        separator = "_" if name[-1:].isdigit() else ""
        earlier = sum(each.startswith(name + separator) and each[len(name + separator) :].isdigit() for each in found)
        found.append(f"{name}{separator}{earlier}" if ids.count(name) > 1 else name)
    return found


def _id_of(value: Any, name: str, number: int, ids: Any) -> str:
    """Return the id that pytest gives to a value."""
    text = ids(value) if callable(ids) else None
    if text is None and (value is None or isinstance(value, str | int | float | bool)):
        text = str(value)
    return f"{name}{number}" if text is None else str(text)


def _extended(module: Module, function: ast.FunctionDef, ids: list[str]) -> set[int]:
    """Return the numbers of the cases that `make test` leaves out because of the marker extended_except or extended_after."""
    for node in (each for each in function.decorator_list if isinstance(each, ast.Call)):
        marker = ast.unparse(node.func).removeprefix("pytest.mark.")
        if marker == "extended_after":
            return set(range(module.evaluate(node.args[0]), len(ids)))
        if marker == "extended_except":
            kept = [module.evaluate(argument) for argument in node.args]
            if unknown := [name for name in kept if name not in ids]:
                raise UnreadableError(f"{module.path}:{node.lineno}: {function.name} has no case {unknown[0]!r}")
            return {number for number, name in enumerate(ids) if name not in kept}
    return set()


def _is_fixture(function: ast.FunctionDef) -> bool:
    return any("pytest.fixture" in ast.unparse(node) for node in function.decorator_list)


def _body(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield all nodes of a function, except those of its decorators and its parameters."""
    return (node for statement in function.body for node in ast.walk(statement))


def _constants(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the strings that a function passes to calls or uses as an index, and the strings in its lists of overrides."""
    for node in _body(function):
        inner: list[ast.expr] = []
        if isinstance(node, ast.Call):
            inner = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Subscript):
            inner = [node.slice]
        elif isinstance(node, ast.List):
            inner = [each for each in node.elts if isinstance(each, ast.Constant) and "=" in str(each.value)]
        yield from (each.value for each in inner if isinstance(each, ast.Constant) and isinstance(each.value, str))


def _loaded_names(function: ast.FunctionDef) -> set[str]:
    return {node.id for node in _body(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


@cache
def _string_defaults(function: ast.FunctionDef | None) -> dict[str, str]:
    """Return the strings among the defaults of a function, by name of the parameter."""
    if function is None:
        return {}
    arguments = function.args
    with_default = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [*zip(with_default, arguments.defaults, strict=True)]
    pairs += [pair for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if pair[1] is not None]
    values = {name.arg: node.value for name, node in pairs if isinstance(node, ast.Constant)}
    return {name: value for name, value in values.items() if isinstance(value, str)}
