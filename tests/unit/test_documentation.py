"""The documentation names only what exists: config keys, classes, files, metrics and commands. The site has no broken link."""

import ast
import json
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, blocks, mrl_arguments

TAKES_CONFIG = ("train", "sft", "plan", "doctor", "generate", "evaluate", "certify")
CHANGELOG = ROOT / "CHANGELOG.md"  # it names former keys and files
BENCHMARKS = ROOT / "benchmarks/README.md"
TEXTS = [page for page in (*PAGES, CHANGELOG, BENCHMARKS, ROOT / "slurm/README.md") if page.name != "config.md"]
FOREIGN_COLUMNS = {"glossary.md": (2, 3), "from_other_trainers.md": (0,)}  # table columns with names of verl and slime
FENCE = re.compile(r"```.*?```", re.DOTALL)
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PACKAGE_NAME = re.compile(r"(?<![\w./-])(?:mrl|models|parallel)(?:\.[A-Za-z_]\w*)+(?![\w/])")
IMPORT = re.compile(r"^from ((?:mrl|models|parallel)[\w.]*) import (.+)$", re.MULTILINE)
CONFIG_KEY = re.compile(r"\+*([a-z_]+(?:\.[a-z_0-9]+)+)(?:\.\*)?(?:=.*|/.*)?")
FILE_ENDINGS = ("json", "jsonl", "py", "yaml", "png", "md", "log", "parquet", "sif", "csv", "pt")
TOP_FOLDERS = ("mrl", "models", "parallel", "conf", "docs", "slurm", "tests", "benchmarks", "scripts", "requirements")


def test_there_are_command_blocks():
    assert len(blocks()) > 30


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_code_fences_and_html_comments_have_lines_of_their_own(page):
    prose = re.sub(r"(`{4}).*?\1", "", page.read_text())  # a code span between four backticks may contain a fence
    for number, line in enumerate(prose.splitlines(), 1):
        where = f"{page.name}:{number}: {line[:80]}"
        assert "```" not in line or re.fullmatch(r" *```[\w-]*( [\w-]+=\S.*)?", line), where
        assert not re.search(r"\S.*<!--|-->.*\S", line), where
    assert len(re.findall(r"^ *```", prose, re.MULTILINE)) % 2 == 0, f"{page.name}: a code block has no end"


@pytest.mark.parametrize(
    "page", [page for page in TEXTS if page.is_relative_to(ROOT / "docs")], ids=lambda page: page.name
)
def test_commands_of_the_site_are_in_bash_blocks(page):
    """Only the commands of ```bash blocks are run by tests."""
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert not [
        text for label, text in fences if not label and re.search(r"^(\.venv/bin/)?mrl [a-z]+ ", text, re.MULTILINE)
    ]


def test_a_block_that_is_not_run_says_what_it_needs():
    for block in blocks():
        assert block.commands, f"{block} is empty"
        assert block.needs is None or len(block.needs) > 5, f"{block}: say what is needed"


@pytest.mark.parametrize("block", [b for b in blocks() if b.needs], ids=str)
def test_config_keys_of_commands_that_are_not_run_exist(block):
    from mrl.config.hydra_entry import is_known_override

    for command in block.commands:
        arguments = mrl_arguments(command)
        if arguments and arguments[0] in TAKES_CONFIG:
            for override in (one for one in arguments[1:] if "=" in one and not one.startswith("-")):
                assert is_known_override(override), f"{block}: {override}"


def own_lines(page: Path) -> str:
    """Return the text of a page without the table cells that contain names of other projects."""
    lines, foreign = [], FOREIGN_COLUMNS.get(page.name, ())
    for line in page.read_text().splitlines():
        if foreign and line.startswith("|"):
            cells = line.strip("|").split("|")
            line = "|".join("" if number in foreign else cell for number, cell in enumerate(cells))
        lines.append(line)
    return "\n".join(lines)


def code_words(page: Path) -> list[str]:
    """Return the words in all `code spans` of a page."""
    prose = FENCE.sub("", own_lines(page))
    return [word.strip(",;:") for span in CODE_SPAN.findall(prose) for word in span.split()]


@cache
def top_level_names(file: Path) -> set[str]:
    """Return the names that a module defines or imports."""
    names: set[str] = set()
    body = ast.parse(file.read_text()).body
    conditional = [inner for outer in body if isinstance(outer, ast.If) for inner in outer.body]
    for node in [*body, *conditional]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def is_importable(name: str) -> bool:
    """Return whether a dotted name is a package, a module, a name in a module, or an attribute of such a name."""
    path, parts = ROOT, name.split(".")
    for number, part in enumerate(parts):
        if (path / part).is_dir():
            path = path / part
            continue
        file, rest = path / f"{part}.py", parts[number + 1 :]
        if not file.is_file():
            file, rest = path / "__init__.py", parts[number:]
        return file.is_file() and (not rest or rest[0] in top_level_names(file))
    return True


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_classes_and_modules_on_a_page_exist(page):
    from mrl.config.validate import is_known

    names = set(PACKAGE_NAME.findall(page.read_text()))
    for module, imported in IMPORT.findall(page.read_text()):
        names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
    names = {name for name in names if name.rpartition(".")[2] not in FILE_ENDINGS and not is_known(name)}
    assert [name for name in sorted(names) if not is_importable(name)] == []


@pytest.mark.parametrize("page", [page for page in TEXTS if page != CHANGELOG], ids=lambda page: page.stem)
def test_config_keys_on_a_page_exist(page):
    from mrl.config.schema import Config
    from mrl.config.validate import is_known

    keys = {match[1] for word in code_words(page) if (match := CONFIG_KEY.fullmatch(word))}
    keys = {key for key in keys if key.split(".")[0] in Config.__dataclass_fields__}
    keys = {key for key in keys if key.rpartition(".")[2] not in FILE_ENDINGS and not is_importable(key)}
    assert [key for key in sorted(keys) if not is_known(key)] == []


def test_pages_that_the_code_names_exist():
    """Docstrings, help texts and messages refer to pages of docs/."""
    folders = ("mrl", "models", "parallel", "conf", "scripts", "benchmarks", "slurm", "tests")
    files = [
        file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".yaml", ".sh")
    ]
    named = {(name, str(file)) for file in files for name in re.findall(r"docs/[a-z_/]+\.md", file.read_text())}
    assert len(named) > 20
    assert [pair for pair in sorted(named) if not (ROOT / pair[0]).is_file()] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_files_of_the_repository_on_a_page_exist(page):
    paths = {word.partition("#")[0] for word in code_words(page) if word.split("/")[0] in TOP_FOLDERS and "/" in word}
    paths |= set(re.findall(r"\]\(((?:\.\./)?[\w./-]+\.\w+)", page.read_text())) if page.parent == ROOT else set()
    assert [path for path in sorted(paths) if not list(ROOT.glob(path.removeprefix("../")))] == []


@cache
def our_classes() -> dict[str, list[tuple[str, set[str]]]]:
    """Return name -> [(module, attributes that the body of the class mentions) for each class with this name]."""
    found: dict[str, list[tuple[str, set[str]]]] = {}
    for file in (file for package in ("mrl", "models", "parallel") for file in (ROOT / package).rglob("*.py")):
        text = file.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                body = "\n".join(text.splitlines()[node.lineno : node.end_lineno])
                found.setdefault(node.name, []).append((file.stem, set(re.findall(r"\w+", body))))
    return found


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_classes_and_their_attributes_on_a_page_exist(page):
    """The forms are `losses.PPOClip` (module and class), `Trainer.step` (class and attribute) and `Turn(role)` (class)."""
    for word in code_words(page):
        assert {name for name in re.findall(r"(?<![\w.])([A-Z][a-z]\w+)\(", word)} <= our_classes().keys(), word
        if match := re.fullmatch(r"([a-z_]+)\.([A-Z][a-z]*[A-Z]?\w*[a-z]\w*)(?:\(.*)?", word):
            assert match[1] in {module for module, _ in our_classes().get(match[2], [])}, word
        elif (match := re.fullmatch(r"([A-Z]\w+)\.([a-z]\w+)(?:\(.*)?", word)) and match[1] in our_classes():
            assert any(match[2] in names for _, names in our_classes()[match[1]]), word


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_python_files_on_a_page_exist(page):
    ours = {file.name for folder in TOP_FOLDERS for file in (ROOT / folder).rglob("*.py")} | {"setup.py"}
    named = {word for word in code_words(page) if re.fullmatch(r"\w+\.py", word)}
    assert {name for name in named if not name.startswith(("my_", "mine", "trl_"))} <= ours


@pytest.mark.parametrize("page", ["docs/index.md", "docs/how_to/resume.md"])
def test_files_of_a_run_directory_on_a_page_are_written_by_the_code(page):
    source = " ".join(file.read_text() for file in (ROOT / "mrl").rglob("*.py"))
    rows = re.findall(r"^\| (`[^|]+`) \|", (ROOT / page).read_text(), re.MULTILINE)
    for name in (name for row in rows for name in re.findall(r"`([\w/]+/|\w+\.(?:jsonl?|png))`", row)):
        assert re.search(rf"""["/]{re.escape(name.rstrip("/"))}["/\\]""", source), name


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_metrics_on_a_page_are_declared(page):
    from mrl.core.metrics import METRICS, find

    areas = {name.split("/")[0] for name in METRICS} | {"own"}
    for word in code_words(page):
        name = re.sub(r"<\w+>|NAME", "x", word)
        if re.fullmatch(r"\w+/\w+", name) and name.split("/")[0] in areas and not (ROOT / name).exists():
            find(name)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_commands_on_a_page_exist(page):
    from mrl.core.command_names import COMMANDS

    prose = FENCE.sub("", own_lines(page))
    named = {words[1] for span in CODE_SPAN.findall(prose) if (words := span.split())[0] == "mrl" and len(words) > 1}
    assert {name for name in named if re.fullmatch("[a-z]+", name)} <= set(COMMANDS)


@pytest.fixture(scope="module")
def site():
    """Return the folder of the built site. Every user may read the folder, because linkcheck gives up the rights of root."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield folder


@pytest.mark.extended
def test_no_link_of_the_site_is_broken(site):
    line = [sys.executable, "-m", "linkcheck", "--no-status", "--no-warnings", str(site / "index.html")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.extended
def test_the_site_makes_no_external_request(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        for attribute in ('src="http', 'rel="stylesheet" href="http', "@import url(http"):
            assert attribute not in text, f"{page.relative_to(site)}: {attribute}"


@pytest.mark.extended
@pytest.mark.parametrize("words", ["out of memory", "hang", "KL", "resume"])
def test_the_search_finds(site, words):
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    titles = [one["title"].lower() for one in entries]
    assert any(words.lower() in title for title in titles), f"no heading has {words!r}"
