"""Loads fast tokenizers without torch, renders and encodes messages, and builds two small tokenizers for tiny models.

ToolTemplate contains the tokens that a chat template puts around tool results. The policy samples the turns between the tool
results.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mrl.core.code_locations import quick_package_metadata

Messages = list[dict[str, str]]

RESERVED = ("conversation", "messages", "chat_template", "tokenize", "add_generation_prompt", "return_dict")
"""Names that data.template_args cannot set: arguments of apply_chat_template, and the variable `messages` of templates."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template that turns messages into text, and its variables."""

    template: str | None = None  # path of a Jinja file; None: the template of the tokenizer
    args: dict[str, Any] = field(default_factory=dict)  # values of the template's variables, such as enable_thinking


def fast_tokenizer_class() -> Any:
    """Return PreTrainedTokenizerFast. The first call takes a second. AutoTokenizer would also import torch."""
    with quick_package_metadata():
        from transformers import PreTrainedTokenizerFast
    return PreTrainedTokenizerFast


def read_tokenizer(folder: str | Path) -> Any:
    """Return the fast tokenizer of a Hugging Face folder.

    Code in the folder is not run. Raises ValueError if the folder has no tokenizer.json, or if the tokenizer has no
    end-of-sequence token.
    """
    if not (Path(folder) / "tokenizer.json").is_file():
        code = " The tokenizer of this folder is code, which mrl does not run." if tokenizer_is_code(folder) else ""
        raise ValueError(f"{folder}: tokenizer.json is missing; save the model's fast tokenizer there.{code}")
    tokenizer = fast_tokenizer_class().from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{folder}: the tokenizer has no eos_token; responses could not end.")
    return tokenizer


def tokenizer_is_code(folder: str | Path) -> bool:
    """Whether tokenizer_config.json names a class in a Python file of the folder, as in Kimi K2."""
    path = Path(folder) / "tokenizer_config.json"
    return path.is_file() and "AutoTokenizer" in (json.loads(path.read_text(encoding="utf-8")).get("auto_map") or {})


def load_tokenizer(folder: str | Path, chat: ChatTemplate | None = None) -> Any:
    """Return the fast tokenizer of a Hugging Face folder. A template in `chat` replaces the tokenizer's template.

    Raises:
        ValueError: the folder has no tokenizer.json, no chat template or no end-of-sequence token.
        ValueError: the template file of `chat` does not exist or cannot be parsed.
        ValueError: the template does not read an argument of `chat`.
    """
    chat = chat or ChatTemplate()
    tokenizer = read_tokenizer(folder)
    if chat.template:
        if not Path(chat.template).is_file():
            raise ValueError(f"data.chat_template={chat.template}: no such file; expected a Jinja chat template.")
        tokenizer.chat_template = Path(chat.template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ValueError(
            f"{folder}: the tokenizer has no chat template, which renders the messages of a prompt; name a Jinja file in "
            "data.chat_template."
        )
    _check_template(tokenizer, chat, folder)
    return tokenizer


def _check_template(tokenizer: Any, chat: ChatTemplate, folder: str | Path) -> None:
    from jinja2 import TemplateError, TemplateSyntaxError

    template_name = f"data.chat_template={chat.template}" if chat.template else f"{folder}: chat template"
    words = set(re.findall(r"[A-Za-z_]\w*", str(tokenizer.chat_template)))
    for name in chat.args:
        if name in RESERVED or name not in words:
            near = difflib.get_close_matches(name, words, n=1)
            hint = f"; did you mean {near[0]!r}?" if near and name not in RESERVED else "; leave it out."
            raise ValueError(f"data.template_args.{name}: not a variable of the chat template{hint}")
    try:
        render(tokenizer, [{"role": "user", "content": "?"}], chat.args)
    except TemplateSyntaxError as error:
        raise ValueError(f"{template_name}: line {error.lineno}: {error.message}") from error
    except TemplateError:
        pass  # a template may reject this short conversation; every row is checked later


def render(tokenizer: Any, messages: Messages, args: dict[str, Any] | None = None, *, for_answer: bool = True) -> str:
    """Return the text of a conversation. With `for_answer`, the text ends with the start of the assistant's next turn.

    Raises jinja2.TemplateError if the chat template rejects the conversation.
    """
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=for_answer, **(args or {}))


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Return the token ids of each text. No special tokens are added to those in the text."""
    options = dict(add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False)
    return tokenizer(texts, **options)["input_ids"] if texts else []


def encode_messages(
    tokenizer: Any, conversations: list[Messages], args: dict[str, Any] | None = None
) -> list[list[int]]:
    """Return the token ids of each conversation, up to the start of the assistant's next turn."""
    return encode_texts(tokenizer, [render(tokenizer, messages, args) for messages in conversations])


@cache
def _decoder(folder: str) -> Any:
    return read_tokenizer(folder)


def decode(folder: str, responses: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each response, without special tokens. A process loads the tokenizer only once."""
    return _decoder(folder).batch_decode(responses, skip_special_tokens=True)


@cache
def _known_token_texts(folder: str) -> dict[int, str]:
    return {}


def token_texts(folder: str, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token by itself, without special tokens. Decodes a token only once per process."""
    known = _known_token_texts(folder)
    missing = [token for token in dict.fromkeys(token_ids) if token not in known]
    if missing:
        known.update(zip(missing, decode(folder, [[token] for token in missing]), strict=True))
    return [known[token] for token in token_ids]


def check_vocabulary(rows: list[list[int]], vocab_size: int) -> None:
    """Raise ValueError if a row has a token id of `vocab_size` or more."""
    largest = max((max(ids) for ids in rows if ids), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer gives token {largest}, but the model's vocabulary ends at {vocab_size - 1}; "
            "the tokenizer in the model's folder belongs to another model."
        )


CHARACTERS = "0123456789+-*= "  # the characters that have their own token in `character_tokenizer`


def character_tokenizer(vocab_size: int = 32) -> Any:
    """Build a tokenizer with one token for each character that occurs in sums and products.

    The tokenizer has `vocab_size` token ids. Ids without a character decode to names such as <r0>.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS]
    words += [f"<r{i}>" for i in range(vocab_size - len(words))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return _with_special_tokens(
        raw, "{% for message in messages %}{{ message['content'] }}{% endfor %}", unk_token="<unk>"
    )


def byte_tokenizer() -> Any:
    """Build a tokenizer with one token for each UTF-8 byte, so that every text can be encoded and decoded without loss.

    The chat template renders a message as <|start|>, role, line break, content, <|end|>, line break.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # 256 printable characters, one per byte
    vocab = {letter: i for i, letter in enumerate(letters)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    template = (
        "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    return _with_special_tokens(raw, template, additional_special_tokens=["<|start|>", "<|end|>"])


def _with_special_tokens(raw: Any, template: str, **special: Any) -> Any:
    tokenizer = fast_tokenizer_class()(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.chat_template = template
    return tokenizer


# Texts of a fixed conversation; the template is rendered with them to find the tokens around results
_USER, _ASSISTANT, _RESULTS = "8*8=", "12+13", ("9081726354", "7203948165")
_CUT = "..."  # marks the end of a truncated tool result


@dataclass(frozen=True)
class ToolTemplate:
    """The tokens between two turns of the assistant.

    With one tool result, they are `end_of_turn + before + result + after`. With two results, they are
    `end_of_turn + before + result + between + result + after`.
    """

    tokenizer: Any
    end_of_turn: tuple[int, ...]  # the token that ends the assistant's turn; empty if the template has none
    before: tuple[int, ...]  # tokens before the first result
    between: tuple[int, ...]  # tokens between two results
    after: tuple[int, ...]  # tokens after the last result, up to the start of the assistant's next turn

    @classmethod
    def of(cls, tokenizer: Any, role: str = "tool", args: Mapping[str, Any] | None = None) -> "ToolTemplate":
        """Derive the tokens: render a fixed conversation with and without tool results, and compare the texts.

        Args:
            role: role of the messages with tool results.
            args: values of the template's variables, the same values as for the prompts.

        Raises:
            ValueError: the template rejects the role, changes the user's message if a result follows, does not render each result
                exactly once, puts different text around two results than around one, or puts nothing around a result.
            ValueError: the tokens do not decode to the rendered text.
        """
        prompt, one, two = (_render(tokenizer, role, count, args) for count in (0, 1, 2))
        around = _after_assistant(role, prompt, one).split(_RESULTS[0])
        head, found, rest = _after_assistant(role, prompt, two).partition(_RESULTS[0])
        middle, second, tail = rest.partition(_RESULTS[1])
        if len(around) != 2 or not found or not second:
            raise _template_error(role, "it must render each result exactly once", two)
        if around != [head, tail]:
            raise _template_error(role, "the text around results depends on their number", two)
        if not head + tail:
            raise _template_error(
                role, "it puts nothing around a result, so the result would look like the assistant's own text", one
            )
        before, between, after = (encode_text(tokenizer, text) for text in (head, middle, tail))
        _check_round_trip(tokenizer, role, [*before, *encode_text(tokenizer, _RESULTS[0]), *after], head, tail)
        closing = _tokens_after_last_turn(tokenizer, args)
        end = before[:1] if before and before[:1] == closing[:1] and before[0] in _end_tokens(tokenizer) else []
        return cls(tokenizer, tuple(end), tuple(before[len(end) :]), tuple(between), tuple(after))

    def encode(self, result: str, limit: int) -> list[int]:
        """Return the tokens of a result, at most `limit`. Names of special tokens in the result are encoded as plain text."""
        ids = encode_text(self.tokenizer, result, split_special_tokens=True)
        if len(ids) <= limit:
            return ids
        mark = encode_text(self.tokenizer, _CUT)[:limit]
        return ids[: limit - len(mark)] + mark

    def wrap(self, results: Sequence[Sequence[int]], *, turn_ended: bool) -> list[int]:
        """Return the tokens between an assistant's turn and its next turn, with the tokens of `results`.

        `turn_ended`: whether the policy has already sampled a token that ends the turn. If so, `end_of_turn` is left out.
        """
        inner: list[int] = []
        for result in results:
            inner += [*(self.between if inner else ()), *result]
        return [*(() if turn_ended else self.end_of_turn), *self.before, *inner, *self.after]


def encode_text(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the token ids of a text. No special tokens are added to those in the text."""
    return tokenizer(text, add_special_tokens=False, **options)["input_ids"]


def _render(tokenizer: Any, role: str, num_results: int, args: Mapping[str, Any] | None) -> str:
    """Render a user message, and if `num_results` > 0 also an assistant's turn and tool results."""
    from jinja2 import TemplateError  # comes with the tokenizer library

    messages = [dict(role="user", content=_USER)]
    if num_results:
        messages += [dict(role="assistant", content=_ASSISTANT)]
        messages += [dict(role=role, content=result) for result in _RESULTS[:num_results]]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(args or {}))
    except TemplateError as error:
        raise _template_error(role, f"it rejects messages of role {role!r} ({error})", "") from None


def _after_assistant(role: str, prompt: str, text: str) -> str:
    """Return the part of `text` after the assistant's turn. `prompt` is the text before this turn.

    A template may render an earlier turn of the assistant in another way than the last turn, for example without thoughts.
    This difference changes no token, because mrl never renders a response again.
    """
    user = prompt.rfind(_USER) + len(_USER)
    if not prompt[:user].endswith(_USER) or not text.startswith(prompt[:user]):
        raise _template_error(
            role, "it is not append-only: the text of the user's message changes if a result follows", text
        )
    _, found, rest = text[user:].partition(_ASSISTANT)
    if not found:
        raise _template_error(role, "it does not render the assistant's turn before a result", text)
    return rest


def _tokens_after_last_turn(tokenizer: Any, args: Mapping[str, Any] | None) -> list[int]:
    """Return the tokens that the template puts after the assistant's last turn."""
    messages = [dict(role="user", content=_USER), dict(role="assistant", content=_ASSISTANT)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, **(args or {}))
    return encode_text(tokenizer, text.rpartition(_ASSISTANT)[2])


def _end_tokens(tokenizer: Any) -> set[int]:
    return {tokenizer.eos_token_id, *tokenizer.all_special_ids}


def _check_round_trip(tokenizer: Any, role: str, ids: list[int], head: str, tail: str) -> None:
    """Raise ValueError if the parts, which were encoded separately, do not decode to the rendered text."""
    text, expected = tokenizer.decode(ids, clean_up_tokenization_spaces=False), head + _RESULTS[0] + tail
    if text != expected:
        raise _template_error(role, f"the tokens of its parts decode to another text, {text!r}", expected)


def _template_error(role: str, why: str, text: str) -> ValueError:
    shown = f" Rendered: {text!r}." if text else ""
    return ValueError(
        f"rollout.agent: the model's chat template cannot be used for tool results: {why}.{shown} Use a template with messages "
        f"of role {role!r}, or set rollout.agent.result_role to a role that the template has."
    )
