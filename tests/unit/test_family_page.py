"""docs/reference/families.md: the cases, families and layouts of tests are read correctly, and claims about libraries are true.

tests/unit/test_proven.py tests that the page is current.
"""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from family_page import LIBRARIES, TABLE, FamilyPage, find_message  # noqa: E402
from family_tests import CoverageReader, cases_of  # noqa: E402
from found_tests import FoundTest, matches, read_tests  # noqa: E402
from source_values import Module, UnreadableError, read_module  # noqa: E402

TABLE_OF_PAGE = json.loads((ROOT / TABLE).read_text())
PACKAGES = {"transformers": "transformers", "sglang": "sglang", "megatron": "megatron-core"}


@pytest.fixture
def checkout(tmp_path):
    """`checkout(name, source)` writes tests/unit/NAME to a small checkout, and returns (folder of the checkout, its test)."""
    for folder in ("tests/unit", "models/families", "parallel", "conf/model", "mrl"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "parallel/dims.py").write_text((ROOT / "parallel/dims.py").read_text())
    (tmp_path / "tests/tiny_families.py").write_text(
        "ROPE = dict(theta=1)\nROPE |= dict(other=2)\n"
        "FAMILIES = {'small': ('Small', ROPE), 'small_tied': ('Small', {}), 'wide': ('Wide', dict(num_experts=2))}\n"
        "IMAGE_FAMILIES = {'seeing': ('Seeing', {}, {})}\n"
    )
    (tmp_path / "tests/kinds.py").write_text("import torch\nKINDS = {'dense': ('small', {}), 'moe': ('wide', {})}\n")
    (tmp_path / "conf/model/large.yaml").write_text("data:\n  inputs:\n    model: wide\n")
    (tmp_path / "mrl/task.py").write_text("def make_task(folder, model='small'): ...\n")

    def write(name: str, source: str) -> tuple[Path, FoundTest]:
        (tmp_path / "tests/unit" / name).write_text(source)
        return tmp_path, next(test for test in read_tests(tmp_path) if test.path.endswith(name))

    return write


def covered(root: Path, test: FoundTest) -> list[tuple[str, str, set[str]]]:
    return [(case.id, case.target, families) for case, families in CoverageReader(root).coverage(test)]


def test_parameters_name_families_directly_and_by_tables_of_other_files(checkout):
    found = covered(
        *checkout(
            "test_a.py",
            "from kinds import KINDS\nfrom tiny_families import FAMILIES as TINY\nfrom parallel.dims import ParallelDims\n"
            "def layouts(*texts: list[Unknown]) -> Unknown: return [ParallelDims(**{text: 2}) for text in texts]\n"
            "@pytest.mark.extended_except('dense-tp2 sp')\n"
            "@pytest.mark.parametrize('dims', layouts('tp', 'cp'), ids=str)\n"
            "@pytest.mark.parametrize('kind', [name for name in KINDS] + ['small_tied'])\n"
            "def test_x(kind, dims): ...\n",
        )
    )
    assert [(name, families) for name, _, families in found] == [
        (f"{kind}-{dims}", {family})
        for kind, family in (("dense", "Small"), ("moe", "Wide"), ("small_tied", "Small"))
        for dims in ("tp2 sp", "cp2")
    ]
    assert [name for name, target, _ in found if target == "`make test`"] == ["dense-tp2 sp"]


def test_cases_of_several_arguments_have_the_ids_of_pytest(checkout):
    root, test = checkout(
        "test_b.py",
        "import pytest\nSIZES = [(1, 'a'), pytest.param(2, 'b', id='own'), (None, [3])]\n"
        "@pytest.mark.extended_after(2)\n"
        "@pytest.mark.parametrize(('number', 'text'), SIZES)\n"
        "@pytest.mark.parametrize('flag', [True, False], ids=['on', 'off'])\n"
        "def test_x(flag, number, text): ...\n",
    )
    module = read_module(root, Path(test.path))
    cases = cases_of(module, module.function("test_x"), test)
    assert [case.id for case in cases] == [
        *("on-1-a", "on-own", "on-None-text2", "off-1-a", "off-own", "off-None-text2"),
    ]
    assert [case.target for case in cases] == ["`make test`"] * 2 + ["`make test-all`"] * 4


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def test_x():\n    make_family('wide', folder)\n", {"Wide"}),
        ("def test_x():\n    [make_family(name) for name in FAMILIES]\n", {"Small", "Wide"}),
        ("def helper():\n    make('small')\ndef test_x():\n    run(helper)\n", {"Small"}),
        ("@pytest.fixture\ndef folder():\n    make('wide')\ndef test_x(folder):\n    pass\n", {"Wide"}),
        ("def test_x():\n    from transformers import WideConfig\n    WideConfig()\n", {"Wide"}),
        ("def test_x():\n    from mrl.task import make_task\n    once(make_task)\n", {"Small"}),
        ("def test_x():\n    from mrl.task import make_task\n    make_task(folder, model='wide')\n", {"Wide"}),
        ("def test_x(start):\n    start('train', 'model=large')\n", {"Wide"}),
        ("def test_x(start):\n    start('train', *['model=large'])\n", {"Wide"}),
        ("def test_x():\n    'wide'\n", set()),
    ],
)
def test_functions_name_families(checkout, body, expected):
    ((_, _, found),) = covered(*checkout("test_c.py", f"from tiny_families import FAMILIES\n{body}"))
    assert found == expected


def test_a_helper_has_no_fixtures(checkout):
    source = "@pytest.fixture\ndef engine():\n    make('wide')\ndef helper(engine): ...\ndef test_x():\n    helper(1)\n"
    assert covered(*checkout("test_d.py", source)) == [("", "`make test`", set())]


@pytest.mark.parametrize(
    "decorator",
    [
        "@pytest.mark.parametrize('x', library.NAMES)",
        "@pytest.mark.extended_except('b')\n@pytest.mark.parametrize('x', 'a')",
    ],
)
def test_parameters_of_a_library_and_unknown_cases_are_errors(checkout, decorator):
    with pytest.raises(UnreadableError):
        covered(*checkout("test_e.py", f"import library\n{decorator}\ndef test_x(x): ...\n"))


def test_a_message_of_the_code_is_found(tmp_path):
    (tmp_path / "m.py").write_text(
        "KEY = 'a.b=c'\ndef f():\n    x = f'{KEY} elsewhere'\n"
        "    raise ValueError(f'{KEY}: {self.architecture} has {len(x)} parts, ' f'use {y}.')\n"
    )
    module = Module(tmp_path, Path("m.py"))
    assert find_message(module, "use") == "a.b=c: <architecture> has … parts, use <y>."
    assert find_message(module, "elsewhere") is None


@pytest.fixture
def page(monkeypatch):
    """`page(**changes)` -> FamilyPage of this checkout with changes of its table. Its lines are written."""
    tests = read_tests(ROOT)

    def write(**changes) -> FamilyPage:
        made = FamilyPage(ROOT, tests, TABLE_OF_PAGE | changes)
        list(made.lines())
        return made

    return write


def cells_of(text: str, architecture: str) -> list[str]:
    """Return the cells of the rows of an architecture in all tables of the page."""
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if f"| `{architecture}` |" in line]
    return [cell.strip() for row in rows[:3] for cell in row[2:]]


def test_the_page_says_what_is_known_of_some_families():
    text = (ROOT / "docs/reference/families.md").read_text()
    titles = [name for table in TABLE_OF_PAGE["tables"].values() for name in table]
    qwen3, olmo3, qwen3_5 = (
        dict(zip(titles, cells_of(text, f"{prefix}ForCausalLM"), strict=True))
        for prefix in ("Qwen3", "Olmo3", "Qwen3_5")
    )
    others = ("plan", "adapters to engines", "ep", "etp")
    assert {qwen3[title] for title in titles if title not in others} == {"`make test`"}
    assert qwen3["ep"].startswith("refused") and olmo3["engine"].startswith("refused")
    assert qwen3_5["engine"].startswith("refused on CPUs") and qwen3_5["pp"] == "`make test-all`"
    assert "does not implement <architecture>" in text and "no kernels for <architecture> on a CPU" in text


@pytest.mark.extended
def test_wrong_patterns_and_messages_and_refused_families_with_tests_are_mistakes(page):
    assert page().problems == []
    column = dict(shows="...", tests=["unit/test_gone.py"], refusals=["no engine"])
    refusals = TABLE_OF_PAGE["refusals"] | {"no engine": dict(TABLE_OF_PAGE["refusals"]["no engine"], words="gone")}
    gone, message = page(tables={"table": {"column": column}}, refusals=refusals).problems[:2]
    assert "'unit/test_gone.py' matches no test" in gone and "no message with 'gone'" in message
    column["tests"] = ["distributed/test_logits.py::test_logits*"]
    found = page(tables={"table": {"column": column}}).problems
    assert [problem for problem in found if "Olmo3ForCausalLM is refused, but a test covers it" in problem]
    column = dict(shows="...", tests=["unit/test_kl.py"])
    assert [each for each in page(tables={"table": {"column": column}}).problems if "names no model family" in each]


@pytest.mark.extended
def test_families_without_a_row_and_false_claims_about_other_models_are_mistakes(page):
    models = {prefix: name for prefix, name in TABLE_OF_PAGE["models"].items() if prefix != "Olmo3"}
    assert f"{TABLE}: add the models of Olmo3." in page(models=models).problems
    others = [dict(TABLE_OF_PAGE["others"][0], missing="nothing")]
    assert page(others=others).problems == [f"{TABLE}: correct what is missing for {others[0]['model']}."]


@pytest.mark.parametrize("library", LIBRARIES)
def test_claims_about_libraries_are_true_for_the_installed_versions(library):
    """The page names files of the libraries and words in them. No library is imported."""
    assert version(PACKAGES[library]) == TABLE_OF_PAGE["versions"][library]
    spec = importlib.util.find_spec(library)
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations))).parent
    claims = [pair for other in TABLE_OF_PAGE["others"] for pair in other[library]["files"].items()]
    assert len(claims) >= len(TABLE_OF_PAGE["others"])
    for file, words in claims:
        text = (folder / file).read_text()
        assert [each for each in words if each not in text] == [], file


@pytest.mark.extended
def test_the_cases_are_those_that_pytest_collects():
    patterns = [
        pattern
        for table in TABLE_OF_PAGE["tables"].values()
        for column in table.values()
        for name in column["tests"]
        for pattern in (TABLE_OF_PAGE["groups"][name[1:]] if name.startswith("@") else [name])
    ]
    tests = [test for test in read_tests(ROOT) if matches(test, patterns)]
    reader, expected = CoverageReader(ROOT), {}
    for test in tests:
        for case, _ in reader.coverage(test):
            expected[test.id + (f"[{case.id}]" if case.id else "")] = case.target
    found = {}
    for marker, target in (("extended", "`make test-all`"), ("not extended", "`make test`")):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marker]
        line = [*command, *sorted({test.id for test in tests})]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        lines = (line for line in done.stdout.splitlines() if "::" in line)
        found |= {name if name in expected else name.partition("[")[0]: target for name in lines}
    assert found == expected  # a fixture with parameters also adds to the ids
