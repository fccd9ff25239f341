"""Supervised rows: a prompt in messages and the response to learn."""

from dataclasses import dataclass
from pathlib import Path

from mrl.data.table import check_messages, read_rows
from mrl.data.tokenizer import check_vocabulary, encode_messages, load_tokenizer

COLUMNS = ("prompt", "response")


@dataclass(frozen=True)
class SftDataset:
    """Token ids by row; the loss covers the responses, which end with the end-of-sequence token."""

    prompts: list[list[int]]
    responses: list[list[int]]

    @classmethod
    def load(cls, path: str | Path, model_path: str | Path, max_tokens: int) -> "SftDataset":
        """Read and check every row.

        Raises:
            ValueError: names file, row, column and reason; also for a row of more than `max_tokens`.
        """
        tokenizer = load_tokenizer(model_path)
        rows = read_rows(path, COLUMNS)
        for number, row in enumerate(rows):
            check_messages(path, number, row["prompt"])
            if not isinstance(row["response"], str):
                raise ValueError(
                    f"{path}, row {number}, column 'response': expected text, got {row['response']!r:.80}."
                )
        prompts = encode_messages(tokenizer, [row["prompt"] for row in rows])
        texts = [row["response"] for row in rows]
        responses = [ids + [tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if len(prompt) + len(response) > max_tokens:
                raise ValueError(
                    f"{path}, row {number}: prompt and response are {len(prompt) + len(response)} tokens, the model's "
                    f"context is {max_tokens}; shorten or remove the row."
                )
        return cls(prompts, responses)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError when a row has a token that a model of `vocab_size` does not know."""
        check_vocabulary(self.prompts + self.responses, vocab_size)
