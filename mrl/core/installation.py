"""Locations of mrl's own files, in a checkout and in an installed package, and the import path of a user's own modules.

A checkout has the folders `conf` and `slurm` and the lock files at its root. `setup.py` installs them into the package `mrl`.
"""

import os
import sys
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""Folder that contains the packages mrl, models and parallel: the root of a checkout, or site-packages."""
IS_CHECKOUT = not (PACKAGE_ROOT / "mrl" / "conf").is_dir()
"""Whether mrl runs from a checkout, and not from an installed package."""
DATA_ROOT = PACKAGE_ROOT if IS_CHECKOUT else PACKAGE_ROOT / "mrl"
"""Folder that contains `conf`, `slurm` and the lock files."""
CONF = DATA_ROOT / "conf"
"""Folder of the config groups."""
SLURM = DATA_ROOT / "slurm"
"""Folder of the Slurm scripts."""
WORKING_DIRECTORY = "MRL_WORKING_DIRECTORY"
"""Environment variable with the folder of a user's modules. Each process that imports mrl appends this folder to `sys.path`."""

SAFE_PATH = "mrl"
"""Value of the environment variable PYTHONSAFEPATH with which mrl starts Ray's processes.

Python then does not put the working directory first in `sys.path`. Importing mrl deletes the variable if it has this value,
so that programs that a user's own code starts do not inherit it."""


def python_path() -> str:
    """Return the PYTHONPATH with which processes on other hosts import this mrl. An installed package needs no entry."""
    entries = [str(PACKAGE_ROOT)] if IS_CHECKOUT else []
    return os.pathsep.join([*entries, *filter(None, [os.environ.get("PYTHONPATH")])])


def import_environment() -> dict[str, str]:
    """Return variables with which Ray's processes, and the processes that they start, search the working directory last."""
    return {"PYTHONSAFEPATH": SAFE_PATH, WORKING_DIRECTORY: os.environ.get(WORKING_DIRECTORY) or os.getcwd()}


def add_working_directory() -> None:
    """Make the modules in the working directory importable in this process and in all processes that it starts.

    The folder is the last entry of `sys.path`, so its modules never hide modules of mrl or of installed packages.
    """
    os.environ[WORKING_DIRECTORY] = folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
