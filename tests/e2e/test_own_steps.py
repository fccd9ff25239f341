"""Runs with a user's own training step: ledger, metrics, samples and resume work although the step does nothing for them."""

import json
from pathlib import Path

import numpy as np
import pytest
import step_page
from mrl_runs import KILLING_FILTER
from run_comparison import check_equal_runs
from safetensors import deserialize

from mrl.core.sample_file import read_samples

SUBCLASS = f'''{step_page.SOURCE}

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RewardedOnly(Trainer):
    """The function of the page as the step of a class."""

    min_reward: float

    def train_step(self) -> None:
        rewarded_only(self, self.min_reward)
'''
KEEP_ALL_SAMPLES = "tracking.samples_per_step=24"  # the fixture `quickstart` has 24 responses in each step


@pytest.fixture(scope="module")
def example_steps(inputs, tmp_path_factory) -> dict[str, list[str]]:
    """Name of a step -> its settings."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        "best_of_n": [
            "trainer._target_=mrl.controller.example_steps.best_of_n",
            "trainer.arguments.keep=2",
            "trainer.arguments.min_reward=0",
        ],
        "by_source": [
            *step_page.config_arguments(folder / "conf"),
            step_page.data_argument(inputs, folder),
            "algorithm.skip_zero_advantage=false",
        ],
    }


@pytest.mark.extended
@pytest.mark.parametrize("name", ["best_of_n", "by_source"])
def test_a_killed_run_with_an_own_step_equals_an_uninterrupted_one(
    start_mrl, quickstart, warm, example_steps, tmp_path, user_module, name
):
    user_module("killing_filter", KILLING_FILTER)
    settings = [
        *quickstart,
        *example_steps[name],
        "trainer.max_steps=5",
        "checkpoint.every=2",
        "checkpoint.asynchronous=false",
        KEEP_ALL_SAMPLES,
    ]
    kill = ["rollout.filter._target_=killing_filter.Killing", f"++rollout.filter.done={tmp_path / 'killed'}"]
    undisturbed = start_mrl("train", *settings).finish()
    assert undisturbed.process.returncode == 0, undisturbed.output()
    killed = start_mrl("train", *settings, *kill).finish()
    assert killed.process.returncode == 0, killed.output()
    assert (tmp_path / "killed").exists() and "restart 1 of 5" in killed.output()
    check_equal_runs(killed.folder, undisturbed.folder)
    assert [step for step, _ in read_samples(killed.folder)] == [1, 2, 3, 4, 5]
    check_updates(killed.folder, name)
    check_that_every_tensor_changed(killed.folder, warm)


@pytest.mark.extended
def test_a_class_with_the_step_of_the_page_trains_on_the_rewarded_responses(start_mrl, quickstart, warm, user_module):
    user_module("my_steps", SUBCLASS)
    step = ["trainer._target_=my_steps.RewardedOnly", "trainer.arguments.min_reward=0.5"]
    run = start_mrl("train", *quickstart, *step, "trainer.max_steps=3", KEEP_ALL_SAMPLES).finish()
    assert run.process.returncode == 0, run.output()
    check_updates(run.folder, "rewarded_only")
    check_that_every_tensor_changed(run.folder, warm)


def two_best(rewards: np.ndarray) -> np.ndarray:
    """Return [G]: whether a response is one of the two best of its group and has a reward above 0."""
    best = np.isin(np.arange(len(rewards)), np.argsort(-rewards, kind="stable")[:2])
    return best & (rewards > 0)


def above_the_others(rewards: np.ndarray) -> np.ndarray:
    """Return [G]: whether a response has a reward above 0.5 and an advantage, because the rewards of its group differ."""
    return (rewards > 0.5) & (np.ptp(rewards) > 0)


SELECTED = {"best_of_n": two_best, "by_source": np.isfinite, "rewarded_only": above_the_others}
"""Name of a step -> function of a group's rewards [G]. It returns [G]: on which responses of the group the step trains."""


def check_updates(folder: Path, name: str) -> None:
    """Check that the optimizer steps in the ledger train on exactly the tokens of the responses that the step selects."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    all_samples, all_trained = [samples for _, samples in read_samples(folder)], []
    for line, step, samples in zip(ledger, metrics, all_samples, strict=True):
        rewards = {sample.group: np.array(sample.group_rewards) for sample in samples}
        lengths = {group: np.array(of_group) for group, of_group in enumerate(line["lengths"])}
        expected = sum(lengths[group][SELECTED[name](rewards[group])].sum() for group in lengths)
        all_trained.append(sum(count for update in line["updates"] for count, _ in update.values()))
        assert all_trained[-1] == expected
        num_updates = len({sample.source for sample in samples}) if name == "by_source" else 1
        assert len(line["updates"]) == num_updates and step["batch/optimizer_steps"] == num_updates
    assert sum(all_trained) > 0
    assert name != "by_source" or max(len(line["updates"]) for line in ledger) == 2


def check_that_every_tensor_changed(run_dir: Path, initial: Path) -> None:
    """Check that every tensor of the final model differs from that in the model folder `initial`."""
    after, before = (
        dict(deserialize((folder / "model.safetensors").read_bytes())) for folder in (run_dir / "hf", initial)
    )
    assert after.keys() == before.keys() and [name for name in before if after[name] == before[name]] == []
