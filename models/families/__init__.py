"""One file per family: a table that a reader can check against Hugging Face by eye."""

from models.families.qwen3 import QWEN3
from models.spec import Family, HFConfig

FAMILIES: dict[str, Family] = {family.architecture: family for family in (QWEN3,)}


def family_of(config: HFConfig) -> Family:
    """The family whose architecture `config` names; raises ValueError naming the known ones."""
    if config.architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(f"{config.path}: architecture {config.architecture!r} is not supported; known: {known}.")
    return FAMILIES[config.architecture]
