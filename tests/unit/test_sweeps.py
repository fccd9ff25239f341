"""Sweeps: the points that overrides define, how they run side by side or as a job array, and the table of results."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from mrl_runs import wait_until
from rich.console import Console

from mrl.commands import sweep as command
from mrl.config import hydra_entry
from mrl.data.synthetic_tasks import make_doubling_task
from mrl.sweep import launcher, sweepers
from mrl.sweep.launcher import JOBS_FILE, LocalRunner, SlurmRunner
from mrl.sweep.points import (
    SWEEP_FILE,
    PointResult,
    PointState,
    Sweep,
    best_point,
    differences,
    grid_points,
    last_message,
    load_sweep,
    metric_value,
    params_to_overrides,
    read_result,
    render_table,
    split_overrides,
    summary_text,
    write_csv,
    write_status,
)
from mrl.sweep.sweepers import PointProposer

POINT = """
import json, os, signal, sys, time
from pathlib import Path
from mrl.sweep.points import write_status
folder, index, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
folder.mkdir(exist_ok=True)
(folder / "starts").open("a").write("x")
if how == "waits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(folder / "terminal.log").open("a").write("mrl: a mistake\\n" if how == "fails" else "begun\\n")
if how == "killed" and len((folder / "starts").read_text()) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how == "waits":
    time.sleep(60)
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, 4):
        file.write(json.dumps({"step": step, "reward/mean": index + step}) + "\\n")
write_status(folder, int(how == "fails"), 1.5)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs") / "made"
    make_doubling_task(folder)
    return folder


def sweep_of(folder, points=(("optim.lr=0.1",), ("optim.lr=0.2",), ("optim.lr=0.3",)), maximize=True):
    return Sweep(folder, "run-1", "reward/mean", maximize, ("experiment=quickstart",), points)


def starter(how):
    """Return the function that starts POINT. `how`: index of a point -> what the point does."""

    def start(sweep, index):
        line = [sys.executable, "-c", POINT, str(sweep.point_folder(index)), str(index), how.get(index, "ends")]
        return subprocess.Popen(line, process_group=0)

    return start


def test_points_are_all_combinations_in_the_order_of_the_command_line():
    shared_overrides, swept = split_overrides(
        ["a.x=1,2", "experiment=quickstart", "b=choice(u,v)", "c=range(0,2)", "++d.e='[1,2]'"]
    )
    assert shared_overrides == ("experiment=quickstart", "++d.e='[1,2]'")
    found = grid_points(swept)
    assert len(found) == 8
    assert found[:3] == [("a.x=1", "b=u", "c=0"), ("a.x=1", "b=u", "c=1"), ("a.x=1", "b=v", "c=0")]


def test_the_command_line_overrides_params_of_a_file():
    params = {"optim.lr": "7,8", "run.seed": "1,2", "critic.optim.lr": [3, 4], "rollout.temperature": "interval(0,1)"}
    shared_overrides, swept = split_overrides([*params_to_overrides(params), "optim.lr=1,2", "++run.seed=5"])
    assert shared_overrides == ("++run.seed=5",)
    assert [override.input_line for override in swept] == [
        "optim.lr=1,2",
        "critic.optim.lr=3,4",
        "rollout.temperature=interval(0,1)",
    ]
    with pytest.raises(ValueError, match="interval has no list"):
        grid_points(swept)


def test_a_line_that_is_not_an_override_is_an_error():
    with pytest.raises(ValueError, match="'a=\\[1,2' cannot be parsed"):
        split_overrides(["a=[1,2"])


def test_a_sweep_file_is_read_back_unchanged_after_its_folder_moved(tmp_path):
    sweep = sweep_of(tmp_path / "one")
    sweep.write()
    (tmp_path / "one").rename(tmp_path / "two")
    found = load_sweep(tmp_path / "two")
    assert found == sweep_of(tmp_path / "two") and differences(sweep, found) == []
    assert found.overrides(1) == [
        "experiment=quickstart",
        "optim.lr=0.2",
        f"run.dir={tmp_path}/two/1",
        "tracking.group=run-1",
    ]
    assert found.command(1) == "mrl train experiment=quickstart optim.lr=0.2"
    with pytest.raises(ValueError, match="contains no sweep"):
        load_sweep(tmp_path)


def test_a_sweep_of_another_version_is_refused_with_the_keys_that_it_lacks(tmp_path):
    sweep_of(tmp_path).write()
    content = json.loads((tmp_path / SWEEP_FILE).read_text())
    content["shared"] = content.pop("shared_overrides")
    (tmp_path / SWEEP_FILE).write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match="lacks shared_overrides, so another version of mrl wrote it; start the sweep again"
    ):
        load_sweep(tmp_path)


@pytest.mark.extended
def test_points_run_side_by_side_and_failures_are_reported(tmp_path):
    sweep, seen, alive = sweep_of(tmp_path), [], []
    sweep.write()
    runner = LocalRunner(sweep, range(len(sweep.points)), 2, starter({1: "fails"}))
    runner.run(lambda results: (seen.append([one.state for one in results]), alive.append(len(runner._running))))
    outcomes = runner.results()
    assert [one.state for one in outcomes] == [PointState.done, PointState.failed, PointState.done] and max(alive) <= 2
    assert outcomes[1].reason == "exit status 1: mrl: a mistake"
    assert [one.value for one in outcomes] == [2.0, 3.0, 4.0] and [one.steps for one in outcomes] == [3, 3, 3]
    assert best_point(outcomes, maximize=True).index == 2 and best_point(outcomes, maximize=False).index == 0


@pytest.mark.extended
def test_a_continued_sweep_runs_points_that_failed_were_killed_or_are_missing(tmp_path):
    sweep = sweep_of(tmp_path)
    sweep.write()
    first = LocalRunner(sweep, range(len(sweep.points)), 3, starter({0: "killed", 1: "fails"}))
    first.run(lambda outcomes: None)
    assert [one.state for one in first.results()] == [PointState.failed, PointState.failed, PointState.done]
    assert first.results()[0].reason.startswith(f"exit status {128 + signal.SIGKILL}")
    again = LocalRunner(sweep, range(len(sweep.points)), 3, starter({0: "killed"}))
    again.run(lambda outcomes: None)
    assert [one.state for one in again.results()] == [PointState.done, PointState.done, PointState.done]
    assert [len((sweep.point_folder(index) / "starts").read_text()) for index in range(3)] == [2, 2, 1]


@pytest.mark.extended
def test_a_signal_is_passed_on_and_nothing_more_is_started(tmp_path):
    sweep = sweep_of(tmp_path)
    sweep.write()
    runner = LocalRunner(sweep, range(len(sweep.points)), 2, starter({0: "waits", 1: "waits"}))

    def ask_to_leave():
        logs = [sweep.point_folder(index) / "terminal.log" for index in (0, 1)]
        wait_until(lambda: len(runner._running) == 2 and all(log.exists() for log in logs), 60)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=ask_to_leave)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    runner.run(lambda outcomes: None)
    thread.join()
    assert runner.signals == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is before
    assert [one.state for one in runner.results()] == [PointState.running, PointState.running, PointState.waiting]
    assert not any(result.state.ended for result in runner.results()) and not sweep.point_folder(2).exists()
    assert runner.interruption_message() == "the same command continues the sweep"
    (sweep.point_folder(0) / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert runner.interruption_message().startswith("points that had begun training have saved checkpoints; ")


class Slurm:
    """Stands in for Slurm. Each query of the queue takes the next entry of `script`."""

    def __init__(self, sweep, script):
        self.sweep, self.script, self.submitted, self.queries = sweep, script, [], 0

    def submit(self, indices):
        self.submitted.append(list(indices))
        return str(40 + len(self.submitted))

    def queued(self, job):
        there = self.script[min(self.queries, len(self.script) - 1)]
        self.queries += 1
        for index, status in there.get("ended", {}).items():
            self.sweep.point_folder(index).mkdir(exist_ok=True)
            write_status(self.sweep.point_folder(index), status, 1.0)
        return there["there"]


def test_the_state_of_array_tasks_is_read_from_their_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(SlurmRunner, "poll_s", 0.01)
    sweep = sweep_of(tmp_path)
    sweep.write()
    looks = [dict(there={0, 1, 2}), dict(there=None), dict(there={2}, ended={0: 0, 1: 3}), *[dict(there=set())] * 5]
    slurm = Slurm(sweep, looks)
    runner = SlurmRunner(sweep, range(len(sweep.points)), slurm.submit, slurm.queued)
    runner.run(lambda outcomes: None)
    outcomes = runner.results()
    assert slurm.submitted == [[0, 1, 2]] and json.loads((tmp_path / JOBS_FILE).read_text()) == ["41"]
    assert [one.state for one in outcomes] == [PointState.done, PointState.failed, PointState.failed]
    assert "exit status 3" in outcomes[1].reason and "ended without an exit status" in outcomes[2].reason


def test_a_continued_sweep_submits_points_that_no_array_still_has(tmp_path, monkeypatch):
    monkeypatch.setattr(SlurmRunner, "poll_s", 0.01)
    sweep = sweep_of(tmp_path)
    sweep.write()
    (tmp_path / JOBS_FILE).write_text('["7"]')
    sweep.point_folder(0).mkdir()
    write_status(sweep.point_folder(0), 1, 1.0)
    slurm = Slurm(sweep, [dict(there={1}), dict(there={0, 1, 2}), dict(there=set(), ended={0: 0, 1: 0, 2: 0})])
    runner = SlurmRunner(sweep, range(len(sweep.points)), slurm.submit, slurm.queued)
    runner.run(lambda outcomes: None)
    assert slurm.submitted == [[0, 2]] and [one.state for one in runner.results()] == [PointState.done] * 3
    assert "mrl train -m --table" in runner.interruption_message() and "7 41" in runner.interruption_message()
    unknown = SlurmRunner(sweep, range(len(sweep.points)), slurm.submit, lambda job: None)
    with pytest.raises(ValueError, match="squeue does not answer"):
        unknown.run(lambda outcomes: None)


def test_the_table_names_the_best_point_its_command_and_what_failed(tmp_path):
    sweep = sweep_of(tmp_path, points=(("optim.lr=0.1", "++run.seed=1"), ("optim.lr=0.2", "++run.seed=1")))
    outcomes = [
        PointResult(0, sweep.points[0], sweep.point_folder(0), PointState.done, 7, 0.25, 3.0),
        PointResult(
            1, sweep.points[1], sweep.point_folder(1), PointState.failed, 2, 0.75, 1.0, "exit status 1: out of memory"
        ),
    ]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_table(sweep, outcomes))
    text = console.export_text()
    assert "optim.lr" in text and "run.seed" in text and "0.25 *" in text and "0.75 *" not in text
    said = summary_text(sweep, outcomes)
    assert "point 1 failed, exit status 1: out of memory" in said
    assert "mrl train experiment=quickstart optim.lr=0.1 ++run.seed=1" in said
    with write_csv(sweep, outcomes).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["reward/mean"] for row in rows] == ["0.25", "0.75"] and rows[1]["reason"].endswith("out of memory")


def test_a_metric_is_the_mean_of_the_last_steps_or_the_last_evaluation(tmp_path):
    steps = [{"step": step, "reward/mean": float(step)} for step in range(1, 11)]
    lines = [{"step": 0, "eval/reward_sampled": 0.1}, {"step": 10, "eval/reward_sampled": 0.6}]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 11, "ev')
    assert metric_value(tmp_path, "eval/reward_sampled") == 0.6
    assert metric_value(tmp_path, "eval/reward_greedy") is None and metric_value(tmp_path, "reward/mean") is None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 11, "rew')
    assert metric_value(tmp_path, "reward/mean") == 8.0 and read_result(0, (), tmp_path, "reward/mean").steps == 10
    assert read_result(0, (), tmp_path / "nowhere", "reward/mean").state == PointState.waiting


def test_the_reason_of_a_failure_is_the_last_message_of_mrl(tmp_path):
    assert last_message(tmp_path) == "terminal.log is empty"
    (tmp_path / "terminal.log").write_text(
        "mrl: wrong\nmrl: the process ended without finishing its work (exit status 1); restart 1 of 5\nnoise\n"
    )
    assert last_message(tmp_path) == "mrl: wrong"
    (tmp_path / "terminal.log").write_text(
        "Traceback\nSomeError: why\n\nSet the variable HYDRA_FULL_ERROR=1 for more\n"
    )
    assert last_message(tmp_path) == "SomeError: why"


def test_proposals_improve_with_reported_metrics_and_survive_a_restart(tmp_path):
    _, swept = split_overrides(["a.x=interval(0,10)", "b=1,2", "n=range(1,4)"])
    refused = []

    def check(point):
        values = dict(line.split("=") for line in point)
        assert 0 <= float(values["a.x"]) <= 10 and values["b"] in ("1", "2") and values["n"] in ("1", "2", "3")
        if values["n"] == "2":
            refused.append(point)
            raise ValueError("n=2 does not fit")

    found = []
    for start in (0, 15):  # two processes, one after the other
        proposer = PointProposer(swept, tmp_path, maximize=False, seed=3, check=check)
        for index in range(start, start + 15):
            point = proposer.propose(index)
            x = float(point[0].split("=")[1])
            value = None if index == 4 else (x - 7) ** 2
            proposer.report(index, value)
            found.append(abs(x - 7))
    assert refused and min(found[15:]) < 0.7
    assert sum(found[20:]) / 10 < sum(found[:10]) / 10, "later trials are nearer to the best"


def test_proposals_that_never_can_run_are_an_error(tmp_path):
    def check(point):
        raise ValueError("does not fit")

    _, swept = split_overrides(["a.x=1,2"])
    proposer = PointProposer(swept, tmp_path, maximize=True, seed=0, check=check)
    with pytest.raises(ValueError, match="20 proposals in a row cannot run; the last one: does not fit"):
        proposer.propose(0)


@pytest.mark.extended_after(2)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optim.lr=1"], "no key has several values"),
        (["algorithm.lrr=1,2"], "did you mean 'optim.lr'"),
        (["optim.lr=interval(0,1)"], "interval has no list"),
        (["algorithm=grpo,nonesuch"], "nonesuch"),
        (["--cfg", "job", "optim.lr=1,2"], "only takes arguments of the form KEY=VALUE"),
        (["optim.lr=1,2", "hydra/launcher=nonesuch"], "Could not find 'hydra/launcher/nonesuch'"),
        (["trainer.max_steps=2,x", "optim.lr=1,2"], "2 of 4 points cannot run, so no point was started"),
        (["--table", "nowhere"], "contains no sweep"),
    ],
)
def test_mistakes_are_reported_before_any_point_starts(words, said, inputs, tmp_path, capsys):
    own = [] if words[0] == "--table" else [f"data.inputs.folder={inputs}", f"run.dir={tmp_path}/sweep"]
    with pytest.raises(SystemExit) as end:
        command.main(["-m", *words, *own])
    assert end.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.extended
def test_resume_never_applies_to_the_sweep_and_not_to_its_points(inputs, tmp_path, capsys):
    own = [f"data.inputs.folder={inputs}", f"run.dir={tmp_path}/one", "resume=never", "optim.lr=1,2"]
    command._sweep_arguments(own)
    sweep_of(tmp_path / "one").write()
    with pytest.raises(ValueError, match=r"resume=never: .* contains a sweep"):
        command._sweep_arguments(own)


def test_a_point_without_a_status_file_has_failed(tmp_path):
    sweep = sweep_of(tmp_path, points=(("optim.lr=0.1",),))
    sweep.write()
    runner = LocalRunner(
        sweep,
        range(len(sweep.points)),
        1,
        lambda sweep, index: subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]),
    )
    runner.run(lambda outcomes: None)
    (outcome,) = runner.results()
    assert outcome.state == PointState.failed and "exit status 3" in outcome.reason


@pytest.mark.extended
def test_another_sweep_in_the_folder_is_refused(inputs, tmp_path, capsys):
    sweep_of(tmp_path).write()
    with pytest.raises(SystemExit):
        command.main(["-m", "optim.lr=0.1,0.2,0.5", f"data.inputs.folder={inputs}", f"run.dir={tmp_path}"])
    assert "contains another sweep" in capsys.readouterr().err


@pytest.mark.extended
def test_the_sweeps_of_conf_have_points_that_can_run(inputs, tmp_path):
    names = [path.stem for path in (hydra_entry.CONF / "sweep").glob("*.yaml") if path.stem != "none"]
    assert "lr_kl" in names
    for name in names:
        words = [f"sweep={name}", "experiment=quickstart", f"data.inputs.folder={inputs}"]
        params = hydra_entry.compose_sweeper_params(words)
        shared_overrides, swept = split_overrides([*params_to_overrides(params), *words])
        found = grid_points(swept)
        assert len(found) >= 4
        for point in found:
            launcher.validate_point(tmp_path / name, [*shared_overrides, *point])


RECORDED_POINT = """
import sys
from pathlib import Path
from mrl.sweep import points
sweep = points.load_sweep(Path(sys.argv[1]))
folder, point = sweep.point_folder(int(sys.argv[2])), dict(line.split("=") for line in sweep.points[int(sys.argv[2])])
folder.mkdir(exist_ok=True)
reward = -abs(float(point["optim.lr"]) - 5e-4)
(folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": %r}\\n' % reward)
points.write_status(folder, 0, 1.0)
"""


@pytest.fixture
def fast_points(monkeypatch):
    """Replace the points by points that do not train. Their reward is highest at optim.lr=5e-4."""

    def start(sweep, index):
        return subprocess.Popen([sys.executable, "-c", RECORDED_POINT, str(sweep.folder), str(index)])

    monkeypatch.setattr(launcher, "start_point", start)
    for module in (launcher, sweepers):
        monkeypatch.setattr(module, "validate_point", lambda folder, overrides: 1)
    monkeypatch.setattr(LocalRunner, "poll_s", 0.05)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("sweeper", ["grid", "basic"])
def test_hydra_runs_a_sweep_with_our_launcher_and_any_sweeper(sweeper, fast_points, inputs, tmp_path, capsys):
    words = [f"hydra/sweeper={sweeper}", "optim.lr=1e-4,5e-4", f"data.inputs.folder={inputs}", f"run.dir={tmp_path}/s"]
    assert command.main(["-m", *words]) == 0
    assert "best: point 1, reward/mean" in capsys.readouterr().out
    with (tmp_path / "s/sweep.csv").open() as file:
        rows = [(float(row["optim.lr"]), row["state"]) for row in csv.DictReader(file)]
    assert rows == [(1e-4, "done"), (5e-4, "done")]


@pytest.mark.extended
def test_the_optuna_sweeper_runs_the_points_it_proposes_and_continues(fast_points, inputs, tmp_path, capsys):
    words = ["hydra/sweeper=optuna", "optim.lr=tag(log,interval(1e-5,1e-2))", f"data.inputs.folder={inputs}"]
    words += [f"run.dir={tmp_path}/s", "hydra.launcher.n_jobs=2"]
    assert command.main(["-m", *words, "hydra.sweeper.n_trials=2"]) == 0
    assert command.main(["-m", *words, "hydra.sweeper.n_trials=4"]) == 0
    found = load_sweep(tmp_path / "s")
    assert len(set(found.points)) == 4 and [one.state for one in found.results()] == [PointState.done] * 4
