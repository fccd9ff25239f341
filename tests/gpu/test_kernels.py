"""Attention, log-probabilities, and a whole step, on the CPU and on GPUs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from models.architecture import ModelSpec
from mrl.algorithms.losses import PPOClip, ValueLoss
from mrl.core.types import TrainBatch
from mrl.workers.dp_partition import Packing, partition_step
from mrl.workers.trace_comparison import TOLERANCES, compare_traces
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig


def attention_in_bfloat16_and_float64(
    rank: int, window_size: tuple[int, int] | None, softmax_type: str = "vanilla"
) -> None:
    """Compare attention in bfloat16 with attention in float64. Only bfloat16 on a GPU uses the variable-length kernel."""
    import torch

    from parallel.attention import PackedAttention
    from parallel.device import device
    from parallel.packing import Segment, pack

    segments = [Segment(33), *[Segment(n, 0) for n in (5, 17, 1)], Segment(64), Segment(7, 4), Segment(128)]
    packed = pack(segments, device())
    config = SimpleNamespace(
        kv_channels=64,
        num_attention_heads=8,
        params_dtype=torch.bfloat16,
        attention_dropout=0.0,
        softmax_type=softmax_type,
        window_size=window_size,
        window_attn_skip_freq=None,
    )
    attention = PackedAttention(config, 1, None, "self").to(device())
    total = sum(s.length for s in segments)
    torch.manual_seed(0)
    sinks = list(attention.parameters())
    for parameter in sinks:
        torch.nn.init.normal_(parameter)
    shape = dict(device=device(), dtype=torch.bfloat16)
    inputs = [torch.randn(total, heads, 64, **shape).requires_grad_() for heads in (8, 2, 2)]
    fast = attention(*inputs, packed_seq_params=packed)
    exact = attention(*[x.double() for x in inputs], packed_seq_params=packed)
    torch.testing.assert_close(fast.double(), exact, atol=2e-2, rtol=2e-2)
    weight = torch.randn_like(exact)
    fast_grads = torch.autograd.grad((fast.double() * weight).sum(), inputs + sinks)
    exact_grads = torch.autograd.grad((exact * weight).sum(), inputs + sinks)
    for mine, theirs in zip(fast_grads, exact_grads, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), atol=5e-2, rtol=5e-2)


def chunked_logprobs_and_whole_logits(rank: int) -> None:
    import torch

    from parallel import groups
    from parallel.device import device, has_cuda
    from parallel.logprobs import linear_logprobs

    torch.manual_seed(0)
    rows, vocab, chunk = (3000, 32000, 512) if has_cuda() else (300, 3200, 64)
    used = vocab - 10  # the last tokens are padding
    hidden = torch.randn(rows, 256, device=device(), dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, 256, device=device(), dtype=torch.bfloat16) * 0.05).requires_grad_()
    targets = torch.randint(0, used, (rows,), device=device())
    before = torch.cuda.memory_allocated() if has_cuda() else 0
    if has_cuda():
        torch.cuda.reset_peak_memory_stats()
    logprobs, entropy, squares = linear_logprobs(
        hidden, weight, targets, groups.tp_group(), used, 0.7, chunk, needs_entropy=True, needs_sum_pi_squared=True
    )
    mine = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    if has_cuda():  # torch does not count the memory of a CPU
        peak = torch.cuda.max_memory_allocated() - before
        assert peak < 6 * chunk * vocab * 4 + 3 * weight.numel() * 4, peak
    logits = ((hidden.double() @ weight.double().T)[:, :used] / 0.7).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), logits.gather(1, targets[:, None])[:, 0], atol=5e-2, rtol=0)
    torch.testing.assert_close(squares.double(), (2 * logits).exp().sum(1), atol=0, rtol=5e-2)
    total = logits.gather(1, targets[:, None]).sum() - (logits.exp() * logits).sum()
    for a, b in zip(mine, torch.autograd.grad(total, (hidden, weight)), strict=True):
        assert (a.double() - b.double()).norm() < 2e-2 * b.double().norm()


def step_with_few_and_many_micro_batches(rank: int, folder: str, kind: str, dtype: str, dims: ParallelDims):
    """Return the traces of a step with one micro-batch and with several, for the actor and for the critic."""
    from models_for_layouts import groups_of_responses

    from mrl.workers.actor_critic import MegatronActor, MegatronCritic
    from mrl.workers.parity_trace import trace_step

    block, ids = groups_of_responses()
    batch, traces = TrainBatch.of(block, ids), []
    for model in (MegatronActor, MegatronCritic):
        for share, tokens in ((False, 10_000), (True, 60)):
            optimizer = OptimConfig(lr=1e-4, eps=1e-6)
            spec = ModelSpec(f"{folder}/{kind}", dims, dtype, optimizer, {}, share_prompts=share)
            step = partition_step(batch, dims, Packing(tokens, share))
            loss = ValueLoss() if model is MegatronCritic else PPOClip()
            traces.append(trace_step(model(spec), block, step.replica_batches[dims.coords(rank).dp], loss, 1e-4, 0.7))
    return traces


def test_attention_in_bfloat16_equals_the_exact_attention(run_program):
    run_program(ParallelDims(), attention_in_bfloat16_and_float64, None)


def test_attention_with_a_window_in_bfloat16_equals_the_exact_attention(run_program):
    run_program(ParallelDims(), attention_in_bfloat16_and_float64, (19, 0))


@pytest.mark.parametrize("window_size", [None, (19, 0)], ids=["whole", "window"])
def test_attention_with_sinks_in_bfloat16_equals_the_exact_attention(run_program, window_size):
    run_program(ParallelDims(), attention_in_bfloat16_and_float64, window_size, "learnable")


def test_chunked_logprobs_equal_those_of_whole_logits_with_bounded_memory(run_program):
    run_program(ParallelDims(), chunked_logprobs_and_whole_logits)


@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(tp=2)], ids=["one", "tp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_does_not_depend_on_the_micro_batches(run_program, tmp_path, dtype, dims):
    from models_for_layouts import make

    tolerances = replace(TOLERANCES[dtype], outputs=max(1e-3, TOLERANCES[dtype].outputs))
    for kind in ("dense", "moe"):
        make(kind, tmp_path / kind)
        # rank 0 has the whole trace
        traces = run_program(dims, step_with_few_and_many_micro_batches, str(tmp_path), kind, dtype, dims)[0]
        for few, many in (traces[:2], traces[2:]):
            wrong = [d for d in compare_traces(few, many, tolerances) if not d.within]
            assert not wrong, (kind, wrong[:5])
