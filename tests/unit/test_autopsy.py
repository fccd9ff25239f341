"""From stacks, kernel states and counts of collectives to the sentence that names who is to blame."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import OutOfMemoryError

from mrl.hang_report import interfaces, notes, register, report, waiting
from mrl.hang_report.errors import RankLost
from mrl.hang_report.frames import Frame, place, threads
from mrl.hang_report.probe import Seen, probe
from mrl.hang_report.verdict import judge, ranges
from mrl.hang_report.waiting import of_peers
from mrl.weight_sync.errors import SyncError
from parallel.collective_log import LastCollective

MEGATRON = "/x/site-packages/megatron/core"
IDLE = [Frame("/x/site-packages/ray/_private/worker.py", 1, "main_loop")]
IN_DATA = [Frame("/home/me/rows.py", 12, "sleepy"), Frame("/r/mrl/workers/batch.py", 60, "build")]
IN_REDUCE = [
    Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce"),
    Frame(f"{MEGATRON}/distributed/param_and_grad_buffer.py", 700, "finish_grad_sync"),
    Frame(f"{MEGATRON}/distributed/finalize_model_grads.py", 600, "finalize_model_grads"),
    Frame("/r/parallel/schedule.py", 75, "_run"),
]
IN_SYNC = [
    Frame("/x/site-packages/httpcore/_sync/connection.py", 5, "read"),
    Frame("/r/mrl/weight_sync/live.py", 9, "push"),
]


def rank(number: int, stack, state: str = "sleeping", entered: int = 7) -> Seen:
    record = register.Record(
        f"trainer_{number}", f"rank {number} (dp {number})", "rank", "host", 100 + number, 1, "", number
    )
    last = LastCollective("3", "DATA_PARALLEL_GROUP", (0, 1, 2, 3), entered, 0, "allreduce", -1, 1_200_000, time.time())
    return Seen(record, state, stacks=(tuple(stack),) if stack else (), collectives=(last,))


def verdict(*stacks, **changes):
    everyone = [rank(number, stack) for number, stack in enumerate(stacks)]
    everyone += [rank(len(everyone) + i, *how) for i, how in enumerate(changes.values())]
    return judge(everyone, lambda seen: True)


def test_who_does_not_wait_is_named_before_those_who_do():
    found = verdict(IN_REDUCE, IN_DATA, IN_REDUCE, IN_REDUCE)
    assert [seen.title for seen in found.culprits] == ["rank 1 (dp 1)"]
    assert found.sentence == (
        "rank 1 (dp 1) is in data loading (me/rows.py:12); ranks 0, 2-3 wait for other ranks in the gradient all-reduce "
        "(parallel/schedule.py:75)"
    )


@pytest.mark.parametrize(
    ("stack", "state", "words"),
    [
        ([], "dead", "died: ended without a word"),
        ([], "stopped", "is stopped (pid 102; `kill -CONT` lets it go on)"),
        (IN_SYNC, "sleeping", "waits for an answer over HTTP in the weight sync"),
        (IDLE, "sleeping", "has nothing to do"),
    ],
)
def test_the_dead_the_stopped_those_that_wait_for_others_and_the_idle(stack, state, words):
    found = verdict(IN_REDUCE, IN_REDUCE, odd=(stack, state))
    assert [seen.title for seen in found.culprits] == ["rank 2 (dp 2)"] and words in found.sentence


def test_of_ranks_that_all_wait_the_one_behind_is_named():
    found = verdict(IN_REDUCE, IN_REDUCE, late=(IN_REDUCE, "sleeping", 6))
    assert [seen.title for seen in found.culprits] == ["rank 2 (dp 2)"]
    assert "it has entered 6 collectives of group data parallel (ranks 0, 1, 2, 3) and others 7" in found.sentence
    assert "(the last: allreduce, 1.2 MB)" in found.sentence
    assert verdict(IN_REDUCE, IN_REDUCE).culprits == ()


def test_ranks_that_gave_up_waiting_are_not_blamed_for_their_end():
    """NCCL's watchdog aborts those that wait; without one that they waited for, an abort is a rank's own."""
    record = rank(0, IN_REDUCE).record
    gave_up = replace(rank(0, []), record=record, state="dead", crash="Aborted")
    found = judge([gave_up, rank(1, IN_DATA, entered=6)], lambda seen: True)
    assert [seen.record.rank for seen in found.culprits] == [1] and "rank 0 (dp 0) died: Aborted" in found.sentence
    found = judge([gave_up, rank(1, IN_REDUCE)], lambda seen: True)
    assert [seen.record.rank for seen in found.culprits] == [0]


def test_a_process_that_was_not_asked_is_blamed_only_when_it_is_dead_or_stopped():
    everyone = [rank(0, IN_REDUCE), rank(1, IN_REDUCE), rank(2, IN_DATA), rank(3, [], "stopped")]
    found = judge(everyone, lambda seen: seen.record.rank < 2)
    assert [seen.record.rank for seen in found.culprits] == [3]
    found = judge(everyone[:3], lambda seen: seen.record.rank < 2)
    assert found.culprits == () and "ranks 0-1 wait" in found.sentence


def test_a_thread_that_works_for_the_main_one_says_where():
    pool = [Frame(f"{os.__file__.removesuffix('os.py')}concurrent/futures/_base.py", 451, "result")]
    reward = [Frame("/home/me/reward.py", 3, "__call__"), Frame("/r/mrl/rewards/isolated.py", 40, "call")]
    found = place([[*pool, Frame("/r/mrl/rollout/worker.py", 210, "_score")], reward])
    assert str(found) == "is in scoring (me/reward.py:3)"


def test_a_loop_without_frames_is_known_by_who_runs_it():
    runner = Frame(f"{os.__file__.removesuffix('os.py')}asyncio/runners.py", 118, "run")
    engines = [Frame("/r/mrl/rollout/engines.py", 201, "_round"), Frame("/r/mrl/rollout/worker.py", 82, "sample")]
    assert str(place([[runner, runner, *engines]])).startswith("waits for an answer over the network")
    server = Frame(f"{os.path.dirname(pytest.__file__)}/../uvicorn/server.py", 75, "run")
    assert str(place([[runner, runner, server]])) == "has nothing to do"


def test_runs_of_ranks_are_short():
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


def test_errors_that_only_tell_of_a_peer_are_known():
    assert of_peers(RuntimeError("[..gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3333"))
    assert not of_peers(RuntimeError("pp=3 does not divide 28 layers"))
    assert not of_peers(SyncError("http://a:1/pause answered: Connection reset by peer")), "of an engine, not of a rank"


def test_ranks_that_ray_ends_for_want_of_memory_are_lost(tmp_path, monkeypatch):
    def get(futures, **_):
        if futures != "first":
            raise OutOfMemoryError("4 worker(s) were killed due to the node running low on memory")

    monkeypatch.setattr(waiting.ray, "get", get)
    monkeypatch.setattr(waiting.ray, "wait", lambda futures, **_: (futures, []))
    with pytest.raises(RankLost, match="short of memory") as caught:
        waiting.Waiter(tmp_path, "rank").get(["first", "second"], 5.0, "update() on 2 trainer ranks")
    assert caught.value.ranks == (1,) and "4 worker(s) were killed" in caught.value.report.read_text()


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """`lost()` -> the error for a rank that Ray says is lost."""

    def get(futures, **_):
        raise OutOfMemoryError("worker(s) were killed")

    def wait() -> RankLost:
        with pytest.raises(RankLost, match="a process died") as caught:
            waiting.Waiter(tmp_path, "rank").get(["first"], 5.0, "update()")
        return caught.value

    monkeypatch.setattr(waiting.ray, "get", get)
    monkeypatch.setattr(waiting.ray, "wait", lambda futures, **_: (futures, []))
    return wait


def test_a_report_that_the_disk_does_not_take_costs_neither_the_error_nor_the_verdict(lost, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "text", lambda *_: "x" * 10**6)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1000, limit[1])
    )  # Python ignores the signal: a write fails as on a full disk
    try:
        error = lost()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert error.report is None and error.ranks == (0,) and "There is no report: it could not be written" in str(error)
    assert list(tmp_path.glob("autopsy_*")) == []


def test_an_autopsy_that_fails_does_not_take_the_place_of_what_it_was_made_for(lost, monkeypatch):
    def fail(*_):
        raise KeyError("a record of another version")

    monkeypatch.setattr("mrl.hang_report.collect.judge", fail)
    error = lost()
    assert error.report is None and error.ranks == (0,) and "another version" in str(error)


def test_a_process_whose_stacks_are_gone_is_seen_without_them(child, tmp_path):
    child("time.sleep(60)")
    (tmp_path / "trainer_0.txt").unlink()
    assert look(tmp_path).stacks == () and not look(tmp_path).dead


def test_a_diagnosis_survives_a_pickle(tmp_path):
    import pickle

    error = pickle.loads(pickle.dumps(RankLost("rank 2 died", tmp_path, ("rank 2",), (2,))))
    assert (str(error), error.report, error.names, error.ranks) == ("rank 2 died", tmp_path, ("rank 2",), (2,))
    assert isinstance(error, RuntimeError)


CHILD = """
import ctypes, sys, time
from mrl.hang_report.notes import doing
from mrl.hang_report.register import register
def stand_still():
    print("here", flush=True)
    {body}
register(sys.argv[1], "trainer_0", "rank 0", "rank", rank=0)
with doing("step 3"):
    stand_still()
"""


@pytest.fixture
def child(tmp_path):
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


def look(folder) -> Seen:
    (seen,) = probe(str(folder), register.records(folder))
    return seen


def test_a_process_in_c_code_with_the_interpreter_locked_still_says_where_it_is(child, tmp_path):
    child("ctypes.PyDLL(None).sleep(60)")
    seen = look(tmp_path)
    assert seen.stacks[0][0].function == "stand_still"
    assert [note.text for note in seen.notes] == ["step 3"]


def test_a_stopped_process_is_called_so_and_a_killed_one_keeps_its_note(child, tmp_path):
    process = child("time.sleep(60)")
    os.kill(process.pid, signal.SIGSTOP)
    while (seen := look(tmp_path)).state != "stopped":
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    seen = look(tmp_path)
    assert seen.dead and [note.text for note in seen.notes] == ["step 3"] and not seen.crash


def test_how_a_process_crashed_is_known(child, tmp_path):
    process = child("ctypes.string_at(0)")
    process.wait()
    assert look(tmp_path).crash == "Segmentation fault"


def test_another_process_with_a_reused_number_is_not_signalled(child, tmp_path):
    process = child("time.sleep(60)")
    path = tmp_path / "trainer_0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": 1}))
    assert look(tmp_path).dead and process.poll() is None


def test_notes_of_several_threads_stand_side_by_side(tmp_path):
    kept = notes._Notes()
    kept.keep(tmp_path / "n.notes")
    numbers = [kept.begin(f"part {i}") for i in range(3)]
    threads = [threading.Thread(target=kept.end, args=[number]) for number in numbers[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [note.text for note in notes.read(tmp_path / "n.notes")] == ["part 2"]


def test_reports_are_numbered_and_say_the_verdict_first(tmp_path):
    everyone = [rank(0, IN_REDUCE), rank(1, IN_DATA, entered=6)]
    found = judge(everyone, lambda seen: True)
    paths = [report.write(tmp_path, report.text("update() hangs", found, everyone)) for _ in range(2)]
    assert [path.name for path in paths] == ["autopsy_1.txt", "autopsy_2.txt"]
    lines = paths[0].read_text().splitlines()
    assert lines[0] == "update() hangs" and lines[2].startswith("Diagnosis: rank 1 (dp 1) is in data loading")
    assert [line for line in lines if line.endswith("<- behind")] != []


def test_the_main_thread_comes_first():
    dump = """Thread 0x01 (most recent call first):
  File "/a.py", line 3 in run
  File "/threading.py", line 9 in _bootstrap

Current thread 0x02 (most recent call first):
  File "/b.py", line 4 in work
  File "/b.py", line 9 in <module>
"""
    assert [stack[0].file for stack in threads(dump)] == ["/b.py", "/a.py"]


def test_an_interface_that_does_not_lead_back_is_named_with_its_cure():
    addresses = {"lo": "127.0.0.1", "bond0": "10.0.0.1", "eth1": "10.1.0.1", "docker0": "172.17.0.1"}
    (line,) = interfaces.advice("node3", addresses, lambda address: "timed out" if address == "10.0.0.1" else "")
    assert "node3: a connection from bond0 (10.0.0.1)" in line and "NCCL_SOCKET_IFNAME=eth1" in line
    (line,) = interfaces.advice("node3", {"bond0": "10.0.0.1"}, lambda address: "timed out")
    assert "no other interface" in line


NETWORK = """
ip link set lo up
for card in eth7:10.1.1.1 bond9:10.2.2.1; do
  ip link add ${card%%:*} type bridge; ip addr add ${card#*:}/24 dev ${card%%:*}; ip link set ${card%%:*} up
done
ip rule add pref 1 from 10.2.2.1 blackhole; ip rule add pref 2 lookup local; ip rule del pref 0
exec "$@"
"""
ADVICE = "from mrl.hang_report.interfaces import *; print(*advice('node3', interfaces(), connect_to_itself), sep='\\n', end='')"


def test_real_interfaces_of_a_network_namespace():
    if not (shutil.which("ip") and subprocess.run(["unshare", "-rn", "true"]).returncode == 0):
        pytest.skip("needs iproute2 and user namespaces")
    line = ["unshare", "-rn", "bash", "-ec", NETWORK, "sh", sys.executable, "-c", ADVICE]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    (told,) = done.stdout.splitlines()
    assert "bond9 (10.2.2.1)" in told and told.endswith("set NCCL_SOCKET_IFNAME=eth7.")
