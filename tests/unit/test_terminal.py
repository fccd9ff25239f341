"""What a user sees from the start of a command to the first step, and at the end of a run."""

import io
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from mrl.commands import train as train_command
from mrl.commands import train_process
from mrl.commands.train_process import summary
from mrl.config import hydra_entry
from mrl.controller.trainer import TrainingResult
from mrl.tracking.console import ConsoleSink, Startup


class Screen(io.StringIO):
    """A terminal or a file. The tests read its text."""

    def wait_for(self, pattern: str, timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while not re.search(pattern, self.getvalue()):
            assert time.monotonic() < end, f"{pattern!r} did not appear in {self.getvalue()!r}"
            time.sleep(0.01)


def startup_on(screen, *, terminal, every_s=0.01, term="xterm"):
    return Startup(Console(file=screen, force_terminal=terminal, width=120, _environ={"TERM": term}), every_s)


def test_without_a_terminal_a_line_says_again_and_again_what_is_awaited():
    screen = Screen()
    startup = startup_on(screen, terminal=False)
    startup.wait_for("Ray")
    screen.wait_for(r"(waiting for Ray \(\d+\.\d s since the start\)\n.*){3}")
    startup.wait_for("the engines")
    screen.wait_for("waiting for the engines")
    startup.ready("engines ready (2)")
    assert re.search(r"engines ready \(2\) after \d+\.\d s\n", screen.getvalue())
    startup.close()
    startup._thread.join(60)
    shown = screen.getvalue()
    startup.wait_for("nothing")
    time.sleep(0.05)
    assert screen.getvalue() == shown


def test_a_terminal_that_cannot_replace_lines_gets_lines():
    screen = Screen()
    startup = startup_on(screen, terminal=True, term="dumb")
    startup.wait_for("Ray")
    screen.wait_for(r"(waiting for Ray \(\d+\.\d s since the start\)\n.*){2}")
    startup.close()


def test_on_a_terminal_a_spinner_shows_what_is_awaited_and_ends_with_the_first_step():
    screen = Screen()
    startup = startup_on(screen, terminal=True)
    startup.wait_for("the trainer ranks")
    screen.wait_for("waiting for the trainer ranks")
    startup.ready("trainer ready (1 processes)")
    sink = ConsoleSink(2, console=startup.console)
    for target in (startup, sink):
        target.log(0, {"eval/reward_sampled": 0.5})
    assert not startup._closed.is_set()
    for target in (startup, sink):
        target.log(1, {"reward/mean": 0.25})
    assert startup._closed.is_set() and not startup._status._live.is_started
    sink.close()
    assert "trainer ready (1 processes) after" in screen.getvalue() and "reward 0.250" in screen.getvalue()


def test_the_spinner_ends_before_the_progress_bar_begins_and_warnings_stay_above_the_bar(monkeypatch):
    """The warm start has its own progress bar, and the spinner continues after it."""
    screen, stderr = Screen(), Screen()
    monkeypatch.setattr(sys, "stderr", stderr)
    startup = startup_on(screen, terminal=True)
    startup.wait_for("the supervised warm start")
    sink = ConsoleSink(2, title="supervised", startup=startup)
    spinner = startup._status._live
    assert spinner.is_started and not sink._display.is_started
    sink.log(0, {"eval/reward_sampled": 0.5})
    assert spinner.is_started and not sink._display.is_started
    sink.log(1, {"loss/sft": 0.5})
    assert sink._display.is_started and not spinner.is_started
    sys.stderr.write("warning: slow disk\n")
    startup.ready("restart 1 of at most 3 begun")
    sink.close()
    assert "warning: slow disk" in screen.getvalue() and stderr.getvalue() == ""
    assert sys.stderr is stderr
    startup.wait_for("the engines")
    screen.wait_for("waiting for the engines")
    startup.close()


ENTER = """
import sys
from mrl.launch import supervisor
def supervise(module, argv):
    heavy = {"hydra", "omegaconf", "ray", "torch", "rich", "numpy"} & set(sys.modules)
    sys.stdout.write(f"supervised {module} {argv} {sorted(heavy)}")
    return 0
supervisor.supervise = supervise
from mrl.commands import train
train.main(sys.argv[1:])
"""


def test_the_first_line_comes_before_any_large_package_is_imported():
    done = subprocess.run(
        [sys.executable, "-c", ENTER, "trainer.max_steps=1"], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == "mrl train: reading the config\n"
    assert done.stdout == "supervised mrl.commands.train_process ['trainer.max_steps=1'] []"


@pytest.mark.parametrize("option", ["--cfg", "--help", "--dry-run"])
def test_commands_that_only_print_have_no_line_before_their_output(option, monkeypatch, capsys):
    monkeypatch.setattr(train_command.supervisor, "supervise", lambda module, argv: 0)
    train_command.main([option])
    assert capsys.readouterr().err == ""


@pytest.fixture
def finished_run(tmp_path):
    """Write the files that the last screen reads: the metrics, and the folder of a model."""
    lines = [{"step": step, "reward/mean": reward} for step, reward in ((1, 0.125), (2, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "hf").mkdir()
    return tmp_path


def summary_of(run_dir: Path, *overrides: str) -> str:
    config = hydra_entry.compose_config([*overrides, hydra_entry.format_override("run.dir", run_dir)])
    held_out = {"eval/reward_greedy": 0.25}, {"eval/reward_greedy": 0.75}
    return summary(TrainingResult(150, 0.9, *held_out), config, [*overrides, f"run.dir={run_dir}"])


def test_the_last_screen_says_what_was_learned_where_it_is_and_what_to_do_next(finished_run):
    overrides = ["experiment=quickstart", "optim.lr=1e-4", "trainer.max_steps=150"]
    lines = summary_of(finished_run, *overrides).splitlines()
    assert lines[0] == "150 steps, mean reward 0.900 over the last steps (0.125 in the first step)"
    assert "held-out reward greedy: 0.250 before, 0.750 after" in lines
    assert f"model (Hugging Face folder): {finished_run}/hf" in lines
    assert lines[-4:] == [
        "next:",
        f"  mrl samples {finished_run} --worst",
        f"  mrl evaluate experiment=quickstart model.path={finished_run}/hf",
        f"  mrl train experiment=quickstart optim.lr=1e-4 run.dir={finished_run} trainer.max_steps=300",
    ]
    for line in lines[-2:]:
        assert all(hydra_entry.is_known_override(word) for word in line.split()[2:])


@pytest.mark.extended
def test_a_run_that_reached_its_goal_continues_without_the_goal(finished_run):
    *_, train = summary_of(finished_run, "experiment=quickstart", "trainer.stop_reward=0.8").splitlines()
    assert "trainer.stop_reward=0.8" not in train and train.endswith(" trainer.stop_reward=null")
    *_, train = summary_of(finished_run, "experiment=quickstart", "trainer.stop_reward=0.95").splitlines()
    assert "trainer.stop_reward=0.95" in train and "null" not in train


@pytest.mark.parametrize("name", ["jörg's (1)", "a#b&c=1", "~x y,z"])
@pytest.mark.extended
def test_the_next_commands_and_a_restart_can_be_parsed_with_any_folder(tmp_path, monkeypatch, name):
    """The run tells the supervisor the overrides that a restart needs in addition."""
    folder = tmp_path / name
    (folder / "hf").mkdir(parents=True)
    overrides = ["experiment=quickstart", hydra_entry.format_override("run.dir", folder)]
    config = hydra_entry.compose_config(overrides)
    told: list[str] = []

    class Stop(Exception):
        pass

    def stop(folder):
        raise Stop

    monkeypatch.setattr(train_process.supervisor, "tell_supervisor", told.append)
    monkeypatch.setattr(train_process, "check_not_in_use", stop)
    with pytest.raises(Stop):
        train_process.train(config)
    restarted = hydra_entry.check_overrides([*overrides, *told])
    assert hydra_entry.compose_config(restarted).run.dir == str(folder)
    samples, evaluate, train = (shlex.split(line)[1:] for line in train_process.next_commands(config, overrides, True))
    assert samples[1] == str(folder)
    assert hydra_entry.compose_config([*evaluate[1:], "run.dir=x"]).model.path == str(folder / "hf")
    assert hydra_entry.compose_config(train[1:]).run.dir == str(folder)
    assert shlex.split(train_process._run_dir_word(config)) == told


def test_the_last_screen_names_only_what_exists(tmp_path):
    text = summary_of(tmp_path, "experiment=quickstart")
    assert "Hugging Face" not in text and "mrl evaluate" not in text and "checkpoint:" not in text
    assert "in the first step" not in text and "mrl samples" in text
