"""The structure of the code stays within its limits, and no code branches on the name of an algorithm."""

import ast
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for package in ("mrl", "parallel", "models") for path in (ROOT / package).rglob("*.py"))
ALGORITHMS = {path.stem for path in (ROOT / "conf/algorithm").glob("*.yaml")}


sys.path.insert(0, str(ROOT / "scripts"))
import measure_structure  # noqa: E402
from measure_structure import LIMITS, broken_links, parsed  # noqa: E402


@pytest.fixture(scope="module")
def measured() -> tuple[dict[str, int], list[str]]:
    return measure_structure.measure(ROOT)


def test_the_files_of_tests_have_different_names():
    """pytest imports them by name, so it could not collect two files with the same name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()


@pytest.mark.parametrize("name", LIMITS)
def test_the_structure_is_within_its_limits(measured, name):
    numbers, details = measured
    assert numbers["modules"] > 150 and numbers[name] <= LIMITS[name], details


def test_no_call_path_is_broken(measured):
    assert not [detail for detail in measured[1] if detail.startswith("call path")]


@pytest.mark.extended
def test_a_call_path_whose_functions_do_not_name_each_other_is_broken():
    stranger = "mrl/weight_sync/transfer_plan.py:choose_transport"
    for path in json.loads(measure_structure.CALL_PATHS_FILE.read_text()).values():
        called = [link for link in path[:-1] if " -> " not in link]
        assert len(called) > len(path) / 2
        for link in called:
            assert broken_links(ROOT, [link, stranger]) == [f"{link} does not name {stranger}"]
            assert broken_links(ROOT, [f"{link}_gone", stranger]) == [f"{link}_gone does not exist"]


def test_a_call_path_may_return_only_to_a_function_that_names_the_next_one():
    trainer = "mrl/controller/trainer.py:Trainer"
    helper, caller, following = "mrl/cli.py:usage", f"{trainer}.fit", f"{trainer}._train"
    assert broken_links(ROOT, [caller, f"{helper} -> return", following]) == [f"{caller} does not name {helper}"]
    assert broken_links(ROOT, [f"{caller} -> Ray", f"{helper} -> return", following]) == []
    assert broken_links(ROOT, [f"{helper} -> return", following]) == [f"{helper} does not name {following}"]


def test_no_test_file_is_longer_than_500_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    assert max(lengths.values()) <= 500, max(lengths, key=lengths.__getitem__)


def test_nothing_asks_for_the_name_of_an_algorithm():
    """The parts define an algorithm, so no code contains a comparison such as `algorithm == "ppo"`."""
    assert {"ppo", "grpo", "dapo"} <= ALGORITHMS
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Compare):
                names = set().union(*map(texts, [node.left, *node.comparators])) & ALGORITHMS
                assert not names, f"{path}:{node.lineno} asks for {names}"
            elif isinstance(node, ast.MatchValue):
                assert not texts(node.value) & ALGORITHMS, f"{path}:{node.lineno} asks for {texts(node.value)}"


def texts(node: ast.expr) -> set:
    """Return the texts on one side of a comparison: a text, or a collection of texts."""
    inner = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {one.value for one in inner if isinstance(one, ast.Constant)}
