"""Versions of what would be imported, without importing it."""

import hashlib
import platform
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mrl.doctor.facts import Software
from mrl.doctor.lock import CHECKOUT, TESTED_GPU

NVIDIAS = "multi_tensor_apply"  # a part of NVIDIA's apex; the apex of PyPI is for web forms


def software(checkout: Path = CHECKOUT) -> Software:
    """Python, the tested packages, our own code."""
    packages = {name: _version(name) for name in TESTED_GPU}
    return Software(platform.python_version(), packages, source(checkout), foreign_apex())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def foreign_apex() -> str | None:
    """Folder of the package that `import apex` would find, where that is not NVIDIA's."""
    spec = PathFinder.find_spec("apex")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return str(folders[0]) if folders and not any((folder / NVIDIAS).is_dir() for folder in folders) else None


def source(checkout: Path) -> str:
    """Checksum over names and contents of our own code."""
    checksum = hashlib.sha256()
    for package in ("mrl", "models", "parallel"):
        for path in sorted((checkout / package).rglob("*.py")):
            checksum.update(str(path.relative_to(checkout)).encode() + b"\0" + path.read_bytes())
    return checksum.hexdigest()[:16]
