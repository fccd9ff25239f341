"""The file and the config of docs/concepts/algorithms.md in which every part of an algorithm is a function of the user."""

import re
from pathlib import Path

import yaml

_PAGE = (Path(__file__).parents[1] / "docs/concepts/algorithms.md").read_text()
SOURCE = re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL)[0]
"""Content of the module `my_parts`."""


def overrides() -> list[str]:
    """Return the config of the page as overrides of mrl train."""
    (text,) = re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL)
    nodes = {f"{section}.{name}": node for section, part in yaml.safe_load(text).items() for name, node in part.items()}
    return [f"{key}={{{', '.join(f'{k}: {v}' for k, v in node.items())}}}" for key, node in nodes.items()]
