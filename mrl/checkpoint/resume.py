"""Where a run goes on from: decided, with all that can be wrong about it, before any process starts."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from models.spec import Architecture
from mrl.checkpoint.run_dir import begun_with, check_unused
from mrl.checkpoint.store import Checkpoint, CheckpointStore, find
from mrl.config.schema import Config
from mrl.config.secrets import redacted

logger = logging.getLogger(__name__)

DECIDE = ("model", "data", "reward", "algorithm", "critic", "teacher", "sft", "megatron", "run.seed", "rollout")
"""Keys that decide what is sampled and learnt: journaled samples of other settings are not trained."""
DO_NOT = ("critic.parallel", "teacher.parallel", "rollout.num_engines", "rollout.engine_tp", "rollout.engine_urls")
DO_NOT += ("rollout.start_timeout_s", "rollout.request_timeout_s", "rollout.record")


@dataclass(frozen=True)
class Resume:
    """How a run begins."""

    checkpoint: Checkpoint | None = None  # None: from its first step
    of_another_run: bool = False  # the checkpoint
    changes: tuple[str, ...] = ()  # keys that an earlier part of the run had otherwise, for a person

    def journal_key(self, config: Config, data: str) -> str:
        """What samples of this run are known by: settings, data and weights that decide them."""
        began = [config.resume, self.checkpoint.step] if self.of_another_run and self.checkpoint else None
        decided = [f"{key}={value!r}" for key, value in _leaves(plain(config)) if _decides(key)]
        return xxhash.xxh3_64_hexdigest(json.dumps([decided, data, began]).encode())


def plain(config: Config) -> dict[str, Any]:
    """The config as JSON has it, without its secrets."""
    return redacted(json.loads(json.dumps(asdict(config), default=str)))


def sizes(arch: Architecture) -> dict[str, int]:
    """What a checkpoint's model is known by."""
    return arch.sizes | dict(vocabulary=arch.vocab_size, layers=arch.num_layers)


def decide(config: Config) -> Resume:
    """What `resume` means for the run's folder as it is; raises ValueError."""
    folder = Path(config.run.dir).resolve()
    begun = begun_with(folder)
    if config.resume == "never" or begun is None or begun["command"] != "train":
        check_unused(folder)
    changes = list(_changes(begun["config"], plain(config))) if begun else []
    store = CheckpointStore(folder / "checkpoints")
    if begun and store.all_torn():
        raise ValueError(
            f"run.dir={folder}: none of its checkpoints is whole ({folder / 'mrl.log'} says why); name another run.dir, "
            "or remove checkpoints/ to begin again there."
        )
    own = store.latest() if begun else None
    other = find(config.resume) if own is None and config.resume not in ("auto", "never") else None
    for change in changes:
        logger.warning("resumed with %s", change)
    return Resume(own or other, other is not None, tuple(changes))


def check_fits(resume: Resume, arch: Architecture, models: set[str]) -> None:
    """Raise ValueError where the checkpoint is of another model, or lacks one of `models` (actor, critic, reference)."""
    if resume.checkpoint is None:
        return
    path, wanted = resume.checkpoint.path, sizes(arch)
    held = resume.checkpoint.state.get("model", {})
    other = [f"{name} {held.get(name)}, here {size}" for name, size in wanted.items() if held.get(name) != size]
    if other:
        raise ValueError(
            f"{path}: a checkpoint of another model ({'; '.join(other)}); name its own model.path, or start anew: "
            "resume=never with another run.dir."
        )
    if missing := sorted(name for name in models if not (path / name).is_dir()):
        raise ValueError(
            f"{path}: has no {' and no '.join(missing)}, which this algorithm needs; start anew, or keep the algorithm."
        )


def _decides(key: str) -> bool:
    def under(parents: tuple[str, ...]) -> bool:
        return any(key == parent or key.startswith(f"{parent}.") for parent in parents)

    return under(DECIDE) and not under(DO_NOT)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """`key: old -> new` of every value that differs."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key) and key not in ("run.dir", "resume"):
            yield f"{key}: {old.get(key)!r} -> {new.get(key)!r}"


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no section."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
