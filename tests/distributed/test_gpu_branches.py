"""Code for GPUs runs on a CPU. Stand-ins replace CUDA kernels and libraries."""

from functools import partial

import pytest
from tiny_families import FAMILIES, make_family

from models.architecture import ModelSpec
from mrl.core.types import TrainBatch
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

MOE = "megatron/core/transformer/moe"
# The host needs the number of tokens of each expert for the sizes of messages and matrices. On a GPU, the first two functions
# copy these numbers to the host, and the second one waits for all copies of a layer together. The others read the copies.
TOKENS_PER_EXPERT = [
    ("parallel/device.py", "to_cpu"),
    (f"{MOE}/token_dispatcher.py", "_maybe_dtoh_and_synchronize"),
    (f"{MOE}/experts.py", "forward"),
    (f"{MOE}/moe_utils.py", "sort_chunks_by_idxs"),
]
# On a GPU, these functions move a tensor to the device only at their first call. On a CPU, they try to move it at every call.
MOVED_ONCE = [
    ("megatron/core/models/common/embeddings/rotary_pos_embedding.py", "get_emb"),
    (f"{MOE}/router.py", "gating"),
]
STAND_INS = [
    ("tests/te_extension.py", ""),
    ("tests/te_process.py", ""),
]  # kernels of Transformer Engine, as torch functions


def use_attention_of_gpus() -> None:
    """Make this process take the branches for attention in 16 bits on a GPU. A stand-in replaces the attention kernel."""
    from varlen_kernel import sink_kernels, varlen_attn

    from mrl.workers import megatron_model
    from parallel import attention

    attention.supports_varlen = megatron_model.supports_varlen = lambda device, dtype: True
    attention._varlen_kernel = lambda channels: varlen_attn
    attention._varlen_kernel_pair = sink_kernels


def run_layers(rank: int, folder) -> tuple[int, float]:
    """Run a model with the attention of GPUs.

    Returns how often RoPE computed a table of angles, and the largest difference from the logits with the attention of CPUs.
    """
    import torch
    from test_logits import LENGTHS, load, sequences

    from parallel.megatron_layers import PackedRotaryEmbedding
    from parallel.packing import Segment, pack

    def logits():
        packed = pack([Segment(length) for length in LENGTHS], torch.device("cpu"), chunks_in_token_order=True)
        return model(torch.cat(sequences())[None], packed.position_ids[None], None, packed_seq_params=packed)

    model, _ = load(folder)
    with torch.no_grad():
        expected = logits()
    tables, get_emb = [], PackedRotaryEmbedding.get_emb
    PackedRotaryEmbedding.get_emb = lambda *args: tables.append(args) or get_emb(*args)
    use_attention_of_gpus()
    found = logits()
    return len(tables), float((found - expected).detach().abs().max())


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "deepseek_v32", "gpt_oss"])
def test_layers_share_the_angles_of_a_pack_and_the_attention_of_gpus_is_exact(run_ranks, tmp_path, name):
    ((tables, difference),) = run_ranks(ParallelDims(), run_layers, make_family(name, tmp_path))
    assert tables == 1 and difference < 1e-5


def waits_of_an_update(rank: int, folder, critic: bool, overrides: dict, share_prompts: bool = True) -> list[str]:
    """Return the operations on which the host would wait for the GPU, from the rows of a batch to the gradients of the model.

    The first of two passes is not recorded, because some tensors, such as RoPE's frequencies, are copied to the device only once.
    The host may wait for the numbers of tokens of the experts, but exactly once for each forward pass of an MoE layer.
    """
    from host_waits import HostWaits
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from models_for_layouts import groups_of_responses

    from mrl.algorithms.losses import PPOClip, ValueLoss
    from mrl.algorithms.parts import POLICY_COLUMNS
    from mrl.workers.actor_critic import MegatronActor, MegatronCritic, policy_loss, value_loss
    from mrl.workers.dp_partition import Packing, partition_step

    use_attention_of_gpus()
    spec = ModelSpec(
        str(folder), ParallelDims(), "float32", OptimConfig(lr=1e-4), overrides, share_prompts=share_prompts
    )
    model = MegatronCritic(spec) if critic else MegatronActor(spec)
    head = model.head if critic else partial(model.head, temperature=0.7)
    loss = partial(value_loss, loss=ValueLoss()) if critic else partial(policy_loss, loss=PPOClip())
    block, groups = groups_of_responses()
    packing = Packing(60, share_prompts)
    (batch,) = partition_step(TrainBatch.of(block, groups), ParallelDims(), packing).replica_batches
    assert len(batch.micro_batches) > 1
    passes: list[MoELayer] = []
    for layer in (module for chunk in model.chunks for module in chunk.modules() if isinstance(module, MoELayer)):
        layer.register_forward_pre_hook(lambda layer, args: passes.append(layer) if waits.recording else None)
    with HostWaits(*TOKENS_PER_EXPERT, *MOVED_ONCE, *STAND_INS, recording=False) as waits:
        for waits.recording in (False, True):
            model.compute_outputs(block, batch, head)
            if not critic:
                model.compute_columns(block, batch, 0.7, POLICY_COLUMNS.values())
            model.accumulate_gradients(model.micro_batches(block, batch), head, loss, batch)
    functions = {function for _, function in TOKENS_PER_EXPERT}
    counts = {key: count for key, count in waits.num_allowed.items() if key[1] in functions}
    num_waits = sum(count for (operation, _), count in counts.items() if operation not in ("tolist", "numpy"))
    return waits.found + [f"{len(passes)} passes of MoE layers: {counts}"] * (num_waits != len(passes))


BALANCED = dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1, moe_z_loss_coeff=1e-3)
RECOMPUTED = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.extended_except("qwen3")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_and_backward_pass_never_waits_for_the_device(run_ranks, tmp_path, name):
    """Tests the copy of packs to the device, layers, log-probability head, loss and metrics. Only experts may wait."""
    (waits,) = run_ranks(ParallelDims(), waits_of_an_update, make_family(name, tmp_path), False, {})
    assert waits == []


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "critic", "overrides", "share_prompts"),
    [
        pytest.param("qwen3", True, {}, True, id="critic"),
        pytest.param("qwen3", False, {}, False, id="no shared prompts"),
        pytest.param("qwen3", False, RECOMPUTED, True, id="recomputation"),
        pytest.param("glm4_moe", False, BALANCED, True, id="balancing losses"),
    ],
)
def test_no_option_makes_the_host_wait_for_the_device(run_ranks, tmp_path, name, critic, overrides, share_prompts):
    folder = make_family(name, tmp_path)
    (waits,) = run_ranks(ParallelDims(), waits_of_an_update, folder, critic, overrides, share_prompts)
    assert waits == []


def build_with_transformer_engine(rank: int, folder):
    """Build and wrap models as if Transformer Engine were installed, but not Apex. Returns which layers fuse gradients."""
    import torch

    from models import model_builder
    from models.hf_config import HFConfig
    from parallel.device import Capabilities
    from parallel.optimizer import wrap_ddp

    libraries = Capabilities(cuda=False, transformer_engine=True, apex=False, fused_wgrad=False)
    model_builder.capabilities = lambda: libraries  # the layers are still those of torch
    hf, dims = HFConfig.load(str(folder)), ParallelDims()
    (model,) = model_builder.build_model(hf, dims, torch.float32)
    matrix = model.decoder.layers[0].mlp.linear_fc1
    matrix.fuse_wgrad_accumulation = False  # as in Transformer Engine's matrices
    wrap_ddp([model])
    fused = matrix.fuse_wgrad_accumulation, model.output_layer.gradient_accumulation_fusion
    (plain,) = model_builder.build_model(hf, dims, torch.float32, gradient_accumulation_fusion=False)
    plain.decoder.layers[0].mlp.linear_fc1.fuse_wgrad_accumulation = False
    wrap_ddp([plain])
    return *fused, plain.decoder.layers[0].mlp.linear_fc1.fuse_wgrad_accumulation


def test_transformer_engine_adds_weight_gradients_to_the_buffers_without_apex(run_ranks, tmp_path):
    (found,) = run_ranks(ParallelDims(), build_with_transformer_engine, make_family("qwen3", tmp_path))
    assert found == (True, False, False)


def test_rope_is_fused_only_where_the_kernel_computes_it(monkeypatch):
    from types import SimpleNamespace

    from models import model_builder

    def arch(amplitude: float = 1.0, latent: bool = False, local: SimpleNamespace | None = None):
        return SimpleNamespace(
            has_latent_attention=latent, rope=SimpleNamespace(amplitude=amplitude), window_rope=local
        )

    assert not model_builder.can_fuse_rope(arch()), "a CPU has no kernel"
    monkeypatch.setattr(model_builder, "capabilities", lambda: SimpleNamespace(transformer_engine=True))
    assert model_builder.can_fuse_rope(arch())
    assert not model_builder.can_fuse_rope(arch(amplitude=1.2))
    assert not model_builder.can_fuse_rope(arch(local=SimpleNamespace(amplitude=1.2)))
    assert not model_builder.can_fuse_rope(arch(latent=True))


def differences_of_rotations(rank: int) -> list[float]:
    """Return the largest differences between fused and unfused RoPE of a pack: of the values and of the gradients."""
    from types import SimpleNamespace

    import torch
    from megatron.core.models.common.embeddings import rope_utils
    from te_extension import fused_rope_backward, fused_rope_forward

    from parallel.megatron_layers import PackedRotaryEmbedding, fuse_rope_of_packs
    from parallel.packing import Segment, pack
    from parallel.rope import Rope

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tokens, angles):
            ctx.angles = angles
            return fused_rope_forward(tokens, angles, None, "sbhd", False, None, 1, 0)

        @staticmethod
        def backward(ctx, gradient):
            return fused_rope_backward(gradient, ctx.angles, None, "sbhd", False, None, 1, 0), None

    rope_utils.fused_apply_rotary_pos_emb = lambda tokens, angles, interleaved: Kernel.apply(tokens, angles)
    fuse_rope_of_packs()
    packed = pack([Segment(5), Segment(3, 0), Segment(4, 0)], torch.device("cpu"))
    rotary = PackedRotaryEmbedding(Rope(rope_theta=100.0, dim=4))
    angles = rotary(rotary.get_rotary_seq_len(None, None, None, None, packed))
    values, cotangent = torch.randn(2, 12, 2, 6)
    found = []
    for fused in (False, True):
        config = SimpleNamespace(apply_rope_fusion=fused, rotary_interleaved=False, mrope_section=None)
        tokens = values.clone().requires_grad_()
        rotated = rope_utils.apply_rotary_pos_emb(tokens, angles, config)
        rotated.backward(cotangent)
        found.append((rotated, tokens.grad))
    return [float((one - other).detach().abs().max()) for one, other in zip(*found, strict=True)]


def test_the_fused_rope_of_packs_computes_values_and_gradients_of_the_unfused_one(run_ranks):
    (differences,) = run_ranks(ParallelDims(), differences_of_rotations)
    assert max(differences) < 1e-6


def test_gpus_keep_the_float32_sums_of_16_bit_logits(monkeypatch):
    from types import SimpleNamespace

    import torch

    from parallel import logprobs

    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (20, 50))
    targets = torch.randint(0, 50, (20,), generator=generator)

    def error() -> float:
        found, *_ = logprobs.linear_logprobs(hidden, weight, targets, group, 50, chunk_size=7)
        exact = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return float((found - exact).abs().max())

    mm = torch.mm

    def mm_with_out_dtype(left, right, *, out_dtype):
        assert left.dtype == right.dtype == torch.bfloat16 and out_dtype == torch.float32
        return mm(left.float(), right.float())

    assert error() > 1e-3
    monkeypatch.setattr(logprobs, "returns_float32_products", lambda device: True)
    monkeypatch.setattr(torch, "mm", mm_with_out_dtype)
    assert error() < 1e-4


def test_only_gpus_return_float32_products_of_16_bit_matrices():
    import torch

    from parallel import logprobs

    assert logprobs.returns_float32_products(torch.device("cuda"))
    assert not logprobs.returns_float32_products(torch.device("cpu"))


def permutations_of_packs(rank: int, folder) -> tuple[list[bool], list[bool]]:
    """Return whether the queries of each micro-batch are permuted, for the attention of a CPU and for that of a GPU."""
    from models_for_layouts import groups_of_responses

    from mrl.workers.actor_critic import MegatronActor
    from mrl.workers.dp_partition import Packing, partition_step

    block, groups = groups_of_responses()
    step = partition_step(TrainBatch.of(block, groups), ParallelDims(), Packing(60))
    spec = ModelSpec(str(folder), ParallelDims(), "bfloat16", None, {})

    def permuted() -> list[bool]:
        micro_batches = MegatronActor(spec).micro_batches(block, step.replica_batches[0])
        return [micro.packed.query_index is not None for micro in micro_batches]

    on_cpu = permuted()
    use_attention_of_gpus()
    return on_cpu, permuted()


def test_a_model_on_a_gpu_keeps_the_order_of_the_tokens_of_a_pack(run_ranks, tmp_path):
    ((on_cpu, on_gpu),) = run_ranks(ParallelDims(), permutations_of_packs, make_family("qwen3", tmp_path))
    assert any(on_cpu) and not any(on_gpu)
