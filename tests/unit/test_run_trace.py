"""Recorded runs: speeds are fitted to their steps, lengths are read, and invalid records are errors."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from recorded_runs import SPEEDS, STEPS, N, lengths_of, recorded

from mrl.checkpoint.run_dir import SampleLedger
from mrl.core.types import Rollouts
from mrl.planner.rollout_simulator import RolloutSetup, RunSpeeds, simulate
from mrl.planner.run_trace import RecordedStep, fit_engine, read_lengths, read_run


@pytest.mark.parametrize("engines", [1, 3])
def test_a_fit_recovers_the_speeds_of_a_simulated_run(tmp_path, engines):
    recorded(tmp_path, lengths_of(engines), RolloutSetup(N, engines, 0, in_order=True))
    trace = read_run(tmp_path)
    fit = trace.fit()
    assert fit.engine_error < 1e-6 and fit.train_error < 1e-6
    assert vars(fit.speeds.engine) == pytest.approx(vars(SPEEDS.engine), rel=1e-4)
    assert (fit.speeds.train_s, fit.speeds.train_token_s) == pytest.approx((0.8, 2e-4), rel=1e-6)
    assert fit.speeds.push_s == pytest.approx(0.3) and trace.setup == RolloutSetup(N, engines, 0, in_order=True)
    assert (trace.trainer_gpus, trace.engine_gpus, trace.max_running) == (6, 2, 8)


def test_simulating_a_trace_reproduces_the_run(tmp_path):
    groups = lengths_of(5)
    prediction = recorded(tmp_path, groups, RolloutSetup(N, 2, 0, in_order=True))
    trace = read_run(tmp_path)
    assert [trace.groups.tokens_of(number) for number in range(N * STEPS)] == [
        groups.tokens_of(number) for number in range(N * STEPS)
    ]
    again = simulate(trace.groups, trace.fit().speeds, trace.setup, STEPS)
    assert again.step_s == pytest.approx(prediction.step_s, rel=1e-4)


@pytest.mark.extended
@given(st.integers(0, 10_000), st.floats(0, 0.02))
def test_the_error_of_a_fit_is_of_the_size_of_the_noise(seed, noise):
    draw, groups = np.random.default_rng(seed), lengths_of(seed)
    free = RunSpeeds(SPEEDS.engine, 0.0, 0.0, 0.0)
    seconds = simulate(groups, free, RolloutSetup(N, 2, 0, in_order=True), STEPS).step_s * (
        1 + noise * draw.standard_normal(STEPS)
    )
    parts = [slice(n * N, n * N + N) for n in range(STEPS)]
    steps = [
        RecordedStep(groups.prompts[p], groups.responses[p], float(s), 0.0, 0.0)
        for p, s in zip(parts, seconds, strict=True)
    ]
    _, error = fit_engine(steps, 2, 8)
    assert error <= 3 * noise + 1e-6


def test_a_trace_reads_the_ledger_of_a_run(tmp_path):
    lengths = np.array([3, 4, 5, 6, 7, 8])
    rollouts = Rollouts(
        block=None,
        prompt_lengths=np.array([2, 2, 2, 9, 9, 9]),
        response_lengths=lengths,
        sampled_lengths=lengths,
        groups=np.array([0, 0, 0, 1, 1, 1]),
        rows=np.array([11, 11, 11, 12, 12, 12]),
        weight_versions=np.zeros(6, int),
        truncated=np.zeros(6, bool),
        digests=np.arange(6, dtype=np.uint64),
        request_numbers=np.array([1, 0]),
        rewards=np.zeros(6),
        version_spans=np.array([[n, 0, tokens] for n, tokens in enumerate(lengths)]),
    )
    recorded(tmp_path, lengths_of(0), RolloutSetup(N, 1, 0))
    (tmp_path / "ledger.jsonl").unlink()
    ledger = SampleLedger(tmp_path / "ledger.jsonl", 0)
    ledger.record(1, rollouts, [2])
    ledger.close()
    groups = read_run(tmp_path).groups
    assert [groups.tokens_of(number) for number in (0, 1)] == [(9, [6, 7, 8]), (2, [3, 4, 5])]
    assert [groups.row_of(number) for number in (0, 1, 2)] == [12, 11, -3]


def test_an_unusable_record_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="expected a run directory"):
        read_run(tmp_path)
    recorded(tmp_path, lengths_of(0), RolloutSetup(N, 2, 0, in_order=True), steps=4)
    with pytest.raises(ValueError, match="has 3 steps after the first; 4 or more"):
        read_run(tmp_path).fit()
    recorded(tmp_path, lengths_of(0), RolloutSetup(N, 2, 0), mode="async", max_staleness=3)
    trace = read_run(tmp_path)
    assert trace.setup == RolloutSetup(N, 2, 3)
    with pytest.raises(ValueError, match=r"rollout\.mode=sync"):
        trace.fit()
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    lines[1]["lengths"][0].pop()
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"the groups of this run differ in size \(rollout.group_sizes\)"):
        read_run(tmp_path)


def test_lengths_are_read_from_a_file(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text("[3, 4]\n[5, 6]\n")
    assert [read_lengths(path, 7).tokens_of(number) for number in (0, 1)] == [(7, [3, 4]), (7, [5, 6])]
    for text, line in (("[3, 4]\n[5]\n", 1), ("[3, 4]\n[5, 0]\n", 2), ('[3, 4]\n{"a": 1}', 2), ("", 1)):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"line {line}: expected the response lengths of one group"):
            read_lengths(path)
    path.write_text("[3,")
    with pytest.raises(ValueError, match="expected a JSON Lines file"):
        read_lengths(path)
