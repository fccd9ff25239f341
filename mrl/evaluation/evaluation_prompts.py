"""Loads the prompts of `mrl generate`, writes responses as file rows, and turns rows back into reward inputs."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mrl.config.instantiate import instantiate_callable
from mrl.config.schema import Node, ScoringConfig
from mrl.controller.plan_prompts import own_rewards
from mrl.data.prompts import PromptConstraints, PromptDataset
from mrl.data.sources import PromptSource
from mrl.evaluation.response_store import Row
from mrl.rewards.pass_at_k import voted_answers
from mrl.rewards.remote_models import called_roles
from mrl.rewards.reward_types import Response, Reward, Score
from mrl.rewards.scorer import Scorer, check_reward
from mrl.rollout.client import Completion, response_seed

EnforceRowPolicies = Callable[[PromptDataset, int], None]
"""A function that takes the prompts of a data file, and the index of the file among all held-out data files.

The function raises ValueError if rows were omitted although data.bad_rows or data.overlong is `error`, or if no row remains.
"""


@dataclass(frozen=True)
class EvaluationPrompt:
    """One prompt of a held-out set, and its position."""

    set: str  # name of the held-out set; "" for data.test
    file_in_set: int  # index of the data file in its set, from 0
    file: str  # name of the data file in the config
    file_number: int  # index of the data file among all held-out data files, from 0
    row: int  # index of the row in the data file, from 0; omitted rows count, too
    data_source: str  # results are summarized per data source
    messages: list[dict[str, str]]
    tokens: list[int]  # the messages, rendered by the chat template and tokenized
    ground_truth: Any
    extra_info: dict[str, Any]
    ability: str
    style: str

    def seed(self, seed: int, sample: int) -> int:
        """Return the 63-bit seed of one response.

        The seed depends only on `seed` (the run's seed), the name of the set, the index of the file in the set, the row, and
        `sample`, the index of the response. So appending files to a set changes no seed.
        """
        name = np.frombuffer(hashlib.blake2b(self.set.encode(), digest_size=16).digest(), np.uint32)
        return response_seed(seed, *name.tolist(), self.file_in_set, self.row, sample)

    def to_row(self, sample: int, completion: Completion, text: str, *, logprobs: bool) -> Row:
        """Return the row of the response with index `sample`, without a score. The columns are those of response_schema."""
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
            token_ids=completion.token_ids,
            num_tokens=len(completion.token_ids),
            logprobs=completion.logprobs if logprobs else None,
            finish_reason=completion.finish_reason,
            ground_truth=self.ground_truth if is_text else json.dumps(self.ground_truth, default=str),
            ground_truth_is_json=not is_text,
            extra_info=json.dumps(self.extra_info, default=str),  # parquet has dates, which JSON does not have
            ability=self.ability,
            style=self.style,
            score=None,
            failure=None,
            parts=None,
        )


def load_prompts(
    sources: Sequence[PromptSource],
    model_path: str,
    constraints: PromptConstraints,
    enforce: EnforceRowPolicies,
    rows: int | None,
) -> list[EvaluationPrompt]:
    """Return the first `rows` usable prompts of each file or user-defined data set. If `rows` is None, return all.

    Calls `enforce` for each file. Raises ValueError with file, row and reason if a file cannot be read or `enforce` raises.
    """
    prompts: list[EvaluationPrompt] = []
    files = [indexed for source in sources for indexed in enumerate(source.split_by_file())]
    for file_number, (file_in_set, source) in enumerate(files):
        data = PromptDataset.load([source], model_path, constraints)
        enforce(data, file_number)
        prompts += [
            EvaluationPrompt(
                set=source.name,
                file_in_set=file_in_set,
                file=source.files[0] if source.files else source.target,
                file_number=file_number,
                row=int(data.row_numbers[row]),
                data_source=data.data_source(row),
                messages=data.messages(row),
                tokens=data.encode(row),
                ground_truth=data.ground_truth(row),
                extra_info=data.extra_info(row),
                ability=data.examples[row].ability,
                style=data.examples[row].style,
            )
            for row in range(min(len(data), rows or len(data)))
        ]
    return prompts


def prompts_digest(prompts: Sequence[EvaluationPrompt]) -> str:
    """Return a digest of the prompts' positions, tokens and ground truths, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        content = [prompt.file_number, prompt.row, prompt.tokens, prompt.ground_truth]
        digest.update(json.dumps(content, default=str).encode())
    return digest.hexdigest()


def prompt_key(row: Row) -> tuple[int, int]:
    """Return (file_number, row) of the prompt to which this row is a response."""
    return row["file_number"], row["row"]


def prompt_digest(row: Row) -> str:
    """Return a digest of the messages and the ground truth of the prompt to which this row is a response.

    The digest ignores system and developer messages, so that evaluations in which these differ can be compared.
    """
    messages = [message for message in row["prompt"] if message["role"] not in ("system", "developer")]
    content = [[(message["role"], message["content"]) for message in messages], row["ground_truth"]]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def to_reward_responses(rows: Sequence[Row]) -> list[Response]:
    """Return response rows in the form that a reward takes. Responses to one prompt form a group."""
    groups: dict[tuple[int, int], int] = {}
    return [_to_reward_response(row, groups.setdefault(prompt_key(row), len(groups))) for row in rows]


def _to_reward_response(row: Row, group: int) -> Response:
    truth = json.loads(row["ground_truth"]) if row["ground_truth_is_json"] else row["ground_truth"]
    return Response(
        data_source=row["data_source"],
        text=row["response"],
        ground_truth=truth,
        extra_info=json.loads(row["extra_info"]),
        prompt=row["prompt"],
        group=group,
        # None: another tool sampled the response, and the number of tokens is unknown.
        num_tokens=row["num_tokens"] or 0,
        truncated=row["finish_reason"] == "length",
        ability=row["ability"],
        style=row["style"],
    )


@dataclass(frozen=True)
class SetRewards:
    """The reward of the config, and the rewards of held-out sets that have a reward of their own."""

    reward: Reward
    of_set: Mapping[str, Reward] = field(default_factory=dict)  # name of a held-out set -> its reward

    def open_scorer(self, config: ScoringConfig) -> Scorer:
        """Return a scorer for `add_scores`. The scorer is a context manager."""
        return Scorer(self.reward, further_rewards=list(self.of_set.values()), **config.limits)

    def add_scores(self, rows: Sequence[Row], scorer: Scorer) -> list[Row]:
        """Score responses, and return their rows with the columns score, failure and parts."""
        scores: dict[int, Score] = {}
        for reward, indices, responses in self._calls(rows, to_reward_responses(rows)):
            scores |= zip(indices, scorer(responses, reward), strict=True)
        return [
            row | dict(score=scores[i].value, failure=scores[i].failure, parts=scores[i].parts)
            for i, row in enumerate(rows)
        ]

    def voted_answers(self, rows: Sequence[Row]) -> list[str | None]:
        """Return the answer for which each response votes in maj@k, or None if the response has no answer."""
        answers: dict[int, str | None] = {}
        for reward, indices, responses in self._calls(rows, to_reward_responses(rows)):
            answers |= zip(indices, voted_answers(reward or self.reward, responses), strict=True)
        return [answers[i] for i in range(len(rows))]

    def _calls(
        self, rows: Sequence[Row], responses: Sequence[Response]
    ) -> Iterator[tuple[Reward | None, list[int], list[Response]]]:
        """Yield (reward of a held-out set or None, indices of its responses, the responses)."""
        indices: dict[str | None, list[int]] = {}
        for index, row in enumerate(rows):
            indices.setdefault(row["set"] if row["set"] in self.of_set else None, []).append(index)
        for name, chosen in indices.items():
            yield None if name is None else self.of_set[name], chosen, [responses[i] for i in chosen]


def checked_rewards(reward: Node, test_sets: Node) -> SetRewards:
    """Return the reward of a config and the rewards of its held-out sets.

    Raises ValueError if a reward is invalid, or if a reward calls a model that only a training run serves.
    """
    built, of_set = instantiate_callable(reward, "reward"), own_rewards(test_sets)
    check_reward(built)
    for key, each in {"reward": built, **{f"data.test_sets.{name}.reward": of_set[name] for name in of_set}}.items():
        if called := called_roles(each):
            raise ValueError(
                f"{key}: calls roles.{called[0]}, which only `mrl train` serves; start a server of this model, and set the "
                "argument `url` of the reward in place of `role`."
            )
    return SetRewards(built, of_set)
