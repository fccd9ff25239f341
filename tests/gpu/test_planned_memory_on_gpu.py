"""Planned GPU memory of an update equals the most that torch allocates in it, within 5 %."""

import json

import pytest

pytestmark = pytest.mark.gpu

TOLERANCE = 0.05
QWEN3_LIKE = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    attention_bias=False,
    head_dim=128,
    hidden_size=2048,
    intermediate_size=6144,
    max_position_embeddings=8192,
    num_attention_heads=16,
    num_hidden_layers=8,
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
    vocab_size=32768,
    use_sliding_window=False,
)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize("overrides", [{}, FULL], ids=["kept", "recomputed"])
def test_an_update_allocates_the_planned_bytes(tmp_path, overrides):
    import torch
    import torch.distributed as dist

    from models.families import family_of
    from models.hf_config import HFConfig
    from models.model_builder import build_model
    from mrl.planner.activation_bytes import GPU_KERNELS, Kernels
    from mrl.planner.model_shape import ModelShape
    from mrl.planner.trainer_memory import TrainerSettings, trainer_memory
    from parallel import device, groups
    from parallel.device import capabilities
    from parallel.dims import ParallelDims
    from parallel.logprobs import linear_logprobs
    from parallel.optimizer import build_optimizer, wrap_ddp
    from parallel.packing import Segment, pack
    from parallel.trainer_config import OptimConfig

    (tmp_path / "config.json").write_text(json.dumps(QWEN3_LIKE))
    hf, dims, tokens = HFConfig.load(str(tmp_path)), ParallelDims(), 8192
    device.patch_megatron_for_cpu()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    groups.initialize(dims, seed=0)
    chunk = build_model(hf, dims, torch.bfloat16, **overrides)[0].cuda().train()
    for param in chunk.parameters():
        torch.nn.init.normal_(param, std=0.02)
    (wrapped,) = wrap_ddp([chunk])
    optimizer = build_optimizer([wrapped], OptimConfig(lr=1e-6))

    def update() -> None:
        packed = pack([Segment(1024)] * 8, torch.device("cuda"))
        ids = torch.randint(0, 32768, (tokens,), device="cuda")

        def head(*, hidden_states, output_layer, **unused):
            weight = output_layer.weight
            return linear_logprobs(hidden_states[:, 0], weight, ids, groups.tp_group(), 32768)[0]

        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        out = wrapped(
            ids[None],
            packed.position_ids[None],
            None,
            packed_seq_params=packed,
            output_processor=head,
            output_processor_context=None,
        )
        out.sum().backward()
        optimizer.step()

    update()  # creates the optimizer's state
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    update()
    torch.cuda.synchronize()
    family = family_of(hf)
    kernels = GPU_KERNELS if capabilities().transformer_engine else Kernels(fused_mlp=False)
    settings = TrainerSettings.with_megatron(overrides, max_tokens=tokens, bucket_bytes=0, kernels=kernels)
    planned = trainer_memory(ModelShape.of(family, family.read(hf)), dims, settings).by_phase["update"]
    dist.destroy_process_group()
    assert torch.cuda.max_memory_allocated() == pytest.approx(planned, rel=TOLERANCE)
