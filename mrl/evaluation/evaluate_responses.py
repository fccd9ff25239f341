"""`mrl evaluate`: scores and summarizes responses of `mrl generate` or of another tool, and writes the report files."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mrl.config.instantiate import instantiate_callable
from mrl.config.schema import Config
from mrl.controller.plan_prompts import own_rewards
from mrl.evaluation.comparison import SCORES, Comparison, compare, read_scores
from mrl.evaluation.evaluation_prompts import SetRewards, checked_rewards, prompt_digest, to_reward_responses
from mrl.evaluation.evaluation_summary import EvaluationSummary, choose_k, group_by_prompt, summarise
from mrl.evaluation.foreign_responses import read_foreign_responses
from mrl.evaluation.harness import HarnessResult
from mrl.evaluation.response_store import MANIFEST, JsonObject, Row, parts_column, read_responses, response_schema
from mrl.rewards.pass_at_k import voted_answers
from parallel.durable_files import atomic_file

logger = logging.getLogger(__name__)

REPORT, PICTURE = "evaluation.json", "evaluation.png"


@dataclass(frozen=True)
class Evaluation:
    """Summaries of an evaluation, and the scored responses from which they are computed."""

    summaries: list[EvaluationSummary]
    rows: list[Row]  # scored responses, each a dict with the columns of `response_schema`
    answers: list[str | None]  # answer for which each response votes in maj@k
    reward: dict[str, Any]  # config section `reward` that gave the scores
    settings: JsonObject  # settings of the generation, from _generate.json
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
    - evaluate.compare names no evaluation of the same prompts.
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
    limits = (
        config.evaluate.threshold,
        config.evaluate.confidence,
    )  # a response passes if its score reaches the threshold
    summaries = summarise(prompts, ks, *limits)
    evaluation = Evaluation(summaries, rows, answers, reward_section, settings)
    if not config.evaluate.compare:
        return evaluation
    comparison = compare(Path(config.evaluate.compare), before, prompts, ks, *limits)
    earlier_ks = [k for k in ks if k <= min(prompt.samples for prompt in before)]
    earlier = summarise(before, earlier_ks, *limits) if earlier_ks else []
    return replace(evaluation, comparison=comparison, earlier=earlier)


def _read_input(path: Path, columns: Mapping[str, Any]) -> tuple[JsonObject, list[Row]]:
    """Return settings and responses from an output folder of `mrl generate`, or from files of another tool.

    `columns`: the config key evaluate.columns.
    """
    if not (path / MANIFEST).is_file():
        return read_foreign_responses(path, columns)
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


COLOURS = ("#4C78A8", "#E45756", "#54A24B", "#B279A2", "#F58518", "#72B7B2", "#9D755D", "#79706E")


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
        colour = COLOURS[index % len(COLOURS)]
        for estimates, style, name in ((summary.pass_at, "o-", "pass@k"), (summary.maj_at, "s--", "maj@k")):
            ks, values = list(estimates), list(estimates.values())
            axes.plot(ks, [e.value for e in values], style, color=colour, label=f"{summary.name}, {name}", markersize=5)
            bounds = [e.low or 0.0 for e in values], [1.0 if e.high is None else e.high for e in values]
            axes.fill_between(ks, *bounds, color=colour, alpha=0.15 if name == "pass@k" else 0.07, linewidth=0)
        for before in (each for each in earlier if each.name == summary.name):
            values = [estimate.value for estimate in before.pass_at.values()]
            axes.plot(list(before.pass_at), values, "x:", color=colour, label=f"{summary.name}, earlier pass@k")
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
        axes.plot([low, high], [index, index], "-", color=COLOURS[0], linewidth=2)
        axes.plot(value.value, index, "o", color=COLOURS[0], markersize=6)
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
