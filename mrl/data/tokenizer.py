"""Tokenizers as the data needs them: loaded without torch, and two small ones made here."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]

RESERVED = ("conversation", "messages", "chat_template", "tokenize", "add_generation_prompt", "return_dict")


@dataclass(frozen=True)
class ChatTemplate:
    """How messages become text: by the model's chat template or by one of the user's, and with which arguments."""

    template: str | None = None  # a file; None: the tokenizer's own
    args: dict[str, Any] = field(default_factory=dict)  # variables of the template, such as enable_thinking


def read_tokenizer(folder: str | Path) -> Any:
    """The fast tokenizer of a Hugging Face folder; raises ValueError where it has no tokenizer.json or no end token."""
    from transformers import PreTrainedTokenizerFast  # 2 s; AutoTokenizer would import torch as well

    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: tokenizer.json is missing; save the model's fast tokenizer there.")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{folder}: the tokenizer has no eos_token; responses could not end.")
    return tokenizer


def load_tokenizer(folder: str | Path, chat: ChatTemplate | None = None) -> Any:
    """The fast tokenizer of a Hugging Face folder, with its chat template or the one that `chat` names.

    Raises:
        ValueError: the folder has no tokenizer.json, no chat template or no end-of-sequence token; the template of `chat` is
            missing or cannot be parsed; an argument of `chat` is one that the template does not read.
    """
    chat = chat or ChatTemplate()
    tokenizer = read_tokenizer(folder)
    if chat.template:
        if not Path(chat.template).is_file():
            raise ValueError(f"data.chat_template={chat.template}: no such file; expected a Jinja chat template.")
        tokenizer.chat_template = Path(chat.template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        raise ValueError(
            f"{folder}: the tokenizer has no chat template; prompts are messages and need one: name a file in "
            "data.chat_template."
        )
    _check_template(tokenizer, chat, folder)
    return tokenizer


def _check_template(tokenizer: Any, chat: ChatTemplate, folder: str | Path) -> None:
    from jinja2 import TemplateError, TemplateSyntaxError

    where = f"data.chat_template={chat.template}" if chat.template else f"{folder}: chat template"
    words = set(re.findall(r"[A-Za-z_]\w*", str(tokenizer.chat_template)))
    for name in chat.args:
        if name in RESERVED or name not in words:
            near = difflib.get_close_matches(name, words, n=1)
            hint = f"; did you mean {near[0]!r}?" if near and name not in RESERVED else "; leave it out."
            raise ValueError(f"data.template_args.{name}: not a variable of the chat template{hint}")
    try:
        render(tokenizer, [{"role": "user", "content": "?"}], chat.args)
    except TemplateSyntaxError as error:
        raise ValueError(f"{where}: line {error.lineno}: {error.message}") from error
    except TemplateError:
        pass  # it may refuse this conversation; that of each row is looked at when its turn comes


def render(tokenizer: Any, messages: Messages, args: dict[str, Any] | None = None) -> str:
    """The text of a conversation, ready for the assistant's turn; raises jinja2.TemplateError where the template refuses."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(args or {}))


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, nothing added."""
    quick = dict(add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False)
    return tokenizer(texts, **quick)["input_ids"] if texts else []


def encode_messages(
    tokenizer: Any, conversations: list[Messages], args: dict[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of each conversation, ready for the assistant's turn."""
    return encode_texts(tokenizer, [render(tokenizer, messages, args) for messages in conversations])


@cache
def _decoder(folder: str) -> Any:
    return read_tokenizer(folder)


def decode(folder: str, responses: Sequence[Sequence[int]]) -> list[str]:
    """Text of each response, special tokens left out; the folder's tokenizer is read once per process."""
    return _decoder(folder).batch_decode(responses, skip_special_tokens=True)


def check_vocabulary(rows: list[list[int]], vocab_size: int) -> None:
    """Raise ValueError when a row has a token that a model of `vocab_size` does not know."""
    largest = max((max(ids) for ids in rows if ids), default=0)
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer gives token {largest}, but the model's vocabulary ends at {vocab_size - 1}; "
            "the tokenizer in the model's folder belongs to another model."
        )


CHARACTERS = "0123456789+-*= "


def character_tokenizer(vocab_size: int = 32) -> Any:
    """One token per character of sums and products; unused ids decode to reserved names, so every id has a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS]
    words += [f"<r{i}>" for i in range(vocab_size - len(words))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return _finished(raw, "{% for message in messages %}{{ message['content'] }}{% endfor %}", unk_token="<unk>")


def byte_tokenizer() -> Any:
    """One token per UTF-8 byte: any text comes back exactly. Chat turns stand between <|start|>role and <|end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # the 256 printable stand-ins for bytes
    vocab = {letter: i for i, letter in enumerate(letters)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    template = (
        "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    return _finished(raw, template, additional_special_tokens=["<|start|>", "<|end|>"])


def _finished(raw: Any, template: str, **special: Any) -> Any:
    from transformers import PreTrainedTokenizerFast  # 2 s, needed only where tokenizers are made

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
