"""The test functions of tests/, which are read from their source, and the patterns that select some of them."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

COLUMNS = ("CPU", "TE stand-in", "simulated GPUs or nodes", "one GPU", "several GPUs")
CPU, STAND_IN, SIMULATED, ONE_GPU, SEVERAL_GPUS = COLUMNS
TARGETS = ("`make test`", "`make test-all`", "by hand")
BY_HAND_MARKERS = {"learning", "slurm", "soak"}
DEVICES = {"GPUs": (ONE_GPU, SEVERAL_GPUS), "several GPUs": (SEVERAL_GPUS,)}
NO_TEST = "no test"


@dataclass(frozen=True)
class FoundTest:
    """A test function."""

    path: str  # relative to the checkout
    name: str
    markers: frozenset[str] = frozenset()
    ranks: frozenset[bool] = frozenset({False})  # for each case of a test in tests/gpu, whether it has several ranks

    @property
    def id(self) -> str:
        """Return the name that pytest uses, without the parameters of a case."""
        return f"{self.path}::{self.name}"

    @property
    def on_gpu(self) -> bool:
        """Return whether the test also runs on GPUs."""
        return self.path.startswith("tests/gpu/")

    @property
    def target(self) -> str:
        """Return the command that runs the test on a machine without a GPU, or "by hand" (see TARGETS)."""
        return TARGETS[2 if BY_HAND_MARKERS & self.markers else 1 if "extended" in self.markers or self.on_gpu else 0]


def matches(test: FoundTest, patterns: Iterable[str], column: str | None = None) -> bool:
    """Return whether a test matches one of the patterns, and, if `column` is given, whether this pattern counts in the column."""
    for pattern in patterns:
        place, _, devices = pattern.partition(" on ")
        file, _, name = f"tests/{place}".partition("::")
        counts = column is None or not devices or column in DEVICES[devices]
        if counts and fnmatchcase(test.path, file) and fnmatchcase(test.name, name or "*"):
            return True
    return False


def read_tests(root: Path) -> list[FoundTest]:
    """Read all test functions from their source."""
    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        body = ast.parse(path.read_text()).body
        of_file = _markers(node.value for node in body if isinstance(node, ast.Assign) and _assigns_pytestmark(node))
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                markers = of_file | _markers(node.decorator_list)
                found.append(FoundTest(str(path.relative_to(root)), node.name, markers, _ranks(node.decorator_list)))
    return found


def _assigns_pytestmark(node: ast.Assign) -> bool:
    return [ast.unparse(target) for target in node.targets] == ["pytestmark"]


def _markers(expressions: Iterable[ast.expr]) -> frozenset[str]:
    """Return the names X of all `pytest.mark.X` in expressions."""
    nodes = (node for expression in expressions for node in ast.walk(expression))
    attributes = (node for node in nodes if isinstance(node, ast.Attribute))
    return frozenset(node.attr for node in attributes if ast.unparse(node.value) == "pytest.mark")


def _ranks(decorators: Iterable[ast.expr]) -> frozenset[bool]:
    """Return for each ParallelDims(...) in decorators whether it has several ranks; {False} if there is none."""
    nodes = (node for decorator in decorators for node in ast.walk(decorator))
    calls = (node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "ParallelDims")
    return frozenset(bool(call.keywords) for call in calls) or frozenset({False})
