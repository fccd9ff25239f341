"""Sweeps: what their points are, how they are run side by side, and what the table says of them."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from mrl.commands import sweep as command
from mrl.data.arithmetic import make_inputs
from mrl.sweep import plan, table
from mrl.sweep.array import JOBS, Array
from mrl.sweep.here import Here
from mrl.sweep.outcome import DONE, FAILED, RUNNING, WAITING, Outcome, best, last_words, read, value_of, write_status
from mrl.sweep.plan import Sweep
from mrl.sweep.points import lines_of, split
from mrl.sweep.runner import unfinished
from mrl.sweep.trials import Trials

POINT = """
import json, os, signal, sys, time
from pathlib import Path
from mrl.sweep.outcome import write_status
folder, index, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder.mkdir(exist_ok=True)
(folder / "starts").open("a").write("x")
(folder / "terminal.log").open("a").write("mrl: a mistake\\n" if how == "fails" else "begun\\n")
if how == "killed" and len((folder / "starts").read_text()) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "waits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    time.sleep(60)
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, 4):
        file.write(json.dumps({"step": step, "reward/mean": index + step}) + "\\n")
write_status(folder, int(how == "fails"), 1.5)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs") / "made"
    make_inputs(folder)
    return folder


def sweep_of(folder, points=(("algorithm.lr=0.1",), ("algorithm.lr=0.2",), ("algorithm.lr=0.3",)), maximize=True):
    return Sweep(folder, "run-1", "reward/mean", maximize, ("experiment=quickstart",), points)


def starter(how):
    """Starts POINT; `how`: point -> what it does."""

    def start(sweep, index):
        line = [sys.executable, "-c", POINT, str(sweep.of(index)), str(index), how.get(index, "ends")]
        return subprocess.Popen(line, process_group=0)

    return start


def test_points_are_every_combination_in_the_order_of_the_line():
    space = split(["a.x=1,2", "experiment=quickstart", "b=choice(u,v)", "c=range(0,2)", "++d.e='[1,2]'"])
    assert space.fixed == ("experiment=quickstart", "++d.e='[1,2]'")
    points = space.points()
    assert len(points) == 8
    assert points[:3] == [("a.x=1", "b=u", "c=0"), ("a.x=1", "b=u", "c=1"), ("a.x=1", "b=v", "c=0")]


def test_the_command_line_wins_over_a_file_with_params():
    space = split(["algorithm.lr=1,2", "++run.seed=5"])
    more = space.and_also(
        lines_of({"algorithm.lr": "7,8", "run.seed": "1,2", "critic.lr": [3, 4], "x": "interval(0,1)"})
    )
    assert more.fixed == space.fixed
    assert [override.key_or_group for override in more.swept] == ["algorithm.lr", "critic.lr", "x"]
    with pytest.raises(ValueError, match="interval has no list"):
        more.points()


def test_a_line_that_is_no_override_is_named():
    with pytest.raises(ValueError, match="'a=\\[1,2' cannot be read"):
        split(["a=[1,2"])


def test_a_sweep_is_read_back_as_it_was_written_wherever_it_lies(tmp_path):
    sweep = sweep_of(tmp_path / "one")
    sweep.write()
    (tmp_path / "one").rename(tmp_path / "two")
    found = plan.load(tmp_path / "two")
    assert found == sweep_of(tmp_path / "two") and plan.differences(sweep, found) == []
    assert found.overrides(1) == [
        "experiment=quickstart",
        "algorithm.lr=0.2",
        f"run.dir={tmp_path}/two/1",
        "tracking.group=run-1",
    ]
    assert found.command(1) == "mrl train experiment=quickstart algorithm.lr=0.2"
    with pytest.raises(ValueError, match="holds no sweep"):
        plan.load(tmp_path)


def test_points_run_side_by_side_and_failures_are_told(tmp_path):
    sweep, seen, alive = sweep_of(tmp_path), [], []
    sweep.write()
    runner = Here(sweep, 2, starter({1: "fails"}))
    runner.run(lambda outcomes: (seen.append([one.state for one in outcomes]), alive.append(len(runner._running))))
    outcomes = runner.outcomes()
    assert [one.state for one in outcomes] == [DONE, FAILED, DONE] and max(alive) <= 2
    assert outcomes[1].reason == "exit status 1: mrl: a mistake"
    assert [one.value for one in outcomes] == [2.0, 3.0, 4.0] and [one.steps for one in outcomes] == [3, 3, 3]
    assert best(outcomes, maximize=True).index == 2 and best(outcomes, maximize=False).index == 0


def test_a_sweep_that_goes_on_runs_what_failed_was_killed_or_is_missing(tmp_path):
    sweep = sweep_of(tmp_path)
    sweep.write()
    first = Here(sweep, 3, starter({0: "killed", 1: "fails"}))
    first.run(lambda outcomes: None)
    assert [one.state for one in first.outcomes()] == [FAILED, FAILED, DONE]
    assert first.outcomes()[0].reason.startswith(f"exit status {128 + signal.SIGKILL}")
    again = Here(sweep, 3, starter({0: "killed"}))
    again.run(lambda outcomes: None)
    assert [one.state for one in again.outcomes()] == [DONE, DONE, DONE]
    assert [len((sweep.of(index) / "starts").read_text()) for index in range(3)] == [2, 2, 1]


def test_a_signal_is_passed_on_and_nothing_more_is_started(tmp_path):
    sweep = sweep_of(tmp_path)
    sweep.write()
    runner = Here(sweep, 2, starter({0: "waits", 1: "waits"}))

    def ask_to_leave():
        while not all((sweep.of(index) / "terminal.log").exists() for index in (0, 1)):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask_to_leave)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    runner.run(lambda outcomes: None)
    thread.join()
    assert runner.asked == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before
    assert [one.state for one in runner.outcomes()] == [RUNNING, RUNNING, WAITING]
    assert len(unfinished(runner.outcomes())) == 3 and not sweep.of(2).exists()


class Slurm:
    """An array whose tasks do what a test says, one look after another."""

    def __init__(self, sweep, script):
        self.sweep, self.script, self.submitted, self.looks = sweep, script, [], 0

    def submit(self, indices):
        self.submitted.append(list(indices))
        return str(40 + len(self.submitted))

    def queued(self, job):
        there = self.script[min(self.looks, len(self.script) - 1)]
        self.looks += 1
        for index, status in there.get("ended", {}).items():
            self.sweep.of(index).mkdir(exist_ok=True)
            write_status(self.sweep.of(index), status, 1.0)
        return there["there"]


def test_points_of_an_array_are_judged_by_their_own_word(tmp_path, monkeypatch):
    monkeypatch.setattr(Array, "poll_s", 0.01)
    sweep = sweep_of(tmp_path)
    sweep.write()
    looks = [dict(there={0, 1, 2}), dict(there=None), dict(there={2}, ended={0: 0, 1: 3}), *[dict(there=set())] * 5]
    slurm = Slurm(sweep, looks)
    runner = Array(sweep, slurm.submit, slurm.queued)
    runner.run(lambda outcomes: None)
    outcomes = runner.outcomes()
    assert slurm.submitted == [[0, 1, 2]] and json.loads((tmp_path / JOBS).read_text()) == ["41"]
    assert [one.state for one in outcomes] == [DONE, FAILED, FAILED]
    assert "exit status 3" in outcomes[1].reason and "ended without a word" in outcomes[2].reason


def test_a_sweep_that_goes_on_submits_what_no_array_has(tmp_path, monkeypatch):
    monkeypatch.setattr(Array, "poll_s", 0.01)
    sweep = sweep_of(tmp_path)
    sweep.write()
    (tmp_path / JOBS).write_text('["7"]')
    sweep.of(0).mkdir()
    write_status(sweep.of(0), 1, 1.0)
    slurm = Slurm(sweep, [dict(there={1}), dict(there={0, 1, 2}), dict(there=set(), ended={0: 0, 1: 0, 2: 0})])
    runner = Array(sweep, slurm.submit, slurm.queued)
    runner.run(lambda outcomes: None)
    assert slurm.submitted == [[0, 2]] and [one.state for one in runner.outcomes()] == [DONE] * 3
    assert "mrl train -m --table" in runner.left() and "7 41" in runner.left()
    unknown = Array(sweep, slurm.submit, lambda job: None)
    with pytest.raises(ValueError, match="squeue does not answer"):
        unknown.run(lambda outcomes: None)


def test_the_table_names_the_best_point_its_command_and_what_failed(tmp_path):
    sweep = sweep_of(tmp_path, points=(("algorithm.lr=0.1", "++run.seed=1"), ("algorithm.lr=0.2", "++run.seed=1")))
    outcomes = [
        Outcome(0, sweep.points[0], sweep.of(0), DONE, 7, 0.25, 3.0),
        Outcome(1, sweep.points[1], sweep.of(1), FAILED, 2, 0.75, 1.0, "exit status 1: out of memory"),
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table.rendered(sweep, outcomes))
    text = console.export_text()
    assert "algorithm.lr" in text and "run.seed" in text and "0.25 *" in text and "0.75 *" not in text
    said = table.closing(sweep, outcomes)
    assert "point 1 failed, exit status 1: out of memory" in said
    assert "mrl train experiment=quickstart algorithm.lr=0.1 ++run.seed=1" in said
    with table.write_csv(sweep, outcomes).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["reward/mean"] for row in rows] == ["0.25", "0.75"] and rows[1]["reason"].endswith("out of memory")


def test_values_are_the_last_steps_mean_or_the_last_evaluation(tmp_path):
    steps = [{"step": step, "reward/mean": float(step)} for step in range(1, 11)]
    lines = [{"step": 0, "eval/accuracy_sampled": 0.1}, {"step": 10, "eval/accuracy_sampled": 0.6}]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 11, "ev')
    assert value_of(tmp_path, "eval/accuracy_sampled") == 0.6
    assert value_of(tmp_path, "eval/accuracy_greedy") is None and value_of(tmp_path, "reward/mean") is None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 11, "rew')
    assert value_of(tmp_path, "reward/mean") == 8.0 and read(0, (), tmp_path, "reward/mean").steps == 10
    assert read(0, (), tmp_path / "nowhere", "reward/mean").state == WAITING


def test_the_last_words_of_a_run_are_mrls_own(tmp_path):
    assert last_words(tmp_path) == "nothing was said"
    (tmp_path / "terminal.log").write_text("mrl: wrong\nmrl: the command vanished; new start 1 of 5\nnoise\n")
    assert last_words(tmp_path) == "mrl: wrong"
    (tmp_path / "terminal.log").write_text(
        "Traceback\nSomeError: why\n\nSet the variable HYDRA_FULL_ERROR=1 for more\n"
    )
    assert last_words(tmp_path) == "SomeError: why"


def test_trials_learn_from_what_was_achieved_and_are_remembered(tmp_path):
    space = split(["a.x=interval(0,10)", "b=1,2", "n=range(1,4)"])
    refused = []

    def check(point):
        values = dict(line.split("=") for line in point)
        assert 0 <= float(values["a.x"]) <= 10 and values["b"] in ("1", "2") and values["n"] in ("1", "2", "3")
        if values["n"] == "2":
            refused.append(point)
            raise ValueError("n=2 does not fit")

    found = []
    for start in (0, 15):  # two processes, one after the other
        trials = Trials(space, tmp_path, maximize=False, seed=3, check=check)
        for index in range(start, start + 15):
            point = trials.ask(index)
            x = float(point[0].split("=")[1])
            value = None if index == 4 else (x - 7) ** 2
            trials.tell(Outcome(index, point, tmp_path, DONE, 1, value, 1.0))
            found.append(abs(x - 7))
    assert refused and min(found[15:]) < 0.7
    assert sum(found[20:]) / 10 < sum(found[:10]) / 10, "later trials are nearer to the best"


def test_trials_that_can_never_run_end(tmp_path):
    def check(point):
        raise ValueError("does not fit")

    trials = Trials(split(["a.x=1,2"]), tmp_path, maximize=True, seed=0, check=check)
    with pytest.raises(ValueError, match="20 proposals in a row cannot run; the last one: does not fit"):
        trials.ask(0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["algorithm.lr=1"], "nothing is swept"),
        (["algorithm.lrr=1,2"], "did you mean 'algorithm.lr'"),
        (["algorithm.lr=interval(0,1)"], "interval has no list"),
        (["algorithm=grpo,nonesuch"], "nonesuch"),
        (["--cfg", "job", "algorithm.lr=1,2"], "takes overrides only"),
        (["algorithm.lr=1,2", "hydra/launcher=joblib"], "mrl runs sweeps itself"),
        (["trainer.max_steps=2,x", "algorithm.lr=1,2"], "2 of 4 points cannot run; none was started"),
        (["--table", "nowhere"], "holds no sweep"),
    ],
)
def test_mistakes_are_found_before_anything_is_started(words, said, inputs, tmp_path, capsys):
    own = [] if words[0] == "--table" else [f"data.inputs.folder={inputs}", f"run.dir={tmp_path}/sweep"]
    with pytest.raises(SystemExit) as end:
        command.main(["-m", *words, *own])
    assert end.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_that_shall_not_go_on_is_checked_once_and_its_points_may(inputs, tmp_path, capsys):
    own = [f"data.inputs.folder={inputs}", f"run.dir={tmp_path}/one", "resume=never", "algorithm.lr=1,2"]
    _, space = command._read(own)
    assert "resume=never" not in space.fixed
    sweep_of(tmp_path / "one").write()
    with pytest.raises(ValueError, match=r"resume=never: .* holds a sweep"):
        command._read(own)


def test_a_point_whose_process_could_not_say_how_it_ended_has_failed(tmp_path):
    sweep = sweep_of(tmp_path, points=(("algorithm.lr=0.1",),))
    sweep.write()
    runner = Here(sweep, 1, lambda sweep, index: subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    runner.run(lambda outcomes: None)
    (outcome,) = runner.outcomes()
    assert outcome.state == FAILED and "exit status 3" in outcome.reason


def test_another_sweep_in_the_folder_is_refused(inputs, tmp_path, capsys):
    sweep_of(tmp_path).write()
    with pytest.raises(SystemExit):
        command.main(["-m", "algorithm.lr=0.1,0.2,0.5", f"data.inputs.folder={inputs}", f"run.dir={tmp_path}"])
    assert "holds another sweep" in capsys.readouterr().err


def test_the_sweeps_of_conf_have_points_that_can_run(inputs, tmp_path):
    from mrl.commands import hydra_app

    names = [path.stem for path in (hydra_app.CONF / "sweep").glob("*.yaml") if path.stem != "none"]
    assert "lr_kl" in names
    for name in names:
        words = [f"sweep={name}", f"data.inputs.folder={inputs}", f"run.dir={tmp_path}/{name}"]
        _, space = command._read(words)
        points = space.points()
        assert len(points) >= 4
        for point in points:
            command._checker(space)(point)
