"""Timeline and profiles of a run with four trainer ranks: they agree with the run's metrics, and Perfetto can read them."""

import gzip
import json
import re

import pytest
from trace_format import check_trace_format, has_perfetto, query_perfetto

from mrl.commands import timeline as command
from mrl.tracking.timeline import rank_work, read_timeline

pytestmark = pytest.mark.extended

STEPS = 4


@pytest.fixture(scope="module")
def run(start_mrl, quickstart):
    """A run with tensor and pipeline parallelism, two engine ranks, a checkpoint, and a profile of step 2."""
    layout = ["parallel.tp=2", "parallel.pp=2", "rollout.engine_tp=2", "trainer.max_tokens_per_micro_batch=128"]
    layout += ["algorithm.skip_zero_advantage=false"]  # otherwise a step may have only one micro-batch
    recorded = ["tracking.timeline=true", "profile.steps=[2]", "profile.ranks=[0,3]", "checkpoint.every=2"]
    finished = start_mrl("train", *quickstart, *layout, *recorded, f"trainer.max_steps={STEPS}").finish(400)
    assert finished.process.returncode == 0 and finished.leftovers() == [], finished.output()
    return finished


@pytest.fixture(scope="module")
def timelines(run):
    return {each.process: each for each in read_timeline(run.folder)}


def seconds(spans, *names) -> float:
    return sum(span.seconds for span in spans if span.name in names)


def test_every_process_records_what_it_does(timelines):
    names = {process: {span.name for span in each.spans} for process, each in timelines.items()}
    ranks = {f"actor rank {rank}" for rank in range(4)}
    assert set(names) == ranks | {"driver", "rollout worker", "engine rank 0", "engine rank 1"}
    assert {"rollout", "score", "advantage", "update", "weight_sync", "evaluate", "checkpoint"} <= names["driver"]
    assert {"request", "score responses", "wait for groups", "advantages"} <= names["rollout worker"]
    for rank in ranks:
        assert {"forward", "backward", "gradient reduction", "optimizer step", "weight push"} <= names[rank], rank
        assert {"checkpoint snapshot", "checkpoint write", "agreement of all ranks"} <= names[rank], rank
    for rank in range(2):
        assert {"prefill", "decode", "receive bucket", "verify weights"} <= names[f"engine rank {rank}"], rank
    assert "send bucket" in set().union(*(names[rank] for rank in ranks))
    assert not any(each.dropped for each in timelines.values())


def test_the_spans_of_a_step_add_up_to_its_metrics(run, timelines):
    """The phases take the times in time/*_s. Passes and optimizer steps take component_time/megatron_s, within 5%."""
    for metrics in run.metrics():
        step = metrics["step"]
        phases = [span for span in timelines["driver"].spans if span.step == step]
        for name in ("rollout", "score", "update", "weight_sync"):
            assert seconds(phases, name) == pytest.approx(metrics[f"time/{name}_s"], abs=1e-5), (step, name)
        work = []
        for rank in range(4):
            of_rank = [span for span in timelines[f"actor rank {rank}"].spans if span.step == step]
            work.append(seconds(of_rank, "forward and backward", "optimizer step"))
        assert max(work) == pytest.approx(metrics["component_time/megatron_s"], rel=0.05, abs=5e-3), step


def test_micro_batches_bubbles_and_reductions_fill_the_passes_of_each_rank(timelines):
    for rank in range(4):
        work = rank_work(timelines[f"actor rank {rank}"])
        assert work.computing_s + work.reducing_s <= work.passes_s * 1.001
        assert 0.2 < work.computing_s / work.passes_s < 1, "a rank computes, and waits for the other pipeline stage"
        assert work.other_s > 0


def test_all_micro_batches_have_a_forward_and_a_backward_pass_with_the_same_tokens(timelines):
    counts = set()
    for rank in range(4):
        timeline = timelines[f"actor rank {rank}"]
        tokens = {
            name: sorted(span.args["tokens"] for span in timeline.spans if span.name == name and span.step == 3)
            for name in ("forward", "backward")
        }
        assert tokens["forward"] == tokens["backward"] and len(tokens["forward"]) > 1
        counts.add(len(tokens["forward"]))
    assert len(counts) == 1, "the ranks of one replica have the same micro-batches"


def test_the_tokens_of_requests_are_those_that_the_step_trains(run, timelines):
    for metrics in run.metrics():
        rollout = next(
            span for span in timelines["driver"].spans if (span.name, span.step) == ("rollout", metrics["step"])
        )
        requests = [span for span in timelines["rollout worker"].spans if span.kind == "request"]
        inside = [span for span in requests if rollout.start <= span.start and span.end <= rollout.end + 0.01]
        assert sum(span.args["tokens"] for span in inside) == metrics["rollout/tokens"]


def test_the_merged_timeline_can_be_opened(run, timelines, capsys):
    assert command.main([str(run.folder)]) == 0
    assert re.search(
        rf"^{STEPS} steps took [\d.]+ s on average, without evaluation and checkpoints: .*rollout \d+%",
        capsys.readouterr().out,
    )
    path = run.folder / "timeline.json"
    check_trace_format(json.loads(path.read_text())["traceEvents"])
    if not has_perfetto():
        return
    by_process = "select process.name, count(*) from slice join thread_track on slice.track_id = thread_track.id "
    by_process += "join thread using(utid) join process using(upid) group by 1"
    problems = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    found, errors = query_perfetto(path, by_process, problems)
    assert errors == [] and dict(found) == {process: len(each.spans) for process, each in timelines.items()}


def test_a_part_of_the_steps_can_be_merged(run, capsys):
    assert command.main([str(run.folder), "--steps", "2:3"]) == 0 and "2 steps took" in capsys.readouterr().out
    events = json.loads((run.folder / "timeline.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2, 3}


def test_the_chosen_ranks_profile_the_chosen_step(run):
    paths = sorted((run.folder / "profile").iterdir())
    assert [path.name for path in paths] == ["step2-actor-rank0.json.gz", "step2-actor-rank3.json.gz"]
    for path in paths:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"forward", "optimizer step", "gradient reduction"} <= names and any("aten::" in str(n) for n in names)
    if has_perfetto():
        (((count,),),) = query_perfetto(paths[0], "select count(*) from slice where name = 'optimizer step'")
        assert count == 1
