"""Offline rows: responses from a file, on which steps train in addition to the responses that the engines sample."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mrl.config.data_schema import OfflineConfig
from mrl.data.columns import read_messages, with_system_message
from mrl.data.images import refuse_images
from mrl.data.row_files import Row, RowError, column_value, read_all
from mrl.data.tokenizer import ChatTemplate, Messages, encode_messages, encode_texts, load_tokenizer

_ORDER_STREAM = 1 << 30  # last element of each seed that shuffles the groups; mrl.data.samplers uses other numbers


class OfflineRow(NamedTuple):
    """One response from the file."""

    number: int  # row number in the file, from 0
    prompt: list[int]  # token ids
    response: list[int]  # token ids; if the response is a text in the file, an end-of-sequence token follows the text
    reward: float
    # Log-probability of each response token under the policy that sampled it; None: unknown
    logprobs: list[float] | None


@dataclass(frozen=True)
class TokenLimits:
    """Limits for the tokens of a row."""

    prompt: int  # largest number of tokens of a prompt
    response: int  # largest number of tokens of a response
    vocabulary: int  # size of the vocabulary; token ids must be smaller


@dataclass(frozen=True, eq=False)
class OfflineRows:
    """All rows of the file, in groups: the rows with the same prompt are one group.

    Each step trains on whole groups. Their order is random, and each pass over the file has a new order. The groups of a step
    depend only on the seed and on the number of the step.
    """

    groups: list[list[OfflineRow]]
    rows_per_step: int  # largest number of rows of a step
    seed: int
    advantage: float | None = None  # advantage of every row; None: it is computed from the rewards
    # Indices of the groups of each step, for the steps that have been planned so far
    _steps: list[list[int]] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        config: OfflineConfig,
        model_path: str | Path,
        limits: TokenLimits,
        *,
        seed: int,
        system: str | None = None,
        chat: ChatTemplate | None = None,
    ) -> "OfflineRows":
        """Read and check every row of `config.path`. `system`: system message for prompts without one.

        Raises ValueError if a row cannot be used, or if a group has more than `config.rows_per_step` rows.
        """
        assert config.path, "the config names a file"
        tokenizer = load_tokenizer(model_path, chat)
        needs_reward = config.advantage is None
        read = read_all(config.path, lambda number, row: (number, *_read(row, needs_reward, system)))
        prompts = encode_messages(tokenizer, [messages for _, messages, *_ in read], chat.args if chat else None)
        texts = [response for _, _, response, *_ in read if isinstance(response, str)]
        encoded = iter(encode_texts(tokenizer, texts))
        rows = []
        for (number, _, response, reward, logprobs), prompt in zip(read, prompts, strict=True):
            ids = [*next(encoded), tokenizer.eos_token_id] if isinstance(response, str) else response
            row = OfflineRow(number, prompt, ids, reward, logprobs)
            if reason := _token_fault(row, limits):
                raise ValueError(f"data.offline.path={config.path}, row {number}: {reason}")
            rows.append(row)
        groups: dict[tuple[int, ...], list[OfflineRow]] = {}
        for row in rows:
            groups.setdefault(tuple(row.prompt), []).append(row)
        largest = max(groups.values(), key=len)
        if len(largest) > config.rows_per_step:
            raise ValueError(
                f"data.offline.rows_per_step={config.rows_per_step}: {len(largest)} rows of {config.path} have the prompt of row "
                f"{largest[0].number}, and rows with the same prompt stay together; expected {len(largest)} or more."
            )
        return cls(list(groups.values()), config.rows_per_step, seed, config.advantage)

    @property
    def has_all_logprobs(self) -> bool:
        """Whether the file has the log-probabilities of the sampling policy for every row."""
        return all(row.logprobs is not None for group in self.groups for row in group)

    @property
    def num_single(self) -> int:
        """Number of groups with only one row."""
        return sum(len(group) == 1 for group in self.groups)

    @property
    def fingerprint(self) -> str:
        """Digest of all rows."""
        return hashlib.blake2b(repr(self.groups).encode(), digest_size=16).hexdigest()

    def of_step(self, step: int) -> list[list[OfflineRow]]:
        """Return the groups of the step with this index, from 0: as many as fit into `rows_per_step` rows."""
        if step >= len(self._steps):
            self._steps[:] = self._plan(2 * step + 16)
        return [self.groups[index] for index in self._steps[step]]

    def _plan(self, num_steps: int) -> list[list[int]]:
        """Return the indices of the groups of the first `num_steps` steps."""
        steps: list[list[int]] = [[]]
        num_rows, epoch = 0, 0
        while len(steps) <= num_steps:
            for index in (
                np.random.default_rng([self.seed, epoch, _ORDER_STREAM]).permutation(len(self.groups)).tolist()
            ):
                if num_rows + len(self.groups[index]) > self.rows_per_step:
                    steps.append([])
                    num_rows = 0
                steps[-1].append(index)
                num_rows += len(self.groups[index])
            epoch += 1
        return steps[:num_steps]


def _read(
    row: Row, needs_reward: bool, system: str | None
) -> tuple[Messages, str | list[int], float, list[float] | None]:
    """Return messages, response, reward and log-probabilities of a row. Raises RowError if a column is missing or invalid."""
    refuse_images(row)
    messages = with_system_message(read_messages(column_value(row, "prompt"), "prompt"), system)
    response = column_value(row, "response")
    is_ids = isinstance(response, list) and all(type(token) is int and token >= 0 for token in response)
    if not response or not (isinstance(response, str) or is_ids):
        raise RowError("response", f"expected a text or a list of token ids, got {response!r:.80}.")
    reward: Any = column_value(row, "reward") if needs_reward or row.get("reward") is not None else 0.0
    if not _is_finite(reward):
        raise RowError("reward", f"expected a finite number, got {reward!r:.80}.")
    return messages, response, float(reward), _read_logprobs(row)


def _read_logprobs(row: Mapping[str, Any]) -> list[float] | None:
    values = row.get("logprobs")
    if values is None:
        return None
    if not isinstance(values, list) or not all(_is_finite(value) and value <= 0 for value in values):
        raise RowError("logprobs", f"expected a list of numbers that are 0 or less, or null, got {values!r:.80}.")
    return [float(value) for value in values]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _token_fault(row: OfflineRow, limits: TokenLimits) -> str:
    """Return why a step cannot train on the tokens of a row, or "" if it can."""
    largest = max([*row.prompt, *row.response])
    if largest >= limits.vocabulary:
        return f"token {largest} is outside the vocabulary of the model, which ends at {limits.vocabulary - 1}."
    for name, ids, limit in (("prompt", row.prompt, limits.prompt), ("response", row.response, limits.response)):
        if len(ids) > limit:
            key = "data.max_prompt_tokens" if name == "prompt" else "rollout.max_response_tokens"
            return f"the {name} has {len(ids)} tokens, more than the {limit} of {key}; shorten or remove the row."
    if row.logprobs is not None and len(row.logprobs) != len(row.response):
        return (
            f"logprobs has {len(row.logprobs)} values for the {len(row.response)} tokens of the response, the end-of-sequence "
            "token included; give the response as the list of its token ids."
        )
    return ""


def check_groups(rows: OfflineRows, group_relative: bool, advantage: str) -> str:
    """Return a warning if the advantage of some rows is always 0, otherwise "". Raises ValueError if it is 0 for all rows.

    `group_relative`: whether the estimator `advantage` (name of its class) compares the responses to one prompt.
    """
    if rows.advantage is not None or not group_relative or not rows.num_single:
        return ""
    problem = (
        f"data.offline.path: {rows.num_single} of {len(rows.groups)} prompts have only one row, and {advantage} compares the "
        "responses to one prompt, so the advantage of these rows is always 0; set data.offline.advantage, or give each prompt "
        "several rows."
    )
    if rows.num_single == len(rows.groups):
        raise ValueError(problem)
    return problem
