"""Rows of known data sets -> the five columns. A recipe is one small function from row to row, and a line in RECIPES."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mrl.data.row_files import Row, RowError, read_all, text

Answer = tuple[str, str, Row]  # problem, ground truth, what extra_info keeps

_GSM8K = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def gsm8k(row: Row) -> Answer:
    """`question`, and `answer` that ends in `#### NUMBER`."""
    answer = text(row, "answer")
    found = _GSM8K.search(answer)
    if not found:
        raise RowError("answer", f"expected it to end in '#### NUMBER', got {answer[-60:]!r}.")
    return text(row, "question"), found[1].replace(",", ""), {}


def math(row: Row) -> Answer:
    r"""`problem`, and `solution` with the answer in its last \boxed{...}; level, type and subject are kept."""
    solution = text(row, "solution")
    answer = last_boxed(solution)
    if answer is None:
        raise RowError("solution", f"expected the answer in \\boxed{{...}}, got {solution[-60:]!r}.")
    return text(row, "problem"), answer, {name: row[name] for name in ("level", "type", "subject") if name in row}


_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def last_boxed(solution: str) -> str | None:
    r"""What is inside the last \boxed{...} or \fbox{...}, whose braces may nest; None where there is none or it never ends.

    \boxed may also be followed by a single character: \boxed 7.
    """
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        return None
    rest = solution[boxes[-1].end() :]
    if not rest.startswith("{"):
        single = re.match(r"[^\s{}$\\]", rest)
        return single[0] if single else None
    depth = 0
    for mark in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # an escaped brace is no brace
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0 and mark[0] == "}":
            return rest[1 : mark.start()].strip()
    return None


@dataclass(frozen=True)
class Recipe:
    """How to prepare one kind of data set."""

    convert: Callable[[Row], Answer]  # raises RowError
    data_source: str
    instruction: str  # after each problem
    source_columns: str  # of the source's columns, for --help


RECIPES = {
    "gsm8k": Recipe(
        gsm8k,
        "openai/gsm8k",
        'Let\'s think step by step and output the final answer after "####".',
        "question, and answer ending in '#### N'",
    ),
    "math": Recipe(
        math,
        "math",
        "Let's think step by step and put the final answer within \\boxed{}.",
        "problem, and solution with \\boxed{...}",
    ),
}


def prepare(
    recipe: str, source: str | Path, target: str | Path, instruction: str | None = None, split: str = "train"
) -> int:
    """Turn the rows of `source` into prompts in the parquet file `target`; returns their number.

    Raises:
        ValueError: no such recipe, or rows that cannot be used: counts them and names the first with file, row, column and
            reason; nothing is written then.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if recipe not in RECIPES:
        raise ValueError(f"no recipe {recipe!r}; choose from {', '.join(RECIPES)}.")
    chosen = RECIPES[recipe]
    instruction = chosen.instruction if instruction is None else instruction

    def convert(number: int, row: Row) -> Row:
        problem, ground_truth, kept = chosen.convert(row)
        return {
            "data_source": chosen.data_source,
            "prompt": [{"role": "user", "content": f"{problem} {instruction}".strip()}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": ground_truth},
            "extra_info": {"split": split, "index": number, **kept},
        }

    rows = read_all(source, convert)
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    pq.write_table(pa.Table.from_pylist(rows), partial)
    partial.rename(target)
    return len(rows)
