"""The diagnosis of a hang from stacks, kernel states and counts of collectives, its report and its error."""

import ast
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import OutOfMemoryError

from mrl.hang_report import process_registry, ray_wait
from mrl.hang_report.diagnosis import HangDiagnosis, diagnose, format_ranks, report_text
from mrl.hang_report.process_registry import ProcessRecord, read_activities, read_process_records
from mrl.hang_report.process_snapshot import (
    PURPOSES,
    WAITS,
    ProcessSnapshot,
    StackFrame,
    parse_stack_dump,
    snapshot_processes,
    summarize_stacks,
)
from mrl.hang_report.ray_wait import RankLostError, RayWaiter, is_peer_error, write_report
from mrl.weight_sync.engine_control import WeightSyncError
from parallel.collective_log import LastCollective

ROOT = Path(__file__).resolve().parents[2]
MEGATRON = "/x/site-packages/megatron/core"
IDLE = [StackFrame("/x/site-packages/ray/_private/worker.py", 1, "main_loop")]
IN_DATA = [StackFrame("/home/me/rows.py", 12, "sleepy"), StackFrame("/r/mrl/workers/micro_batch.py", 60, "build")]
IN_REDUCE = [
    StackFrame("/x/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce"),
    StackFrame(f"{MEGATRON}/distributed/param_and_grad_buffer.py", 700, "finish_grad_sync"),
    StackFrame(f"{MEGATRON}/distributed/finalize_model_grads.py", 600, "finalize_model_grads"),
    StackFrame("/r/parallel/pipeline_schedule.py", 75, "_run"),
]
IN_SYNC = [
    StackFrame("/x/site-packages/httpcore/_sync/connection.py", 5, "read"),
    StackFrame("/r/mrl/weight_sync/sender.py", 9, "push"),
]


def rank(number: int, stack, state: str = "sleeping", entered: int = 7) -> ProcessSnapshot:
    record = ProcessRecord(
        f"trainer_{number}", f"rank {number} (dp {number})", "rank", "host", 100 + number, 1, "", number
    )
    last = LastCollective("3", "DATA_PARALLEL_GROUP", (0, 1, 2, 3), entered, 0, "allreduce", -1, 1_200_000, time.time())
    return ProcessSnapshot(record, state, stacks=(tuple(stack),) if stack else (), collectives=(last,))


def diagnose_ranks(*stacks, **changes) -> HangDiagnosis:
    snapshots = [rank(number, stack) for number, stack in enumerate(stacks)]
    snapshots += [rank(len(snapshots) + i, *arguments) for i, arguments in enumerate(changes.values())]
    return diagnose(snapshots, lambda snapshot: True)


def test_a_rank_that_does_not_wait_is_blamed_before_ranks_that_wait():
    diagnosis = diagnose_ranks(IN_REDUCE, IN_DATA, IN_REDUCE, IN_REDUCE)
    assert [snapshot.title for snapshot in diagnosis.blamed] == ["rank 1 (dp 1)"]
    assert diagnosis.sentence == (
        "rank 1 (dp 1) is in data loading (me/rows.py:12); ranks 0, 2-3 wait for other ranks in the gradient reduction "
        "(parallel/pipeline_schedule.py:75)"
    )


@pytest.mark.parametrize(
    ("stack", "state", "words"),
    [
        ([], "dead", "died: no error message; killed by SIGKILL"),
        ([], "stopped", "is stopped (pid 102; `kill -CONT 102` resumes it)"),
        (IN_SYNC, "sleeping", "waits for an answer over HTTP in the weight sync"),
        (IDLE, "sleeping", "is idle"),
    ],
)
def test_dead_stopped_and_idle_ranks_and_ranks_that_wait_for_an_engine_are_blamed(stack, state, words):
    diagnosis = diagnose_ranks(IN_REDUCE, IN_REDUCE, odd=(stack, state))
    assert [snapshot.title for snapshot in diagnosis.blamed] == ["rank 2 (dp 2)"] and words in diagnosis.sentence


def test_the_rank_that_entered_fewer_collectives_is_blamed_if_all_ranks_wait():
    diagnosis = diagnose_ranks(IN_REDUCE, IN_REDUCE, late=(IN_REDUCE, "sleeping", 6))
    assert [snapshot.title for snapshot in diagnosis.blamed] == ["rank 2 (dp 2)"]
    expected = (
        'it has entered 6 collectives of the process group "data parallel" (ranks 0, 1, 2, 3), but another member has entered 7 '
        "(the last: allreduce, 1.2 MB)"
    )
    assert expected in diagnosis.sentence
    assert diagnose_ranks(IN_REDUCE, IN_REDUCE).blamed == ()


def test_a_rank_that_gave_up_waiting_is_blamed_only_if_it_waited_for_no_one():
    """NCCL's watchdog aborts ranks that wait too long. An abort counts as the rank's own fault only if no rank lags behind."""
    record = rank(0, IN_REDUCE).record
    aborted = replace(rank(0, []), record=record, state="dead", crash="Aborted")
    diagnosis = diagnose([aborted, rank(1, IN_DATA, entered=6)], lambda snapshot: True)
    assert [snapshot.record.rank for snapshot in diagnosis.blamed] == [1]
    assert "rank 0 (dp 0) died: Aborted" in diagnosis.sentence
    diagnosis = diagnose([aborted, rank(1, IN_REDUCE)], lambda snapshot: True)
    assert [snapshot.record.rank for snapshot in diagnosis.blamed] == [0]


def test_a_process_that_was_not_called_is_blamed_only_if_it_is_dead_or_stopped():
    snapshots = [rank(0, IN_REDUCE), rank(1, IN_REDUCE), rank(2, IN_DATA), rank(3, [], "stopped")]
    diagnosis = diagnose(snapshots, lambda snapshot: snapshot.record.rank < 2)
    assert [snapshot.record.rank for snapshot in diagnosis.blamed] == [3]
    diagnosis = diagnose(snapshots[:3], lambda snapshot: snapshot.record.rank < 2)
    assert diagnosis.blamed == () and "ranks 0-1 wait" in diagnosis.sentence


def test_the_helper_thread_that_the_main_thread_waits_for_is_described():
    pool = [StackFrame(f"{os.__file__.removesuffix('os.py')}concurrent/futures/_base.py", 451, "result")]
    reward = [
        StackFrame("/home/me/reward.py", 3, "__call__"),
        StackFrame("/r/mrl/rewards/reward_types.py", 40, "call_reward"),
    ]
    scoring = StackFrame("/home/me/scoring.py", 210, "score")
    assert str(summarize_stacks([[*pool, scoring], reward])) == "is in scoring (me/reward.py:3)"


def test_an_event_loop_without_frames_is_recognized_by_its_caller():
    (file, function) = next(key for key, text in WAITS.items() if text == "an answer over the network" and key[1])
    runner = StackFrame(f"{os.__file__.removesuffix('os.py')}asyncio/runners.py", 118, "run")
    engines = [StackFrame(f"/r/{file}", 201, function), StackFrame("/r/mrl/rollout/worker.py", 82, "sample")]
    summary = summarize_stacks([[runner, runner, *engines]])
    assert str(summary).startswith("waits for an answer over the network")
    server = StackFrame(f"{os.path.dirname(pytest.__file__)}/../uvicorn/server.py", 75, "run")
    assert str(summarize_stacks([[runner, runner, server]])) == "is idle"


def test_the_tables_name_files_and_functions_that_exist():
    for file, prefix in [
        key for table in (WAITS, PURPOSES) for key in table if key[0].startswith(("mrl/", "parallel/"))
    ]:
        assert (ROOT / file).exists(), file
        if prefix and prefix != "<":  # "<" matches lambdas and comprehensions
            tree = ast.parse((ROOT / file).read_text())
            names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            assert any(name.startswith(prefix) for name in names), (file, prefix)


def test_ranks_are_formatted_as_ranges():
    assert format_ranks([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


def test_errors_that_only_report_a_lost_peer_are_recognized():
    assert is_peer_error(RuntimeError("[..gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3333"))
    assert not is_peer_error(RuntimeError("pp=3 does not divide 28 layers"))
    engine_error = WeightSyncError("http://a:1/pause answered: Connection reset by peer")
    assert not is_peer_error(engine_error), "the peer is an engine, not a rank"


def test_ranks_that_ray_kills_for_lack_of_memory_are_lost(tmp_path, monkeypatch):
    def get(futures, **_):
        if futures != "first":
            raise OutOfMemoryError("4 worker(s) were killed due to the node running low on memory")

    monkeypatch.setattr(ray_wait.ray, "get", get)
    monkeypatch.setattr(ray_wait.ray, "wait", lambda futures, **_: (futures, []))
    with pytest.raises(RankLostError, match="short of memory") as caught:
        RayWaiter(tmp_path, "rank").get(["first", "second"], 5.0, "update() on 2 trainer ranks")
    assert caught.value.ranks == (1,) and "4 worker(s) were killed" in caught.value.report.read_text()


@pytest.fixture
def lose_rank(tmp_path, monkeypatch):
    """`lose_rank()` returns the error of a call to a rank that Ray reports as lost."""

    def get(futures, **_):
        raise OutOfMemoryError("worker(s) were killed")

    def wait() -> RankLostError:
        with pytest.raises(RankLostError, match="a process died") as caught:
            RayWaiter(tmp_path, "rank").get(["first"], 5.0, "update()")
        return caught.value

    monkeypatch.setattr(ray_wait.ray, "get", get)
    monkeypatch.setattr(ray_wait.ray, "wait", lambda futures, **_: (futures, []))
    return wait


def test_a_full_disk_prevents_the_report_but_not_the_error_with_its_diagnosis(lose_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_wait, "report_text", lambda *_: "x" * 10**6)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1000, limit[1])
    )  # Python ignores SIGXFSZ, so a longer write fails as on a full disk
    try:
        error = lose_rank()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert error.report is None and error.ranks == (0,) and "The hang report could not be written" in str(error)
    assert list(tmp_path.glob("hang_report_*")) == []


def test_a_failing_diagnosis_does_not_replace_the_original_error(lose_rank, monkeypatch):
    def fail(*_):
        raise KeyError("a record of another version")

    monkeypatch.setattr("mrl.hang_report.ray_wait.diagnose", fail)
    error = lose_rank()
    assert error.report is None and error.ranks == (0,) and "another version" in str(error)


def test_a_process_without_a_stack_file_gets_a_snapshot_without_stacks(child, tmp_path):
    child("time.sleep(60)")
    (tmp_path / "trainer_0.txt").unlink()
    assert snapshot_child(tmp_path).stacks == () and not snapshot_child(tmp_path).dead


def test_a_diagnosed_error_can_be_pickled(tmp_path):
    error = pickle.loads(pickle.dumps(RankLostError("rank 2 died", tmp_path, ("rank 2",), (2,))))
    assert (str(error), error.report, error.names, error.ranks) == ("rank 2 died", tmp_path, ("rank 2",), (2,))
    assert isinstance(error, RuntimeError)


CHILD = """
import ctypes, sys, time
from mrl.hang_report.process_registry import register_process, track_activity
sleep_in_c = ctypes.PyDLL(None).sleep  # keeps the GIL
def stand_still():
    print("here", flush=True)
    {body}
register_process(sys.argv[1], "trainer_0", "rank 0", "rank", rank=0)
with track_activity("step 3"):
    stand_still()
"""


@pytest.fixture
def child(tmp_path):
    """`child(body)` starts a registered process that runs `body`."""
    started = []

    def start(body: str) -> subprocess.Popen:
        script = CHILD.format(body=body)
        process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"here\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def snapshot_child(folder) -> ProcessSnapshot:
    (snapshot,) = snapshot_processes(str(folder), read_process_records(folder))
    return snapshot


def test_a_process_that_holds_the_gil_in_c_code_still_dumps_its_stacks(child, tmp_path):
    child("sleep_in_c(60)")
    snapshot = snapshot_child(tmp_path)
    assert snapshot.stacks[0][0].function == "stand_still"
    assert [activity.text for activity in snapshot.activities] == ["step 3"]


def test_a_stopped_process_is_recognized_and_a_killed_process_keeps_its_activities(child, tmp_path):
    process = child("time.sleep(60)")
    os.kill(process.pid, signal.SIGSTOP)
    while (snapshot := snapshot_child(tmp_path)).state != "stopped":
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    snapshot = snapshot_child(tmp_path)
    assert snapshot.dead and [activity.text for activity in snapshot.activities] == ["step 3"] and not snapshot.crash


def test_the_crash_message_of_a_process_is_known(child, tmp_path):
    process = child("ctypes.string_at(0)")
    process.wait()
    assert snapshot_child(tmp_path).crash == "Segmentation fault"


def test_another_process_that_reuses_the_pid_is_not_signaled(child, tmp_path):
    process = child("time.sleep(60)")
    path = tmp_path / "trainer_0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": 1}))
    assert snapshot_child(tmp_path).dead and process.poll() is None


def test_activities_of_several_threads_are_recorded_together(tmp_path):
    log = process_registry._ActivityLog()
    log.open(tmp_path / "n.activities")
    numbers = [log.begin(f"part {i}") for i in range(3)]
    threads = [threading.Thread(target=log.end, args=[number]) for number in numbers[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [activity.text for activity in read_activities(tmp_path / "n.activities")] == ["part 2"]


def test_reports_are_numbered_and_begin_with_the_diagnosis(tmp_path):
    snapshots = [rank(0, IN_REDUCE), rank(1, IN_DATA, entered=6)]
    diagnosis = diagnose(snapshots, lambda snapshot: True)
    paths = [write_report(tmp_path, report_text("update() hangs", diagnosis, snapshots)) for _ in range(2)]
    assert [path.name for path in paths] == ["hang_report_1.txt", "hang_report_2.txt"]
    lines = paths[0].read_text().splitlines()
    assert lines[0] == "update() hangs" and lines[2].startswith("Diagnosis: rank 1 (dp 1) is in data loading")
    assert [line for line in lines if line.endswith("<- behind")] != []


def test_the_stack_of_the_main_thread_comes_first():
    dump = """Thread 0x01 (most recent call first):
  File "/a.py", line 3 in run
  File "/threading.py", line 9 in _bootstrap

Current thread 0x02 (most recent call first):
  File "/b.py", line 4 in work
  File "/b.py", line 9 in <module>
"""
    assert [stack[0].file for stack in parse_stack_dump(dump)] == ["/b.py", "/a.py"]
