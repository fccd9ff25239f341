"""Runs of algorithms that need more than rewards and old log-probabilities, on recorded rollouts, with two replicas."""

import json
import math

import numpy as np
import pytest
from run_comparison import check_equal_weights, learning_metrics

pytestmark = pytest.mark.extended

NORMALIZED = ["correction=decoupled_token_is", "++algorithm.correction.batch_normalize=true"]
PASS_AT_K = ["algorithm.advantage._target_=mrl.algorithms.advantages.PassAtK", "algorithm.advantage.normalize_std=true"]
RUNS = {
    "otb": ["algorithm=otb"],
    "luspo": ["algorithm=luspo"],
    "vespo": ["algorithm=vespo", "algorithm.old_logprobs=rollout"],
    "dppo_kl": ["algorithm=dppo_kl", "algorithm.aggregation=token_sum"],
    "lite_ppo": ["algorithm=lite_ppo", "++algorithm.kl_in_loss={coef: 0.01, kind: abs}"],
    "pass@k": ["algorithm=grpo", *PASS_AT_K],
    "rejection": ["algorithm=grpo", "correction=decoupled_k3_rs"],
    "top_entropy": ["algorithm=top_entropy", "algorithm.loss.fraction=0.3"],
    "normalized weights": ["algorithm=dro", *NORMALIZED],
    "engine as old policy": ["algorithm=grpo", "correction=bypass_pg_geo_rs_seq_tis"],
    "pf_ppo": ["algorithm=pf_ppo", "algorithm.resampling.method=max_random"],
}


@pytest.fixture(scope="module")
def replays(start_mrl, quickstart, recorded):
    """`replays(override, ...)`: a run of four steps on the recorded rollouts."""

    def run(*overrides: str):
        recorded_steps = f"rollout.replay={recorded.folder / 'rollouts'}"
        done = start_mrl(
            "train", *quickstart, recorded_steps, "trainer.max_steps=4", "optim.lr=1e-4", *overrides
        ).finish()
        assert done.process.returncode == 0, done.output()
        return done

    return run


@pytest.fixture(scope="module")
def run_of(replays):
    """`run_of(name)`: the run of RUNS with this name. It is started once, and keeps its checkpoint of step 2."""
    runs = {}

    def get(name: str):
        if name not in runs:
            runs[name] = replays(*RUNS[name], "parallel.dp=2", "checkpoint.every=2", "checkpoint.keep_last=9")
        return runs[name]

    return get


@pytest.mark.parametrize("name", RUNS)
def test_every_step_trains(run_of, name):
    steps = run_of(name).metrics()
    assert len(steps) == 4
    assert all(math.isfinite(step["loss/policy"]) for step in steps)
    assert any(step["optim/grad_norm"] > 0 for step in steps)
    if name == "rejection":  # the first step replays samples of its own weights
        assert steps[0]["correction/rejected_fraction"] == 0


@pytest.mark.parametrize(
    ("name", "metrics"),
    {
        "normalized weights": ["correction/weight_mean"],
        "top_entropy": ["loss/clip_fraction"],
        "otb": ["advantage/std"],
        "pf_ppo": ["advantage/drawn_fraction", "critic/loss"],
    }.items(),
)
def test_one_process_has_the_losses_of_two_replicas(run_of, replays, name, metrics):
    """Mean weights, entropies, baselines and draws are those of the whole step, and not of the tokens of one replica."""
    for found, expected in zip(replays(*RUNS[name]).metrics(), run_of(name).metrics(), strict=True):
        for each in ("loss/policy", "optim/grad_norm", *metrics):
            assert found[each] == pytest.approx(expected[each], abs=2e-5, rel=2e-5), (name, each)


def test_policy_filtration_draws_the_same_responses_after_a_resume(run_of, replays):
    whole = run_of("pf_ppo")
    checkpoint = f"resume={whole.folder / 'checkpoints/step_000002'}"
    resumed = replays(*RUNS["pf_ppo"], "parallel.dp=2", checkpoint)
    found, expected = (learning_metrics(run.folder / "metrics.jsonl") for run in (resumed, whole))
    assert found == expected[2:]
    check_equal_weights(resumed.folder, whole.folder)
    ledgers = [(run.folder / "ledger.jsonl").read_text().splitlines() for run in (resumed, whole)]
    assert ledgers[0] == ledgers[1][2:]
    drawn = [step["advantage/drawn_fraction"] for step in whole.metrics()]
    assert all(0.4 < fraction < 1 for fraction in drawn)
    for fraction, line in zip(drawn, ledgers[1], strict=True):
        entry = json.loads(line)
        trained = sum(tokens for update in entry["updates"] for tokens, _ in update.values())
        assert 0 < trained < np.concatenate(entry["lengths"]).sum(), "responses that are not drawn are not trained"
        assert fraction == round(fraction * 24) / 24
