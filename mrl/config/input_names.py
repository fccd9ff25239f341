"""Fetches models and data that the config names by an id on the Hugging Face Hub or by a URL, and returns their local paths.

This happens before any process starts. A name that is an existing local path is never looked up elsewhere.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mrl.config.schema import Config, Node
from parallel.durable_files import atomic_folder

# owner/name, then optionally @ and a revision, and for data optionally a colon and a pattern of files
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<pattern>\S+))?")
DATA_SUFFIXES = (".parquet", ".jsonl")
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
CONFIG_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


@dataclass(frozen=True)
class _HubName:
    """A repository on the Hub."""

    repo_id: str
    revision: str | None
    pattern: str | None  # pattern of data files in the repository; None: no pattern is given

    @classmethod
    def of(cls, name: str) -> "_HubName | None":
        """Return the repository that `name` names, or None if `name` does not have the form of an id."""
        match = _HUB_ID.fullmatch(name)
        if match is None or match["id"].endswith(DATA_SUFFIXES):
            return None
        return cls(match["id"], match["revision"], match["pattern"])


def resolve_inputs(config: Config, weights: bool = True) -> Config:
    """Return the config with a local path in place of every Hub id and every URL of a model or of data.

    The keys are model.path, critic.path, roles.NAME.path, generate.base, sft.train, sft.test, data.train, data.test,
    data.offline.path, and the files of data.mixture and data.test_sets. With `weights` false, only the configs and tokenizers
    of models are fetched from the Hub.

    Raises ValueError if something cannot be fetched. A path that is missing and cannot be an id on the Hub stays unchanged.
    """
    # data.inputs is a plug-in; each text among its arguments may be the path of a file or folder that it creates
    created_paths = [str(value) for value in (config.data.inputs or {}).values() if isinstance(value, str)]

    def exists(name: str) -> bool:
        """Return whether `name` is the path of an existing file or folder, or of an input that data.inputs creates."""
        return Path(name).exists() or any(
            name == path or name.startswith(f"{path.rstrip('/')}/") for path in created_paths
        )

    def model(section: Any, key: str) -> Any:
        name = section.path
        return section if not name or exists(name) else replace(section, path=resolve_model(name, key, weights))

    def role(node: Any, key: str) -> Any:
        name = node.get("path") if isinstance(node, dict) else None  # later checks report values that are not paths
        return node if not isinstance(name, str) or exists(name) else node | {"path": resolve_model(name, key, weights)}

    def files(names: Sequence[str], key: str, split: str) -> list[str]:
        found = ([name] if exists(name) else resolve_data(name, key, split) for name in names)
        return [path for paths in found for path in paths]

    def one_file(name: str | None, key: str, split: str) -> str | None:
        found = files([name], key, split) if name else [name]
        if len(found) != 1:
            raise ValueError(
                f"{key}={name}: expected one file, but {len(found)} files match; add a :PATTERN that matches one."
            )
        return found[0]

    def supervised(name: str | None, split: str) -> str | None:
        return one_file(name, f"sft.{split}", split)

    given = config.roles
    roles = {name: role(node, f"roles.{name}.path") for name, node in given.items()}
    fetched = {given[name]["path"]: node["path"] for name, node in roles.items() if node != given[name]}
    test_sets = _map_files(config.data.test_sets, lambda names, key: files(names, f"data.test_sets.{key}", "test"))
    data = replace(
        config.data,
        train=files(config.data.train, "data.train", "train"),
        test=files(config.data.test, "data.test", "test"),
        mixture=_map_files(config.data.mixture, lambda names, key: files(names, f"data.mixture.{key}", "train")),
        test_sets=_with_fetched_tokenizers(test_sets, fetched),
        offline=replace(config.data.offline, path=one_file(config.data.offline.path, "data.offline.path", "train")),
    )
    base = config.generate.base
    return replace(
        config,
        reward=_with_fetched_tokenizers(config.reward, fetched),
        generate=replace(config.generate, base=resolve_model(base, "generate.base", weights) if base else base),
        model=model(config.model, "model.path"),
        critic=model(config.critic, "critic.path"),
        roles=roles,
        sft=replace(config.sft, train=supervised(config.sft.train, "train"), test=supervised(config.sft.test, "test")),
        data=data,
    )


def _with_fetched_tokenizers(node: Any, fetched: Mapping[str, str]) -> Any:
    """Return a copy of `node` in which the tokenizers of fetched models are local paths.

    The reward class RewardModel has an argument `tokenizer`, which repeats the path of the role that serves it. `fetched` maps
    the path of each fetched role, as the config gives it, to the local path.
    """
    if isinstance(node, dict):
        return {
            name: fetched.get(value, value)
            if name == "tokenizer" and isinstance(value, str)
            else _with_fetched_tokenizers(value, fetched)
            for name, value in node.items()
        }
    return [_with_fetched_tokenizers(each, fetched) for each in node] if isinstance(node, list) else node


def _map_files(sources: Node, resolve: Callable[[list[str], str], list[str]]) -> Node:
    """Return named sources with `resolve` applied to their files. Invalid sources stay unchanged, and later checks report them.

    `resolve`: function (names of files, name of the source) -> local paths.
    """

    def of(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return value | {"files": of(value["files"], key)} if value.get("files") else value
        names = [value] if isinstance(value, str) else value
        return (
            resolve(names, key) if isinstance(names, list) and all(isinstance(each, str) for each in names) else value
        )

    return {key: of(value, key) for key, value in sources.items()}


def resolve_model(name: str, key: str = "model.path", weights: bool = True) -> str:
    """Return the local folder of a model.

    Args:
        name: a path, an id on the Hub such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REVISION, or a URL that fsspec reads.
        key: config key of the name, for error messages.
        weights: whether to fetch weights. If false, only config and tokenizer are fetched from the Hub.

    Raises ValueError if the model cannot be fetched. A path that does not exist, and that cannot be an id on the Hub, is returned
    unchanged; later checks refuse it.
    """
    if Path(name).exists():
        return name
    if "://" in name:
        return str(_fetch_url(name, key))
    if (hub := _HubName.of(name)) and not hub.pattern:
        return str(_snapshot(hub, "model", f"{key}={name}", MODEL_FILES if weights else CONFIG_FILES))
    return name


def resolve_data(name: str, key: str, split: str) -> list[str]:
    """Return the local files of the data that `name` names. If `name` is a path, the result is [name].

    For an id on the Hub, the result contains all parquet and jsonl files of the repository that match the pattern after the
    colon, as in openai/gsm8k@REVISION:main/train*. If the id has no pattern, the result contains the files whose path contains
    `split`, which is train or test.

    Raises ValueError if the data cannot be fetched, or if no file matches.
    """
    if Path(name).exists():
        return [name]
    if "://" in name:
        return [str(_fetch_url(name, key))]
    if not (hub := _HubName.of(name)):
        return [name]
    pattern = hub.pattern or f"*{split}*"
    folder = _snapshot(hub, "dataset", f"{key}={name}", (pattern,))
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.suffix in DATA_SUFFIXES}
    matching = [str(path) for relative, path in paths.items() if fnmatch(relative, pattern)]
    if not matching:
        raise ValueError(
            f"{key}={name}: no parquet or jsonl file of {hub.repo_id} matches {pattern!r}; name a pattern of its files, as in "
            f"{hub.repo_id}:data/train*."
        )
    return matching


def _snapshot(hub: _HubName, kind: str, given: str, files: Sequence[str]) -> Path:
    """Return the folder of a repository in the local Hub cache (HF_HOME). Fetches missing `files` if the Hub can be reached.

    `given`: KEY=NAME, for error messages. `files`: patterns of the needed files. Raises ValueError if they cannot be fetched.
    """
    import httpx  # these imports take half a second; commands whose names are all local skip them
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    def snapshot(local_files_only: bool) -> Path:
        settings = dict(repo_type=kind, revision=hub.revision, allow_patterns=list(files))
        return Path(huggingface_hub.snapshot_download(hub.repo_id, **settings, local_files_only=local_files_only))

    try:
        return snapshot(local_files_only=False)
    except (OSError, ValueError, httpx.HTTPError) as error:
        with suppress(OSError, ValueError):
            return snapshot(local_files_only=True)
        match error:
            case GatedRepoError():
                reason = "access to it is restricted; accept its terms on the Hub, and log in with `hf auth login` or HF_TOKEN"
            case RevisionNotFoundError():
                reason = f"the {kind} {hub.repo_id} on the Hub has no revision {hub.revision}"
            case RepositoryNotFoundError():
                reason = (
                    f"there is no such path, and no {kind} with this id on the Hub; correct it, or log in with HF_TOKEN"
                )
            case _:  # no network, HF_HUB_OFFLINE, or an invalid id
                command = f"hf download {hub.repo_id}" + (f" --revision {hub.revision}" if hub.revision else "")
                command += " --repo-type dataset" if kind == "dataset" else ""
                reason = (
                    f"there is no such path, the {kind} is not in the cache {huggingface_hub.constants.HF_HUB_CACHE}, and the "
                    f"Hub cannot be reached ({type(error).__name__}); where there is a network, run `{command}`"
                )
    raise ValueError(f"{given}: {reason}.")


def _listing(filesystem: Any, source: str) -> list[tuple[str, str]]:
    """Return (name, description) of each file at a source. The description changes if the content of the file changes."""
    if "http" in filesystem.protocol:  # a URL of HTTP names one file; listing it would fetch the file
        info = filesystem.info(source)
        version = {name: info[name] for name in ("ETag", "Content-MD5", "Digest") if name in info}
        # If the server sends no version, the content may have changed since the previous call, so each call returns another
        # description.
        return [(source, str({"size": info.get("size"), **(version or {"fetched": time.time_ns()})}))]
    entries = filesystem.find(source, detail=True)
    return sorted((name, str({**info, "name": name})) for name, info in entries.items())


def _fetch_url(url: str, key: str) -> Path:
    """Return a local copy of the file or folder at a URL. If the URL is a local path, return the path.

    Copies are in the folder mrl of XDG_CACHE_HOME (default: ~/.cache), and are made again if the source changes.
    Raises ValueError if the URL cannot be read.
    """
    import fsspec  # takes a third of a second; commands without URLs skip it
    from fsspec.implementations.local import LocalFileSystem

    try:
        filesystem, source = fsspec.url_to_fs(url)
        if isinstance(filesystem, LocalFileSystem):
            return Path(source)
        listing = _listing(filesystem, source)
        if not listing:
            raise FileNotFoundError(source)
        digest = hashlib.blake2b(repr([url, listing]).encode(), digest_size=12).hexdigest()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mrl" / digest
        is_folder = [name for name, _ in listing] != [source]
        with atomic_folder(cache) as partial:
            if partial:  # None: the copy exists already
                for name, _ in listing:
                    target = partial / Path(source).name / (os.path.relpath(name, source) if is_folder else "")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    filesystem.get_file(name, str(target))
        return cache / Path(source).name
    except ImportError as error:
        raise ValueError(f"{key}={url}: {error}") from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{key}={url}: cannot be read ({type(error).__name__}: {error}); check the URL and the credentials of its file "
            "system, or name a local path."
        ) from None
