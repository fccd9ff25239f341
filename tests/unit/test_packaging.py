import ast
import http.server
import io
import re
import runpy
import subprocess
import sys
import threading
import zipfile
from functools import partial
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
OF_EXTRAS = {
    "transformer_engine",
    "optuna",
    "tensorboard",
    "mlflow",
    "wandb_workspaces",
}  # modules of the extras `gpu`, `optuna` and `trackers`
TESTED = ("train", "dev", "optuna", "trackers")  # extras that both locks hold


@pytest.fixture(scope="module")
def setup_arguments():
    """Run setup.py, and return the arguments with which it calls setup()."""
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", said.update)
        patch.chdir(ROOT)
        runpy.run_path("setup.py")
    return said


def locked(name) -> dict[str, Version]:
    """Return package -> version of a lock file."""
    pins = [Requirement(first) for first, *_ in entries(name)]
    return {str(canonicalize_name(pin.name)): Version(str(pin.specifier).removeprefix("==")) for pin in pins}


def entries(name):
    """Return, for each package of a lock file, a list of its pin and its hashes."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def cuda_only():
    """Return the packages that are missing in the CPU lock."""
    lines = (ROOT / "requirements/overrides-cpu.txt").read_text().splitlines()
    return {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}


def source_files():
    return [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]


def imported_names(file):
    """Yield the top-level modules that a file imports, at its top or inside functions."""
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
    """Each package of a lock is a requirement of setup.py, or of another package of this lock."""
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
    """Return the requirements of a package. A package that is not for this machine is not installed, and has none."""
    try:
        return [Requirement(line) for line in distribution(name).requires or ()]
    except PackageNotFoundError:
        return []


def applies(requirement, extras):
    markers = [{"extra": extra} for extra in extras] or [{"extra": ""}]
    return requirement.marker is None or any(map(requirement.marker.evaluate, markers))


@pytest.mark.extended
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


HEADERS = runpy.run_path(str(ROOT / "scripts/check_headers.py"))["HEADERS"]


def test_the_gpu_lock_has_the_headers_that_transformer_engine_is_compiled_with():
    assert {"transformer-engine-torch", *HEADERS.values()} <= set(locked("requirements-gpu.txt"))
    assert "transformer-engine-torch" in cuda_only() or "transformer-engine-torch" not in locked("requirements.txt")


CUDA_PARTS = ("cccl", "crt", "cupti", "nvcc", "nvrtc", "runtime")


def test_the_locked_cuda_compiler_has_the_version_of_the_cuda_headers_that_torch_pins():
    """CUDA's C++ library refuses a compiler of another version, so no kernel of an engine would compile."""
    pins = {str(name): version.release[:2] for name, version in locked("requirements-gpu.txt").items()}
    versions = {name: pins[name] for name in [*(f"nvidia-cuda-{part}" for part in CUDA_PARTS), "nvidia-nvvm"]}
    assert set(versions.values()) == {pins["cuda-toolkit"]}, versions
    (image,) = re.findall(r"^FROM nvidia/cuda:(\d+)\.(\d+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert tuple(map(int, image)) == pins["cuda-toolkit"], "engines in the image compile with the toolkit of the image"


def test_all_locked_binaries_are_for_the_cuda_of_torch():
    """Packages with the suffix -cu13 are built for CUDA 13. Libraries of another CUDA cannot be loaded beside those of torch."""
    pins = locked("requirements-gpu.txt")
    of_torch = str(pins["cuda-toolkit"].major)
    built_for = {name: found[1] for name in pins if (found := re.search(r"-cu(\d\d)$", name))}
    built_for.pop("nvidia-cutlass-dsl-libs-cu12")  # nvidia-cutlass-dsl installs cu12 and cu13, and loads what fits
    assert len(built_for) > 6 and set(built_for.values()) == {of_torch}, built_for


@pytest.mark.parametrize("name", ["torch", "sglang"])
def test_the_gpu_lock_has_the_versions_that_torch_and_sglang_are_built_for(name):
    """Wheels that compile kernels (flashinfer, deep-gemm, triton) fit the wheel with compiled kernels (sglang-kernel)."""
    pins = locked("requirements-gpu.txt")
    wanted = [requirement for requirement in needs(name) if applies(requirement, ())]
    unfit = {str(one): str(pins.get(canonicalize_name(one.name))) for one in wanted if not fits(one, pins)}
    assert len(wanted) > 10 and unfit == {}


def fits(requirement, pins):
    version = pins.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def test_engines_accept_the_locked_kernels_when_they_start():
    """At its start, SGLang refuses packages with kernels that are older than the versions in its source."""
    source = Path(str(distribution("sglang").locate_file("sglang/srt/entrypoints/engine.py"))).read_text()
    least = dict(re.findall(r'assert_pkg_version\(\s*"([\w-]+)",\s*"([\w.]+)"', source))
    assert {"flashinfer_python", "sglang-kernel"} <= least.keys()
    pins = locked("requirements-gpu.txt")
    assert all(pins[canonicalize_name(name)] >= Version(version) for name, version in least.items()), least


def test_transformer_engine_is_compiled_against_the_library_of_its_own_version():
    pins = locked("requirements-gpu.txt")
    cuda = pins["cuda-toolkit"].major
    assert pins["transformer-engine"] == pins["transformer-engine-torch"] == pins[f"transformer-engine-cu{cuda}"]
    assert f"/nvidia/cu{cuda}/include" in (ROOT / "scripts/install_lock.sh").read_text()


FAKE_UV = """#!/bin/bash
folder=$(dirname "$0")/call.$(ls -d "$(dirname "$0")"/call.* 2>/dev/null | wc -l)
mkdir "$folder" && echo "$*" >"$folder/arguments" && env >"$folder/environment" && cp "${@: -1}" "$folder/packages"
"""


@pytest.mark.parametrize("lock", LOCKS)
def test_packages_are_installed_with_hashes_and_transformer_engine_is_compiled_last(tmp_path, lock):
    """The compilation needs no CUDA toolkit, and downloads no wheel that is not in the lock."""
    (tmp_path / "uv").write_text(FAKE_UV)
    (tmp_path / "uv").chmod(0o755)
    command = [ROOT / "scripts/install_lock.sh", tmp_path / "uv", sys.executable, lock, "--offline"]
    subprocess.run(command, cwd=ROOT, check=True)
    calls = [
        {name: (folder / name).read_text() for name in ("arguments", "environment", "packages")}
        for folder in sorted(tmp_path.glob("call.*"))
    ]
    for call in calls:
        for option in ("--no-deps", "--require-hashes", f"--build-constraints {lock}", "--offline"):
            assert option in call["arguments"]
    assert "".join(call["packages"] for call in calls).count("==") == len(entries(lock))
    assert "transformer-engine-torch==" not in calls[0]["packages"]
    if lock == "requirements.txt":
        assert len(calls) == 1
        return
    (compiled,) = calls[1:]
    assert compiled["packages"].startswith("transformer-engine-torch==")
    assert "--no-build-isolation" in compiled["arguments"], "an isolated build has no nvidia-cuda-crt"
    assert "NVTE_PYTORCH_FORCE_BUILD=TRUE" in compiled["environment"], "otherwise a wheel is downloaded from GitHub"
    assert "NVTE_BUILD_USE_NVIDIA_WHEELS=1" in compiled["environment"]
    assert re.search(r"^CPLUS_INCLUDE_PATH=.*/nvidia/cu13/include/cccl", compiled["environment"], re.MULTILINE)


@pytest.mark.parametrize("status", [0, 2])
def test_a_new_lock_has_wheels_of_all_packages_that_are_not_built(tmp_path, status):
    (tmp_path / "uv").write_text(f"{FAKE_UV}exit {status}\n")
    (tmp_path / "python").write_text("#!/bin/bash\n")  # check_headers.py would need the network
    for name in ("uv", "python"):
        (tmp_path / name).chmod(0o755)
    command = [ROOT / "scripts/check_wheels.sh", tmp_path / "uv", tmp_path / "python", "requirements-gpu.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    arguments, packages = ((tmp_path / "call.0" / name).read_text() for name in ("arguments", "packages"))
    for option in ("--dry-run", "--no-deps", "--require-hashes", "--only-binary :all:"):
        assert option in arguments
    assert (
        packages.count("==") == len(entries("requirements-gpu.txt")) - 1 and "transformer-engine-torch" not in packages
    )
    assert done.returncode == bool(status) and ("install_lock.sh needs its compiler" in done.stderr) == bool(status)
    assert re.search(
        r"^lock:.*\n(\t.*\n)*\t.*check_wheels\.sh uv .*requirements-gpu", (ROOT / "Makefile").read_text(), re.M
    )


# For "pip compile", this uv writes the addresses of the wheels to the file that follows -o.
UV_WITH_WHEELS = """#!/bin/bash
[ "$2" = compile ] || exit 0
grep -q ^nvidia-cublas== "${{@: -1}}" && ! grep -q hash "${{@: -1}}" || exit 3
while [ "$1" != -o ]; do shift; done
cp {pylock} "$2"
"""


class FileHandler(http.server.SimpleHTTPRequestHandler):
    """Sends parts of files, as PyPI does."""

    def send_head(self):
        bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if bounds is None:
            return super().send_head()
        first, last = map(int, bounds.groups())
        part = Path(self.translate_path(self.path)).read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        return io.BytesIO(part)

    def log_message(self, *args):
        pass


@pytest.fixture
def wheel_server(tmp_path):
    """Address of a web server with the files of tmp_path."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(FileHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def write_wheels(folder, server, without):
    """Write a wheel for each header, and a pylock.toml with their addresses. The header `without` is in no include folder."""
    packages = []
    for header, name in HEADERS.items():
        include = "nvidia" if header == without else "nvidia/cu13/include/cccl" if "cccl" in name else "nvidia/include"
        with zipfile.ZipFile(folder / f"{name}.whl", "w") as wheel:
            wheel.writestr("nvidia/lib/large.so", bytes(300_000))
            wheel.writestr(f"{include}/{header}", "")
        packages.append(f'[[packages]]\nname = "{name}"\nwheels = [{{ url = "{server}/{name}.whl" }}]\n')
    (folder / "made.toml").write_text("\n".join(packages))
    (folder / "uv").write_text(UV_WITH_WHEELS.format(pylock=folder / "made.toml"))
    (folder / "uv").chmod(0o755)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("without", [None, "nv/target", "cudnn.h"])
def test_the_wheels_of_a_new_lock_contain_the_headers_that_transformer_engine_is_compiled_with(
    tmp_path, wheel_server, without
):
    write_wheels(tmp_path, wheel_server, without)
    command = [ROOT / "scripts/check_wheels.sh", tmp_path / "uv", sys.executable, "requirements-gpu.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    missing = [f"check_headers: {without}: not in {wheel_server}/{HEADERS[without]}.whl"] if without else []
    assert (done.returncode, done.stderr.splitlines()) == (bool(without), missing)


def test_make_setup_and_the_image_install_the_lock_in_the_same_way():
    script = "install_lock.sh"
    dockerfile, setup_script = (ROOT / "Dockerfile").read_text(), (ROOT / "scripts/setup.sh").read_text()
    assert f'scripts/{script} "$uv" .venv/bin/python "$lock"' in setup_script
    assert re.search(rf"\./{script} \S+ \S+ requirements-gpu\.txt", dockerfile)
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split()}
    (sources,) = re.findall(r"^COPY (.*) \./$", dockerfile, re.MULTILINE)
    assert set(sources.split()) <= allowed, "every file of COPY is in .dockerignore"
    assert "CUDA_HOME=/usr/local/cuda" in dockerfile, "engines compile kernels with the toolkit of the image"


def test_the_image_has_apex_only_if_it_is_asked_for():
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    (apex,) = [stage for stage in stages if "NVIDIA/apex" in stage]
    assert apex.startswith("locked AS with-apex") and stages[-1].strip() == "locked"


def test_imports_point_one_way():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
