"""Asynchronous runs: staleness is bounded, no response is used twice, and max_staleness=0 gives the synchronous results."""

import json
import random
import threading
import time

import pytest
from http_engines import spec_of
from live_engines import num_running, slow_engines
from mrl_runs import wait_until
from run_comparison import check_equal_weights, learning_metrics
from test_soak import KINDS, Soak

from mrl.config.process_schema import PauseMode
from mrl.rollout.client import SamplingParams
from mrl.rollout.engine_pool import EnginePool

GROUPS_PER_STEP = 6


def ledger(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def check_ledger(folder, staleness: int) -> None:
    """Check that no prompt request was used twice, unused requests fit in the staleness buffer, and no token was too stale."""
    lines = ledger(folder)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(len(line["requests"]) == len(line["groups"]) == GROUPS_PER_STEP for line in lines)
    trained = [request for line in lines for request in line["requests"]]
    assert len(set(trained)) == len(trained)
    untrained = set(range(max(trained) + 1)) - set(trained)
    assert len(untrained) <= staleness * GROUPS_PER_STEP, "only groups that are still sampled or buffered are untrained"
    for line in lines:
        oldest = line["step"] - 1 - staleness
        assert line["weight_version"] >= oldest
        assert all(oldest <= int(version) < line["step"] for update in line["updates"] for version in update)
        assert all(abs(sum(share for _, share in update.values()) - 1) < 1e-6 for update in line["updates"] if update)


@pytest.mark.extended
def test_an_asynchronous_run_without_staleness_equals_the_synchronous_run(start_mrl, quickstart, recorded):
    options = ["trainer.max_steps=5", "rollout.mode=async", "rollout.max_staleness=0"]
    run = start_mrl("train", *quickstart, *options).finish(400)
    assert run.process.returncode == 0, run.output()
    sync, zero = recorded.folder, run.folder
    assert ledger(sync) == ledger(zero)
    assert learning_metrics(sync / "metrics.jsonl") == learning_metrics(zero / "metrics.jsonl")
    check_equal_weights(zero, sync)
    check_ledger(sync, 0)


MODES = {
    "one step off, colocated": (["rollout.mode=one_step_off", "placement=colocated"], 1),
    "asynchronous": (["rollout.mode=async", "rollout.max_staleness=3"], 3),
    "synchronous, colocated": (["placement=colocated"], 0),
}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("mode", "staleness"), MODES.values(), ids=MODES)
def test_a_run_of_each_mode_survives_a_kill_of_each_kind_of_process(start_mrl, quickstart, tmp_path, mode, staleness):
    kinds = list(KINDS)
    random.Random(staleness).shuffle(kinds)
    more = [*mode, "trainer.max_steps=80", "checkpoint.every=10", "optim.lr=5e-5", f"run.dir={tmp_path}"]
    soak = Soak(lambda: start_mrl("train", *quickstart, *more), tmp_path, staleness, pause_s=1.0)
    for kind in kinds:
        soak.kill_next(kind)
    soak.finish()
    assert soak.run.process.returncode == 0, soak.run.output()[-5000:]
    assert len(soak.killed) == len(KINDS) and soak.run.leftovers() == []
    check_ledger(tmp_path, staleness)
    assert len(ledger(tmp_path)) == 80


@pytest.mark.extended
def test_an_engine_reports_which_weight_version_sampled_each_token(engine):
    """In the middle of a response, the test pauses the engine, sets another version, and resumes the engine."""
    before = engine.client.weight_version()
    engine.client.set_weight_version("76")
    completions = []
    prompt, sampling = [5, 6, 7], SamplingParams(300, ignore_eos=True)
    request = threading.Thread(target=lambda: completions.extend(engine.client.generate([prompt], sampling)))
    try:
        with slow_engines(engine.client, pass_s=0.2):  # at least 60 s for the response
            start = time.time()
            request.start()
            wait_until(lambda: num_running(engine.client, start) == 1)
            engine.client.pause(PauseMode.retract)
            engine.client.set_weight_version("77")
            engine.client.flush_cache()
            engine.client.resume()
        request.join(240)
    finally:
        engine.client.resume()
        engine.client.set_weight_version(before)
    (completion,) = completions
    assert len(completion.token_ids) == 300
    (old, first), (new, second) = completion.versions
    assert (old, new) == (76, 77) and first + second == 300 and first and second


@pytest.mark.extended
def test_an_engine_stops_sampling_responses_whose_request_is_cancelled(engine, tmp_path):
    """The pool closes the connection, and SGLang aborts the cancelled request. The other request continues.

    Each forward pass is delayed, so every response takes at least 135 s. A request that leaves the engine earlier was aborted.
    """
    pool = EnginePool(spec_of(tmp_path, engine_urls=(engine.server.url,), request_timeout_s=480.0))
    pool.wait_ready(60)
    prompts, sampling = [[5, 6, number] for number in range(8)], [SamplingParams(450, ignore_eos=True)] * 8
    try:
        with slow_engines(engine.client, pass_s=0.3):
            kept = pool.submit(pool.generate([8], [[5, 6, 8]], sampling[:1]))
            cancelled = pool.submit(pool.generate(range(8), prompts, sampling))
            wait_until(lambda: num_running(engine.client) == 9, 120)
            cancelled.cancel()
            wait_until(lambda: num_running(engine.client) <= 1, 120)
            assert not kept.done(), "the cancelled responses were sampled to their end"
        (completion,) = kept.result(240)
        assert len(completion.token_ids) == 450
    finally:
        pool.close()
