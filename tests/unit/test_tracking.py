import io
import json
import logging
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from mrl.config import hydra_entry
from mrl.controller import build
from mrl.core import metric_families, metrics
from mrl.core.run_errors import PreemptedError
from mrl.tracking import backends
from mrl.tracking.backends import (
    TrackedRun,
    WandbSink,
    wandb_mode,
)
from mrl.tracking.console import ConsoleSink
from mrl.tracking.tracker import CurveSink, JsonlSink, Tracker, draw_curve, drawn_evaluations


class Memory:
    """A sink that keeps in memory what it gets."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step, metrics):
        self.logged.append((step, dict(metrics)))

    def rewind(self, last_step, evaluated):
        self.logged = [(step, metrics) for step, metrics in self.logged if step <= last_step]

    def close(self, failed=False):
        self.closed, self.failed = True, failed


@pytest.fixture
def no_login(monkeypatch, tmp_path):
    """Hide the key and the netrc of this machine from wandb."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def tracked(folder, **fields) -> TrackedRun:
    return TrackedRun(folder=folder, project="mrl", name="test", **fields)


def console_lines(log, *, terminal=False, total=10, every_s=0.0):
    screen = io.StringIO()
    sink = ConsoleSink(total, every_s=every_s, console=Console(file=screen, force_terminal=terminal, width=200))
    log(sink)
    sink.close()
    return screen.getvalue().splitlines()


FAMILY_MEMBERS = {
    "time/update_s": "update",
    "reward/format_mean": "format",
    "reward/openai_gsm8k/mean": "openai_gsm8k",
    "reward/code/format_mean": "code format",
    "reward/code/failed_fraction": "code failed",
    "eval/easy/reward_greedy": "easy greedy",
    "eval/a_b/accuracy_sampled": "a_b accuracy sampled",
    "eval/aime/reward": "aime reward",
    "eval/aime/accuracy": "aime accuracy",
    "eval/aime/pass_at_16": "aime pass@16",
    "eval/aime/maj_at_2": "aime maj@2",
    "own/surprise": "surprise",
}
"""Metric of a family -> its name in the progress display."""


def test_every_metric_name_is_area_slash_what():
    for name in metrics.METRICS:
        area, what = name.split("/")
        assert area and what and name == name.lower(), name


def test_every_metric_says_what_it_means_and_can_be_shown():
    for name, metric in metrics.METRICS.items():
        assert metric.meaning, name
        assert metric.text(0.5)


def test_every_metric_has_a_section_good_values_and_a_reduction():
    for name in [*metrics.METRICS, *FAMILY_MEMBERS]:
        metric = metrics.find(name)
        assert metric.good and metric.reduction in ("mean", "sum", "max", "last"), name
        assert metrics.section(name) in metrics.SECTIONS.values(), name


def test_sections_are_in_reading_order_and_empty_ones_are_left_out():
    names = ["own/b", "time/update_s", "time/step_s", "reward/std", "reward/mean", "reward/format_mean"]
    assert metrics.in_sections(names) == {
        "Reward": ["reward/mean", "reward/std", "reward/format_mean"],
        "Time by phase": ["time/step_s", "time/update_s"],
        "Metrics of plug-ins": ["own/b"],
    }


@pytest.mark.parametrize(
    "name, expected",
    [("reward/mean", 2.0), ("rollout/tokens", 6.0), ("mismatch/logprob_abs_max", 3.0), ("optim/lr", 2.0)],
)
def test_steps_are_reduced_as_the_metric_says(name, expected):
    assert metrics.reduce(name, [1.0, 3.0, 2.0]) == expected
    assert math.isnan(metrics.reduce(name, []))


def test_a_misspelled_metric_is_an_error_that_names_the_nearest():
    with pytest.raises(ValueError, match=r"'reward/men'.*'reward/mean'"):
        metrics.check(["time/step_s", "reward/men"])


def test_any_phase_may_be_timed_but_only_in_seconds():
    assert metrics.find("time/some_new_phase_s").unit == "s"
    with pytest.raises(ValueError):
        metrics.find("time/rollout_ms")


@pytest.mark.parametrize(("name", "label"), FAMILY_MEMBERS.items())
def test_open_families_take_any_name(name, label):
    assert metrics.find(name).meaning and metrics.label(name) == label


NO_MEMBERS = [
    "own/",
    "own/a/b",
    "eval/reward",
    "eval/easy/reward_best",
    "eval/easy/pass_at_k",
    "eval//reward",
    "reward/a/b/mean",
]


@pytest.mark.parametrize("name", NO_MEMBERS)
def test_open_families_are_not_open_to_everything(name):
    with pytest.raises(ValueError, match="is not declared"):
        metrics.find(name)


def test_the_tracker_hands_every_step_to_every_sink_and_closes_them_after_an_error():
    sinks = [Memory(), Memory()]
    with pytest.raises(KeyboardInterrupt), Tracker(sinks) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
        raise KeyboardInterrupt
    assert all(sink.logged == [(1, {"reward/mean": 0.5})] and sink.closed and sink.failed for sink in sinks)


def test_a_preempted_run_has_not_failed():
    sink = Memory()
    with pytest.raises(PreemptedError), Tracker([sink]):
        raise PreemptedError("SIGTERM")
    assert sink.closed and not sink.failed


def test_the_tracker_takes_back_steps_that_will_come_again():
    sink = Memory()
    tracker = Tracker([sink])
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": 0.5})
    tracker.rewind(1, evaluated=True)
    assert [step for step, _ in sink.logged] == [1]


def test_the_tracker_refuses_an_undeclared_name_before_any_sink_sees_it():
    sink = Memory()
    with pytest.raises(ValueError, match="loss/polcy"):
        Tracker([sink]).log(1, {"loss/polcy": 0.0})
    assert sink.logged == []


def test_a_step_without_numbers_is_not_recorded():
    sink = Memory()
    Tracker([sink]).log(1, {})
    assert sink.logged == []


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open():
    class Broken(Memory):
        def close(self, failed=False):
            raise OSError("disk full")

    last = Memory()
    Tracker([Broken(), last]).close()
    assert last.closed


@pytest.mark.parametrize("evaluated", [True, False])
def test_an_evaluation_that_will_be_made_again_is_taken_back(tmp_path, evaluated):
    sinks = [JsonlSink(tmp_path / "metrics.jsonl"), JsonlSink(tmp_path / "eval.jsonl", evaluations=True)]
    with Tracker(sinks) as tracker:
        for step in (1, 2):
            tracker.log(step, {"reward/mean": 0.5, "eval/reward_greedy": 0.5})
        tracker.rewind(1, evaluated)
    steps = [len((tmp_path / name).read_text().splitlines()) for name in ("metrics.jsonl", "eval.jsonl")]
    assert steps == [1, 1 if evaluated else 0]


@pytest.mark.extended
def test_a_resumed_curve_has_what_was_drawn_before(tmp_path):
    metrics_file, eval_file = tmp_path / "metrics.jsonl", tmp_path / "eval.jsonl"
    metrics_file.write_text('{"step": 1, "reward/mean": 0.25, "loss/policy": null}\n{"step": 2, "reward/mean": 0.5}\n')
    eval_file.write_text('{"step": 0, "eval/reward_sampled": 0.125}\n')
    curve = CurveSink(tmp_path / "curve.png")
    curve.read_logs([metrics_file, eval_file])
    curve.log(3, {"reward/mean": 0.75})
    assert curve._snapshot() == ({1: 0.25, 2: 0.5, 3: 0.75}, {"eval/reward_sampled": {0: 0.125}})
    curve.rewind(1, evaluated=True)
    assert curve._snapshot() == ({1: 0.25}, {"eval/reward_sampled": {0: 0.125}})
    curve.close()


def test_each_step_is_on_disk_before_log_returns(tmp_path):
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.log(1, {"reward/mean": 0.25})
    sink.log(2, {"reward/mean": float("nan")})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    sink.close()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "reward/mean": 0.25},
        {"step": 2, "reward/mean": None},
    ]


def test_wandb_is_offline_without_a_login_and_online_with_a_key_or_netrc(no_login, monkeypatch):
    assert wandb_mode() == "offline"
    no_login.write_text("machine api.wandb.ai login user password secret")
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.example.org")
    assert wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"


def test_a_missing_key_of_wandb_is_a_warning_with_the_command_that_uploads(
    no_login, tmp_path, monkeypatch, caplog, own_records
):
    monkeypatch.setattr(WandbSink, "_work", lambda sink: None)
    WandbSink(tracked(tmp_path)).close()
    assert "there is no API key" in caplog.text and f"`wandb sync {tmp_path}/wandb/offline-run-*`" in caplog.text
    caplog.clear()
    for variable, value in (("WANDB_MODE", "offline"), ("WANDB_API_KEY", "secret")):  # offline on purpose, and online
        with monkeypatch.context() as own:
            own.setenv(variable, value)
            WandbSink(tracked(tmp_path)).close()
    assert not own_records()


@pytest.mark.extended
def test_wandb_leaves_an_offline_run_and_never_holds_up_the_start(no_login, tmp_path, monkeypatch):
    start, may_start, in_time = WandbSink._start, threading.Event(), []

    def held_up(sink):
        in_time.append(may_start.wait(30))
        return start(sink)

    monkeypatch.setattr(WandbSink, "_start", held_up)
    sink = WandbSink(tracked(tmp_path, config={"seed": 0}))
    sink.log(1, {"reward/mean": 0.5})
    may_start.set()
    sink.close()
    assert in_time == [True]
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


UNREACHABLE = """
import logging, pathlib, sys, threading, time
from mrl.tracking.backends import TrackedRun, WandbSink
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
start, logged, in_time = WandbSink._start, threading.Event(), []
def after_the_steps(sink):
    in_time.append(logged.wait(60))
    return start(sink)
WandbSink._start = after_the_steps
run = TrackedRun(folder=pathlib.Path(sys.argv[1]), project="mrl", name="test")
sink = WandbSink(run, deadline_s=3.0)
for step in range(3):
    sink.log(step, {"reward/mean": 0.5})
logged.set()
ending = time.monotonic()
sink.close()
assert in_time == [True], "the steps waited"
assert time.monotonic() - ending < 30, "the end waited"
"""


@pytest.mark.extended
def test_a_wandb_server_that_cannot_be_reached_holds_up_neither_steps_nor_the_end(no_login, monkeypatch, tmp_path):
    """The run has its own process, because wandb could also hold up the exit of the process."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    done = subprocess.run([sys.executable, "-c", UNREACHABLE, tmp_path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "WARNING:mrl.tracking.backends:wandb" in done.stdout


@pytest.fixture
def ended(monkeypatch):
    """Count how often wandb's helper process would be ended, without ending it."""
    calls: list[None] = []
    monkeypatch.setattr(backends, "_kill_wandb_service", lambda: calls.append(None))
    return calls


def test_a_failure_in_wandb_is_one_warning_and_nothing_else(monkeypatch, tmp_path, caplog, own_records, ended):
    def fail(self):
        raise ConnectionError("no route")

    monkeypatch.setattr(WandbSink, "_start", fail)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with caplog.at_level(logging.WARNING), Tracker([WandbSink(tracked(tmp_path))]) as tracker:
        for step in range(3):
            tracker.log(step, {"reward/mean": 0.5})
    assert [record.levelname for record in own_records()] == ["WARNING"]
    assert "no route" in caplog.text
    assert len(ended) == 1


def test_a_wandb_that_hangs_is_left_behind_at_the_deadline(monkeypatch, tmp_path, caplog, ended):
    release = threading.Event()
    monkeypatch.setattr(WandbSink, "_start", lambda self: None)
    monkeypatch.setattr(WandbSink, "_finish", lambda self: release.wait(60))
    sink = WandbSink(tracked(tmp_path), deadline_s=0.2)
    start = time.monotonic()
    sink.close()
    assert time.monotonic() - start < 5
    assert "did not finish" in caplog.text
    assert len(ended) == 1
    release.set()


def test_without_a_terminal_progress_is_one_line_per_interval_and_the_last_step():
    def log(sink):
        for step in range(1, 11):
            sink.log(step, {"reward/mean": step / 10, "time/step_s": 1.0, "time/rollout_s": 0.75})

    lines = console_lines(log, every_s=3600)
    assert len(lines) == 3 and lines[0] == "reward: mean reward of the step, with the same weight for each prompt"
    assert "1/10  reward 0.100  1.00 s a step (rollout 0.75, other 0.25)" in lines[1]
    assert "10/10  reward 1.000" in lines[2]


@pytest.mark.parametrize("terminal", [False, True])
def test_held_out_reward_is_always_printed_and_compared_at_the_end(terminal):
    def log(sink):
        sink.log(0, {"eval/reward_sampled": 0.5})
        sink.log(5, {"reward/mean": 0.8})
        sink.log(10, {"eval/reward_sampled": 0.75})

    text = "\n".join(console_lines(log, terminal=terminal, every_s=3600))
    assert "held-out sampled 0.500" in text
    assert "before -> after: sampled 0.500 -> 0.750 (+0.250)" in text


def test_an_accuracy_that_equals_the_mean_reward_is_not_shown_twice():
    shown = metric_families.shown_evaluation(
        {
            "eval/reward_greedy": 0.5,
            "eval/accuracy_greedy": 0.5,
            "eval/a/reward": 0.25,
            "eval/a/accuracy": 0.5,
            "eval/a/pass_at_2": 0.75,
            "reward/mean": 0.5,
        }
    )
    assert shown == {"eval/reward_greedy": 0.5, "eval/a/reward": 0.25, "eval/a/accuracy": 0.5}


def test_held_out_sets_with_a_sampling_of_their_own_are_shown_and_drawn():
    def log(sink):
        sink.log(0, {"eval/aime/reward": 0.25, "eval/aime/accuracy": 0.25, "eval/aime/pass_at_4": 0.5})
        sink.log(1, {"reward/mean": 0.5, "eval/aime/reward": 0.5, "eval/aime/accuracy": 0.5})

    text = "\n".join(console_lines(log, total=1))
    assert "step    0  held-out aime reward 0.250\n" in text and "pass@4" not in text
    assert "step    1/1  reward 0.500  aime reward 0.500" in text
    assert "held-out, before -> after: aime reward 0.250 -> 0.500 (+0.250)" in text
    own = {"eval/aime/reward": {0: 0.5}, "eval/aime/pass_at_4": {0: 0.5}, "eval/b/reward_greedy": {0: 0.5}}
    assert drawn_evaluations(own) == ["eval/aime/reward", "eval/b/reward_greedy"]
    assert drawn_evaluations(own | {"eval/reward_greedy": {0: 0.5}}) == ["eval/reward_greedy"]


def test_on_a_terminal_the_display_shows_reward_phases_and_throughput():
    def log(sink):
        sink.log(3, {"reward/mean": 0.3, "time/step_s": 1.0, "time/update_s": 0.5, "throughput/tokens_per_s": 4210})

    text = "\n".join(console_lines(log, terminal=True))
    for part in ("3/10", "reward 0.300", "update 0.50", "4,210 tokens/s"):
        assert part in text


def test_the_curve_is_a_picture_and_appears_before_the_run_ends(tmp_path):
    path = tmp_path / "curve.png"
    sink = CurveSink(path, every=2)
    sink.log(0, {"eval/reward_sampled": 0.5, "eval/reward_greedy": 0.6})
    for step in (1, 2):
        sink.log(step, {"reward/mean": 0.4})
    assert sink._drawing is not None
    sink._drawing.result(timeout=60)
    assert path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    sink.close()
    assert path.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["curve.png"]


def test_a_run_that_ends_before_its_first_step_draws_nothing(tmp_path):
    CurveSink(tmp_path / "curve.png").close()
    assert not (tmp_path / "curve.png").exists()


def test_importing_the_tracker_loads_neither_wandb_nor_matplotlib_nor_rich():
    modules = ", ".join(f"mrl.tracking.{name}" for name in ("tracker", "console", "backends"))
    code = f"import sys, {modules}; print(*{{'wandb', 'matplotlib', 'rich', 'torch'}} & set(sys.modules))"
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.strip() == ""


def test_the_phases_of_a_step_add_up_to_it_and_phases_between_steps_stand_apart():
    def log(sink):
        times = {"rollout": 1.25, "update": 0.5, "evaluate": 2.0, "checkpoint": 0.001}
        sink.log(
            1, {"reward/mean": 0.5, "time/step_s": 2.0} | {f"time/{name}_s": value for name, value in times.items()}
        )

    assert (
        "2.00 s a step (rollout 1.25, update 0.50, other 0.25; before the step: evaluate 2.00)" in console_lines(log)[1]
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_the_terminal_says_once_what_the_names_mean(terminal):
    def log(sink):
        sink.log(0, {"eval/reward_sampled": 0.5})
        for step in (1, 2):
            sink.log(step, {"reward/mean": 0.5, "mismatch/logprob_abs_max": 1e-5})

    text = "\n".join(console_lines(log, terminal=terminal))
    meaning = "mismatch: largest absolute difference between the trainer's and the engine's log-probability of a token"
    assert (
        text.count(meaning) == 1
        and text.count("reward: mean reward of the step, with the same weight for each prompt") == 1
    )


def test_the_curve_names_its_raw_and_its_smoothed_line(tmp_path, monkeypatch):
    labels = []
    from matplotlib.axes import Axes

    plot = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, *a, **k: labels.append((k.get("linewidth"), k.get("label"))) or plot(self, *a, **k)
    )
    draw_curve(tmp_path / "curve.png", {1: 0.1, 2: 0.3}, {}, metric="reward/mean")
    assert labels == [
        (1, "mean reward of the step, with the same weight for each prompt"),
        (2.2, "mean of the last 10 steps"),
    ]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("outputs/quickstart/2026-01-31_12-00-00", "quickstart/2026-01-31_12-00-00"),
        ("outputs/lr-sweep/3", "quickstart/lr-sweep/3"),
    ],
)
def test_runs_have_different_names_in_wandb(tmp_path, folder, name):
    assert backends.default_run_name("quickstart", tmp_path / folder) == name


def test_trackers_get_name_group_entity_tags_and_notes_of_the_config(tmp_path):
    def run_of(*overrides):
        config = hydra_entry.compose_config(["experiment=quickstart", f"run.dir={tmp_path}/a", *overrides])
        return build._tracked_run(config, last_step=3)

    run = run_of("tracking.entity=team", "tracking.tags=[baseline,lr]", "tracking.notes=first", "tracking.group=g")
    assert (run.entity, run.tags, run.notes, run.group) == ("team", ["baseline", "lr"], "first", "g")
    assert run.name == "quickstart/a" and run.project == "mrl" and run.last_step == 3
    assert run_of("tracking.name=mine").name == "mine"
