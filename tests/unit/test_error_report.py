"""The report of an error has at most 15 lines, and names the cause, the cure and the line of the user's code."""

import errno
import io
import logging
import os
import pickle
import re
import socket
import sys
import traceback
from pathlib import Path

import pytest
import ray.exceptions

from mrl.config.hydra_entry import _run_job
from mrl.config.schema import Config, RunConfig
from mrl.core.run_errors import MAX_LINES, ProcessesLostError, StartError, describe_exit, error_lines, report_error


class RayTaskError(Exception):
    """Stands in for Ray's wrapper. Its message is the traceback of the other process, and its cause has no traceback."""

    def __init__(self, cause: Exception, trace: str) -> None:
        super().__init__(trace)
        self.cause, self.traceback_str = cause, trace


class OutOfMemoryError(RuntimeError):
    """Stands in for torch's error of the same name."""


OutOfMemoryError.__module__ = "torch"
ERRORS = {
    "a full disk": (
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm/run/checkpoints/step_000002"),
        [
            "/dev/shm/run/checkpoints/step_000002 cannot be written. The file system /dev/shm has",
            "checkpoint.keep_last",
        ],
    ),
    "a full disk as torch says it": (
        RuntimeError(
            "PytorchStreamWriter failed writing file data/3: [Errno 28] No space left on device: '/dev/shm/x'"
        ),
        ["The disk is full: /dev/shm/x cannot be written", "bytes free"],
    ),
    "a used-up quota": (
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/dev/shm/x"),
        ["The disk quota is used up: /dev/shm/x cannot be written", "bytes free"],
    ),
    "a taken port": (
        RuntimeError("The server socket has failed to listen. port: 29500, code: -98, name: EADDRINUSE"),
        ["Port 29500 is taken by another process", "ss -ltnp"],
    ),
    "GPU memory": (
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        ["A GPU is out of memory", "trainer.max_tokens_per_micro_batch"],
    ),
    "host memory": (MemoryError(), ["A host is out of memory", "GiB available", "scoring.memory_gb"]),
    "a killed rank": (
        ProcessesLostError("update() on 2 trainer ranks: a process died. trainer rank 1 is dead."),
        ["signal 9 (SIGKILL)", "out-of-memory killer", "dmesg"],
    ),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("wrapped", [False, True], ids=["here", "in another process"])
def test_a_known_cause_is_named_with_its_cure(error, wrapped, tmp_path):
    cause, words = ERRORS[error]
    raised = RayTaskError(cause, "ray::update()\n" + '  File "/x/y.py", line 3, in update\n' * 60) if wrapped else cause
    lines = report_error(raised, tmp_path).splitlines()
    assert len(lines) <= MAX_LINES and lines[0].endswith(str(cause).strip())
    assert all(word in "\n".join(lines) for word in words), lines
    assert "ray::update" not in "\n".join(lines)


def test_a_write_that_really_fails_names_the_file_system_of_the_run(tmp_path):
    with pytest.raises(OSError) as full, open("/dev/full", "w") as file:
        file.write("x")
    lines = error_lines(full.value, tmp_path)
    assert f"The disk is full: {tmp_path} cannot be written. The file system /" in lines[1]
    assert re.search(r"has [\d,]+ bytes free", lines[1])
    with socket.socket() as first, socket.socket() as second, pytest.raises(OSError) as taken:
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())
    assert "A port is taken by another process" in error_lines(taken.value, tmp_path)[1]


def user_code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("def reward(text):\n    return table[text]\n")
    return path


def test_the_users_line_is_named_also_if_another_process_raised_the_error(tmp_path):
    path = user_code(tmp_path)
    trace = f'ray::worker()\n  File "{Path(__file__).parents[2]}/mrl/cli.py", line 2, in f\n  File "{path}", line 2, in reward\n'
    lines = error_lines(RayTaskError(KeyError("x"), trace), tmp_path)
    assert lines == ["KeyError: 'x'", f"  raised in your code: {path}:2, in reward", "    return table[text]"]


def test_an_error_that_ray_carries_is_reported_as_the_error_itself(tmp_path):
    """Ray raises an error that is both a RayTaskError and of the type of the cause. Its message is the whole traceback."""
    path = user_code(tmp_path)
    space: dict = {"table": {}}
    exec(compile(path.read_text(), str(path), "exec"), space)
    with pytest.raises(KeyError) as raised:
        space["reward"]("x")
    trace = "".join(traceback.format_exception(raised.value))
    carried = ray.exceptions.RayTaskError(
        "collect", trace, pickle.loads(pickle.dumps(raised.value))
    ).as_instanceof_cause()
    assert isinstance(carried, KeyError) and "line 2, in reward" in str(carried)
    report = report_error(carried, tmp_path).splitlines()
    assert report[:-1] == ["KeyError: 'x'", f"  raised in your code: {path}:2, in reward", "    return table[text]"]
    assert f'File "{path}", line 2, in reward' in (tmp_path / "logs/traceback.txt").read_text()


def test_the_traceback_is_in_a_file_and_the_report_in_the_log(tmp_path, caplog):
    path = user_code(tmp_path)
    space: dict = {"table": {}}
    exec(compile(path.read_text(), str(path), "exec"), space)
    config = Config(run=RunConfig(dir=str(tmp_path)))
    with pytest.raises(SystemExit) as ended, caplog.at_level(logging.ERROR):
        _run_job(lambda config: space["reward"]("x"), config)
    assert ended.value.code == 1 and ended.value.__cause__ is None
    assert f"{path}:2, in reward" in caplog.text and "Traceback (" not in caplog.text
    assert "Traceback (most recent call last)" in (tmp_path / "logs/traceback.txt").read_text()
    with pytest.raises(SystemExit) as ended:
        _run_job(_refuse, config)
    assert ended.value.code == 2


def _refuse(config: Config) -> None:
    raise StartError("the pools need 5 GPUs, but the cluster has 2")


def test_debug_output_has_the_whole_traceback(tmp_path, monkeypatch, capsys):
    config = Config(run=RunConfig(dir=str(tmp_path)))
    for debug, shown in (("0", False), ("1", True)):
        monkeypatch.setenv("MRL_DEBUG", debug)
        with pytest.raises(SystemExit):
            _run_job(_refuse, config)
        assert ("Traceback (most recent call last)" in capsys.readouterr().err) == shown


def test_a_text_that_cannot_be_encoded_is_escaped(tmp_path, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("MRL_DEBUG", "1")
    with pytest.raises(SystemExit):
        _run_job(_fail_with_surrogate, Config(run=RunConfig(dir=str(tmp_path))))
    terminal.flush()
    shown = terminal.buffer.getvalue().decode()
    assert shown.startswith("mrl: RuntimeError: row \\udcff\n") and "Traceback (most recent call last)" in shown
    assert "RuntimeError: row \\udcff" in (tmp_path / "logs/traceback.txt").read_text(encoding="utf-8")


def _fail_with_surrogate(config: Config) -> None:
    raise RuntimeError("row \udcff")


def test_a_long_message_is_cut_and_its_end_is_kept(tmp_path):
    log = "\n".join(f"line {number}" for number in range(100))
    lines = report_error(RuntimeError(f"the server ended; its log ends with:\n{log}"), tmp_path).splitlines()
    assert len(lines) <= MAX_LINES and "line 99" in lines and "lines left out" in "".join(lines)
    assert "line 50" in (tmp_path / "logs/traceback.txt").read_text()


def test_the_end_of_a_killed_process_names_the_usual_cause():
    assert describe_exit(-9).startswith(
        "killed by signal 9 (SIGKILL); the kernel's out-of-memory killer is the usual cause"
    )
    assert describe_exit(-11) == "killed by signal 11 (SIGSEGV)" and describe_exit(3) == "exit status 3"
