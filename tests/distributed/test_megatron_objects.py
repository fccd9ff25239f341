"""Settings of the config arrive in Megatron's objects, and token budgets of passes without gradients change no output."""

import numpy as np
import pytest
import torch
from models_for_layouts import groups_of_responses, make
from test_layouts import ragged_block

from models.architecture import ModelSpec
from mrl.algorithms.losses import CrossEntropy, ValueLoss
from mrl.core.types import TrainBatch
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, partition_step
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

ONE = ParallelDims()
LR, DECAY, EPS = 1e-2, 0.5, 1e-3


def make_model(path, dims: ParallelDims = ONE, critic: bool = False, dtype: str = "float32", **settings):
    from mrl.workers.actor_critic import MegatronActor, MegatronCritic

    optim = OptimConfig(lr=LR, weight_decay=DECAY, eps=EPS, clip_grad=0.0, megatron=settings.pop("megatron", {}))
    spec = ModelSpec(str(path), dims, dtype, optim, {}, **settings)
    return MegatronCritic(spec) if critic else MegatronActor(spec)


def batch_for(dims: ParallelDims, rank: int):
    block = ragged_block(40)
    block = block.with_columns(returns=block.columns["advantages"])
    step = partition_step(TrainBatch.of(block, None), dims, Packing(60))
    return block, step.replica_batches[dims.coords(rank).dp]


def built_objects(rank: int, path):
    """Return the settings in Megatron's own objects, for an actor and for a critic with other settings."""
    from parallel.optimizer import _optimizers

    actor_settings = dict(ddp=dict(bucket_size=1000, pad_buckets_for_high_nccl_busbw=True), overlap_grad_reduce=True)
    critic_settings = dict(ddp=dict(grad_reduce_in_fp32=False), megatron=dict(decoupled_weight_decay=False))
    found = {}
    for name, settings in (("actor", actor_settings), ("critic", critic_settings)):
        model = make_model(path, critic=name == "critic", dtype="bfloat16", **settings)
        block, batch = batch_for(ONE, rank)
        loss = ValueLoss() if name == "critic" else CrossEntropy()
        (report,) = model.update(block, [batch], loss, [LR])
        (norm,) = [value for key, value in report.maxima.items() if key.endswith("grad_norm")]
        (chunk,), (part,) = model.chunks, _optimizers(model.optimizer)
        ddp, optim = chunk.ddp_config, part.config
        found[name] = dict(
            ddp=(
                ddp.overlap_grad_reduce,
                ddp.bucket_size,
                ddp.pad_buckets_for_high_nccl_busbw,
                ddp.grad_reduce_in_fp32,
            ),
            optimizer=(optim.adam_eps, optim.weight_decay, optim.clip_grad, optim.decoupled_weight_decay),
            adam_w=part.optimizer.adam_w_mode,
            buckets=sum(len(buffer.buckets) for buffer in chunk.buffers),
            padded={bucket.grad_data.numel() % 2**16 for buffer in chunk.buffers for bucket in buffer.buckets},
            gradients={buffer.grad_data.dtype for buffer in chunk.buffers},
            norm=norm,
        )
    return found


def test_settings_of_actor_and_critic_arrive_in_megatrons_objects(run_ranks, tmp_path):
    make("dense", tmp_path)
    (found,) = run_ranks(ONE, built_objects, tmp_path)
    actor, critic = found["actor"], found["critic"]
    assert actor["ddp"] == (True, 1000, True, True) and actor["optimizer"] == (EPS, DECAY, 0.0, True)
    assert critic["ddp"][0] is False and critic["ddp"][2:] == (False, False)
    assert critic["optimizer"] == (EPS, DECAY, 0.0, False) and (actor["adam_w"], critic["adam_w"]) == (True, False)
    assert actor["buckets"] > 4 and actor["padded"] == {0} and critic["buckets"] == 1
    assert actor["gradients"] == {torch.float32} and critic["gradients"] == {torch.bfloat16}
    assert all(np.isfinite(model["norm"]) and model["norm"] > 0 for model in found.values())


def one_step(rank: int, path, megatron: dict):
    """Return name -> (weight before, gradient, weight after) of one optimizer step."""
    model = make_model(path, megatron=megatron)
    named = dict(model.chunks[0].module.named_parameters())
    before = {name: param.detach().clone().numpy() for name, param in named.items()}
    block, batch = batch_for(ONE, rank)
    head, loss = model.head_and_loss(CrossEntropy(), 1.0)
    model.accumulate_gradients(model.micro_batches(block, batch), head, loss, batch)
    gradients = {name: param.main_grad.detach().clone().numpy() for name, param in named.items()}
    model.optimizer_step(LR)
    return {name: (before[name], gradients[name], param.detach().numpy()) for name, param in named.items()}


def adam_step(weight, gradient, decay: float, decoupled: bool):
    """Return a weight after Adam's first step, with L2 or decoupled decay (Loshchilov and Hutter 2019, algorithm 2)."""
    weight, gradient = weight.astype(np.float64), gradient.astype(np.float64)
    if not decoupled:
        gradient = gradient + decay * weight
    step = gradient / (np.abs(gradient) + EPS)  # bias-corrected moments of the first step: g and g**2
    return weight - LR * (step + decay * weight * decoupled)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("decays_qk_norm", [False, True])
def test_weight_decay_follows_the_settings_and_spares_the_norms(run_ranks, tmp_path, decoupled, decays_qk_norm):
    make("dense", tmp_path)
    settings = dict(decoupled_weight_decay=decoupled, apply_wd_to_qk_layernorm=decays_qk_norm)
    (found,) = run_ranks(ONE, one_step, tmp_path, settings)
    qk_norms = [name for name in found if "q_layernorm" in name or "k_layernorm" in name]
    assert len(qk_norms) == 8, "four layers with norms of queries and keys"
    for name, (before, gradient, after) in found.items():
        is_spared = before.ndim == 1 and not (decays_qk_norm and name in qk_norms)
        expected = adam_step(before, gradient, 0.0 if is_spared else DECAY, decoupled)
        np.testing.assert_allclose(after, expected, atol=1e-6, err_msg=name)


def columns_and_losses(rank: int, path, dims: ParallelDims, budgets: list[int]):
    """Return for each forward budget ([log-probabilities, values], held-out loss, report of an update, micro-batches)."""
    found = []
    for budget in budgets:
        block, groups = groups_of_responses()
        batch, packing = TrainBatch.of(block, groups), Packing(60, True, CostModel(1.0, 0.01), budget)
        forward = partition_step(batch, dims, packing.for_forward_pass()).replica_batches[dims.coords(rank).dp]
        update = partition_step(batch, dims, packing).replica_batches[dims.coords(rank).dp]
        actor, critic = make_model(path, dims), make_model(path, dims, critic=True)
        parts = [
            actor.column_part(actor.compute_logprobs(block, forward), forward),
            critic.column_part(critic.compute_values(block, forward), forward),
        ]
        columns = [
            part and {row: values for row, values in part.by_row(block.sampled_lengths).items()} for part in parts
        ]
        held_out = actor.evaluate(block, forward, CrossEntropy()).sums.get("loss")
        (report,) = actor.update(block, [update], CrossEntropy(), [LR])
        del report.maxima["seconds"]
        found.append((columns, held_out, report, len(forward.micro_batches)))
    return found


@pytest.mark.extended
@pytest.mark.parametrize("dims", [ONE, ParallelDims(dp=2), ParallelDims(pp=2)], ids=str)
def test_the_budget_of_passes_without_gradients_changes_no_number(run_ranks, tmp_path, dims):
    """Outputs differ by rounding, because the micro-batches differ. The update afterwards is equal to the last bit."""
    make("dense", tmp_path)
    by_rank = run_ranks(dims, columns_and_losses, tmp_path, dims, [25, 60, 10_000])
    rows_by_budget, losses, counts = [], [], []
    for of_ranks in zip(*by_rank, strict=True):  # the replicas may have other rows with another budget
        columns, held_out, _, packs = zip(*of_ranks, strict=True)
        rows_by_budget.append([{row: values for part in parts if part for row, values in part.items()}
                               for parts in zip(*columns, strict=True)])  # fmt: skip
        losses.append(sum(loss for loss in held_out if loss is not None))
        counts.append(max(packs))
    assert counts[0] > counts[1] > counts[2] == 1, "the passes have other micro-batches"
    np.testing.assert_allclose(losses, losses[-1], rtol=1e-6)
    for reports in ([report for *_, report, _ in of_rank] for of_rank in by_rank):
        assert reports[0] == reports[1] == reports[2]
    for of_budget in rows_by_budget[:2]:
        for found, expected in zip(of_budget, rows_by_budget[-1], strict=True):
            assert found.keys() == expected.keys() == set(range(20))
            for row, values in found.items():
                np.testing.assert_allclose(values, expected[row], rtol=0, atol=2e-6)
