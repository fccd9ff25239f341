"""The timeline of a run: the merged trace, the summary in sentences, and the command."""

import json

import pytest
from trace_format import check_trace_format, has_perfetto, query_perfetto

from mrl.commands import timeline as command
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
from parallel import spans

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


def test_other_s_is_the_time_of_the_passes_that_no_micro_batch_and_no_reduction_takes():
    rank = trainer_rank(0, computing_s=6.0, pp=1)
    rank.spans.append(Span("gradient reduction", "collective", 112.0, 1.0, 1))
    work = rank_work(rank)
    assert (work.computing_s, work.reducing_s, work.other_s, work.tokens) == (6.0, 1.0, 3.0, 100)
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
    tail = "The tail of the rollout, in which the slower half of a step's requests ends, takes 30% of the rollout."
    assert f"In all, requests sampled 1,000 tokens. {tail}" in found
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
