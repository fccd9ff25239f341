"""The planned GPU memory of an update equals the peak of the memory that torch allocates during the update, within 5 %.

On a CPU, torch does not count memory. There, the update runs with a smaller model, and the test only computes the plan.
"""

import json

import pytest

from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

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
ON_CPU = dict(head_dim=16, hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=512)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def planned_and_allocated_bytes(rank: int, folder: str, sequence_tokens: int, overrides: dict) -> tuple[int, int]:
    """Return (planned bytes, allocated bytes) of an update. On a CPU, the allocated bytes are 0."""
    import torch

    from models.families import family_of
    from models.hf_config import HFConfig
    from models.model_builder import build_model
    from mrl.planner.micro_batch_shape import GPU_KERNELS, Kernels
    from mrl.planner.model_shape import ModelShape
    from mrl.planner.trainer_memory import TrainerSettings, trainer_memory
    from parallel import groups
    from parallel.device import capabilities, device, has_cuda
    from parallel.logprobs import linear_logprobs
    from parallel.optimizer import build_optimizer, wrap_ddp
    from parallel.packing import Segment, pack

    hf, dims, tokens = HFConfig.load(folder), ParallelDims(), 8 * sequence_tokens
    family = family_of(hf)
    vocab = family.read(hf).vocab_size
    chunk = build_model(hf, dims, torch.bfloat16, **overrides)[0].to(device()).train()
    for param in chunk.parameters():
        torch.nn.init.normal_(param, std=0.02)
    (wrapped,) = wrap_ddp([chunk])
    optimizer = build_optimizer([wrapped], OptimConfig(lr=1e-6))

    def update() -> None:
        packed = pack([Segment(sequence_tokens)] * 8, device())
        ids = torch.randint(0, vocab, (tokens,), device=device())

        def head(*, hidden_states, output_layer, **unused):
            return linear_logprobs(hidden_states[:, 0], output_layer.weight, ids, groups.tp_group(), vocab)[0]

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
    if has_cuda():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    update()
    kernels = GPU_KERNELS if capabilities().transformer_engine else Kernels(fused_mlp=False)
    settings = TrainerSettings.with_megatron(overrides, max_tokens=tokens, bucket_bytes=0, kernels=kernels)
    planned = trainer_memory(ModelShape.of(family, family.read(hf)), dims, settings).by_phase["update"]
    if not has_cuda():
        return planned, 0
    torch.cuda.synchronize()
    return planned, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("overrides", [{}, FULL], ids=["kept", "recomputed"])
def test_an_update_allocates_the_planned_bytes(run_program, device_type, tmp_path, overrides):
    on_gpu = device_type == "cuda"
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_LIKE if on_gpu else QWEN3_LIKE | ON_CPU))
    tokens = 1024 if on_gpu else 16
    ((planned, allocated),) = run_program(ParallelDims(), planned_and_allocated_bytes, str(tmp_path), tokens, overrides)
    assert planned > 0
    if on_gpu:
        assert allocated == pytest.approx(planned, rel=TOLERANCE)
