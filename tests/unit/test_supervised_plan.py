"""Plans of supervised training: every objective of conf/objective, and mistakes that are refused before a process starts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_families import make_family

from models.conversion.hf_reader import check_hf_folder
from models.families import family_of
from models.hf_config import HFConfig
from mrl.algorithms import losses, preference
from mrl.algorithms.objective import TokenWeighting, sequence_mean, token_mean
from mrl.config import hydra_entry
from mrl.controller.plan_models import plan_model
from mrl.controller.plan_supervised import SupervisedObjective, check_warm_start, warm_start_settings
from mrl.controller.plan_tools import plan_supervised
from mrl.core.types import SupervisedRows
from mrl.data.synthetic_tasks import make_doubling_task

PER_RESPONSE = TokenWeighting(sequence_mean)
OBJECTIVES = {
    "cross_entropy": (losses.CrossEntropy(), "responses", "vocabulary", False, TokenWeighting(token_mean)),
    "dpo": (preference.DPO(), "pairs", "vocabulary", True, PER_RESPONSE),
    "ipo": (preference.IPO(), "pairs", "vocabulary", True, PER_RESPONSE),
    "hinge": (preference.Hinge(), "pairs", "vocabulary", True, PER_RESPONSE),
    "simpo": (preference.SimPO(), "pairs", "vocabulary", False, PER_RESPONSE),
    "orpo": (preference.ORPO(), "pairs", "vocabulary", False, PER_RESPONSE),
    "kto": (preference.KTO(), "labels", "vocabulary", True, PER_RESPONSE),
    "reward_model": (preference.BradleyTerry(), "pairs", "score", False, PER_RESPONSE),
    "outcome_reward_model": (preference.OutcomeLabels(), "labels", "score", False, PER_RESPONSE),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan") / "made"
    make_doubling_task(folder)
    return folder


def config_of(inputs, tmp_path, *overrides):
    base = ["experiment=quickstart", f"data.inputs.folder={inputs}", f"run.dir={tmp_path / 'run'}", "sft.output=null"]
    return hydra_entry.compose_config(hydra_entry.check_overrides([*base, *overrides]))


def test_every_file_of_the_group_objective_is_tested():
    assert {path.stem for path in (hydra_entry.CONF / "objective").glob("*.yaml")} == OBJECTIVES.keys()


@pytest.mark.extended
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_declares_its_rows_its_head_and_its_reference(inputs, tmp_path, name):
    objective = SupervisedObjective.of(config_of(inputs, tmp_path, f"objective={name}"))
    form = objective.form
    found = (objective.loss, form.rows, objective.head, objective.needs_reference, objective.weighting)
    assert found == OBJECTIVES[name]
    assert form.mismatched == (name == "kto") and form.for_reward_model == (objective.head == "score")


@pytest.mark.extended
def test_arguments_of_an_objective_are_config_keys(inputs, tmp_path):
    config = config_of(inputs, tmp_path, "objective=simpo", "sft.objective.beta=2.5", "sft.objective.gamma=0.5")
    assert SupervisedObjective.of(config).loss == preference.SimPO(2.5, 0.5)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["objective=dpo", "sft.objective.beta=0"],
            "sft.objective: mrl.algorithms.preference.DPO rejects its arguments",
        ),
        (["objective=dpo", "sft.objective.gamma=1"], "sft.objective.gamma: .*DPO has no argument 'gamma'"),
        (
            ["sft.objective._target_=mrl.algorithms.losses.KLCov"],
            "sft.objective: KLCov needs old_logprobs, but supervised",
        ),
        (["sft.objective._target_=mrl.algorithms.losses.PPOClip"], "sft.objective: PPOClip is 0 without advantages"),
        (["sft.objective._target_=mrl.rewards.rule_based.ExactMatch"], "sft.objective: ExactMatch is not a loss"),
        (["objective=dpo"], "column 'chosen': is missing"),
        (["objective=kto", "sft.train=${data.inputs.folder}/pairs.parquet"], "column 'completion': is missing"),
    ],
)
def test_a_mistake_is_refused_before_a_process_starts(inputs, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        plan_supervised(config_of(inputs, tmp_path, *overrides))


@pytest.mark.extended
def test_the_plan_has_the_head_of_the_objective(inputs, tmp_path):
    pairs = f"sft.train={inputs / 'pairs.parquet'}"
    assert plan_supervised(config_of(inputs, tmp_path, "objective=dpo", pairs)).head == "vocabulary"
    assert plan_supervised(config_of(inputs, tmp_path, "objective=reward_model", pairs)).head == "score"


@pytest.mark.extended
def test_a_reward_model_is_no_warm_start(inputs, tmp_path):
    check_warm_start(config_of(inputs, tmp_path, "objective=dpo"))
    with pytest.raises(ValueError, match=r"BradleyTerry: it trains a reward model, which cannot be the warm start"):
        check_warm_start(config_of(inputs, tmp_path, "objective=reward_model"))


@pytest.mark.extended
def test_the_default_objective_is_not_among_the_settings_of_a_warm_start(inputs, tmp_path):
    """So mrl still uses the warm starts of its earlier versions, whose settings have no objective."""
    assert "objective" not in warm_start_settings(config_of(inputs, tmp_path))["sft"]
    settings = warm_start_settings(config_of(inputs, tmp_path, "objective=dpo"))["sft"]
    assert settings["objective"] == {"_target_": "mrl.algorithms.preference.DPO", "beta": 0.1}


def test_rows_of_the_file_and_sequences_of_the_block():
    import numpy as np

    lengths = np.arange(6)
    pairs = SupervisedRows(None, lengths, lengths, lengths, num_rows=3, sequences_per_row=2)
    assert pairs.sequences_of(np.array([2, 0])).tolist() == [4, 5, 0, 1] and not len(pairs.mismatched_of(np.arange(3)))
    batch = pairs.batch(np.array([4, 5]))
    assert batch.whole_groups and batch.groups is not None and batch.groups.tolist() == [0, 0, 1, 1, 2, 2]
    labeled = SupervisedRows(None, lengths, lengths, lengths, num_rows=3, sequences_per_row=1)
    assert labeled.sequences_of(np.array([2, 0])).tolist() == [2, 0]
    assert labeled.mismatched_of(np.array([2, 0])).tolist() == [5, 3]
    assert not labeled.batch(np.arange(3)).whole_groups and labeled.batch(np.arange(3)).groups is None


def reward_model_folder(tmp_path: Path, **fields: object) -> Path:
    """Write a reward model of transformers, and change fields of its config."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    source = make_family("qwen3", tmp_path / "source")
    config = AutoConfig.from_pretrained(source, num_labels=1)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).float().save_pretrained(tmp_path / "reward")
    path = tmp_path / "reward/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return tmp_path / "reward"


def test_a_sequence_classifier_of_transformers_is_read_as_a_reward_model(tmp_path):
    folder = reward_model_folder(tmp_path)
    config = check_hf_folder(folder)
    arch = family_of(config).read(config)
    assert arch.is_reward_model and config.family_architecture == "Qwen3ForCausalLM"
    shapes = family_of(config).hf_shapes(arch)
    assert shapes["score.weight"] == (1, arch.sizes["hidden"]) and "lm_head.weight" not in shapes


def test_a_sequence_classifier_with_several_outputs_is_refused(tmp_path):
    folder = reward_model_folder(tmp_path, id2label={"0": "a", "1": "b"})
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification has 2 outputs; expected a reward model"):
        check_hf_folder(folder)


def test_the_config_of_a_language_model_becomes_that_of_a_reward_model(tmp_path):
    config = HFConfig.load(make_family("qwen3", tmp_path / "source"))
    reward = config.as_reward_model()
    assert reward.fields["architectures"] == ["Qwen3ForSequenceClassification"]
    assert reward.fields["id2label"] == {"0": "score"} and reward.fields["label2id"] == {"score": 0}
    assert reward.as_reward_model().fields == reward.fields and "id2label" not in config.fields


def test_a_config_with_num_labels_becomes_that_of_a_reward_model(tmp_path):
    config = HFConfig.load(make_family("qwen3", tmp_path / "source"))
    reward = replace(config, fields=config.fields | {"num_labels": 2}).as_reward_model()
    reward.check_one_output()
    assert "num_labels" not in reward.fields


def test_a_reward_model_has_no_output_layer_for_an_actor(inputs, tmp_path):
    folder = reward_model_folder(tmp_path)
    config = config_of(inputs, tmp_path, f"model.path={folder}")
    with pytest.raises(ValueError, match=r"model.path=.*is a reward model, which has no output layer"):
        plan_model(config, str(folder))
    plan = plan_model(config, str(folder), head="score")
    assert plan.head == "score"
    of_vocabulary = plan.arch.sizes["hidden"] * (plan.arch.vocab_size - 1)
    assert plan.packing.cost.linear == plan.arch.multiply_adds()[0] - of_vocabulary, "the head has one output"
    assert plan_model(config, str(folder), "critic", config.critic.optim, head="value").head == "value"
