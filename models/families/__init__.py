"""One file per family: a table that a reader can check against Hugging Face by eye."""

import importlib
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from models.architecture import Family
from models.families.deepseek_v3 import DEEPSEEK_V3
from models.families.glm4_moe import GLM4_MOE
from models.families.llama import LLAMA
from models.families.mixtral import MIXTRAL
from models.families.qwen2 import QWEN2
from models.families.qwen3 import QWEN3, QWEN3_MOE
from models.hf_config import HFConfig

FAMILIES: dict[str, Family] = {
    family.architecture: family for family in (DEEPSEEK_V3, GLM4_MOE, LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)
}


def family_of(config: HFConfig) -> Family:
    """The family of `config`: its own `family` if it names one, else ours by its architecture.

    Raises:
        ValueError: no family has this architecture, or what `family` names cannot be had or has another one.
    """
    if config.family is None:
        if config.architecture not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise ValueError(
                f"{config.path}: architecture {config.architecture!r} is not supported; known: {known}. "
                "model.family can name a family of your own (docs/tutorials/model.md)."
            )
        return FAMILIES[config.architecture]
    family = load_family(config.family)
    if family.architecture != config.architecture:
        raise ValueError(
            f"model.family={config.family}: is a family of {family.architecture!r}, but {config.path} says "
            f"{config.architecture!r}; name the family of that architecture."
        )
    return family


@cache
def load_family(reference: str) -> Family:
    """The family at "package.module:NAME" or "/path/file.py:NAME".

    Raises:
        ValueError: nothing is there, it fails when imported, or it is no Family.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(f"model.family={reference}: expected 'package.module:NAME' or '/path/file.py:NAME'.")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # any failure of a user's module: shown with the key that named it
        raise ValueError(
            f"model.family={reference}: {place} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    if name not in vars(module):
        raise ValueError(f"model.family={reference}: {place} has no {name}; a Family is expected under that name.")
    family = vars(module)[name]
    if not isinstance(family, Family):
        raise ValueError(
            f"model.family={reference}: is a {type(family).__name__}; a models.architecture.Family is expected."
        )
    return family


def resolve_family_path(reference: str) -> str:
    """The same reference for a process with another working directory."""
    place, _, name = reference.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else reference


def _module_of_file(path: Path) -> ModuleType:
    name = f"family_file_{path.stem}"
    found = spec_from_file_location(name, path)
    assert found is not None and found.loader is not None, f"{path} ends in .py"
    module = module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickles of the file look it up
    found.loader.exec_module(module)
    return module
