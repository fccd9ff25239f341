"""Code that configures logging in the process of the tests does not close pytest's files of captured output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
THREE_TESTS = """
import logging.config

def test_that_imports_absl():
    import absl.logging  # as Megatron does

def test_that_configures_logging(capsys):
    logging.config.dictConfig({"version": 1})  # as Hydra does; closes all log handlers

def test_that_runs_next():
    pass
"""


@pytest.mark.extended
def test_a_test_that_configures_logging_does_not_close_the_files_of_pytest(tmp_path):
    (tmp_path / "test_three.py").write_text(THREE_TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        tmp_path,
        "-p",
        "conftest",
        tmp_path,
    ]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    env = os.environ | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
