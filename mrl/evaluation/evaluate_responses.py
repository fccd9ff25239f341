"""`mrl evaluate`: reads, scores and summarizes responses of `mrl generate` or of another tool, and writes the report files.

`evaluate.input` may name parquet or jsonl files with the responses of another tool. LAYOUTS has the columns of the files that
verl, lm-evaluation-harness and lighteval write. For other files, evaluate.columns names the columns.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from mrl.config.instantiate import instantiate_callable
from mrl.config.schema import Config
from mrl.controller.plan_prompts import own_rewards
from mrl.data.columns import Columns, PromptExample
from mrl.data.row_files import RowError, column_value, convert_rows, describe_bad_rows, read_table
from mrl.evaluation.evaluation_prompts import (
    EvaluationPrompt,
    SetRewards,
    checked_rewards,
    prompt_digest,
    prompt_key,
    to_reward_responses,
)
from mrl.evaluation.evaluation_summary import (
    SCORES,
    Comparison,
    EvaluationSummary,
    choose_k,
    compare,
    group_by_prompt,
    read_scores,
    summarize,
)
from mrl.evaluation.harness import HarnessResult
from mrl.evaluation.response_store import MANIFEST, JsonObject, Row, parts_column, read_responses, response_schema
from mrl.rewards.pass_at_k import voted_answers
from mrl.rollout.client import Completion
from parallel.durable_files import atomic_file

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".parquet")  # endings of files with responses
KEY = "evaluate.columns"  # config key, for error messages


@dataclass(frozen=True)
class ResponseColumns(Columns):
    """Column names in a file of responses: the columns for a prompt, and the columns for its responses."""

    response: str = "response"  # a text, or a list of texts: all responses to the prompt
    num_tokens: str | None = None  # number of tokens of the response; None: the file has no such column


@dataclass(frozen=True)
class Layout:
    """The columns of the response files that one tool writes."""

    tool: str
    identifying_columns: frozenset[str]  # a file has this layout if it has these columns
    columns: ResponseColumns
    prepare: Callable[[Row], Row] = dict  # adds the columns that `columns` names but the file does not have
    # Column that differs between rows with the same responses. Only rows whose value in this column equals the first row's
    # value are read. None: all rows are read
    variant_column: str | None = None


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
        variant_column="filter",
    ),
    Layout(
        "lighteval",  # lighteval --save-details
        frozenset({"doc", "model_response"}),
        ResponseColumns(prompt="doc.query", response="model_response.text", ground_truth="gold"),
        _with_gold,
    ),
)


def read_responses_of_other_tools(path: Path, columns: Mapping[str, Any]) -> tuple[JsonObject, list[Row]]:
    """Return the settings and the rows of responses, as `read_responses` does. `columns`: the config key evaluate.columns.

    `path` is a file, or a folder with files. A row has all responses to its prompt in a list, or one response as a text. In the
    second case, rows with equal prompt, ground truth and data source have responses to the same prompt. The finish reason of a
    response is always None. The number of tokens of a response is None if the file has no column for it.

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
        variant = row.get(layout.variant_column) if layout.variant_column else None
        texts = _texts(found, names.response)
        return _RowResponses(number, names(row, source), texts, isinstance(found, list), num_tokens, variant)

    converted, bad = convert_rows(table, convert)
    if bad:
        raise ValueError(
            f"evaluate.input: {describe_bad_rows(sorted(bad, key=lambda b: b.row), len(table))}\n"
            f"The columns of {file} are those of {layout.tool}; name others with {KEY}, such as {KEY}.prompt=COLUMN, or correct "
            "these rows."
        )
    collector = _RowCollector(str(file), file_number)
    for row in converted:
        if row.variant == converted[0].variant:
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
    variant: Any  # value of the column that Layout.variant_column names


class _RowCollector:
    """Collects the rows of responses of one file, and numbers the responses to each prompt."""

    def __init__(self, file: str, file_number: int) -> None:
        self.rows: list[Row] = []
        self._file, self._file_number = file, file_number
        # Prompt as JSON -> prompt. Contains only the prompts of rows with a single response.
        self._prompts: dict[str, EvaluationPrompt] = {}
        self._samples: Counter[int] = Counter()  # number of the prompt's row -> number of responses so far

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
        if layout.identifying_columns <= row.keys():
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
    """Return the data source of a file without a column data_source: the file name without a harness's prefix and time."""
    return re.sub(r"^(samples|details)_|_\d{4}-\d\d-\d\dT[\d:.-]+$", "", file.stem)


REPORT, PICTURE = "evaluation.json", "evaluation.png"


@dataclass(frozen=True)
class Evaluation:
    """Summaries of an evaluation, and the scored responses from which they are computed."""

    summaries: list[EvaluationSummary]
    rows: list[Row]  # scored responses, each a dict with the columns of `response_schema`
    answers: list[str | None]  # answer for which each response votes in maj@k
    reward: dict[str, Any]  # config section `reward` that gave the scores
    # settings of the generation, from _generate.json; for files of another tool: input, generate.samples and reward
    settings: JsonObject
    comparison: Comparison | None = None  # differences from the evaluation in evaluate.compare
    earlier: list[EvaluationSummary] = field(default_factory=list)  # summaries of the evaluation in evaluate.compare

    @property
    def origin(self) -> str:
        """Where the responses come from: the model, or the files of another tool."""
        return self.settings.get("model.path") or self.settings["input"]


def evaluate(folder: Path, config: Config) -> Evaluation:
    """Summarize the responses in the output folder of `mrl generate`, or in files of another tool.

    The responses are scored first if they have no scores or if evaluate.rescore is set.

    Raises ValueError in these cases:

    - `folder` contains neither a finished generation nor files of responses.
    - evaluate.k exceeds the number of responses to a prompt.
    - The reward is invalid.
    - evaluate.compare names no evaluation, or an evaluation that has no prompt in common with this one.
    """
    before = read_scores(Path(config.evaluate.compare)) if config.evaluate.compare else []
    settings, rows = _read_input(folder, config.evaluate.columns)
    ks = choose_k(config.evaluate.k, settings["generate.samples"])
    rescore = config.evaluate.rescore or settings["reward"] is None
    reward_section = config.reward if rescore else settings["reward"]
    if rescore:
        rewards = checked_rewards(config.reward, config.data.test_sets or settings.get("data.test_sets", {}))
        with rewards.open_scorer(config.scoring) as scorer:
            rows = rewards.add_scores(rows, scorer)
    else:
        rewards = _stored_rewards(settings, folder)
    answers = rewards.voted_answers(rows) if rewards else voted_answers(None, to_reward_responses(rows))
    rows = [row | dict(prompt_digest=prompt_digest(row)) for row in rows]
    prompts = group_by_prompt(rows, answers)
    # a response passes if its score reaches the threshold
    limits = (config.evaluate.threshold, config.evaluate.confidence)
    summaries = summarize(prompts, ks, *limits)
    evaluation = Evaluation(summaries, rows, answers, reward_section, settings)
    if not config.evaluate.compare:
        return evaluation
    comparison = compare(Path(config.evaluate.compare), before, prompts, ks, *limits)
    earlier_ks = [k for k in ks if k <= min(prompt.samples for prompt in before)]
    earlier = summarize(before, earlier_ks, *limits) if earlier_ks else []
    return replace(evaluation, comparison=comparison, earlier=earlier)


def _read_input(path: Path, columns: Mapping[str, Any]) -> tuple[JsonObject, list[Row]]:
    """Return settings and responses from an output folder of `mrl generate`, or from files of another tool.

    `columns`: the config key evaluate.columns.
    """
    if not (path / MANIFEST).is_file():
        return read_responses_of_other_tools(path, columns)
    if columns:
        raise ValueError(
            f"evaluate.columns={dict(columns)} names columns of other tools, but `mrl generate` wrote {path}; remove this key."
        )
    return read_responses(path)


def _stored_rewards(settings: JsonObject, folder: Path) -> SetRewards | None:
    """Return the rewards that gave the stored scores, because maj@k needs their `answer` methods.

    Returns None if a reward can no longer be built.
    """
    try:
        reward = instantiate_callable(settings["reward"], f"{folder}: reward")
        return SetRewards(reward, own_rewards(settings.get("data.test_sets", {})))
    except ValueError as error:
        logger.warning("%s The stored scores are used; maj@k compares the texts of the responses.", error)
        return None


def write_evaluation(evaluation: Evaluation, folder: Path, config: Config) -> None:
    """Write evaluation.json, evaluation.png and scores.parquet to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    report = dict(
        threshold=config.evaluate.threshold,
        confidence=config.evaluate.confidence,
        reward=evaluation.reward,
        summaries=[asdict(summary) for summary in evaluation.summaries],
        comparison=evaluation.comparison and asdict(evaluation.comparison),
        generation=evaluation.settings,
    )
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    settings = evaluation.settings
    title = f"{Path(evaluation.origin).name}, {settings['generate.samples']} samples"
    if evaluation.earlier:
        title += f"; dotted: {config.evaluate.compare}"
    confidence = config.evaluate.confidence
    draw_pass_at_k(folder / PICTURE, evaluation.summaries, evaluation.earlier, title=title, confidence=confidence)
    _write_scores(folder / SCORES, evaluation.rows, evaluation.answers)


def write_harness_results(results: Sequence[HarnessResult], source: Path, folder: Path, config: Config) -> None:
    """Write evaluation.json and evaluation.png to `folder`. `source`: file in which the harness has written the results."""
    folder.mkdir(parents=True, exist_ok=True)
    report = dict(
        confidence=config.evaluate.confidence,
        summaries=[],
        harness=dict(command=config.evaluate.harness, file=str(source), results=[asdict(result) for result in results]),
        generation={"model.path": str(Path(config.model.path).resolve())},
    )
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    title, confidence = Path(config.model.path).name, config.evaluate.confidence
    draw_harness_results(folder / PICTURE, results, title=title, confidence=confidence)


def _write_scores(path: Path, rows: Sequence[Row], answers: Sequence[str | None]) -> None:
    """Write the position, score and answer of each response. pass@k, maj@k and mean scores can be recomputed from this file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # `file` is the name of the data file with the prompt. `file_number` is its index among all held-out data files.
    names = ("set", "file", "file_number", "row", "sample", "data_source", "score", "failure", "parts")
    texts = [("answer", pa.string()), ("prompt_digest", pa.string())]
    columns = pa.schema([*(response_schema().field(name) for name in names), *texts])
    records = [
        {name: row[name] for name in (*names, "prompt_digest")} | dict(parts=parts_column(row), answer=a)
        for row, a in zip(rows, answers, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(records, schema=columns), path)


COLORS = ("#4C78A8", "#E45756", "#54A24B", "#B279A2", "#F58518", "#72B7B2", "#9D755D", "#79706E")


def draw_pass_at_k(
    path: Path,
    summaries: Sequence[EvaluationSummary],
    earlier: Sequence[EvaluationSummary] = (),
    *,
    title: str,
    confidence: float,
) -> None:
    """Write a PNG of pass@k (solid) and maj@k (dashed) over k, one color per summary, with confidence bands.

    `earlier`: summaries of the earlier evaluation in a comparison. Their pass@k is dotted, in the same colors.
    """
    figure, axes = _new_figure(title)
    for index, summary in enumerate(summaries):
        color = COLORS[index % len(COLORS)]
        for estimates, style, name in ((summary.pass_at, "o-", "pass@k"), (summary.maj_at, "s--", "maj@k")):
            ks, values = list(estimates), list(estimates.values())
            axes.plot(ks, [e.value for e in values], style, color=color, label=f"{summary.name}, {name}", markersize=5)
            bounds = [e.low or 0.0 for e in values], [1.0 if e.high is None else e.high for e in values]
            axes.fill_between(ks, *bounds, color=color, alpha=0.15 if name == "pass@k" else 0.07, linewidth=0)
        for before in (each for each in earlier if each.name == summary.name):
            values = [estimate.value for estimate in before.pass_at.values()]
            axes.plot(list(before.pass_at), values, "x:", color=color, label=f"{summary.name}, earlier pass@k")
    axes.set_xscale("log", base=2)
    ks = list(summaries[0].pass_at)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(
        xlabel="k: responses to a prompt",
        ylabel=f"fraction of prompts, with {confidence:.0%} intervals",
        ylim=(-0.02, 1.02),
    )
    axes.legend(frameon=False, loc="best", fontsize=9)
    _save(figure, path)


def draw_harness_results(path: Path, results: Sequence[HarnessResult], *, title: str, confidence: float) -> None:
    """Write a PNG with one point for each metric of a harness, and its confidence interval."""
    figure, axes = _new_figure(title, height=1.5 + 0.35 * len(results))
    names = [f"{result.task}: {result.metric}" for result in results]
    for index, value in enumerate(result.value for result in results):
        low, high = (value.value if bound is None else bound for bound in (value.low, value.high))
        axes.plot([low, high], [index, index], "-", color=COLORS[0], linewidth=2)
        axes.plot(value.value, index, "o", color=COLORS[0], markersize=6)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"value, with {confidence:.0%} intervals")
    _save(figure, path)


def _new_figure(title: str, height: float = 4.5) -> tuple[Any, Any]:
    """Return a matplotlib figure and its axes. `height` is in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the import takes a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")
