"""Registry of model families. Each file of this package defines one family or several related ones.

The exceptions are decoder_blocks.py and vision_blocks.py, which have the building blocks that families share.
"""

import importlib
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from models.architecture import Family
from models.families.deepseek_v3 import DEEPSEEK_V3
from models.families.deepseek_v32 import DEEPSEEK_V32, GLM_MOE_DSA
from models.families.gemma3 import GEMMA3
from models.families.glm4 import GLM4
from models.families.glm4_moe import GLM4_MOE
from models.families.gpt_oss import GPT_OSS
from models.families.llama import LLAMA
from models.families.minimax_m2 import MINIMAX_M2
from models.families.ministral3 import MINISTRAL3
from models.families.mistral import MISTRAL
from models.families.mixtral import MIXTRAL
from models.families.nemotron_h import NEMOTRON_H
from models.families.olmo import OLMO2, OLMO3
from models.families.phi3 import PHI3
from models.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from models.families.qwen2_5_vl import QWEN2_5_VL
from models.families.qwen3_next import QWEN3_5, QWEN3_NEXT
from models.families.qwen3_vl import QWEN3_VL
from models.families.seed_oss import SEED_OSS
from models.families.smol_lm3 import SMOL_LM3
from models.hf_config import HFConfig

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *(
            DEEPSEEK_V3,
            DEEPSEEK_V32,
            GEMMA3,
            GLM4,
            GLM4_MOE,
            GLM_MOE_DSA,
            GPT_OSS,
            LLAMA,
            MINIMAX_M2,
            MINISTRAL3,
            MISTRAL,
        ),
        *(MIXTRAL, NEMOTRON_H, OLMO2, OLMO3, PHI3, QWEN2, QWEN2_5_VL, QWEN3, QWEN3_5, QWEN3_MOE, QWEN3_NEXT, QWEN3_VL),
        *(SEED_OSS, SMOL_LM3),
    )
}


def family_of(config: HFConfig) -> Family:
    """Return the family that `config.family` names. If no family is named, return the built-in family of the architecture.

    Raises:
        ValueError: no family supports the architecture, or `config.family` cannot be loaded or is for another architecture.
    """
    if config.family is None:
        if config.family_architecture not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise ValueError(
                f"{config.path}: architecture {config.architecture!r} is not supported; known: {known}. "
                "model.family can name a family of your own (docs/tutorials/model.md)."
            )
        return FAMILIES[config.family_architecture]
    family = load_family(config.family)
    if family.architecture != config.family_architecture:
        raise ValueError(
            f"model.family={config.family}: it is the family of {family.architecture!r}, but {config.path} has "
            f"{config.architecture!r}; name the family of that architecture."
        )
    return family


@cache
def load_family(reference: str) -> Family:
    """Import the family at "package.module:NAME" or "/path/file.py:NAME".

    Raises:
        ValueError: the reference is malformed, the module cannot be imported, or the object is missing or not a Family.
    """
    location, _, name = reference.rpartition(":")
    if not location or not name.isidentifier():
        raise ValueError(f"model.family={reference}: expected 'package.module:NAME' or '/path/file.py:NAME'.")
    try:
        module = _module_of_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    except Exception as error:  # a user's module may raise anything; the message names the config key
        raise ValueError(
            f"model.family={reference}: {location} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    if name not in vars(module):
        raise ValueError(f"model.family={reference}: {location} has no {name}; expected a Family of that name.")
    family = vars(module)[name]
    if not isinstance(family, Family):
        raise ValueError(
            f"model.family={reference}: it is a {type(family).__name__}; expected a models.architecture.Family."
        )
    return family


def resolve_family_path(reference: str) -> str:
    """Return `reference` with an absolute path, so that processes with another working directory can use it."""
    location, _, name = reference.rpartition(":")
    return f"{Path(location).resolve()}:{name}" if location.endswith(".py") else reference


def _module_of_file(path: Path) -> ModuleType:
    name = f"family_file_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"no import spec for {path}, although its name ends in .py"
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look for the module in this dict
    spec.loader.exec_module(module)
    return module
