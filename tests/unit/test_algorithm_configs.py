"""Each file in conf/algorithm: its keys are known, and its parts build and make an update."""

import importlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from loss_cases import loss_inputs, make_case
from omegaconf import OmegaConf

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.distillation import DIVERGENCE_OUTPUTS, TEACHER_OUTPUTS
from mrl.algorithms.inputs import ScoredBatch
from mrl.algorithms.objective import AGGREGATIONS, Objective
from mrl.config.instantiate import instantiate
from mrl.config.validate import is_known
from mrl.core.metrics import check

FILES = {path.stem: path for path in sorted(Path("conf/algorithm").glob("*.yaml"))}


def load(name):
    """The sections of a file, whichever package it is in."""
    text = FILES[name].read_text()
    found = OmegaConf.to_container(OmegaConf.create(text))
    package = text.splitlines()[0]
    assert package in ("# @package algorithm", "# @package _global_"), package
    return {"algorithm": found} if package.endswith("algorithm") else found


def build(name, key):
    section, _, last = key.partition(".")
    node = load(name).get(section, {}).get(last)
    return instantiate(node, key) if node else None


def test_every_algorithm_has_a_file():
    assert set(FILES) == {
        *(
            "ppo",
            "grpo",
            "dr_grpo",
            "rloo",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "remax",
            "opo",
            "gspo",
            "gspo_token",
        ),
        *("cispo", "sapo", "gmpo", "dapo", "clip_cov", "kl_cov", "opmd", "policy_gradient", "gdpo", "distill"),
        *("distill_vocab", "distill_top_k"),
    }


@pytest.mark.parametrize("name", FILES)
def test_keys_are_known_and_the_file_starts_with_a_description(name):
    sections = load(name)
    for section, values in sections.items():
        assert all(is_known(f"{section}.{key}") for key in values), (name, section)
    assert {"advantage", "loss", "aggregation"} <= set(sections["algorithm"])
    assert sections["algorithm"]["aggregation"] in AGGREGATIONS
    assert FILES[name].read_text().splitlines()[1].startswith("# ")


@pytest.mark.parametrize("name", FILES)
def test_the_parts_make_an_update(name):
    """Scored responses -> columns -> the loss of each token, its gradient and its metrics."""
    objective = Objective(
        build(name, "algorithm.loss"), build(name, "algorithm.correction"), build(name, "algorithm.kl_in_loss")
    )
    kl, settings = build(name, "algorithm.kl_in_reward"), load(name)["algorithm"]
    whiten, masked = settings.get("whiten", False), settings.get("mask_truncated", False)
    advantage_pipeline = AdvantagePipeline(build(name, "algorithm.advantage"), objective, kl, whiten, masked)
    case, rng = make_case(0, lengths=(3, 1, 5, 2), spread=1e-5), np.random.default_rng(0)
    scored = ScoredBatch(
        rewards=np.array([1.0, 0.0, 1.0, 0.0]),
        groups=np.array([0, 0, 1, 1]),
        lengths=case.lengths,
        truncated=np.array([False, True, False, False]),
        parts={"right": np.array([1.0, 0.0, 1.0, 0.0]), "short": rng.random(4)},
        greedy_rewards=np.array([0.5, 0.5, 0.0, 0.0]),
    )
    given = {n: rng.normal(size=11).astype(np.float32) for n in ("values", "teacher_logprobs", "ref_logprobs")}
    given["old_logprobs"] = case.old.astype(np.float32)
    columns = {n: given[n] for n in advantage_pipeline.needs - {"greedy_rewards"} - TEACHER_OUTPUTS}  # enough
    found = advantage_pipeline(scored, columns, kl.coef if kl else 0.0, [0])
    assert found.rejected.any() == masked
    case.advantages[:], logprobs = found.columns["advantages"], torch.tensor(case.logprobs, requires_grad=True)
    case.columns.clear()
    case.columns.update(found.columns, **{n: given[n] for n in objective.needs - TEACHER_OUTPUTS})
    inputs = loss_inputs(case, logprobs)
    if objective.distillation:  # the output head computes the divergence from the logits, here from log-probabilities
        inputs = replace(inputs, columns={**inputs.columns, **dict.fromkeys(DIVERGENCE_OUTPUTS, logprobs.square())})
    loss, numbers = objective(inputs)
    loss.sum().backward()
    assert logprobs.grad.isfinite().all() and logprobs.grad.any()
    assert all(value.shape == (11,) for value in numbers.values())
    check([*numbers, *found.metrics])
    if not objective.zero_without_advantage:
        named = name == "kl_cov" or objective.distillation
        assert settings.get("skip_zero_advantage") is False or "kl_in_loss" in settings or named


def test_files_with_a_filter_a_critic_or_a_teacher_configure_it():
    assert build("dapo", "rollout.filter")(np.array([0.0, 1.0])) and not build("dapo", "rollout.filter")(np.ones(2))
    assert "values" in build("ppo", "algorithm.advantage").needs and load("ppo")["critic"]["optim"]["lr"] > 0
    assert "teacher_logprobs" in build("distill", "algorithm.advantage").needs
    assert all(
        load(name)["roles"]["teacher"]["path"] == "???" for name in ("distill", "distill_vocab", "distill_top_k")
    )
    assert build("distill_vocab", "algorithm.loss").needs == {"teacher_hidden"}
    assert build("distill_top_k", "algorithm.loss").needs == {"teacher_top_k"}
    users = {name for name in FILES if "greedy_rewards" in build(name, "algorithm.advantage").needs}
    assert users == {"remax"}


def test_nested_plug_ins_are_built():
    both = instantiate(
        {
            "_target_": "mrl.algorithms.corrections.Product",
            "corrections": [
                {"_target_": "mrl.algorithms.corrections.ImportanceSampling", "level": "geometric", "mode": "reject"},
                {"_target_": "mrl.algorithms.corrections.IcePop"},
            ],
        },
        "algorithm.correction",
    )
    weights, _ = both(loss_inputs(make_case(0)))
    assert weights.shape == (15,)
    gdpo = instantiate({"_target_": "mrl.algorithms.advantages.GDPO", "weights": {"right": 2.0}}, "algorithm.advantage")
    assert gdpo.weights == {"right": 2.0} and type(gdpo.weights) is dict
    mixed = instantiate(
        {
            "_target_": "mrl.algorithms.advantages.OnPolicyDistillation",
            "reward": {"_target_": "mrl.algorithms.advantages.GAE"},
        },
        "algorithm.advantage",
    )
    assert "values" in mixed.needs


DOCS = Path("docs/concepts/algorithms.md").read_text()


def test_the_page_lists_all_losses_advantages_and_configs():
    tables = [line for line in DOCS.splitlines() if line.startswith("| `")]
    modules = ("losses", "sequence_losses", "advantages", "distillation")
    named = {cell.split(".")[-1] for line in tables for cell in re.findall(r"`([\w.]+)`", line.split("|")[1])}
    named |= {cell for line in tables for cell in re.findall(r"`(\w+)\(", line)}
    for module in modules:
        found = importlib.import_module(f"mrl.algorithms.{module}")
        classes = {n for n, x in vars(found).items() if isinstance(x, type) and x.__module__ == found.__name__}
        missing = classes - named - {"Advantage", "GroupStatistics", "Loss", "PolicyLoss", "ValueLossFunction"}
        assert not missing, missing
    rows = [line.split("|") for line in tables if line.count("|") == 7]
    configs = {name for row in rows for name in re.findall(r"`(\w+)`", row[5])}
    assert configs | {"dr_grpo"} <= set(FILES)


def test_the_classes_of_the_documentation_run():
    """tests/unit/test_own_parts.py runs the functions."""
    _, example = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    names = {}
    exec(example, names)
    loss, case = names["LeastLikely"](), make_case(0)
    scored = ScoredBatch(np.arange(5.0), np.array([0, 0, 1, 1, 1]), case.lengths, np.zeros(5, bool))
    advantage_pipeline = AdvantagePipeline(names["Sign"](), loss)
    found = advantage_pipeline(scored, {"old_logprobs": case.old.astype(np.float32)}, 0.0, [0])
    assert found.columns["advantages"][[0, 3, 4]].tolist() == [-1, 1, -1]
    assert found.columns["least_likely"].sum() == 3  # a fifth of 15
    case.columns.update(found.columns)
    assert advantage_pipeline.needs == {"old_logprobs"} and (loss(loss_inputs(case))[0] != 0).sum() <= 3
