"""Secrets: the key that protects the engines of a run, and functions that refuse or hide secrets in configs."""

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

ENGINE_KEY = "MRL_ENGINE_KEY"
"""Environment variable with the engine key: HTTP clients must send this key to the engines.

If rollout.engine_urls names servers that are already running, set the variable to the key of these servers.
"""

ENGINE_KEYS = "MRL_ENGINE_KEYS"
"""Environment variable with keys of external servers that do not use MRL_ENGINE_KEY: URL=KEY, separated by spaces."""

HIDDEN = "(secret)"  # written in place of a secret
MIN_SECRET_LENGTH = 8  # characters; a shorter secret is not searched for in texts, because it may occur there by chance

# Pattern for the names of secrets. `is_secret_name` first replaces "-" by "_". The name `tokens` alone does not match, because it
# means tokens of the model.
_SECRET = re.compile(
    r"(^|_)(api_?keys?|(access|secret|private|watermark|engine)_keys?(_[a-z])?|(auth|access|api|hf|bearer|refresh)_?tokens?"
    r"|token|secrets?|authorization|credentials?)$|(password|passwd|passphrase)s?$",
    re.IGNORECASE,
)
# Names that match _SECRET but are special tokens of a tokenizer.
_NO_SECRET = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask|stop|start|end|image|think)_token$", re.IGNORECASE)
_HEADER_VALUE = re.compile(r"[!-~]+")  # a text that an HTTP header can contain
# An interpolation without a literal default: ${oc.env:NAME}, ${oc.env:NAME,null} or ${other.key}.
_FROM_ENVIRONMENT = re.compile(r"\$\{(oc\.env:[^,}]+(,\s*(null)?\s*)?|[\w.]+)\}")


class PlainSecretError(ValueError):
    """A config contains a secret in plain text."""


def engine_key() -> str:
    """Return the engine key in MRL_ENGINE_KEY. If there is none, set the variable to a random key that child processes inherit.

    Raises ValueError if the key has characters that an HTTP header cannot contain.
    """
    os.environ.setdefault(ENGINE_KEY, secrets.token_urlsafe(32))
    return engine_key_from(ENGINE_KEY)


def engine_key_from(variable: str) -> str:
    """Return the engine key in an environment variable.

    Raises ValueError if the key has characters that an HTTP header cannot contain. Without this check, the error messages of
    HTTP clients would show the key.
    """
    key = os.environ[variable]
    if not _HEADER_VALUE.fullmatch(key):
        raise ValueError(
            f"the key in the environment variable {variable} is empty, or has a space, a line end or a non-ASCII "
            f"character, which an HTTP header cannot contain; export it without them, for example {variable}=$(cat FILE)."
        )
    return key


def authorization(url: str = "") -> dict[str, str]:
    """Return the HTTP header that the engine at `url` requires.

    Raises ValueError if the key in MRL_ENGINE_KEY or MRL_ENGINE_KEYS has the wrong form.
    """
    by_url = _keys_by_url(os.environ.get(ENGINE_KEYS, ""))
    return {"authorization": f"Bearer {by_url.get(url.rstrip('/')) or engine_key()}"}


@cache
def _keys_by_url(value: str) -> dict[str, str]:
    """Parse the environment variable MRL_ENGINE_KEYS. Return URL -> key. The error message contains no part of a key."""
    keys = {}
    for number, word in enumerate(value.split(), 1):
        url, _, key = word.partition("=")
        if not url.startswith(("http://", "https://")) or not _HEADER_VALUE.fullmatch(key):
            raise ValueError(
                f"word {number} of the environment variable {ENGINE_KEYS}: expected URL=KEY with a URL of rollout.engine_urls, "
                "and a key without non-ASCII characters; separate several by spaces."
            )
        keys[url.rstrip("/")] = key
    return keys


def is_secret_name(name: str) -> bool:
    """Return whether a config key or environment variable with this name holds a secret."""
    name = name.replace("-", "_")  # HTTP headers use -
    return bool(_SECRET.search(name)) and not _NO_SECRET.search(name)


def refuse_plain_secrets(config: Mapping[Any, Any]) -> None:
    """Raise PlainSecretError if the config contains a secret in plain text, because files and trackers would show the secret.

    The interpolations in `config` must be unresolved, because a secret given as `${oc.env:NAME}` is allowed.
    """
    for key, value in flatten_config(config, into_lists=True):
        literal = _FROM_ENVIRONMENT.sub("", value) if isinstance(value, str) else value
        # "Bearer ${oc.env:NAME}" is allowed: its literal part is only the scheme of an authorization header.
        is_scheme = isinstance(literal, str) and literal.strip().lower() in ("bearer", "basic")
        if is_secret_name(key.rpartition(".")[2]) and literal not in (None, "", "???") and not is_scheme:
            name = key.rpartition(".")[2].upper().replace("-", "_")
            raise PlainSecretError(
                f"{key} holds a secret, which would be written to the run directory and to trackers; "
                f"put it into an environment variable and set {key}='${{oc.env:{name}}}'."
            )


def redacted(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a resolved config without secrets.

    Hides the values of keys with secret names. Also hides the values of secret environment variables in all other texts.
    """
    secret_values = [
        value for name, value in os.environ.items() if is_secret_name(name) and len(value) >= MIN_SECRET_LENGTH
    ]
    return {
        name: _redact_value(name, value, sorted(secret_values, key=len, reverse=True)) for name, value in config.items()
    }


def _redact_value(name: str, value: Any, secret_values: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {inner: _redact_value(str(inner), each, secret_values) for inner, each in value.items()}
    if is_secret_name(name) and value not in (None, ""):
        return HIDDEN
    if isinstance(value, list | tuple):
        return type(value)(_redact_value("", each, secret_values) for each in value)
    if isinstance(value, str):
        for secret in secret_values:
            value = value.replace(secret, HIDDEN)
    return value


def flatten_config(node: Any, *, into_lists: bool = False, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every key that is not a section.

    If `into_lists` is true, yield the elements of a list one by one, each with the key of the list. `prefix`: key of `node`.
    """
    if isinstance(node, Mapping):
        for name, value in node.items():
            key = f"{prefix}.{name}" if prefix else str(name)
            yield from flatten_config(value, into_lists=into_lists, prefix=key)
    elif into_lists and isinstance(node, list | tuple):
        for value in node:
            yield from flatten_config(value, into_lists=into_lists, prefix=prefix)
    else:
        yield prefix, node


def config_as_json(config: Any) -> dict[str, Any]:
    """Return a config dataclass as JSON values without secrets. Run records, checkpoints and trackers get this form."""
    return redacted(json.loads(json.dumps(asdict(config), default=str)))
