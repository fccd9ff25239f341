"""Breadth has its price in files, not in branches."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for package in ("mrl", "parallel", "models") for path in (ROOT / package).rglob("*.py"))
ALGORITHMS = {path.stem for path in (ROOT / "conf/algorithm").glob("*.yaml")}


def test_no_file_is_longer_than_600_lines():
    tests = sorted((ROOT / "tests").rglob("*.py"))
    lengths = {path: len(path.read_text().splitlines()) for path in [*FILES, *tests]}
    assert len(FILES) > 150 and max(lengths.values()) <= 600, max(lengths, key=lengths.__getitem__)


def test_nothing_asks_for_the_name_of_an_algorithm():
    """An algorithm is what its parts are; `if algorithm == "ppo"` is nowhere."""
    assert {"ppo", "grpo", "dapo"} <= ALGORITHMS
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                names = set().union(*map(texts, [node.left, *node.comparators])) & ALGORITHMS
                assert not names, f"{path}:{node.lineno} asks for {names}"
            elif isinstance(node, ast.MatchValue):
                assert not texts(node.value) & ALGORITHMS, f"{path}:{node.lineno} asks for {texts(node.value)}"


def texts(node: ast.expr) -> set:
    """What a side of a comparison is: a text, or a collection of texts."""
    inner = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {one.value for one in inner if isinstance(one, ast.Constant)}
