"""Loads fast tokenizers without torch, renders and encodes messages, and builds two small tokenizers for tiny models."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]

RESERVED = ("conversation", "messages", "chat_template", "tokenize", "add_generation_prompt", "return_dict")
"""Arguments of apply_chat_template that mrl sets itself. data.template_args cannot set them."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template that turns messages into text, and its variables."""

    template: str | None = None  # path of a Jinja file; None: the template of the tokenizer
    args: dict[str, Any] = field(default_factory=dict)  # values of the template's variables, such as enable_thinking


def read_tokenizer(folder: str | Path) -> Any:
    """Return the fast tokenizer of a Hugging Face folder.

    Raises ValueError if the folder has no tokenizer.json, or if the tokenizer has no end-of-sequence token.
    """
    from transformers import PreTrainedTokenizerFast  # the import takes 2 s; AutoTokenizer would also import torch

    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: tokenizer.json is missing; save the model's fast tokenizer there.")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{folder}: the tokenizer has no eos_token; responses could not end.")
    return tokenizer


def load_tokenizer(folder: str | Path, chat: ChatTemplate | None = None) -> Any:
    """Return the fast tokenizer of a Hugging Face folder. A template in `chat` replaces the tokenizer's own.

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
    """Return the token ids of each text, without special tokens."""
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

    The chat template renders a message as <|start|>, role, line break, content, <|end|>.
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
    from transformers import PreTrainedTokenizerFast  # takes 2 s

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.chat_template = template
    return tokenizer
