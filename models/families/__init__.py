"""One file per family: a table that a reader can check against Hugging Face by eye."""

from models.families.mixtral import MIXTRAL
from models.families.qwen3 import QWEN3
from models.families.qwen3_moe import QWEN3_MOE
from models.spec import Family, HFConfig

FAMILIES: dict[str, Family] = {family.architecture: family for family in (MIXTRAL, QWEN3, QWEN3_MOE)}


def family_of(config: HFConfig) -> Family:
    """The family whose architecture `config` names; raises ValueError naming the known ones."""
    if config.architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{config.path}: architecture {config.architecture!r} is not supported; known: {known}.")
    return FAMILIES[config.architecture]
