"""Trainer.fit after lost processes and preemption: which steps are repeated, and from which state."""

import json
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.objective import EntropyBonus
from mrl.algorithms.parts import Coefficients
from mrl.controller.loop_parts import Phases, StepMetrics
from mrl.controller.plan_step import num_prompts
from mrl.controller.trainer import Trainer, TrainingSchedule, used_prompts
from mrl.core.run_errors import PreemptedError, ProcessesLostError, UnhealthyRunError
from mrl.core.types import AdvantageResult, Rollouts, UpdateReport
from mrl.data.prompts import PromptStream
from mrl.workers.group import PendingCall
from mrl.workers.model_trainers import ActorUpdate, CriticTrainer, CriticUpdate


class World:
    """All parts of a fake run. `failures`: (point, step) -> error. Each failure occurs only once."""

    def __init__(self, failures: dict[tuple[str, int], Exception]) -> None:
        self.failures, self.weights, self.sampled, self.trained, self.updates = failures, 0, [], [], 0
        self.coefs: list[dict[str, float]] = []  # coefficients of each update
        self.saved: dict[int, dict] = {}
        self.recoveries: list[int | None] = []
        self.logged: list[int] = []
        self.begun_samples: list[int] = []  # index of the step for each call that writes samples
        self.preemption_requested = False

    def reach(self, point: str) -> None:
        if error := self.failures.pop((point, self.weights), None):
            raise error

    def generate(self, prompts, step):
        rows = prompts.take(3)
        self.reach("rollout")
        assert step == self.weights
        self.sampled.append((step, rows.tolist()))
        numbers = np.ones(3, int)
        return Rollouts(
            block=rows.tolist(),
            prompt_lengths=numbers,
            response_lengths=numbers,
            sampled_lengths=numbers,
            rows=rows,
            groups=np.arange(3),
            digests=rows.astype(np.uint64),
            truncated=np.zeros(3, bool),
            weight_versions=np.full(3, step),
            rewards=np.ones(3),
        )

    def estimate(self, columns, kl_coef, step, **selection):
        self.reach("advantage")
        return AdvantageResult(None, np.zeros(3, bool), np.zeros(3, bool), {})

    def evaluate(self, step):
        self.reach("evaluate")
        return {"eval/reward_sampled": 0.5, "eval/reward_greedy": 0.5}

    def begin_update(self, rollouts, estimates, step, coefs, **selection):
        self.reach("update")
        self.updates += 1
        self.coefs.append(coefs)
        self.trained = [*self.trained[:step], rollouts.block]
        self.weights = step + 1
        return PendingCall(lambda: ActorUpdate([], 0.1, [], np.zeros(0, bool)))

    def metrics(self, updates):
        return {"optim/lr": updates[-1].lr}

    def begin_writing_samples(self, step):
        self.begun_samples.append(step)
        return lambda: self.reach("samples")

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def push(self, version):
        self.reach("push")
        return {"weight_sync/version": float(version)}

    def between_steps(self, state, metrics):
        step = state["progress"]["step"]
        if step % 4 == 0:
            self.saved[step] = json.loads(json.dumps(state))  # as a file would store it

    def save_now(self, state):
        self.saved[state["progress"]["step"]] = json.loads(json.dumps(state))

    def finish(self, state):
        self.save_now(state)

    def recover(self, error, state_after_step):
        """Recover as ProcessRecovery does: from memory if the trainers are intact, else from the last checkpoint."""
        self.recoveries.append(state_after_step and state_after_step["progress"]["step"])
        if state_after_step is None:
            state_after_step = self.saved[max(self.saved)]
            self.weights = state_after_step["progress"]["step"]
        return state_after_step

    def log(self, step, metrics):
        if "reward/mean" in metrics:
            self.logged.append(step)
        if self.preemption_requested is step:
            self.preemption_requested = True

    def rewind(self, step, evaluated=True):
        self.logged = [logged for logged in self.logged if logged <= step]

    def record(self, step, rollouts, drawn):
        pass


def trainer(world: World, step_function=None, **schedule) -> Trainer:
    unused = SimpleNamespace(rewind=lambda step: None, record=lambda *_: None)
    return Trainer(
        prompts=PromptStream(10, 3, seed=0, shuffle=True),
        rollout=world,
        scorers=[],
        actor=world,
        critic=None,
        coefs=Coefficients({}),
        weight_sync=world,
        phase=Phases(),
        tracker=world,
        ledger=unused,
        saver=world,
        recover=world.recover,
        preemption_requested=lambda: world.preemption_requested is True,
        schedule=TrainingSchedule(**({"max_steps": 11, "eval_every": 3} | schedule)),
        step_function=step_function,
    )


@pytest.fixture
def undisturbed() -> World:
    world = World({})
    trainer(world).fit()
    return world


POINTS = [("rollout", True), ("advantage", True), ("evaluate", True), ("update", False), ("push", False)]
PLACES = [(step, *point) for step in (0, 5, 6, 9) for point in POINTS if point[0] != "evaluate" or step % 3 == 0]


@pytest.mark.parametrize("step, point, from_memory", PLACES)
def test_each_step_is_trained_once_whatever_is_lost(undisturbed, step, point, from_memory):
    world = World({(point, step): ProcessesLostError("a process died")})
    world.saved[0] = trainer(World({})).state_dict()
    made = trainer(world)
    result = made.fit()
    assert world.trained == undisturbed.trained and result.steps == 11
    assert world.logged == list(range(1, 12)), "the metrics have each step exactly once"
    memory = from_memory or (point == "push" and step == 0)  # the first push comes before any step
    assert world.recoveries == [step if memory else None]
    assert world.saved[11]["prompts"] == undisturbed.saved[11]["prompts"]


def test_a_rollout_worker_that_is_lost_after_the_push_costs_only_the_samples_of_the_step(undisturbed, caplog):
    lost = ProcessesLostError("the rollout worker died")
    world = World({("samples", 5): lost, ("rollout", 5): lost})
    trainer(world).fit()
    assert world.recoveries == [5], "the run continues after step 5, not from its last checkpoint, of step 4"
    assert world.trained == undisturbed.trained and world.logged == list(range(1, 12))
    assert [record.message for record in caplog.records if record.name == "mrl.controller.trainer"] == [
        "step 5 has no samples in samples.jsonl: the rollout worker died"
    ]


def test_a_step_that_is_repeated_writes_its_samples_again(undisturbed):
    world = World({("update", 5): ProcessesLostError("a trainer rank died")})
    trainer(world).fit()
    assert undisturbed.begun_samples == list(range(11))
    assert world.begun_samples == [*range(6), *range(4, 11)], "the run returns to the checkpoint of step 4"


class WorldWithOrder(World):
    """Records the order in which a step calls these operations."""

    def __init__(self) -> None:
        super().__init__({})
        self.calls: list[str] = []

    def estimate(self, *arguments, **selection):
        self.calls.append("estimate")
        return super().estimate(*arguments, **selection)

    def begin_writing_samples(self, step):
        self.calls.append("begin samples")
        return lambda: self.calls.append("wait for samples")

    def begin_update(self, *arguments, **selection):
        self.calls.append("update")
        return super().begin_update(*arguments, **selection)

    def push(self, version):
        self.calls.append("push")
        return super().push(version)


def trains_on_two_estimates(trainer: Trainer) -> None:
    rollouts = trainer.generate()
    for _ in range(2):
        trainer.update(rollouts, trainer.estimate({}))


def estimates_after_the_push(trainer: Trainer) -> None:
    trainer.update(trainer.generate(), None)
    trainer.push()
    trainer.estimate({})


def begins_samples_itself(trainer: Trainer) -> None:
    rollouts = trainer.generate()
    trainer.begin_writing_samples()
    trainer.update(rollouts, None)


@pytest.mark.parametrize(
    ("step", "calls"),
    [
        (None, ["estimate", "begin samples", "update", "push"]),
        (trains_on_two_estimates, [*["estimate", "update"] * 2, "begin samples", "push"]),
        (estimates_after_the_push, ["update", "begin samples", "push", "estimate", "begin samples"]),
        (begins_samples_itself, ["begin samples", "update", "push"]),
    ],
)
def test_samples_are_written_after_the_last_estimate_and_before_the_step_ends(step, calls):
    world = WorldWithOrder()
    trainer(world, step_function=step).step(0)
    assert world.calls == [*calls, "wait for samples"]


@dataclass(frozen=True, kw_only=True)
class RememberingTrainer(Trainer):
    """A subclass with state of its own: the rows of all finished steps."""

    seen: list[int] = field(default_factory=list)

    def train_step(self) -> None:
        super().train_step()
        self.seen.extend(self.record.rollouts.rows.tolist())

    def state_dict(self):
        return super().state_dict() | {"seen": list(self.seen)}

    def load_state_dict(self, state) -> None:
        super().load_state_dict(state)
        self.seen[:] = state["seen"]


@pytest.mark.parametrize("point", ["rollout", "push"])
def test_a_lost_process_does_not_change_the_state_of_a_subclass(point):
    undisturbed = RememberingTrainer(**vars(trainer(World({}))))
    undisturbed.fit()
    world = World({(point, 5): ProcessesLostError("a process died")})
    made = RememberingTrainer(**vars(trainer(world)))
    world.saved[0] = made.state_dict()
    made.fit()
    assert len(world.recoveries) == 1 and len(made.seen) == 33
    assert made.seen == undisturbed.seen == world.saved[11]["seen"]


def test_several_losses_in_a_row_are_recovered(undisturbed):
    failures = {
        ("update", 2): ProcessesLostError("1"),
        ("rollout", 2): ProcessesLostError("2"),
        ("push", 7): ProcessesLostError("3"),
        ("advantage", 6): ProcessesLostError("4"),
    }
    world = World(failures)
    world.saved[0] = trainer(World({})).state_dict()
    trainer(world).fit()
    assert world.trained == undisturbed.trained and not world.failures


def test_other_errors_end_the_run():
    with pytest.raises(ValueError, match="a mistake"):
        trainer(World({("update", 3): ValueError("a mistake")})).fit()


@pytest.mark.parametrize("point", ["rollout", "advantage"])
def test_an_abandoned_step_is_not_part_of_the_checkpoint(undisturbed, point):
    world = World({(point, 5): PreemptedError("preempted")})
    with pytest.raises(PreemptedError):
        trainer(world).fit()
    state = world.saved[5]
    again = World({})
    again.weights, again.trained = 5, world.trained
    resumed = trainer(again)
    resumed.load_state_dict(state)
    assert resumed.fit().steps == 11 and again.trained == undisturbed.trained


def test_a_preempted_run_ends_after_its_step_with_a_checkpoint():
    world = World({})
    world.preemption_requested = 5
    with pytest.raises(PreemptedError):
        trainer(world).fit()
    assert world.weights == 5 and world.saved[5]["progress"]["step"] == 5


def test_a_resumed_run_does_not_evaluate_the_same_weights_twice():
    world = World({})
    trainer(world, max_steps=6).fit()
    state = world.saved[6]
    assert state["progress"]["after"] == {"eval/reward_sampled": 0.5, "eval/reward_greedy": 0.5}
    again = World({("evaluate", 6): ValueError("was evaluated before")})
    again.weights = 6
    made = trainer(again, max_steps=6)
    made.load_state_dict(state)
    assert made.fit().after == state["progress"]["after"]


def test_only_long_steps_are_abandoned_and_only_before_the_update():
    made = trainer(World({}))
    made.progress.step_s = 10.0
    found = {}
    for phase in ("rollout", "score", "advantage", "evaluate", "update", "weight_sync", "checkpoint"):
        with made.phase(phase):
            found[phase] = (made.should_abandon_step(grace_s=5), made.should_abandon_step(grace_s=60))
    assert {name for name, (hurry, _) in found.items() if hurry} == {"rollout", "score", "advantage", "evaluate"}
    assert not any(patient for _, patient in found.values()) and not made.should_abandon_step(5)


def test_a_run_that_the_health_check_ends_writes_a_checkpoint_of_the_finished_step():
    def check(step, metrics):
        assert metrics["reward/mean"] == 1
        if step == 3:
            raise UnhealthyRunError("the rewards teach nothing")

    world = World({})
    with pytest.raises(UnhealthyRunError, match="teach nothing"):
        replace(trainer(world), check_learning=check).fit()
    assert world.saved[max(world.saved)]["progress"]["step"] == 3 and world.logged == [1, 2, 3]


def test_every_process_is_told_which_step_begins_also_after_a_failure():
    begun: list[int] = []
    world = World({("update", 2): ProcessesLostError("lost")})
    replace(trainer(world, max_steps=4, eval_every=0), begin_step=begun.append).fit()
    assert world.recoveries, "the failure occurred"
    assert begun == [1, 2, 3, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 4), (1.2, 4), (1.5, 5), (2.0, 7), (9.0, 11)])
def test_a_run_ends_when_its_steps_have_used_the_passes_over_the_data_or_after_max_steps(epochs, steps):
    """The data has ten rows, a step uses three, and max_steps is eleven. A failure in between changes nothing."""
    for failures in ({}, {("push", 2): ProcessesLostError("a process died")}):
        world = World(dict(failures))
        world.state_dict = lambda: {"waiting": []}
        result = trainer(world, max_prompts=num_prompts(epochs, 10)).fit()
        assert result.steps == world.weights == steps and len(world.trained) == steps


def test_prompts_that_wait_for_a_step_are_not_used_yet():
    state = {"prompts": {"drawn": [7, 5]}, "rollouts": {"waiting": [[10, 3, 1], [11, 4, 1]]}}
    assert used_prompts(state) == 10
    schedule = TrainingSchedule(max_steps=99, max_prompts=11.0)
    assert not schedule.is_complete(3, [], 10) and schedule.is_complete(3, [], 11)


@pytest.mark.parametrize("has_returns", [True, False])
def test_the_critic_learns_only_from_estimates_with_returns(has_returns):
    """A step may use a critic to estimate the advantages of some responses, and no critic for other responses."""
    world, trained = World({}), []
    estimates = AdvantageResult(None, np.zeros(3, bool), np.zeros(3, bool), {}, has_returns=has_returns)
    world.estimate = lambda *arguments, **selection: estimates

    def begin_update(rollouts, estimates, step, rows):
        trained.append(step)
        return PendingCall(lambda: CriticUpdate([], 0.1))

    critic = SimpleNamespace(begin_update=begin_update, metrics=lambda updates: {"critic/updates": len(updates)})
    result = replace(trainer(world), critic=critic).step(0)
    assert trained == ([0] if has_returns else [])
    assert result.values.get("critic/updates", 0) == has_returns


def test_the_updates_of_each_step_are_counted_from_0():
    world, indices = World({}), []
    begin_update = world.begin_update

    def counting(*arguments, **selection):
        indices.append(selection["update_index"])
        return begin_update(*arguments, **selection)

    def two_updates(trainer):
        rollouts = trainer.generate()
        for _ in range(2):
            trainer.update(rollouts, None)

    world.begin_update = counting
    replace(trainer(world, max_steps=2), step_function=two_updates).fit()
    assert indices == [0, 1, 0, 1]


def test_an_update_gets_the_coefficients_that_the_earlier_steps_have_adapted():
    world = World({})
    world.metrics = lambda updates: {"policy/entropy_mean": 0.1, "policy/kl_ref": 0.2}
    terms = dict(entropy=EntropyBonus(0.0, target=0.2, step=0.01), kl_loss=KLPenalty(1.0, target=0.1, horizon=3))
    replace(trainer(world, max_steps=3), coefs=Coefficients(terms)).fit()
    expected = [dict(entropy=0.01 * step, kl_loss=1.2**step) for step in range(3)]
    assert world.coefs == [pytest.approx(each) for each in expected]


def test_the_metrics_of_the_critic_count_all_updates_of_a_step():
    """Two updates of one optimizer step have the same metrics as one update of two optimizer steps."""

    def report(tokens: float, error: float) -> UpdateReport:
        sums = dict(tokens=tokens, values=tokens, returns=2 * tokens, returns_squared=6 * tokens, loss=error)
        sums |= dict(errors=error * tokens, errors_squared=error**2 * tokens)
        return UpdateReport(sums=sums, maxima={"critic/grad_norm": error, "seconds": 1.0})

    critic = CriticTrainer(None, None, None)
    one, two = report(2.0, 0.5), report(6.0, 1.0)
    apart = critic.metrics([CriticUpdate([one], 0.1), CriticUpdate([two], 0.2)])
    assert apart == critic.metrics([CriticUpdate([one, two], 0.2)])
    assert apart["critic/loss"] == 0.75 and apart["component_time/critic_s"] == 2.0 and apart["critic/lr"] == 0.2


@pytest.mark.parametrize(
    ("score_s", "update_s", "overlap_s"),
    [
        (5.0, 9.0, 0.0),  # one model works after another
        (3.0, 9.0, 2.0),  # models score at the same time
        (5.0, 6.5, 2.5),  # actor and critic train at the same time
        (3.0, 6.5, 4.5),
        (3.0, 12.0, 2.0),  # the update also waits: this takes nothing from the time that scoring saved
        (8.0, 12.0, 0.0),
    ],
)
def test_the_overlap_is_the_time_that_models_saved_by_working_at_the_same_time(score_s, update_s, overlap_s):
    """Models work for 5 s in the phase `score` and for 9 s in the phase `update`."""
    spent = {
        "component_time/score_s": 5.0,
        "component_time/megatron_s": 6.0,
        "component_time/critic_s": 3.0,
        "component_time/engine_s": 1.0,
    }
    rewards = {"reward/mean": 0.5, "rollout/tokens": 40.0, "rollout/samples": 8.0}
    step = StepMetrics.of(spent | rewards, {"time/score_s": score_s, "time/update_s": update_s})
    found = step.with_duration(30.0)
    assert found["component_time/overlap_s"] == overlap_s
    assert found["component_time/controller_s"] == 30 - (1 + score_s + min(9, update_s))
