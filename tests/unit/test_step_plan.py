"""A training step of the user's own: what it selects, what it needs, and which mistakes are refused before the run starts."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from test_fit import World, trainer

from mrl.algorithms.advantages import GAE, GRPO
from mrl.config import hydra_entry
from mrl.controller.own_steps import SourceAlgorithm, best_of_n, by_source, ranks_in_groups
from mrl.controller.step_plan import check_step_sources, plan_step
from mrl.controller.trainer import Trainer
from mrl.core.run_errors import ProcessesLostError

HERE = __name__


def planned(*overrides: str):
    base = ["experiment=quickstart", "run.dir=unused"]
    return plan_step(hydra_entry.compose_config(hydra_entry.check_overrides([*base, *overrides])))


def plain(trainer: Trainer, times: int = 1) -> None:
    """Train the rollouts several times."""
    rollouts = trainer.generate()
    for _ in range(times):
        trainer.update(rollouts, None)


@dataclass(frozen=True, kw_only=True)
class Subclass(Trainer):
    times: int

    def train_step(self) -> None:
        plain(self, self.times)


@dataclass(frozen=True)
class NoTrainer:
    times: int = 1


def test_without_a_target_the_step_is_that_of_the_trainer():
    plan = planned()
    assert plan.trainer is Trainer and plan.function is None and plan.needs == frozenset()


def test_a_function_gets_the_trainer_and_its_arguments():
    plan = planned(f"trainer._target_={HERE}.plain", "trainer.arguments.times=2")
    world = World({})
    made = trainer(world, max_steps=3)
    built = plan.build(**{name: value for name, value in vars(made).items() if name != "step_function"})
    assert built.fit().steps == 3 and plan.needs == {"old_logprobs"}
    assert world.updates == 6, "each step trains its rollouts twice"


def test_a_subclass_gets_its_fields():
    plan = planned(f"trainer._target_={HERE}.Subclass", "trainer.arguments.times=3")
    world = World({})
    made = trainer(world, max_steps=2)
    built = plan.build(**{name: value for name, value in vars(made).items() if name != "step_function"})
    assert isinstance(built, Subclass) and built.fit().steps == 2 and world.updates == 6


def test_the_columns_that_arguments_need_are_computed():
    parts = "{a: {_target_: mrl.controller.own_steps.SourceAlgorithm, advantage: {_target_: mrl.algorithms.advantages.GAE}, "
    parts += "loss: {_target_: mrl.algorithms.losses.ClipCov}}}"
    plan = planned("trainer._target_=mrl.controller.own_steps.by_source", f"trainer.arguments.algorithms={parts}")
    assert plan.needs == {"old_logprobs", "values"}
    assert SourceAlgorithm(GAE(), GRPO()).needs == {"values"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.arguments.times=2"], "there is no trainer._target_ that takes them"),
        ([f"trainer._target_={HERE}.missing"], "cannot be imported"),
        (
            [f"trainer._target_={HERE}.plain", "trainer.arguments.tims=2"],
            "has no argument 'tims'; did you mean 'times'",
        ),
        ([f"trainer._target_={HERE}.Subclass"], "trainer.arguments.times is missing"),
        (
            [f"trainer._target_={HERE}.Subclass", "trainer.arguments.times=1", "trainer.arguments.actor=1"],
            "mrl sets this field",
        ),
        (
            [f"trainer._target_={HERE}.NoTrainer"],
            "expected a function, or a subclass of mrl.controller.trainer.Trainer",
        ),
        (["trainer._target_=mrl.controller.own_steps.by_source"], "missing a required argument: 'algorithms'"),
        (["trainer._target_=mrl.algorithms.advantages"], "is a module; expected the dotted name"),
    ],
)
def test_a_mistake_is_refused_before_the_run_starts(overrides, message):
    with pytest.raises(ValueError, match=message):
        planned(*overrides)


def never_generates(trainer: Trainer) -> None:
    pass


def generates_twice(trainer: Trainer) -> None:
    trainer.generate()
    trainer.generate()


def updates_after_the_push(trainer: Trainer) -> None:
    rollouts = trainer.generate()
    trainer.push()
    trainer.update(rollouts, None)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (never_generates, "ended without generate"),
        (generates_twice, "called twice"),
        (updates_after_the_push, "update.. was called after push"),
    ],
)
def test_a_step_in_a_wrong_order_ends_the_run(step, message):
    with pytest.raises(ValueError, match=message):
        trainer(World({}), step_function=step).fit()


def updates_then_samples_scores(trainer: Trainer) -> None:
    rollouts = trainer.generate()
    trainer.update(rollouts, None)
    trainer.estimate(trainer.score(rollouts))


def test_a_process_lost_after_an_update_makes_the_run_return_to_the_checkpoint():
    """The phase that was interrupted changes no weights, but the update before it has changed them."""
    undisturbed, world = World({}), World({("advantage", 6): ProcessesLostError("a process died")})
    trainer(undisturbed, step_function=updates_then_samples_scores).fit()
    made = trainer(world, step_function=updates_then_samples_scores)
    assert made.fit().steps == 11
    assert world.recoveries == [None], "the state in memory does not match the weights"
    assert world.trained == undisturbed.trained


def test_the_best_responses_of_each_group_come_first():
    rewards = np.array([0.5, 1.0, 0.5, 0.0, 2.0, 2.0])
    groups = np.array([0, 0, 0, 3, 3, 3])
    assert ranks_in_groups(rewards, groups).tolist() == [1, 0, 2, 2, 0, 1]
    shuffled = np.random.default_rng(0).permutation(6)
    found = ranks_in_groups(rewards[shuffled], groups[shuffled])
    for group in (0, 3):
        own = groups[shuffled] == group
        assert sorted(found[own].tolist()) == [0, 1, 2]
        assert np.all(np.diff(rewards[shuffled][own][np.argsort(found[own])]) <= 0)


class Recorder:
    """Stand-in for a Trainer that records what a step asks for."""

    def __init__(self, rewards, groups, sources) -> None:
        self.rollouts = SimpleNamespace(rewards=np.array(rewards), groups=np.array(groups))
        self.sources, self.updates, self.pushes = np.array(sources), [], 0

    def generate(self):
        return self.rollouts

    def data_sources(self, rollouts):
        return self.sources

    def score(self, rollouts):
        return {"old_logprobs": []}

    def estimate(self, columns, *, rows, advantage, loss):
        return (rows.tolist(), advantage, loss)

    def update(self, rollouts, estimates, *, rows, loss):
        self.updates.append((estimates, rows.tolist(), loss))

    def push(self):
        self.pushes += 1


def test_best_of_n_trains_the_best_correct_responses():
    recorder = Recorder([1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [""] * 6)
    best_of_n(recorder, keep=1, min_reward=0)
    ((estimates, rows, _),) = recorder.updates
    assert estimates is None and rows == [True, False, False, False, False, False] and recorder.pushes == 1


def test_by_source_trains_each_source_with_its_own_algorithm():
    recorder = Recorder([0] * 4, [0, 0, 1, 1], ["a", "a", "b", "b"])
    by_source(
        recorder, {"a": SourceAlgorithm("A", "LA"), "b": SourceAlgorithm("B", "LB"), "c": SourceAlgorithm("C", "LC")}
    )
    first, second = [True, True, False, False], [False, False, True, True]
    assert recorder.updates == [((first, "A", "LA"), first, "LA"), ((second, "B", "LB"), second, "LB")]
    with pytest.raises(ValueError, match="no algorithm for the data source 'b'"):
        by_source(recorder, {"a": SourceAlgorithm("A", "LA")})


def test_by_source_without_an_algorithm_for_a_data_source_is_refused_before_the_run_starts():
    parts = "{a: {_target_: mrl.controller.own_steps.SourceAlgorithm, advantage: {_target_: mrl.algorithms.advantages.GRPO}, "
    parts += "loss: {_target_: mrl.algorithms.losses.PPOClip}}}"
    plan = planned("trainer._target_=mrl.controller.own_steps.by_source", f"trainer.arguments.algorithms={parts}")
    check_step_sources(plan, ["a", "a"])
    with pytest.raises(ValueError, match="no algorithm for the data source 'offline'"):
        check_step_sources(plan, ["a", "offline"])
    check_step_sources(planned(), ["b"])
