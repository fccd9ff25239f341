"""Data sets of `mrl sft`: rows with a response, pairs of a chosen and a rejected response, and responses with a label.

A row with a response is called a supervised row. Its response may have several turns with tool results.

Pairs have the columns `prompt`, `chosen` and `rejected`, and optionally `margin`. Without `prompt`, the common beginning
of `chosen` and `rejected` is the prompt. Rows with labels have the columns `prompt`, `completion` and `label`. trl has
the same two forms. Prompts and responses are texts or messages, as in a supervised row.

A reward model reads the whole conversation, as the chat template renders it. The score is the output at the last token
of the conversation. A reward model is trained like a critic, which computes the value of a token from the output at the
token before it. Therefore the data set appends an end-of-sequence token, the end mark, to each conversation. The end mark
is the only token in the loss, and its value is the score.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mrl.core.types import TokenBlock
from mrl.data.columns import read_messages
from mrl.data.images import refuse_images
from mrl.data.row_files import Row, RowError, column_value, read_all
from mrl.data.tokenizer import (
    ChatTemplate,
    Messages,
    ToolTemplate,
    check_vocabulary,
    encode_messages,
    encode_text,
    encode_texts,
    load_tokenizer,
    render,
)


@dataclass(frozen=True)
class SftDataset:
    """Token ids of B sequences. The loss covers the response and its end-of-sequence token, but not tool results.

    In a data set for a reward model, the loss covers only the end mark.

    A row of the file is one sequence, or two successive sequences: the chosen and the rejected response of a pair.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    loss_masks: list[list[bool]] | None = None  # whether each response token is in the loss; None: all are in the loss
    sequences_per_row: int = 1  # 2: the rows are pairs
    # name -> one number for each sequence, such as labels or margins; the loss reads it as a column
    columns: Mapping[str, list[float]] = field(default_factory=dict)
    # For each row, the index of another row. The loss KTO (docs/concepts/algorithms.md) combines the response of that row with
    # the prompt of this row. Empty: the loss needs no such rows
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

    The loss covers the text and the end-of-turn tokens of the assistant. If all responses are texts, the second result is None.
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
        num_end_tokens = len(template.end_of_turn)
        ids += between + answer
        in_loss += [True] * num_end_tokens + [False] * (len(between) - num_end_tokens) + [True] * len(answer)
    return [*ids, tokenizer.eos_token_id], [*in_loss, True]


@dataclass(frozen=True)
class PreferenceRow:
    """A checked row: a pair (chosen, rejected), or one response with a label."""

    number: int  # row number in the file
    prompt: Messages
    responses: tuple[ResponseMessages, ...]  # chosen and rejected, or one response
    value: float  # margin of a pair, or label: 1 good, 0 bad


def load_preferences(
    path: str | Path,
    model_path: str | Path,
    max_tokens: int,
    chat: ChatTemplate | None = None,
    *,
    labeled: bool,
    for_reward_model: bool,
    mismatched: bool = False,
) -> SftDataset:
    """Read and check every row.

    Args:
        path: jsonl or parquet file, or a folder with a saved data set.
        model_path: Hugging Face folder with the tokenizer.
        max_tokens: largest number of tokens of a sequence.
        chat: replaces the chat template of the tokenizer.
        labeled: whether the rows have labels. Otherwise they are pairs.
        for_reward_model: whether a reward model reads the sequences.
        mismatched: whether the data set also has each prompt with the response to another prompt, as `KTO` needs.

    Raises:
        ValueError: a row is invalid or exceeds `max_tokens`; the message names the file, the row and the reason. Or all rows have
            the same prompt, although `mismatched` is true.
    """
    tokenizer, args = load_tokenizer(model_path, chat), chat.args if chat else {}
    rows = read_all(path, _read_labeled if labeled else _read_pair)
    per_row = 1 if labeled else 2
    masks: list[list[bool]] | None
    if for_reward_model:
        prompts, responses, masks = _encode_conversations(path, tokenizer, rows, args)
    else:
        encoded = encode_messages(tokenizer, [row.prompt for row in rows], args)
        prompts = [prompt for prompt in encoded for _ in range(per_row)]
        responses, masks = encode_responses(tokenizer, [each for row in rows for each in row.responses], args)
    check_lengths(path, [row.number for row in rows for _ in range(per_row)], prompts, responses, max_tokens)
    columns = {"labels" if labeled else "margins": [row.value for row in rows for _ in range(per_row)]}
    others = _other_prompts(path, [row.prompt for row in rows]) if mismatched else []
    if mismatched:
        check_lengths(path, [row.number for row in rows], prompts, [responses[other] for other in others], max_tokens)
    return SftDataset(prompts, responses, masks, per_row, columns, others)


def _read_pair(number: int, row: Row) -> PreferenceRow:
    """Return a pair. Its prompt is the column `prompt`, or the common beginning of both responses."""
    refuse_images(row)
    chosen, rejected = column_value(row, "chosen"), column_value(row, "rejected")
    if "prompt" in row and not _has_prompt(chosen):
        prompt = read_messages(row["prompt"], "prompt")
    else:
        prompt, chosen, rejected = _split_prompt(chosen, rejected)
    responses = (read_response(chosen, "chosen"), read_response(rejected, "rejected"))
    margin = row.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise RowError("margin", f"expected a finite number, got {margin!r:.80}.")
    return PreferenceRow(number, prompt, responses, float(margin))


def _has_prompt(response: Any) -> bool:
    """Return whether the messages of a response begin with those of the prompt, as in some data sets with a column `prompt`."""
    first = response[0] if isinstance(response, list) and response else None
    return isinstance(first, dict) and first.get("role") in ("system", "developer", "user")


def _split_prompt(chosen: Any, rejected: Any) -> tuple[Messages, Any, Any]:
    """Return the common beginning of two responses as the prompt, and the rest of each response.

    For two lists of messages, the common beginning never contains the last message of the shorter list. For two texts, a space at
    the end of the common beginning belongs to the responses, as in trl.
    """
    if type(chosen) is not type(rejected):
        raise RowError("rejected", f"expected the same form as in column 'chosen', got {rejected!r:.80}.")
    if isinstance(chosen, str):
        start = _common_length([chosen, rejected])
        start -= start > 0 and chosen[start - 1] == " "
    elif isinstance(chosen, list):
        longest = min(len(chosen), len(rejected)) - 1
        start = next((n for n in range(longest) if chosen[n] != rejected[n]), max(0, longest))
    else:
        raise RowError("chosen", f"expected a text or a list of {{role, content}} messages, got {chosen!r:.80}.")
    if not start:
        raise RowError(
            "prompt", "is missing, and chosen and rejected have no common beginning that could be the prompt."
        )
    return read_messages(chosen[:start], "chosen"), chosen[start:], rejected[start:]


def _common_length(sequences: Sequence[Sequence[Any]]) -> int:
    """Return the length of the common beginning of all sequences."""
    shortest = min(map(len, sequences))
    return next((n for n in range(shortest) if len({each[n] for each in sequences}) > 1), shortest)


def _read_labeled(number: int, row: Row) -> PreferenceRow:
    refuse_images(row)
    prompt = read_messages(column_value(row, "prompt"), "prompt")
    response, label = read_response(column_value(row, "completion"), "completion"), column_value(row, "label")
    if label not in (0, 1):  # also true and false
        raise RowError("label", f"expected true (good) or false (bad), got {label!r:.80}.")
    return PreferenceRow(number, prompt, (response,), float(label))


def _encode_conversations(
    path: str | Path, tokenizer: Any, rows: list[PreferenceRow], args: dict[str, Any]
) -> tuple[list[list[int]], list[list[int]], list[list[bool]]]:
    """Return prompts, responses and loss masks of whole conversations, each with an end mark.

    The prompt of a pair is the common beginning of the tokens of both conversations. The prompt of a single conversation is the
    whole conversation. The loss mask is true at the end mark.
    """
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    texts = [_render_conversation(tokenizer, row.prompt, response, args) for row in rows for response in row.responses]
    encoded = iter(encode_texts(tokenizer, texts))
    for row in rows:
        conversations = [next(encoded) for _ in row.responses]
        shared = _common_length(conversations)
        if not shared:
            raise ValueError(f"{path}, row {row.number}: the conversations have no tokens or no common beginning.")
        for tokens in conversations:
            prompts.append(tokens[:shared])
            responses.append([*tokens[shared:], tokenizer.eos_token_id])
    return prompts, responses, [[False] * (len(tokens) - 1) + [True] for tokens in responses]


def _render_conversation(tokenizer: Any, prompt: Messages, response: ResponseMessages, args: dict[str, Any]) -> str:
    """Return the text of prompt and response, as mrl.rewards.remote_models.RewardModel renders them for a served model."""
    turns = [dict(role="assistant", content=response)] if isinstance(response, str) else response
    return render(tokenizer, prompt + turns, args, for_answer=False)


def _other_prompts(path: str | Path, prompts: list[Messages]) -> list[int]:
    """Return, for each row, the index of the next row with another prompt. The first row follows the last row."""
    first_other = next((n for n, prompt in enumerate(prompts) if prompt != prompts[0]), None)
    if first_other is None:
        raise ValueError(
            f"{path}: all rows have the same prompt, but the objective needs responses to other prompts (for its KL term); "
            "add rows with other prompts."
        )
    others = [0] * len(prompts)
    following = first_other if prompts[-1] == prompts[0] else 0
    for row in reversed(range(len(prompts))):
        if row + 1 < len(prompts) and prompts[row + 1] != prompts[row]:
            following = row + 1
        others[row] = following
    return others


@dataclass(frozen=True)
class RowForm:
    """Form of the rows on which a supervised objective trains."""

    rows: str = "responses"  # kind of rows, which determines their columns: responses, pairs or labels
    for_reward_model: bool = False  # whether a reward model reads the sequences
    mismatched: bool = False  # whether the objective needs each prompt with the response to another prompt

    def load(
        self, path: str | Path, model_path: str | Path, max_tokens: int, chat: ChatTemplate | None = None
    ) -> SftDataset:
        """Read and check every row, see `SftDataset.load` and `load_preferences`."""
        if self.rows == "responses":
            return SftDataset.load(path, model_path, max_tokens, chat)
        options = dict(
            labeled=self.rows == "labels", for_reward_model=self.for_reward_model, mismatched=self.mismatched
        )
        return load_preferences(path, model_path, max_tokens, chat, **options)
