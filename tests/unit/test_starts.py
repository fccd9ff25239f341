"""starts.jsonl: what is recorded when a run starts, resumes and ends."""

import logging
import subprocess

import pytest

from mrl.checkpoint.run_dir import ERROR_CHARACTERS, STARTS_FILE, read_events, record_run
from mrl.controller.processes import _closed_in_time
from mrl.core.run_errors import PreemptedError, UnhealthyRunError

HOSTS = [{"name": "node-1", "cpus": 2, "gpus": 8}]


@pytest.mark.parametrize(
    "error, outcome",
    [
        (PreemptedError("preempted"), "preempted"),
        (UnhealthyRunError("the reward fell"), "unhealthy"),
        (KeyboardInterrupt(), "interrupted"),
        (RuntimeError("no room"), "failed"),
    ],
)
def test_the_end_has_the_outcome_and_the_error(tmp_path, error, outcome):
    with pytest.raises(type(error)), record_run(tmp_path, 0, HOSTS):
        raise error
    start, end = read_events(tmp_path)
    assert (start.event, start.hosts) == ("start", HOSTS)
    assert (end.event, end.outcome) == ("end", outcome) and end.error == f"{type(error).__name__}: {error}"


def test_a_resumed_run_adds_its_events(tmp_path):
    with record_run(tmp_path, 0, HOSTS):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    with record_run(tmp_path, 2, HOSTS):
        pass
    events = read_events(tmp_path)
    assert [(event.event, event.step) for event in events] == [("start", 0), ("end", 2), ("resume", 2), ("end", 2)]
    assert [event.outcome for event in events] == [None, "finished", None, "finished"]
    assert events[0].time <= events[1].time <= events[2].time and "torch" in events[0].packages


def test_the_commit_and_the_changed_files_are_those_of_the_working_directory(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.chdir(checkout)
    with record_run(tmp_path, 0, HOSTS):
        pass
    assert read_events(tmp_path)[0].commit is None
    (checkout / "file").write_text("1")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (checkout / "file").write_text("2")
    with record_run(tmp_path, 0, HOSTS):
        pass
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    start = read_events(tmp_path)[2]
    assert (start.commit, start.changed_files) == (commit, 1)


def test_the_command_and_the_error_have_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "hush-hush-1234")
    monkeypatch.setattr("sys.argv", ["/x/train_process.py", "reward.url=http://hush-hush-1234@judge", "run.name=a b"])
    with pytest.raises(RuntimeError), record_run(tmp_path, 0, HOSTS):
        raise RuntimeError("hush-hush-1234 is refused")
    assert "hush" not in (tmp_path / STARTS_FILE).read_text()
    command = read_events(tmp_path)[0].command
    assert command is not None and command.startswith("mrl train ") and command.endswith("'run.name=a b'")


def test_no_part_of_a_secret_is_left_by_quotes_or_by_a_shortened_error(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "hush'hush hush-1234")
    monkeypatch.setattr("sys.argv", ["/x/train_process.py", "reward.header=hush'hush hush-1234"])
    with pytest.raises(RuntimeError), record_run(tmp_path, 0, HOSTS):
        raise RuntimeError("x" * (ERROR_CHARACTERS - len("RuntimeError: ") - 12) + "hush'hush hush-1234")
    assert "hush" not in (tmp_path / STARTS_FILE).read_text()


def test_a_path_that_is_not_valid_unicode_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/x/train_process.py", "data.train=[/data/caf\udce9.jsonl]"])
    with pytest.raises(FileNotFoundError), record_run(tmp_path, 0, HOSTS):
        raise FileNotFoundError("/data/caf\udce9.jsonl")
    start, end = read_events(tmp_path)
    assert start.command is not None and "/data/caf" in start.command and end.outcome == "failed"
    assert start.command.isascii(), "readers can write it again"


def test_metrics_that_cannot_be_read_do_not_hide_the_error_of_the_run(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RuntimeError, match="no room"), record_run(tmp_path, 3, HOSTS):
        raise RuntimeError("no room")
    assert read_events(tmp_path)[1].step == 3


def test_a_checkout_in_which_git_is_slow_has_a_commit(tmp_path, monkeypatch):
    def git(line, **options):
        if "status" in line:
            raise subprocess.TimeoutExpired(line, 5)
        return subprocess.CompletedProcess(line, 0, b"abc123\n")

    monkeypatch.setattr(subprocess, "run", git)
    with record_run(tmp_path, 0, HOSTS):
        pass
    start = read_events(tmp_path)[0]
    assert (start.commit, start.changed_files) == ("abc123", None)


def test_a_damaged_line_is_left_out_with_a_warning(tmp_path, caplog):
    with record_run(tmp_path, 0, HOSTS):
        pass
    with (tmp_path / STARTS_FILE).open("a") as file:
        file.write('{"event": "resu')
    with caplog.at_level(logging.WARNING), record_run(tmp_path, 1, HOSTS):
        assert [event.event for event in read_events(tmp_path)] == ["start", "end", "resume"]
    assert "line 3 is damaged" in caplog.text
    assert [event.event for event in read_events(tmp_path)] == ["start", "end", "resume", "end"]


def test_a_run_goes_on_if_the_file_cannot_be_written(tmp_path, caplog):
    (tmp_path / STARTS_FILE).mkdir()
    with record_run(tmp_path, 0, HOSTS):
        pass
    assert "the start of the run is not recorded" in caplog.text


def test_an_error_that_ends_a_run_with_processes_is_recorded(tmp_path):
    with pytest.raises(ValueError, match="lost"), _closed_in_time() as stack:
        stack.enter_context(record_run(tmp_path, 0, ()))
        raise ValueError("lost")
    assert (read_events(tmp_path)[-1].outcome, read_events(tmp_path)[-1].error) == ("failed", "ValueError: lost")
