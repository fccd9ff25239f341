"""Whole runs that distil a toy teacher: the divergence falls, engines may serve it, and a killed run is repeated exactly."""

import numpy as np
import pytest
from mrl_runs import KILLING_FILTER
from run_comparison import check_equal_runs

pytestmark = pytest.mark.extended

STEPS = 10


@pytest.fixture(scope="module")
def distil(start_mrl, quickstart, inputs, warm):
    """`distil(algorithm, override, ...)`: a finished run in which an untrained policy learns from the model of `warm`."""

    def run(algorithm: str, *overrides: str):
        policy = [
            f"model.path={inputs / 'model'}",
            f"roles.teacher.path={warm}",
            "optim.lr=5e-4",
            "optim.warmup_steps=0",
        ]
        options = [f"algorithm={algorithm}", f"trainer.max_steps={STEPS}", "checkpoint.every=0"]
        done = start_mrl("train", *quickstart, *policy, *options, *overrides).finish(300)
        assert done.process.returncode == 0, done.output()
        assert done.leftovers() == []
        return done

    return run


def divergences(run) -> list[float]:
    """Return the divergence of each step. It must fall to less than two thirds, and every step must change the weights."""
    steps = run.metrics()
    found = [step["distill/divergence"] for step in steps]
    assert len(found) == STEPS and np.isfinite(found).all()
    assert found[-1] < found[0] / 1.5, found
    assert all(step["optim/grad_norm"] > 0 for step in steps)
    assert all(step["loss/policy"] == pytest.approx(step["distill/divergence"], rel=1e-5) for step in steps)
    return found


@pytest.fixture(scope="module")
def whole(distil):
    """A run that distils the whole vocabulary, on one rank of the actor and two of the teacher."""
    return distil("distill_vocab", "roles.teacher.parallel.cp=2", "checkpoint.every=2", "checkpoint.asynchronous=false")


def test_a_policy_approaches_its_teacher_over_the_whole_vocabulary(whole):
    found = divergences(whole)
    assert found[0] > 0.5, "the untrained policy is far from the teacher"
    assert "no learning signal" not in whole.output()


def test_a_run_with_layouts_has_the_same_divergences(distil, whole):
    """Actor with tp 2, so a vocabulary of two shards, and two teachers' ranks in a pipeline."""
    run = distil("distill_vocab", "parallel.tp=2", "roles.teacher.parallel.tp=1", "roles.teacher.parallel.pp=2")
    assert run.metrics()[0]["distill/divergence"] == pytest.approx(whole.metrics()[0]["distill/divergence"], rel=1e-4)
    divergences(run)


def test_a_teacher_in_an_engine_gives_the_divergences_of_trainer_ranks(distil):
    top = "algorithm.loss.top_k=4"
    ranks, served = distil("distill_top_k", top), distil("distill_top_k", top, "roles.teacher.num_engines=1")
    first, second = (run.metrics() for run in (ranks, served))
    assert divergences(ranks) and divergences(served)
    for name in ("distill/divergence", "distill/teacher_mass", "distill/policy_mass"):
        assert first[0][name] == pytest.approx(second[0][name], rel=1e-3), name
    assert (
        0.5 < first[0]["distill/teacher_mass"] <= 1
        and first[0]["distill/policy_mass"] < first[-1]["distill/policy_mass"]
    )


def test_a_killed_run_equals_an_uninterrupted_one(distil, whole, tmp_path, user_module):
    user_module("killing_filter", KILLING_FILTER)
    kill = ["rollout.filter._target_=killing_filter.Killing", f"++rollout.filter.done={tmp_path / 'killed'}"]
    options = ["roles.teacher.parallel.cp=2", "checkpoint.every=2", "checkpoint.asynchronous=false"]
    run = distil("distill_vocab", *options, *kill)
    assert (tmp_path / "killed").exists() and "restart 1 of 5" in run.output()
    check_equal_runs(run.folder, whole.folder)
