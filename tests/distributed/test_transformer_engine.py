"""The modules and the optimizer of Transformer Engine give the results of torch's modules. Stand-ins replace their kernels.

The ranks of `te_ranks` choose the same classes as on a GPU with Transformer Engine. See tests/te_process.py.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from models_for_layouts import make
from safetensors.numpy import load_file
from te_process import missing_python, run_forked, te_process
from test_checkpoints import load_and_continue, load_and_go_on, save_and_continue, save_and_go_on, with_adam
from test_gpu_branches import waits_of_an_update
from test_gradient_reduction import compare_modes
from test_layouts import export
from test_offload import train_awake, train_between_sleeps
from test_parity import DENSE, MOE, layouts, trace

from models.architecture import ModelSpec
from mrl.workers.trace_comparison import TOLERANCES as PARITY
from mrl.workers.trace_comparison import StepTrace, compare_traces
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

pytestmark = [pytest.mark.extended, pytest.mark.skipif(bool(missing_python()), reason=missing_python())]
ONE = ParallelDims()
TOLERANCES = replace(PARITY["float32"], outputs=1e-5, scalars=1e-5, gradients=1e-5, weights=1e-5)
ON_GPU = {"use_cpu_initialization": False}  # Megatron's config of a GPU run
STEPS = [
    *[(kind, d) for kind in ("dense", "qkv_biased", "biased") for d in (ONE, *DENSE)],
    *[(kind, d) for kind in ("moe", "mixtral", "glm", "deepseek") for d in (ONE, *MOE)],
    *[(kind, d) for kind in ("sparse", "shared_sparse") for d in (ONE, *layouts("tp2", "tp2 ep2 etp1"))],
    *[("gpt_oss", d) for d in (ONE, *layouts("tp2", "cp2", "dp2 ep2", "dp2 etp2", "tp2 ep2 etp1"))],
    *[("tied", d) for d in layouts("pp2", "tp2")],
    *[("critic", d) for d in layouts("tp2")],
]


@pytest.fixture(scope="module")
def te_ranks():
    """`te_ranks(dims, fn, *args)` -> [fn(rank, *args) of each rank], computed with Transformer Engine's modules."""
    with te_process() as process:
        yield lambda dims, fn, *args: process.submit(run_forked, dims, fn, *args).result()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`models(kind)` -> folder with the tiny model of this kind."""
    folders = {}

    def model(kind: str):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            make("dense" if kind == "critic" else kind, folders[kind])
        return folders[kind]

    return model


def choices(rank: int, path, share_prompts: bool) -> tuple[dict[str, bool], set[str], str]:
    """Return the switches in Megatron's configs, the names of Transformer Engine's modules, and the optimizer's class."""
    from mrl.workers.actor_critic import MegatronActor

    spec = ModelSpec(str(path), ONE, "bfloat16", OptimConfig(), {}, share_prompts=share_prompts)
    actor = MegatronActor(spec)
    model = actor.chunks[0].module
    settings = vars(model.config) | dict(overlap_grad_reduce=actor.chunks[0].ddp_config.overlap_grad_reduce)
    switches = {name: value for name, value in settings.items() if isinstance(value, bool)}
    classes = {type(module) for module in model.modules()}
    found = {c.__name__ for c in classes if "transformer_engine" in c.__module__}
    optimizer = type(actor.optimizer.chained_optimizers[0].optimizer)
    return switches, found, f"{optimizer.__module__}.{optimizer.__name__}"


MODULES = {
    "dense": {"RMSNorm", "TERowParallelLinear", "TELayerNormColumnParallelLinear"},
    "moe": {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"},
    "deepseek": {"TEColumnParallelLinear"},
}
MODULES["moe"] |= MODULES["dense"]
MODULES["deepseek"] |= MODULES["moe"]


@pytest.mark.parametrize("kind", MODULES)
def test_a_gpu_run_takes_these_modules_fusions_and_this_optimizer(te_ranks, models, kind):
    for share_prompts in (True, False):
        ((switches, modules, optimizer),) = te_ranks(ONE, choices, models(kind), share_prompts)
        attention = {"TEDotProductAttention"} if not share_prompts and kind != "deepseek" else set()
        assert {name for name in modules if name.startswith(("TE", "RMSNorm"))} == MODULES[kind] | attention
        fusions = ("bias_activation_fusion", "bias_dropout_fusion", "moe_grouped_gemm")
        assert {name: switches[name] for name in fusions} == dict.fromkeys(fusions, True) | {
            "moe_grouped_gemm": kind != "dense"
        }
        assert switches["gradient_accumulation_fusion"] and switches["overlap_grad_reduce"]
        assert switches["apply_rope_fusion"] == (kind != "deepseek")
        assert optimizer == "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"


@pytest.fixture(scope="module")
def differences(run_ranks, te_ranks, models):
    """`differences(kind, dims, **options)` -> differences between one step of Transformer Engine's modules on the ranks of
    `dims`, and the same step of torch's modules in one process."""

    def step(ranks, dims: ParallelDims, kind: str, options: dict) -> StepTrace:
        return StepTrace.merge(ranks(dims, trace, models(kind), dims, kind == "critic", options))

    @cache
    def of_torch(kind: str, options: tuple) -> StepTrace:
        return step(run_ranks, ONE, kind, dict(options))

    def compare(kind: str, dims: ParallelDims, **options) -> list:
        expected = of_torch(kind, tuple(options.items()))
        found = step(te_ranks, dims, kind, options | {"megatron": ON_GPU})
        assert found.gradients.keys() == expected.gradients.keys() and found.weights.keys() == expected.weights.keys()
        assert all(gradient.any() for gradient in expected.gradients.values())
        return [difference for difference in compare_traces(expected, found, TOLERANCES) if not difference.within][:5]

    return compare


@pytest.mark.parametrize(("kind", "dims"), STEPS, ids=str)
def test_a_step_computes_what_torch_modules_compute(differences, kind, dims):
    """Building the model also checks the names and the shards of all parameters against the family's table of weights."""
    assert differences(kind, dims) == []


@pytest.mark.parametrize(("kind", "dims"), [("dense", ONE), *[("moe", d) for d in layouts("tp2 ep2 etp1")]], ids=str)
def test_without_shared_prompts_transformer_engines_attention_computes_the_same(differences, kind, dims):
    assert differences(kind, dims, share_prompts=False) == []


@pytest.mark.parametrize(
    ("kind", "share_prompts"),
    [("dense", True), ("dense", False), ("biased", True), ("moe", True), ("glm", True), ("deepseek", True)],
    ids=str,
)
def test_a_forward_and_backward_pass_never_waits_for_the_device(te_ranks, models, kind, share_prompts):
    (waits,) = te_ranks(ONE, waits_of_an_update, models(kind), False, ON_GPU, share_prompts)
    assert waits == []


@pytest.mark.parametrize(
    ("kind", "dims"),
    [("dense", ParallelDims(dp=2)), ("moe", ParallelDims(tp=2, dp=2, ep=2, etp=1)), ("glm", ParallelDims(dp=2, ep=2))],
    ids=str,
)
def test_a_reduction_during_the_backward_pass_changes_no_bit(te_ranks, models, kind, dims):
    """The matrices add their gradients to the buffers themselves, before the reductions start."""
    ranks = te_ranks(dims, compare_modes, kind, models(kind), dims, not dims.equal_micro_batch_counts)
    for norms, early, _ in ranks:
        np.testing.assert_allclose(norms["during"], norms["after"], rtol=1e-5)
        assert early[-1] > 0


@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        *[("dense", d) for d in layouts("tp2 dp2")],
        *[("qkv_biased", d) for d in layouts("tp2")],
        *[("biased", d) for d in layouts("tp2 pp2")],
        *[("moe", d) for d in layouts("tp2 ep2 etp1")],
        *[("mixtral", d) for d in layouts("dp2 ep2")],
        *[("gpt_oss", d) for d in layouts("tp2 ep2 etp1")],
        *[("glm", d) for d in layouts("dp2 ep2")],
        *[("deepseek", d) for d in layouts("tp2")],
    ],
    ids=str,
)
def test_an_export_is_bit_equal_to_the_loaded_weights(te_ranks, models, tmp_path, kind, dims):
    te_ranks(dims, export, models(kind), tmp_path / "hf", dims)
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", models(kind)))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize(
    ("kind", "dims", "dtype"),
    [
        ("dense", ParallelDims(tp=2), "float32"),
        ("moe", ParallelDims(dp=2, ep=2), "bfloat16"),
        ("glm", ParallelDims(tp=2, ep=2, etp=1), "float32"),  # the routers of glm and deepseek have a buffer
        ("deepseek", ParallelDims(dp=2, ep=2), "bfloat16"),
    ],
    ids=str,
)
def test_training_with_offloading_between_steps_is_bit_exact(te_ranks, models, kind, dims, dtype):
    expected = te_ranks(dims, train_awake, models(kind), dims, dtype)
    assert te_ranks(dims, train_between_sleeps, models(kind), dims, dtype) == expected


@pytest.mark.parametrize(
    ("kind", "dims", "asynchronous"),
    [
        ("dense", ParallelDims(tp=2), True),
        ("qkv_biased", ParallelDims(pp=2), False),
        ("biased", ParallelDims(tp=2), True),
        ("moe", ParallelDims(dp=2, ep=2), False),
        ("mixtral", ParallelDims(tp=2, ep=2, etp=1), True),
        ("glm", ParallelDims(dp=2, ep=2), False),
    ],
    ids=str,
)
def test_a_checkpoint_continues_bit_exactly(te_ranks, models, tmp_path, kind, dims, asynchronous):
    folder = tmp_path / "checkpoint"
    expected = te_ranks(dims, save_and_go_on, models(kind), folder, dims, 1, asynchronous)
    assert te_ranks(dims, load_and_go_on, models(kind), folder, dims) == expected


@pytest.mark.parametrize("torch_side", ["saves, fused", "loads, fused", "saves, torch", "loads, torch"])
@pytest.mark.parametrize(
    ("kind", "dims"),
    [("dense", layouts("tp2", "pp2")), ("moe", layouts("dp2 ep2", "tp2 ep2 etp1")), ("deepseek", [ONE, ONE])],
    ids=lambda value: " to ".join(map(str, value)) if isinstance(value, list) else value,
)
def test_torch_modules_continue_a_checkpoint_of_transformer_engine_and_vice_versa(
    run_ranks, te_ranks, models, tmp_path, kind, dims, torch_side
):
    """The side with torch's modules uses fused Adam, or torch's AdamW as on a GPU without Transformer Engine and Apex."""
    role, adam = torch_side.split(", ")

    def torch_ranks(dims, function, *args):
        return run_ranks(dims, with_adam, adam, function, *args)

    before, after = dims
    save, load = (torch_ranks, te_ranks) if role == "saves" else (te_ranks, torch_ranks)
    path, folder = models(kind), tmp_path / "checkpoint"
    expected = save(before, save_and_continue, kind, path, folder, before)
    found = load(after, load_and_continue, kind, path, folder, before, after)
    losses, its_losses = (np.sum([losses for losses, _ in ranks], 0) for ranks in (expected, found))
    np.testing.assert_allclose(its_losses, losses, atol=2e-5, rtol=0)
    for name, tensor in expected[0][1].items():
        np.testing.assert_allclose(found[0][1][name], tensor, atol=2e-5, err_msg=name)
