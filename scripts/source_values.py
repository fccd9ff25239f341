"""Evaluates expressions in source files without importing them: the values, cases and model families of a test.

A module is evaluated lazily: only the assignments and functions that an expression needs are executed. A name from another file
of the checkout is evaluated in that file. A name from Python's standard library is imported. A name from any other library is a
Placeholder.
"""

import __future__

import ast
import importlib
import runpy
import sys
from collections.abc import Iterator
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

# This file is imported, and needs no library. Parameters of tests contain objects of its class ParallelDims.
DIMS = Path("parallel/dims.py")


ANNOTATIONS = __future__.annotations.compiler_flag  # annotations are not evaluated


class UnreadableError(Exception):
    """An expression needs a value that the source does not contain."""


class Placeholder:
    """Stands for an object of a library."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


class Pytest(Placeholder):
    """Stands for the module pytest in parameters of tests."""

    @staticmethod
    def param(*values: Any, id: str | None = None, marks: Any = ()) -> "Param":
        """Return the arguments of pytest.param."""
        return Param(values, id)


class Param:
    """The values and the id of one case."""

    def __init__(self, values: tuple[Any, ...], id: str | None) -> None:
        self.values, self.id = values, id


class Module:
    """A source file and the values of its names."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root, self.path = root, path
        self.tree = ast.parse((root / path).read_text())
        self.statements: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, tuple[str, str]] = {}  # name -> (module, name in the module)
        for node in self.tree.body:
            for name in _names_of(node):
                self.statements.setdefault(name, []).append(node)
        self.imports |= imported_names(self.tree.body)
        self._known: dict[str, Any] = {}

    def function(self, name: str) -> ast.FunctionDef | None:
        """Return the function of the module with this name."""
        found = [node for node in self.statements.get(name, ()) if isinstance(node, ast.FunctionDef)]
        return found[-1] if found else None

    def source_of(self, module: str) -> "Module | None":
        """Return the file of a module that this file imports, if the checkout has it."""
        return find_module(self.root, module)

    def value(self, name: str) -> Any:
        """Return the value of a name, or a Placeholder if its statements cannot be executed.

        Raises UnreadableError if the file does not assign this name.
        """
        if name not in self._known:
            self._known[name] = Placeholder(name)  # for functions that call themselves
            self._known[name] = self._find(name)
        return self._known[name]

    def evaluate(self, expression: ast.expr) -> Any:
        """Return the value of an expression. Raises UnreadableError if it needs an object of a library."""
        code = compile(ast.Expression(expression), str(self.path), "eval")
        try:
            return eval(code, self._environment(expression))
        except Exception as error:  # an expression may raise anything
            raise UnreadableError(f"{self.path}:{expression.lineno}: {type(error).__name__}: {error}") from error

    def _find(self, name: str) -> Any:
        if name == "pytest":
            return Pytest(name)
        if statements := self.statements.get(name):
            try:
                return self._execute(name, statements)
            except Exception:  # a statement may raise anything, for example because of a Placeholder
                return Placeholder(name)
        if name not in self.imports:
            raise UnreadableError(f"{self.path} has no {name}")
        module, original = self.imports[name]
        if module.partition(".")[0] in sys.stdlib_module_names:
            imported = importlib.import_module(module)
            return getattr(imported, original) if original else imported
        source = self.source_of(module)
        return source.value(original) if source is not None and original else Placeholder(name)

    def _execute(self, name: str, statements: list[ast.stmt]) -> Any:
        if self.path == DIMS:
            return runpy.run_path(str(self.root / DIMS))[name]
        environment: dict[str, Any] = {}
        for statement in statements:
            bare = _without_decorators(statement)
            environment |= {n: v for n, v in self._environment(bare).items() if n not in environment}
            exec(compile(ast.Module([bare], []), str(self.path), "exec", ANNOTATIONS), environment)
        return environment[name]

    def _environment(self, node: ast.AST) -> dict[str, Any]:
        """Return the values of the names in `node` that the file assigns or imports."""
        found = {}
        for name in {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}:
            if name in self.statements or name in self.imports:
                found[name] = self.value(name)
        return found


@cache
def find_module(root: Path, name: str) -> Module | None:
    """Return the file of a module of the project or of tests/."""
    path = Path(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if (root / candidate).is_file():
            return read_module(root, candidate)
    helpers = sorted((root / "tests").rglob(f"{name}.py")) if "." not in name else []
    return read_module(root, helpers[0].relative_to(root)) if helpers else None


@cache
def read_module(root: Path, path: Path) -> Module:
    """Return the module in the file `path`, relative to the checkout."""
    return Module(root, path)


def imported_names(body: list[ast.stmt]) -> dict[str, tuple[str, str]]:
    """Return name -> (module, name in the module) of the imports in a body. The second name is "" if the module is imported."""
    found = {}
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.partition(".")[0]: (alias.name, "") for alias in node.names}
    return found


def _names_of(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement assigns or defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def _without_decorators(node: ast.stmt) -> ast.stmt:
    if not isinstance(node, ast.FunctionDef):
        return node
    bare = copy(node)
    bare.decorator_list = []
    return bare
