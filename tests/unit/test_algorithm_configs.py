"""Every file in conf/algorithm has only known keys, and parts that build and compute an update."""

import importlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from loss_cases import loss_inputs, make_case
from omegaconf import OmegaConf

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.corrections import compares_old_policy
from mrl.algorithms.distillation import DIVERGENCE_OUTPUTS, TEACHER_OUTPUTS
from mrl.algorithms.inputs import ScoredBatch
from mrl.algorithms.kl import KL_ESTIMATORS
from mrl.algorithms.losses import PolicyGradient, PPOClip
from mrl.algorithms.objective import AGGREGATIONS, Objective
from mrl.algorithms.parts import build_algorithm
from mrl.config.hydra_entry import check_overrides, compose_config
from mrl.config.instantiate import instantiate
from mrl.config.validate import is_known
from mrl.core.metrics import check
from parallel.trainer_config import DivergenceKind

FILES = {path.stem: path for path in sorted(Path("conf/algorithm").glob("*.yaml"))}
CORRECTIONS = sorted(path.stem for path in Path("conf/correction").glob("*.yaml"))


def load(name):
    """Return the sections of a file in conf/algorithm. Its package is `algorithm` or `_global_`."""
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
        *("lite_ppo", "gpg", "dppo_tv", "dppo_kl", "dro", "vespo", "top_entropy", "otb", "pf_ppo", "luspo"),
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


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("name", FILES)
def test_the_parts_make_an_update(name):
    """From scored responses, the parts compute columns; from the columns, the loss of each token, its gradient and metrics."""
    objective = Objective(
        build(name, "algorithm.loss"), build(name, "algorithm.correction"), build(name, "algorithm.kl_in_loss")
    )
    kl, settings = build(name, "algorithm.kl_in_reward"), load(name)["algorithm"]
    whiten, masked = settings.get("whiten", False), settings.get("mask_truncated", False)
    drawn = build(name, "algorithm.resampling")
    advantage_pipeline = AdvantagePipeline(build(name, "algorithm.advantage"), objective, kl, whiten, masked, drawn)
    case, rng = make_case(0, lengths=(3, 1, 5, 2), spread=1e-5), np.random.default_rng(0)
    scored = ScoredBatch(
        rewards=np.array([1.0, 0.0, 1.0, 0.0]),
        groups=np.array([0, 0, 1, 1]),
        lengths=case.lengths,
        truncated=np.array([False, True, False, False]),
        reward_parts={"right": np.array([1.0, 0.0, 1.0, 0.0]), "short": rng.random(4)},
        greedy_rewards=np.array([0.5, 0.5, 0.0, 0.0]),
    )
    given = {n: rng.normal(size=11).astype(np.float32) for n in ("values", "teacher_logprobs", "ref_logprobs")}
    given["old_logprobs"] = case.old.astype(np.float32)
    given |= {"entropies": rng.random(11).astype(np.float32), "sum_pi_squared": rng.random(11).astype(np.float32)}
    columns = {n: given[n] for n in advantage_pipeline.required_inputs - {"greedy_rewards"} - TEACHER_OUTPUTS}
    found = advantage_pipeline(scored, columns, kl.coef if kl else 0.0, [0])
    assert found.excluded.any() == (masked or drawn is not None)
    assert drawn is None or found.counts.sum() == 4
    case.advantages[:], logprobs = found.columns["advantages"], torch.tensor(case.logprobs, requires_grad=True)
    case.columns.clear()
    case.columns.update(found.columns, **{n: given[n] for n in objective.required_inputs - TEACHER_OUTPUTS})
    inputs = loss_inputs(case, logprobs)
    if objective.distillation:  # stands in for the divergence that the output head computes
        inputs = replace(inputs, columns={**inputs.columns, **dict.fromkeys(DIVERGENCE_OUTPUTS, logprobs.square())})
    loss, numbers = objective(inputs)
    loss.sum().backward()
    assert logprobs.grad.isfinite().all() and logprobs.grad.any()
    assert all(value.shape == (11,) for value in numbers.values())
    check([*numbers, *found.metrics])
    if not objective.zero_at_zero_advantage:
        named = name == "kl_cov" or objective.distillation
        assert settings.get("skip_zero_advantage") is False or "kl_in_loss" in settings or named


def test_files_with_a_filter_a_critic_or_a_teacher_configure_it():
    assert build("dapo", "rollout.filter")(np.array([0.0, 1.0])) and not build("dapo", "rollout.filter")(np.ones(2))
    assert "values" in build("ppo", "algorithm.advantage").required_inputs and load("ppo")["critic"]["optim"]["lr"] > 0
    assert "teacher_logprobs" in build("distill", "algorithm.advantage").required_inputs
    assert all(
        load(name)["roles"]["teacher"]["path"] == "???" for name in ("distill", "distill_vocab", "distill_top_k")
    )
    assert build("distill_vocab", "algorithm.loss").required_inputs == {"teacher_hidden"}
    assert build("distill_top_k", "algorithm.loss").required_inputs == {"teacher_top_k"}
    users = {name for name in FILES if "greedy_rewards" in build(name, "algorithm.advantage").required_inputs}
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
    assert "values" in mixed.required_inputs


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("algorithm", ["grpo", "policy_gradient"])
def test_every_correction_is_a_part_of_an_algorithm(name, algorithm):
    """The parts build. A correction compares the engine with the current policy in a `bypass` preset, else with the old one."""
    words = ["experiment=quickstart", f"algorithm={algorithm}", f"correction={name}", "run.dir=unused"]
    parts = build_algorithm(compose_config(check_overrides(words)))
    bypass, plain = name.startswith("bypass"), name.startswith("bypass_pg") or algorithm == "policy_gradient"
    assert parts.objective.rollout_logprobs_as_old == bypass
    assert isinstance(parts.objective.policy, PolicyGradient if plain else PPOClip)
    assert (parts.objective.correction is None) == (name in ("none", "bypass_ppo_clip"))
    if parts.objective.correction is not None:
        assert compares_old_policy(parts.objective.correction) != bypass
        loss, _ = parts.objective(loss_inputs(make_case(0, spread=1e-4)))
        assert loss.isfinite().all() and loss.any()


def test_the_page_lists_every_correction_by_its_name():
    named = set(re.findall(r"`((?:decoupled|bypass)_\w+)`", DOCS))
    assert named == set(CORRECTIONS) - {"none"}


DOCS = "\n".join(Path(f"docs/concepts/{page}.md").read_text() for page in ("algorithms", "corrections"))
MODULES = ("losses", "sequence_losses", "advantages", "distillation", "preference", "corrections", "filters")
INTERFACES = {
    *("Advantage", "Correction", "Filter", "Loss", "Resampling", "ValueLossFunction"),
    *("GroupStatistics", "PairLoss", "PolicyLoss", "ScoreLoss"),
}
FORMULA = re.compile(r"[−+·/=²<>≤≥^]|Σ|\w\(|\b[01]\b|^as |^(?:d|rho)$")
SOURCE = re.compile(r"arXiv \d{4}\.\d{5}\b|\]\(https?://[^\s)]+\)|^no paper: \w+")


@dataclass(frozen=True)
class PartRow:
    """A row of a table on the pages about the parts of algorithms."""

    line: str
    names: frozenset[str]  # names of classes, and values of config keys
    formula: str
    paper: str


def part_rows() -> list[PartRow]:
    """Return the rows of the tables that have a column `paper`. Names are in the first column, formulas in the second column.

    In a row about a correction, another column contains the name of the class with its arguments.
    """
    rows, header = [], []
    for line in DOCS.splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = [cell.lower() for cell in cells]
        elif "paper" in header and not set(line) <= {"|", "-"}:
            assert len(cells) == len(header), line
            names = {*re.findall(r"`(?:\w+\.)?([\w+]+)`", cells[0]), *re.findall(r"`(\w+)\(", line)}
            rows.append(PartRow(line, frozenset(names), cells[1], cells[header.index("paper")]))
    return rows


def names_of_parts() -> set[str]:
    """Return the names of all losses, advantages, corrections, filters, KL estimates, aggregations and divergences."""
    names = {*KL_ESTIMATORS, *AGGREGATIONS, *(kind.value for kind in DivergenceKind)}
    for module in MODULES:
        found = importlib.import_module(f"mrl.algorithms.{module}")
        names |= {n for n, x in vars(found).items() if isinstance(x, type) and x.__module__ == found.__name__}
    return names - INTERFACES


def test_the_page_has_a_row_with_formula_and_source_for_every_part():
    rows = part_rows()
    assert len(rows) > 60 and names_of_parts() - {name for row in rows for name in row.names} == set()
    assert [row.line for row in rows if not FORMULA.search(row.formula)] == []
    assert [row.line for row in rows if not SOURCE.search(row.paper)] == []


def test_words_are_no_formula_and_authors_alone_are_no_source():
    assert not FORMULA.search("mean over all tokens") and not FORMULA.search("")
    assert not SOURCE.search("Rafailov et al. 2023, eq. 7") and not SOURCE.search("")


def test_the_page_lists_every_config():
    listed = set(re.findall(r"`(\w+)`", "\n".join(line for line in DOCS.splitlines() if line.startswith("|"))))
    assert set(FILES) <= listed, set(FILES) - listed


def test_the_classes_of_the_documentation_run():
    """The functions on the same page are run by tests/unit/test_own_parts.py."""
    _, example = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    names = {}
    exec(example, names)
    loss, case = names["LeastLikely"](), make_case(0)
    scored = ScoredBatch(np.arange(5.0), np.array([0, 0, 1, 1, 1]), case.lengths, np.zeros(5, bool))
    advantage_pipeline = AdvantagePipeline(names["Sign"](), loss)
    found = advantage_pipeline(scored, {"old_logprobs": case.old.astype(np.float32)}, 0.0, [0])
    assert found.columns["advantages"][[0, 3, 4]].tolist() == [-1, 1, -1]
    assert found.columns["least_likely"].sum() == 3  # a fifth of the 15 tokens
    case.columns.update(found.columns)
    assert advantage_pipeline.required_inputs == {"old_logprobs"} and (loss(loss_inputs(case))[0] != 0).sum() <= 3
