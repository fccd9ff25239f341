"""Supervised data set. Each row has a prompt and a response. A response may have several turns with tool results.

mrl/data/preference_dataset.py reads rows with preferences into the same class, SftDataset.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mrl.core.types import TokenBlock
from mrl.data.columns import read_messages
from mrl.data.images import refuse_images
from mrl.data.row_files import Row, RowError, column_value, read_all
from mrl.data.tokenizer import ChatTemplate, Messages, check_vocabulary, encode_messages, encode_texts, load_tokenizer
from mrl.data.tool_template import ToolTemplate, encode_text


@dataclass(frozen=True)
class SftDataset:
    """Token ids of B sequences. The loss covers the response and its end-of-sequence token, but not tool results.

    A row of the file is one sequence, or two successive sequences: the chosen and the rejected response of a pair.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    loss_masks: list[list[bool]] | None = None  # whether each response token is in the loss; None: all tokens are
    sequences_per_row: int = 1  # 2: the rows are pairs
    # name -> one number for each sequence, such as labels or margins; the loss reads it as a column
    columns: Mapping[str, list[float]] = field(default_factory=dict)
    # For each row, the index of a second row. The loss KTO (docs/concepts/algorithms.md) combines the second row's response with
    # the first row's prompt. Empty: the loss needs no such rows
    mismatched_responses: list[int] = field(default_factory=list)

    @classmethod
    def load(
        cls, path: str | Path, model_path: str | Path, max_tokens: int, chat: ChatTemplate | None = None
    ) -> "SftDataset":
        """Read and check every row.

        Raises:
            ValueError: a row is invalid or exceeds `max_tokens`; the message names the file, the row and the reason. Or the
                chat template cannot render the tool results of a row.
        """
        tokenizer, args = load_tokenizer(model_path, chat), chat.args if chat else None
        rows = read_all(path, _read)
        prompts = encode_messages(tokenizer, [messages for _, messages, _ in rows], args)
        responses, loss_masks = encode_responses(tokenizer, [response for *_, response in rows], args)
        check_lengths(path, [number for number, *_ in rows], prompts, responses, max_tokens)
        return cls(prompts, responses, loss_masks)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError if a row has a token outside the vocabulary of the model."""
        check_vocabulary(self.prompts + self.responses, vocab_size)

    @property
    def num_rows(self) -> int:
        """Number of rows of the file."""
        return len(self.prompts) // self.sequences_per_row

    def block(self) -> TokenBlock:
        """Return all sequences, followed by the prompts with mismatched responses, if there are any."""
        others = self.mismatched_responses
        masks = self.loss_masks and [*self.loss_masks, *(self.loss_masks[row] for row in others)]
        prompts = self.prompts + (self.prompts if others else [])
        block = TokenBlock.from_lists(prompts, self.responses + [self.responses[row] for row in others], sampled=masks)
        numbers = {
            name: np.array([*values, *([0.0] * len(others))], np.float32) for name, values in self.columns.items()
        }
        return block.with_columns(**{name: values.repeat(block.sampled_lengths) for name, values in numbers.items()})


def check_lengths(
    path: str | Path, numbers: list[int], prompts: list[list[int]], responses: list[list[int]], max_tokens: int
) -> None:
    """Raise ValueError if a sequence exceeds `max_tokens`. `numbers` are the row numbers of the sequences in the file."""
    for number, prompt, response in zip(numbers, prompts, responses, strict=True):
        if len(prompt) + len(response) > max_tokens:
            raise ValueError(
                f"{path}, row {number}: prompt and response have {len(prompt) + len(response)} tokens, more than the "
                f"{max_tokens} of the model's context; shorten or remove the row."
            )


ResponseMessages = str | list[dict[str, str]]  # a text, or the messages of several turns


def _read(number: int, row: Row) -> tuple[int, Messages, ResponseMessages]:
    refuse_images(row)
    prompt = read_messages(column_value(row, "prompt"), "prompt")
    return number, prompt, read_response(column_value(row, "response"), "response")


def read_response(response: Any, column: str) -> ResponseMessages:
    """Return a response: a text, or messages whose roles are assistant, tool, assistant, ..., assistant.

    Raises RowError for all other values. `column` is the name of the column.
    """
    if isinstance(response, str):
        return response
    fits = isinstance(response, list) and len(response) % 2 == 1
    for index, message in enumerate(response if fits else ()):
        role = ("assistant", "tool")[index % 2]
        fits &= isinstance(message, dict) and message.get("role") == role and isinstance(message.get("content"), str)
    if not fits:
        raise RowError(
            column,
            "expected a text, or a list of messages with the roles assistant, tool, assistant, ..., assistant; "
            f"got {response!r:.80}.",
        )
    return response


def encode_responses(
    tokenizer: Any, responses: list[ResponseMessages], args: dict[str, Any] | None
) -> tuple[list[list[int]], list[list[bool]] | None]:
    """Return the tokens of each response, and whether each token is in the loss.

    The loss covers the assistant's text and its end-of-turn tokens. If all responses are texts, the second result is None.
    """
    texts = [response for response in responses if isinstance(response, str)]
    if len(texts) == len(responses):
        return [ids + [tokenizer.eos_token_id] for ids in encode_texts(tokenizer, texts)], None
    turns = [[dict(content=x)] if isinstance(x, str) else x for x in responses]
    template = ToolTemplate.of(tokenizer, args=args) if any(len(x) > 1 for x in turns) else None
    pairs = [_encode_turns(tokenizer, template, x) for x in turns]
    return [ids for ids, _ in pairs], [in_loss for _, in_loss in pairs]


def _encode_turns(
    tokenizer: Any, template: ToolTemplate | None, turns: list[dict[str, str]]
) -> tuple[list[int], list[bool]]:
    ids = encode_text(tokenizer, turns[0]["content"])
    in_loss = [True] * len(ids)
    for tool, assistant in zip(turns[1::2], turns[2::2], strict=True):
        assert template, "a response with several turns needs a tool template"
        result = template.encode(tool["content"], limit=len(tool["content"]) + 1)
        between, answer = template.wrap([result], turn_ended=False), encode_text(tokenizer, assistant["content"])
        num_end_tokens = len(template.end)
        ids += between + answer
        in_loss += [True] * num_end_tokens + [False] * (len(between) - num_end_tokens) + [True] * len(answer)
    return [*ids, tokenizer.eos_token_id], [*in_loss, True]
