"""The tools of each tracker read what the trackers of tracking.backends have written."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mrl import cli
from mrl.core.sample_file import TextSample
from mrl.tracking import backends
from mrl.tracking.backends import TRACKER_SINKS, MlflowSink, TensorBoardSink, TrackedRun, check_installed
from mrl.tracking.tracker import JsonlSink, Tracker

SAMPLE = TextSample(
    "2*1234=", "2468", 1.0, 0, 0, 4, False, parts={"format": 0.5}, source="doubling", ground_truth="2468"
)


def tracked(folder: Path, **fields) -> TrackedRun:
    more = dict(samples_every=2, read_samples=lambda step: [SAMPLE], tags=["baseline"], notes="first try")
    return TrackedRun(folder=folder, project="sums", name="quickstart/1", config={"run": {"seed": 7}}, **more, **fields)


def log_steps(sink, *steps: int) -> None:
    for step in steps:
        sink.log(step, {"reward/mean": step / 8, "loss/policy": float(step)})
        if step == 2:
            sink.log(step, {"eval/reward_greedy": 0.5})


def run_files(folder: Path, last_step: int) -> list[JsonlSink]:
    """Return the sinks that write the run directory. A run opens them before its trackers."""
    return [
        JsonlSink(folder / "metrics.jsonl", last_step=last_step),
        JsonlSink(folder / "eval.jsonl", evaluations=True, last_step=last_step),
    ]


def log_run_and_resume(make, folder: Path) -> None:
    """Log four steps. Resume after step 2, repeat steps 3 and 4, and log step 5."""
    with Tracker([*run_files(folder, 0), make(tracked(folder))]) as tracker:
        log_steps(tracker, 1, 2, 3, 4)
    with Tracker([*run_files(folder, 2), make(tracked(folder, last_step=2))]) as tracker:
        log_steps(tracker, 3, 4, 5)


def log_killed_run_and_resume(make, folder: Path) -> None:
    """Log step 1, and log step 2 without the tracker of the killed process. Resume after step 2, and log steps 3 to 5."""
    files, sink = run_files(folder, 0), make(tracked(folder))
    log_steps(Tracker([*files, sink]), 1)
    sink.close()
    log_steps(Tracker(files), 2)
    with Tracker([*run_files(folder, 2), make(tracked(folder, last_step=2))]) as tracker:
        log_steps(tracker, 3, 4, 5)


REWARDS = [(step, step / 8) for step in range(1, 6)]


def test_tensorboard_reads_metrics_samples_and_config_of_a_resumed_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_run_and_resume(TensorBoardSink, tmp_path)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in read.Scalars("reward/mean")] == REWARDS
    assert [(point.step, point.value) for point in read.Scalars("eval/reward_greedy")] == [(2, 0.5)]
    samples = read.Tensors("samples")
    assert {point.step for point in samples} == {2, 4}, "only scalars of repeated steps are discarded"
    assert b"2*1234=" in samples[0].tensor_proto.string_val[0] and b"2468" in samples[0].tensor_proto.string_val[0]
    assert b"run.seed: 7" in read.Tensors("config")[-1].tensor_proto.string_val[0]


def test_tensorboard_discards_the_steps_that_a_running_process_repeats(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker([TensorBoardSink(tracked(tmp_path))]) as tracker:
        log_steps(tracker, 1, 2, 3)
        tracker.rewind(1, evaluated=True)
        log_steps(tracker, 2, 3, 4)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [point.step for point in read.Scalars("reward/mean")] == [1, 2, 3, 4]


def test_tensorboard_gets_the_step_that_a_killed_process_did_not_write(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_killed_run_and_resume(TensorBoardSink, tmp_path)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in read.Scalars("reward/mean")] == REWARDS
    assert [(point.step, point.value) for point in read.Scalars("eval/reward_greedy")] == [(2, 0.5)]


@pytest.mark.extended
def test_mlflow_gets_the_step_that_a_killed_process_did_not_send(tmp_path, local_mlflow):
    log_killed_run_and_resume(MlflowSink, tmp_path)
    client, (run,) = mlflow_runs(tmp_path)
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == REWARDS


class OnlineRun:
    """Stands in for a wandb run on a server. As in wandb, a step is sent only with the next step or at the end."""

    def __init__(self, sent: dict[int, dict[str, float]]) -> None:
        self.sent, self.step = sent, max(sent, default=-1) + 1

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.step
        self.sent[step] = self.sent.get(step, {}) | values
        self.step = step

    def finish(self) -> None:
        pass


@pytest.fixture
def sent(monkeypatch) -> dict[int, dict[str, float]]:
    """Step -> the metrics that the server of wandb has."""
    sent: dict[int, dict[str, float]] = {}
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(backends.WandbSink, "_start", lambda self: setattr(self, "_wandb_run", OnlineRun(sent)))
    monkeypatch.setattr(backends.WandbSink, "_write_samples", lambda self, step, samples: None)
    return sent


@pytest.mark.parametrize(("last_step", "shown_at"), [(3, [4]), (1, [])])
def test_wandb_gets_the_evaluation_of_a_step_that_it_already_has(tmp_path, sent, last_step, shown_at):
    """A preempted process sends step 3, but not its evaluation. A run that resumes from step 1 repeats what wandb has."""
    with Tracker([backends.WandbSink(tracked(tmp_path))]) as tracker:
        log_steps(tracker, 1, 3)
    with Tracker([backends.WandbSink(tracked(tmp_path, last_step=last_step))]) as tracker:
        tracker.rewind(last_step, evaluated=False)
        tracker.log(last_step, {"eval/reward_greedy": 0.25})
        log_steps(tracker, 4, 5)
    assert {step: values["reward/mean"] for step, values in sent.items()} == {step: step / 8 for step in (1, 3, 4, 5)}
    assert [step for step, values in sent.items() if values.get("eval/reward_greedy") == 0.25] == shown_at


def test_wandb_gets_the_steps_that_a_killed_process_did_not_send(tmp_path, sent):
    log_killed_run_and_resume(backends.WandbSink, tmp_path)
    assert [(step, values["reward/mean"]) for step, values in sent.items()] == REWARDS
    assert sent[2]["eval/reward_greedy"] == 0.5


def test_tensorboard_has_each_step_once_if_a_run_without_a_checkpoint_begins_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((1, 2, 3), (1, 2)):
        with Tracker([TensorBoardSink(tracked(tmp_path))]) as tracker:
            tracker.log(0, {"eval/reward_greedy": 0.25})
            log_steps(tracker, *steps)
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [point.step for point in read.Scalars("reward/mean")] == [1, 2]
    assert [point.step for point in read.Scalars("eval/reward_greedy")] == [0, 2]


def mlflow_runs(folder: Path):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    return client, client.search_runs([experiment.experiment_id])


@pytest.fixture
def local_mlflow(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow  # noqa: F401  takes seconds, for which a tracker would not wait at its end


@pytest.mark.extended
def test_mlflow_has_one_run_if_a_run_without_a_checkpoint_begins_again(tmp_path, local_mlflow):
    for steps in ((1, 2), (1, 2, 3)):
        with Tracker([MlflowSink(tracked(tmp_path))]) as tracker:
            log_steps(tracker, *steps)
    client, (run,) = mlflow_runs(tmp_path)
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted(point.step for point in history) == [1, 2, 3]


@pytest.mark.extended
def test_mlflow_shows_that_a_run_has_failed(tmp_path, local_mlflow):
    with pytest.raises(OSError), Tracker([MlflowSink(tracked(tmp_path))]) as tracker:
        log_steps(tracker, 1)
        raise OSError("disk full")
    _, (run,) = mlflow_runs(tmp_path)
    assert run.info.status == "FAILED"


def test_mlflow_gets_a_new_run_if_the_server_does_not_have_the_stored_one(tmp_path, local_mlflow, caplog):
    (tmp_path / "mlflow_run_id").write_text("0" * 32)
    with Tracker([MlflowSink(tracked(tmp_path, last_step=2))]) as tracker:
        log_steps(tracker, 3)
    client, (run,) = mlflow_runs(tmp_path)
    assert [point.step for point in client.get_metric_history(run.info.run_id, "reward/mean")] == [3]
    assert "no longer has the run" in caplog.text


def test_mlflow_reads_metrics_parameters_tags_and_samples_of_a_resumed_run(tmp_path, local_mlflow):
    log_run_and_resume(MlflowSink, tmp_path)
    client, (run,) = mlflow_runs(tmp_path)
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted((point.step, point.value) for point in history) == REWARDS
    assert run.info.run_name == "quickstart/1" and run.info.status == "FINISHED"
    assert run.data.params["run.seed"] == "7" and run.data.tags["baseline"] == "true"
    assert run.data.tags["mlflow.note.content"] == "first try"
    artifacts = Path(run.info.artifact_uri.removeprefix("file://")) / "samples"
    assert [path.name for path in sorted(artifacts.iterdir())] == ["step_000002.txt", "step_000004.txt"]
    assert "2*1234=" in (artifacts / "step_000002.txt").read_text()


WANDB_RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_trackers
from mrl.tracking.backends import WandbSink
getattr(test_trackers, sys.argv[3])(WandbSink, Path(sys.argv[1]))
"""


def run_wandb(folder: Path, name: str) -> int:
    """Call the function `name` of this file in its own process group, with wandb offline. Returns the exit status."""
    command = [sys.executable, "-c", WANDB_RUN, str(folder), str(Path(__file__).parent), name]
    env = os.environ | {"WANDB_MODE": "offline"}
    return subprocess.run(command, env=env, timeout=120, start_new_session=True).returncode


def offline_records(folder: Path) -> list[dict]:
    """Return the records of an offline run, which `wandb leet inspect` prints."""
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(inspect, check=True, timeout=120, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def offline_rewards(records: list[dict]) -> dict[int, float]:
    """Return step -> reward of the steps in the records."""
    history = [record["history"] for record in records if record["type"] == "history"]
    return {each["step"]["num"]: each["item"]["reward/mean"] for each in history if "reward/mean" in each["item"]}


def killed_in_init(make, folder: Path) -> None:
    """Log steps 1 and 2 while wandb.init waits, and kill this process and its helpers."""
    import wandb

    wandb.init = lambda **arguments: time.sleep(120)
    log_steps(Tracker([*run_files(folder, 0), make(tracked(folder))]), 1, 2)
    os.killpg(0, signal.SIGKILL)


def killed_after_two_steps(make, folder: Path) -> None:
    """Log steps 1 and 2, wait until wandb has both, and kill this process and its helpers."""
    kill_after(make, folder, 2)


def killed_after_many_steps(make, folder: Path) -> None:
    """Log steps 1 to 200, which need several blocks, and kill this process and its helpers."""
    kill_after(make, folder, 200)


def kill_after(make, folder: Path, steps: int) -> None:
    sink = make(tracked(folder))
    log_steps(Tracker([*run_files(folder, 0), sink]), *range(1, steps + 1))
    while not sink._queue.empty():
        time.sleep(0.05)
    time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def resumed_after_two_steps(make, folder: Path) -> None:
    with Tracker([*run_files(folder, 2), make(tracked(folder, last_step=2))]) as tracker:
        log_steps(tracker, 3, 4, 5)


def resumed_after_many_steps(make, folder: Path) -> None:
    Tracker([*run_files(folder, 200), make(tracked(folder, last_step=200))]).__exit__(None, None, None)


@pytest.mark.extended
@pytest.mark.parametrize("killed", [killed_in_init, killed_after_two_steps])
def test_an_offline_run_of_wandb_gets_the_steps_that_a_killed_process_did_not_write(tmp_path, killed):
    """wandb writes a step to its file only when a block of 32 KiB is full, or when the run ends."""
    assert run_wandb(tmp_path, killed.__name__) == -signal.SIGKILL
    assert run_wandb(tmp_path, "resumed_after_two_steps") == 0
    *_, last = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert sorted(offline_rewards(offline_records(last)).items()) == REWARDS


@pytest.mark.extended
def test_an_offline_run_of_wandb_gets_only_the_steps_that_its_files_lack(tmp_path):
    assert run_wandb(tmp_path, "killed_after_many_steps") == -signal.SIGKILL
    (first,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = list(backends._recorded_steps(first))
    assert 50 < len(found) < 200 and found == list(range(1, len(found) + 1)), "the last block is missing"
    assert run_wandb(tmp_path, "resumed_after_many_steps") == 0
    *_, last = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert list(offline_rewards(offline_records(last))) == list(range(len(found) + 1, 201))


@pytest.mark.extended
def test_wandb_reads_metrics_samples_and_config_of_a_resumed_offline_run(tmp_path):
    """The run has its own process, as every run of mrl has."""
    assert run_wandb(tmp_path, "log_run_and_resume") == 0
    rewards, ids, tables = {}, set(), []
    for folder in sorted(tmp_path.glob("wandb/offline-run-*")):
        records = offline_records(folder)
        runs = [record["run"] for record in records if record["type"] == "run"]
        ids |= {run["run_id"] for run in runs}
        assert {run["display_name"] for run in runs} == {"quickstart/1"} and {run["project"] for run in runs} == {
            "sums"
        }
        rewards |= offline_rewards(records)
        tables += [json.loads(path.read_text()) for path in sorted(folder.glob("files/media/table/*.json"))]
    assert sorted(rewards.items()) == REWARDS, "no step is missing after the resume"
    assert len(ids) == 1, "both processes log to one wandb run"
    assert {table["data"][0][0] for table in tables} == {2, 4}
    assert tables[0]["columns"] == list(backends.SAMPLE_COLUMNS)
    assert tables[0]["data"][0][1:5] == [1.0, "2*1234=", "2468", "2468"]


@pytest.mark.parametrize("backend", TRACKER_SINKS)
def test_a_tracker_that_hangs_never_delays_a_step(backend, tmp_path, monkeypatch, caplog):
    """The tracker's thread waits for `release`, which is set only after all steps were logged."""
    release, kind, ended = threading.Event(), TRACKER_SINKS[backend], []
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(kind, "_start", lambda self: release.wait(60))
    monkeypatch.setattr(kind, "_abandon", lambda self: ended.append(self.name))
    sink = kind(tracked(tmp_path), deadline_s=0.1)
    log_steps(sink, *range(1, 50))
    sink.close()
    assert ended == [backend] and f"{backend} did not finish within" in caplog.text
    monkeypatch.setattr(kind, "_write", lambda self, step, metrics: None)
    monkeypatch.setattr(kind, "_write_samples", lambda self, step, samples: None)
    monkeypatch.setattr(kind, "_finish", lambda self: None)
    release.set()
    sink._thread.join(60)


@pytest.mark.parametrize("backend", TRACKER_SINKS)
def test_a_tracker_that_fails_is_one_warning(backend, tmp_path, monkeypatch, caplog, own_records):
    def fail(self, step, metrics):
        raise ConnectionError("no route")

    kind = TRACKER_SINKS[backend]
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(kind, "_start", lambda self: None)
    monkeypatch.setattr(kind, "_write", fail)
    monkeypatch.setattr(kind, "_abandon", lambda self: None)
    with caplog.at_level(logging.WARNING), Tracker([kind(tracked(tmp_path))]) as tracker:
        log_steps(tracker, 1, 2, 3)
    (record,) = own_records()
    assert f"{backend} failed and gets no more metrics" in record.message and "no route" in record.message


@pytest.mark.parametrize("backend", TRACKER_SINKS)
def test_a_tracker_that_cannot_take_samples_still_gets_metrics(backend, tmp_path, monkeypatch, caplog, own_records):
    def fail(self, step, samples):
        raise ModuleNotFoundError("boto3")

    kind, written = TRACKER_SINKS[backend], []
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(kind, "_start", lambda self: None)
    monkeypatch.setattr(kind, "_write", lambda self, step, metrics: written.append(step))
    monkeypatch.setattr(kind, "_write_samples", fail)
    monkeypatch.setattr(kind, "_finish", lambda self: None)
    with caplog.at_level(logging.WARNING), Tracker([kind(tracked(tmp_path))]) as tracker:
        log_steps(tracker, 1, 3, 4, 6, 8)
    assert written == [1, 3, 4, 6, 8]
    (record,) = own_records()
    assert f"{backend} gets no more samples" in record.message and "boto3" in record.message


def test_a_tracker_that_failed_keeps_no_metrics_in_memory(tmp_path, monkeypatch):
    def fail(self):
        raise ConnectionError("no route")

    monkeypatch.setattr(TensorBoardSink, "_start", fail)
    sink = TensorBoardSink(tracked(tmp_path))
    sink._thread.join(60)
    log_steps(sink, *range(1, 50))
    assert sink._queue.qsize() == 0


def test_a_backend_without_its_package_is_an_error_that_says_what_to_install(monkeypatch):
    check_installed(TRACKER_SINKS)
    monkeypatch.setitem(backends.PACKAGES, "mlflow", ("no_such_module", "mlflow-skinny"))
    with pytest.raises(ValueError, match="install it with `pip install mlflow-skinny`"):
        check_installed(["wandb", "mlflow"])


def test_the_workspace_has_one_section_for_each_area_in_reading_order(tmp_path, capsys):
    """wandb's own classes read the specification that the command writes."""
    from wandb_workspaces.workspaces import Workspace
    from wandb_workspaces.workspaces.internal import View

    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time/step_s": 1.0, "reward/std": 0.5, "reward/mean": 0.5}\n{"st'
    )
    (tmp_path / "eval.jsonl").write_text('{"step": 0, "eval/reward_greedy": 0.5}\n')
    assert cli.main(["wandb-report", str(tmp_path), "--json", str(tmp_path / "view.json")]) == 0
    assert "specification of the workspace" in capsys.readouterr().out
    read = Workspace._from_model(View.model_validate_json((tmp_path / "view.json").read_text()))
    sections = {section.name: [panel.y[0] for panel in section.panels] for section in read.sections}
    assert [*sections] == ["Reward", "Held-out prompts", "Time by phase"] and read.project == "mrl"
    assert [getattr(name, "name", name) for name in sections["Reward"]] == ["reward/mean", "reward/std"]


def test_a_workspace_without_entity_or_metrics_is_one_line(tmp_path, capsys):
    assert cli.main(["wandb-report", str(tmp_path)]) == 2
    assert "has no metrics" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert cli.main(["wandb-report", str(tmp_path)]) == 2
    assert "use --entity to name the user or team" in capsys.readouterr().err
