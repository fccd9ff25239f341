"""A run whose reward function sometimes raises, hangs or dies completes; its metrics count the failures."""

import pytest

pytestmark = pytest.mark.extended
FUNCTION = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    match len(solution_str) % 4:
        case 0:
            raise RuntimeError("odd response")
        case 1:
            os._exit(1)
    if solution_str.endswith("1"):
        time.sleep(600)
    return {"score": solution_str == ground_truth, "length": len(solution_str)}
"""


def test_a_run_completes_although_some_rewards_fail(start_mrl, inputs, tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    run = start_mrl(
        "train",
        "experiment=quickstart",
        f"data.inputs.folder={inputs}",
        "sft.train=null",
        f"model.path={inputs}/model",
        "rollout.prompts_per_step=4",
        "trainer.max_steps=2",
        "trainer.stop_reward=null",
        "trainer.eval_rows=4",
        "scoring.sample_timeout_s=0.5",
        "reward=weighted",
        "reward.parts.correct._target_=mrl.rewards.user_function.Function",
        f"reward.parts.correct.path={tmp_path}/mine.py",
        "reward.parts.overlong.cache_tokens=4",
    ).finish()
    assert run.process.returncode == 0, run.output()
    steps = run.metrics()
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["reward/failed_fraction"] < 1 and -0.5 <= step["reward/mean"] <= 1
        assert -1 <= step["reward/overlong_mean"] < 0 and step["reward/correct_length_mean"] >= 2
    log = (run.folder / "logs/rollout.log").read_text()
    assert "correct: RuntimeError: odd response" in log or "died (exit code 1)" in log
    assert run.leftovers() == []


def test_an_unknown_argument_of_a_reward_part_is_reported_before_anything_starts(start_mrl, inputs):
    run = start_mrl(
        "train",
        "experiment=quickstart",
        f"data.inputs.folder={inputs}",
        "reward=weighted",
        "reward.parts.correct.boxd=true",
    ).finish(60)
    assert run.process.returncode == 2
    assert "reward.parts.correct.boxd: mrl.rewards.rule_based.MathVerify has no argument 'boxd'" in run.output()
    assert "did you mean 'boxed'?" in run.output() and "Traceback" not in run.output()
    assert not (run.folder / "logs").exists()
