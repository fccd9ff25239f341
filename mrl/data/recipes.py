"""Recipes that convert published data sets to the default columns of mrl, for `mrl data prepare`.

A recipe consists of a function that converts one row, and of an entry in RECIPES.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mrl.data.row_files import Row, RowError, read_all, text_value
from parallel.durable_files import atomic_file

Problem = tuple[str, str, Row]  # text of the problem, ground truth, further columns for extra_info

_GSM8K = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")


def gsm8k(row: Row) -> Problem:
    """Convert a row of GSM8K. The row has `question`, and `answer`, which ends in `#### NUMBER`."""
    answer = text_value(row, "answer")
    found = _GSM8K.search(answer)
    if not found:
        raise RowError("answer", f"expected it to end in '#### NUMBER', got {answer[-60:]!r}.")
    return text_value(row, "question"), found[1].replace(",", ""), {}


def math(row: Row) -> Problem:
    r"""Convert a row of MATH. The row has `problem`, and `solution` with the answer in the last \boxed{...}.

    The columns level, type and subject go to extra_info.
    """
    solution = text_value(row, "solution")
    answer = last_boxed(solution)
    if answer is None:
        raise RowError("solution", f"expected the answer in \\boxed{{...}}, got {solution[-60:]!r}.")
    return text_value(row, "problem"), answer, {name: row[name] for name in ("level", "type", "subject") if name in row}


_BOX = re.compile(r"\\(?:boxed|fbox)\s*")


def last_boxed(solution: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...}. Nested braces are allowed.

    \boxed may also be followed by a single character: \boxed 7. Returns None if there is no box,
    or if the last box has no closing brace or is followed by a command or by nothing.
    """
    boxes = list(_BOX.finditer(solution))
    if not boxes:
        return None
    rest = solution[boxes[-1].end() :]
    if not rest.startswith("{"):
        single = re.match(r"[^\s{}$\\]", rest)
        return single[0] if single else None
    depth = 0
    # The first alternative matches an escaped brace together with its backslash, so that the brace is not counted.
    for mark in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0 and mark[0] == "}":
            return rest[1 : mark.start()].strip()
    return None


@dataclass(frozen=True)
class Recipe:
    """Converts the rows of one data set."""

    convert: Callable[[Row], Problem]  # raises RowError
    data_source: str  # value of the column data_source
    instruction: str  # sentence that is added to each problem
    source_columns: str  # description of the columns that `convert` reads, for --help


RECIPES = {  # name for `mrl data prepare` -> recipe
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
    """Convert the rows of `source` to prompts in the parquet file `target`, and return the number of prompts.

    `instruction`: sentence that is added to each problem; None: the recipe's sentence. `split`: value of `extra_info.split`.

    Raises:
        ValueError: the recipe does not exist, the source cannot be read, or rows cannot be used. Then no file is written. If
            rows cannot be used, the message says how many, and gives file, row, column and reason of the first five.
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
    with atomic_file(target) as partial:
        pq.write_table(pa.Table.from_pylist(rows), partial)
    return len(rows)
