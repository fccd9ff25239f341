"""Every layout gives the numbers of one process, and one process gives those of transformers."""

from dataclasses import replace

import numpy as np
import pytest

from mrl.algorithms.losses import CrossEntropy, PPOClip
from mrl.algorithms.reduce import token_weights
from mrl.data.batching import micro_batches, partition
from mrl.types import Share, TokenBlock
from mrl.workers.spec import ActorSpec
from parallel.dims import ParallelDims
from parallel.optimizer_settings import AdamW

LAYOUTS = [
    ParallelDims(tp=2),
    ParallelDims(dp=2),
    ParallelDims(tp=2, dp=2),
]


def ragged_block(vocab_size: int, num_rows: int = 13) -> TokenBlock:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, rng.integers(1, 9)).tolist() for _ in range(num_rows)]
    responses = [rng.integers(0, vocab_size, rng.integers(1, 12)).tolist() for _ in range(num_rows)]
    return TokenBlock.from_lists(prompts, responses)


def shares(block: TokenBlock, dims: ParallelDims, max_tokens: int) -> list[Share]:
    rng = np.random.default_rng(1)
    advantages = rng.standard_normal(len(block.lengths)).astype(np.float32)
    weights = token_weights(block.response_lengths, "sequence_mean")
    rows = np.arange(len(block.lengths))
    return [
        Share(None, tuple(micro_batches(block.lengths, part, max_tokens)), advantages, weights)
        for part in partition(block.lengths, rows, dims.dp)
    ]


def make_actor(path, dims: ParallelDims):
    from mrl.workers.actor import Actor

    return Actor(ActorSpec(str(path), dims, "float32", AdamW(lr=1e-2, betas=(0.9, 0.98)), {}))


def train(rank: int, path, dims: ParallelDims, block: TokenBlock, max_tokens: int, steps: int):
    """`steps` updates; returns losses, gradient norms, and the whole weights afterwards."""
    actor = make_actor(path, dims)
    share = shares(block, dims, max_tokens)[dims.dp_rank(rank)]
    # on policy the value of the clipped loss does not depend on the model, its gradient does; cross-entropy's value does too
    reports = [actor.update(block, share, loss, 1e-2, 0.7) for loss in (PPOClip(), CrossEntropy())[:steps]]
    weights = {name: tensor.clone().numpy() for name, tensor in actor.export()}
    losses = [r.sums.get("loss", 0.0) for r in reports]  # a replica without rows reports none
    return losses, [r.maxima["optim/grad_norm"] for r in reports], weights


def one_process(run_ranks, path, block, max_tokens=10_000, steps=2):
    return run_ranks(ParallelDims(), train, path, ParallelDims(), block, max_tokens, steps)[0]


@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_losses_gradient_norms_and_weights_do_not_depend_on_the_layout(run_ranks, tiny_qwen3, dims):
    path, block = tiny_qwen3(), ragged_block(40)
    losses, norms, weights = one_process(run_ranks, path, block)
    results = run_ranks(dims, train, path, dims, block, 40, 2)
    by_replica = [results[r] for r in range(dims.world_size) if dims.tp_rank(r) == 0]
    np.testing.assert_allclose(np.sum([r[0] for r in by_replica], axis=0), losses, atol=1e-6)
    for _, their_norms, their_weights in results:
        np.testing.assert_allclose(their_norms, norms, rtol=1e-5)
        for name, expected in weights.items():
            np.testing.assert_allclose(their_weights[name], expected, atol=1e-5, err_msg=name)


def test_splitting_a_batch_into_micro_batches_changes_nothing(run_ranks, tiny_qwen3):
    path, block = tiny_qwen3(), ragged_block(40)
    whole = one_process(run_ranks, path, block, max_tokens=10_000)
    split = one_process(run_ranks, path, block, max_tokens=12)
    np.testing.assert_allclose(split[0], whole[0], atol=1e-6)
    np.testing.assert_allclose(split[1], whole[1], rtol=1e-5)


def test_a_replica_without_rows_still_takes_part(run_ranks, tiny_qwen3):
    path, block = tiny_qwen3(), ragged_block(40, num_rows=1)
    alone = one_process(run_ranks, path, block)
    dims = ParallelDims(dp=2)
    first, second = run_ranks(dims, train, path, dims, block, 10_000, 2)
    assert [0.0, 0.0] in (first[0], second[0])
    np.testing.assert_allclose(np.add(first[0], second[0]), alone[0], atol=1e-6)
    np.testing.assert_allclose([first[1], second[1]], [alone[1]] * 2, rtol=1e-5)


def logprobs(rank: int, path, dims: ParallelDims, block: TokenBlock):
    actor = make_actor(path, dims)
    share = shares(block, replace(dims, dp=1), 30)[0]
    found = actor.compute_logprobs(block, share, 0.7)
    return np.concatenate([x.numpy() for x in found]), np.concatenate(share.micro_batches)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_logprobs_equal_those_of_transformers_for_any_vocabulary(run_ranks, tiny_qwen3, tp, tied):
    import torch
    from transformers import Qwen3ForCausalLM

    path, dims = tiny_qwen3(vocab_size=41, tied=tied), ParallelDims(tp=tp)  # 41: tp=2 must pad the vocabulary
    block = ragged_block(41)
    reference = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    for found, order in run_ranks(dims, logprobs, path, dims, block):
        expected = []
        for row in order:
            ids = torch.tensor(np.concatenate([block.prompt(row), block.response(row)]).astype(np.int64))
            with torch.no_grad():
                rows = (reference(ids[None]).logits[0] / 0.7).log_softmax(-1)
            start = block.prompt_lengths[row]
            expected.append(rows[start - 1 : -1].gather(1, ids[start:, None])[:, 0].numpy())
        np.testing.assert_allclose(found, np.concatenate(expected), atol=2e-5)


def sft_gradient_norm(rank: int, path, block: TokenBlock):
    actor = make_actor(path, ParallelDims())
    share = shares(block, ParallelDims(), 30)[0]
    return actor.update(block, share, CrossEntropy(), 1e-2, 0.7)


def test_loss_and_gradient_norm_equal_a_float64_reference(run_ranks, tiny_qwen3):
    import torch
    from transformers import Qwen3ForCausalLM

    path, block = tiny_qwen3(), ragged_block(40)
    report = run_ranks(ParallelDims(), sft_gradient_norm, path, block)[0]
    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float64).train()
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(block.lengths)):
        ids = torch.tensor(np.concatenate([block.prompt(row), block.response(row)]).astype(np.int64))
        rows = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)
        start = block.prompt_lengths[row]
        loss = loss - rows[start - 1 : -1].gather(1, ids[start:, None]).mean() / len(block.lengths)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    np.testing.assert_allclose(report.sums["loss"], loss.item(), rtol=1e-6)
    np.testing.assert_allclose(report.maxima["optim/grad_norm"], norm, rtol=1e-5)


def save_and_continue(rank: int, path, folder, dims: ParallelDims, block: TokenBlock, restore: bool):
    actor = make_actor(path, dims)
    share = shares(block, dims, 40)[dims.dp_rank(rank)]
    if restore:
        actor.load(folder)
    else:
        actor.update(block, share, PPOClip(), 1e-2)
        actor.save(folder)
    actor.update(block, share, PPOClip(), 1e-2)
    return {name: tensor.clone().numpy() for name, tensor in actor.export()}


@pytest.mark.parametrize("after", [ParallelDims(tp=2), ParallelDims(dp=2)], ids=str)
def test_a_checkpoint_continues_under_another_layout(run_ranks, tiny_qwen3, tmp_path, after):
    path, block, folder = tiny_qwen3(), ragged_block(40), tmp_path / "checkpoint"
    before = ParallelDims()
    expected = run_ranks(before, save_and_continue, path, folder, before, block, False)[0]
    for weights in run_ranks(after, save_and_continue, path, folder, after, block, True):
        for name, tensor in expected.items():
            np.testing.assert_allclose(weights[name], tensor, atol=1e-5, err_msg=name)


def train_on_nan(rank: int, path, block: TokenBlock):
    import torch

    actor = make_actor(path, ParallelDims())
    with torch.no_grad():
        actor.bridge.params["decoder.final_layernorm.weight"][0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        actor.update(block, shares(block, ParallelDims(), 40)[0], PPOClip(), 1e-2)


def test_a_gradient_that_is_not_finite_ends_the_run(run_ranks, tiny_qwen3):
    run_ranks(ParallelDims(), train_on_nan, tiny_qwen3(), ragged_block(40))


def export(rank: int, path, folder, dims: ParallelDims):
    make_actor(path, dims).export_hf(folder, {})


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(tp=2), ParallelDims(dp=2)], ids=str)
def test_an_export_holds_the_bytes_that_were_loaded(run_ranks, tiny_qwen3, tmp_path, dims):
    from safetensors.numpy import load_file

    path = tiny_qwen3(vocab_size=41)
    run_ranks(dims, export, path, tmp_path / "hf", dims)
    found, expected = load_file(tmp_path / "hf/model.safetensors"), load_file(path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].tobytes() == tensor.tobytes(), name
