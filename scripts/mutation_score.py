"""Mutation testing with the operators of cosmic-ray: measures the fraction of small code changes that the unit tests notice.

    python scripts/mutation_score.py [--sample 10] [--seed 0] [--module PART_OF_A_PATH] [--minimum 0.85]

Each mutant changes one operator, comparison, number or boolean of a target module. The unit tests that import this module
run on the mutant, in a fork of a process that has imported the libraries already, whereas cosmic-ray itself would start a new
interpreter for each mutant. First, every test file runs once without a mutation. A mutant is caught if a test fails or if its
tests take much longer than they took then. The exit status is 1 if a test fails without a mutation, or if the fraction of
caught mutants is below the minimum. The fraction does not count mutants that cannot change any result. The file
scripts/equivalent_mutants.json, if it exists, lists these mutants with reasons.
"""

import argparse
import functools
import importlib
import importlib.machinery
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
PRELOADED = (
    "aiohttp",
    "httpx",
    "hydra",
    "hypothesis",
    "megatron.core.transformer",
    "omegaconf",
    "pandas",
    "pytest",
    "ray",
    "rich",
    "scipy.stats",
    "torch._dynamo",
    "torchvision",
    "transformers.models.auto",
    "wandb",
)
"""Modules whose import takes long. Tests of the target modules import them."""
FILE_LIMIT_S = 600.0


@dataclass(frozen=True)
class Mutant:
    """A module with one changed place."""

    path: Path
    line: int
    before: str  # the original line
    after: str  # the changed line
    source: str  # the module with the changed line

    def __str__(self) -> str:
        return f"{self.path.relative_to(HOME)}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


class TestRun(NamedTuple):
    """Test files to run in a fork, and how long they may take."""

    mutant: Mutant | None  # None: without a mutation
    files: tuple[str, ...]
    limit_s: float


class Outcome(NamedTuple):
    """Result of a TestRun."""

    passed: bool
    seconds: float


class _Counter(Visitor):
    """Counts the positions in a syntax tree at which each mutation operator can be applied."""

    def __init__(self) -> None:
        self.operators = {
            name: get_operator(name)() for name in operator_names() if KINDS.match(name) and "BitOr" not in name
        }
        self.counts: Counter[str] = Counter()

    def visit(self, node):
        for name, operator in self.operators.items():
            self.counts[name] += sum(1 for _ in operator.mutation_positions(node))
        return node


class _Mutator(Visitor):
    """Applies a mutation operator at one of its positions in a syntax tree. `position`: index of the position, from 0."""

    def __init__(self, operator, position: int) -> None:
        self.operator, self.left = operator, position

    def visit(self, node):
        for index, _ in enumerate(self.operator.mutation_positions(node)):
            self.left -= 1
            if self.left == -1:
                return self.operator.mutate(node, index)
        return node


def draw_mutants(path: Path, number: int, seed: int, equivalent: Set[tuple[str, str, str]]) -> list[Mutant]:
    """Return a random sample of `number` mutants of a module, or all mutants if `number` is 0.

    The sample contains no changes of annotations and of the options of `@dataclass`, because they change no result. It contains
    no mutants of `equivalent`: (file, line before, line after).
    """
    source, counter = path.read_text(), _Counter()
    counter.walk(parso.parse(source))
    positions = [(name, index) for name, count in counter.counts.items() for index in range(count)]
    random.Random(seed).shuffle(positions)
    mutants: dict[str, Mutant] = {}
    for name, index in positions:
        mutated = _Mutator(get_operator(name)(), index).walk(parso.parse(source)).get_code()  # pyrefly: ignore
        lines = list(zip(source.split("\n"), mutated.split("\n"), strict=True))
        changed = [line for line, (before, after) in enumerate(lines, 1) if before != after]
        if len(changed) != 1 or lines[changed[0] - 1][0].startswith("@dataclass"):
            continue
        mutant = Mutant(path, changed[0], *lines[changed[0] - 1], mutated)
        if (str(path.relative_to(HOME)), mutant.before.strip(), mutant.after.strip()) not in equivalent:
            mutants[mutated] = mutant
            if len(mutants) == number:
                break
    return list(mutants.values())


@functools.cache
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


def run_tests(runs: Sequence[TestRun], jobs: int) -> list[Outcome]:
    """Run tests in forks, with `jobs` forks at one time. Return an outcome for each run, in the same order."""
    waiting, running, outcomes = list(reversed(range(len(runs)))), {}, {}
    while waiting or running:
        while waiting and len(running) < jobs:
            index = waiting.pop()
            child = os.fork()
            if child == 0:
                _run_in_fork(runs[index])
            running[child] = (index, time.monotonic())
        for child, (index, start) in list(running.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if not pid and time.monotonic() > start + runs[index].limit_s:
                os.killpg(child, signal.SIGKILL)
                pid, status = os.waitpid(child, 0)
            if pid:
                del running[child]
                outcomes[index] = Outcome(os.waitstatus_to_exitcode(status) == 0, time.monotonic() - start)
        time.sleep(0.02)
    return [outcomes[index] for index in range(len(runs))]


def seconds_of_files(files: Sequence[str], jobs: int) -> dict[str, float]:
    """Run each test file without a mutation; return its seconds. Raise SystemExit if a test fails."""
    outcomes = run_tests([TestRun(None, (file,), FILE_LIMIT_S) for file in files], jobs)
    if failing := [file for file, outcome in zip(files, outcomes, strict=True) if not outcome.passed]:
        names = "\n  ".join(os.path.relpath(file, HOME) for file in failing)
        sys.exit(f"these unit tests fail without a mutation, so they would catch every mutant:\n  {names}")
    return {file: outcome.seconds for file, outcome in zip(files, outcomes, strict=True)}


def survivors_of(mutants: Sequence[Mutant], seconds: Mapping[str, float], jobs: int) -> list[Mutant]:
    """Return the mutants on which all tests pass. `seconds`: test file -> its seconds without a mutation.

    The files whose names contain the name of the module run first, then the fastest ones, because they are likely to catch the
    mutant soon.
    """
    runs = []
    for mutant in mutants:
        files = sorted(tests_of(mutant.path), key=lambda file: (mutant.path.stem not in Path(file).name, seconds[file]))
        limit_s = 30 + 3 * sum(seconds[file] for file in files)
        runs.append(TestRun(mutant, tuple(files), limit_s))
    return [mutant for mutant, outcome in zip(mutants, run_tests(runs, jobs), strict=True) if outcome.passed]


def _run_in_fork(run: TestRun) -> None:
    """Run pytest, with the mutated source in place of the module, and end this forked process."""
    status = 99
    try:
        os.setpgid(0, 0)
        sink = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(sink, stream)
        load = importlib.machinery.SourceFileLoader.get_code

        def get_code(self, fullname):
            if run.mutant and os.path.realpath(self.path) == str(run.mutant.path):
                return compile(run.mutant.source, str(run.mutant.path), "exec")
            return load(self, fullname)

        importlib.machinery.SourceFileLoader.get_code = get_code
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and not extended"]
        allowed = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        status = int(not all(pytest.main([*options, file]) in allowed for file in run.files))
    finally:
        os._exit(status)


def preload() -> None:
    """Import the libraries that the tests need. Each fork then imports the project itself, with the fork's mutant."""
    for name in PRELOADED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    loaded = [name for name in sys.modules if name.split(".")[0] in ("mrl", "models", "parallel")]
    assert not loaded, f"{loaded} are imported already; a mutant of them would not be seen"


def main() -> int:
    """Print each survivor and the score; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=10, help="mutants of each module to try, drawn by --seed; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", default="", help="only target modules whose path contains this text")
    parser.add_argument(
        "--minimum", type=float, default=0.85, help="smallest fraction of mutants that tests must catch"
    )
    parser.add_argument("--jobs", type=int, default=2, help="mutants at one time")
    arguments = parser.parse_args()
    os.chdir(HOME)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    preload()
    found = {path for pattern in TARGETS for path in HOME.glob(pattern) if path.name != "__init__.py"}
    paths = sorted(path for path in found if arguments.module in str(path))
    known = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else []
    equivalent = {(one["file"], one["before"], one["after"]) for one in known}
    tried = [m for path in paths for m in draw_mutants(path, arguments.sample, arguments.seed, equivalent)]
    if not tried:
        parser.error(f"--module {arguments.module}: no target module has this text in its path, or none has a mutant")
    files = sorted({file for path in {mutant.path for mutant in tried} for file in tests_of(path)})
    print(f"{len(files)} test files without a mutation, then {len(tried)} mutants of {len(paths)} modules", flush=True)
    survivors = survivors_of(tried, seconds_of_files(files, arguments.jobs), arguments.jobs)
    for mutant in sorted(survivors, key=str):
        print("survived:", mutant)
    total, missed = Counter(m.path for m in tried), Counter(m.path for m in survivors)
    for path, number in total.items():
        print(f"{number - missed[path]:4d} of {number:4d}  {path.relative_to(HOME)}")
    score = 1 - len(survivors) / len(tried)
    print(f"{len(tried) - len(survivors)} of {len(tried)} mutants caught ({score:.1%})")
    return int(score < arguments.minimum)


if __name__ == "__main__":
    sys.exit(main())
