"""A single process computes the same numbers as transformers, and exports do not depend on the layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from models_for_layouts import groups_of_responses, make
from tiny_families import SIZES

from models.architecture import ModelSpec
from mrl.algorithms.losses import CrossEntropy, PPOClip
from mrl.algorithms.objective import TokenWeighting, sequence_mean
from mrl.core.types import ReplicaBatch, TokenBlock, TrainBatch, assemble_column
from mrl.workers.dp_partition import Packing, partition_step, split_mini_batches
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

HEAD_OUTPUTS = ("logprobs", "entropies", "sum_pi_squared")


def ragged_block(vocab_size: int, num_rows: int = 13) -> TokenBlock:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, rng.integers(1, 9)).tolist() for _ in range(num_rows)]
    responses = [rng.integers(0, vocab_size, rng.integers(1, 12)).tolist() for _ in range(num_rows)]
    block = TokenBlock.from_lists(prompts, responses)
    advantages = np.random.default_rng(1).standard_normal(num_rows).astype(np.float32)
    return block.with_columns(advantages=advantages.repeat(block.sampled_lengths))


def share_of(block: TokenBlock, dims: ParallelDims, max_tokens: int, rank: int) -> ReplicaBatch:
    step = partition_step(TrainBatch.of(block, None), dims, Packing(max_tokens), TokenWeighting(sequence_mean))
    return step.replica_batches[dims.coords(rank).dp]


def make_actor(path, dims: ParallelDims, **settings):
    from mrl.workers.actor_critic import MegatronActor

    optimizer = OptimConfig(lr=1e-2, betas=(0.9, 0.98), eps=1e-6)
    return MegatronActor(ModelSpec(str(path), dims, "float32", optimizer, {}, **settings))


def policy_columns(rank: int, path, dims: ParallelDims, block: TokenBlock):
    """Return (name -> values of this replica's rows, rows). Only ranks of the last pipeline stage have values."""
    actor = make_actor(path, dims, logprob_chunk=7)
    share = share_of(block, dims, 30, rank)
    found = actor.compute_columns(block, share, 0.7, HEAD_OUTPUTS)
    joined = {name: np.concatenate([x.numpy() for x in parts]) for name, parts in found.items() if parts}
    return joined, np.concatenate(share.micro_batches)


@pytest.mark.extended_after(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_policy_columns_equal_those_of_transformers_for_any_vocabulary(run_ranks, tiny_qwen3, tp, tied):
    path, dims = tiny_qwen3(vocab_size=41, tied=tied), ParallelDims(tp=tp)  # with 41 tokens, tp=2 pads the vocabulary
    block = ragged_block(41)
    expected = columns_of_transformers(path, block)
    for found, order in run_ranks(dims, policy_columns, path, dims, block):
        compare_columns(found, expected, order)


def columns_of_transformers(path, block: TokenBlock) -> dict[str, list[np.ndarray]]:
    """Return name -> values of each row, computed from whole logits of a transformers model in float64."""
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    found: dict[str, list[np.ndarray]] = {name: [] for name in HEAD_OUTPUTS}
    for row in range(len(block.lengths)):
        ids = torch.tensor(np.concatenate([block.prompt(row), block.response(row)]).astype(np.int64))
        start = block.prompt_lengths[row]
        with torch.no_grad():
            rows = (reference(ids[None]).logits[0] / 0.7).log_softmax(-1)[start - 1 : -1]
        found["logprobs"].append(rows.gather(1, ids[start:, None])[:, 0].numpy())
        found["entropies"].append(-(rows.exp() * rows).sum(-1).numpy())
        found["sum_pi_squared"].append((rows.exp() ** 2).sum(-1).numpy())
    return found


def compare_columns(found: dict[str, np.ndarray], expected: dict[str, list[np.ndarray]], order: np.ndarray) -> None:
    """Compare columns, which have the rows in the order `order`, with the expected values of each row."""
    assert list(found) == list(HEAD_OUTPUTS)
    for name, values in found.items():
        np.testing.assert_allclose(
            values, np.concatenate([expected[name][row] for row in order]), atol=2e-5, err_msg=name
        )


LAYOUTS_OF_COLUMNS = [
    ParallelDims(**sizes)
    for sizes in (
        dict(tp=2),
        dict(pp=2),
        dict(pp=2, vpp=2),
        dict(cp=2),
        dict(dp=3),
        dict(tp=2, sp=False, dp=2),
        dict(tp=2, pp=2, cp=2),
    )
]


@pytest.mark.extended_except("tp2 pp2 cp2 sp")
@pytest.mark.parametrize("dims", LAYOUTS_OF_COLUMNS, ids=str)
def test_policy_columns_are_the_same_under_every_layout(run_ranks, tmp_path, dims):
    """One forward pass computes log-probabilities, entropies and sums of squared probabilities."""
    make("dense", tmp_path)
    block = ragged_block(SIZES["vocab_size"])
    expected = columns_of_transformers(tmp_path, block)
    assert np.ptp(np.concatenate(expected["entropies"])) > 0.01 < np.ptp(np.concatenate(expected["sum_pi_squared"]))
    ranks = run_ranks(dims, policy_columns, tmp_path, dims, block)
    with_values = [(rank, found, order) for rank, (found, order) in enumerate(ranks) if found]
    assert [rank for rank, *_ in with_values] == [
        rank for rank in range(dims.world_size) if dims.coords(rank).pp == dims.pp - 1
    ]
    assert {row for _, _, order in with_values for row in order.tolist()} == set(range(len(block.lengths)))
    for _, found, order in with_values:
        compare_columns(found, expected, order)


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


def train_on_nan(rank: int, path, block: TokenBlock):
    import torch

    actor = make_actor(path, ParallelDims())
    with torch.no_grad():
        actor.bridge.params["decoder.final_layernorm.weight"][0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        actor.update(block, [share_of(block, ParallelDims(), 40, rank)], PPOClip(), [1e-2])


def test_a_non_finite_gradient_raises_an_error(run_ranks, tiny_qwen3):
    run_ranks(ParallelDims(), train_on_nan, tiny_qwen3(), ragged_block(40))


def export(rank: int, path, folder, dims: ParallelDims):
    make_actor(path, dims).export_hf(folder, {})


@pytest.mark.extended_except("tied-tp2 pp2 dp2 sp", "moe-tp2 pp2 vpp2 ep2 etp1 sp")
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
        ("gpt_oss", ParallelDims(tp=2, dp=2, ep=2)),
        *[(kind, ParallelDims(**d)) for kind in ("glm", "deepseek") for d in (dict(dp=2, ep=2), dict(tp=2, pp=2))],
        *[(kind, ParallelDims(tp=2, pp=2)) for kind in ("mamba", "mamba_moe", "sparse", "shared_sparse")],
        ("biased", ParallelDims(tp=2, pp=2)),
    ],
    ids=str,
)
def test_an_export_is_bit_equal_to_the_loaded_weights(run_ranks, tmp_path, kind, dims):
    from safetensors.numpy import load_file

    make(kind, tmp_path / "model")
    run_ranks(dims, export, tmp_path / "model", tmp_path / "hf", dims)
    found, expected = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "model/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].tobytes() == tensor.tobytes(), name


def two_mini_batches(rank: int, path, dims: ParallelDims):
    """Return (old log-probabilities by row, reported mismatch, weights) of two optimizer steps on one rollout."""

    block, groups = groups_of_responses()
    actor = make_actor(path, dims)
    everything = partition_step(TrainBatch.of(block, groups), dims, Packing(60))
    own = everything.replica_batches[dims.coords(rank).dp]
    part = actor.column_part(actor.compute_logprobs(block, own), own)
    parts: list = [None] * dims.world_size
    torch.distributed.all_gather_object(parts, part)
    old = assemble_column([part for part in parts if part], block.sampled_lengths)
    block = replace(block, rollout_logprobs=old + 0.25).with_columns(
        old_logprobs=old, advantages=5 * block.columns["advantages"]
    )
    plans = [partition_step(part, dims, Packing(60)) for part in split_mini_batches(TrainBatch.of(block, groups), 2)]
    shares = [plan.replica_batches[dims.coords(rank).dp] for plan in plans]
    reports = actor.update(block, shares, PPOClip(0.01, 0.01), [3e-3, 1e-3])
    mismatches = [report.maxima["mismatch_abs"] for report in reports if "mismatch_abs" in report.maxima]
    return (
        old,
        mismatches,
        {name: tensor.clone().numpy() for name, tensor in actor.export()} if actor.participates_in_export else {},
    )


@pytest.mark.extended_except("tp2 dp2 sp")
@pytest.mark.parametrize(
    "dims", [ParallelDims(), ParallelDims(pp=2), ParallelDims(cp=2), ParallelDims(tp=2, dp=2)], ids=str
)
def test_all_mini_batches_use_the_old_log_probabilities_of_the_weights_before_the_first(run_ranks, tmp_path, dims):
    make("dense", tmp_path)
    one = ParallelDims()
    old, mismatches, expected = run_ranks(one, two_mini_batches, tmp_path, one)[0]
    ranks = run_ranks(dims, two_mini_batches, tmp_path, dims)
    for name, tensor in expected.items():
        np.testing.assert_allclose(ranks[0][2][name], tensor, atol=2e-5, err_msg=name)
    for found, seen, _ in [(old, mismatches, None), *ranks]:
        np.testing.assert_allclose(found, old, atol=1e-5)
        np.testing.assert_allclose(seen, 0.25, atol=1e-5)  # the policy's own updates do not count


@pytest.mark.extended
def test_clipping_changes_the_updated_weights(run_ranks, tmp_path):
    """Without the old log-probabilities, every ratio would be 1 and no token would be clipped."""
    make("dense", tmp_path)
    one = ParallelDims()
    clipped, free = (run_ranks(one, second_step_clips, tmp_path, one, given)[0] for given in (True, False))
    assert clipped > 0 and free == 0


def second_step_clips(rank: int, path, dims: ParallelDims, given: bool) -> float:
    """Return the fraction of tokens that a second step on the same rows clips."""
    block, groups = groups_of_responses()
    actor = make_actor(path, dims)
    (share,) = partition_step(TrainBatch.of(block, groups), dims, Packing(1000)).replica_batches
    if given:
        block = block.with_columns(old_logprobs=torch.cat(actor.compute_logprobs(block, share)).numpy())
    return actor.update(block, [share, share], PPOClip(0.01, 0.01), [3e-3, 1e-3])[1].sums["loss/clip_fraction"]


def updated_twice(rank: int, path, dims: ParallelDims):
    """Return (norms of the gradients, exported weights) after two optimizer steps on the same rows."""
    actor, block = make_actor(path, dims), ragged_block(40)
    share = share_of(block, dims, 40, rank)
    reports = actor.update(block, [share, share], CrossEntropy(), [1e-3, 1e-3])
    norms = [report.maxima["optim/grad_norm"] for report in reports]
    return norms, {n: t.clone().numpy() for n, t in actor.export()} if actor.participates_in_export else {}


@pytest.mark.extended_except("pp2 dp2")
@pytest.mark.parametrize(
    "dims", [ParallelDims(**d) for d in (dict(pp=2, dp=2), dict(pp=2, cp=2), dict(pp=2, vpp=2, dp=2))], ids=str
)
def test_both_copies_of_a_tied_embedding_get_the_whole_gradient(run_ranks, tmp_path, dims):
    """Each data-parallel rank updates the same part of the copies on the first and on the last pipeline stage."""
    make("tied", tmp_path)
    one = ParallelDims()
    expected, weights = run_ranks(one, updated_twice, tmp_path, one)[0]
    ranks = run_ranks(dims, updated_twice, tmp_path, dims)
    for norms, _ in ranks:
        np.testing.assert_allclose(norms, expected, rtol=1e-4)
    for name, tensor in weights.items():
        np.testing.assert_allclose(ranks[0][1][name], tensor, atol=2e-4, err_msg=name)
