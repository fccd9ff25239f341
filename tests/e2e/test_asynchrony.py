"""Real runs whose sampling runs ahead of training: bounded, complete, and the synchronous run where nothing may be stale."""

import json
import random
import threading
import time

import httpx
import pytest
from http_engines import spec_of
from test_resumed_runs import learning
from test_soak import KINDS, Soak

from mrl.config.schema import PauseMode
from mrl.config.secrets import authorization
from mrl.rollout.client import SamplingParams
from mrl.rollout.engine_pool import EnginePool

SIZE = 6  # groups of a step


def ledger(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def check_ledger(folder, staleness: int) -> None:
    """Every prompt that was drawn is trained once or still waits, and nothing is older than it may be."""
    lines = ledger(folder)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(len(line["requests"]) == len(line["groups"]) == SIZE for line in lines)
    trained = [ticket for line in lines for ticket in line["requests"]]
    assert len(set(trained)) == len(trained)
    left = set(range(max(trained) + 1)) - set(trained)
    assert len(left) <= staleness * SIZE, "none but those in the making is left out"
    for line in lines:
        oldest = line["step"] - 1 - staleness
        assert line["weight_version"] >= oldest
        assert all(oldest <= int(version) < line["step"] for update in line["updates"] for version in update)
        assert all(abs(sum(share for _, share in update.values()) - 1) < 1e-6 for update in line["updates"] if update)


def test_without_staleness_the_asynchronous_run_is_the_synchronous_one(start_mrl, quickstart):
    import torch
    from safetensors.torch import load_file

    runs = [
        start_mrl("train", *quickstart, "trainer.max_steps=5", *more).finish(400)
        for more in ([], ["rollout.mode=async", "rollout.max_staleness=0"])
    ]
    assert all(run.process.returncode == 0 for run in runs), "\n".join(run.output() for run in runs)
    sync, zero = (run.folder for run in runs)
    assert ledger(sync) == ledger(zero)
    assert learning(sync / "metrics.jsonl") == learning(zero / "metrics.jsonl")
    ours, theirs = (load_file(folder / "hf/model.safetensors") for folder in (sync, zero))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    check_ledger(sync, 0)


MODES = {
    "one step off, on the same devices by turns": (["rollout.mode=one_step_off", "placement=colocated"], 1),
    "asynchronous": (["rollout.mode=async", "rollout.max_staleness=3"], 3),
    "synchronous, by turns": (["placement=colocated"], 0),
}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("mode", "staleness"), MODES.values(), ids=MODES)
def test_a_run_ahead_survives_the_loss_of_each_kind_of_process(start_mrl, quickstart, tmp_path, mode, staleness):
    kinds = list(KINDS)
    random.Random(staleness).shuffle(kinds)
    more = [*mode, "trainer.max_steps=80", "checkpoint.every=10", "optim.lr=5e-5", f"run.dir={tmp_path}"]
    soak = Soak(lambda: start_mrl("train", *quickstart, *more), tmp_path, staleness, pause_s=1.0)
    for kind in kinds:
        soak.strike(kind)
    soak.finish()
    assert soak.run.process.returncode == 0, soak.run.output()[-5000:]
    assert len(soak.killed) == len(KINDS) and soak.run.leftovers() == []
    check_ledger(tmp_path, staleness)
    assert len(ledger(tmp_path)) == 80


@pytest.mark.extended
def test_an_engine_tells_which_version_made_which_token(engine):
    """Weights change in the middle of a response: paused, updated, continued."""
    before = engine.client.weight_version()
    engine.client.set_weight_version("76")
    found = []
    prompt, sampling = [5, 6, 7], SamplingParams(300, ignore_eos=True)
    asking = threading.Thread(target=lambda: found.extend(engine.client.generate([prompt], sampling)))
    asking.start()
    try:
        time.sleep(0.5)
        engine.client.pause(PauseMode.retract)
        engine.client.set_weight_version("77")
        engine.client.flush_cache()
        engine.client.resume()
        asking.join(240)
    finally:
        engine.client.resume()
        engine.client.set_weight_version(before)
    (done,) = found
    assert len(done.token_ids) == 300
    (old, first), (new, second) = done.versions
    assert (old, new) == (76, 77) and first + second == 300 and first and second


def test_a_response_that_is_given_up_ends_in_the_engine_too(engine, tmp_path):
    """Its connection is closed, which SGLang takes for an abort: it is gone while one as long, asked before it, is made."""
    engines = EnginePool(spec_of(tmp_path, engine_urls=(engine.server.url,), request_timeout_s=240.0))
    engines.wait_ready(60)
    prompts, sampling = [[5, 6, number] for number in range(8)], [SamplingParams(450, ignore_eos=True)] * 8
    try:
        kept = engines.submit(engines.generate([8], [[5, 6, 8]], sampling[:1]))
        wait_until(lambda: running(engine) == 1)
        given_up = engines.submit(engines.generate(range(8), prompts, sampling))
        wait_until(lambda: running(engine) == 9)
        given_up.cancel()
        wait_until(lambda: running(engine) <= 1)
        assert not kept.done(), "those that were given up went on to their end"
        (done,) = kept.result(240)
        assert len(done.token_ids) == 450
    finally:
        engines.close()


def running(engine) -> int:
    answer = httpx.get(f"{engine.server.url}/v1/loads", params={"include": "core"}, headers=authorization(), timeout=60)
    return sum(load["num_running_reqs"] for load in answer.json()["loads"])


def wait_until(condition, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
