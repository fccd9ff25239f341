"""Supervised rows: a prompt in messages and the response to learn, of one turn or of several with tool results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.data.columns import read_messages
from mrl.data.row_files import Row, RowError, column, read_all
from mrl.data.tokenizer import ChatTemplate, Messages, check_vocabulary, encode_messages, encode_texts, load_tokenizer
from mrl.data.tool_template import ToolTemplate, encode_text


@dataclass(frozen=True)
class SftDataset:
    """Token ids by row; the loss covers the responses, which end with the end-of-sequence token, but no tool result."""

    prompts: list[list[int]]
    responses: list[list[int]]
    sampled: list[list[bool]] | None = None  # which tokens of each response are learned; None: all

    @classmethod
    def load(
        cls, path: str | Path, model_path: str | Path, max_tokens: int, chat: ChatTemplate | None = None
    ) -> "SftDataset":
        """Read and check every row.

        Raises:
            ValueError: names file, row, column and reason; also for a row of more than `max_tokens`, and where the chat
                template cannot carry the tool results that there are.
        """
        tokenizer, args = load_tokenizer(model_path, chat), chat.args if chat else None
        rows = read_all(path, _read)
        prompts = encode_messages(tokenizer, [messages for _, messages, _ in rows], args)
        responses, sampled = _encode_responses(tokenizer, [response for *_, response in rows], args)
        for (number, *_), prompt, response in zip(rows, prompts, responses, strict=True):
            if len(prompt) + len(response) > max_tokens:
                raise ValueError(
                    f"{path}, row {number}: prompt and response are {len(prompt) + len(response)} tokens, the model's "
                    f"context is {max_tokens}; shorten or remove the row."
                )
        return cls(prompts, responses, sampled)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError when a row has a token that a model of `vocab_size` does not know."""
        check_vocabulary(self.prompts + self.responses, vocab_size)


Said = str | list[dict[str, str]]  # a response: text, or the messages of several turns


def _read(number: int, row: Row) -> tuple[int, Messages, Said]:
    return number, read_messages(column(row, "prompt"), "prompt"), _read_response(column(row, "response"))


def _read_response(response: Any) -> Said:
    """Text, or messages in which assistant and tool take turns, the assistant first and last; else a RowError."""
    if isinstance(response, str):
        return response
    fits = isinstance(response, list) and len(response) % 2 == 1
    for place, message in enumerate(response if fits else ()):
        role = ("assistant", "tool")[place % 2]
        fits &= isinstance(message, dict) and message.get("role") == role and isinstance(message.get("content"), str)
    if not fits:
        raise RowError(
            "response",
            f"expected text, or messages of assistant, tool, assistant, ... that end with the assistant's; got {response!r:.80}.",
        )
    return response


def _encode_responses(
    tokenizer: Any, responses: list[Said], args: dict[str, Any] | None
) -> tuple[list[list[int]], list[list[bool]] | None]:
    """Tokens of each response, and which are learned: the assistant's, and what ends its turns."""
    texts = [response for response in responses if isinstance(response, str)]
    if len(texts) == len(responses):
        return [ids + [tokenizer.eos_token_id] for ids in encode_texts(tokenizer, texts)], None
    turns = [[dict(content=x)] if isinstance(x, str) else x for x in responses]
    template = ToolTemplate.of(tokenizer, args=args) if any(len(x) > 1 for x in turns) else None
    pairs = [_encode_turns(tokenizer, template, x) for x in turns]
    return [ids for ids, _ in pairs], [learned for _, learned in pairs]


def _encode_turns(
    tokenizer: Any, template: ToolTemplate | None, turns: list[dict[str, str]]
) -> tuple[list[int], list[bool]]:
    ids = encode_text(tokenizer, turns[0]["content"])
    learned = [True] * len(ids)
    for tool, assistant in zip(turns[1::2], turns[2::2], strict=True):
        assert template, "there are tool results"
        result = template.encode(tool["content"], limit=len(tool["content"]) + 1)
        between, said = template.wrap([result], closed=False), encode_text(tokenizer, assistant["content"])
        ends = len(template.end)
        ids += between + said
        learned += [True] * ends + [False] * (len(between) - ends) + [True] * len(said)
    return [*ids, tokenizer.eos_token_id], [*learned, True]
