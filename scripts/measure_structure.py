"""Measures the structure of a checkout: modules, lines, shared class names, config keys, doc pages, call paths.

    python scripts/measure_structure.py [CHECKOUT] [--json]

It reads source text only and imports nothing of the project, so it also measures other revisions. Exit status 1: a limit
is exceeded (only where CHECKOUT is this checkout's own tree, because the call paths are those of this revision).

A call path (scripts/call_paths.json) follows one sample, or one weight. It has every function of ours that runs while the next
one is called, and each helper that makes the kind of object in which the sample or the weight goes on: a request, a block, a
batch. It does not have other helpers (lookups, parts of the same kind), nor branches that only read the sample (rewards, columns
of scores, advantages, logs), nor functions of Megatron and SGLang.
"""

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
PACKAGES = ("mrl", "models", "parallel")
PATHS_FILE = HOME / "scripts" / "call_paths.json"
LIMITS = {
    "modules": 200,
    "modules under 60 lines": 30,
    "modules in the root of mrl": 6,
    "public class names defined twice": 0,
    "lines of the longest function": 80,
    "lines of the longest file": 500,
    "config leaf keys": 200,
    "config leaf keys without a description": 0,
    "functions from the command line to the loss": 55,
    "functions from the optimizer to the engine": 28,
}

type Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_files(root: Path) -> list[Path]:
    """Return every source file that has content of its own: package docstrings in `__init__.py` are not modules."""
    files = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return sorted(path for path in files if path.name != "__init__.py")


def functions_of(tree: ast.Module) -> dict[str, Function]:
    """Return each function and method of a module by its qualified name."""
    found: dict[str, Function] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    found[name] = child
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(tree, "")
    return found


def class_names_defined_twice(trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """Return the public top-level classes whose name is defined in more than one module, with these modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def config_keys(root: Path) -> tuple[list[str], list[str]]:
    """Return the dotted leaf keys of the config schema, and those of them without a description.

    A key is described by a comment on its line or above it, or by `help=` of its field.
    """
    path = next(path for path in (root / "mrl/config/schema.py", root / "mrl/config.py") if path.exists())
    imports = (
        node.module for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom) and node.module
    )
    modules = (root / f"{module.replace('.', '/')}.py" for module in imports)
    sources = [path, *(module for module in modules if module.exists())]
    classes: dict[str, tuple[ast.ClassDef, list[str]]] = {}
    for source in sources:
        lines = source.read_text().splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = (node, lines)
    keys: list[str] = []
    unexplained: list[str] = []

    def visit(name: str, prefix: str) -> None:
        node, lines = classes[name]
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in classes:
                visit(base.id, prefix)
        fields = (item for item in node.body if isinstance(item, ast.AnnAssign))
        for item in (field for field in fields if isinstance(field.target, ast.Name)):
            kinds = [one.id for one in ast.walk(item.annotation) if isinstance(one, ast.Name) and one.id in classes]
            assert isinstance(item.target, ast.Name)
            key = prefix + item.target.id
            if kinds and issubclass_of_section(classes[kinds[0]][0]):
                visit(kinds[0], key + ".")
                continue
            keys.append(key)
            text = "\n".join(lines[max(0, item.lineno - 2) : item.end_lineno])
            if "#" not in text and "help=" not in text and not re.search(r"\b(key|config_field)\(", text):
                unexplained.append(key)

    visit("Config", "")
    return keys, unexplained


def issubclass_of_section(node: ast.ClassDef) -> bool:
    """Tell whether a class of the schema is a section of keys, and not an enumeration of values."""
    return not any(isinstance(base, ast.Name | ast.Attribute) and "Enum" in ast.unparse(base) for base in node.bases)


def broken_links(root: Path, path: list[str]) -> list[str]:
    """Return what is wrong with a call path, a list of `file.py:Class.method` in the order of the calls.

    Every function must exist, and name the next one as a word: its name, the class of a `__call__`, or the function around a
    nested one. After " -> " a link may say why it does not. "return": it returns, and an earlier function of the path names the
    next one. Any other reason, such as a call through Ray, makes the link a jump, which is counted and not checked further.
    """
    errors: list[str] = []
    texts: list[str] = []  # of the functions up to here
    links = [one.partition(" -> ") for one in path]
    for (here, _, reason), following in zip(links, [*(link[0] for link in links[1:]), ""], strict=True):
        file, _, name = here.partition(":")
        functions = functions_of(ast.parse((root / file).read_text())) if (root / file).exists() else {}
        if name not in functions:
            errors.append(f"{here} does not exist")
            continue
        texts.append(ast.unparse(functions[name]))
        if not following or reason not in ("", "return"):
            continue
        is_named = partial(re.search, rf"\b({'|'.join(_names_of(following.partition(':')[2]))})\b")
        if not any(map(is_named, texts if reason else texts[-1:])):
            errors.append(f"{here} does not name {following}")
    return errors


def _names_of(qualified: str) -> list[str]:
    """Return the words that name a function `Class.method` or `outer.inner` where it is called or passed on."""
    *outer, name = qualified.split(".")
    if name in ("__init__", "__call__", "__enter__"):
        return outer[-1:]
    return [name, *(one for one in outer if not one.lstrip("_")[:1].isupper())]


def jumps(path: list[str]) -> list[str]:
    """Return the links of a call path that are jumps."""
    return [link for link in path if " -> " in link and not link.endswith(" -> return")]


def measure(root: Path) -> tuple[dict[str, int], list[str]]:
    """Return the measured numbers by name, and details: longest function and file, double class names, errors of call paths."""
    files = module_files(root)
    trees = {path.relative_to(root): ast.parse(path.read_text()) for path in files}
    lengths = {path.relative_to(root): len(path.read_text().splitlines()) for path in files}
    longest = max(
        ((node.end_lineno or 0) - node.lineno + 1, f"{path}:{name}")
        for path, tree in trees.items()
        for name, node in functions_of(tree).items()
    )
    twice = class_names_defined_twice(trees)
    keys, unexplained = config_keys(root)
    longest_file = max((length, str(path)) for path, length in lengths.items())
    pages = [
        page for page in (root / "docs").rglob("*.md") if "adr" not in page.parts and "decisions" not in page.parts
    ]
    numbers = {
        "modules": len(files),
        "modules under 60 lines": sum(length < 60 for length in lengths.values()),
        "modules in the root of mrl": sum(path.parent == Path("mrl") for path in lengths),
        "public class names defined twice": len(twice),
        "lines of the longest function": longest[0],
        "lines of the longest file": longest_file[0],
        "config leaf keys": len(keys),
        "config leaf keys without a description": len(unexplained),
        "documentation pages": len(pages),
    }
    details = [f"longest function: {longest[1]}", f"longest file: {longest_file[1]}"]
    details += [f"class {name}: {', '.join(paths)}" for name, paths in sorted(twice.items())]
    details += [f"config key without a description: {key}" for key in unexplained]
    if root == HOME and PATHS_FILE.exists():
        for name, path in json.loads(PATHS_FILE.read_text()).items():
            numbers[f"functions from {name}"] = len(path)
            numbers[f"jumps from {name}"] = len(jumps(path))
            details += [f"call path from {name}: {error}" for error in broken_links(root, path)]
    return numbers, details


def main() -> int:
    """Print the numbers beside their limits; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", default=str(HOME), help="root of a checkout; default: this one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    root = Path(arguments.checkout).resolve()
    numbers, details = measure(root)
    if arguments.json:
        print(json.dumps({"numbers": numbers, "details": details}, indent=1))
    else:
        for name, number in numbers.items():
            limit = LIMITS.get(name)
            mark = "" if limit is None else f"  (at most {limit}){'  EXCEEDED' if number > limit else ''}"
            print(f"{number:6d}  {name}{mark}")
        print("\n".join(details))
    exceeded = any(number > LIMITS.get(name, number) for name, number in numbers.items())
    broken = any(detail.startswith("call path") for detail in details)
    return int(root == HOME and (exceeded or broken))


if __name__ == "__main__":
    sys.exit(main())
