"""Prompts to be answered, each with its place in its file; and answered ones as rows and as a reward sees them."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrl.data.prompts import PromptDataset, Rules
from mrl.data.sources import Source
from mrl.evaluation.store import Row
from mrl.rewards.base import Response
from mrl.rollout.client import Completion
from mrl.rollout.seeds import seed_of

Settle = Callable[[PromptDataset, int], None]


@dataclass(frozen=True)
class Question:
    """One prompt."""

    set: str  # name of the held-out set; empty: data.test
    place: int  # of the file in its set
    file: str  # as the config names it
    file_number: int  # its place among all of the config's held-out files
    row: int  # in its file, from 0, rows that cannot be used counted
    data_source: str
    messages: list[dict[str, str]]
    tokens: list[int]
    ground_truth: Any
    extra_info: dict[str, Any]

    def seed(self, seed: int, sample: int) -> int:
        """63 bits that decide one response; the same whatever sets, later files, rows and samples there are beside it."""
        name = np.frombuffer(hashlib.blake2b(self.set.encode(), digest_size=16).digest(), np.uint32)
        return seed_of(seed, *name.tolist(), self.place, self.row, sample)

    def answered(self, sample: int, done: Completion, text: str, *, logprobs: bool) -> Row:
        """The row of one response, without a score."""
        is_text = isinstance(self.ground_truth, str)
        return dict(
            set=self.set,
            file=self.file,
            file_number=self.file_number,
            row=self.row,
            sample=sample,
            data_source=self.data_source,
            prompt=self.messages,
            response=text,
            token_ids=done.token_ids,
            num_tokens=len(done.token_ids),
            logprobs=done.logprobs if logprobs else None,
            finish_reason=done.finish_reason,
            ground_truth=self.ground_truth if is_text else json.dumps(self.ground_truth, default=str),
            ground_truth_is_json=not is_text,
            extra_info=json.dumps(self.extra_info, default=str),  # parquet has dates, JSON has none
            score=None,
            failure=None,
            parts=None,
        )


def load(sources: Sequence[Source], model_path: str, rules: Rules, settle: Settle, rows: int | None) -> list[Question]:
    """The first `rows` usable prompts of each file or user's data set (None: all), checked.

    `settle` is told of the rows that cannot be used. Raises ValueError that names file, row and reason.
    """
    questions: list[Question] = []
    files = [placed for several in sources for placed in enumerate(several.each())]
    for number, (place, source) in enumerate(files):
        data = PromptDataset.load([source], model_path, rules)
        settle(data, number)
        questions += [
            Question(
                source.name,
                place,
                source.files[0] if source.files else source.origin,
                number,
                int(data.numbers[row]),
                data.data_source(row),
                data.messages(row),
                data.encode(row),
                data.ground_truth(row),
                data.extra_info(row),
            )
            for row in range(min(len(data), rows or len(data)))
        ]
    return questions


def digest(asked: Sequence[Question]) -> str:
    """Of what is asked, in its order: the same for the same tokens, ground truths and places."""
    found = hashlib.blake2b(digest_size=16)
    for one in asked:
        found.update(json.dumps([one.file_number, one.row, one.tokens, one.ground_truth], default=str).encode())
    return found.hexdigest()


def key(row: Row) -> tuple[int, int]:
    """Which prompt a row answers."""
    return row["file_number"], row["row"]


def responses(rows: Sequence[Row]) -> list[Response]:
    """What a reward sees of rows; those to one prompt are one group."""
    groups: dict[tuple[int, int], int] = {}
    return [_response(row, groups.setdefault(key(row), len(groups))) for row in rows]


def _response(row: Row, group: int) -> Response:
    truth = json.loads(row["ground_truth"]) if row["ground_truth_is_json"] else row["ground_truth"]
    return Response(
        row["data_source"],
        row["response"],
        truth,
        json.loads(row["extra_info"]),
        prompt=row["prompt"],
        group=group,
        num_tokens=row["num_tokens"],
        truncated=row["finish_reason"] == "length",
    )
