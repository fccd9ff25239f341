"""Every command of the documentation runs as it is written. Only training commands get overrides that make them short."""

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
PAGES = sorted({block.page for block in blocks()})


def shortened(arguments: list[str]) -> list[str]:
    """Add the overrides that make a training command take one small step."""
    if arguments[0] not in TRAINS or ENDS_AT_ONCE & set(arguments):
        return arguments
    keys = {argument.split("=")[0] for argument in arguments}
    short = [override for override in SHORT if override.split("=")[0] not in keys]
    return [*arguments, *short, "tracking.backends=[]"]


def run(command: str, folder) -> None:
    """Run one command in a folder. If the command fails, the AssertionError contains its output."""
    arguments = mrl_arguments(command)
    if arguments is not None:
        line = [sys.executable, "-P", "-m", "mrl.cli", *shortened(arguments)]
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


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page, folder, finished):
    todo: list[tuple[Block, str]] = [(b, c) for b in blocks() if b.page == page and not b.needs for c in b.commands]
    for block, command in todo:
        if command not in finished:
            try:
                run(command, folder)
            except AssertionError as error:
                raise AssertionError(f"{block}: {error}") from None
            finished.add(command)
