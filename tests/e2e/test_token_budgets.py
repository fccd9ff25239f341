"""PPO runs in which actor, critic and reference have different token budgets, and only the last checkpoint keeps the critic."""

import numpy as np
import pytest
from run_comparison import learning_metrics

from mrl.checkpoint.store import Checkpoint

pytestmark = pytest.mark.extended

EQUAL = ["trainer.max_tokens_per_micro_batch=128"]
DIFFERENT = [
    "trainer.max_tokens_per_micro_batch=192",
    "trainer.max_tokens_per_forward_micro_batch=1024",
    "critic.max_tokens_per_micro_batch=64",
    "critic.max_tokens_per_forward_micro_batch=300",
    "roles.reference.max_tokens_per_micro_batch=100",
]
MEGATRON = [
    "trainer.overlap_grad_reduce=true",
    "trainer.ddp.bucket_size=20000",
    "optim.megatron.apply_wd_to_qk_layernorm=true",
]
RAY = ["cluster.ray.object_store_memory=300000000", "cluster.ray.logging_level=WARNING"]
KEPT = ["checkpoint.every=1", "checkpoint.keep_last=3", "checkpoint.keep_last_critic=1", "checkpoint.export_every=1",
        "checkpoint.keep_last_exports=2"]  # fmt: skip


@pytest.fixture(scope="module")
def ppo(start_mrl, quickstart, recorded):
    """`ppo(override, ...)`: a run of three steps with the recorded rollouts. The reference has processes of its own."""

    def run(*overrides: str, steps: int = 3, folder=None):
        done = start_mrl(
            "train", *quickstart, "algorithm=ppo", "roles.reference.parallel.tp=1", "optim.lr=1e-4", "critic.optim.lr=1e-4",
            f"rollout.replay={recorded.folder / 'rollouts'}", f"trainer.max_steps={steps}", *MEGATRON, *RAY, *overrides,
            folder=folder,
        ).finish()  # fmt: skip
        assert done.process.returncode == 0, done.output()
        assert done.leftovers() == []
        return done

    return run


@pytest.fixture(scope="module")
def different(ppo):
    return ppo(*DIFFERENT, *KEPT)


def test_budgets_change_no_metric(ppo, different):
    equal = ppo(*EQUAL, "trainer.save=false")
    runs = [learning_metrics(run.folder / "metrics.jsonl") for run in (equal, different)]
    for expected, found in zip(*runs, strict=True):
        assert found.keys() == expected.keys() and {"critic/loss", "loss/policy"} <= found.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    packs = [[step["batch/micro_batches"] for step in run.metrics()] for run in (equal, different)]
    assert all(one > other for one, other in zip(*packs, strict=True)), "the actor has larger micro-batches"


def test_a_run_resumes_although_older_checkpoints_have_lost_the_critic(ppo, different):
    checkpoints = [Checkpoint.read(different.folder / f"checkpoints/step_{step:06d}") for step in (1, 2, 3)]
    assert [checkpoint.removed for checkpoint in checkpoints] == [("critic",), ("critic",), ()]
    assert [(checkpoint.path / "critic").exists() for checkpoint in checkpoints] == [False, False, True]
    assert sorted(path.name for path in (different.folder / "exports").iterdir()) == ["step_000002", "step_000003"]
    resumed = ppo(*DIFFERENT, *KEPT, steps=4, folder=different.folder)
    assert [step["step"] for step in resumed.metrics()] == [1, 2, 3, 4]
    kept = {path.name: (path / "critic").exists() for path in (different.folder / "checkpoints").glob("step_*")}
    assert kept == {"step_000002": False, "step_000003": False, "step_000004": True}
