"""Code for GPUs, run on a CPU with replacements for CUDA kernels and libraries."""

import traceback

import pytest
from tiny_families import make_family

from parallel.dims import ParallelDims

HOST_READS = {"item", "tolist", "cpu", "numpy", "nonzero", "tensor", "as_tensor"}
HOST_READS |= {"__bool__", "__int__", "__float__", "__index__"}


def run_layers(rank: int, folder) -> tuple[list[str], int, float]:
    """Run a model forward and backward with the attention of GPUs.

    Returns the reads of tensors by the host within layers, the number of tables of angles, and the largest difference of a logit
    from the attention of CPUs. On a GPU, each read would wait for the device.
    """
    import torch
    from test_logits import LENGTHS, load, sequences
    from torch.overrides import TorchFunctionMode
    from varlen_kernel import varlen_attn

    from parallel import attention
    from parallel.megatron_layers import PackedRotaryEmbedding
    from parallel.packing import Segment, pack

    class Reads(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []
            self.in_layers = False

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if self.in_layers and func.__name__ in HOST_READS:
                stack = [frame.filename for frame in traceback.extract_stack()]
                if not any(
                    "/transformer/moe/" in name for name in stack
                ):  # the host needs the sizes of messages to experts
                    self.found.append(f"{func.__name__} called by {stack[-3:]}")
            return func(*args, **(kwargs or {}))

    reads, tables = Reads(), []

    def set_in_layers(value: bool):
        def hook(*unused) -> None:
            reads.in_layers = value

        return hook

    def logits():
        packed = pack([Segment(length) for length in LENGTHS], torch.device("cpu"), in_order=True)
        return model(torch.cat(sequences())[None], packed.position_ids[None], None, packed_seq_params=packed)

    model, _ = load(folder)
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(set_in_layers(True))
        layer.register_forward_hook(set_in_layers(False))
    logits()  # moves RoPE's frequencies to the device
    with torch.no_grad():
        expected = logits()
    get_emb = PackedRotaryEmbedding.get_emb
    PackedRotaryEmbedding.get_emb = lambda *args: tables.append(args) or get_emb(*args)
    attention.supports_varlen, attention._varlen_kernel = lambda device, dtype: True, lambda: varlen_attn
    with reads:
        found = logits()
        reads.in_layers = True
        found.square().sum().backward()
    return reads.found, len(tables), float((found - expected).detach().abs().max())


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_layers_never_wait_for_the_device(run_ranks, tmp_path, name):
    ((reads, tables, difference),) = run_ranks(ParallelDims(), run_layers, make_family(name, tmp_path))
    assert reads == []
    assert tables == 1, "the layers share the angles of a pack"
    assert difference < 1e-5


def build_with_transformer_engine(rank: int, folder):
    """Build and wrap a model as if Transformer Engine were installed, without Apex."""
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


def test_rope_is_fused_only_where_the_kernel_computes_it():
    from types import SimpleNamespace

    from models.model_builder import can_fuse_rope

    def arch(amplitude: float = 1.0, latent: bool = False):
        return SimpleNamespace(has_latent_attention=latent, rope=SimpleNamespace(amplitude=amplitude))

    assert can_fuse_rope(arch(), packed_attention=False)
    assert not can_fuse_rope(arch(), packed_attention=True)
    assert not can_fuse_rope(arch(amplitude=1.2), packed_attention=False)
    assert not can_fuse_rope(arch(latent=True), packed_attention=False)


def test_gpus_keep_the_float32_sums_of_16_bit_logits(monkeypatch):
    from types import SimpleNamespace

    import torch

    from parallel import logprobs

    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (20, 50))
    targets = torch.randint(0, 50, (20,), generator=generator)

    def error() -> float:
        found, _ = logprobs.linear_logprobs(hidden, weight, targets, group, 50, chunk_size=7)
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
