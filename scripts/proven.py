"""Writes docs/reference/proven.md and docs/reference/families.md: which tests prove each feature and each model family.

    python scripts/proven.py [--check]

scripts/proven.json maps each feature to patterns of its tests. A pattern is a file in tests/, or FILE::PATTERN for some tests of
a file. A pattern that ends with " on GPUs" or " on several GPUs" counts only on these devices. The key `kinds` has patterns of
the tests that use replacements for Transformer Engine, CUDA, GPUs or nodes.

The script reads the source of the tests, and imports nothing of the project but parallel/dims.py. It fails if a pattern matches
no test, if a feature has no test, or if a test of tests/gpu belongs to no feature. With --check, it writes nothing, and it also
fails if a page is not current. scripts/family_page.py explains scripts/families.json, the table of the second page.

The results of runs on GPUs are in benchmarks/results/*.json, such as files that `mrl bench gpu` wrote. Each file has the keys
`card` or `machine.card` (name of the GPU), `date`, `programs` (test, such as "tests/gpu/test_actor.py::test_x" -> "passed"
or another outcome), and optionally `gpus`, the number of GPUs, which is 1 by default.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import family_page
from found_tests import COLUMNS, CPU, NO_TEST, ONE_GPU, SEVERAL_GPUS, TARGETS, FoundTest, matches, read_tests

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = Path("docs/reference/proven.md")
TABLE = Path("scripts/proven.json")
RESULTS = Path("benchmarks/results")
NOT_RUN = "not yet run"

HEADER = """\
# What is proven where

This page is generated: `python scripts/proven.py` writes it from `scripts/proven.json`, the tests, and the results in
`benchmarks/results`. It says for each feature which tests run on which devices.

| Column | What the tests do |
|---|---|
| CPU | They run on a CPU: torch's modules, gloo, the real engine. CI runs `make test`; `make test-all` runs more tests. |
| TE stand-in | They run Transformer Engine's Python, with plain torch functions in place of its compiled extension. |
| simulated GPUs or nodes | They run code that needs GPUs or several nodes, with stand-ins for CUDA, kernels, GPUs or nodes. |
| one GPU, several GPUs | They run with `pytest -m gpu` on a machine with GPUs. `make test-all` runs the same programs on a CPU. |

"no test" means that no test of this kind covers the feature. "by hand" stands for `pytest -m slurm` and other runs that no `make`
target contains. The table does not say how large the tested models and layouts are; the test files do. No column
says anything about speed.
"""


@dataclass(frozen=True)
class Table:
    """Content of scripts/proven.json."""

    kinds: Mapping[str, Sequence[str]]  # column -> patterns of its tests; all other tests belong to the column CPU
    features: Mapping[str, Mapping[str, Sequence[str]]]  # area -> feature -> patterns of its tests

    def columns_of(self, test: FoundTest) -> list[str]:
        """Return the columns to which a test belongs."""
        if test.on_gpu:
            return [CPU, *[SEVERAL_GPUS if several else ONE_GPU for several in sorted(test.ranks)]]
        return [name for name, patterns in self.kinds.items() if matches(test, patterns)][:1] or [CPU]

    def problems(self, tests: Sequence[FoundTest]) -> list[str]:
        """Return the mistakes in the table."""
        rows = [row for features in self.features.values() for row in features.items()]
        found = [f"{feature!r} has no test: add a pattern." for feature, patterns in rows if not patterns]
        for owner, patterns in [*rows, *self.kinds.items()]:
            unknown = [pattern for pattern in patterns if not any(matches(test, [pattern]) for test in tests)]
            found += [f"{owner!r}: the pattern {pattern!r} matches no test: correct it." for pattern in unknown]
        known = [pattern for _, patterns in rows for pattern in patterns]
        found += [
            f"{test.id} belongs to no feature: add a pattern."
            for test in tests
            if test.on_gpu and not matches(test, known)
        ]
        return [f"{TABLE}: {problem}" for problem in found]


@dataclass(frozen=True)
class GpuRun:
    """Outcome of a test on a machine with GPUs."""

    date: str
    card: str
    gpus: int
    outcome: str

    def __str__(self) -> str:
        return f"{self.outcome} on {self.card}, {self.date[:10]}"


def read_runs(root: Path) -> dict[str, list[GpuRun]]:
    """Return the runs of each test on GPUs, the latest first.

    The cases of a test in a file of results count as one run. The outcome is "passed" if no case failed and at least one passed.
    """
    runs: dict[str, list[GpuRun]] = {}
    for path in sorted((root / RESULTS).glob("*.json")):
        content = json.loads(path.read_text())
        card = content.get("card") or content.get("machine", {}).get("card")
        outcomes: dict[str, list[str]] = {}
        for case, outcome in content.get("programs", {}).items() if card else ():
            outcomes.setdefault(case.partition("[")[0], []).append(outcome)
        for test, of_cases in outcomes.items():
            failed = [outcome for outcome in of_cases if outcome not in ("passed", "skipped")]
            outcome = failed[0] if failed else "passed" if "passed" in of_cases else "skipped"
            run = GpuRun(content["date"], card, content.get("gpus", 1), outcome)
            runs.setdefault(test, []).append(run)
    return {test: sorted(of_test, key=lambda run: run.date, reverse=True) for test, of_test in runs.items()}


def _latest(runs: Iterable[GpuRun], column: str) -> GpuRun | None:
    """Return the latest run that counts in a column. A skipped test never counts. A run on one GPU counts only in ONE_GPU."""
    return next((run for run in runs if run.outcome != "skipped" and (column == ONE_GPU or run.gpus > 1)), None)


def cell(tests: Sequence[FoundTest], column: str, runs: Mapping[str, Sequence[GpuRun]]) -> str:
    """Return the text of a cell of `column`. `tests` are the tests of the feature in this column."""
    if not tests:
        return NO_TEST
    if column not in (ONE_GPU, SEVERAL_GPUS):
        return min((test.target for test in tests), key=TARGETS.index)
    last = [_latest(runs.get(test.id, ()), column) for test in tests]
    finished = [run for run in last if run is not None]
    if failed := [run for run in finished if run.outcome != "passed"]:
        return str(failed[0])
    if len(finished) < len(last):
        return f"{len(finished)} of {len(last)} programs passed" if finished else NOT_RUN
    return str(min(finished, key=lambda run: run.date))


def page(table: Table, tests: Sequence[FoundTest], runs: Mapping[str, Sequence[GpuRun]]) -> str:
    """Return the text of the page."""
    lines = [HEADER]
    for area, features in table.features.items():
        lines += [f"## {area}\n", f"| Feature | {' | '.join(COLUMNS)} | Files |", f"|{'---|' * 7}"]
        for feature, patterns in features.items():
            own = [test for test in tests if matches(test, patterns)]
            cells = []
            for column in COLUMNS:
                counted = (test for test in own if column in table.columns_of(test) and matches(test, patterns, column))
                cells.append(cell(list(counted), column, runs))
            files = dict.fromkeys(f"`{Path(test.path).name}`" for test in own)
            lines.append(f"| {feature} | {' | '.join(cells)} | {', '.join(files)} |")
        lines.append("")
    lines += ["## Programs on GPUs\n", "| Program | File | Last run on one GPU | On several GPUs |", f"|{'---|' * 4}"]
    for test in (test for test in tests if test.on_gpu):
        own = table.columns_of(test)
        cells = [cell([test] * (column in own), column, runs) for column in (ONE_GPU, SEVERAL_GPUS)]
        lines.append(f"| {test.name} | `{test.path}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the page, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not current")
    arguments = parser.parse_args()
    table, tests = Table(**json.loads((REPOSITORY / TABLE).read_text())), read_tests(REPOSITORY)
    families, problems = family_page.write(REPOSITORY, tests)
    problems = table.problems(tests) + problems
    for name, text in ((PAGE, page(table, tests, read_runs(REPOSITORY))), (family_page.PAGE, families)):
        path = REPOSITORY / name
        if not arguments.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            problems.append(f"{name} is not current: run `python scripts/proven.py`.")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
