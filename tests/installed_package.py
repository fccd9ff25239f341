"""A wheel of this repository, installed into an environment that finds all other packages in the environment of the tests."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BUILD = "import setuptools.build_meta as backend, sys; print(getattr(backend, sys.argv[1])(sys.argv[2]))"
SITE_PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
TIMEOUT_S = 300


def copy_sources(folder: Path) -> Path:
    """Copy the files that git does not ignore into `folder`, except tests, docs and benchmarks, and return `folder`.

    A build needs a copy, because it writes files beside its sources.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source = REPOSITORY / name
        if source.is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(source.read_bytes())
            (folder / name).chmod(source.stat().st_mode)
    return folder


def build(kind: str, sources: Path, folder: Path) -> Path:
    """Build a distribution with setuptools, as `pip wheel` does. `kind`: build_wheel or build_sdist."""
    command = [sys.executable, "-c", BUILD, kind, str(folder)]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@dataclass(frozen=True)
class InstalledPackage:
    """An environment in which the wheel is installed."""

    python: Path

    @property
    def site_packages(self) -> Path:
        return self.python.parents[1] / SITE_PACKAGES

    def run(self, *arguments: str, cwd: Path, timeout_s: float = TIMEOUT_S, **variables: str):
        """Run `mrl` with these arguments in `cwd`, and return the finished process. `variables`: environment variables."""
        return run([str(self.python.with_name("mrl")), *arguments], cwd, timeout_s, variables)

    def python_program(self, text: str, cwd: Path, timeout_s: float = TIMEOUT_S, **variables: str):
        """Run a Python program in `cwd`, and return the finished process. `variables`: environment variables."""
        return run([str(self.python), "-c", text], cwd, timeout_s, variables)


def run(command: Sequence[str], cwd: Path, timeout_s: float, variables: Mapping[str, str]):
    """Run a command in the environment of this process, but without its variables PYTHON* and MRL_*."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MRL_"))}
    return subprocess.run(
        command, cwd=cwd, env=plain | variables, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def install(wheel: Path, folder: Path) -> InstalledPackage:
    """Make an environment in `folder` and unpack the wheel into it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=TIMEOUT_S)
    made = InstalledPackage(folder / "bin/python")
    with zipfile.ZipFile(wheel) as content:
        for name in content.infolist():
            path = Path(content.extract(name, made.site_packages))
            path.chmod(0o644 | (name.external_attr >> 16) & 0o111)
    # This .pth file adds the site-packages of the tests to sys.path. Python does not read .pth files in a folder that it adds in
    # this way, so it does not find an mrl that is installed there in editable mode.
    (made.site_packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = folder / "bin/mrl"
    script.write_text(
        f"#!{made.python}\nimport sys\nfrom mrl.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    script.chmod(0o755)
    return made
