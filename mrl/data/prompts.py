"""Prompts of reinforcement learning: rows of the field's five columns, and the order in which they are drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrl.data.table import Row, check_messages, read_rows
from mrl.data.tokenizer import check_vocabulary, encode_messages, load_tokenizer

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")


class PromptDataset:
    """Checked rows of one or more files, with the tokenizer of the model that answers them."""

    def __init__(self, rows: list[Row], tokenizer: Any, encoded: list[list[int]]) -> None:
        self._rows, self._tokenizer, self._encoded = rows, tokenizer, encoded

    @classmethod
    def load(cls, paths: Sequence[str | Path], model_path: str | Path, max_prompt_tokens: int) -> "PromptDataset":
        """Read and check every row.

        Raises:
            ValueError: names file, row, column and reason; also for a prompt of more than `max_prompt_tokens`.
        """
        tokenizer = load_tokenizer(model_path)
        rows: list[Row] = []
        encoded: list[list[int]] = []
        for path in paths:
            found = read_rows(path, COLUMNS)
            for number, row in enumerate(found):
                _check(path, number, row)
            tokens = encode_messages(tokenizer, [row["prompt"] for row in found])
            for number, ids in enumerate(tokens):
                _check_length(path, number, len(ids), max_prompt_tokens)
            rows += found
            encoded += tokens
        return cls(rows, tokenizer, encoded)

    def __len__(self) -> int:
        return len(self._rows)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError when a prompt has a token that a model of `vocab_size` does not know."""
        check_vocabulary(self._encoded, vocab_size)

    def encode(self, row: int) -> list[int]:
        """Token ids of a prompt, ready for the response."""
        return self._encoded[row]

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Text of each response, special tokens left out."""
        return self._tokenizer.batch_decode(responses, skip_special_tokens=True)

    def ground_truth(self, row: int) -> str:
        return self._rows[row]["reward_model"]["ground_truth"]

    def data_source(self, row: int) -> str:
        return self._rows[row]["data_source"]

    def extra_info(self, row: int) -> dict[str, Any]:
        return self._rows[row]["extra_info"] or {}


def _check(path: str | Path, number: int, row: Row) -> None:
    check_messages(path, number, row["prompt"])
    if not isinstance(row["data_source"], str):
        raise ValueError(f"{path}, row {number}, column 'data_source': expected text, got {row['data_source']!r:.80}.")
    model = row["reward_model"]
    if not isinstance(model, dict) or not isinstance(model.get("ground_truth"), str):
        raise ValueError(
            f"{path}, row {number}, column 'reward_model': expected {{style, ground_truth}} with text in ground_truth, "
            f"got {model!r:.80}."
        )


def _check_length(path: str | Path, number: int, tokens: int, limit: int) -> None:
    if tokens == 0:
        raise ValueError(f"{path}, row {number}, column 'prompt': the chat template made no token of it.")
    if tokens > limit:
        raise ValueError(
            f"{path}, row {number}, column 'prompt': {tokens} tokens are more than the {limit} that fit beside the "
            "response; shorten or remove the row, lower rollout.max_response_tokens, or use a model with more context."
        )


class PromptStream:
    """Row numbers in batches, epoch after epoch, without end; no row is left out at an epoch's border.

    Each epoch's order depends on (seed, epoch) alone, so a position is two numbers.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, shuffle: bool) -> None:
        if num_rows < 1:
            raise ValueError("a stream needs at least one row, got none.")
        self.num_rows, self.batch_size, self.seed, self.shuffle = num_rows, batch_size, seed, shuffle
        self.epoch, self.position = 0, 0

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> NDArray[np.int64]:
        """The next `batch_size` row numbers."""
        parts, missing = [], self.batch_size
        while missing:
            part = self._order()[self.position : self.position + missing]
            parts.append(part)
            missing -= len(part)
            self.position += len(part)
            if self.position == self.num_rows:
                self.epoch, self.position = self.epoch + 1, 0
        return np.concatenate(parts)

    def _order(self) -> NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)

    def state_dict(self) -> dict[str, int]:
        """Where the stream is."""
        return dict(epoch=self.epoch, position=self.position)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from where another stream of the same rows and seed was."""
        self.epoch, self.position = state["epoch"], state["position"]
