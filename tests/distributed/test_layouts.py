"""One process gives the numbers of transformers; checkpoints and exports do not depend on the layout."""

from functools import partial

import numpy as np
import pytest
from models_for_layouts import groups_of_responses, make

from mrl.algorithms.losses import CrossEntropy, PPOClip
from mrl.types import Share, TokenBlock, TrainBatch
from mrl.workers.shares import Packing, plan_step, split
from mrl.workers.spec import ModelSpec
from parallel.dims import ParallelDims
from parallel.optimizer_settings import AdamW


def ragged_block(vocab_size: int, num_rows: int = 13) -> TokenBlock:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, rng.integers(1, 9)).tolist() for _ in range(num_rows)]
    responses = [rng.integers(0, vocab_size, rng.integers(1, 12)).tolist() for _ in range(num_rows)]
    return TokenBlock.from_lists(prompts, responses)


def share_of(block: TokenBlock, dims: ParallelDims, max_tokens: int, rank: int) -> Share:
    advantages = np.random.default_rng(1).standard_normal(len(block.lengths)).astype(np.float32)
    rows = np.arange(len(block.lengths))
    batch = TrainBatch(None, block.prompt_lengths, block.response_lengths, None, advantages, rows, rows)
    return plan_step(batch, dims, Packing(max_tokens), "sequence_mean").shares[dims.coords(rank).dp]


def make_actor(path, dims: ParallelDims):
    from mrl.workers.actor import Actor

    return Actor(ModelSpec(str(path), dims, "float32", AdamW(lr=1e-2, betas=(0.9, 0.98), eps=1e-6), {}))


def logprobs(rank: int, path, dims: ParallelDims, block: TokenBlock):
    actor = make_actor(path, dims)
    share = share_of(block, dims, 30, rank)
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
    share = share_of(block, ParallelDims(), 30, rank)
    return actor.update(block, [share], CrossEntropy(), [1e-2], 0.7)[0]


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
    share = share_of(block, dims, 40, rank)
    if restore:
        actor.load(folder)
    else:
        actor.update(block, [share], PPOClip(), [1e-2])
        actor.save(folder)
    actor.update(block, [share], PPOClip(), [1e-2])
    return {name: tensor.clone().numpy() for name, tensor in actor.export()} if actor.takes_part else {}


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("dense", ParallelDims(), ParallelDims(tp=2)),
        ("dense", ParallelDims(), ParallelDims(dp=2)),
        ("dense", ParallelDims(tp=2, pp=2), ParallelDims(cp=2)),
        ("tied", ParallelDims(dp=2), ParallelDims(pp=2, vpp=2)),
        ("tied", ParallelDims(pp=2), ParallelDims(tp=2)),
        ("tied", ParallelDims(pp=2), ParallelDims(pp=2)),
        ("moe", ParallelDims(), ParallelDims(dp=2, ep=2)),
        ("moe", ParallelDims(dp=2, ep=2), ParallelDims(pp=2)),
        ("moe", ParallelDims(dp=2, ep=2), ParallelDims(tp=2, pp=2, ep=2, etp=1)),
    ],
    ids=str,
)
def test_a_checkpoint_continues_under_another_layout(run_ranks, tmp_path, kind, before, after):
    """A step, a checkpoint and another step under one layout; the checkpoint and the other step under the other."""
    path, block, folder = tmp_path / "model", ragged_block(40), tmp_path / "checkpoint"
    make(kind, path)
    expected = run_ranks(before, save_and_continue, path, folder, before, block, False)[0]
    weights = run_ranks(after, save_and_continue, path, folder, after, block, True)[0]
    for name, tensor in expected.items():
        np.testing.assert_allclose(weights[name], tensor, atol=2e-5, err_msg=name)


def train_on_nan(rank: int, path, block: TokenBlock):
    import torch

    actor = make_actor(path, ParallelDims())
    with torch.no_grad():
        actor.bridge.params["decoder.final_layernorm.weight"][0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        actor.update(block, [share_of(block, ParallelDims(), 40, rank)], PPOClip(), [1e-2])


def test_a_gradient_that_is_not_finite_ends_the_run(run_ranks, tiny_qwen3):
    run_ranks(ParallelDims(), train_on_nan, tiny_qwen3(), ragged_block(40))


def export(rank: int, path, folder, dims: ParallelDims):
    make_actor(path, dims).export_hf(folder, {})


@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        *[
            ("dense", ParallelDims(**d))
            for d in ({}, dict(tp=2), dict(dp=2), dict(pp=2), dict(pp=2, vpp=2), dict(cp=2))
        ],
        *[("tied", ParallelDims(**d)) for d in (dict(pp=2), dict(tp=2, pp=2, dp=2))],
        *[("moe", ParallelDims(**d)) for d in (dict(dp=2, ep=2), dict(tp=2, ep=2, etp=1), dict(pp=2, dp=2, ep=2))],
        *[("moe", ParallelDims(**d)) for d in (dict(dp=4, ep=2, etp=2), dict(tp=2, pp=2, vpp=2, ep=2, etp=1))],
        ("mixtral", ParallelDims(tp=2, dp=2, ep=2)),
    ],
    ids=str,
)
def test_an_export_holds_the_bytes_that_were_loaded(run_ranks, tmp_path, kind, dims):
    from safetensors.numpy import load_file

    make(kind, tmp_path / "model")
    run_ranks(dims, export, tmp_path / "model", tmp_path / "hf", dims)
    found, expected = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "model/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].tobytes() == tensor.tobytes(), name


def two_mini_batches(rank: int, path, dims: ParallelDims, by_hand: bool):
    """Weights after two optimizer steps on one rollout, the second one off policy."""
    import torch

    from mrl.workers.actor import policy_loss

    block, groups, advantages = groups_of_responses()
    rows = np.arange(len(groups))
    batch = TrainBatch(None, block.prompt_lengths, block.response_lengths, groups, 5 * advantages, rows, rows)
    plans = [plan_step(part, dims, Packing(60), "token_mean") for part in split(batch, 2)]
    first, second = (plan.shares[dims.coords(rank).dp] for plan in plans)
    actor, loss, lrs = make_actor(path, dims), PPOClip(0.01, 0.01), [3e-3, 1e-3]
    if by_hand:
        old = torch.cat(actor.compute_logprobs(block, second))
        actor.update(block, [first], loss, lrs[:1])
        micros = actor.micro_batches(block, second)
        olds = old.split([micro.num_responses for micro in micros])
        micros = [micro.after(column) for micro, column in zip(micros, olds, strict=True)]
        actor.accumulate(micros, partial(actor.head, temperature=1.0), partial(policy_loss, loss=loss), second)
        actor.step(lrs[1])
    else:
        actor.update(block, [first, second], loss, lrs)
    return {name: tensor.clone().numpy() for name, tensor in actor.export()} if actor.takes_part else {}


@pytest.mark.parametrize(
    "dims", [ParallelDims(), ParallelDims(pp=2), ParallelDims(cp=2), ParallelDims(tp=2, dp=2)], ids=str
)
def test_later_mini_batches_are_clipped_against_the_weights_before_the_first(run_ranks, tmp_path, dims):
    make("dense", tmp_path)
    one = ParallelDims()
    expected = run_ranks(one, two_mini_batches, tmp_path, one, True)[0]
    found = run_ranks(dims, two_mini_batches, tmp_path, dims, False)[0]
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor, atol=2e-5, err_msg=name)
