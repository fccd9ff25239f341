"""docs/reference/proven.md is current: each feature has tests, and each program of tests/gpu proves a feature."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from proven import FoundTest, Table, cell, main, page, read_runs, read_tests  # noqa: E402

ON_GPU = FoundTest("tests/gpu/test_x.py", "test_x", ranks=frozenset({False, True}))
SLOW = FoundTest("tests/unit/test_y.py", "test_slow", frozenset({"extended"}))
FAST = FoundTest("tests/unit/test_y.py", "test_fast")


def test_the_page_is_current_and_the_table_has_no_mistake(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["proven.py", "--check"])
    assert main() == 0, capsys.readouterr().err


def test_features_and_patterns_without_tests_and_gpu_tests_without_a_feature_are_mistakes():
    table = Table({"TE stand-in": ["unit/test_gone.py"]}, {"area": {"a": ["unit/test_y.py::test_slo*"], "b": []}})
    first, second, third = table.problems([ON_GPU, SLOW, FAST])
    assert "'b' has no test" in first
    assert "'unit/test_gone.py' matches no test" in second
    assert "tests/gpu/test_x.py::test_x belongs to no feature" in third
    assert Table({}, {"area": {"a": ["gpu/test_x.py"]}}).problems([ON_GPU]) == []


def test_tests_and_their_markers_are_read_from_the_source(tmp_path):
    (tmp_path / "tests/gpu").mkdir(parents=True)
    (tmp_path / "tests/gpu/test_x.py").write_text(
        "pytestmark = [pytest.mark.slurm]\n"
        "@pytest.mark.parametrize('dims', [ParallelDims(), ParallelDims(tp=2)])\ndef test_a(dims): ...\n"
        "@pytest.mark.extended_except('x')\ndef test_b(): ...\n"
        "@pytest.mark.parametrize('dims', [ParallelDims(dp=2)])\n@pytest.mark.extended\ndef test_c(dims): ...\n"
        "def helper(): ...\n"
    )
    a, b, c = read_tests(tmp_path)
    assert [test.id for test in (a, b, c)] == [f"tests/gpu/test_x.py::test_{name}" for name in "abc"]
    assert a.ranks == {False, True} and b.ranks == {False} and c.ranks == {True}
    assert "slurm" in a.markers and "extended" in c.markers and "extended" not in b.markers


@pytest.fixture
def record(tmp_path):
    """`record(name, **content)` writes a file of results. `read_runs(tmp_path)` reads this file."""
    (tmp_path / "benchmarks/results").mkdir(parents=True)

    def write(name: str, **content) -> None:
        (tmp_path / "benchmarks/results" / f"{name}.json").write_text(json.dumps(content))

    return write


def test_a_cell_of_gpus_has_the_card_and_the_date_of_the_last_run(tmp_path, record):
    def cells() -> list[str]:
        return [cell([ON_GPU], column, read_runs(tmp_path)) for column in ("one GPU", "several GPUs")]

    assert cells() == ["not yet run"] * 2
    record("other", card="B200", date="2026-01-01", sections={})
    record("skipped", card="H100", date="2026-02-01", programs={f"{ON_GPU.id}[cuda]": "skipped"})
    assert cells() == ["not yet run"] * 2
    record(
        "one", card="H100", date="2026-03-01", programs={f"{ON_GPU.id}[cuda-a]": "passed", f"{ON_GPU.id}[b]": "skipped"}
    )
    assert cells() == ["passed on H100, 2026-03-01", "not yet run"]
    record("two", card="H200", date="2026-04-01", gpus=2, programs={f"{ON_GPU.id}[a]": "passed"})
    assert cells() == ["passed on H200, 2026-04-01"] * 2
    record(
        "three",
        card="H200",
        date="2026-05-01",
        gpus=2,
        programs={f"{ON_GPU.id}[a]": "passed", f"{ON_GPU.id}[b]": "failed"},
    )
    assert cells() == ["failed on H200, 2026-05-01"] * 2


def test_a_feature_is_proven_on_gpus_only_if_all_its_programs_passed(tmp_path, record):
    other = FoundTest("tests/gpu/test_x.py", "test_other")
    record("one", card="H100", date="2026-03-01", programs={ON_GPU.id: "passed"})
    assert cell([ON_GPU, other], "one GPU", read_runs(tmp_path)) == "1 of 2 programs passed"
    record("two", card="H100", date="2026-04-01", programs={other.id: "passed"})
    assert cell([ON_GPU, other], "one GPU", read_runs(tmp_path)) == "passed on H100, 2026-03-01", (
        "the earlier date counts"
    )


def test_a_row_says_what_runs_the_tests_of_a_feature_in_each_column():
    patterns = {"x": ["unit/test_y.py"], "z": ["unit/test_y.py::test_slow", "gpu/test_x.py on several GPUs"]}
    text = page(Table({"TE stand-in": ["unit/test_y.py::test_fast"]}, {"area": patterns}), [ON_GPU, SLOW, FAST], {})
    assert "| x | `make test-all` | `make test` | no test | no test | no test | `test_y.py` |" in text
    assert "| z | `make test-all` | no test | no test | no test | not yet run | `test_x.py`, `test_y.py` |" in text
    assert "| test_x | `tests/gpu/test_x.py` | not yet run | not yet run |" in text
