"""Token budgets of passes with and without gradients: the budgets of each model, and their effect on plans."""

from dataclasses import replace

import numpy as np
import pytest
from planned_runs import config_of, memory_of

from mrl.checkpoint.resume import ResumePoint
from mrl.commands.plan_search import step_workload
from mrl.config import hydra_entry
from mrl.config.validate import TokenBudgets, token_budgets
from mrl.controller.memory_check import MemoryEstimator, single_changes
from mrl.core.types import TokenBlock, TrainBatch
from mrl.planner.layout_search import memory_check
from mrl.planner.layout_space import GpuCluster, ReplicaLayout
from mrl.planner.run_memory import trainer_settings
from mrl.planner.trainer_memory import trainer_memory
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.group import WorkerGroup
from mrl.workers.worker import TrainWorker
from parallel.dims import ParallelDims

ROLES = ("actor", "critic", "reference", "teacher")
GIVEN = ["roles.reference.parallel.tp=1", "roles.teacher.path=t"]  # both models have the budgets of the actor


def config(*overrides: str):
    base = [
        "experiment=quickstart",
        "run.dir=unused",
        "algorithm=ppo",
        "trainer.max_tokens_per_micro_batch=1000",
        *GIVEN,
    ]
    return hydra_entry.compose_config(hydra_entry.check_overrides([*base, *overrides]))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], [(1000, 1000)] * 4),
        (["trainer.max_tokens_per_forward_micro_batch=4000"], [(1000, 4000)] * 3 + [(1000, 4000)]),
        (["critic.max_tokens_per_micro_batch=500"], [(1000, 1000), (500, 1000), (1000, 1000), (1000, 1000)]),
        (
            ["critic.max_tokens_per_forward_micro_batch=300", "trainer.max_tokens_per_forward_micro_batch=4000"],
            [(1000, 4000), (1000, 300), (1000, 4000), (1000, 4000)],
        ),
        (
            ["roles.reference.max_tokens_per_micro_batch=200", "trainer.max_tokens_per_forward_micro_batch=4000"],
            [(1000, 4000), (1000, 4000), (200, 200), (1000, 4000)],
        ),
    ],
)
def test_a_budget_that_is_not_set_is_the_actors_for_the_same_kind_of_pass(overrides, expected):
    found = [token_budgets(config(*overrides), role) for role in ROLES]
    assert found == [TokenBudgets(*budgets) for budgets in expected]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_tokens_per_forward_micro_batch=0", "must be 1 or more, or null"),
        ("critic.max_tokens_per_micro_batch=-1", "must be 1 or more, or null"),
        ("roles.teacher.max_tokens_per_micro_batch=0", "roles.teacher.max_tokens_per_micro_batch=0: must be 1 or more"),
        ("roles.teacher={path: x, num_engines: 1, max_tokens_per_micro_batch: 5}", "SGLang serves this model"),
        ("roles.teacher.max_token_per_micro_batch=5", "did you mean 'max_tokens_per_micro_batch'"),
    ],
)
def test_a_wrong_budget_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        config(override)


def batch() -> TrainBatch:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 30, rng.integers(5, 40)).tolist() for _ in range(24)]
    return TrainBatch.of(TokenBlock.from_lists([[1, 2, 3]] * 24, rows), np.repeat(np.arange(6), 4))


class RecordingGroup(WorkerGroup):
    """A worker group without ranks, which records the micro-batches that the ranks would get."""

    def __init__(self, monkeypatch) -> None:
        self.dims = ParallelDims(dp=2)
        monkeypatch.setattr("mrl.workers.group.ray.put", lambda value: value)
        self.sent: list = []

    def _send(self, method, args, options, workers=None, timeout_s=None):
        self.sent.append((method.__name__, args[1]))
        raise InterruptedError


def largest_pack(replica_batches, of: TrainBatch) -> int:
    lengths = of.prompt_lengths + of.response_lengths
    return max(int(lengths[rows].sum()) for batch in replica_batches for rows in batch.micro_batches)


def test_only_passes_without_gradients_have_the_larger_budget(monkeypatch):
    group, packing = RecordingGroup(monkeypatch), Packing(60, share_prompts=False, forward_max_tokens=400)
    calls = [
        lambda: group.begin_columns(TrainWorker.compute_columns, batch(), packing, temperature=1.0, names=["logprobs"]),
        lambda: group.begin_columns(TrainWorker.compute_values, batch(), packing),
        lambda: group.evaluate(batch(), packing),
        lambda: group.begin_update([batch()], packing, lrs=[1.0]),
    ]
    for call in calls:
        with pytest.raises(InterruptedError):
            call()
    *forward, (name, update) = group.sent
    assert name == "update" and largest_pack([batches[0] for batches in update], batch()) <= 60
    for name, replica_batches in forward:
        assert 60 < largest_pack(replica_batches, batch()) <= 400, name
    same = partition_step(batch(), group.dims, Packing(60, share_prompts=False)).replica_batches
    for ours, theirs in zip(update, same, strict=True):
        pairs = zip(ours[0].micro_batches, theirs.micro_batches, strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs), "the update does not depend on the other budget"


@pytest.mark.extended
def test_a_budget_may_change_without_new_samples():
    before, after = (
        config(),
        config(
            "critic.max_tokens_per_micro_batch=5",
            "critic.max_tokens_per_forward_micro_batch=5",
            "trainer.max_tokens_per_forward_micro_batch=5",
            "roles.teacher.max_tokens_per_micro_batch=5",
            "critic.ddp.pad_buckets_for_high_nccl_busbw=true",
        ),
    )
    assert ResumePoint().rollout_log_key(before, "data") == ResumePoint().rollout_log_key(after, "data")
    other = config("critic.epochs=3")
    assert ResumePoint().rollout_log_key(before, "data") != ResumePoint().rollout_log_key(other, "data")


PLANNED = ["cluster=h100", "algorithm=ppo", "parallel.tp=4", "parallel.dp=2", "rollout.max_response_tokens=1024",
           "plan.prompt_tokens=512", "trainer.max_tokens_per_micro_batch=8192"]  # fmt: skip


def totals(tmp_path, *overrides: str) -> dict[tuple[str, str], int]:
    memory = memory_of(config_of("Qwen3-8B", tmp_path, *PLANNED, *overrides))
    return {(phase.role, phase.phase): phase.total for phase in memory.phases}


@pytest.mark.extended
def test_the_planned_memory_follows_the_budget_of_each_pass(tmp_path):
    equal = totals(tmp_path)
    forward = totals(tmp_path, "trainer.max_tokens_per_forward_micro_batch=32768")
    critic = totals(tmp_path, "critic.max_tokens_per_micro_batch=2048")
    values = totals(tmp_path, "critic.max_tokens_per_forward_micro_batch=65536")
    assert {key for key in equal if forward[key] > equal[key]} == {("actor", "score"), ("critic", "score")}
    assert {key for key in equal if critic[key] < equal[key]} == {("critic", "update")}
    assert {key for key in equal if values[key] > equal[key]} == {("critic", "score")}
    bf16 = totals(tmp_path, "critic.ddp.grad_reduce_in_fp32=false")
    assert {key for key in equal if bf16[key] < equal[key]} == {key for key in equal if key[0] == "critic"}
    explicit = totals(
        tmp_path, "critic.max_tokens_per_micro_batch=8192", "trainer.max_tokens_per_forward_micro_batch=8192"
    )
    assert explicit == equal


@pytest.mark.extended
def test_advice_halves_every_budget_that_is_set(tmp_path):
    given = config_of(
        "Qwen3-8B", tmp_path, *PLANNED, "critic.max_tokens_per_micro_batch=4096",
        "trainer.max_tokens_per_forward_micro_batch=32768", "roles.reference.max_tokens_per_micro_batch=2000",
    )  # fmt: skip
    changes = {override: changed for overrides, changed in single_changes(given) for override in overrides}
    expected = {
        "trainer.max_tokens_per_micro_batch=4096": ("actor", 4096, 32768),
        "trainer.max_tokens_per_forward_micro_batch=16384": ("actor", 8192, 16384),
        "critic.max_tokens_per_micro_batch=2048": ("critic", 2048, 32768),
        "roles.reference.max_tokens_per_micro_batch=1000": ("reference", 1000, 1000),
    }
    for override, (role, train, forward) in expected.items():
        assert token_budgets(changes[override], role) == TokenBudgets(train, forward)
    assert "critic.max_tokens_per_forward_micro_batch" not in " ".join(changes)


@pytest.mark.extended
def test_the_search_knows_the_budgets(tmp_path):
    """The budget of a pass sets its number of packs and its memory. The packs of all other passes do not change."""
    given = config_of("Qwen3-8B", tmp_path, *PLANNED, "cluster.nodes=2")
    larger = replace(given.trainer, max_tokens_per_forward_micro_batch=16384)
    work = step_workload(replace(given, trainer=larger))
    assert (work.max_tokens, work.without_gradients.max_tokens) == (8192, 16384)
    assert work.without_gradients.packs < work.packs == work.of_critic.packs
    critic = step_workload(replace(given, critic=replace(given.critic, max_tokens_per_micro_batch=2048)))
    assert critic.of_critic.packs > critic.packs and critic.of_critic.without_gradients.packs == critic.packs
    shape = MemoryEstimator.of(given).shapes["actor"]
    actor = trainer_settings(given, 40960)
    huge = replace(given, critic=replace(given.critic, max_tokens_per_micro_batch=1 << 20))
    both = (actor, trainer_settings(huge, 40960, "critic", head="value"))
    cluster, layout = GpuCluster.of(given.cluster, given.plan), ReplicaLayout(tp=4, etp=4)
    peaks = [max(trainer_memory(shape, layout.dims(2), settings).by_phase.values()) for settings in both]
    assert peaks[0] < cluster.memory_bytes < peaks[1]
    assert memory_check(shape, cluster, actor)(layout, 2) and not memory_check(shape, cluster, *both)(layout, 2)
