"""What each process of a run records: spans of its work, and profiles of steps."""

import gzip
import json
import logging
import os
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from mrl.config.process_schema import ProfileConfig
from mrl.controller.loop_parts import Phases
from mrl.controller.plan_train import check_profile
from mrl.tracking.timeline import read_timeline
from mrl.workers.group import StepRecording
from parallel import spans
from parallel.pipeline_schedule import _record_backward
from parallel.step_profile import StepProfiler


@pytest.fixture
def run_dir(tmp_path):
    """A run directory with a timeline, in which this process records as the driver."""
    spans.start(tmp_path / spans.FOLDER, "driver", 0, "driver")
    yield tmp_path
    spans.stop()


def recorded(run_dir):
    """Return the spans of this process."""
    spans.stop()
    (timeline,) = read_timeline(run_dir)
    return timeline.spans


# Spans of one process.


def test_a_span_is_the_same_object_that_does_nothing_while_the_timeline_is_off():
    assert spans.span("a") is spans.span("b", "collective", bytes=1) and not spans.is_recording()
    with spans.span("a"):
        spans.record("b", "request", time.time(), 1.0)


def test_spans_have_the_step_the_duration_the_arguments_and_the_thread(run_dir):
    spans.begin_step(3)
    before = time.time()
    with spans.span("outer"), spans.span("inner", "collective", bytes=7):
        time.sleep(0.02)
    thread = threading.Thread(target=lambda: spans.record("r", "reward", before, 0.5), name="scoring")
    thread.start()
    thread.join()
    elapsed_s = time.time() - before
    inner, outer, reward = recorded(run_dir)
    assert (inner.name, inner.kind, inner.args, inner.step) == ("inner", "collective", {"bytes": 7}, 3)
    assert 0.02 <= inner.seconds <= outer.seconds <= elapsed_s + 0.01 and before - 0.01 <= outer.start <= inner.start
    assert (reward.thread, reward.seconds, outer.thread) == ("scoring", 0.5, "main")


def test_a_span_ends_with_its_error_and_the_error_is_raised(run_dir):
    with pytest.raises(KeyError), spans.span("fails"):
        raise KeyError
    assert [span.name for span in recorded(run_dir)] == ["fails"]


def test_a_timeline_that_cannot_be_opened_is_one_warning(tmp_path, own_records):
    (tmp_path / "timeline").write_text("a file")
    spans.start(tmp_path / "timeline", "driver", 0, "driver")
    with spans.span("a"):
        pass
    assert not spans.is_recording() and [record.levelno for record in own_records()] == [logging.WARNING]


def test_a_disk_that_fails_during_the_run_ends_the_timeline_with_one_warning(run_dir, monkeypatch, own_records):
    monkeypatch.setattr(spans._Recorder, "_write", lambda *_: (_ for _ in ()).throw(OSError("no space left on device")))
    spans.record("a", "phase", 0.0, 1.0)
    spans.stop()
    spans.record("b", "phase", 0.0, 1.0)
    assert [record.getMessage() for record in own_records()] == [
        "the timeline of this process ends: OSError: no space left on device"
    ]


def test_a_disk_that_hangs_does_not_stop_the_process(run_dir, monkeypatch):
    monkeypatch.setattr(spans, "CLOSE_TIMEOUT_S", 0.1)
    release, written = threading.Event(), []
    monkeypatch.setattr(spans._Recorder, "_write", lambda *_: written.append(release.wait(60)))
    spans.record("a", "phase", 0.0, 1.0)
    spans.stop()
    assert written == []
    release.set()


@pytest.mark.parametrize("limit", ["MAX_FILE_BYTES", "MAX_WAITING_SPANS"])
def test_spans_beyond_the_limits_of_file_and_memory_are_dropped_and_counted(run_dir, monkeypatch, limit):
    monkeypatch.setattr(spans, limit, 0)
    for _ in range(5):
        spans.record("a", "phase", 0.0, 1.0)
    assert recorded(run_dir) == [] and read_timeline(run_dir)[0].dropped == 5


def test_a_forked_child_does_not_write_the_spans_of_its_parent(run_dir):
    spans.record("a", "phase", 0.0, 1.0)
    if not (child := os.fork()):
        spans.record("b", "phase", 0.0, 1.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert [span.name for span in recorded(run_dir)] == ["a"]


def test_a_child_process_records_under_the_name_that_its_parent_gives_it(tmp_path, monkeypatch):
    for name, value in spans.child_environment(tmp_path / spans.FOLDER, "engine", 4).items():
        monkeypatch.setenv(name, value)
    spans.start_from_environment(1)
    spans.stop()
    (timeline,) = read_timeline(tmp_path)
    assert (timeline.process, timeline.role, timeline.rank) == ("engine rank 5", "engine", 5)


def test_the_profiler_of_the_device_sees_each_span(run_dir):
    seen = []

    @contextmanager
    def make_range(name):
        seen.append(f"begin {name}")
        yield
        seen.append(f"end {name}")

    spans.annotate(make_range)
    with spans.span("a"):
        seen.append("work")
    spans.annotate(None)
    assert seen == ["begin a", "work", "end a"]


def batch(start, seconds, name="decode", step=1, tokens=4):
    args = dict(batches=1, tokens=tokens, responses=tokens, waiting=0)
    return dict(name=name, kind="engine_batch", start=start, seconds=seconds, step=step, args=args)


def test_decode_batches_in_a_row_become_one_span_with_the_sum_of_their_tokens():
    (joined,) = spans.join_batches([batch(1.0, 0.01), batch(1.011, 0.01, tokens=3)])
    assert joined["args"] == dict(batches=2, tokens=7, responses=4, waiting=0)
    assert joined["seconds"] == pytest.approx(0.021)


@pytest.mark.parametrize("other", [batch(1.011, 0.01, "prefill"), batch(1.011, 0.01, step=2), batch(1.05, 0.01)])
def test_batches_of_another_kind_or_step_and_batches_after_a_pause_stay_apart(other):
    assert len(spans.join_batches([batch(1.0, 0.01), other])) == 2


def test_a_row_of_decode_batches_is_divided_into_spans_of_limited_length():
    joined = spans.join_batches([batch(index * 0.01, 0.01) for index in range(100)])
    assert max(span["seconds"] for span in joined) <= spans.MAX_JOINED_S + 1e-6
    assert sum(span["args"]["batches"] for span in joined) == 100 and len(joined) < 10


def test_the_hooks_in_the_engine_record_each_batch_until_its_result_is_processed(run_dir, monkeypatch):
    from mrl.rollout.engines import batch_spans

    context = SimpleNamespace(get_parallel=lambda: SimpleNamespace(tp_rank=0))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    scheduler = SimpleNamespace(waiting_queue=[1, 2])
    prefill, decode = (
        SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda kind=kind: kind), reqs=[1] * 3, extend_num_tokens=60
        )
        for kind in (True, False)
    )
    batch_spans.note_launch(scheduler, prefill)
    batch_spans.note_launch(scheduler, decode)  # it starts before the result of the first batch is processed
    time.sleep(0.02)
    for each in (prefill, decode):
        batch_spans.record_batch(None, scheduler, each)
    first, second = recorded(run_dir)
    assert (first.name, first.args["tokens"], first.args["waiting"]) == ("prefill", 60, 2) and first.seconds >= 0.02
    assert (second.name, second.args["tokens"], second.kind) == ("decode", 3, "engine_batch")


def test_an_error_in_a_hook_is_logged_once_and_never_reaches_the_engine(own_records):
    from mrl.rollout.engines.batch_spans import log_first_error, note_launch

    hook = log_first_error(note_launch.__wrapped__)
    for _ in range(3):
        hook("no scheduler", "no batch")
    (record,) = own_records()
    assert "records no more batches" in record.getMessage()


def test_the_backward_pass_of_a_micro_batch_is_recorded_until_its_end(run_dir):
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(0.05)
            return gradient

    output = Slow.apply(torch.ones(3, requires_grad=True))
    _record_backward(output, 3)
    output.sum().backward()
    (span,) = recorded(run_dir)
    assert (span.name, span.kind, span.args) == ("backward", "micro_batch", {"tokens": 3}) and span.seconds >= 0.05


def test_the_spans_of_the_phases_add_up_to_the_metrics_of_the_phases(run_dir):
    phases = Phases()
    for name, seconds in {"rollout": 0.05, "update": 0.02}.items():
        with phases(name):
            time.sleep(seconds)
    found = {span.name: span.seconds for span in recorded(run_dir) if span.kind == "phase"}
    assert {f"time/{name}_s": pytest.approx(seconds, abs=1e-6) for name, seconds in found.items()} == phases.seconds()


def test_steps_that_a_running_process_repeats_count_once(run_dir):
    """After a loss of trainer ranks, the driver and the rollout worker go on and repeat steps."""
    for step in (1, 2, 3, 2):
        spans.begin_step(step)
        spans.record("first", "phase", 0.0, 1.0)
    spans.begin_step(2)
    spans.record("last", "phase", 0.0, 1.0)
    assert [(span.name, span.step) for span in recorded(run_dir)] == [("first", 1), ("last", 2)]


# Profiles.


@pytest.mark.parametrize("memory", [False, True])
def test_a_profile_has_the_operators_and_the_spans_of_its_step_only(tmp_path, memory):
    profiler = StepProfiler(tmp_path / "profile", "actor-rank0")
    for step in (1, 2, 3):
        profiler.begin_step(step, step == 2, memory)
        with spans.span(f"pass {step}"):
            torch.ones(4) @ torch.ones(4)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "step2-actor-rank0.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"pass 2", "aten::dot"} <= names and not names & {"pass 1", "pass 3"}
    assert ("[memory]" in names) == memory


def test_each_rank_learns_whether_it_profiles_the_step():
    recording = StepRecording(timeline=True, profile_steps=[3], profile_ranks=[1], profile_memory=True)
    assert [recording.of_rank(rank, step)[1] for rank, step in ((1, 3), (0, 3), (1, 2))] == [True, False, False]
    assert recording.of_rank(0, 1) == (True, False, True)


@pytest.mark.parametrize(
    "profile, message",
    [
        (
            ProfileConfig(steps=[3, 11]),
            "profile.steps=[3, 11]: the run ends after step 10 (trainer.max_steps), so step 11",
        ),
        (
            ProfileConfig(steps=[3], ranks=[0, 4]),
            "profile.ranks=[0, 4]: the run has 4 trainer ranks, so there is no rank 4",
        ),
        (ProfileConfig(steps=[3], ranks=[]), "profile.steps names steps, but no rank is profiled"),
    ],
)
def test_a_profile_of_a_step_or_rank_that_the_run_does_not_have_is_refused(profile, message):
    config = SimpleNamespace(profile=profile, trainer=SimpleNamespace(max_steps=10))
    with pytest.raises(ValueError) as error:
        check_profile(config, num_ranks=4)
    assert message in str(error.value)


def test_a_correct_profile_is_accepted():
    config = SimpleNamespace(profile=ProfileConfig(steps=[1, 10], ranks=[0, 3]), trainer=SimpleNamespace(max_steps=10))
    check_profile(config, num_ranks=4)
