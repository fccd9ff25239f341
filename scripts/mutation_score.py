"""Mutation testing with the operators of cosmic-ray: measures the fraction of small code changes that the unit tests notice.

    python scripts/mutation_score.py [--sample 10] [--seed 0] [--module PART_OF_A_PATH] [--minimum 0.85]

Each mutant changes one operator, comparison, number or boolean of a target module. The unit tests that import this module
run on the mutant, in a fork of a process that has imported the libraries already. So a mutant takes about a second, whereas
cosmic-ray itself would start a new interpreter for each mutant. A mutant is caught if a test fails or if the tests take more
than a minute. The exit status is 1 if the fraction of caught mutants is below the minimum, or if the tests fail without a
mutation. The fraction does not count mutants that cannot change any result. The file scripts/equivalent_mutants.json, if it
exists, lists these mutants with reasons.
"""

import argparse
import importlib.machinery
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import parso
from cosmic_ray.ast import Visitor
from cosmic_ray.plugins import get_operator, operator_names

HOME = Path(__file__).resolve().parents[1]
TARGETS = (
    "mrl/algorithms/*.py",
    "mrl/data/batching.py",
    "mrl/rollout/staleness_buffer.py",
    "mrl/weight_sync/transfer_plan.py",
    "mrl/workers/dp_partition.py",
    "parallel/packing.py",
)
EQUIVALENT = HOME / "scripts" / "equivalent_mutants.json"
KINDS = re.compile(
    r"core/(ReplaceBinaryOperator|ReplaceComparison|ReplaceUnary|NumberReplacer|ReplaceTrue|ReplaceFalse|ReplaceAnd|ReplaceOr)"
)
TIMEOUT_S = 60


@dataclass(frozen=True)
class Mutant:
    """A module with one changed place."""

    path: Path
    line: int
    before: str  # the original line
    after: str  # the changed line
    source: str  # the module with the changed line
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path.relative_to(HOME)}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


class _Mutator(Visitor):
    """Applies a mutation operator at one of its positions in a syntax tree, and counts the positions."""

    def __init__(self, operator, occurrence: int) -> None:
        self.operator, self.left, self.count = operator, occurrence, 0

    def visit(self, node):
        for index, _ in enumerate(self.operator.mutation_positions(node)):
            self.count += 1
            if self.left == 0:
                self.left -= 1
                return self.operator.mutate(node, index)
            self.left -= 1
        return node


def mutants_of(path: Path) -> list[Mutant]:
    """Return every mutant of a module.

    The list contains no changes from or to the operator `|`, which is mostly in annotations, and no changes of the options of
    `@dataclass`. Such changes rarely alter a result.
    """
    source, tests = path.read_text(), tests_of(path)
    found: dict[str, Mutant] = {}
    for name in operator_names():
        if not KINDS.match(name) or "BitOr" in name:
            continue
        occurrence = 0
        while True:
            tree, mutator = parso.parse(source), _Mutator(get_operator(name)(), occurrence)
            mutated = mutator.walk(tree).get_code()  # pyrefly: ignore
            if mutator.count <= occurrence:
                break
            occurrence += 1
            changed = [
                i for i, (a, b) in enumerate(zip(source.split("\n"), mutated.split("\n"), strict=True)) if a != b
            ]
            is_decorator = source.split("\n")[changed[0]].startswith("@dataclass") if changed else False
            if len(changed) == 1 and not is_decorator and mutated not in found:
                line = changed[0]
                found[mutated] = Mutant(
                    path, line + 1, source.split("\n")[line], mutated.split("\n")[line], mutated, tests
                )
    return list(found.values())


def tests_of(path: Path) -> tuple[str, ...]:
    """Return the unit tests that import a module, directly or through a helper module of the tests."""
    dotted = ".".join(path.relative_to(HOME).with_suffix("").parts)
    package, _, name = dotted.rpartition(".")
    imports = re.compile(rf"(from|import) {re.escape(dotted)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    helpers = [file.stem for file in (HOME / "tests").glob("*.py") if imports.search(file.read_text())]
    uses = re.compile(rf"(from|import) ({'|'.join(helpers)})\b") if helpers else None
    files = sorted((HOME / "tests" / "unit").glob("test_*.py"))
    texts = {file: file.read_text() for file in files}
    return tuple(str(f) for f, text in texts.items() if imports.search(text) or (uses and uses.search(text)))


def survivors_of(mutants: list[Mutant], jobs: int) -> list[Mutant]:
    """Run the tests on each mutant in a fork, with `jobs` forks at one time. Return the mutants on which all tests pass."""
    waiting, running, alive = list(reversed(mutants)), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            child = os.fork()
            if child == 0:
                _run_tests(mutant)
            running[child] = (mutant, time.monotonic() + TIMEOUT_S)
        for child, (mutant, deadline) in list(running.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if not pid and time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                pid, status = os.waitpid(child, 0)
            if pid:
                del running[child]
                if os.waitstatus_to_exitcode(status) == 0:
                    alive.append(mutant)
        time.sleep(0.02)
    return alive


def _run_tests(mutant: Mutant) -> None:
    """Run pytest with the mutated source in place of the module, and end this forked process."""
    status = 99
    try:
        os.setpgid(0, 0)
        sink = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(sink, stream)
        load = importlib.machinery.SourceFileLoader.get_code

        def get_code(self, fullname):
            if os.path.realpath(self.path) == str(mutant.path):
                return compile(mutant.source, str(mutant.path), "exec")
            return load(self, fullname)

        importlib.machinery.SourceFileLoader.get_code = get_code
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and not extended"]
        status = int(pytest.main([*options, *mutant.tests]))
    finally:
        os._exit(status)


def preload() -> None:
    """Import the libraries that the tests need. Each fork then imports the project itself, with the fork's mutant."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import omegaconf  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch

    torch.set_num_threads(1)
    loaded = [name for name in sys.modules if name.split(".")[0] in ("mrl", "models", "parallel")]
    assert not loaded, f"{loaded} are imported already; a mutant of them would not be seen"


def draw_sample(mutants: list[Mutant], per_module: int, seed: int) -> list[Mutant]:
    """Return a random sample of `per_module` mutants of each module, or all mutants if `per_module` is 0."""
    generator, sample = random.Random(seed), []
    for path in sorted({mutant.path for mutant in mutants}):
        of_module = [mutant for mutant in mutants if mutant.path == path]
        sample += generator.sample(of_module, min(per_module or len(of_module), len(of_module)))
    return sample


def main() -> int:
    """Print each survivor and the score; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=10, help="mutants of each module to try, drawn by --seed; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", default="", help="only target modules whose path contains this text")
    parser.add_argument("--minimum", type=float, default=0.85, help="least share of mutants that tests must catch")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at one time")
    arguments = parser.parse_args()
    os.chdir(HOME)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    preload()
    paths = sorted({p for pattern in TARGETS for p in HOME.glob(pattern) if p.name != "__init__.py"})
    mutants = [m for path in paths if arguments.module in str(path) for m in mutants_of(path)]
    equivalent = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else []
    known = {(one["file"], one["before"], one["after"]) for one in equivalent}
    counted = [m for m in mutants if (str(m.path.relative_to(HOME)), m.before.strip(), m.after.strip()) not in known]
    tried = draw_sample(counted, arguments.sample, arguments.seed)
    unchanged = [Mutant(path, 0, "", "unchanged", path.read_text(), tests_of(path)) for path in {m.path for m in tried}]
    failing = set(unchanged) - set(survivors_of(unchanged, arguments.jobs))
    if failing:
        print(
            "the unit tests fail without a mutation, so they would catch every mutant:",
            *sorted(map(str, failing)),
            sep="\n  ",
        )
        return 1
    survivors = survivors_of(tried, arguments.jobs)
    for mutant in sorted(survivors, key=str):
        print("survived:", mutant)
    total, missed = Counter(m.path for m in tried), Counter(m.path for m in survivors)
    for path, number in total.items():
        print(f"{number - missed[path]:4d} of {number:4d}  {path.relative_to(HOME)}")
    score = 1 - len(survivors) / len(tried)
    print(
        f"{len(tried) - len(survivors)} of {len(tried)} mutants caught ({score:.1%}); {len(mutants)} exist, "
        f"{len(mutants) - len(counted)} are named as equivalent"
    )
    return int(score < arguments.minimum)


if __name__ == "__main__":
    sys.exit(main())
