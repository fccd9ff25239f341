"""ResumePoint: the checkpoint that a run continues from, found and checked before any process starts."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import xxhash

from models.architecture import Architecture
from models.conversion.hf_reader import weights_fingerprint
from mrl.checkpoint.run_dir import check_unused, read_run_record
from mrl.checkpoint.store import Checkpoint, CheckpointStore, find_checkpoint
from mrl.config.schema import Config
from mrl.config.search_path import quote
from mrl.config.secrets import config_as_json, flatten_config
from parallel.trainer_config import LoraConfig

logger = logging.getLogger(__name__)

ROLLOUT_LOG_CONFIG_KEYS = (
    "model",
    "data",
    "reward",
    "algorithm",
    "optim",
    "lora",
    "critic",
    "roles",
    "sft",
    "megatron",
    "run.seed",
    "rollout",
    "trainer._target_",
    "trainer.arguments",
)
"""Config keys that decide which samples a run draws and what the run learns.

ROLLOUT_LOG_CONFIG_KEY_EXCEPTIONS has the exceptions.
A resumed run trains again on the responses of the rollout log (mrl.rollout.rollout_log) only if all these keys are unchanged.
"""
ROLLOUT_LOG_CONFIG_KEY_EXCEPTIONS = (
    "data.test",
    "data.test_sets",
    "critic.parallel",
    "critic.max_tokens_per_*",
    "critic.ddp",
    "roles.*.parallel",
    "roles.*.max_tokens_per_*",
    "roles.*.num_engines",
    "roles.*.engine_tp",
    "rollout.num_engines",
    "rollout.engine_tp",
    "rollout.engine_urls",
    "rollout.request_timeout_s",
    "rollout.record",
)
"""Keys in the sections of ROLLOUT_LOG_CONFIG_KEYS that may change, because they do not influence the samples."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run begins, and the config keys that have changed."""

    checkpoint: Checkpoint | None = None  # None: the run starts at step 0
    of_another_run: bool = False  # whether the checkpoint belongs to another run
    changes: tuple[str, ...] = ()  # result of `_changes` since the run's last start
    damaged: frozenset[int] = frozenset()  # steps of this run whose checkpoints have files with wrong hashes

    def rollout_log_key(self, config: Config, data_fingerprint: str) -> str:
        """Return a hash of the settings, data and initial weights that decide which samples this run draws."""
        initial = [config.resume, self.checkpoint.step] if self.of_another_run and self.checkpoint else None
        settings = [
            f"{key}={value!r}" for key, value in flatten_config(config_as_json(config)) if _decides_samples(key)
        ]
        return xxhash.xxh3_64_hexdigest(json.dumps([settings, data_fingerprint, initial]).encode())


_LORA_RANK, _TRAIN_VISION, _TRAIN_MTP = "lora.rank", "model.train_vision", "model.train_mtp"
_KEYS = (_LORA_RANK, "lora.alpha", "lora.targets", "lora.experts", _TRAIN_VISION, _TRAIN_MTP)
"""Names in the result of `model_identity` that are config keys."""
_LORA_BASE = "lora_base"  # name in the result of `model_identity`; its value is a hash of the base model's weights


def model_identity(arch: Architecture, lora: LoraConfig, model_path: str, train_vision: bool = False) -> dict[str, Any]:
    """Return the properties that a checkpoint and a model must have in common, as name -> value.

    The properties are the sizes of the model, the rank of its adapters (0 without LoRA), and whether the vision tower and the MTP
    layers are trained. With LoRA, there are further properties: which matrices have adapters, the scale of the adapters, and a
    hash of the weights of the base model in the folder `model_path`. The distributed checkpoint contains neither this scale nor
    the weights of the base model.
    """
    identity: dict[str, Any] = {**arch.sizes, "vocabulary": arch.vocab_size, "layers": arch.num_layers}
    identity |= {_LORA_RANK: lora.rank, _TRAIN_VISION: train_vision, _TRAIN_MTP: arch.mtp_layers > 0}
    if lora.rank:
        identity |= {"lora.alpha": lora.alpha, "lora.targets": sorted(lora.targets), "lora.experts": lora.experts}
        identity[_LORA_BASE] = weights_fingerprint(model_path)
    return identity


def find_resume_point(config: Config, *, check_hashes: bool = True) -> ResumePoint:
    """Find the checkpoint that the key `resume` selects for this run directory.

    If `check_hashes` is False, only state.json is checked by its hash, and all other files of the checkpoint are checked by their
    sizes. This takes less than a second. Raises ValueError if the run would overwrite results in the directory, if all
    checkpoints there are incomplete or damaged, or if `resume` names a folder without a complete and undamaged checkpoint.
    """
    folder = Path(config.run.dir).resolve()
    store = CheckpointStore(folder / "checkpoints")
    if config.resume == "never":
        check_unused(folder)
    record = _run_record(folder, store)
    if record is None or record["command"] != "train":
        check_unused(folder)
    changes = list(_changes(record["config"], config_as_json(config))) if record else []
    own = store.latest_intact(check_hashes=check_hashes) if record else None
    if record and own is None and not store.is_empty():
        raise ValueError(
            f"run.dir={folder}: none of its checkpoints is complete and undamaged ({folder / 'mrl.log'} says why); name another "
            "run.dir, or remove checkpoints/ to start again there."
        )
    other = None
    if own is None and config.resume not in ("auto", "never"):
        other = find_checkpoint(config.resume, check_hashes=check_hashes)
    for change in changes:
        logger.warning("the run is resumed with a changed key: %s", change)
    return ResumePoint(own or other, other is not None, tuple(changes), frozenset(store.damaged))


def continues_from_checkpoint(config: Config) -> bool:
    """Return whether the run will continue from a checkpoint. This function reads only state.json of a checkpoint."""
    store = CheckpointStore(Path(config.run.dir).resolve() / "checkpoints")
    return config.resume not in ("auto", "never") or store.latest() is not None


def _run_record(folder: Path, store: CheckpointStore) -> dict[str, Any] | None:
    """Return the command and config of the run in `folder`, from run.json or, if that is damaged, from the newest checkpoint.

    Raises ValueError if run.json is damaged and the run has no checkpoint.
    """
    try:
        return read_run_record(folder)
    except ValueError as error:
        if (newest := store.latest()) is None:
            raise ValueError(
                f"{error} There is no checkpoint that also has the command and the config; name another run.dir, or "
                f"remove {folder} to start again there."
            ) from None
        logger.warning("%s Command and config are taken from %s instead", error, newest.path)
        return dict(command="train", config=newest.state["config"])


def check_checkpoint_fits(resume: ResumePoint, expected: Mapping[str, Any], models: set[str]) -> None:
    """Raise ValueError if the checkpoint belongs to another model, or lacks one of `models` (actor, critic, reference).

    `expected`: `model_identity` of the run's actor.
    """
    if resume.checkpoint is None:
        return
    path = resume.checkpoint.path
    # earlier versions of mrl had no adapters, no vision towers and no MTP layers
    saved = {_LORA_RANK: 0, _TRAIN_VISION: False, _TRAIN_MTP: False} | resume.checkpoint.state.get("model", {})
    new_run = "or start a new run: resume=never with another run.dir."
    for key in _KEYS:
        if saved.get(key) != expected.get(key):
            value = quote(saved.get(key))
            raise ValueError(f"{path}: the checkpoint is from a run with {key}={value}; set the key to it, {new_run}")
    if saved.get(_LORA_BASE) != expected.get(_LORA_BASE):
        raise ValueError(
            f"{path}: the adapters in the checkpoint belong to a base model with other weights; set model.path to that model, "
            f"{new_run}"
        )
    different = [
        f"{name} {saved.get(name)} instead of {size}" for name, size in expected.items() if saved.get(name) != size
    ]
    if different:
        raise ValueError(
            f"{path}: the checkpoint belongs to another model ({'; '.join(different)}); set model.path to that model, {new_run}"
        )
    if removed := sorted(models & set(resume.checkpoint.removed)):
        raise ValueError(
            f"{path}: the {' and the '.join(removed)} of this checkpoint was removed, because it is old "
            "(checkpoint.keep_last, checkpoint.keep_last_critic); use a newer checkpoint of the run."
        )
    if missing := sorted(name for name in models if not (path / name).is_dir()):
        raise ValueError(
            f"{path}: the checkpoint has no {' and no '.join(missing)}, which this algorithm needs; use the algorithm of the "
            "checkpoint, or start a new run: resume=never with another run.dir."
        )


def check_pickles(resume: ResumePoint, models: set[str]) -> None:
    """Raise ValueError if a file of the checkpoint is missing, is truncated, or has a pickle with a type that is not allowed.

    `models`: parts of the checkpoint, such as actor, that the trainer ranks will load. The ranks repeat this check.
    """
    if resume.checkpoint is None:
        return
    from parallel.checkpoint_validation import validate_checkpoint  # imports torch, which a new run does not need here

    for name in sorted(models):
        validate_checkpoint(resume.checkpoint.path / name)


def _decides_samples(key: str) -> bool:
    def under(parents: tuple[str, ...]) -> bool:
        return any(fnmatchcase(key, parent) or fnmatchcase(key, f"{parent}.*") for parent in parents)

    return under(ROLLOUT_LOG_CONFIG_KEYS) and not under(ROLLOUT_LOG_CONFIG_KEY_EXCEPTIONS)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield `key: old -> new` for every config key whose value differs, except run.dir and resume."""
    old, new = dict(flatten_config(before)), dict(flatten_config(now))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key) and key not in ("run.dir", "resume"):
            yield f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
