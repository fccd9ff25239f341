"""Measures the structure of a checkout: modules, lines, class names, config keys, documentation pages and call paths.

    python scripts/measure_structure.py [CHECKOUT] [--json]

The script only reads source text and imports nothing of the project. So it can also measure other revisions. The exit status is
1 if a limit is exceeded or a call path is broken. If CHECKOUT is not the script's own checkout, the exit status is always 0,
because scripts/call_paths.json contains the call paths of the script's own revision.

A call path follows one sample or one weight through the code. The path contains every function of this project that is running
when the next function of the path is called. The sample or the weight travels in an object, such as a request, a block or a
batch; the path also contains each helper that builds such an object. The path does not contain other helpers, functions that only
read the sample (such as rewards, advantages and logs), or functions of Megatron and SGLang.
"""

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from functools import cache, partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("mrl", "models", "parallel")
CALL_PATHS_FILE = REPOSITORY / "scripts" / "call_paths.json"
LIMITS = {
    "modules": 311,
    "modules under 60 lines": 11,
    "modules in the root of mrl": 6,
    "public class names defined twice": 0,
    "lines of the longest function": 80,
    "lines of the longest file": 500,
    "config leaf keys": 253,
    "config leaf keys without a description": 0,
    "functions from the command line to the loss": 59,
    "functions from the optimizer to the engine": 28,
}

type Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_files(root: Path) -> list[Path]:
    """Return all source files except `__init__.py` files, most of which contain only the docstring of their package."""
    files = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return sorted(path for path in files if path.name != "__init__.py")


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(path.read_text())


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
    """Return the names of public top-level classes that several modules define, with the paths of these modules."""
    definitions: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                definitions[node.name].append(str(path))
    return {name: paths for name, paths in definitions.items() if len(paths) > 1}


def config_keys(root: Path) -> tuple[list[str], list[str]]:
    """Return two lists: all dotted leaf keys of the config schema, and the leaf keys that have no description.

    A description is a comment on the key's line or on the line above it, `help=`, or a call of `key()` or `config_field()`.
    """
    path = next(path for path in (root / "mrl/config/schema.py", root / "mrl/config.py") if path.exists())
    imports = (node.module for node in parsed(path).body if isinstance(node, ast.ImportFrom) and node.module)
    modules = (root / f"{module.replace('.', '/')}.py" for module in imports)
    sources = [path, *(module for module in modules if module.exists())]
    classes: dict[str, tuple[ast.ClassDef, list[str]]] = {}
    for source in sources:
        lines = source.read_text().splitlines()
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = (node, lines)
    keys: list[str] = []
    undescribed: list[str] = []

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
            if kinds and is_section_class(classes[kinds[0]][0]):
                visit(kinds[0], key + ".")
                continue
            keys.append(key)
            text = "\n".join(lines[max(0, item.lineno - 2) : item.end_lineno])
            if "#" not in text and "help=" not in text and not re.search(r"\b(key|config_field)\(", text):
                undescribed.append(key)

    visit("Config", "")
    return keys, undescribed


def is_section_class(node: ast.ClassDef) -> bool:
    """Return whether a class of the schema is a section of keys. Otherwise it is an enumeration of values."""
    return not any(isinstance(base, ast.Name | ast.Attribute) and "Enum" in ast.unparse(base) for base in node.bases)


def broken_links(root: Path, path: list[str]) -> list[str]:
    """Return the errors in a call path. Each link of `path` is a function, `file.py:Class.method`, in the order of the calls.

    Every function must exist, and its source must contain the name of the next function. If the next function is a special method
    such as `__call__`, the source must contain the name of the class instead. If the next function is nested, the source may
    contain the name of the outer function instead.

    A link may end with " -> " and a reason why the function does not name the next function. The reason "return" means that the
    function returns, and that an earlier function of the path names the next function. Any other reason, such as a call through
    Ray, makes the link a jump. Jumps are counted but not checked.
    """
    errors: list[str] = []
    texts: list[str] = []  # sources of the functions up to this link
    links = [one.partition(" -> ") for one in path]
    for (here, _, reason), following in zip(links, [*(link[0] for link in links[1:]), ""], strict=True):
        file, _, name = here.partition(":")
        functions = functions_of(parsed(root / file)) if (root / file).exists() else {}
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
    """Return the words by which source code can name a function `Class.method` or `outer.inner`."""
    *outer, name = qualified.split(".")
    if name in ("__init__", "__call__", "__enter__"):
        return outer[-1:]
    return [name, *(one for one in outer if not one.lstrip("_")[:1].isupper())]


def jumps(path: list[str]) -> list[str]:
    """Return the links of a call path that are jumps (see broken_links)."""
    return [link for link in path if " -> " in link and not link.endswith(" -> return")]


def measure(root: Path) -> tuple[dict[str, int], list[str]]:
    """Return the measured numbers by name, and lines of text with details, such as the errors in call paths."""
    files = module_files(root)
    trees = {path.relative_to(root): parsed(path) for path in files}
    lengths = {path.relative_to(root): len(path.read_text().splitlines()) for path in files}
    longest = max(
        ((node.end_lineno or 0) - node.lineno + 1, f"{path}:{name}")
        for path, tree in trees.items()
        for name, node in functions_of(tree).items()
    )
    repeated_names = class_names_defined_twice(trees)
    keys, undescribed = config_keys(root)
    longest_file = max((length, str(path)) for path, length in lengths.items())
    pages = [
        page for page in (root / "docs").rglob("*.md") if "adr" not in page.parts and "decisions" not in page.parts
    ]
    numbers = {
        "modules": len(files),
        "modules under 60 lines": sum(length < 60 for length in lengths.values()),
        "modules in the root of mrl": sum(path.parent == Path("mrl") for path in lengths),
        "public class names defined twice": len(repeated_names),
        "lines of the longest function": longest[0],
        "lines of the longest file": longest_file[0],
        "config leaf keys": len(keys),
        "config leaf keys without a description": len(undescribed),
        "documentation pages": len(pages),
    }
    details = [f"longest function: {longest[1]}", f"longest file: {longest_file[1]}"]
    details += [f"class {name}: {', '.join(paths)}" for name, paths in sorted(repeated_names.items())]
    details += [f"config key without a description: {key}" for key in undescribed]
    if root == REPOSITORY and CALL_PATHS_FILE.exists():
        for name, path in json.loads(CALL_PATHS_FILE.read_text()).items():
            numbers[f"functions from {name}"] = len(path)
            numbers[f"jumps from {name}"] = len(jumps(path))
            details += [f"call path from {name}: {error}" for error in broken_links(root, path)]
    return numbers, details


def main() -> int:
    """Print the numbers and their limits, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", default=str(REPOSITORY), help="root of a checkout; default: this one")
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
    return int(root == REPOSITORY and (exceeded or broken))


if __name__ == "__main__":
    sys.exit(main())
