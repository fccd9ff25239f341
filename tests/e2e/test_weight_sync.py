"""Weights pushed into real SGLang servers: used, checked, and never half: whatever fails in the middle."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import wait_until
from live_engines import UnshardedModel, connected, max_logprob_difference, num_running, perturb, slow_engines
from scripted_lifecycle import scripted_lifecycle

from models.families.qwen import QWEN3
from mrl.rollout.client import EngineClient, SamplingParams
from mrl.weight_sync import sender
from mrl.weight_sync.disk_sync import ExpectedChecksums
from mrl.weight_sync.engine_control import EngineControl, EngineError, WeightMismatchError, WeightSyncError
from mrl.weight_sync.engine_layout import EngineLayout, Topology
from mrl.weight_sync.sender import BucketSender, fill_buffer
from mrl.weight_sync.transports import ProcessGroupEnd, SharedMemorySendEnd

TOLERANCE = 1e-4
VERSIONS = iter(range(1, 1000))


@pytest.fixture
def connect(engine, one_rank):
    def opened(**settings):
        return connected([engine.server.url], engine.folder, dict(engine.model.state_dict()), **settings)

    return opened


def held_as_sglang_hashes_it(engine, client, topology) -> None:
    """The engine's own checksums of whole parameters, not ours of pieces, against the Transformers model."""
    weights = UnshardedModel(engine.folder, dict(engine.model.state_dict()))
    expected = ExpectedChecksums(EngineLayout.of(weights.family, weights.arch, topology), torch.float32)
    for _ in expected.observe(weights.tensors.items()):
        pass
    expected.compare(client.checksums(), client.url)


def gap(engine) -> float:
    return max_logprob_difference(engine.client, engine.model)


@pytest.mark.extended_except("shared_memory-full")
@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_pushed_weights_are_used_and_checked(engine, connect, transport, delta):
    """After every push the engine samples from the new weights, under their version."""
    size = sum(p.nbytes for p in engine.model.parameters())
    with connect(transport=transport, delta=delta) as sync:
        assert isinstance(sync.send_end, SharedMemorySendEnd if transport == "shared_memory" else ProcessGroupEnd)
        for number in range(3):
            perturb(engine.model)
            assert gap(engine) > TOLERANCE, "the engine cannot know these weights yet"
            version = next(VERSIONS)
            report = sync.push(version)
            held_as_sglang_hashes_it(engine, engine.client, Topology())
            assert report.raw_bytes == size and report.tensors == 47 and report.buckets > 1
            assert report.bytes < 0.95 * size if delta and number else report.bytes == size
            assert gap(engine) < TOLERANCE
            assert engine.client.weight_version() == str(version)
            assert engine.client.generate([[5]], SamplingParams(4))[0].weight_version == str(version)


@pytest.mark.extended
def test_versions_only_grow(connect):
    with connect() as sync:
        version = next(VERSIONS)
        sync.push(version)
        with pytest.raises(AssertionError, match="versions only grow"):
            sync.push(version - 1)


def corrupted(monkeypatch, times: int):
    """One byte of a bucket changes on its way, after the sender hashed it and before anyone is told of it; `times` pushes
    long."""
    left = [times]

    def flip(slot, bucket, read):
        checksums = fill_buffer(slot, bucket, read)
        if bucket.number == 1 and left[0]:
            left[0] -= 1
            slot[bucket.nbytes // 2] ^= 1
        return checksums

    monkeypatch.setattr(sender, "fill_buffer", flip)


@pytest.mark.extended_except("shared_memory")
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_corrupted_byte_is_caught_by_name_and_nothing_is_sampled(engine, connect, monkeypatch, transport):
    with connect(transport=transport) as sync:
        sync.push(next(VERSIONS))
        before = engine.client.weight_version()
        with monkeypatch.context() as patched:
            corrupted(patched, times=1)
            with pytest.raises(WeightMismatchError, match=r"rank 0: model\.layers\.\d\.[a-z_.]*weight\[") as caught:
                sync.push(next(VERSIONS))
        assert "_proj.weight" in str(caught.value) or "norm" in str(caught.value)
        assert engine.client.weight_version() == before, "the version is that of the last checked weights"
        answers: list = []
        asking = threading.Thread(target=lambda: answers.append(engine.client.generate([[5]], SamplingParams(4))))
        asking.start()
        time.sleep(1.0)
        assert not answers, "the engine is out of service"
        sync.push(next(VERSIONS))  # whole again
        asking.join(30)
        assert answers and gap(engine) < TOLERANCE


@pytest.mark.extended
def test_a_difference_that_arrives_wrong_is_followed_by_everything(engine, connect, monkeypatch):
    with connect(delta=True) as sync:
        driver = scripted_lifecycle(lambda version, _: [sync.push(version)])
        driver.push(next(VERSIONS))
        perturb(engine.model)
        monkeypatch.setattr(sync.sender, "_last_sent", {n: t ^ 1 for n, t in sync.sender._last_sent.items()})
        numbers = driver.push(next(VERSIONS))
        assert numbers["weight_sync/attempts"] == 2 and numbers["weight_sync/compressed_fraction"] == 1
        assert gap(engine) < TOLERANCE


@pytest.mark.extended
def test_an_engine_that_stores_weights_otherwise_is_refused(one_rank, engine, tmp_path):
    import json
    import shutil

    shutil.copytree(engine.folder, tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    why = r"engine rank 0 stores \d+ parameters differently.*layers\.0\.mlp\.down_proj\.weight is \[128, 384\], the table says"
    with pytest.raises(ValueError, match=why), connected([engine.server.url], tmp_path / "other", {}):
        pass
    engine.client.end_weight_update()


DYING = """
import os, sys
import torch.distributed as dist
from transformers import Qwen3ForCausalLM
from scripted_lifecycle import scripted_lifecycle
from live_engines import connected
from mrl.weight_sync.sender import BucketSender

url, folder, version = sys.argv[1:]
send = BucketSender._send

def die_at_the_third(self, push, bucket, *rest):
    if bucket.number == 2:
        os._exit(7)
    send(self, push, bucket, *rest)

BucketSender._send = die_at_the_third
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = Qwen3ForCausalLM.from_pretrained(folder)
with connected([url], folder, dict(model.state_dict())) as sync:
    sync.push(int(version))
"""


@pytest.mark.extended
def test_an_engine_that_a_trainer_left_in_the_middle_of_a_push_is_taken_over_by_the_next(engine, connect):
    """Paused, half of the weights loaded, and its update session open; which begins no other one by itself."""
    perturb(engine.model)
    line = [sys.executable, "-c", DYING, engine.server.url, str(engine.folder), str(next(VERSIONS))]
    died = subprocess.run(line, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, timeout=400)
    assert died.returncode == 7
    with pytest.raises(EngineError, match="session is already open"):
        engine.client.begin_weight_update()
    with connect() as sync:
        sync.push(version := next(VERSIONS))
    assert gap(engine) < TOLERANCE and engine.client.weight_version() == str(version)


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_running_requests_are_paused_in_the_configured_mode(engine, connect, mode):
    """In the modes retract and in_place they continue with the new weights; in the mode abort they end."""
    done: list = []
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    with connect(pause_mode=mode) as sync:
        sync.push(first := next(VERSIONS))
        request = threading.Thread(target=lambda: done.extend(engine.client.generate([[7]] * 4, params)))
        with slow_engines(engine.client, pass_s=0.2):  # at least 80 s for the responses
            start = time.time()
            request.start()
            wait_until(lambda: num_running(engine.client, start) == 4, 60)
            sync.push(second := next(VERSIONS))
        request.join(240)
    reasons = {c.finish_reason for c in done}
    assert len(done) == 4
    if mode == "abort":
        assert reasons == {"abort"} and all(len(c.token_ids) < 400 for c in done)
    else:
        assert reasons == {"length"} and {c.weight_version for c in done} == {str(first)}, (
            "oldest version of a response"
        )
    assert engine.client.weight_version() == str(second)
    assert gap(engine) < TOLERANCE


@pytest.fixture
def new_engine(engine, tmp_path):
    """`new_engine()` starts another server on the first weights."""
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    servers = []

    def start():
        args = default_server_args("float32", 512) | {"model_path": str(engine.folder)}
        servers.append(EngineServer(args, tmp_path / f"engine_{len(servers)}.log"))
        servers[-1].start()
        servers[-1].wait_ready(timeout_s=480)
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


UP_THEN_GATE = ("up_proj.weight", "gate_proj.weight")


@pytest.mark.extended
def test_engines_with_data_parallel_attention_take_weights(one_rank, engine, tmp_path):
    """Each group of ranks has the whole attention; SGLang does not sample so on a CPU, but it holds weights.

    Before, a table that swaps two matrices of one shape is refused: the engine's own files say otherwise.
    """
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    groups = dict(tp_size=2, dp_size=2, enable_dp_attention=True)
    args = default_server_args("float32", 512) | groups | {"model_path": str(engine.folder)}
    with EngineServer(args, tmp_path / "engine.log") as server:
        server.wait_ready(timeout_s=480)
        swapped = replace(QWEN3, engine_fusions=QWEN3.engine_fusions | {"gate_up_proj.weight": UP_THEN_GATE})
        why = r"gate_proj\.weight\[.*this engine stores weights in a different form"
        with pytest.raises(WeightSyncError, match=why), connected([server.url], engine.folder, {}, swapped):
            pass
        EngineControl(server.url).end_weight_update()
        perturb(engine.model)
        with connected([server.url], engine.folder, dict(engine.model.state_dict())) as sync:
            sync.push(next(VERSIONS))
        held_as_sglang_hashes_it(engine, EngineClient(server.url, timeout_s=240), Topology(2, dp=2))


@pytest.mark.extended
def test_an_engine_killed_in_the_middle_is_replaced_and_the_others_go_on(one_rank, engine, new_engine, monkeypatch):
    """The dead engine is named, the other one has the new version; the next attempt brings in a successor."""
    victim = new_engine()
    tensors = dict(engine.model.state_dict())
    open_syncs: list = []

    def connect(urls):
        while open_syncs:
            open_syncs.pop().__exit__(None, None, None)
        context = connected(list(urls), engine.folder, tensors, transport="process_group")
        open_syncs.append(context)
        connect.sync = context.__enter__()
        return {}

    replaced = []

    def replace(urls):
        replaced.extend(urls)
        connect.successor = new_engine()
        return [engine.server.url, connect.successor.url]

    send = BucketSender._send

    def kill_then_send(self, push, bucket, *rest):
        if bucket.number == 2 and victim.alive():
            for process in victim.processes():
                process.kill()
        send(self, push, bucket, *rest)

    monkeypatch.setattr(BucketSender, "_send", kill_then_send)
    connect([engine.server.url, victim.url])
    perturb(engine.model)
    driver = scripted_lifecycle(
        lambda version, _: [connect.sync.push(version)], connect, replace, urls=[engine.server.url, victim.url]
    )
    version = next(VERSIONS)
    numbers = driver.push(version)
    open_syncs.pop().__exit__(None, None, None)
    assert replaced == [victim.url]
    assert (numbers["weight_sync/attempts"], numbers["weight_sync/replaced_engines"]) == (2, 1)
    for client in (engine.client, EngineClient(connect.successor.url, timeout_s=240)):
        assert client.weight_version() == str(version)
        assert max_logprob_difference(client, engine.model) < TOLERANCE


@pytest.mark.extended
def test_engines_outside_take_weights_from_disk(start_mrl, quickstart, warm, tmp_path):
    """A server that somebody else started, without anything of ours in it, goes on after the run."""
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    args = default_server_args("float32", 32) | {"model_path": str(warm), "custom_weight_loader": []}
    with EngineServer(args, tmp_path / "engine.log") as server:
        server.wait_ready(timeout_s=480)
        outside = [
            "parallel.pp=2",
            "algorithm.mini_batches=3",
            f"rollout.engine_urls=[{server.url}]",
            "rollout.deterministic=false",  # this server heeds no seeds
            "weight_sync.transport=disk",
            "trainer.save=false",
        ]
        run = start_mrl("train", *quickstart, *outside, "trainer.max_steps=2").finish()
        assert run.process.returncode == 0, run.output()
        assert max(s["mismatch/logprob_abs_max"] for s in run.metrics()) <= TOLERANCE
        assert run.metrics()[0]["batch/optimizer_steps"] > 1, "one weight version, several optimizer steps"
        assert EngineControl(server.url).weight_version() == "2" and server.alive()
        assert sorted(path.name for path in (run.folder / "weights").iterdir()) == ["1", "2"], "the last two are kept"


def kept(paths: Iterable[Path], within_s: float = 60) -> list[Path]:
    """What is still there at the end; slots of other runs lose their names when all ranks have mapped them."""
    left, end = list(paths), time.monotonic() + within_s
    while left and time.monotonic() < end:
        time.sleep(0.2)
        left = [path for path in left if path.exists()]
    return left


@pytest.mark.extended
def test_a_run_that_loses_engines_while_weights_are_pushed_goes_on(start_mrl, quickstart, tmp_path, monkeypatch):
    """One of two stops answering before the push of step 2 and is killed in its middle; one never answers again in step 3."""
    (tmp_path / "stopping_advantage.py").write_text(STOPPING_ADVANTAGE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}")
    advantage = "algorithm.advantage._target_=stopping_advantage.Stopping"
    layout = ["parallel.dp=2", "rollout.num_engines=2", "weight_sync.timeout_s=5", "trainer.save=false"]
    run = start_mrl("train", *quickstart, advantage, *layout, "trainer.max_steps=4").finish(300)
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    assert [s["weight_sync/replaced_engines"] for s in steps] == [0, 1, 1, 0]
    assert [s["weight_sync/version"] for s in steps] == [1, 2, 3, 4]
    assert [s["rollout/weight_version"] for s in steps] == [0, 1, 2, 3], "no rollout with older weights"
    assert max(s["mismatch/logprob_abs_max"] for s in steps) <= TOLERANCE
    assert run.leftovers() == []
    assert not kept(Path("/dev/shm").glob("mrl-weights-*"))


STOPPING_ADVANTAGE = '''
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass

import psutil

from mrl.algorithms.advantages import GRPO

calls = []


def engines():
    """The servers' main processes of this run, each with the processes below it."""
    mine, found = psutil.Process().environ()["MRL_TEST_RUN"], []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # one that has just ended
            line = process.cmdline()
            if "mrl.rollout.engines.launch_sglang" in line and process.environ().get("MRL_TEST_RUN") == mine:
                found.append(process)
    own = [process for process in found if process.ppid() not in {other.pid for other in found}]
    return [[process, *process.children(recursive=True)] for process in sorted(own, key=lambda p: p.pid)]


@dataclass(frozen=True)
class Stopping(GRPO):
    """The usual advantage, which at its second and third call stops an engine, the first for 1.5 s before it is killed."""

    def __call__(self, inputs):
        calls.append(1)
        if len(calls) in (2, 3):
            first, second = engines()
            for process in first:
                process.send_signal(signal.SIGSTOP)
            if len(calls) == 2:
                threading.Timer(1.5, lambda: [process.kill() for process in first]).start()
        return super().__call__(inputs)
'''
