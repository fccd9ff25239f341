"""Text <-> token ids through a model folder's tokenizer and chat template, without importing transformers.

`tokenizers` and Jinja do the work that transformers would have them do, at 0.1 CPU-s of imports where
`transformers.AutoTokenizer` takes 6 (it imports torch). One thing differs on purpose: decoded text is never
"cleaned up" (`clean_up_tokenization_spaces`), so a reward sees exactly what was sampled.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = dict[str, str]  # role, content


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with the chat template of its model."""

    folder: Path
    tokenizer: Tokenizer
    template: Callable[..., str]
    special_tokens: dict[str, str]  # what templates may name: bos_token, eos_token, ...
    eos_id: int

    @classmethod
    def load(cls, folder: str | Path) -> "ChatTokenizer":
        """Read a Hugging Face folder.

        Raises:
            ValueError: the folder has no tokenizer, no chat template or no end-of-sequence token.
        """
        folder = Path(folder)
        found = _read_files(folder) or _ask_transformers(folder)
        tokenizer, template, special = found
        if template is None:
            raise ValueError(
                f"{folder}: the tokenizer has no chat template, and prompts are lists of messages; "
                "put a Jinja template into chat_template.jinja there."
            )
        eos = special.get("eos_token")
        eos_id = tokenizer.token_to_id(eos) if eos else None
        if eos_id is None:
            raise ValueError(f"{folder}: eos_token={eos!r} is no token; name one in tokenizer_config.json.")
        return cls(folder, tokenizer, _compile(template), special, eos_id)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, up to where the model's answer begins."""
        return self.template(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **self.special_tokens
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text; nothing is added."""
        return [e.ids for e in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, batch: Iterable[Sequence[int]]) -> list[str]:
        """Text of each sequence of ids, special tokens left out."""
        return self.tokenizer.decode_batch([[int(i) for i in ids] for ids in batch], skip_special_tokens=True)


_Parts = tuple[Tokenizer, str | None, dict[str, str]]


def _read_files(folder: Path) -> _Parts | None:
    """Tokenizer, template and special tokens; None when tokenizer.json does not hold the whole truth."""
    if not (folder / "tokenizer.json").is_file() or not (folder / "tokenizer_config.json").is_file():
        return None
    config = _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")
    special = {name: text for name, value in config.items() if name.endswith("_token") and (text := _content(value))}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = {token["content"]: int(i) for i, token in config.get("added_tokens_decoder", {}).items()}
    ids = {text: tokenizer.token_to_id(text) for text in special.values()}
    if None in ids.values() or any(tokenizer.token_to_id(text) != i for text, i in added.items()):
        return None
    tokenizer.add_special_tokens(list(ids))  # marks them as special; each has its id already
    return tokenizer, _template(folder, config), special


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(value: Any) -> str | None:
    """A special token is written as text or as {content: text, ...}."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {item["name"]: item["template"] for item in found}.get("default")
    return found


def _ask_transformers(folder: Path) -> _Parts:
    """The slow way, for tokenizers that transformers completes or converts."""
    from transformers import AutoTokenizer  # 6 CPU-s of imports

    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; expected a Hugging Face model with its tokenizer.")
    try:
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds, and each means: unusable
        raise ValueError(f"{folder}: transformers cannot load the tokenizer: {error}") from error
    backend = getattr(found, "backend_tokenizer", None)  # transformers 5: absent from tokenizers in pure Python
    if backend is None:
        raise ValueError(
            f"{folder}: {type(found).__name__} cannot be expressed as tokenizer.json, which is needed; "
            "convert it with AutoTokenizer.save_pretrained."
        )
    special = {name: str(value) for name, value in found.special_tokens_map.items() if isinstance(value, str)}
    return backend, found.get_chat_template() if found.chat_template else None, special


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, by which templates mark the assistant's words: passed through."""

    tags = {"generation"}  # noqa: RUF012  jinja's own attribute

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> Callable[..., str]:
    """A chat template in the environment that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= dict(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
    return environment.from_string(template).render


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)
