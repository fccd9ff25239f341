"""Hidden states are found again under every layout, and a mistake in one layer is seen at that layer."""

from functools import partial

import numpy as np
import pytest
import torch
from models_for_layouts import groups_of_responses, make

from mrl.algorithms.losses import PPOClip
from mrl.core.types import TrainBatch
from mrl.diagnostics.replay import LOGPROBS, TokenLocation, compare_step_traces
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.model_spec import ModelSpec
from mrl.workers.trace_comparison import TOLERANCES, StepTrace, compare_gradients, compare_sketches, row_and_position
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

pytestmark = pytest.mark.extended

ONE = ParallelDims()
PLACES = ["embedding", "layer 0", "layer 1", "layer 2", "layer 3", "final norm"]


def layers(rank: int, path, dims: ParallelDims, harm=None, dtype: str = "float32") -> StepTrace:
    from mrl.workers.actor import MegatronActor
    from mrl.workers.parity_trace import trace_layers

    block, numbers = groups_of_responses()
    packing = Packing(60) if dims.world_size > 1 else Packing(10_000, share_prompts=False)
    share = partition_step(TrainBatch.of(block, numbers), dims, packing, "token_mean").rank_batches[
        dims.coords(rank).dp
    ]
    actor = MegatronActor(ModelSpec(str(path), dims, dtype, OptimConfig(eps=1e-6), {}))
    if harm:
        harm(rank, actor)
    return trace_layers(actor, block, share, PPOClip(), temperature=0.7)


@pytest.fixture(scope="module")
def traced(run_ranks, tmp_path_factory):
    paths, known = {}, {}

    def run(kind: str, dims: ParallelDims = ONE, **options) -> StepTrace:
        key = (kind, dims, repr(options))
        if kind not in paths:
            paths[kind] = tmp_path_factory.mktemp(kind)
            make(kind, paths[kind])
        if key not in known:
            known[key] = StepTrace.merge(run_ranks(dims, partial(layers, **options), paths[kind], dims))
        return known[key]

    return run


def differences(expected: StepTrace, found: StepTrace, dtype: str = "float32"):
    places = compare_sketches(expected.sketches, found.sketches, TOLERANCES[dtype].layers)
    assert [place.name for place in places] == PLACES
    return places


@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        ("dense", ParallelDims(tp=2)),
        ("dense", ParallelDims(tp=2, sp=False, pp=2, vpp=2)),
        ("dense", ParallelDims(tp=2, cp=2)),
        ("moe", ParallelDims(dp=2, ep=2)),
    ],
    ids=str,
)
def test_no_layer_differs_between_layouts(traced, kind, dims):
    block, _ = groups_of_responses()
    expected, found = traced(kind), traced(kind, dims)
    for place in differences(expected, found):
        assert place.finite and place.within, place
        assert 0 < place.compared < len(block.tokens), "shared prompts are computed once, all else is compared"
    (embedding, *_), sizes = found.sketches, [len(sketch.tokens) for sketch in found.sketches]
    assert len(np.unique(embedding.tokens)) == sizes[0] and len(set(sizes)) == 1, "each token once at every place"
    assert all(d.within for d in compare_gradients(expected, found, TOLERANCES["float32"]))


def scale_an_mlp(rank: int, actor) -> None:
    """Layer 2's part of the second tensor-parallel rank is wrong by one percent."""
    if rank == 1:
        with torch.no_grad():
            actor.bridge.params["decoder.layers.2.mlp.linear_fc2.weight"].mul_(1.01)


def plant_nan(rank: int, actor) -> None:
    """One row of the embedding, the token 7, and with it all that sees this token, is no number."""
    with torch.no_grad():
        actor.bridge.params["embedding.word_embeddings.weight"][7] = float("nan")


def test_the_first_layer_that_differs_is_the_one_that_was_harmed(traced):
    block, _ = groups_of_responses()
    found = compare_step_traces(
        block, traced("dense"), traced("dense", ParallelDims(tp=2), harm=scale_an_mlp), "float32"
    )
    assert [p.name for p in found.layers if not p.within] == ["layer 2", "layer 3", "final norm", LOGPROBS]
    assert not found.equal and found.first_nonfinite is None and found.nonfinite_gradients == []
    first = found.first_different
    assert first and first.layer == "layer 2"
    row = block.tokens[block.cu_seqlens[first.row] : block.cu_seqlens[first.row + 1]]
    assert row[first.position] == first.token and first.in_prompt == (first.position < block.prompt_lengths[first.row])


def test_round_off_of_bfloat16_is_no_difference(traced):
    block, _ = groups_of_responses()
    found = compare_step_traces(
        block, traced("dense", dtype="bfloat16"), traced("dense", ParallelDims(tp=2), dtype="bfloat16"), "bfloat16"
    )
    assert found.equal, found.layers
    assert max(place.largest for place in found.layers) > 1e-3, "it was computed in bfloat16"


def test_a_nan_is_found_at_its_token(traced):
    block, _ = groups_of_responses()
    found = compare_step_traces(block, traced("dense"), traced("dense", harm=plant_nan), "float32")
    assert found.first_nonfinite == TokenLocation(
        "embedding", *row_and_position(block, int(np.flatnonzero(block.tokens == 7)[0])), 7, True
    )
    assert "model.embed_tokens.weight" in found.nonfinite_gradients and np.isnan(found.grad_norms[0])


def steps_on_nan(rank: int, path, dims: ParallelDims) -> tuple[int, bool]:
    """(mini-batch that failed, whether every weight of this rank is as it was before that)."""
    from mrl.core.run_errors import NonFiniteGradientError
    from mrl.workers.actor import MegatronActor

    block, numbers = groups_of_responses()
    share = partition_step(TrainBatch.of(block, numbers), dims, Packing(60), "token_mean").rank_batches[
        dims.coords(rank).dp
    ]
    actor = MegatronActor(ModelSpec(str(path), dims, "bfloat16", OptimConfig(eps=1e-6), {}))
    advantages = block.columns["advantages"].copy()
    advantages[0] = np.inf if rank == dims.world_size - 1 else advantages[0]  # on one rank; all must stop
    before = {name: param.detach().clone() for name, param in actor.bridge.params.items()}
    with pytest.raises(NonFiniteGradientError, match="mini-batch 0 is not finite") as caught:
        actor.update(block.with_columns(advantages=advantages), [share, share], PPOClip(), [1e-2, 1e-2])
    same = all(torch.equal(param, before[name]) for name, param in actor.bridge.params.items())
    return caught.value.mini_batch, same


def test_weights_stay_as_they_were_when_a_gradient_is_not_finite(run_ranks, tmp_path):
    make("dense", tmp_path)
    dims = ParallelDims(pp=2)
    assert run_ranks(dims, steps_on_nan, tmp_path, dims) == [(0, True)] * 2


def weights_of_a_checkpoint(rank: int, path, folder, dims: ParallelDims, take: bool) -> dict[str, np.ndarray]:
    """Whole weights after a step, which is saved; or of an actor that takes them from there and makes a step of size 0."""
    from mrl.workers.actor import MegatronActor

    block, numbers = groups_of_responses()
    share = partition_step(TrainBatch.of(block, numbers), dims, Packing(60), "token_mean").rank_batches[
        dims.coords(rank).dp
    ]
    actor = MegatronActor(ModelSpec(str(path), dims, "bfloat16", OptimConfig(eps=1e-6), {}))
    if take:
        actor.load_weights(folder)
    actor.update(block, [share], PPOClip(), [0.0 if take else 1e-2])
    if not take:
        actor.save(folder)
    return (
        {name: tensor.float().numpy().copy() for name, tensor in actor.export()} if actor.participates_in_export else {}
    )


def test_weights_are_taken_from_a_checkpoint_and_the_optimizer_starts_from_them(run_ranks, tmp_path):
    make("dense", tmp_path / "model")
    before, after, folder = ParallelDims(tp=2), ParallelDims(dp=2), tmp_path / "checkpoint"
    expected = run_ranks(before, weights_of_a_checkpoint, tmp_path / "model", folder, before, False)[0]
    found = run_ranks(after, weights_of_a_checkpoint, tmp_path / "model", folder, after, True)[0]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
