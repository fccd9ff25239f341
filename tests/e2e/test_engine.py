"""A real SGLang server: results equal those of Transformers, errors are reported, and no process survives the server's end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from live_engines import PROMPTS, max_logprob_difference
from mrl_runs import is_alive, select_processes, wait_until

from mrl.rollout.client import EngineError, SamplingParams

TOLERANCE = 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_transformers(engine, temperature):
    assert max_logprob_difference(engine.client, engine.model, temperature) < TOLERANCE


def test_greedy_tokens_equal_those_of_transformers(engine):
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    for prompt, done in zip(PROMPTS, engine.client.generate(PROMPTS, sampling), strict=True):
        tokens = torch.tensor([prompt])
        for _ in range(8):
            tokens = torch.cat([tokens, engine.model(tokens).logits[:, -1:].argmax(-1)], 1)
        assert done.token_ids == tokens[0, len(prompt) :].tolist()


def test_the_finish_reason_is_stop_after_an_end_of_sequence_token_and_else_length(engine):
    done = engine.client.generate(PROMPTS * 4, SamplingParams(max_new_tokens=8))
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for c in done:
        assert (c.token_ids[-1] == 2) == (c.finish_reason == "stop")
        assert 2 not in c.token_ids[:-1]


def test_a_refused_request_raises_the_engines_message(engine):
    with pytest.raises(EngineError, match=r"/generate answered 400: .*context length \(512 tokens\)"):
        engine.client.generate([[5] * 600], SamplingParams(max_new_tokens=1))
    with pytest.raises(EngineError, match="no weight-update session is open"):
        engine.client.end_weight_update()


START_AND_WAIT = """
import json, sys
from mrl.rollout.engines.server import EngineServer
from mrl.rollout.engines.server_args import default_server_args
server = EngineServer(default_server_args("float32", 512) | {"model_path": sys.argv[1]}, sys.argv[2])
server.start()
server.wait_ready(480)
memory = (server._scratch.path / "shared_memory").read_text().split()
print(json.dumps({"port": server.port, "pids": [p.pid for p in server.processes()], "memory": memory}), flush=True)
sys.stdin.readline()
server.stop()
"""


def port_is_bound(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.extended
@pytest.mark.parametrize("victim", ["starter", "supervisor"])
def test_sigkill_leaves_no_process_no_port_and_no_shared_memory(qwen3_folder, tmp_path, victim):
    """A process that is killed cannot clean up, whether it has started the server or supervises the server."""
    line = [sys.executable, "-c", START_AND_WAIT, str(qwen3_folder), str(tmp_path / "engine.log")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        try:
            started = json.loads(starter.stdout.readline())
            assert len(started["pids"]) >= 3
            pids = started["pids"]
            found = select_processes(pids[1:], lambda process: process.environ().get("MRL_ENGINE_SCRATCH"))
            lost = select_processes(pids[1:], lambda process: not process.environ().get("MRL_ENGINE_SCRATCH"))
            assert len(found) >= 2 and not lost, (
                "cleaning up needs this variable; a process that set its title overwrote it"
            )
            assert port_is_bound(started["port"])
            assert started["memory"] and all(map(os.path.exists, started["memory"]))
            os.kill(starter.pid if victim == "starter" else pids[0], signal.SIGKILL)
            deadline = time.monotonic() + 60
            left, bound = pids, True
            while (left or bound) and time.monotonic() < deadline:
                time.sleep(0.1)
                left, bound = select_processes(pids, is_alive), port_is_bound(started["port"])
            assert not left and not bound
            if victim == "supervisor":
                starter.communicate("stop\n", timeout=60)  # the server's owner removes what a killed supervisor left
            assert not any(map(os.path.exists, started["memory"]))
        finally:
            starter.kill()


@pytest.mark.extended
def test_a_server_stopped_while_it_starts_leaves_no_process_and_no_scratch_folder(qwen3_folder, tmp_path):
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    server = EngineServer(default_server_args("float32", 512) | {"model_path": str(qwen3_folder)}, tmp_path / "log")
    server.start()
    wait_until(lambda: len(server.processes()) > 1, 60)  # the supervisor has started SGLang, whose start takes seconds
    pids, scratch = [p.pid for p in server.processes()], server._scratch.path
    assert server.alive()
    server.stop()
    server.stop()
    assert not server.alive()
    assert not select_processes(pids, is_alive)
    assert not scratch.exists()


def test_a_server_that_cannot_start_reports_the_end_of_its_log(tmp_path):
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    (tmp_path / "config.json").write_text("{broken")
    args = default_server_args("float32", 512) | {"model_path": str(tmp_path)}
    why = r"(?s)ended before it was ready; .*log ends with:.*JSONDecodeError"
    with EngineServer(args, tmp_path / "log") as server, pytest.raises(RuntimeError, match=why):
        server.wait_ready(timeout_s=60)
