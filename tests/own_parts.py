"""The example of docs/concepts/algorithms.md: a Python file and a config whose algorithm consists of the user's functions."""

import re
from pathlib import Path

import yaml

_PAGE = (Path(__file__).parents[1] / "docs/concepts/algorithms.md").read_text()
SOURCE = re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL)[0]
"""Content of the module `my_parts`."""


def overrides() -> list[str]:
    """Return the config in the page as overrides for `mrl train`."""
    (text,) = re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL)
    nodes = {f"{section}.{name}": node for section, part in yaml.safe_load(text).items() for name, node in part.items()}
    return [f"{key}={{{', '.join(f'{k}: {v}' for k, v in node.items())}}}" for key, node in nodes.items()]
