"""LoRA under every layout: gradients equal those of a dense model with the same low-rank change of its weights."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from models_for_layouts import groups_of_responses, make
from safetensors.torch import load_file, save_file

from models.architecture import ModelSpec
from models.conversion.hf_reader import HFWeights
from models.conversion.lora_mapping import can_have_adapter
from models.families import family_of
from models.hf_config import HFConfig
from mrl.algorithms.losses import PPOClip
from mrl.algorithms.objective import AGGREGATIONS, TokenWeighting
from mrl.core.types import TrainBatch
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, partition_step
from parallel.dims import ParallelDims
from parallel.trainer_config import LoraConfig, OptimConfig

LR, EPS = 1e-3, 1e-6
ONE = ParallelDims()
RANK, ALPHA = 3, 6.0
RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
LAYOUTS = [
    ONE,
    ParallelDims(tp=2),
    ParallelDims(tp=2, sp=False),
    ParallelDims(pp=2),
    ParallelDims(pp=4),
    ParallelDims(pp=2, vpp=2),
    ParallelDims(dp=2),
    ParallelDims(cp=2),
    ParallelDims(tp=2, pp=2),
    ParallelDims(tp=2, cp=2),
    ParallelDims(tp=2, sp=False, pp=2),
    ParallelDims(tp=2, dp=2),
    ParallelDims(pp=2, vpp=2, dp=2),
    ParallelDims(tp=2, pp=2, cp=2),
    ParallelDims(tp=2, pp=2, dp=2),
]


def linear_layers(folder, experts: bool = False) -> list[str]:
    """Return the Hugging Face names of the matrices in `folder` that can have adapters, with those of the routed experts."""
    config = HFConfig.load(folder)
    family = family_of(config)
    rows = family.param_mappings(family.read(config))
    return [name for row in rows if can_have_adapter(row, experts) for name in row.hf]


def peft_prefix(name: str) -> str:
    """Return the names of A and B in PEFT without their ends. `name`: Hugging Face name of the adapted matrix.

    The checkpoints of Nemotron-H have other names than the modules in transformers.
    """
    module = name.removesuffix("weight")
    return "base_model.model." + (
        "model." + module.removeprefix("backbone.") if name.startswith("backbone.") else module
    )


def rounded(tensor: torch.Tensor, digits: int) -> torch.Tensor:
    """Round a tensor to multiples of 2**-digits."""
    return (tensor * 2**digits).round() / 2**digits


def write_adapters(folder, model, experts: bool = False) -> None:
    """Write a PEFT folder with random matrices A and B for all linear layers of `model`.

    This also rounds the weights in `model`, and A and B have few digits, so that float32 represents the merged weights exactly.
    Otherwise, the merged model and the model with adapters would already differ before any computation.
    """
    generator, tensors = torch.Generator().manual_seed(3), {}
    save_file(
        {name: rounded(weight, 20) for name, weight in load_file(model / "model.safetensors").items()},
        model / "model.safetensors",
        {"format": "pt"},
    )
    weights = HFWeights(model)
    for name in linear_layers(model, experts):
        rows, columns = weights[name].shape
        prefix = peft_prefix(name)
        tensors[f"{prefix}lora_A.weight"] = rounded(torch.randn(RANK, columns, generator=generator) * columns**-0.5, 9)
        tensors[f"{prefix}lora_B.weight"] = rounded(torch.randn(rows, RANK, generator=generator) * 0.1, 9)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-2] for name in linear_layers(model)})
    (folder / "adapter_config.json").write_text(
        json.dumps(dict(peft_type="LORA", r=RANK, lora_alpha=ALPHA, target_modules=targets))
    )


def write_merged(folder, model, adapters) -> None:
    """Write the model W + (alpha / rank) B A. float32 represents these sums exactly."""
    folder.mkdir()
    weights, pairs = load_file(model / "model.safetensors"), load_file(adapters / "adapter_model.safetensors")
    for name in weights:
        if f"{peft_prefix(name)}lora_A.weight" not in pairs:
            continue
        a, b = (pairs[f"{peft_prefix(name)}lora_{m}.weight"].double() for m in "AB")
        merged = weights[name].double() + ALPHA / RANK * (b @ a)
        weights[name] = merged.float()
        assert torch.equal(weights[name].double(), merged)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((model / "config.json").read_text())


def lora_spec(
    model, dims: ParallelDims, adapters=None, *, targets=(), dtype="float32", experts=False, **megatron
) -> ModelSpec:
    path = None if adapters is None else str(adapters)
    lora = LoraConfig(RANK, ALPHA, list(targets), experts, path)
    optimizer = OptimConfig(lr=LR, eps=EPS)
    return ModelSpec(str(model), dims, dtype, optimizer, megatron, logprob_chunk=7, lora=lora)


def batches(dims: ParallelDims):
    block, groups = groups_of_responses()
    weighting = TokenWeighting(AGGREGATIONS["token_mean"])
    step = partition_step(TrainBatch.of(block, groups), dims, Packing(60, True, CostModel(1.0, 0.01)), weighting)
    return block, step.replica_batches


def trace(rank: int, spec: ModelSpec):
    from mrl.workers.actor_critic import MegatronActor
    from mrl.workers.parity_trace import trace_step

    block, of_replicas = batches(spec.dims)
    loss = PPOClip(clip_low=0.99, clip_high=50.0)
    return trace_step(MegatronActor(spec), block, of_replicas[spec.dims.coords(rank).dp], loss, LR, temperature=0.7)


@pytest.fixture(scope="module")
def expected(run_ranks, tmp_path_factory):
    """`expected(kind)` -> (model, adapters, trace of the merged dense model in one process)."""
    from mrl.workers.trace_comparison import StepTrace

    @cache
    def run(kind: str, experts: bool = False):
        folder = tmp_path_factory.mktemp(kind)
        model, adapters, merged = folder / "model", folder / "adapters", folder / "merged"
        make(kind, model)
        write_adapters(adapters, model, experts)
        write_merged(merged, model, adapters)
        spec = ModelSpec(str(merged), ONE, "float32", OptimConfig(lr=LR, eps=EPS), {})
        return model, adapters, StepTrace.merge(run_ranks(ONE, trace, spec))

    return run


def gradients_of_adapters(dense: dict[str, np.ndarray], adapters) -> dict[str, np.ndarray]:
    """Return dL/dA = s B^T dL/dW and dL/dB = s dL/dW A^T, with s = alpha / rank, by the names of PEFT."""
    pairs, found, scale = load_file(adapters / "adapter_model.safetensors"), {}, ALPHA / RANK
    weights = {peft_prefix(name): name for name in dense}
    for name in pairs:
        weight = weights[name.rsplit(".", 2)[0] + "."]
        a, b = (pairs[name.rsplit(".", 2)[0] + f".lora_{m}.weight"].double().numpy() for m in "AB")
        gradient = dense[weight].astype(np.float64)
        found[name] = scale * (b.T @ gradient if "lora_A" in name else gradient @ a.T)
    return found


def check(expected_trace, adapters, found) -> None:
    from mrl.workers.trace_comparison import TOLERANCES, StepTrace, compare_gradients

    gradients = gradients_of_adapters(expected_trace.gradients, adapters)
    norm = float(np.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values())))
    reference = StepTrace(expected_trace.loss, norm, expected_trace.outputs, gradients)
    assert len(gradients) == len(found.gradients) > 0
    wrong = [d for d in compare_gradients(reference, found, TOLERANCES["float32"]) if not d.within]
    assert not wrong, wrong[:5]


@pytest.mark.extended_except("tp2 pp2 cp2 sp")
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_gradients_of_a_dense_actor(run_ranks, expected, dims):
    from mrl.workers.trace_comparison import StepTrace

    model, adapters, reference = expected("dense")
    check(reference, adapters, StepTrace.merge(run_ranks(dims, trace, lora_spec(model, dims, adapters))))


@pytest.mark.extended
@pytest.mark.parametrize("dims", [ONE, ParallelDims(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        *("tied", "biased", "qkv_biased", "mistral", "seed", "gemma", "olmo2", "olmo3", "phi"),
        *("glm_dense", "ministral", "smollm"),
        *("moe", "mixtral", "glm", "deepseek", "sparse", "shared_sparse", "minimax", "gpt_oss"),
        *("recurrent", "recurrent_biased", "recurrent_moe", "mamba", "mamba_moe"),
    ],
)
def test_gradients_of_other_families(run_ranks, expected, kind, dims):
    from mrl.workers.trace_comparison import StepTrace

    model, adapters, reference = expected(kind)
    check(reference, adapters, StepTrace.merge(run_ranks(dims, trace, lora_spec(model, dims, adapters))))


@pytest.mark.extended
@pytest.mark.parametrize("dims", [ONE, ParallelDims(tp=2, pp=2)], ids=str)
def test_gradients_with_recomputation(run_ranks, expected, dims):
    from mrl.workers.trace_comparison import StepTrace

    model, adapters, reference = expected("dense")
    check(reference, adapters, StepTrace.merge(run_ranks(dims, trace, lora_spec(model, dims, adapters, **RECOMPUTE))))


EXPERTS = [
    ONE,
    ParallelDims(dp=2, ep=2),
    ParallelDims(tp=2),
    ParallelDims(tp=2, ep=2, etp=1),
    ParallelDims(dp=2, etp=2),
    ParallelDims(pp=2, vpp=2, dp=2, ep=2),
]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "dims"), [("moe", dims) for dims in EXPERTS] + [("mamba_moe", ParallelDims(tp=2, ep=2, etp=1))], ids=str
)
def test_gradients_of_routed_experts(run_ranks, expected, kind, dims):
    from mrl.workers.trace_comparison import StepTrace

    model, adapters, reference = expected(kind, True)
    check(reference, adapters, StepTrace.merge(run_ranks(dims, trace, lora_spec(model, dims, adapters, experts=True))))
