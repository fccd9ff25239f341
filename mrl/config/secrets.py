"""Secrets of a run: the key of its engines, and how secrets of a config stay out of everything that is written."""

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

ENGINE_KEY = "MRL_ENGINE_KEY"
"""Environment variable with the key that engines ask for. Set it for servers that run already (rollout.engine_urls)."""

HIDDEN = "(secret)"
SHORTEST = 8  # characters of an environment variable that is looked for in texts: a shorter one may be there by chance

_SECRET = re.compile(  # of names with "_" for "-"; `tokens` alone are a model's
    r"(^|_)(api_?keys?|(access|secret|private|watermark|engine)_keys?(_[a-z])?|(auth|access|api|hf|bearer|refresh)_?tokens?"
    r"|token|secrets?|authorization|credentials?)$|(password|passwd|passphrase)s?$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask|stop|start|end|image|think)_token$", re.IGNORECASE)
_SENDABLE = re.compile(r"[!-~]+")
_FROM_ENVIRONMENT = re.compile(r"\$\{(oc\.env:[^,}]+(,\s*(null)?\s*)?|[\w.]+)\}")


class WrittenSecretError(ValueError):
    """A config has a secret in plain text."""


def engine_key() -> str:
    """The key of this run's engines: MRL_ENGINE_KEY, or a random one that children of this process inherit.

    Raises ValueError as `key_in`.
    """
    os.environ.setdefault(ENGINE_KEY, secrets.token_urlsafe(32))
    return key_in(ENGINE_KEY)


def key_in(variable: str) -> str:
    """The key in an environment variable.

    Raises ValueError where no HTTP header can carry it; HTTP clients would put it into the texts of their errors.
    """
    key = os.environ[variable]
    if not _SENDABLE.fullmatch(key):
        raise ValueError(
            f"the key in the environment variable {variable} is empty, or has a space, a line end or a letter that is not "
            f"ASCII, which no HTTP header can carry; export it without, as by {variable}=$(cat FILE)."
        )
    return key


def authorization() -> dict[str, str]:
    """The HTTP header that engines ask for."""
    return {"authorization": f"Bearer {engine_key()}"}


def is_secret(name: str) -> bool:
    """Whether a key or an environment variable of this name holds a secret, by its name."""
    name = name.replace("-", "_")  # of an HTTP header
    return bool(_SECRET.search(name)) and not _NO_SECRET.search(name)


def refuse_literals(config: Mapping[Any, Any]) -> None:
    """Raise WrittenSecretError where a secret is written into a config, which ends in files and trackers.

    `config`: unresolved, so that `${oc.env:NAME}` is still to be seen.
    """
    for key, value in flatten_config(config, into_lists=True):
        literal = _FROM_ENVIRONMENT.sub("", value) if isinstance(value, str) else value
        scheme = isinstance(literal, str) and literal.strip().lower() in ("bearer", "basic")
        if is_secret(key.rpartition(".")[2]) and literal not in (None, "", "???") and not scheme:
            name = key.rpartition(".")[2].upper().replace("-", "_")
            raise WrittenSecretError(
                f"{key} holds a secret, which would be written to the run's folder and to trackers; "
                f"put it into an environment variable and set {key}='${{oc.env:{name}}}'."
            )


def redacted(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a resolved config that may be written: secrets by name, and values of secret environment variables, hidden."""
    known = [value for name, value in os.environ.items() if is_secret(name) and len(value) >= SHORTEST]
    return {name: _hidden(name, value, sorted(known, key=len, reverse=True)) for name, value in config.items()}


def _hidden(name: str, value: Any, known: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {inner: _hidden(str(inner), each, known) for inner, each in value.items()}
    if is_secret(name) and value not in (None, ""):
        return HIDDEN
    if isinstance(value, list | tuple):
        return type(value)(_hidden("", each, known) for each in value)
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, HIDDEN)
    return value


def flatten_config(node: Any, *, into_lists: bool = False, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every key that is not a section.

    `into_lists`: yield the elements of a list one by one, each with the key of the list.
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
    """Return a config dataclass as JSON values, with secrets hidden: what is written to files and trackers."""
    return redacted(json.loads(json.dumps(asdict(config), default=str)))
