"""Distillation from two teachers: a step is the same under every layout, and its loss and gradients equal transformers'."""

from dataclasses import replace

import numpy as np
import pytest
from models_for_layouts import VOCAB, groups_of_responses, make
from test_teacher_divergence import plain_divergence
from tiny_families import make_family

from models.architecture import ModelSpec
from mrl.algorithms.distillation import Distillation
from mrl.algorithms.losses import PPOClip
from mrl.algorithms.objective import EntropyBonus, Objective, TokenWeighting, sequence_mean
from mrl.core.types import TokenBlock, TrainBatch, teacher_outputs_by_row
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.trace_comparison import StepTrace, compare_traces
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

ONE = ParallelDims()
LAYOUTS = [
    ParallelDims(tp=2),
    ParallelDims(pp=2),
    ParallelDims(cp=2),
    ParallelDims(dp=2),
    ParallelDims(tp=2, pp=2, cp=2),
    ParallelDims(tp=2, sp=False, dp=2),
]
TOP_K, TEMPERATURE = 5, 0.8
LOSSES = {
    "whole": Objective(Distillation("js", beta=0.3)),
    "top_k": Objective(Distillation("reverse_kl", top_k=TOP_K, coef=2.0)),
    "with_rewards": Objective(Distillation("forward_kl", reward_loss=PPOClip()), entropy=EntropyBonus(0.1)),
}
TEACHERS = {"even": ("qwen3", dict(hidden_size=48)), "odd": ("llama", dict(tie_word_embeddings=True, hidden_size=24))}


def taught_rows(teacher: str, groups: np.ndarray) -> np.ndarray:
    return np.flatnonzero(groups % 2 == (teacher == "odd"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the policy, and with two teachers that have other hidden sizes."""
    path = tmp_path_factory.mktemp("models")
    make("dense", path / "policy")
    for teacher, (family, sizes) in TEACHERS.items():
        make_family(family, path / teacher, **sizes)
    return path


def teacher_outputs(rank: int, path, dims: ParallelDims, block: TokenBlock, groups, top_k: int | None):
    """Return teacher -> row -> outputs, for the rows whose outputs this rank has."""
    from mrl.workers.actor_critic import MegatronActor

    found = {}
    for teacher in TEACHERS:
        actor = MegatronActor(ModelSpec(str(path / teacher), dims, "float32", None, {}, logprob_chunk=7))
        step = replace(TrainBatch.of(block, groups), rows=taught_rows(teacher, groups))
        batch = partition_step(step, dims, Packing(60)).replica_batches[dims.coords(rank).dp]
        outputs = actor.compute_teacher_outputs(block, batch, TEMPERATURE, top_k)
        by_row: dict = {}
        for rows, each in zip(batch.micro_batches, outputs if actor.returns_columns else [], strict=False):
            by_row |= teacher_outputs_by_row(rows, each, block.sampled_lengths) if len(rows) else {}
        found[teacher] = by_row
    return found


def merged(ranks: list[dict]) -> dict:
    return {teacher: {row: x for rank in ranks for row, x in rank[teacher].items()} for teacher in TEACHERS}


@pytest.fixture(scope="module")
def blocks(run_ranks, folder):
    """Return (loss -> block with the teachers' outputs, groups [B]), computed in a single process."""
    block, groups = groups_of_responses()
    noise = np.random.default_rng(3).normal(scale=0.3, size=len(block.rollout_logprobs)).astype(np.float32)
    block = block.with_columns(old_logprobs=block.rollout_logprobs + noise)
    whole, top = (
        replace(block, teachers=merged(run_ranks(ONE, teacher_outputs, folder, ONE, block, groups, k)))
        for k in (None, TOP_K)
    )
    return {"whole": whole, "top_k": top, "with_rewards": whole}, groups


@pytest.mark.extended
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_the_outputs_of_a_teacher_are_the_same_under_layout(run_ranks, folder, blocks, dims):
    expected, groups = blocks
    for name, k in (("whole", None), ("top_k", TOP_K)):
        block = replace(expected[name], teachers={})
        found = merged(run_ranks(dims, teacher_outputs, folder, dims, block, groups, k))
        for teacher, by_row in expected[name].teachers.items():
            assert found[teacher].keys() == by_row.keys() == set(taught_rows(teacher, groups).tolist())
            for row, outputs in by_row.items():
                for key, values in outputs.items():
                    assert (
                        values.shape[0] == block.sampled_lengths[row] and values.dtype == found[teacher][row][key].dtype
                    )
                    np.testing.assert_allclose(found[teacher][row][key], values, atol=2e-5)


def traces(rank: int, path, dims: ParallelDims, blocks: dict, groups, packing: Packing) -> dict[str, StepTrace]:
    """Run a step with each loss on a fresh model."""
    from mrl.workers.actor_critic import MegatronActor
    from mrl.workers.parity_trace import trace_step

    found = {}
    for name, loss in LOSSES.items():
        # Adam's first step divides each gradient by its magnitude: without eps, round-off would become a full step.
        settings = dict(share_prompts=packing.share_prompts, logprob_chunk=7)
        spec = ModelSpec(str(path / "policy"), dims, "float32", OptimConfig(lr=1e-4, eps=1e-6), {}, **settings)
        actor = MegatronActor(spec)
        if name != "top_k":
            actor.load_teacher_weights({teacher: str(path / teacher) for teacher in TEACHERS})
        step = TrainBatch.of(blocks[name], groups)
        batch = partition_step(step, dims, packing, TokenWeighting(sequence_mean)).replica_batches[dims.coords(rank).dp]
        found[name] = trace_step(actor, blocks[name], batch, loss, 1e-4, TEMPERATURE)
    return found


@pytest.fixture(scope="module")
def alone(run_ranks, folder, blocks) -> dict[str, StepTrace]:
    """Return the steps of a single process with one pack."""
    (found,) = run_ranks(ONE, traces, folder, ONE, *blocks, Packing(10_000, share_prompts=False))
    assert all(np.isfinite(trace.loss) and trace.grad_norm > 1e-3 for trace in found.values())
    return found


@pytest.mark.extended
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_a_step_is_the_same_under_layout(run_ranks, folder, blocks, alone, dims):
    ranks = run_ranks(dims, traces, folder, dims, *blocks, Packing(60), timeout_s=240)
    for name, expected in alone.items():
        differences = compare_traces(expected, StepTrace.merge([rank[name] for rank in ranks]))
        assert not [line for line in differences if not line.within], name


@pytest.mark.extended
@pytest.mark.parametrize("name", ["whole", "top_k"])
def test_loss_and_gradients_equal_those_of_transformers(folder, blocks, alone, name):
    import torch
    from transformers import AutoModelForCausalLM

    load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)  # noqa: E731
    loss, (by_name, groups) = LOSSES[name].policy, blocks
    block, policy, teachers = by_name[name], load(folder / "policy"), {t: load(folder / t) for t in TEACHERS}
    terms = []
    for row in range(len(block.lengths)):
        ids = torch.tensor(np.concatenate([block.prompt(row), block.response(row)]).astype(np.int64))[None]
        start = int(block.prompt_lengths[row]) - 1
        teacher = teachers["odd" if groups[row] % 2 else "even"]
        with torch.no_grad():
            t = (teacher(ids).logits[0, start:-1] / TEMPERATURE).softmax(-1)
        s = (policy(ids).logits[0, start:-1] / TEMPERATURE).softmax(-1)
        assert t.shape[1] == s.shape[1] == VOCAB
        if loss.top_k:
            top = t.topk(loss.top_k).indices
            t, s = (torch.cat([x.gather(1, top), x.scatter(1, top, 0.0).sum(1, keepdim=True)], 1) for x in (t, s))
        terms.append(loss.coef * plain_divergence(loss.divergence_settings(), t, s).mean())
    total = torch.stack(terms).mean()
    total.backward()
    assert alone[name].loss == pytest.approx(total.item(), rel=1e-5)
    for tensor_name, weight in policy.named_parameters():
        gradient, found = weight.grad.numpy(), alone[name].gradients[tensor_name]
        assert np.abs(gradient - found).max() < 2e-5 * max(1.0, np.abs(gradient).max()), tensor_name
