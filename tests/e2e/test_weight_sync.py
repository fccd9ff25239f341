"""Weights are pushed to real SGLang servers: engines verify and use the weights, and never sample from an incomplete push."""

import copy
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from live_engines import UnshardedModel, connected, max_logprob_difference, num_running, perturb, slow_engines
from mrl_runs import signal_all, tagged, wait_until
from scripted_lifecycle import scripted_lifecycle

from models.families.qwen import QWEN3
from mrl.rollout.client import EngineClient, SamplingParams
from mrl.weight_sync import sender
from mrl.weight_sync.disk_sync import ExpectedChecksums
from mrl.weight_sync.engine_control import EngineControl, EngineError, WeightMismatchError, WeightSyncError
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes
from mrl.weight_sync.sender import BucketSender, fill_buffer
from mrl.weight_sync.transports import ProcessGroupEndpoint, SharedMemorySendEndpoint

TOLERANCE = 1e-4
VERSIONS = iter(range(1, 1000))


@pytest.fixture
def connect(engine, one_rank):
    def opened(**settings):
        return connected([engine.server.url], engine.folder, dict(engine.model.state_dict()), **settings)

    return opened


def check_sglang_checksums(engine, client, parallel_sizes) -> None:
    """Compare SGLang's own checksums of whole parameters with the Transformers model. mrl's checksums cover only chunks."""
    weights = UnshardedModel(engine.folder, dict(engine.model.state_dict()))
    expected = ExpectedChecksums(EngineLayout.of(weights.family, weights.arch, parallel_sizes), torch.float32)
    for _ in expected.observe(weights.tensors.items()):
        pass
    expected.compare(client.checksums(), client.url)


def logprob_difference(engine) -> float:
    return max_logprob_difference(engine.client, engine.model)


@pytest.mark.extended_except("shared_memory-full")
@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_pushed_weights_are_used_and_checked(engine, connect, transport, delta):
    """After each push the engine samples from the new weights and reports their version."""
    size = sum(p.nbytes for p in engine.model.parameters())
    with connect(transport=transport, delta=delta) as sync:
        assert isinstance(
            sync.send_endpoint, SharedMemorySendEndpoint if transport == "shared_memory" else ProcessGroupEndpoint
        )
        for number in range(3):
            perturb(engine.model)
            assert logprob_difference(engine) > TOLERANCE, "the engine still has the old weights"
            version = next(VERSIONS)
            report = sync.push(version)
            check_sglang_checksums(engine, engine.client, EngineParallelSizes())
            assert report.uncompressed_bytes == size and report.tensors == 47 and report.buckets > 1
            assert report.bytes < 0.95 * size if delta and number else report.bytes == size
            assert logprob_difference(engine) < TOLERANCE
            assert engine.client.weight_version() == str(version)
            assert engine.client.generate([[5]], SamplingParams(4))[0].weight_version == str(version)


@pytest.mark.extended
def test_a_push_with_a_lower_version_is_refused(connect):
    with connect() as sync:
        version = next(VERSIONS)
        sync.push(version)
        with pytest.raises(AssertionError, match="versions only grow"):
            sync.push(version - 1)


def corrupt_a_byte(monkeypatch, times: int):
    """In the next `times` pushes, flip one bit of a bucket after the sender has hashed the bucket and before engines read it."""
    remaining = [times]

    def fill_and_flip(buffer, bucket, read):
        checksums = fill_buffer(buffer, bucket, read)
        if bucket.index == 1 and remaining[0]:
            remaining[0] -= 1
            buffer[bucket.nbytes // 2] ^= 1
        return checksums

    monkeypatch.setattr(sender, "fill_buffer", fill_and_flip)


@pytest.mark.extended_except("shared_memory")
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_a_corrupted_byte_names_the_parameter_and_stops_sampling(engine, connect, monkeypatch, transport):
    with connect(transport=transport) as sync:
        sync.push(next(VERSIONS))
        before = engine.client.weight_version()
        with monkeypatch.context() as patched:
            corrupt_a_byte(patched, times=1)
            with pytest.raises(WeightMismatchError, match=r"rank 0: model\.layers\.\d\.[a-z_.]*weight\[") as caught:
                sync.push(next(VERSIONS))
        assert "_proj.weight" in str(caught.value) or "norm" in str(caught.value)
        assert engine.client.weight_version() == before, "the version is still that of the last verified weights"
        answers: list = []
        request = threading.Thread(target=lambda: answers.append(engine.client.generate([[5]], SamplingParams(4))))
        request.start()
        time.sleep(1.0)  # an engine that sampled would answer within this time
        assert not answers, "the engine stays paused"
        sync.push(next(VERSIONS))
        request.join(240)
        assert answers and logprob_difference(engine) < TOLERANCE


@pytest.mark.extended
def test_a_wrong_delta_push_is_repeated_with_all_weights(engine, connect, monkeypatch):
    with connect(delta=True) as sync:
        lifecycle = scripted_lifecycle(lambda version, _: [sync.push(version)])
        lifecycle.push(next(VERSIONS))
        perturb(engine.model)
        monkeypatch.setattr(sync.sender, "_last_sent", {n: t ^ 1 for n, t in sync.sender._last_sent.items()})
        metrics = lifecycle.push(next(VERSIONS))
        assert metrics["weight_sync/attempts"] == 2 and metrics["weight_sync/compressed_fraction"] == 1
        assert logprob_difference(engine) < TOLERANCE


@pytest.mark.extended
def test_an_engine_that_stores_weights_in_other_shapes_is_refused(one_rank, engine, tmp_path):
    import json
    import shutil

    shutil.copytree(engine.folder, tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    why = r"engine rank 0 stores \d+ parameters differently.*layers\.0\.mlp\.down_proj\.weight is \[128, 384\] float32, the table"
    with pytest.raises(ValueError, match=why), connected([engine.server.url], tmp_path / "other", {}):
        pass
    engine.client.end_weight_update()


DYING_TRAINER = """
import os, sys
import torch.distributed as dist
from transformers import Qwen3ForCausalLM
from scripted_lifecycle import scripted_lifecycle
from live_engines import connected
from mrl.weight_sync.sender import BucketSender

url, folder, version = sys.argv[1:]
send = BucketSender._send

def die_at_the_third_bucket(self, push, bucket, *rest):
    if bucket.index == 2:
        os._exit(7)
    send(self, push, bucket, *rest)

BucketSender._send = die_at_the_third_bucket
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = Qwen3ForCausalLM.from_pretrained(folder)
with connected([url], folder, dict(model.state_dict())) as sync:
    sync.push(int(version))
"""


@pytest.mark.extended
def test_a_new_trainer_takes_over_an_engine_whose_trainer_died_during_a_push(engine, connect):
    """When the trainer dies, the engine is paused and has half of the weights. Its open update session blocks a new session."""
    perturb(engine.model)
    line = [sys.executable, "-c", DYING_TRAINER, engine.server.url, str(engine.folder), str(next(VERSIONS))]
    died = subprocess.run(line, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, timeout=400)
    assert died.returncode == 7
    with pytest.raises(EngineError, match="session is already open"):
        engine.client.begin_weight_update()
    with connect() as sync:
        sync.push(version := next(VERSIONS))
    assert logprob_difference(engine) < TOLERANCE and engine.client.weight_version() == str(version)


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_running_requests_are_paused_in_the_configured_mode(engine, connect, mode):
    """In the modes retract and in_place, requests continue with the new weights. In the mode abort, requests end."""
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
            "a completion has the version of its first token"
        )
    assert engine.client.weight_version() == str(second)
    assert logprob_difference(engine) < TOLERANCE


@pytest.fixture
def new_engine(engine, tmp_path):
    """`new_engine()` starts another server with the initial weights."""
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
def test_weights_are_pushed_to_an_engine_with_data_parallel_attention(one_rank, engine, tmp_path):
    """Each group of ranks has all attention weights. On a CPU, SGLang cannot sample in this layout, but it can load weights.

    Before the push, a family that swaps two matrices of one shape is refused: it contradicts the weights that the engine loaded.
    """
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    groups = dict(tp_size=2, dp_size=2, enable_dp_attention=True)
    args = default_server_args("float32", 512) | groups | {"model_path": str(engine.folder)}
    with EngineServer(args, tmp_path / "engine.log") as server:
        server.wait_ready(timeout_s=480)
        swapped = replace(QWEN3, engine_fused_params=QWEN3.engine_fused_params | {"gate_up_proj.weight": UP_THEN_GATE})
        why = r"gate_proj\.weight\[.*this engine stores weights in a different form"
        with pytest.raises(WeightSyncError, match=why), connected([server.url], engine.folder, {}, swapped):
            pass
        EngineControl(server.url).end_weight_update()
        ours = replace(engine, model=copy.deepcopy(engine.model))  # the shared engine does not get these weights
        perturb(ours.model)
        with connected([server.url], engine.folder, dict(ours.model.state_dict())) as sync:
            sync.push(next(VERSIONS))
        check_sglang_checksums(ours, EngineClient(server.url, timeout_s=240), EngineParallelSizes(2, dp=2))


@pytest.mark.extended
def test_an_engine_killed_during_a_push_is_replaced_and_the_others_get_the_weights(
    one_rank, engine, new_engine, monkeypatch
):
    """The first attempt names the dead engine. The second attempt also pushes to its replacement."""
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
        connect.replacement = new_engine()
        return [engine.server.url, connect.replacement.url]

    send = BucketSender._send

    def kill_then_send(self, push, bucket, *rest):
        if bucket.index == 2 and victim.alive():
            signal_all(victim.processes())
        send(self, push, bucket, *rest)

    monkeypatch.setattr(BucketSender, "_send", kill_then_send)
    connect([engine.server.url, victim.url])
    perturb(engine.model)
    lifecycle = scripted_lifecycle(
        lambda version, _: [connect.sync.push(version)], connect, replace, urls=[engine.server.url, victim.url]
    )
    version = next(VERSIONS)
    metrics = lifecycle.push(version)
    open_syncs.pop().__exit__(None, None, None)
    assert replaced == [victim.url]
    assert (metrics["weight_sync/attempts"], metrics["weight_sync/replaced_engines"]) == (2, 1)
    for client in (engine.client, EngineClient(connect.replacement.url, timeout_s=240)):
        assert client.weight_version() == str(version)
        assert max_logprob_difference(client, engine.model) < TOLERANCE


@pytest.mark.extended
def test_an_external_engine_loads_weights_from_disk(start_mrl, quickstart, warm, tmp_path):
    """The server has no plug-ins of mrl. After the end of the run, it still serves the last weights."""
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    args = default_server_args("float32", 32) | {"model_path": str(warm), "custom_weight_loader": []}
    with EngineServer(args, tmp_path / "engine.log") as server:
        server.wait_ready(timeout_s=480)
        external = [
            "parallel.pp=2",
            "algorithm.mini_batches=3",
            f"rollout.engine_urls=[{server.url}]",
            "rollout.deterministic=false",  # this server ignores seeds
            "weight_sync.transport=disk",
            "trainer.save=false",
        ]
        run = start_mrl("train", *quickstart, *external, "trainer.max_steps=2").finish()
        assert run.process.returncode == 0, run.output()
        assert max(s["mismatch/logprob_abs_max"] for s in run.metrics()) <= TOLERANCE
        assert run.metrics()[0]["batch/optimizer_steps"] > 1, "several optimizer steps for one weight version"
        assert EngineControl(server.url).weight_version() == "2" and server.alive()
        assert sorted(path.name for path in (run.folder / "weights").iterdir()) == ["1", "2"], (
            "the last two versions are kept"
        )


@pytest.mark.extended
def test_a_run_continues_after_it_loses_engines_during_pushes(start_mrl, quickstart, user_module):
    """In step 2, one of two engines is stopped before the push and killed during the push. In step 3, one engine is stopped."""
    user_module("stopping_advantage", STOPPING_ADVANTAGE)
    advantage = "algorithm.advantage._target_=stopping_advantage.Stopping"
    layout = ["parallel.dp=2", "rollout.num_engines=2", "weight_sync.timeout_s=5", "trainer.save=false"]
    run = start_mrl("train", *quickstart, advantage, *layout, "trainer.max_steps=4")
    metrics = run.folder / "metrics.jsonl"
    wait_until(lambda: run.process.poll() is not None or (metrics.exists() and run.metrics()))
    senders = [process.pid for process in tagged(run.tag)]  # the trainer ranks are among them
    run.finish(300)
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    assert [s["weight_sync/replaced_engines"] for s in steps] == [0, 1, 1, 0]
    assert [s["weight_sync/version"] for s in steps] == [1, 2, 3, 4]
    assert [s["rollout/weight_version"] for s in steps] == [0, 1, 2, 3], "no rollout was sampled with older weights"
    assert max(s["mismatch/logprob_abs_max"] for s in steps) <= TOLERANCE
    assert run.leftovers() == []
    assert senders and not [path for pid in senders for path in Path("/dev/shm").glob(f"mrl-weights-{pid}-*")]


STOPPING_ADVANTAGE = '''
import signal
import threading
from dataclasses import dataclass

from mrl_runs import descendants, own_processes, select_processes, signal_all

from mrl.algorithms.advantages import GRPO

calls = []


def engines():
    """Return the processes of each engine of this run, the main process first."""
    found = own_processes("mrl.rollout.engines.launch_sglang")
    pids = [process.pid for process in found]
    own = select_processes(found, lambda process: process.ppid() not in pids)
    return [[process, *descendants(process)] for process in sorted(own, key=lambda p: p.pid)]


@dataclass(frozen=True)
class Stopping(GRPO):
    """GRPO. Its second and third calls stop an engine; 1.5 s after the second call the engine is killed."""

    def __call__(self, inputs):
        calls.append(1)
        if len(calls) in (2, 3):
            first, second = engines()
            signal_all(first, signal.SIGSTOP)
            if len(calls) == 2:
                threading.Timer(1.5, lambda: signal_all(first)).start()
        return super().__call__(inputs)
'''
