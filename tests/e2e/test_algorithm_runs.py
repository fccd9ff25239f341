"""Runs with recorded rollouts and two replicas, of algorithms that need more than rewards and old log-probabilities."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from recorded_steps import exact_matches, log_distributions, sampled_logprobs
from run_comparison import check_equal_weights, learning_metrics

from mrl.algorithms.advantages import GPG, GRPO, Advantage, OptimalTokenBaseline, PassAtK
from mrl.algorithms.inputs import AdvantageInputs, broadcast_to_tokens
from mrl.algorithms.objective import AGGREGATIONS, TokenWeighting
from mrl.rollout.rollout_log import read_recording

pytestmark = pytest.mark.extended

STEPS = 4
NORMALIZED = ["correction=decoupled_token_is", "++algorithm.correction.batch_normalize=true"]
PASS_AT_K = ["algorithm.advantage._target_=mrl.algorithms.advantages.PassAtK", "algorithm.advantage.normalize_std=true"]
NARROW = ["algorithm.loss.delta_low=0.001", "algorithm.loss.delta_high=0.001"]
ENGINE_AS_OLD = "algorithm.old_logprobs=rollout"  # so that later steps have ratios other than 1


def k2_rejection(level: str) -> str:
    """Return the override for a correction that rejects tokens or responses with a large k2 divergence from the engine."""
    return f"++algorithm.correction={{_target_:mrl.algorithms.corrections.Rejection,level:{level},kind:k2,high:0.01}}"


RUNS = {
    "otb": ["algorithm=otb"],
    "gpg": ["algorithm=gpg", k2_rejection("token")],
    "luspo": ["algorithm=luspo", ENGINE_AS_OLD],
    "vespo": ["algorithm=vespo", ENGINE_AS_OLD],
    "dppo_kl": ["algorithm=dppo_kl", "algorithm.aggregation=token_sum", ENGINE_AS_OLD, *NARROW],
    "dppo_tv": ["algorithm=dppo_tv", ENGINE_AS_OLD, *NARROW],
    "lite_ppo": ["algorithm=lite_ppo", "++algorithm.kl_in_loss={coef: 0.01, kind: abs}"],
    "pass@k": ["algorithm=grpo", *PASS_AT_K, k2_rejection("sum")],
    "rejection": ["algorithm=grpo", "correction=decoupled_k3_rs"],
    "rejection by the maximum": ["algorithm=grpo", k2_rejection("max")],
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
            "train", *quickstart, recorded_steps, f"trainer.max_steps={STEPS}", "optim.lr=1e-4", *overrides
        ).finish()
        assert done.process.returncode == 0, done.output()
        return done

    return run


@pytest.fixture(scope="module")
def same_samples(recorded, tmp_path_factory) -> Path:
    """Recorded rollouts in which every step has the same samples: those of the first step, from the initial policy."""
    folder = tmp_path_factory.mktemp("same_samples")
    for step in range(STEPS):
        shutil.copy(recorded.folder / "rollouts/step_000000.npz", folder / f"step_{step:06d}.npz")
    return folder


@pytest.fixture(scope="module")
def run_of(replays, same_samples):
    """`run_of(name)`: the run of RUNS with this name. Each run is started only once, and keeps its checkpoint of step 2."""
    runs = {}

    def get(name: str):
        if name not in runs:
            own = [f"rollout.replay={same_samples}"] if name == "lite_ppo" else []
            options = ["parallel.dp=2", "checkpoint.every=2", "checkpoint.keep_last=9"]
            runs[name] = replays(*RUNS[name], *options, *own)
        return runs[name]

    return get


@dataclass(frozen=True)
class FirstStep:
    """The responses of the first step, which the initial policy sampled. All columns are those of this policy."""

    inputs: AdvantageInputs
    logprobs: NDArray[np.float64]  # [R]
    entropies: NDArray[np.float64]  # [R]

    def advantages(self, estimator: Advantage) -> NDArray[np.floating]:
        """Return the advantages [R] of an estimator."""
        return broadcast_to_tokens(estimator(self.inputs), self.inputs)

    def mean_loss(self, losses: NDArray[np.floating], aggregation: str) -> float:
        """Return the loss of the step for token losses [R]."""
        weighting = TokenWeighting(AGGREGATIONS[aggregation], max_response_tokens=7)
        return float((weighting(self.inputs.lengths, self.inputs.groups)[self.inputs.response_of_token] * losses).sum())


@pytest.fixture(scope="module")
def first_step(recorded, inputs, warm) -> FirstStep:
    block, columns = read_recording(recorded.folder / "rollouts", 0)
    log_probs = log_distributions(warm, block)
    probs, logprobs = log_probs.exp(), sampled_logprobs(log_probs, block)
    assert np.allclose(logprobs, block.rollout_logprobs, atol=1e-4)
    lengths, rewards = block.sampled_lengths, exact_matches(block, columns["rows"], inputs)
    assert rewards.mean() == pytest.approx(recorded.metrics()[0]["reward/mean"]) and 0 < rewards.mean() < 1
    token_rewards = np.zeros(lengths.sum())
    token_rewards[np.cumsum(lengths) - 1] = rewards
    of_old_policy = {"old_logprobs": logprobs, "sum_pi_squared": (probs**2).sum(-1).numpy()}
    estimated = AdvantageInputs(token_rewards, columns["groups"], lengths, of_old_policy)
    return FirstStep(estimated, logprobs, -(probs * log_probs).sum(-1).numpy())


def of_ratio(step: FirstStep, advantages: NDArray) -> NDArray:
    """Return the token losses [R] -r A. The ratio r is 1."""
    return -advantages


def of_logprob(step: FirstStep, advantages: NDArray) -> NDArray:
    """Return the token losses [R] -A log pi."""
    return -advantages * step.logprobs


def of_uncertain_tokens(step: FirstStep, advantages: NDArray) -> NDArray:
    """Return the token losses [R]: -r A for the 30% of tokens with the largest entropy, and 0 for the other tokens."""
    return -advantages * (step.entropies >= np.quantile(step.entropies, 0.7))


TokenLosses = Callable[[FirstStep, NDArray], NDArray]
CENTERED = GRPO(scale_rewards="none")
FIRST_LOSSES: dict[str, tuple[Advantage, TokenLosses, str]] = {
    "otb": (OptimalTokenBaseline(), of_ratio, "token_mean"),
    "gpg": (GPG(), of_logprob, "token_mean"),
    "luspo": (GRPO(), of_ratio, "sequence_sum"),
    "vespo": (GRPO(), of_logprob, "token_mean"),
    "dppo_kl": (CENTERED, of_logprob, "token_sum"),
    "dppo_tv": (CENTERED, of_logprob, "fixed_length"),
    "lite_ppo": (GRPO(scale_rewards="batch"), of_ratio, "token_mean"),
    "pass@k": (PassAtK(normalize_std=True), of_ratio, "token_mean"),
    "rejection": (GRPO(), of_ratio, "token_mean"),
    "rejection by the maximum": (GRPO(), of_ratio, "token_mean"),
    "top_entropy": (GRPO(), of_uncertain_tokens, "token_mean"),
    "normalized weights": (CENTERED, of_logprob, "fixed_length"),
    "engine as old policy": (GRPO(), of_logprob, "token_mean"),
}
"""Name of a run -> its estimator, the losses of its tokens in the first step, and its aggregation."""
LATER_METRICS = {
    "gpg": ("correction/rejected_fraction", 0),
    "luspo": ("loss/clip_fraction", 0),
    "vespo": ("loss/response_weight", 1),
    "dppo_kl": ("loss/clip_fraction", 0),
    "dppo_tv": ("loss/clip_fraction", 0),
    "lite_ppo": ("policy/kl_ref", 0),
    "pass@k": ("correction/rejected_fraction", 0),
    "rejection": ("correction/rejected_fraction", 0),
    "rejection by the maximum": ("correction/rejected_fraction", 0),
    "engine as old policy": ("correction/rejected_fraction", 0),
}
"""Name of a run -> a metric for the distance between trained and sampling policy, and its value in the first step."""


REJECTING = ("gpg", "pass@k", "rejection", "rejection by the maximum", "engine as old policy")
BOUNDED = ("luspo", "dppo_kl", "dppo_tv", *REJECTING)
"""Runs in which later steps may have no gradient, because all tokens with an advantage are too far off-policy."""


@pytest.mark.parametrize("name", RUNS)
def test_every_step_trains(run_of, name):
    steps = run_of(name).metrics()
    assert len(steps) == STEPS
    assert all(math.isfinite(step["loss/policy"]) for step in steps)
    assert all(step["optim/grad_norm"] > 0 for step in (steps[:1] if name in BOUNDED else steps))


@pytest.mark.parametrize("name", FIRST_LOSSES)
def test_the_first_step_has_the_loss_of_the_algorithm(run_of, first_step, name):
    """A run that ignored its estimator, its loss or its aggregation would have another loss."""
    estimator, token_losses, aggregation = FIRST_LOSSES[name]
    losses = token_losses(first_step, first_step.advantages(estimator))
    expected = first_step.mean_loss(losses, aggregation)
    assert abs(expected) > 1e-3, "a loss of 0 would prove nothing"
    assert run_of(name).metrics()[0]["loss/policy"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", LATER_METRICS)
def test_a_step_with_samples_of_another_policy_shows_it(run_of, name):
    """In the first step, the trained policy has sampled the responses itself. In later steps, its weights have changed."""
    metric, first = LATER_METRICS[name]
    found = [step[metric] for step in run_of(name).metrics()]
    assert found[0] == pytest.approx(first, abs=1e-4)
    assert max(abs(value - first) for value in found[1:]) > 1e-3, found


def test_the_divergence_of_a_trust_region_decides_what_is_outside(run_of):
    """If both have the same bound, fewer tokens exceed it with the KL divergence than with the total variation."""
    by_kl, by_variation = (run_of(name).metrics()[1]["loss/clip_fraction"] for name in ("dppo_kl", "dppo_tv"))
    assert by_kl < by_variation


def test_the_absolute_kl_to_the_reference_is_in_the_loss(run_of, first_step):
    """All samples come from the reference, so the mean mismatch with the engine is the absolute KL to the reference."""
    advantages = first_step.advantages(GRPO(scale_rewards="batch"))
    without_kl = first_step.mean_loss(-advantages, "token_mean")
    for step in run_of("lite_ppo").metrics()[1:]:
        assert step["policy/kl_ref"] > 0
        assert step["policy/kl_ref"] == pytest.approx(step["mismatch/logprob_abs_mean"], rel=1e-2)
        assert step["loss/policy"] - without_kl == pytest.approx(0.01 * step["policy/kl_ref"], rel=1e-2)


def test_normalized_weights_have_the_mean_1(run_of):
    steps = run_of("normalized weights").metrics()
    assert all(step["correction/weight_mean"] == pytest.approx(1, abs=1e-5) for step in steps)
    # E[ratio] over the engine's samples, computed from the chi-square divergence and the effective sample size
    means = [math.sqrt(step["mismatch/ess_fraction"] * (1 + step["mismatch/chi2"])) for step in steps]
    assert max(abs(mean - 1) for mean in means) > 1e-4, "weights without normalization would have another mean"


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
    """Mean weights, entropies, baselines and draws are computed from the whole step, and not from the tokens of one replica."""
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
