"""Traces of hidden states agree between layouts, and an error in one layer is located in that layer."""

from functools import partial

import numpy as np
import pytest
import torch
from models_for_layouts import groups_of_responses, make

from models.architecture import ModelSpec
from mrl.algorithms.losses import PPOClip
from mrl.core.types import TrainBatch
from mrl.diagnostics.layout_comparison import LOGPROBS, TokenLocation, compare_step_traces
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.trace_comparison import TOLERANCES, StepTrace, compare_gradients, compare_sketches, row_and_position
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

pytestmark = pytest.mark.extended

ONE = ParallelDims()
LAYER_NAMES = ["embedding", "layer 0", "layer 1", "layer 2", "layer 3", "final norm"]


def layers(rank: int, path, dims: ParallelDims, harm=None, dtype: str = "float32") -> StepTrace:
    from mrl.workers.actor_critic import MegatronActor
    from mrl.workers.parity_trace import trace_layers

    block, numbers = groups_of_responses()
    packing = Packing(60) if dims.world_size > 1 else Packing(10_000, share_prompts=False)
    share = partition_step(TrainBatch.of(block, numbers), dims, packing).replica_batches[dims.coords(rank).dp]
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
    layers = compare_sketches(expected.sketches, found.sketches, TOLERANCES[dtype].layers)
    assert [layer.name for layer in layers] == LAYER_NAMES
    return layers


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
def test_all_layers_agree_between_layouts(traced, kind, dims):
    block, _ = groups_of_responses()
    expected, found = traced(kind), traced(kind, dims)
    for layer in differences(expected, found):
        assert layer.finite and layer.within, layer
        assert 0 < layer.compared < len(block.tokens), (
            "tokens of shared prompts are computed once; all others are compared"
        )
    (embedding, *_), sizes = found.sketches, [len(sketch.tokens) for sketch in found.sketches]
    assert len(np.unique(embedding.tokens)) == sizes[0] and len(set(sizes)) == 1, (
        "each token occurs once at every depth"
    )
    assert all(d.within for d in compare_gradients(expected, found, TOLERANCES["float32"]))


def scale_an_mlp(rank: int, actor) -> None:
    """Change the shard of layer 2 on the second tensor-parallel rank by one percent."""
    if rank == 1:
        with torch.no_grad():
            actor.bridge.params["decoder.layers.2.mlp.linear_fc2.weight"].mul_(1.01)


def plant_nan(rank: int, actor) -> None:
    """Set the embedding of token 7 to NaN, which reaches every token that attends to it."""
    with torch.no_grad():
        actor.bridge.params["embedding.word_embeddings.weight"][7] = float("nan")


def test_the_first_differing_layer_is_the_changed_one(traced):
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


def test_bfloat16_round_off_is_not_reported(traced):
    block, _ = groups_of_responses()
    found = compare_step_traces(
        block, traced("dense", dtype="bfloat16"), traced("dense", ParallelDims(tp=2), dtype="bfloat16"), "bfloat16"
    )
    assert found.equal, found.layers
    assert max(layer.largest for layer in found.layers) > 1e-3, "it was computed in bfloat16"


def test_a_nan_is_located_at_its_token(traced):
    block, _ = groups_of_responses()
    found = compare_step_traces(block, traced("dense"), traced("dense", harm=plant_nan), "float32")
    assert found.first_nonfinite == TokenLocation(
        "embedding", *row_and_position(block, int(np.flatnonzero(block.tokens == 7)[0])), 7, True
    )
    assert "model.embed_tokens.weight" in found.nonfinite_gradients and np.isnan(found.grad_norms[0])


def replayed_experts(
    rank: int, path
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray], int]:
    """Trace a model with its own routing, and with the routing of an engine that has shifted all experts of layer 0 by one.

    The engine chooses one expert too few for token 3.
    """
    from mrl.workers.actor_critic import MegatronActor
    from mrl.workers.forward_trace import trace_forward, trainer_weights

    block, numbers = groups_of_responses()
    batch = partition_step(TrainBatch.of(block, numbers), ONE, Packing(60, share_prompts=False)).replica_batches[0]
    assert len(batch.micro_batches) > 1
    actor = MegatronActor(ModelSpec(str(path), ONE, "float32", None, {}))
    own, _ = trace_forward(actor, block, batch, 1.0)
    engine = np.roll(own["layers.0.routing"], 1, axis=1)
    engine[3, engine[3].argmax()] = 0.0
    replayed, _ = trace_forward(actor, block, batch, 1.0, {"layers.0.routing": engine})
    return own, replayed | {"engine": engine}, trainer_weights(actor, ("model.layers.0.mlp.",), ""), len(block.tokens)


def test_the_experts_of_a_trace_compute_with_the_routing_weights_of_the_engine(run_ranks, tmp_path):
    make("moe", tmp_path)
    ((own, replayed, weights, num_tokens),) = run_ranks(ONE, replayed_experts, tmp_path)
    np.testing.assert_array_equal(replayed["layers.0.routing"], own["layers.0.routing"])
    used = replayed["engine"].copy()
    used[3] = own["layers.0.routing"][3]  # the router's own weights, because the engine chose another number of experts
    hidden, expected = own["layers.0.mlp_norm"].astype(np.float64), 0.0
    for expert in range(used.shape[1]):
        gate, up, down = (
            weights[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"].astype(np.float64)
            for name in ("gate", "up", "down")
        )
        gated = hidden @ gate.T
        expected = expected + used[:, [expert]] * ((gated / (1 + np.exp(-gated)) * (hidden @ up.T)) @ down.T)
    assert len(expected) == num_tokens
    np.testing.assert_allclose(replayed["layers.0.routed_experts"], expected, rtol=1e-4, atol=1e-5)
    changed = np.abs(replayed["layers.0.routed_experts"] - own["layers.0.routed_experts"]).max(1)
    assert changed[3] == 0 and (np.delete(changed, 3) > 0).all()


def steps_on_nan(rank: int, path, dims: ParallelDims) -> tuple[int, bool]:
    """Return (failed mini-batch, whether all weights of this rank have their old values afterwards)."""
    from mrl.core.run_errors import NonFiniteGradientError
    from mrl.workers.actor_critic import MegatronActor

    block, numbers = groups_of_responses()
    share = partition_step(TrainBatch.of(block, numbers), dims, Packing(60)).replica_batches[dims.coords(rank).dp]
    actor = MegatronActor(ModelSpec(str(path), dims, "bfloat16", OptimConfig(eps=1e-6), {}))
    advantages = block.columns["advantages"].copy()
    advantages[0] = np.inf if rank == dims.world_size - 1 else advantages[0]  # on one rank only; all ranks must stop
    before = {name: param.detach().clone() for name, param in actor.bridge.params.items()}
    with pytest.raises(NonFiniteGradientError, match="mini-batch 0 is not finite") as caught:
        actor.update(block.with_columns(advantages=advantages), [share, share], PPOClip(), [1e-2, 1e-2])
    # The first stage, which computes no loss, raises the same message.
    message = str(caught.value)
    assert "The loss (sft.objective: PPOClip) of at least" in message
    assert message.endswith("although the model's output is finite.")
    same = all(torch.equal(param, before[name]) for name, param in actor.bridge.params.items())
    return caught.value.mini_batch, same


def test_a_non_finite_gradient_leaves_the_weights_unchanged(run_ranks, tmp_path):
    make("dense", tmp_path)
    dims = ParallelDims(pp=2)
    assert run_ranks(dims, steps_on_nan, tmp_path, dims) == [(0, True)] * 2


def weights_of_a_checkpoint(rank: int, path, folder, dims: ParallelDims, take: bool) -> dict[str, np.ndarray]:
    """Train and save, or (`take`) load the weights and take a step with learning rate 0. Returns the weights afterwards."""
    from mrl.workers.actor_critic import MegatronActor

    block, numbers = groups_of_responses()
    share = partition_step(TrainBatch.of(block, numbers), dims, Packing(60)).replica_batches[dims.coords(rank).dp]
    actor = MegatronActor(ModelSpec(str(path), dims, "bfloat16", OptimConfig(eps=1e-6), {}))
    if take:
        actor.load_weights(folder)
    actor.update(block, [share], PPOClip(), [0.0 if take else 1e-2])
    if not take:
        actor.save(folder)
    return (
        {name: tensor.float().numpy().copy() for name, tensor in actor.export()} if actor.participates_in_export else {}
    )


def test_loaded_weights_also_replace_the_master_weights_of_the_optimizer(run_ranks, tmp_path):
    make("dense", tmp_path / "model")
    before, after, folder = ParallelDims(tp=2), ParallelDims(dp=2), tmp_path / "checkpoint"
    expected = run_ranks(before, weights_of_a_checkpoint, tmp_path / "model", folder, before, False)[0]
    found = run_ranks(after, weights_of_a_checkpoint, tmp_path / "model", folder, after, True)[0]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
