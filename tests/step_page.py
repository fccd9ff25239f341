"""The examples of docs/concepts/loop.md: the function `rewarded_only`, and a config for `by_source` with fitting data."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_PAGE = (Path(__file__).parents[1] / "docs/concepts/loop.md").read_text()
(SOURCE,) = re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL)
"""Content of the module `my_steps`."""
(CONFIG,) = re.findall(r"```yaml\n(.*?)```", _PAGE, re.DOTALL)
"""Content of the file step/two_sources.yaml in the user's config folder."""
DATA_SOURCES = ("gsm8k", "math")
"""Names of the data sources in this file."""


def config_arguments(folder: Path) -> list[str]:
    """Write the example's config file into a config folder, and return the arguments with which mrl uses it."""
    (folder / "step").mkdir(parents=True)
    (folder / "step/two_sources.yaml").write_text(CONFIG)
    return [f"--config-dir={folder}", "step=two_sources"]


def data_argument(inputs: Path, folder: Path) -> str:
    """Write the quickstart's training prompts as two data sources, and return the argument with which mrl reads them.

    The first data source contains the prompts with an even number, and the second contains those with an odd number.
    """
    rows, files = pq.read_table(inputs / "train.parquet").to_pylist(), []
    for rest, name in enumerate(DATA_SOURCES):
        own = [row | {"data_source": name} for row in rows if int(row["reward_model"]["ground_truth"]) // 2 % 2 == rest]
        files.append(f"{folder / name}.parquet")
        pq.write_table(pa.Table.from_pylist(own), files[-1])
    return f"data.train=[{','.join(files)}]"
