"""The package mrl as a user installs it: a wheel in an environment of its own, with commands that start in any folder."""

import json
import re
import shlex
import sysconfig
import tarfile
from pathlib import Path

import pytest
from installed_package import REPOSITORY, build, copy_sources, install

from mrl.core.code_locations import WORKING_DIRECTORY, import_environment

INSTALLED = ("conf", "slurm")
LIGHT = re.compile(r"(?i)(ray|sglang|wandb)([-_.].*)?$|__editable__.*|mrl-.*")
"""Names in site-packages that an environment without the extra `train` does not have."""


REWARD = """
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True)
class Even:
    whole_groups: ClassVar[bool] = True

    def __call__(self, responses):
        return [float(n % 2) for n in range(len(responses))]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from a source distribution, as `uv build` does."""
    folder = tmp_path_factory.mktemp("build")
    archive = build("build_sdist", copy_sources(folder / "sources"), folder)
    with tarfile.open(archive) as content:
        content.extractall(folder / "unpacked", filter="data")
    return build("build_wheel", next((folder / "unpacked").iterdir()), folder)


@pytest.fixture(scope="module")
def package(wheel, tmp_path_factory):
    return install(wheel, tmp_path_factory.mktemp("installed"))


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.extended
def test_an_installed_package_has_all_files_that_commands_read(package):
    installed = package.site_packages / "mrl"
    for name in INSTALLED:
        assert files_of(REPOSITORY / name) == files_of(installed / name)
    for lock in ("requirements.txt", "requirements-gpu.txt"):
        assert (installed / lock).read_bytes() == (REPOSITORY / lock).read_bytes()
    assert (installed / "slurm/train.sbatch").stat().st_mode & 0o111, "sbatch's script starts it"


@pytest.fixture
def crowded(tmp_path):
    """Make a working directory with modules that have the names of mrl's packages, and with a reward of the user."""
    (tmp_path / "models").mkdir()
    for name in ("models/__init__.py", "parallel.py", "mrl.py"):
        (tmp_path / name).write_text(f"raise SystemError('{name} of the user is imported')\n")
    (tmp_path / "my_rewards.py").write_text(REWARD)
    return tmp_path


@pytest.mark.extended
def test_a_slurm_job_of_an_installed_package_uses_its_scripts_and_its_arguments_compose_again(package, crowded):
    """Modules in the working directory do not hide those of mrl."""
    keys = ["cluster.nodes=1", "cluster.gpus_per_node=0", "reward._target_=my_rewards.Even"]
    done = package.run("train", "cluster=slurm", "cluster.dry_run=true", *keys, cwd=crowded)
    assert done.returncode == 0, done.stderr
    exports, _, call = done.stdout.partition("\nexec ")
    assert f"export MRL_SCRIPTS={package.site_packages}/mrl/slurm" in exports
    assert "export MRL_CHECKOUT=''" in exports and f"export MRL_PYTHON={package.python}" in exports
    script, *arguments = shlex.split(call.replace("\\\n", ""))
    assert script == "$MRL_SCRIPTS/train.sbatch"
    again = package.run("train", *arguments, "--cfg", "job", cwd=crowded)
    assert again.returncode == 0 and "_target_: my_rewards.Even" in again.stdout, again.stderr


SCORE = """
import os, time
from mrl.rewards.scorer import WorkerPool
from my_rewards import Even
pool = WorkerPool([Even()], workers=1, memory_gb=4)
(scores,) = pool.run(0, [["a", "b"]], sample_s=60.0, deadline=time.monotonic() + 60)
print([score.value for score in scores], "PYTHONSAFEPATH" in os.environ)
pool.close()
"""


@pytest.mark.extended
def test_worker_processes_of_rewards_find_only_the_own_modules_of_the_user(package, crowded):
    """In a run, Ray sets these variables in the process that owns the worker processes."""
    ray_variables = import_environment() | {WORKING_DIRECTORY: str(crowded)}
    done = package.python_program(SCORE, cwd=crowded, **ray_variables)
    assert done.returncode == 0 and done.stdout == "[0.0, 1.0] False\n", done.stdout + done.stderr


@pytest.mark.extended
@pytest.mark.parametrize("name", ["models/__init__.py", "parallel.py"])
def test_a_module_in_pythonpath_that_hides_one_of_mrl_is_an_error_in_one_line(package, crowded, tmp_path, name):
    for other in {"models/__init__.py", "parallel.py", "mrl.py"} - {name}:
        (crowded / other).unlink()
    done = package.run("train", cwd=tmp_path, PYTHONPATH=str(crowded))
    package_name = name.partition("/")[0].removesuffix(".py")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"mrl: mrl needs its own package '{package_name}' .* Python finds {crowded}/{name}; .*\n", done.stderr
    )


@pytest.mark.extended
@pytest.mark.parametrize("folder", ["empty", "crowded"])
def test_an_installed_package_trains_in_any_folder(package, folder, tmp_path, request):
    """In `crowded`, worker processes of the rollout worker import the user's reward, but not the user's other modules."""
    reward = []
    if folder == "crowded":
        request.getfixturevalue("crowded")
        reward = ["reward._target_=my_rewards.Even"]
    keys = ["experiment=quickstart", "trainer.max_steps=2", "sft.steps=2", "run.dir=run"]
    done = package.run("train", *keys, *reward, cwd=tmp_path, timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert reward == [] or {step["reward/mean"] for step in steps} == {0.5}


@pytest.fixture(scope="module")
def light(wheel, tmp_path_factory):
    """Install the package in an environment without the extra `train`."""
    made = install(wheel, tmp_path_factory.mktemp("light"))
    packages = tmp_path_factory.mktemp("packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not LIGHT.match(path.name):
            (packages / path.name).symlink_to(path)
    (made.site_packages / "tests.pth").write_text(f"{packages}\n")
    return made


@pytest.mark.extended
@pytest.mark.parametrize(
    ("command", "missing"), [("train", "ray, sglang"), ("certify", "ray"), ("certify engine", "ray, sglang")]
)
def test_a_run_without_the_extra_train_is_an_error_in_one_line(light, tmp_path, command, missing):
    done = light.run(*command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    name = command.split()[0]
    assert done.stderr == f"mrl {name}: not installed: {missing}; run pip install 'mrl[train]'\n"


@pytest.mark.extended
def test_planning_needs_neither_ray_nor_sglang(light, tmp_path):
    done = light.run("plan", "experiment=quickstart", cwd=tmp_path)
    assert done.returncode == 0 and "GPU memory is unknown" in done.stdout, done.stderr


@pytest.mark.extended
def test_a_conversion_needs_neither_ray_nor_sglang(light, tmp_path):
    assert light.run("plan", "experiment=quickstart", cwd=tmp_path).returncode == 0  # makes the model
    model = "model.path=outputs/quickstart/inputs/model"
    done = light.run("convert", "to-megatron", model, "output=converted", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "converted/metadata.json").exists(), done.stderr
    done = light.run("convert", "check", model, "checkpoint=converted", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
