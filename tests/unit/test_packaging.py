import ast
import re
import runpy
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from itertools import chain
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mrl", "models", "parallel")
LOCKS = ("requirements.txt", "requirements-gpu.txt")
OF_EXTRAS = {"transformer_engine", "optuna"}  # declared in the extras `gpu` and `optuna`
TESTED = ("train", "dev", "optuna")  # extras that both locks hold


@pytest.fixture(scope="module")
def setup_arguments():
    """What setup.py says, read by running it."""
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", said.update)
        patch.chdir(ROOT)
        runpy.run_path("setup.py")
    return said


def locked(name):
    """Package -> version of a lock file."""
    pins = [Requirement(first) for first, *_ in entries(name)]
    return {canonicalize_name(pin.name): Version(str(pin.specifier).removeprefix("==")) for pin in pins}


def entries(name):
    """Of each package of a lock file: its pin, then its hashes."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def cuda_only():
    """The packages that the CPU lock leaves out."""
    lines = (ROOT / "requirements/overrides-cpu.txt").read_text().splitlines()
    return {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}


def source_files():
    return [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]


def imported_names(file):
    """Top-level modules that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize(("lock", "extras"), [("requirements.txt", TESTED), ("requirements-gpu.txt", (*TESTED, "gpu"))])
def test_the_lock_satisfies_every_range_of_setup_py(setup_arguments, lock, extras):
    pins = locked(lock)
    ranges = [setup_arguments["install_requires"], *(setup_arguments["extras_require"][extra] for extra in extras)]
    for requirement in map(Requirement, chain.from_iterable(ranges)):
        version = pins.get(canonicalize_name(requirement.name))
        assert version and version in requirement.specifier, f"setup.py wants {requirement}, {lock} has {version}"


def test_both_locks_pin_the_same_versions():
    cpu, gpu = map(locked, LOCKS)
    assert {name: (version, gpu.get(name)) for name, version in cpu.items() if gpu.get(name) != version} == {}


def test_cuda_only_kernels_are_in_the_gpu_lock_and_nowhere_else():
    cpu, gpu = map(set, map(locked, LOCKS))
    assert cuda_only() and cuda_only() <= gpu
    assert not cuda_only() & cpu
    assert "transformer-engine" in gpu - cpu


@pytest.mark.parametrize("lock", [*LOCKS, "requirements/uv.txt"])
def test_a_lock_is_versions_and_hashes_and_names_no_index_url_or_path(lock):
    hashed = re.compile(r"--hash=sha256:[0-9a-f]{64}")
    assert entries(lock), "it locks something"
    for pin, *hashes in entries(lock):
        assert re.fullmatch(r"[a-z0-9-]+(\[[a-z0-9_,-]+\])?==[\w.+!]+", pin), pin
        assert hashes and all(map(hashed.fullmatch, hashes)), f"{pin} has hashes {hashes}, expected sha256 of its files"
    assert "://" not in (ROOT / lock).read_text()


def test_the_locks_hold_what_setup_py_needs_and_no_package_besides(setup_arguments):
    """Each package is asked for by setup.py, or by another one of the lock."""
    extras = setup_arguments["extras_require"]
    wanted = chain(setup_arguments["install_requires"], *(extras[extra] for extra in TESTED))
    reached, queue = set(), [Requirement(line) for line in wanted]
    while queue:
        asked = queue.pop()
        key = (canonicalize_name(asked.name), *sorted(asked.extras))
        if key in reached:
            continue
        reached.add(key)
        queue += [each for each in needs(asked.name) if applies(each, asked.extras)]
    assert {name for name in locked("requirements.txt")} - {name for name, *_ in reached} == set()


def needs(name):
    """What an installed package asks for; none of one that is not for this machine."""
    try:
        return [Requirement(line) for line in distribution(name).requires or ()]
    except PackageNotFoundError:
        return []


def applies(requirement, extras):
    markers = [{"extra": extra} for extra in extras] or [{"extra": ""}]
    return requirement.marker is None or any(map(requirement.marker.evaluate, markers))


def test_every_import_is_a_dependency_that_setup_py_declares(setup_arguments):
    providers = packages_distributions()
    lines = [*setup_arguments["install_requires"], *setup_arguments["extras_require"]["train"]]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    undeclared = {}
    for file in source_files():
        for name in set(imported_names(file)) - set(PACKAGES) - sys.stdlib_module_names - OF_EXTRAS:
            if not declared & {canonicalize_name(provider) for provider in providers.get(name, [])}:
                undeclared[name] = str(file.relative_to(ROOT))
    assert undeclared == {}, "declare these in setup.py, then `make lock`"


def test_an_install_ships_the_three_packages_and_nothing_else(setup_arguments):
    assert {name.split(".")[0] for name in setup_arguments["packages"]} == set(PACKAGES)


def test_every_folder_with_code_is_a_package():
    folders = {file.parent for file in source_files()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_imports_point_one_way():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
