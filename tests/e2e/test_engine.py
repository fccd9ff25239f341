"""A real SGLang server: its numbers against Transformers, weights pushed into it, and its end in every case."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch

from mrl.rollout.client import EngineError, SamplingParams
from mrl.weight_sync.checksum import WeightMismatchError
from mrl.weight_sync.transport import SyncError, open_transport

FUSIONS = {
    "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
}
PROMPTS = [[5 + (7 * i + j) % 27 for j in range(1 + i % 9)] for i in range(40)]
TOLERANCE = 1e-4


@torch.no_grad()
def largest_gap(engine, temperature: float = 1.0) -> float:
    """Largest difference between the engine's log-probabilities and Transformers', over sampled responses."""
    sampling = SamplingParams(max_new_tokens=12, temperature=temperature, ignore_eos=True)
    gap = 0.0
    for prompt, done in zip(PROMPTS, engine.client.generate(PROMPTS, sampling), strict=True):
        assert len(done.token_ids) == len(done.logprobs) == 12
        logits = engine.model(torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
        ours = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        gap = max(gap, (ours - torch.tensor(done.logprobs)).abs().max().item())
    return gap


@pytest.fixture(scope="module")
def transport(engine):
    """Broadcast over gloo from this process, in several buckets."""
    opened = open_transport([engine.server.url], FUSIONS, bucket_bytes=1 << 20, timeout_s=30)
    yield opened
    opened.close()


def perturb(engine) -> None:
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_transformers(engine, temperature):
    assert largest_gap(engine, temperature) < TOLERANCE


def test_greedy_equals_transformers(engine):
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    for prompt, done in zip(PROMPTS, engine.client.generate(PROMPTS, sampling), strict=True):
        tokens = torch.tensor([prompt])
        for _ in range(8):
            tokens = torch.cat([tokens, engine.model(tokens).logits[:, -1:].argmax(-1)], 1)
        assert done.token_ids == tokens[0, len(prompt) :].tolist()


def test_finish_reasons(engine):
    done = engine.client.generate(PROMPTS * 4, SamplingParams(max_new_tokens=8))
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for c in done:
        assert (c.token_ids[-1] == 2) == (c.finish_reason == "stop")
        assert 2 not in c.token_ids[:-1]


def test_refusal_carries_the_engines_words(engine):
    with pytest.raises(EngineError, match=r"/generate answered 400: .*context length \(512 tokens\)"):
        engine.client.generate([[5] * 600], SamplingParams(max_new_tokens=1))
    with pytest.raises(EngineError, match="no weight-update session is open"):
        engine.client.end_weight_update()


def test_pushed_weights_are_used_and_checked(engine, transport):
    """After a push the engine samples from the new weights, under their version, and its checksums were compared."""
    perturb(engine)
    assert largest_gap(engine) > TOLERANCE, "the engine cannot know these weights yet"
    report = transport.push(engine.model.state_dict().items(), version=1)
    assert (report.tensors, report.bytes) == (47, sum(p.nbytes for p in engine.model.parameters()))
    assert report.buckets > 1
    assert largest_gap(engine) < TOLERANCE
    assert engine.client.weight_version() == "1"
    assert engine.client.generate(PROMPTS[:1], SamplingParams(4))[0].weight_version == "1"


def test_a_corrupted_tensor_is_caught_by_name(engine, transport, monkeypatch):
    """The bytes change on their way, after the sender hashed them."""
    name, original = "model.layers.1.mlp.up_proj.weight", type(transport)._send

    def corrupt(self, bucket, version, expected):
        for item in bucket:
            expected.add(*item)
        sent = [(n, t + 1e-3 * (n == name)) for n, t in bucket]
        return original(self, sent, version, None)

    with monkeypatch.context() as patched:
        patched.setattr(type(transport), "_send", corrupt)
        with pytest.raises(WeightMismatchError, match=r"1 differ \(model\.layers\.1\.mlp\.gate_up_proj\.weight\)"):
            transport.push(engine.model.state_dict().items(), version=2)
    assert engine.client.health(), "the engine was left paused"
    with pytest.raises(SyncError, match="not open; it failed before"):
        transport.push(engine.model.state_dict().items(), version=3)


def test_a_tensor_that_is_not_sent_is_caught(engine):
    again = open_transport([engine.server.url], FUSIONS, timeout_s=30)
    tensors = engine.model.state_dict()
    perturb(engine)
    del tensors["model.norm.weight"]
    with pytest.raises(WeightMismatchError, match=r"in the engine but were not sent \(model\.norm\.weight\)"):
        again.push(tensors.items(), version=4)
    again.close()


def test_a_refused_push_leaves_the_engine_working(engine):
    """Somebody else has an update session open: the push fails at once, the engine goes on, a new transport works."""
    refused = open_transport([engine.server.url], FUSIONS, timeout_s=30)
    engine.client.begin_weight_update()
    start = time.monotonic()
    with pytest.raises(EngineError, match="session is already open"):
        refused.push(engine.model.state_dict().items(), version=5)
    assert time.monotonic() - start < 10
    refused.close()
    again = open_transport([engine.server.url], FUSIONS, timeout_s=30)
    again.push(engine.model.state_dict().items(), version=6)
    again.close()
    assert largest_gap(engine) < TOLERANCE


START_AND_WAIT = """
import json, sys, time
from mrl.rollout.server import EngineServer, default_server_args
server = EngineServer(default_server_args("float32", 512) | {"model_path": sys.argv[1]}, sys.argv[2])
server.start()
server.wait_ready(180)
print(json.dumps({"port": server.port, "pids": [p.pid for p in server.processes()]}), flush=True)
time.sleep(600)
"""


def port_is_bound(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("victim", ["starter", "supervisor"])
def test_sigkill_leaves_no_process_and_no_port(qwen3_folder, tmp_path, victim):
    """Whoever is killed without a chance to clean up, nothing of the server stays."""
    line = [sys.executable, "-c", START_AND_WAIT, str(qwen3_folder), str(tmp_path / "engine.log")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as starter:
        try:
            started = json.loads(starter.stdout.readline())
            assert len(started["pids"]) >= 3
            assert port_is_bound(started["port"])
            os.kill(starter.pid if victim == "starter" else started["pids"][0], signal.SIGKILL)
            deadline = time.monotonic() + 60
            left, bound = started["pids"], True
            while (left or bound) and time.monotonic() < deadline:
                time.sleep(0.1)
                left, bound = [p for p in started["pids"] if alive(p)], port_is_bound(started["port"])
            assert not left, [psutil.Process(p).cmdline() for p in left if alive(p)]
            assert not bound
        finally:
            starter.kill()


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_stop_leaves_nothing(qwen3_folder, tmp_path):
    """A server that is stopped while it still starts: no process, no scratch folder, no shared memory."""
    from mrl.rollout.server import EngineServer, default_server_args

    before = set(os.listdir("/dev/shm"))
    server = EngineServer(default_server_args("float32", 512) | {"model_path": str(qwen3_folder)}, tmp_path / "log")
    server.start()
    time.sleep(1.0)
    pids, scratch = [p.pid for p in server.processes()], server._scratch
    assert server.alive()
    server.stop()
    server.stop()
    assert not server.alive()
    assert not any(alive(p) for p in pids)
    assert not scratch.exists()
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("sglang_loads")}


def test_a_server_that_cannot_start_says_why(tmp_path):
    from mrl.rollout.server import EngineServer, default_server_args

    (tmp_path / "config.json").write_text("{broken")
    args = default_server_args("float32", 512) | {"model_path": str(tmp_path)}
    why = r"(?s)ended before it was ready; end of .*log:.*JSONDecodeError"
    with EngineServer(args, tmp_path / "log") as server, pytest.raises(RuntimeError, match=why):
        server.wait_ready(timeout_s=60)
