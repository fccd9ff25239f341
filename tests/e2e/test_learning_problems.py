"""Runs of the quickstart that cannot learn: a message names the problem within five steps, with values and config keys."""

import re

import pytest

pytestmark = pytest.mark.extended
REWARDS = """
import itertools

calls = itertools.count(1)

def constant(data_source, solution_str, ground_truth, extra_info):
    return 0.5

def failing(data_source, solution_str, ground_truth, extra_info):
    if next(calls) % 3 == 0:
        raise RuntimeError("the service of the reward is down")
    return float(solution_str == ground_truth)
"""
FUNCTION = "reward._target_=mrl.rewards.user_function.Function"
# name of the problem -> (overrides, pattern of the line on the terminal)
PROBLEMS = {
    "no learning signal: one response": (
        ["rollout.responses_per_prompt=1", "rollout.prompts_per_step=64"],
        r"every advantage is 0, .*rollout\.responses_per_prompt=1, but GRPO compares",
    ),
    "no learning signal: constant reward": (
        [FUNCTION, "reward.path={rewards}", "reward.name=constant"],
        r"every advantage is 0, .*every reward of the step is 0\.5",
    ),
    "truncated responses": (
        ["rollout.max_response_tokens=2"],
        r"(9\d|100)% of the responses were truncated at rollout\.max_response_tokens=2\. Raise rollout\.max_response_tokens",
    ),
    "failed rewards": (
        [FUNCTION, "reward.path={rewards}", "reward.name=failing", "rollout.prompts_per_step=32"],
        r"(2|3|4)\d% of the responses could not be scored; .*logs/rollout\.log",
    ),
    "divergence": (
        ["optim.lr=0.05", "rollout.prompts_per_step=64", "rollout.responses_per_prompt=8"],
        r"the training diverges\. optim\.lr is 0\.05; try a tenth",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_run_that_cannot_learn_names_the_problem_within_five_steps(start_mrl, quickstart, tmp_path, problem):
    overrides, pattern = PROBLEMS[problem]
    (tmp_path / "rewards.py").write_text(REWARDS)
    run = start_mrl(
        "train",
        *quickstart,
        "trainer.eval_rows=4",
        "trainer.max_steps=5",
        "trainer.save=false",
        *(override.format(rewards=tmp_path / "rewards.py") for override in overrides),
    ).finish()
    output = run.output()
    assert run.process.returncode == 0, output
    found = re.search(rf"step (\d+): [^\n]*{pattern}", output)
    assert found and 1 <= int(found[1]) <= 5, output
    assert f"{problem.split(':')[0]}: in " in output, "the end of the run counts the steps"
    assert len(run.metrics()) == 5


def test_with_stop_the_run_ends_with_a_checkpoint_and_its_samples_can_be_read(start_mrl, quickstart, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    run = start_mrl(
        "train",
        *quickstart,
        FUNCTION,
        f"reward.path={tmp_path / 'rewards.py'}",
        "reward.name=constant",
        "trainer.max_steps=50",
        "trainer.on_unhealthy=stop",
        "tracking.samples_every=1",
    ).finish()
    output = run.output()
    assert run.process.returncode == 3, output
    assert "trainer.on_unhealthy=stop ends the run after step 2" in output and "Traceback" not in output
    assert [path.name for path in (run.folder / "checkpoints").glob("step_*")] == ["step_000002"]
    assert "best of step 1: reward 0.5" in output and "worst of step 2: reward 0.5" in output
    shown = start_mrl("samples", "--step", "1", "-n", "3", folder=run.folder).finish(60)
    assert shown.process.returncode == 0 and shown.output().count("reward 0.5") == 3, shown.output()
    assert run.leftovers() == []
