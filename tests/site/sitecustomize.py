"""Python imports this module when a process of the tests starts, because tests/conftest.py puts this folder into PYTHONPATH.

transformers asks for the modules of all installed packages when it is imported. Python then reads the file lists of about 300
packages, for two CPU-seconds in each process. Here, the first process of an environment stores the answer in a file, and later
processes read it.
"""

import importlib.metadata
import json
import os
import sys
from pathlib import Path

_list_packages = importlib.metadata.packages_distributions
FOLDER = "MRL_TEST_PACKAGES"  # environment variable: folder with one file for each Python environment


def packages_distributions() -> dict[str, list[str]]:
    """Return what importlib.metadata.packages_distributions returns: module -> packages that contain it."""
    file = Path(os.environ[FOLDER], sys.prefix.strip("/").replace("/", "_") + ".json")
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        found = dict(_list_packages())
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found))
        partial.replace(file)
        return found


if os.path.isdir(os.environ.get(FOLDER, "")):
    importlib.metadata.packages_distributions = packages_distributions
