"""Writes and reads config.json of tiny models, for tests of the model families."""

import json
from copy import deepcopy
from pathlib import Path

from tiny_families import FAMILIES, SIZES, config_class

from models.architecture import Architecture
from models.families import family_of
from models.hf_config import HFConfig


def saved(folder: Path, prefix: str, **fields) -> dict:
    """Return the config.json that transformers writes."""
    fields = deepcopy(fields)  # some config classes modify their arguments
    config = config_class(prefix)(architectures=[f"{prefix}ForCausalLM"], **fields)
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def read(fields: dict, path="config.json") -> Architecture:
    config = HFConfig(path, fields)
    return family_of(config).read(config)


def tiny_fields(folder: Path, name: str) -> dict:
    """Return the config.json of a tiny model. `name`: key of tiny_families.FAMILIES."""
    prefix, its_own = FAMILIES[name]
    return saved(folder, prefix, **(SIZES | its_own))
