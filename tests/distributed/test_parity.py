"""Parity of layouts: log-probabilities, loss, gradients and updated weights equal those of a single process."""

from dataclasses import replace

import numpy as np
import pytest
from models_for_layouts import groups_of_responses, make

from models.architecture import ModelSpec
from mrl.algorithms.losses import PPOClip, ValueLoss
from mrl.algorithms.objective import AGGREGATIONS, TokenWeighting
from mrl.core.types import TrainBatch
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, merge_replica_batches, partition_step
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

LR = 1e-4
EPS = 1e-6  # Adam's first step divides each gradient by its magnitude: without eps, round-off would become a full step
ONE = ParallelDims()
LOSS = PPOClip(clip_low=0.99, clip_high=50.0)  # wide clipping range: nearly all tokens keep their gradient


def layouts(*texts: str) -> list[ParallelDims]:
    """Parse "tp2 pp2" to ParallelDims(tp=2, pp=2); "sp0" turns sequence parallelism off."""
    found = []
    for text in texts:
        sizes = {part.rstrip("0123456789"): int(part.lstrip("abcdefghijklmnopqrstuvwxyz")) for part in text.split()}
        if "sp" in sizes:
            sizes["sp"] = bool(sizes["sp"])
        found.append(ParallelDims(**sizes))
    return found


DENSE = layouts(
    *("tp2", "tp2 sp0", "pp2", "pp4", "pp2 vpp2", "dp2", "dp3", "cp2", "cp4"),
    *("tp2 pp2", "tp2 pp2 vpp2", "tp2 sp0 pp2", "tp2 cp2", "tp2 dp2", "pp2 cp2", "pp2 dp2", "cp2 dp2", "pp2 vpp2 dp2"),
    *("tp2 pp2 cp2", "tp2 pp2 dp2", "tp2 cp2 dp2", "pp2 cp2 dp2", "tp2 pp2 vpp2 cp2"),
)
MOE = layouts(
    *("tp2", "pp2", "cp2", "dp2", "dp2 ep2", "dp4 ep4", "tp2 etp2", "tp2 ep2 etp1", "dp2 etp2", "cp2 ep2"),
    *("tp2 dp2 ep2", "tp2 dp2 ep4 etp1", "tp2 dp2 ep2 etp1", "pp2 dp2 ep2", "pp2 vpp2 dp2 ep2", "tp2 pp2 ep2 etp1"),
    *("tp2 pp2 dp2 ep2", "dp8 ep2 etp2", "tp2 cp2 dp2 ep2", "pp2 cp2 ep2"),
)
CRITIC = layouts("tp2", "tp2 sp0", "pp2", "cp2", "dp2", "tp2 pp2", "tp2 pp2 cp2")


def trace(rank: int, path, dims: ParallelDims, critic: bool, options: dict):
    from mrl.workers.actor_critic import MegatronActor, MegatronCritic
    from mrl.workers.parity_trace import trace_step

    block, groups = groups_of_responses()
    if options.get("routed"):
        block = replace(block, routed_experts=random_experts(block))
    batch = TrainBatch.of(block, groups)
    packing = Packing(options.get("max_tokens", 60), options.get("share_prompts", True), CostModel(1.0, 0.01))
    weighting = TokenWeighting(AGGREGATIONS[options.get("aggregation", "token_mean")])
    step = partition_step(batch, options.get("packs_of", dims), packing, weighting)
    share = merge_replica_batches(step) if "packs_of" in options else step.replica_batches[dims.coords(rank).dp]
    spec = ModelSpec(
        str(path),
        dims,
        options.get("dtype", "float32"),
        OptimConfig(lr=LR, eps=EPS),
        options.get("megatron", {}),
        share_prompts=packing.share_prompts,
        logprob_chunk=options.get("chunk", 7),
    )
    model = MegatronCritic(spec) if critic else MegatronActor(spec)
    return trace_step(model, block, share, ValueLoss() if critic else LOSS, LR, temperature=0.7)


def random_experts(block) -> np.ndarray:
    """Draw routing [S, layers, topk]: two of four experts per token, equal for the copies of a shared prompt."""
    position = np.arange(len(block.tokens)) - np.repeat(block.cu_seqlens[:-1], block.lengths)
    seeds = block.tokens[:, None] * 7 + position[:, None] * 3 + np.arange(4)
    first = seeds % 4
    return np.stack([first, (first + 1 + seeds % 3) % 4], axis=-1).astype(np.int16)


@pytest.fixture(scope="session")
def traced(run_ranks, tmp_path_factory):
    """`traced(kind, dims, critic, **options)` runs one step of a tiny model under a layout, and caches the result."""
    from mrl.workers.trace_comparison import StepTrace

    paths, known = {}, {}

    def run(kind: str, dims: ParallelDims = ONE, critic: bool = False, **options):
        key = (kind, dims, critic, repr(sorted(options.items())))
        if kind not in paths:
            paths[kind] = tmp_path_factory.mktemp(kind)
            make(kind, paths[kind])
        if key not in known:
            known[key] = StepTrace.merge(run_ranks(dims, trace, paths[kind], dims, critic, options))
        return known[key]

    return run


def reference(traced, kind: str, critic: bool = False, **options):
    """Run the step in a single process, without shared prompts, in one pack."""
    return traced(kind, critic=critic, share_prompts=False, max_tokens=10_000, chunk=1000, **options)


def check(expected, found, dtype: str = "float32") -> None:
    from mrl.workers.trace_comparison import TOLERANCES, compare_traces

    assert len(found.outputs) == len(expected.outputs) > 0
    assert len(found.gradients) == len(expected.gradients) > 0
    assert len(found.updates) == len(found.weights) > 0 and len(found.outputs_after_step) == len(found.outputs)
    zero = [name for name, gradient in expected.gradients.items() if not gradient.any()]
    assert not zero, f"a gradient of zero proves nothing: {zero[:5]}"
    wrong = [d for d in compare_traces(expected, found, TOLERANCES[dtype]) if not d.within]
    assert not wrong, wrong[:5]


@pytest.mark.extended_except("tp2 pp2 cp2 sp")
@pytest.mark.parametrize("dims", DENSE, ids=str)
def test_a_dense_actor(traced, dims):
    check(reference(traced, "dense"), traced("dense", dims))


@pytest.mark.extended_except("pp2 vpp2 dp2 ep2")
@pytest.mark.parametrize("dims", MOE, ids=str)
def test_an_actor_with_experts(traced, dims):
    check(reference(traced, "moe"), traced("moe", dims))


@pytest.mark.extended
def test_replicas_that_share_a_copy_of_the_experts_run_equally_many_micro_batches(traced):
    """Ranks (0, 1), (2, 3) and (4, 5) hold one copy of the experts each; ranks 0 to 2 are one replica, 3 to 5 another."""
    dims = ParallelDims(
        cp=3, dp=2, ep=2
    )  # the replicas have 8 and 7 packs of 20 tokens: with different numbers of micro-batches, ranks would wait forever
    check(reference(traced, "moe"), traced("moe", dims, max_tokens=20))


@pytest.mark.extended
@pytest.mark.parametrize("dims", CRITIC, ids=str)
def test_a_critic(traced, dims):
    check(reference(traced, "dense", critic=True), traced("dense", dims, critic=True))


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("tp2 dp2 ep2", "pp2 cp2"), ids=str)
def test_a_critic_with_experts(traced, dims):
    check(reference(traced, "moe", critic=True), traced("moe", dims, critic=True))


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("pp2", "tp2", "tp2 pp2", "pp2 vpp2 dp2"), ids=str)
def test_tied_embeddings(traced, dims):
    check(reference(traced, "tied"), traced("tied", dims))


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("tp2", "cp2", "tp2 ep2 etp1", "pp2 dp2 ep2"), ids=str)
def test_mixtral(traced, dims):
    check(reference(traced, "mixtral"), traced("mixtral", dims))


SINKS = layouts(
    *("tp2", "pp2", "cp2", "pp2 vpp2", "dp2 ep2", "dp2 etp2", "tp2 ep2 etp1", "tp2 etp1", "tp2 cp2", "tp2 dp2 ep2")
)


@pytest.mark.extended
@pytest.mark.parametrize("dims", SINKS, ids=str)
def test_sinks_and_biased_experts(traced, dims):
    check(reference(traced, "gpt_oss"), traced("gpt_oss", dims))


FUSED_OR_PLAIN = layouts("tp2", "tp2 sp0", "pp2", "cp2")


@pytest.mark.extended
@pytest.mark.parametrize("dims", FUSED_OR_PLAIN, ids=str)
@pytest.mark.parametrize("kind", ["mistral", "phi", "seed"])
def test_mistral_phi_and_seed_oss(traced, kind, dims):
    check(reference(traced, kind), traced(kind, dims))


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("tp2", "pp2", "cp2", "tp2 sp0 pp2"), ids=str)
@pytest.mark.parametrize("kind", ["glm_dense", "ministral", "smollm"])
def test_derived_families(traced, kind, dims):
    check(reference(traced, kind), traced(kind, dims))


POST_NORMS = layouts("tp2", "tp2 sp0", "pp2", "cp2", "pp2 vpp2", "tp2 cp2")


@pytest.mark.extended
@pytest.mark.parametrize("dims", POST_NORMS, ids=str)
@pytest.mark.parametrize("kind", ["olmo2", "olmo3", "gemma"])
def test_norms_of_whole_projections_and_windows(traced, kind, dims):
    check(reference(traced, kind), traced(kind, dims))


SIGMOID_ROUTED_MOE = layouts("tp2", "pp2", "cp2", "dp2 ep2", "tp2 ep2 etp1")


@pytest.mark.extended
@pytest.mark.parametrize("dims", SIGMOID_ROUTED_MOE, ids=str)
@pytest.mark.parametrize("kind", ["glm", "deepseek", "minimax"])
def test_sigmoid_and_shared_experts(traced, kind, dims):
    check(reference(traced, kind), traced(kind, dims))


PACKINGS = (dict(max_tokens=10_000), dict(max_tokens=30), dict(share_prompts=False, max_tokens=30))
SPARSE = layouts("tp2", "pp2", "cp2", "dp2 ep2", "tp2 ep2 etp1", "tp2 cp2", "tp2 pp2 cp2")


@pytest.mark.extended
@pytest.mark.parametrize("dims", SPARSE, ids=str)
@pytest.mark.parametrize("kind", ["sparse", "shared_sparse"])
def test_sparse_attention(traced, kind, dims):
    check(reference(traced, kind), traced(kind, dims))


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["sparse", "shared_sparse"])
def test_sparse_attention_with_shared_prompts_and_recomputation(traced, kind):
    expected = reference(traced, kind)
    for options in PACKINGS:
        check(expected, traced(kind, **options))
    for megatron in (RECOMPUTE, dict(recompute_granularity="selective", recompute_modules=["core_attn"])):
        check(expected, traced(kind, megatron=megatron))
    if kind == "shared_sparse":
        check(expected, traced(kind, ParallelDims(pp=2), megatron=RECOMPUTE))


RECURRENT = layouts("tp2", "tp2 sp0", "pp2", "pp2 vpp2", "cp2", "cp3", "tp2 cp2", "dp2", "tp2 pp2 cp2")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "dims"),
    [("recurrent", dims) for dims in RECURRENT]
    + [("recurrent_biased", dims) for dims in layouts("tp2", "cp2")]
    + [("recurrent_moe", dims) for dims in layouts("tp2", "pp2", "cp2", "dp2 ep2", "tp2 ep2 etp1")],
    ids=str,
)
def test_gated_delta_nets(traced, kind, dims):
    check(reference(traced, kind), traced(kind, dims))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "dims"),
    [("mamba", dims) for dims in RECURRENT]
    + [("mamba_moe", dims) for dims in layouts("tp2", "pp2", "cp2", "dp2 ep2", "tp2 ep2 etp1", "pp2 vpp2 dp2 ep2")],
    ids=str,
)
def test_mamba_2(traced, kind, dims):
    check(reference(traced, kind), traced(kind, dims))


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["recurrent", "recurrent_moe", "mamba", "mamba_moe"])
def test_responses_continue_the_state_of_a_shared_prompt(traced, kind):
    expected = reference(traced, kind)
    for options in PACKINGS:
        check(expected, traced(kind, **options))
    check(expected, traced(kind, megatron=RECOMPUTE))


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("tp2", "cp2"), ids=str)
@pytest.mark.parametrize("kind", ["recurrent", "mamba"])
def test_recurrences_in_bfloat16(traced, kind, dims):
    expected, found = reference(traced, kind, dtype="bfloat16"), traced(kind, dims, dtype="bfloat16")
    check(expected, found, "bfloat16")


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("tp2", "pp2"), ids=str)
@pytest.mark.parametrize("kind", ["recurrent", "mamba"])
def test_a_critic_with_a_recurrence(traced, kind, dims):
    check(reference(traced, kind, critic=True), traced(kind, dims, critic=True))


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("cp2", "dp2 ep2", "tp2 pp2"), ids=str)
def test_updated_correction_biases(traced, dims):
    """The biases depend on token counts per pack, so the single process uses the same packs."""
    moving = dict(moe_router_bias_update_rate=0.1)
    expected = traced("glm", megatron=moving, packs_of=dims)
    still = reference(traced, "glm").weights
    moves = [expected.weights[name] - still[name] for name in still if name.endswith("e_score_correction_bias")]
    assert len(moves) == 3 and all(move.any() for move in moves)
    check(expected, traced("glm", dims, megatron=moving))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "dims"),
    [("biased", dims) for dims in layouts("tp2", "pp2", "tp2 sp0 cp2")]
    + [("qkv_biased", dims) for dims in layouts("tp2", "tp2 pp2", "cp2")],
    ids=str,
)
def test_biases(traced, kind, dims):
    check(reference(traced, kind), traced(kind, dims))


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_shared_prompts_and_micro_batches_do_not_change_the_result(traced, kind):
    expected = reference(traced, kind)
    for options in PACKINGS:
        check(expected, traced(kind, **options))


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("tp2 pp2", "dp2", "cp2"), ids=str)
def test_sequence_mean(traced, dims):
    expected = reference(traced, "dense", aggregation="sequence_mean")
    check(expected, traced("dense", dims, aggregation="sequence_mean"))


RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("tp2 pp2", "pp2 vpp2", "cp2"), ids=str)
def test_activation_recomputation(traced, dims):
    check(reference(traced, "dense"), traced("dense", dims, megatron=RECOMPUTE))


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("tp2 ep2 etp1", "cp2 ep2"), ids=str)
def test_the_allgather_dispatcher(traced, dims):
    check(reference(traced, "moe"), traced("moe", dims, megatron=dict(moe_token_dispatcher_type="allgather")))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "dims"),
    [("dense", dims) for dims in layouts("tp2", "pp2", "cp2", "dp2", "tp2 pp2 cp2")]
    + [("moe", dims) for dims in layouts("tp2 ep2 etp1", "dp2 ep2", "pp2 vpp2")],
    ids=str,
)
def test_bfloat16_with_float32_master_weights(traced, kind, dims):
    """Between layouts, gradients differ (by norm) less than 1.5 times as much as between bfloat16 and float32 in one process."""
    expected, found = reference(traced, kind, dtype="bfloat16"), traced(kind, dims, dtype="bfloat16")
    check(expected, found, "bfloat16")
    full = reference(traced, kind)
    assert distance(found.gradients, expected.gradients) < 1.5 * distance(expected.gradients, full.gradients)


def distance(mine, other) -> float:
    """Return the Euclidean norm of the differences of all tensors."""
    return float(np.sqrt(sum(((mine[name] - other[name]) ** 2).sum(dtype=np.float64) for name in other)))


@pytest.mark.extended
@pytest.mark.parametrize("dims", [ONE, *layouts("tp2 pp2", "cp2 ep2", "pp2 vpp2 dp2 ep2")], ids=str)
@pytest.mark.parametrize("megatron", [{}, RECOMPUTE], ids=["kept", "recomputed"])
def test_replayed_routing(traced, dims, megatron):
    """Random routing is replayed in forward, backward and recomputation under every layout."""
    replay = dict(megatron=dict(moe_enable_routing_replay=True), routed=True)
    expected = reference(traced, "moe", **replay)
    assert abs(expected.grad_norm - reference(traced, "moe").grad_norm) > 1e-2, "the router chose by itself"
    check(expected, traced("moe", dims, megatron=replay["megatron"] | megatron, routed=True))


@pytest.mark.extended
@pytest.mark.parametrize("dims", layouts("tp2", "pp2", "cp2", "tp2 cp2", "dp2", "dp2 ep2", "pp2 dp2"), ids=str)
def test_balancing_losses(traced, dims):
    """The losses depend on the packs, but not on the ranks that hold the packs. So the single process uses the same packs."""
    balance = dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1, moe_z_loss_coeff=1e-3)
    expected = traced("moe", megatron=balance, packs_of=dims)
    assert abs(expected.grad_norm - traced("moe", packs_of=dims).grad_norm) > 1e-4, "the balancing loss has no effect"
    check(expected, traced("moe", dims, megatron=balance))
