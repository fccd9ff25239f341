"""Runs with actor, reference, critic, teacher and a served reward model, which work side by side or one after another."""

import numpy as np
import pytest
from mrl_runs import wait_until
from run_comparison import check_equal_weights, reproducible_metrics
from test_served_rewards import make_model

pytestmark = pytest.mark.extended

STEPS = 3


@pytest.fixture(scope="module")
def five_models(quickstart, warm, tmp_path_factory) -> list[str]:
    """Settings of a PPO run that also distils a teacher, with a reference of its own and a served reward model.

    The reward model has random weights. A step has 80 responses, so that every model works for a noticeable time.
    """
    folder = tmp_path_factory.mktemp("reward_model") / "model"
    make_model(folder, "Llama", "SequenceClassification")
    return [
        *quickstart,
        "algorithm=distill",
        "++algorithm.advantage.reward._target_=mrl.algorithms.advantages.GAE",
        f"roles.teacher.path={warm}",
        "critic.mini_batches=1",
        "++algorithm.kl_in_reward={coef: 0.01, kind: k1}",
        "roles.reference.parallel.tp=1",
        "reward=served_reward_model",
        "reward.concurrency=1",  # the rounding of a score depends on the other requests in its batch
        f"roles.reward_model.path={folder}",
        "rollout.prompts_per_step=20",
        "rollout.deterministic=true",
        f"trainer.max_steps={STEPS}",
    ]


@pytest.fixture(scope="module")
def runs(start_mrl, five_models):
    """placement -> a finished run with this placement."""

    def finished(placement: str):
        run = start_mrl("train", *five_models, f"placement={placement}").finish(400)
        assert run.process.returncode == 0, run.output()
        return run

    return {placement: finished(placement) for placement in ("disaggregated", "paired", "colocated")}


def test_all_placements_give_the_same_numbers_and_weights(runs):
    apart = runs["disaggregated"]
    expected = reproducible_metrics(apart.folder / "metrics.jsonl")
    assert len(expected) == STEPS and all(np.isfinite(step["policy/kl_reward"]) for step in expected)
    assert len({step["reward/mean"] for step in expected}) == STEPS, "the reward model scores each response"
    for placement in ("paired", "colocated"):
        found = reproducible_metrics(runs[placement].folder / "metrics.jsonl")
        kept = [{k: v for k, v in step.items() if not k.startswith("placement/")} for step in found]
        assert kept == expected, placement
        check_equal_weights(runs[placement].folder, apart.folder)


def test_a_reference_in_ranks_of_its_own_has_the_initial_weights_of_the_actor(runs):
    """The KL to the reference is the mean difference of the log-probabilities of the actor and of the reference."""
    for placement, run in runs.items():
        first, *later = (step["policy/kl_reward"] for step in run.metrics())
        assert abs(first) < 1e-7 and all(abs(kl) > 1e-6 for kl in later), placement


def test_models_with_devices_of_their_own_work_at_the_same_time(runs):
    for step in runs["disaggregated"].metrics():
        assert step["component_time/score_s"] > step["time/score_s"], (
            "actor, critic, reference and teacher score side by side"
        )
        assert step["component_time/megatron_s"] + step["component_time/critic_s"] > step["time/update_s"]
        assert step["component_time/overlap_s"] > 0
    for step in runs["colocated"].metrics():
        assert step["component_time/overlap_s"] == 0
        assert step["component_time/score_s"] <= step["time/score_s"]
        assert step["component_time/megatron_s"] + step["component_time/critic_s"] <= step["time/update_s"]


def test_the_reward_model_scores_while_other_models_work(start_mrl, five_models):
    """With one step off, responses of the next step are sampled and scored while the trainers work."""
    run = start_mrl("train", *five_models, "rollout.mode=one_step_off", "trainer.save=false").finish(400)
    assert run.process.returncode == 0 and run.leftovers() == [], run.output()
    steps = run.metrics()
    assert len(steps) == STEPS
    # Responses of a step may be scored while the previous step still waits for responses. Then the previous step counts the time.
    assert sum(step["component_time/reward_overlap_s"] for step in steps) > 0.05


def test_every_process_of_a_role_ends_with_the_run(runs):
    for run in runs.values():
        assert run.leftovers() == []
        assert (run.folder / "logs/reward_model_0.log").exists()


def test_a_reward_model_that_is_killed_is_replaced(start_mrl, five_models):
    run = start_mrl("train", *five_models, "trainer.max_steps=6", "trainer.save=false")
    wait_until(lambda: run.process.poll() is not None or ((run.folder / "metrics.jsonl").exists() and run.metrics()))
    assert run.process.poll() is None, run.output()
    served = next(process for process in run.tagged() if process.environ().get("MRL_PROCESS_NAME") == "reward_model_0")
    served.kill()
    run.finish(400)
    assert run.process.returncode == 0, run.output()
    assert len(run.metrics()) == 6 and all(step["reward/failed_fraction"] == 0 for step in run.metrics())
    assert (run.folder / "logs/reward_model_1.log").exists() and run.leftovers() == []
