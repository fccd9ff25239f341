"""Reads parquet and jsonl files with responses that other tools have sampled (`evaluate.input`).

LAYOUTS has the columns of the files that verl, lm-evaluation-harness and lighteval write. For other files, evaluate.columns names
the columns.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mrl.data.columns import Columns, PromptExample
from mrl.data.row_files import RowError, column_value, convert_rows, describe_bad_rows, read_table
from mrl.evaluation.evaluation_prompts import EvaluationPrompt, prompt_key
from mrl.evaluation.response_store import JsonObject, Row
from mrl.rollout.client import Completion

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".parquet")
KEY = "evaluate.columns"


@dataclass(frozen=True)
class ResponseColumns(Columns):
    """Column names in a file of responses: the columns for a prompt, and the columns for its responses."""

    response: str = "response"  # a text, or a list of texts: all responses to the prompt
    num_tokens: str | None = None  # number of tokens of the response; None: the file has no such column


@dataclass(frozen=True)
class Layout:
    """The columns of the response files that one tool writes."""

    tool: str
    marks: frozenset[str]  # a file has this layout if it has these columns
    columns: ResponseColumns
    prepare: Callable[[Row], Row] = dict  # adds the columns that `columns` names but the file does not have
    # Column in which rows with the same responses differ. Rows with another value than the first row are not read. None: all rows
    # are read
    repeated_by: str | None = None


def _with_lm_eval_prompt(row: Row) -> Row:
    """Return the row with the column `prompt`: the text or the messages that lm-evaluation-harness sent for the first request.

    `arguments` is {gen_args_0: {arg_0: prompt, ...}}, or [[prompt, ...]] in older versions. With a chat template, the prompt is
    the JSON text of the messages, possibly in a list of length 1.
    """
    try:
        arguments = column_value(row, "arguments")
        prompt = arguments["gen_args_0"]["arg_0"] if isinstance(arguments, dict) else arguments[0][0]
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            (prompt,) = prompt
    except (KeyError, IndexError, TypeError):
        raise RowError("arguments", f"expected the arguments of a request, got {row['arguments']!r:.80}.") from None
    if isinstance(prompt, str) and prompt.startswith('[{"role"'):
        prompt = json.loads(prompt)
    return row | {"prompt": prompt}


def _with_gold(row: Row) -> Row:
    """Return a row of lighteval with the column `gold`: the right choice, or a list of all right choices."""
    choices, index = column_value(row, "doc.choices"), column_value(row, "doc.gold_index")
    try:
        gold = [choices[each] for each in (index if isinstance(index, list) else [index])]
    except (IndexError, TypeError):
        reason = f"expected indices of the choices {choices!r:.80}, got {index!r:.80}."
        raise RowError("doc.gold_index", reason) from None
    return row | {"gold": gold[0] if len(gold) == 1 else gold}


LAYOUTS = (
    Layout(
        "verl",  # trainer.validation_data_dir and trainer.rollout_data_dir
        frozenset({"input", "output"}),
        ResponseColumns(prompt="input", response="output", ground_truth="gts"),
    ),
    Layout(
        "lm-evaluation-harness",  # lm_eval --log_samples
        frozenset({"doc", "resps", "target"}),
        ResponseColumns(response="resps", ground_truth="target", extra_info="doc"),
        _with_lm_eval_prompt,
        repeated_by="filter",
    ),
    Layout(
        "lighteval",  # lighteval --save-details
        frozenset({"doc", "model_response"}),
        ResponseColumns(prompt="doc.query", response="model_response.text", ground_truth="gold"),
        _with_gold,
    ),
)


def read_foreign_responses(path: Path, columns: Mapping[str, Any]) -> tuple[JsonObject, list[Row]]:
    """Return the settings and the rows of responses, as `read_responses` does. `columns`: the config key evaluate.columns.

    `path` is a file, or a folder with files. A row has all responses to its prompt in a list, or one response as a text. In the
    second case, rows with equal prompt, ground truth and data source have responses to the same prompt. The number of tokens and
    the finish reason of a response are null if the file does not have them.

    Raises ValueError with file, row and column if a row cannot be used.
    """
    files = [path] if path.is_file() else sorted(file for file in path.glob("*") if file.suffix in SUFFIXES)
    if not files:
        raise ValueError(
            f"evaluate.input={path}: no _generate.json there, and no {' or '.join(SUFFIXES)} file; expected a folder that "
            "`mrl generate` wrote, or files of responses of another tool."
        )
    rows = [row for number, file in enumerate(files) for row in _read_file(file, number, columns)]
    rows.sort(key=lambda row: (*prompt_key(row), row["sample"]))  # a reward gets the responses to one prompt together
    counts = Counter(map(prompt_key, rows))
    fewest, most = min(counts.values()), max(counts.values())
    if fewest < most:
        logger.warning("%s: the prompts have from %d to %d responses; k is at most %d", path, fewest, most, fewest)
    return {"input": str(path.resolve()), "generate.samples": fewest, "reward": None}, rows


def _read_file(file: Path, file_number: int, columns: Mapping[str, Any]) -> list[Row]:
    table = read_table(file)
    layout = _layout_of(table.rows[0] if table.rows else {})
    names = ResponseColumns.of(dict(columns), KEY, layout.columns)
    if not isinstance(names.response, str):
        raise ValueError(f"{KEY}.response={names.response!r}: expected the name of a column of your file.")
    source = _source_name(file)

    def convert(number: int, row: Row) -> _RowResponses:
        row = layout.prepare(row)
        found = column_value(row, names.response)
        num_tokens = None if names.num_tokens is None else _count(column_value(row, names.num_tokens), names.num_tokens)
        kind = row.get(layout.repeated_by) if layout.repeated_by else None
        texts = _texts(found, names.response)
        return _RowResponses(number, names(row, source), texts, isinstance(found, list), num_tokens, kind)

    converted, bad = convert_rows(table, convert)
    if bad:
        raise ValueError(
            f"evaluate.input: {describe_bad_rows(sorted(bad, key=lambda b: b.row), len(table))}\n"
            f"The columns of {file} are those of {layout.tool}; name others with {KEY}, such as {KEY}.prompt=COLUMN, or correct "
            "these rows."
        )
    collector = _RowCollector(str(file), file_number)
    for row in converted:
        if row.kind == converted[0].kind:
            collector.add(row)
    return collector.rows


@dataclass(frozen=True)
class _RowResponses:
    """The responses in one row of a file."""

    number: int  # number of the row
    example: PromptExample
    texts: list[str]
    has_all: bool  # whether the row has all responses to its prompt
    num_tokens: int | None  # number of tokens of each response; None: unknown
    kind: Any  # value of the column that Layout.repeated_by names


class _RowCollector:
    """Collects the rows of responses of one file, and numbers the responses to each prompt."""

    def __init__(self, file: str, file_number: int) -> None:
        self.rows: list[Row] = []
        self._file, self._file_number = file, file_number
        # Prompt as JSON -> prompt. Contains only the prompts of rows with a single response.
        self._prompts: dict[str, EvaluationPrompt] = {}
        self._samples: Counter[int] = Counter()  # number of the prompt's row -> responses so far

    def add(self, row: _RowResponses) -> None:
        """Add the responses of one row."""
        example = row.example
        prompt = EvaluationPrompt(
            set="",
            file_in_set=0,
            file=self._file,
            file_number=self._file_number,
            row=row.number,
            data_source=example.data_source,
            messages=example.messages,
            tokens=[],
            ground_truth=example.ground_truth,
            extra_info=example.extra_info,
            ability=example.ability,
            style=example.style,
        )
        if not row.has_all:
            content = [example.messages, example.ground_truth, example.data_source]
            prompt = self._prompts.setdefault(json.dumps(content, default=str), prompt)
        known = dict(num_tokens=row.num_tokens, finish_reason=None)
        for text in row.texts:
            completion = Completion(token_ids=[], logprobs=[], finish_reason="", weight_version="")
            self.rows.append(prompt.to_row(self._samples[prompt.row], completion, text, logprobs=False) | known)
            self._samples[prompt.row] += 1


def _layout_of(row: Row) -> Layout:
    """Return the layout of the file that begins with this row. By default, the columns have mrl's own names."""
    for layout in LAYOUTS:
        if layout.marks <= row.keys():
            return layout
    response = "response" if "response" in row or "responses" not in row else "responses"
    truth = "ground_truth" if "ground_truth" in row else ResponseColumns.ground_truth
    return Layout("mrl", frozenset(), ResponseColumns(response=response, ground_truth=truth))


def _texts(value: Any, name: str) -> list[str]:
    """Return the responses of a row. Raises RowError unless `value` is a text, a list of texts, or a list of lists of texts."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(each, list) for each in texts):
        texts = list(chain(*texts))
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        raise RowError(name, f"expected a response as text, or a list of such texts, got {value!r:.80}.")
    return texts


def _count(value: Any, name: str) -> int:
    """Return a number of tokens. Raises RowError if `value` is not a whole number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RowError(name, f"expected a number of tokens, got {value!r:.80}.")
    return value


def _source_name(file: Path) -> str:
    """Return the data source of a file without a column data_source: the file name without the prefix and time of a harness."""
    return re.sub(r"^(samples|details)_|_\d{4}-\d\d-\d\dT[\d:.-]+$", "", file.stem)
