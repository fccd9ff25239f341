"""A training step of the user's own: what it selects, what it needs, and which mistakes are refused before the run starts."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import step_page
from loss_cases import loss_inputs, make_case
from test_fit import World, trainer

from mrl.algorithms.advantages import GAE, GRPO, RLOO
from mrl.algorithms.losses import CISPO, CrossEntropy, PPOClip
from mrl.algorithms.objective import Objective
from mrl.algorithms.parts import build_algorithm
from mrl.config import hydra_entry
from mrl.controller import example_steps
from mrl.controller.example_steps import SourceAlgorithm, best_of_n, by_source, ranks_in_groups
from mrl.controller.plan_step import check_step_sources, plan_step
from mrl.controller.trainer import Trainer
from mrl.core.run_errors import ProcessesLostError

HERE = __name__


def planned(*overrides: str):
    base = ["experiment=quickstart", "run.dir=unused"]
    return plan_step(hydra_entry.compose_config(hydra_entry.check_overrides([*base, *overrides])))


def plain(trainer: Trainer, times: int = 1) -> None:
    """A step that trains on its rollout several times."""
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
    assert plan.trainer is Trainer and plan.function is None and not plan.required_inputs


def test_a_function_gets_the_trainer_and_its_arguments():
    plan = planned(f"trainer._target_={HERE}.plain", "trainer.arguments.times=2")
    world = World({})
    made = trainer(world, max_steps=3)
    built = plan.build(**{name: value for name, value in vars(made).items() if name != "step_function"})
    assert built.fit().steps == 3 and plan.required_inputs["trainer._target_"] == {"old_logprobs"}
    assert world.updates == 6, "each step trains its rollouts twice"


def test_a_subclass_gets_its_fields():
    plan = planned(f"trainer._target_={HERE}.Subclass", "trainer.arguments.times=3")
    world = World({})
    made = trainer(world, max_steps=2)
    built = plan.build(**{name: value for name, value in vars(made).items() if name != "step_function"})
    assert isinstance(built, Subclass) and built.fit().steps == 2 and world.updates == 6


@pytest.mark.extended
def test_the_columns_that_arguments_need_are_computed():
    parts = "{a: {_target_: mrl.controller.example_steps.SourceAlgorithm, advantage: {_target_: mrl.algorithms.advantages.GAE}, "
    parts += "loss: {_target_: mrl.algorithms.losses.ClipCov}}}"
    plan = planned("trainer._target_=mrl.controller.example_steps.by_source", f"trainer.arguments.algorithms={parts}")
    required_inputs = {
        "trainer._target_": {"old_logprobs"},
        "trainer.arguments.algorithms.a": {"old_logprobs", "values"},
    }
    assert plan.required_inputs == required_inputs
    config = hydra_entry.compose_config(["experiment=quickstart", "run.dir=unused"])
    with pytest.raises(ValueError, match=r"^trainer\.arguments\.algorithms\.a needs values of a critic, but algo"):
        build_algorithm(config, plan.required_inputs)
    assert SourceAlgorithm(GAE(), GRPO()).required_inputs == {"values"}


@pytest.mark.extended_after(1)
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
        (["trainer._target_=mrl.controller.example_steps.by_source"], "missing a required argument: 'algorithms'"),
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
    """The interrupted operation changes no weights, but the earlier update of the step has changed them."""
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
    """Stands in for a Trainer. Records the operations that a step calls."""

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

    def update(self, rollouts, estimates, *, rows, loss=None):
        self.updates.append((estimates, rows.tolist(), loss))

    def push(self):
        self.pushes += 1


def test_best_of_n_trains_the_best_correct_responses():
    recorder = Recorder([1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1], [""] * 6)
    best_of_n(recorder, keep=1, min_reward=0)
    ((estimates, rows, loss),) = recorder.updates
    assert estimates is None and rows == [True, False, False, False, False, False] and recorder.pushes == 1
    assert loss == Objective(CrossEntropy()), "no correction, no KL penalty and no entropy bonus"
    case = make_case(0)
    values, metrics = loss(loss_inputs(case))
    np.testing.assert_array_equal(values, -case.logprobs)
    assert metrics == {}


def test_best_of_n_without_a_minimum_trains_as_many_responses_of_each_group():
    recorder = Recorder([1, 0, 1, 0, -1, 0], [0, 0, 0, 1, 1, 1], [""] * 6)
    best_of_n(recorder, keep=2)
    assert recorder.updates == [(None, [True, False, True, True, False, True], Objective(CrossEntropy()))]


def test_by_source_trains_each_source_with_its_own_algorithm():
    recorder = Recorder([0] * 4, [0, 0, 1, 1], ["a", "a", "b", "b"])
    by_source(
        recorder, {"a": SourceAlgorithm("A", "LA"), "b": SourceAlgorithm("B", "LB"), "c": SourceAlgorithm("C", "LC")}
    )
    first, second = [True, True, False, False], [False, False, True, True]
    assert recorder.updates == [((first, "A", "LA"), first, "LA"), ((second, "B", "LB"), second, "LB")]
    with pytest.raises(ValueError, match="no algorithm for the data source 'b'"):
        by_source(recorder, {"a": SourceAlgorithm("A", "LA")})


def test_the_config_of_the_page_gives_each_data_source_its_algorithm(tmp_path):
    words = ["experiment=quickstart", "run.dir=unused", *step_page.config_arguments(tmp_path)]
    plan = plan_step(hydra_entry.compose_config(hydra_entry.prepare_arguments(words)))
    algorithms = {"gsm8k": SourceAlgorithm(GRPO(), PPOClip(clip_high=0.28)), "math": SourceAlgorithm(RLOO(), CISPO())}
    assert plan.function.func is by_source and plan.function.keywords == {"algorithms": algorithms}


@pytest.mark.extended
def test_the_function_of_the_page_trains_on_the_rewarded_responses(tmp_path, monkeypatch):
    class WithAdvantages(Recorder):
        def estimate(self, columns):
            return SimpleNamespace(zero_advantage=np.array([False, False, True, False]))

    (tmp_path / "my_steps.py").write_text(step_page.SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    plan = planned("trainer._target_=my_steps.rewarded_only", "trainer.arguments.min_reward=0.5")
    recorder = WithAdvantages([1, 0, 1, 0.5], [0, 0, 1, 1], [""] * 4)
    plan.function(recorder)
    ((_, rows, loss),) = recorder.updates
    assert rows == [True, False, False, False] and loss is None and recorder.pushes == 1
    world = World({})
    assert trainer(world, step_function=plan.function, max_steps=2).fit().steps == 2 and world.updates == 2


def parts_of(step: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return a function of example_steps.py, and all functions and classes of the file that it uses, also indirectly."""
    nodes = ast.parse(Path(example_steps.__file__).read_text()).body
    defined = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found, todo = {}, [step]
    while todo:
        name = todo.pop()
        found[name] = defined[name]
        named = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        todo += sorted((named & defined.keys()) - found.keys())
    return found


@pytest.mark.parametrize(("step", "helper"), [("best_of_n", "ranks_in_groups"), ("by_source", "SourceAlgorithm")])
def test_a_step_with_its_helpers_has_at_most_60_lines(step, helper):
    parts, lines = parts_of(step), 0
    assert helper in parts
    for node in parts.values():
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines += node.end_lineno - first + 1
    assert 15 < lines <= 60


@pytest.mark.extended
def test_by_source_without_an_algorithm_for_a_data_source_is_refused_before_the_run_starts():
    parts = "{a: {_target_: mrl.controller.example_steps.SourceAlgorithm, advantage: {_target_: mrl.algorithms.advantages.GRPO}, "
    parts += "loss: {_target_: mrl.algorithms.losses.PPOClip}}}"
    plan = planned("trainer._target_=mrl.controller.example_steps.by_source", f"trainer.arguments.algorithms={parts}")
    check_step_sources(plan, ["a", "a"])
    with pytest.raises(ValueError, match="no algorithm for the data source 'offline'"):
        check_step_sources(plan, ["a", "offline"])
    check_step_sources(planned(), ["b"])
