"""Tokenizers as the data needs them: loaded without torch, and two small ones made here."""

from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]


def load_tokenizer(folder: str | Path) -> Any:
    """The fast tokenizer of a Hugging Face folder, with its chat template.

    Raises:
        ValueError: the folder has no tokenizer.json, no chat template or no end-of-sequence token.
    """
    from transformers import PreTrainedTokenizerFast  # 2 s; AutoTokenizer would import torch as well

    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: tokenizer.json is missing; save the model's fast tokenizer there.")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ValueError(f"{folder}: the tokenizer has no chat template; prompts are messages and need one.")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{folder}: the tokenizer has no eos_token; responses could not end.")
    return tokenizer


def encode_messages(tokenizer: Any, conversations: list[Messages]) -> list[list[int]]:
    """Token ids of each conversation, ready for the assistant's turn."""
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


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
