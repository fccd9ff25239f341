"""The actor on CPU and GPU: log-probabilities equal transformers', updates lower the loss, overlap changes no weight."""

from dataclasses import replace

import numpy as np
import pytest

from models.architecture import ModelSpec
from mrl.algorithms.losses import CrossEntropy
from mrl.core.types import TokenBlock, TrainBatch
from mrl.workers.dp_partition import Packing, partition_step
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig


def block_of_six() -> TokenBlock:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40, 5).tolist() for _ in range(6)]
    return TokenBlock.from_lists(prompts, [rng.integers(0, 40, 2 + i).tolist() for i in range(6)])


def logprobs_and_losses(rank: int, path: str, dims: ParallelDims):
    """Return (row -> log-probabilities, losses before and after an update). Only the last pipeline stage has these values."""
    from mrl.workers.actor_critic import MegatronActor

    actor = MegatronActor(ModelSpec(path, dims, "float32", OptimConfig(lr=1e-3), {}))
    block = block_of_six()
    step = partition_step(TrainBatch.of(block, None), dims, Packing(30))
    batch = step.replica_batches[dims.coords(rank).dp]
    rows, columns = batch.micro_batches, actor.compute_logprobs(block, batch)
    logprobs = {}
    for indices, column in zip(rows[: len(columns)], columns, strict=True):
        lengths = block.response_lengths[indices]
        logprobs |= dict(zip(indices.tolist(), np.split(column.cpu().numpy(), lengths.cumsum()[:-1]), strict=True))
    losses = [actor.update(block, [batch], CrossEntropy(), [1e-2])[0].sums.get("loss") for _ in range(2)]
    return logprobs, losses


@pytest.mark.parametrize(
    "dims", [ParallelDims(), ParallelDims(tp=2), ParallelDims(pp=2), ParallelDims(dp=2)], ids=["one", "tp", "pp", "dp"]
)
def test_logprobs_equal_transformers_and_an_update_lowers_the_loss(run_program, tiny_qwen3, dims):
    import torch
    from transformers import Qwen3ForCausalLM

    path = str(tiny_qwen3())
    found = run_program(dims, logprobs_and_losses, path, dims)
    model, block = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float64).eval(), block_of_six()
    seen = set()
    for logprobs, _ in found:
        for row, values in logprobs.items():
            seen.add(row)
            prompt, response = (part(row).astype(np.int64) for part in (block.prompt, block.response))
            with torch.no_grad():
                rows = model(torch.tensor(np.concatenate([prompt, response]))[None]).logits[0].log_softmax(-1)
            expected = rows[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
            np.testing.assert_allclose(values, expected.numpy(), atol=1e-3)
    assert seen == set(range(6))
    losses = [losses for _, losses in found if None not in losses]
    assert losses and sum(after for _, after in losses) < sum(before for before, _ in losses)


def norms_and_weights(rank: int, path: str, dims: ParallelDims):
    """Return (gradient norms, weights) after three updates, with reductions after and during the backward pass.

    In the second update, the last replica has no micro-batch.
    """
    from mrl.workers.actor_critic import MegatronActor

    block, found = block_of_six(), []
    step = partition_step(TrainBatch.of(block, None), dims, Packing(30))
    batch = step.replica_batches[dims.coords(rank).dp]
    idle = replace(batch, micro_batches=()) if dims.coords(rank).dp == dims.dp - 1 else batch
    for overlap in (False, True):
        spec = ModelSpec(
            path, dims, "float32", OptimConfig(lr=1e-3), {}, overlap_grad_reduce=overlap, ddp=dict(bucket_size=1000)
        )
        actor = MegatronActor(spec)
        reports = actor.update(block, [batch, idle, batch], CrossEntropy(), [1e-3] * 3)
        norms = [report.maxima["optim/grad_norm"] for report in reports]
        found.append((norms, [weight.detach().float().cpu().numpy() for weight in actor._weights()]))
    return found


@pytest.mark.parametrize("dims", [ParallelDims(dp=2), ParallelDims(pp=2, dp=2)], ids=["dp", "pp dp"])
def test_reductions_during_the_backward_pass_change_no_weight(run_program, tiny_qwen3, dims):
    for (norms, weights), (norms_of_overlap, weights_of_overlap) in run_program(
        dims, norms_and_weights, str(tiny_qwen3()), dims
    ):
        np.testing.assert_allclose(norms_of_overlap, norms, rtol=1e-4)
        for after, during in zip(weights, weights_of_overlap, strict=True):
            np.testing.assert_allclose(during, after, atol=1e-4)
