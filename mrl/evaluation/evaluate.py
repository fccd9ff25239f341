"""`mrl evaluate`: what the responses of a finished generation say, with everything needed to check it."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.config.instantiate import plug_in
from mrl.config.schema import Config
from mrl.evaluation import picture, questions, scoring, store
from mrl.evaluation.report import Summary, choose_k, prompts_of, summarise
from mrl.evaluation.store import Row
from mrl.rewards.base import Reward
from mrl.rewards.scorer import check_reward

logger = logging.getLogger(__name__)

REPORT, PICTURE, SCORES = "evaluation.json", "evaluation.png", "scores.parquet"


@dataclass(frozen=True)
class Evaluation:
    """Summaries, and what they were made of."""

    summaries: list[Summary]
    rows: list[Row]  # scored
    answers: list[str | None]  # [B] what each response votes for
    reward: dict[str, Any]  # the node that scored
    settings: Row  # of the generation


def evaluate(folder: Path, config: Config) -> Evaluation:
    """Score what has no score yet (with evaluate.rescore: all), and summarise.

    Raises: ValueError where the folder is no finished generation, has too few samples for evaluate.k, or the reward fails.
    """
    asked = config.evaluate
    settings, rows = store.read(folder)
    ks = choose_k(asked.k, settings["generate.samples"])
    again = asked.rescore or settings["reward"] is None
    node = config.reward if again else settings["reward"]
    responses = questions.responses(rows)
    if again:
        reward = checked_reward(config)
        with scoring.scorer_of(reward, config.scoring) as scorer:
            assert scorer, "there is a reward"
            rows = scoring.with_scores(rows, scorer(responses))
    else:
        reward = _stored_reward(node, folder)
    answers = scoring.answers(reward, responses)
    summaries = summarise(prompts_of(rows, answers), ks, asked.threshold, asked.confidence)
    return Evaluation(summaries, rows, answers, node, settings)


def checked_reward(config: Config) -> Reward:
    """The reward that will score; raises ValueError for one that cannot."""
    reward = plug_in(config.reward, "reward")
    check_reward(reward)
    return reward


def _stored_reward(node: dict[str, Any], folder: Path) -> Reward | None:
    """The reward that has scored, for what it says of answers; None where it cannot be built any more."""
    try:
        return plug_in(node, f"{folder}: reward")
    except ValueError as error:
        logger.warning("%s Its scores are kept; the answers that vote in maj@k are the texts of the responses.", error)
        return None


def write(found: Evaluation, folder: Path, config: Config) -> None:
    """evaluation.json, evaluation.png and scores.parquet, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = config.evaluate
    report = dict(
        threshold=asked.threshold,
        confidence=asked.confidence,
        reward=found.reward,
        summaries=[asdict(summary) for summary in found.summaries],
        generation=found.settings,
    )
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n")
    title = f"{Path(found.settings['model.path']).name}, {found.settings['generate.samples']} samples"
    picture.draw(folder / PICTURE, found.summaries, title=title, confidence=asked.confidence)
    _write_scores(folder / SCORES, found.rows, found.answers)


def _write_scores(path: Path, rows: Sequence[Row], answers: Sequence[str | None]) -> None:
    """One row per response: its place, score and answer, from which every number can be computed again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("set", "file", "file_number", "row", "sample", "data_source", "score", "failure", "parts")
    columns = pa.schema([*(store.schema().field(name) for name in names), ("answer", pa.string())])
    kept = [{name: row[name] for name in names} | dict(answer=a) for row, a in zip(rows, answers, strict=True)]
    pq.write_table(pa.Table.from_pylist(kept, schema=columns), path)
