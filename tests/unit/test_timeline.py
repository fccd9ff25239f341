"""The timeline of a run: spans of each process, the merged trace, the summary in sentences, and profiles of steps."""

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
from trace_format import check_trace_format, has_perfetto, query_perfetto

from mrl.commands import timeline as command
from mrl.config.process_schema import ProfileConfig
from mrl.controller.loop_parts import Phases
from mrl.controller.plan_train import check_profile
from mrl.tracking.timeline import (
    ProcessTimeline,
    Span,
    overlap_seconds,
    rank_work,
    read_timeline,
    summarize,
    trace_events,
    write_trace,
)
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
    from mrl.rollout.engines.batch_spans import harmless, note_launch

    hook = harmless(note_launch.__wrapped__)
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


# The merged file.


def write_lines(run_dir, name, *lines, end="\n"):
    path = run_dir / spans.FOLDER / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in lines) + end)
    return path


def header(name="actor rank 0", role="actor", rank=0):
    return dict(process=name, role=role, rank=rank, host="a", pid=1)


def line(name, step, start=0.0, seconds=1.0, kind="phase", **args):
    return dict(name=name, kind=kind, start=start, seconds=seconds, step=step, args=args)


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path):
    old = [header(), line("old", 1), line("old", 2), line("old", 3)]
    write_lines(tmp_path, "actor-0", *old, header(), line("start", 0), line("new", 2))
    (timeline,) = read_timeline(tmp_path)
    assert [(span.name, span.step) for span in timeline.spans] == [("old", 1), ("start", 0), ("new", 2)]


def test_steps_that_a_running_process_repeats_count_once(run_dir):
    """After a loss of trainer ranks, the driver and the rollout worker go on and repeat steps."""
    for step in (1, 2, 3, 2):
        spans.begin_step(step)
        spans.record("first", "phase", 0.0, 1.0)
    spans.begin_step(2)
    spans.record("last", "phase", 0.0, 1.0)
    assert [(span.name, span.step) for span in recorded(run_dir)] == [("first", 1), ("last", 2)]


def test_a_line_that_a_killed_process_left_incomplete_is_skipped_and_the_next_process_appends(tmp_path):
    path = write_lines(tmp_path, "actor-0", header(), line("old", 1), end='\n{"name": "x", "ki')
    spans.start(path.parent, "actor", 0, "actor rank 0")
    spans.begin_step(2)
    spans.record("new", "phase", 0.0, 1.0)
    spans.stop()
    (timeline,) = read_timeline(tmp_path)
    assert [span.name for span in timeline.spans] == ["old", "new"]


def test_the_trace_has_named_processes_and_rows_in_which_spans_nest():
    requests = [Span("request", "request", start, 2.0, 1) for start in (10.0, 10.5, 11.0, 12.5)]
    work = [
        Span("outer", "phase", 10.0, 3.0, 1),
        Span("inner", "phase", 10.5, 1.0, 1),
        Span("next", "phase", 13.0, 1.0, 2),
    ]
    background = [Span("checkpoint write", "checkpoint", 10.2, 9.0, 1, {"in_background": True})]
    timelines = [
        ProcessTimeline("driver", "driver", 0, "a", spans=work),
        ProcessTimeline("rollout worker", "rollout", 0, "b", spans=requests + background),
    ]
    events = list(trace_events(timelines))
    check_trace_format(events)
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["main", "background", "requests", "requests 2", "requests 3"]
    assert [event["args"]["labels"] for event in events if event["name"] == "process_labels"] == ["a", "b"]
    (inner,) = (event for event in events if event["name"] == "inner")
    assert (inner["ts"], inner["dur"], inner["args"], inner["cat"]) == (500_000, 1_000_000, {"step": 1}, "phase")


def test_the_written_file_is_one_json_object_with_all_spans(tmp_path):
    timelines = [ProcessTimeline("driver", "driver", 0, spans=[Span("rollout", "phase", 5.0, 1.0, 1)])]
    write_trace(timelines, tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["rollout"]


@pytest.mark.skipif(
    not has_perfetto(), reason="no Perfetto or no Node.js; scripts/fetch_perfetto.sh downloads Perfetto"
)
def test_perfetto_reads_the_processes_rows_and_spans_of_a_trace(tmp_path):
    spans_of_driver = [Span("outer", "phase", 5.0, 2.0, 7, {"tokens": 3}), Span("inner", "phase", 5.5, 1.0, 7)]
    write_trace([ProcessTimeline("driver", "driver", 0, "host", spans=spans_of_driver)], tmp_path / "timeline.json")
    tracks = "from slice join thread_track on slice.track_id = thread_track.id join thread using(utid) join process using(upid)"
    slices, arguments = query_perfetto(
        tmp_path / "timeline.json",
        f"select process.name, thread.name, slice.name, category, ts, dur, depth {tracks} order by ts",
        "select key, int_value from args where key like 'args.%' order by key, int_value",
    )
    start = slices[0][4]
    assert slices == [
        ["driver", "main", "outer", "phase", start, 2_000_000_000, 0],
        ["driver", "main", "inner", "phase", start + 500_000_000, 1_000_000_000, 1],
    ]
    assert ["args.tokens", 3] in arguments and ["args.step", 7] in arguments


# The summary.


def driver(*durations, step=1, start=100.0):
    """Return the driver's timeline of one step with the phases rollout, update and weight_sync."""
    found, at = [], start
    for name, seconds in zip(("rollout", "update", "weight_sync"), durations, strict=True):
        found.append(Span(name, "phase", at, seconds, step))
        at += seconds
    return ProcessTimeline("driver", "driver", 0, spans=found)


def trainer_rank(rank, computing_s, tokens=100, pp=0, host="a", passes_s=10.0):
    passes = Span("forward and backward", "phase", 104.0, passes_s, 1)
    half = computing_s / 2
    micro = [
        Span("forward", "micro_batch", 104.0, half, 1, {"tokens": tokens}),
        Span("backward", "micro_batch", 104.0 + half, half, 1, {"tokens": tokens}),
        Span("forward", "micro_batch", 90.0, 5.0, 1, {"tokens": 999}),  # for log-probabilities, outside of the passes
    ]
    return ProcessTimeline(f"actor rank {rank}", "actor", rank, host, {"pp": pp}, [passes, *micro])


def text(*timelines):
    return "\n".join(summarize(timelines))


def test_the_summary_gives_the_share_of_each_phase_and_the_longest_phase():
    found = summarize([driver(6.0, 3.0, 1.0), driver(6.0, 3.0, 1.0, step=2, start=200.0)])
    assert (
        found[0]
        == "2 steps took 10.00 s on average, without evaluation and checkpoints: rollout 60%, update 30%, weight_sync 10%."
    )
    assert found[1] == "The phase rollout takes the most time."


def test_a_step_that_has_not_ended_is_left_out():
    unfinished = ProcessTimeline("driver", "driver", 0, spans=[Span("rollout", "phase", 300.0, 50.0, 2)])
    assert "1 step took 10.00 s" in text(driver(6.0, 3.0, 1.0), unfinished)
    with pytest.raises(ValueError, match="no complete step"):
        summarize([unfinished])


def test_the_bubble_is_the_time_of_the_passes_that_no_micro_batch_and_no_reduction_takes():
    rank = trainer_rank(0, computing_s=6.0, pp=1)
    rank.spans.append(Span("gradient reduction", "collective", 112.0, 1.0, 1))
    work = rank_work(rank)
    assert (work.computing_s, work.reducing_s, work.bubble_s, work.tokens) == (6.0, 1.0, 3.0, 100)
    found = text(driver(4.0, 12.0, 1.0), rank)
    spent = (
        "spend 60% of the time on micro-batches, 10% on gradient reduction and 30% on waits for other pipeline stages."
    )
    assert f"The phase update takes the most time: in forward and backward passes, the actor ranks {spent}" in found


@pytest.mark.parametrize(
    "slow, reason",
    [
        (trainer_rank(3, 8.0, tokens=130), "its micro-batches have 30% more tokens"),
        (trainer_rank(3, 8.0, host="b"), "so its host b is slower"),
        (trainer_rank(3, 8.0), "so its device is slower or shared"),
    ],
)
def test_the_slowest_rank_is_named_with_the_reason(slow, reason):
    found = text(driver(4.0, 12.0, 1.0), *(trainer_rank(rank, 6.0) for rank in range(3)), slow)
    assert "actor rank 3 computes 33% longer than the others: it" in found and reason in found


def test_no_rank_is_called_slow_within_the_noise_or_because_it_is_of_another_pipeline_stage():
    ranks = [trainer_rank(0, 6.0), trainer_rank(1, 6.1), trainer_rank(2, 9.0, pp=1), trainer_rank(3, 9.1, pp=1)]
    assert "longer than the others" not in text(driver(4.0, 12.0, 1.0), *ranks)


def test_no_rank_is_called_slow_if_the_others_recorded_nothing():
    ranks = [trainer_rank(0, 0.0), trainer_rank(1, 0.0), trainer_rank(2, 6.0)]
    assert "longer than the others" not in text(driver(4.0, 12.0, 1.0), *ranks)


def test_the_rollout_sentences_give_the_work_of_engines_and_the_tail_of_requests():
    batches = [Span("decode", "engine_batch", 100.0, 2.0, 1), Span("decode", "engine_batch", 101.0, 2.0, 1)]
    engine = ProcessTimeline("engine rank 0", "engine", 0, spans=batches)
    ends = (2.0, 3.0, 4.0, 6.0)
    worker = ProcessTimeline("rollout worker", "rollout", 0)
    worker.spans = [Span("request", "request", 100.0, end, 1, {"tokens": 250}) for end in ends]
    worker.spans += [Span("request", "request", 50.0, 1.0, 1, {"tokens": 99}), Span("score", "reward", 105.0, 1.5, 1)]
    found = text(driver(10.0, 3.0, 1.0), engine, worker)
    assert "The phase rollout takes the most time: the engines compute during 30% of the rollout." in found
    assert "Requests sample 1,000 tokens; during 30% of the rollout, at most half" in found
    assert "Rewards are computed during 15% of the rollout." in found


def test_the_overlap_counts_overlapping_spans_once_and_only_inside_the_intervals():
    assert overlap_seconds([(0, 2), (1, 3), (9, 12)], [(1, 2.5), (10, 11), (20, 30)]) == pytest.approx(2.5)


# The command.


def test_the_command_writes_the_trace_and_prints_the_summary(tmp_path, capsys):
    phases = [line(name, step, 10.0 * step, 1.0) for step in (1, 2, 3) for name in ("rollout", "weight_sync")]
    write_lines(tmp_path, "driver-0", header("driver", "driver"), *phases, dict(dropped=3))
    assert command.main([f"run.dir={tmp_path}", "--steps", "2:3"]) == 0
    printed = capsys.readouterr().out
    assert "2 steps took 2.00 s" in printed and "3 spans were dropped" in printed and "ui.perfetto.dev" in printed
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2, 3}
    assert summarize(read_timeline(tmp_path))[0].startswith("3 steps took")


def test_a_timeline_without_a_complete_step_is_merged_without_a_summary(tmp_path, capsys):
    write_lines(tmp_path, "driver-0", header("driver", "driver"), line("evaluate", 1))
    assert command.main([str(tmp_path)]) == 0
    assert "no complete step yet" in capsys.readouterr().out and (tmp_path / "timeline.json").exists()
    with pytest.raises(ValueError, match="no complete step"):
        summarize(read_timeline(tmp_path))


@pytest.mark.parametrize("steps", ["3:2", "a", "0:3", "1:2:3"])
def test_a_wrong_range_of_steps_is_refused(tmp_path, capsys, steps):
    assert command.main([str(tmp_path), "--steps", steps]) == 2
    assert f"mrl: --steps {steps}: expected A:B" in capsys.readouterr().err


def test_a_run_without_a_timeline_or_without_the_steps_is_a_mistake_with_a_remedy(tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 2
    assert "start the run with tracking.timeline=true" in capsys.readouterr().err
    write_lines(tmp_path, "driver-0", header("driver", "driver"), line("rollout", 1), line("weight_sync", 1))
    assert command.main([str(tmp_path), "--steps", "5"]) == 2
    assert "no span of the steps 5 to 5" in capsys.readouterr().err


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
