"""Whole runs that distil toy teachers: divergences fall, engines can serve teachers, and a killed run continues exactly."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from mrl_runs import KILLING_FILTER
from recorded_steps import log_distributions
from run_comparison import check_equal_runs

from mrl.rollout.rollout_log import read_recording

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
    """Return the divergence of each step. Checks that it falls to less than two thirds, and that every step has a gradient."""
    steps = run.metrics()
    found = [step["distill/divergence"] for step in steps]
    assert len(found) == STEPS and np.isfinite(found).all()
    assert found[-1] < found[0] / 1.5, found
    assert all(step["optim/grad_norm"] > 0 for step in steps)
    assert all(step["loss/policy"] == pytest.approx(step["distill/divergence"], rel=1e-5) for step in steps)
    return found


@pytest.fixture(scope="module")
def whole(distil):
    """A run that compares distributions over the whole vocabulary, with one rank of the actor and two of the teacher."""
    return distil("distill_vocab", "roles.teacher.parallel.cp=2", "checkpoint.every=2", "checkpoint.asynchronous=false")


def test_a_policy_approaches_its_teacher_over_the_whole_vocabulary(whole):
    found = divergences(whole)
    assert found[0] > 0.5, "the untrained policy is far from the teacher"
    assert "no learning signal" not in whole.output()


def test_a_run_with_layouts_has_the_same_divergences(distil, whole):
    """The actor has tp 2, so its vocabulary has two shards. The teacher has two pipeline stages."""
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


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return [R]: KL(first || second) of log-probabilities [R, V]."""
    return (first.exp() * (first - second)).sum(-1)


def generalized_js(teacher: torch.Tensor, policy: torch.Tensor, beta: float) -> torch.Tensor:
    """Return [R]: the generalized Jensen-Shannon divergence of log-probabilities [R, V]."""
    mixture = (beta * teacher.exp() + (1 - beta) * policy.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(policy, mixture)


def with_rest(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return [R, k + 1]: the log-probabilities of the tokens `ids` [R, k], and that of all other tokens together."""
    kept = log_probs.gather(1, ids)
    return torch.cat([kept, (1 - kept.exp().sum(-1, keepdim=True)).log()], dim=1)


@pytest.mark.parametrize("top_k", [None, 4])
def test_a_policy_learns_from_the_forward_kl(distil, inputs, warm, top_k):
    algorithm = ["distill_top_k", f"algorithm.loss.top_k={top_k}"] if top_k else ["distill_vocab"]
    run = distil(*algorithm, "algorithm.loss.divergence=forward_kl", "rollout.record=true")
    block, _ = read_recording(run.folder / "rollouts", 0)
    teacher, policy = (log_distributions(folder, block) for folder in (warm, inputs / "model"))
    if top_k:
        ids = teacher.topk(top_k).indices
        teacher, policy = with_rest(teacher, ids), with_rest(policy, ids)
    expected, reverse = kl(teacher, policy).mean().item(), kl(policy, teacher).mean().item()
    assert abs(expected / reverse - 1) > 0.02, "otherwise the value would not show which divergence it is"
    assert divergences(run)[0] == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def softer(warm, tmp_path_factory) -> Path:
    """A second teacher: the model of `warm` with halved logits."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("softer") / "model"
    shutil.copytree(warm, folder, ignore=shutil.ignore_patterns("mrl_hashes.json"))  # the weights are replaced below
    model = AutoModelForCausalLM.from_pretrained(warm, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight *= 0.5
    model.save_pretrained(folder)
    return folder


def test_each_of_two_teachers_teaches_its_data_source(distil, inputs, warm, softer, tmp_path):
    rows = pq.read_table(inputs / "train.parquet").to_pylist()
    for index, row in enumerate(rows):
        row["data_source"] = "odd" if index % 2 else "even"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    teachers = [f"roles.softer.path={softer}", "roles.softer.teacher_for=[odd]"]
    divergence = ["algorithm.loss.divergence=js", "algorithm.loss.beta=0.3"]
    files = [f"data.train=[{tmp_path / 'train.parquet'}]", "rollout.record=true"]
    run = distil("distill_vocab", *teachers, *divergence, *files)

    block, columns = read_recording(run.folder / "rollouts", 0)
    of_even, of_odd, policy = (log_distributions(folder, block) for folder in (warm, softer, inputs / "model"))
    odd = torch.from_numpy(np.repeat(columns["rows"] % 2 == 1, block.sampled_lengths))[:, None]
    assert odd.any() and not odd.all()
    expected, of_one = (
        generalized_js(teacher, policy, 0.3).mean().item() for teacher in (of_odd.where(odd, of_even), of_even)
    )
    assert abs(expected / of_one - 1) > 0.05, "otherwise the value would not show that there are two teachers"
    # The two divergences differ, so the mean of a step depends on its rows: it need not fall in ten steps.
    assert run.metrics()[0]["distill/divergence"] == pytest.approx(expected, rel=1e-4)


def test_a_killed_run_equals_an_uninterrupted_one(distil, whole, tmp_path, user_module):
    user_module("killing_filter", KILLING_FILTER)
    kill = ["rollout.filter._target_=killing_filter.Killing", f"++rollout.filter.done={tmp_path / 'killed'}"]
    options = ["roles.teacher.parallel.cp=2", "checkpoint.every=2", "checkpoint.asynchronous=false"]
    run = distil("distill_vocab", *options, *kill)
    assert (tmp_path / "killed").exists() and "restart 1 of 5" in run.output()
    check_equal_runs(run.folder, whole.folder)
