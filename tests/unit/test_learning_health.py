"""The health check of learning: each problem is reported once, with its measured values and the keys to change."""

import json
from dataclasses import replace

import numpy as np
import pytest
from sampled_groups import group

from mrl.algorithms import advantages
from mrl.algorithms.inputs import AdvantageInputs
from mrl.algorithms.parts import build_algorithm
from mrl.config import hydra_entry
from mrl.controller.plan_train import check_learning, learning_settings
from mrl.core.run_errors import UnhealthyRunError
from mrl.rewards.reward_types import Score
from mrl.rollout.response_metrics import SampledStep
from mrl.tracking.learning_health import (
    RULES,
    LearningHealth,
    LearningSettings,
    find_static_problems,
    read_first_steps,
)

SETTINGS = LearningSettings(
    responses_per_prompt=8, max_response_tokens=7, lr=5e-4, advantage="GRPO", group_relative=True
)
HEALTHY = {
    "reward/mean": 0.3,
    "reward/std": 0.4,
    "reward/uniform_groups_fraction": 0.2,
    "reward/failed_fraction": 0.0,
    "rollout/truncated_fraction": 0.1,
    "rollout/kept_groups_fraction": 1.0,
    "batch/zero_advantage_fraction": 0.2,
    "policy/entropy_mean": 0.8,
    "mismatch/logprob_abs_mean": 0.004,
    "optim/grad_norm": 0.5,
    "rollout/samples": 512.0,
}
UNTRAINED = HEALTHY | {"reward/mean": 0.05}  # metrics in the first steps of a run that learns
NO_ADVANTAGE = {"batch/zero_advantage_fraction": 1.0, "optim/grad_norm": 0.0}
NO_GROUPS = replace(SETTINGS, advantage="GAE", group_relative=False)


def reports_of(bad, settings=SETTINGS, healthy_steps=5, bad_steps=6):
    """Return the lines that are reported for healthy steps followed by steps with the metrics `bad`."""
    lines = []
    health = LearningHealth(settings, lines.append)
    for step in range(1, healthy_steps + bad_steps + 1):
        health.check(step, (UNTRAINED if step <= 3 else HEALTHY) | (bad if step > healthy_steps else {}))
    return lines


CASES = {
    "one response": (
        NO_ADVANTAGE | {"reward/uniform_groups_fraction": 1.0},
        replace(SETTINGS, responses_per_prompt=1),
        ["rollout.responses_per_prompt=1, but GRPO compares", "algorithm=reinforce_pp"],
    ),
    "equal rewards": (
        NO_ADVANTAGE | {"reward/std": 0.0, "reward/mean": 0.25},
        SETTINGS,
        ["every advantage is 0", "every reward of the step is 0.25", "data.train"],
    ),
    "equal rewards within each group": (
        NO_ADVANTAGE | {"reward/uniform_groups_fraction": 1.0},
        SETTINGS,
        ["all responses to one prompt have the same reward (mean 0.3)", "rollout.responses_per_prompt (now 8)"],
    ),
    "equal rewards with a critic": (
        {"reward/std": 0.0, "reward/mean": 0.2},
        NO_GROUPS,
        ["every reward of the step is 0.2"],
    ),
    "all groups filtered": (
        NO_ADVANTAGE | {"rollout/kept_groups_fraction": 0.0},
        SETTINGS,
        ["rollout.filter rejected all groups", "(now 8)"],
    ),
    "all responses masked": (
        {"optim/grad_norm": 0.0, "rollout/truncated_fraction": 1.0},
        replace(SETTINGS, mask_truncated=True),
        ["the gradient norm is 0", "algorithm.mask_truncated=true", "(now 7)"],
    ),
    "all tokens rejected": (
        {"optim/grad_norm": 0.0, "correction/rejected_fraction": 1.0},
        SETTINGS,
        ["the gradient norm is 0", "algorithm.correction rejects 100%"],
    ),
    "no effect on the loss": ({"optim/grad_norm": 0.0}, SETTINGS, ["the gradient norm is 0", "algorithm.loss"]),
    "truncated": (
        {"rollout/truncated_fraction": 0.97},
        SETTINGS,
        ["97% of the responses were truncated at rollout.max_response_tokens=7", "data.chat_template"],
    ),
    "failed rewards": (
        {"reward/failed_fraction": 1 / 3},
        SETTINGS,
        ["33% of the responses could not be scored", "logs/rollout.log", "scoring.sample_timeout_s"],
    ),
    "entropy": (
        {"policy/entropy_mean": 0.02},
        SETTINGS,
        ["collapsed to 0.02 nats per token, from 0.8", "optim.lr (now 0.0005)", "algorithm.entropy_coef"],
    ),
    "mismatch": (
        {"mismatch/logprob_abs_mean": 0.3},
        SETTINGS,
        ["differ by 0.3 nats per token on average, 0.004 in the first steps", "rollout.max_staleness"],
    ),
    "gradient norm": (
        {"optim/grad_norm": 40.0},
        SETTINGS,
        ["the gradient norm rose to 40, from 0.5", "optim.lr is 0.0005", "optim.warmup_steps"],
    ),
    "collapsed reward": (
        NO_ADVANTAGE | {"reward/mean": 0.0, "reward/std": 0.0, "policy/entropy_mean": 2.2},
        SETTINGS,
        [
            "the mean reward fell to 0, from 0.3 in the best step",
            "to 2.2 nats per token, from 0.8",
            "optim.lr is 0.0005",
        ],
    ),
}


@pytest.mark.parametrize("bad, settings, words", CASES.values(), ids=CASES)
def test_a_problem_is_reported_once_within_five_steps_with_values_and_keys(bad, settings, words):
    lines = reports_of(bad, settings)
    for word in words:
        assert word in lines[0]
    first = int(lines[0].split(":")[0].removeprefix("step "))
    assert 5 < first <= 10, "the sixth step is the first with the problem"
    assert len(lines) == len({line.split(": ", 1)[1] for line in lines}) <= 2


def test_every_rule_is_tested():
    found = set()
    for bad, settings, _ in CASES.values():
        health = LearningHealth(settings, lambda line: None)
        for step in range(1, 12):
            health.check(step, HEALTHY | (bad if step > 5 else {}))
        found |= set(health._reported)
    assert found == set(RULES)


def test_a_healthy_run_gets_no_report():
    assert reports_of({}) == []
    assert reports_of({"policy/entropy_mean": 0.2, "optim/grad_norm": 3.0, "rollout/truncated_fraction": 0.8}) == []


def test_a_reward_that_falls_within_its_noise_or_because_scoring_fails_is_no_divergence():
    def divergence(**bad):
        return [
            line for line in reports_of({f"reward/{name}": value for name, value in bad.items()}) if "diverges" in line
        ]

    assert divergence(mean=0.01) != []
    assert divergence(mean=0.12) == [], "more than a quarter of the rise from 0.05 to 0.3 is left"
    assert divergence(mean=0.01, failed_fraction=0.9) == []
    noisy = LearningHealth(SETTINGS, pytest.fail)
    for step in range(1, 12):
        noisy.check(
            step, HEALTHY | {"reward/mean": 0.1 if step == 1 else 0.0, "reward/std": 0.3, "rollout/samples": 64}
        )


def reports_of_rewards(means, settings=SETTINGS, **metrics):
    """Return the lines that are reported for steps with these mean rewards."""
    lines = []
    health = LearningHealth(settings, lines.append)
    for step, mean in enumerate(means, 1):
        health.check(step, HEALTHY | {"reward/mean": mean} | metrics)
    return lines


def test_a_reward_that_falls_to_one_value_right_after_the_first_step_is_a_divergence():
    """All responses are wrong from step 2 on. The report names the fall of the reward, not that all rewards are equal."""
    lines = []
    health = LearningHealth(SETTINGS, lines.append)
    health.check(1, HEALTHY | {"reward/mean": 0.098, "reward/std": 0.297})
    for step in (2, 3, 4):
        health.check(step, HEALTHY | NO_ADVANTAGE | {"reward/mean": 0.0, "reward/std": 0.0})
    (line,) = lines
    assert line.startswith("step 3: the mean reward fell to 0, from 0.098 in the best step") and "diverges" in line


def test_negative_rewards_have_collapsed_only_if_they_lost_most_of_their_rise():
    quiet = {"reward/std": 0.1}
    assert reports_of_rewards([-2.0, -2.0, -2.0, -1.0, -1.1, -1.2, -1.3], **quiet) == []
    (line,) = reports_of_rewards([-2.0, -2.0, -2.0, -1.0, -1.9, -1.9, -1.9], **quiet)
    assert "the mean reward fell to -1.9, from -1 in the best step" in line
    assert reports_of_rewards([-1.0, -1.0, -1.0, -1.5, -2.0, -2.0], **quiet) == [], "it never rose"


@pytest.mark.parametrize("prompts", [8, 64])
def test_a_flat_reward_that_differs_from_prompt_to_prompt_is_no_divergence(prompts):
    """By chance, the best of many steps lies above the mean, so later steps lie below this best step."""
    random, lines = np.random.default_rng(0), []
    health = LearningHealth(SETTINGS, lines.append)
    for step in range(1, 151):
        chances = random.beta(0.3, 0.6, prompts)
        rewards = random.binomial(1, chances[:, None], (prompts, 8))
        measured = {"reward/mean": rewards.mean(), "reward/std": rewards.std(), "rollout/samples": rewards.size}
        health.check(step, HEALTHY | measured)
    assert lines == []


@pytest.mark.parametrize("settings, zero", [(SETTINGS, 1.0), (NO_GROUPS, 0.5)], ids=["groups", "a critic"])
def test_a_task_that_is_solved_is_no_problem(settings, zero):
    def reports(best, solved):
        lines = []
        health = LearningHealth(settings, lines.append)
        for step in range(1, 12):
            equal = {"reward/mean": solved, "reward/std": 0.0, "batch/zero_advantage_fraction": zero}
            health.check(step, UNTRAINED | ({"reward/mean": best} if step == 4 else equal if step > 4 else {}))
        return lines

    assert reports(best=0.9, solved=1.0) == []
    assert "every reward of the step is 0.8" in reports(best=0.9, solved=0.8)[0]
    assert "every reward of the step is 0.05" in reports(best=0.05, solved=0.05)[0], "the first steps had this reward"


def test_steps_that_warm_up_the_critic_are_not_the_first_steps(tmp_path):
    warm_up = {"reward/mean": 0.3, "reward/std": 0.4, "critic/grad_norm": 1.0}
    rows = [warm_up] * 4 + [HEALTHY] * 4
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step} | row) + "\n" for step, row in enumerate(rows, 1)))
    assert [row["step"] for row in read_first_steps(path)] == [5, 6, 7]
    assert [row["step"] for row in read_first_steps(path, "reward/mean")] == [1, 2, 3]
    lines = []
    health = LearningHealth(SETTINGS, lines.append)
    for step, row in enumerate([*rows, *[HEALTHY | {"policy/entropy_mean": 0.01, "optim/grad_norm": 40.0}] * 3], 1):
        health.check(step, row)
    assert "the gradient norm rose to 40, from 0.5" in lines[0] and "collapsed to 0.01" in lines[1]
    assert "from 0.5 in the first steps: the training diverges" in lines[0], "the best step, the first, has no norm"


def test_a_gradient_norm_that_grows_with_the_reward_is_no_divergence():
    """At the start of a run in which hardly any response is right, most advantages are 0, and the norm is small."""
    lines = []
    health = LearningHealth(SETTINGS, lines.append)
    for step in range(1, 21):
        health.check(step, HEALTHY | {"reward/mean": 0.02 * step, "optim/grad_norm": 0.02 * step**2})
    assert lines == []
    for step in range(21, 23):
        health.check(step, HEALTHY | {"reward/mean": 0.4, "optim/grad_norm": 170.0})
    assert "the gradient norm rose to 170, from 0.08 in the first steps and 8 in the best step" in lines[0]


def test_a_problem_of_one_step_is_noise():
    for bad in (NO_ADVANTAGE | {"reward/std": 0.0}, {"rollout/truncated_fraction": 1.0}, {"optim/grad_norm": 40.0}):
        assert reports_of(bad, bad_steps=1) == []


def test_metrics_that_a_step_does_not_have_are_no_problem():
    lines = []
    health = LearningHealth(SETTINGS, lines.append)
    for step in range(1, 6):
        health.check(step, {"reward/mean": 0.0})
    assert lines == []


def test_distillation_without_rewards_may_have_equal_rewards():
    assert reports_of({"reward/std": 0.0}, replace(NO_GROUPS, reads_rewards=False)) == []


def test_the_steps_with_a_problem_are_counted_at_the_end():
    lines = []
    health = LearningHealth(SETTINGS, lines.append)
    for step in range(1, 11):
        health.check(step, HEALTHY | ({"rollout/truncated_fraction": 0.95} if 3 <= step <= 7 else {}))
    lines.clear()
    health.report_totals()
    assert lines == ["truncated responses: in 5 of 10 steps, from step 3 to step 7"]


def test_with_stop_the_first_problem_ends_the_run():
    lines = []
    health = LearningHealth(SETTINGS, lines.append, stop=True)
    health.check(1, HEALTHY | NO_ADVANTAGE)
    with pytest.raises(UnhealthyRunError, match=r"on_unhealthy=stop ends the run after step 2: every advantage is 0"):
        health.check(2, HEALTHY | NO_ADVANTAGE)
    assert len(lines) == 1


def test_a_resumed_run_is_compared_with_the_first_steps_of_the_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_first_steps(path) == []
    row = {"policy/entropy_mean": 0.8, "optim/grad_norm": 0.5, "loss/policy": None}
    rows = [{"step": n} | row for n in range(1, 9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = []
    health = LearningHealth(SETTINGS, lines.append, first=read_first_steps(path))
    for step in range(9, 12):
        health.check(step, HEALTHY | {"policy/entropy_mean": 0.01})
    assert len(lines) == 1 and "collapsed to 0.01 nats per token, from 0.8" in lines[0]


def test_problems_that_the_config_shows_are_found_before_the_start():
    def find(settings, num_rows):
        return find_static_problems(settings, num_rows=num_rows, prompts_per_step=64, max_steps=10)

    assert find(SETTINGS, 64) == []
    (text,) = find(replace(SETTINGS, responses_per_prompt=1), 64)
    assert "cannot learn: rollout.responses_per_prompt=1, but GRPO" in text
    (text,) = find(SETTINGS, 10)
    assert "data.train has 10 rows, but a step draws rollout.prompts_per_step=64" in text
    assert find(replace(NO_GROUPS, responses_per_prompt=1), 64) == []


ESTIMATORS = ["GRPO", "RLOO", "ReinforcePlusPlusBaseline", "ReMax", "OPO", "GPG", "PassAtK", "LogMeanExp", "GDPO"]


@pytest.mark.parametrize("name", [*ESTIMATORS, "ReinforcePlusPlus"])
def test_estimators_declare_whether_one_response_per_prompt_gives_no_advantage(name):
    estimator = getattr(advantages, name)()
    inputs = AdvantageInputs(
        token_rewards=np.array([0.0, 1.0, 0.0]),
        groups=np.arange(3),
        lengths=np.ones(3, int),
        columns={},
        greedy_rewards=np.full(3, 0.5),
        reward_parts={},
    )
    assert getattr(estimator, "group_relative", False) == (not np.any(estimator(inputs)))


def test_a_step_measures_how_much_rewards_differ_including_rejected_groups():
    kept, rejected = group(0, Score(1.0), Score(0.0)), group(1, Score(0.1), Score(0.1))
    metrics = SampledStep([kept], [rejected]).metrics()
    assert metrics["reward/uniform_groups_fraction"] == 0.5
    assert metrics["reward/std"] == pytest.approx(np.std([1, 0, 0.1, 0.1]))
    assert SampledStep([group(0, *[Score(0.1)] * 7)]).metrics()["reward/std"] == 0


def config_with(*overrides):
    return hydra_entry.compose_config(["experiment=quickstart", "run.dir=out", *overrides])


@pytest.mark.extended
def test_one_response_per_prompt_is_a_warning_before_the_start_and_an_error_with_stop(caplog, own_records):
    config = config_with("rollout.responses_per_prompt=1")
    check_learning(config, build_algorithm(config), 640)
    assert "the run cannot learn: rollout.responses_per_prompt=1, but GRPO" in caplog.text
    strict = config_with("rollout.responses_per_prompt=1", "trainer.on_unhealthy=stop")
    with pytest.raises(ValueError, match=r"responses_per_prompt=1.*trainer\.on_unhealthy=warn starts the run"):
        check_learning(strict, build_algorithm(strict), 640)
    caplog.clear()
    for algorithm in ("reinforce_pp", "ppo"):
        config = config_with("rollout.responses_per_prompt=1", f"algorithm={algorithm}")
        check_learning(config, build_algorithm(config), 640)
    assert not own_records()


@pytest.mark.extended
def test_the_check_knows_whether_an_algorithm_reads_rewards():
    for algorithm, reads in (("grpo", True), ("distill", False), ("ppo", True)):
        teacher = ["roles.teacher.path=x"] if algorithm == "distill" else []
        config = config_with(f"algorithm={algorithm}", *teacher)
        assert learning_settings(config, build_algorithm(config)).reads_rewards == reads, algorithm
