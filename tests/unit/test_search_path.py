"""Every command reads a user's own config folders. A message names a file in these folders that cannot be composed."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from mrl.commands import doctor, plan, train, train_process
from mrl.commands import sweep as sweep_command
from mrl.config import hydra_entry
from mrl.config.search_path import with_absolute_search_path
from mrl.data.synthetic_tasks import make_doubling_task
from mrl.sweep import launcher
from mrl.sweep.points import load_sweep, write_status

SLURM = ["cluster=slurm", "cluster.nodes=1", "cluster.gpus_per_node=0"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs") / "made"
    make_doubling_task(folder)
    return folder


@pytest.fixture
def own(tmp_path, monkeypatch, inputs):
    """Create the folder `own conf` in the working directory, with an experiment and a new group."""
    monkeypatch.chdir(tmp_path)
    write(
        "experiment/mine.yaml",
        f"# @package _global_\ndefaults: [quickstart]\ndata: {{inputs: {{folder: {inputs}}}}}\nrun: {{name: mine}}\n",
    )
    write("my_group/a.yaml", "# @package optim\nlr: 0.125\n")
    write("my_group/b.yaml", "# @package optim\nlr: 0.25\n")
    return tmp_path / "own conf"


def write(name, text):
    path = Path("own conf", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def compose(words):
    return hydra_entry.compose_config(hydra_entry.prepare_arguments(words))


def test_config_dir_and_searchpath_become_one_override_with_absolute_folders(own, tmp_path):
    (tmp_path / "other").mkdir()
    words = ["--cfg", "job", "--config-dir", "own conf", "a=1", "hydra.searchpath=[other,pkg://lab.conf]"]
    both = f'hydra.searchpath=["{own}",{tmp_path}/other,pkg://lab.conf]'
    assert with_absolute_search_path(words) == [both, "--cfg", "job", "a=1"]
    assert with_absolute_search_path([both, "-cd=own conf", "a=1"]) == [both, "a=1"]
    assert with_absolute_search_path(["a=1"]) == ["a=1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config-dir", "nosuch"], "--config-dir nosuch: expected a folder with config groups"),
        (["--config-dir"], "expected a folder with config groups"),
        (["hydra.searchpath=own"], r"expected a list of folders, such as hydra\.searchpath=\[my_conf\]"),
        (["hydra.searchpath=[nosuch]"], "'.*/nosuch' is no folder"),
    ],
)
def test_a_config_folder_that_is_missing_is_an_error(own, words, message):
    with pytest.raises(ValueError, match=message):
        compose(words)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("word", ["my_group=a", "+my_group=a"])
def test_an_own_group_sets_keys_of_the_section_that_its_file_names(own, word):
    config = compose(["--config-dir=own conf", "experiment=mine", word])
    assert (config.optim.lr, config.run.name) == (0.125, "mine")


@pytest.mark.extended
def test_an_own_group_in_a_defaults_list_is_overridden(own):
    write("experiment/grouped.yaml", "# @package _global_\ndefaults:\n  - mine\n  - /my_group: a\n")
    words = ["--config-dir=own conf", "experiment=grouped"]
    assert [compose([*words, *more]).optim.lr for more in ([], ["my_group=b"])] == [0.125, 0.25]


@pytest.mark.parametrize(("key", "near"), [("my_grop", "my_group"), ("experment", "experiment"), ("optm", "optim")])
def test_an_unknown_name_is_an_error_with_the_nearest_key_or_group(own, key, near):
    with pytest.raises(ValueError, match=f"unknown key '{key}'; did you mean '{near}'"):
        compose(["--config-dir=own conf", f"{key}=a"])


def printed_job(arguments, capsys):
    """Return the arguments of `mrl train` in the job that a dry run prints."""
    assert train_process.main([*arguments, *SLURM, "cluster.dry_run=true"]) == 0
    _, _, call = capsys.readouterr().out.partition("\nexec ")
    return shlex.split(call.replace("\\\n", ""))[1:]


@pytest.mark.extended
def test_the_arguments_of_a_slurm_job_compose_in_any_folder(own, capsys, monkeypatch):
    arguments = printed_job(["--config-dir", "own conf", "experiment=mine", "my_group=a"], capsys)
    assert f'hydra.searchpath=["{own}"]' in arguments
    monkeypatch.chdir("/")
    config = compose(arguments)
    assert (config.optim.lr, config.run.name) == (0.125, "mine")


@pytest.mark.extended
def test_plan_and_doctor_read_the_own_folder(own, capsys):
    plan.main(["--config-dir", "own conf", "experiment=mine", "my_group=a", "--json"])
    assert json.loads(capsys.readouterr().out)["fits"]
    assert doctor.read_requirements(["--config-dir=own conf", "experiment=mine", "my_group=a"]).mistakes == []
    parsed = doctor._parser().parse_intermixed_args(["--config-dir", "own conf", "experiment=nosuch"])
    (mistake,) = doctor.read_requirements(doctor._config_keys(parsed)).mistakes
    assert "mine" in mistake and "nosuch" in mistake


@pytest.mark.extended
def test_the_points_of_a_sweep_compose_in_any_folder(own, tmp_path, monkeypatch):
    def start(sweep, index):
        sweep.point_folder(index).mkdir()
        write_status(sweep.point_folder(index), 0, 1.0)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(launcher, "start_point", start)
    words = ["experiment=mine", "my_group=a,b", "run.dir=s"]
    assert sweep_command.main(["-m", "--config-dir", "own conf", *words]) == 0
    monkeypatch.chdir("/")
    sweep = load_sweep(tmp_path / "s")
    assert [compose(sweep.overrides(index)).optim.lr for index in (0, 1)] == [0.125, 0.25]
    assert compose(shlex.split(sweep.command(1))[2:]).optim.lr == 0.25


@pytest.mark.extended
def test_a_dry_run_of_a_slurm_sweep_prints_the_job_array_and_submits_nothing(own, tmp_path, monkeypatch, capsys):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\necho 7\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    words = ["--config-dir", "own conf", "experiment=mine", "my_group=a,b", "run.dir=s"]
    with pytest.raises(SystemExit) as end:
        train.main(["-m", *words, *SLURM, "--dry-run"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and "#SBATCH --array=0,1%1" in out and f"export MRL_SWEEP={tmp_path}/s" in out
    points = [line.partition(": ")[2] for line in out.splitlines() if line.startswith("# point ")]
    assert [compose(shlex.split(point)[2:]).optim.lr for point in points] == [0.125, 0.25]
    assert not (tmp_path / "submitted").exists() and not (tmp_path / "s").exists()


@pytest.mark.extended_after(2)
@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("experiment/bad.yaml", "optim: {lr: 1}\n", "line 1: the line `# @package` is missing"),
        ("experiment/bad.yaml", "# @package _global_\noptim:\n\tlr: 1\n", "line 3, column 1: a tab; yaml indents"),
        ("experiment/bad.yaml", "# @package _global_\noptim: {lr: [1}\n", "line 2, column 15: expected ',' or ']'"),
        ("experiment/bad.yaml", "# @package _global_\n\noptim:\n  lrr: 1\n", "line 4: unknown key 'optim.lrr'; did"),
        ("experiment/bad.yaml", "# @package _global_\noptim:\n  lr: x\n", "line 3: optim.lr: Value 'x' of type 'str'"),
        (
            "my_group/bad.yaml",
            "lr: 1\n",
            "line 1: the line `# @package` is missing, so the keys of the file are read as",
        ),
    ],
)
def test_a_file_that_cannot_be_composed_is_named_with_its_line(own, file, text, message):
    write(file, text)
    with pytest.raises(ValueError) as error:
        compose(["--config-dir=own conf", "experiment=mine", f"{file.partition('/')[0]}=bad"])
    assert str(error.value).startswith(f"{own}/{file}, {message}") and "\n" not in str(error.value)


def test_a_group_without_a_file_names_its_files():
    with pytest.raises(
        ValueError, match=r"model=null: a config group cannot be null; expected one of none, quickstart_moe"
    ):
        compose(["model=null"])


@pytest.mark.parametrize("command", [train_process.main, plan.main], ids=["train", "plan"])
@pytest.mark.extended
def test_the_help_of_hydra_is_printed(command, capsys):
    with pytest.raises(SystemExit) as end:
        command(["--hydra-help"])
    assert not end.value.code and capsys.readouterr().out.startswith("Hydra (")
