"""Every command of the documentation runs as it is written. Only training commands get overrides that make them short.

On a few pages, training commands are only planned (`mrl plan placement`), because other tests train with the same settings.
"""

import os
import shlex
import subprocess
import sys

import pytest
from doc_blocks import ROOT, Block, blocks, mrl_arguments

pytestmark = pytest.mark.extended

SHORT = ["trainer.max_steps=1", "rollout.prompts_per_step=4", "rollout.responses_per_prompt=2", "trainer.eval_rows=4"]
TRAINS = ("train", "sft")
ENDS_AT_ONCE = {"--help", "--cfg", "--dry-run", "--table", "--version", "-h"}
MAKE_TARGETS_TESTED_ELSEWHERE = {
    "train",
    "test",
    "test-all",
    "setup",
    "lint",
    "docs",
    "lock",
    "audit",
    "help",
    "clean",
    "format",
}
TRAINED_BY_OTHER_TESTS = {
    "docs/concepts/algorithms.md": ("test_algorithm_runs.py", "test_colocated_runs.py", "test_distillation_runs.py"),
    "docs/index.md": (
        "test_train.py",
        "test_training_layouts.py",
        "test_colocated_runs.py",
        "test_critic_and_teacher.py",
    ),
    "docs/how_to/images.md": ("test_image_training.py",),
    "docs/tutorials/agent.md": ("test_agent_run.py",),
}
"""Pages whose training commands are only planned if no run folder is given, with the tests that train with the same settings."""
PAGES = sorted({block.page for block in blocks()})


def shortened(arguments: list[str], page: str) -> list[str]:
    """Return arguments that make a training command take one small step, or only plan the run if other tests train so."""
    if arguments[0] not in TRAINS or ENDS_AT_ONCE & set(arguments):
        return arguments
    keys = {argument.split("=")[0] for argument in arguments}
    if page in TRAINED_BY_OTHER_TESTS and "run.dir" not in keys:
        return ["plan", "placement", *arguments[1:]]
    short = [override for override in SHORT if override.split("=")[0] not in keys]
    return [*arguments, *short, "tracking.backends=[]"]


def run(command: str, page: str, folder) -> None:
    """Run one command of a page in a folder. If the command fails, the AssertionError contains its output."""
    arguments = mrl_arguments(command)
    if arguments is not None:
        line = [sys.executable, "-P", "-m", "mrl.cli", *shortened(arguments, page)]
    elif command.split()[0] == "make":
        target = next(word for word in command.split()[1:] if "=" not in word)
        assert target in MAKE_TARGETS_TESTED_ELSEWHERE and f"\n{target}:" in (ROOT / "Makefile").read_text(), command
        return
    else:
        line = ["bash", "-euc", command]
    env = os.environ | {"WANDB_MODE": "offline", "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{shlex.join(line)}\n{(done.stdout + done.stderr)[-3000:]}"


@pytest.fixture(scope="module")
def finished() -> set[str]:
    """Commands that have already run. A command that is on several pages runs only once."""
    return set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory for the commands of all pages, so that a command finds the run directories of earlier commands."""
    path = tmp_path_factory.mktemp("reader")
    for name in ("conf", "benchmarks", "tests", "slurm", "docs"):
        (path / name).symlink_to(ROOT / name)
    return path


def test_pages_whose_runs_are_only_planned_name_tests_that_exist():
    assert TRAINED_BY_OTHER_TESTS.keys() <= set(PAGES)
    assert all((ROOT / "tests" / "e2e" / name).exists() for names in TRAINED_BY_OTHER_TESTS.values() for name in names)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page, folder, finished):
    todo: list[tuple[Block, str]] = [(b, c) for b in blocks() if b.page == page and not b.needs for c in b.commands]
    for block, command in todo:
        if command not in finished:
            try:
                run(command, page, folder)
            except AssertionError as error:
                raise AssertionError(f"{block}: {error}") from None
            finished.add(command)
