"""`mrl evaluate`: scores and summarises the responses of a finished `mrl generate`, and writes the report files."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.config.instantiate import instantiate_callable
from mrl.config.schema import Config
from mrl.controller.plan_prompts import own_rewards
from mrl.evaluation.evaluation_prompts import SetRewards, to_reward_responses
from mrl.evaluation.evaluation_summary import EvaluationSummary, choose_k, group_by_prompt, summarise
from mrl.evaluation.generation_plan import checked_rewards
from mrl.evaluation.response_store import JsonObject, Row, parts_column, read_responses, response_schema
from mrl.rewards.pass_at_k import voted_answers
from parallel.durable_files import atomic_file

logger = logging.getLogger(__name__)

REPORT, PICTURE, SCORES = "evaluation.json", "evaluation.png", "scores.parquet"


@dataclass(frozen=True)
class Evaluation:
    """Summaries of an evaluation, and the scored responses from which they are computed."""

    summaries: list[EvaluationSummary]
    rows: list[Row]  # [B] scored responses, each a dict with the columns of `response_schema`
    answers: list[str | None]  # [B] answer for which each response votes in maj@k
    reward: dict[str, Any]  # config section `reward` that gave the scores
    settings: JsonObject  # settings of the generation, from _generate.json


def evaluate(folder: Path, config: Config) -> Evaluation:
    """Summarise the responses in the output folder of `mrl generate`.

    The responses are scored first if they have no scores or if evaluate.rescore is set. Raises ValueError if the folder
    contains no finished generation, if evaluate.k exceeds the number of responses to a prompt, or if the reward is invalid.
    """
    settings, rows = read_responses(folder)
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
    prompts = group_by_prompt(rows, answers)
    # A response passes if its score is at least evaluate.threshold.
    summaries = summarise(prompts, ks, config.evaluate.threshold, config.evaluate.confidence)
    return Evaluation(summaries, rows, answers, reward_section, settings)


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
        generation=evaluation.settings,
    )
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    settings = evaluation.settings
    title = f"{Path(settings['model.path']).name}, {settings['generate.samples']} samples"
    draw_pass_at_k(folder / PICTURE, evaluation.summaries, title=title, confidence=config.evaluate.confidence)
    _write_scores(folder / SCORES, evaluation.rows, evaluation.answers)


def _write_scores(path: Path, rows: Sequence[Row], answers: Sequence[str | None]) -> None:
    """Write the position, score and answer of each response. pass@k, maj@k and mean scores can be recomputed from this file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # `file` is the name of the data file with the prompt. `file_number` is its index among all held-out data files.
    names = ("set", "file", "file_number", "row", "sample", "data_source", "score", "failure", "parts")
    columns = pa.schema([*(response_schema().field(name) for name in names), ("answer", pa.string())])
    records = [
        {name: row[name] for name in names} | dict(parts=parts_column(row), answer=a)
        for row, a in zip(rows, answers, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(records, schema=columns), path)


COLOURS = ("#4C78A8", "#E45756", "#54A24B", "#B279A2", "#F58518", "#72B7B2", "#9D755D", "#79706E")


def draw_pass_at_k(path: Path, summaries: Sequence[EvaluationSummary], *, title: str, confidence: float) -> None:
    """Write a PNG of pass@k (solid) and maj@k (dashed) over k, one colour per summary, with confidence bands."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the import takes a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, summary in enumerate(summaries):
        colour = COLOURS[index % len(COLOURS)]
        for estimates, style, name in ((summary.pass_at, "o-", "pass@k"), (summary.maj_at, "s--", "maj@k")):
            ks, values = list(estimates), list(estimates.values())
            axes.plot(ks, [e.value for e in values], style, color=colour, label=f"{summary.name}, {name}", markersize=5)
            bounds = [e.low or 0.0 for e in values], [1.0 if e.high is None else e.high for e in values]
            axes.fill_between(ks, *bounds, color=colour, alpha=0.15 if name == "pass@k" else 0.07, linewidth=0)
    axes.set_xscale("log", base=2)
    ks = list(summaries[0].pass_at)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(
        xlabel="k: responses to a prompt",
        ylabel=f"fraction of prompts, with {confidence:.0%} intervals",
        ylim=(-0.02, 1.02),
    )
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best", fontsize=9)
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")
