"""GPU kernels: variable-length attention, log-probabilities, and a whole step over NCCL. Run with `pytest -m gpu`.

Every program runs in a new process, because CUDA does not survive a fork.
"""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

ATTENTION = """
import torch
from parallel import collectives, device, groups
from parallel.dims import ParallelDims
collectives.init_process_group(0, 1, "127.0.0.1", 29512, 60)
groups.initialize(ParallelDims(), 0)
from parallel import attention
from parallel.packing import Segment, pack

segments = [Segment(33), *[Segment(n, 0) for n in (5, 17, 1)], Segment(64), Segment(7, 4), Segment(128)]
packed = pack(segments, device.device())
shape = dict(device="cuda", dtype=torch.bfloat16)
total = sum(s.length for s in segments)
torch.manual_seed(0)
q, k, v = (torch.randn(total, heads, 64, **shape).requires_grad_() for heads in (8, 2, 2))
assert attention._has_varlen(q)
orders = (packed.query_index, packed.key_index, packed.key_index)
reorder = [x if order is None else x.index_select(0, order) for x, order in zip((q, k, v), orders)]
fast = attention._varlen(*reorder, packed.calls, 0.125, 0.0)
exact = attention._batched(*[x.double() for x in reorder], packed.calls, 0.125, 0.0)
torch.testing.assert_close(fast.double(), exact, atol=2e-2, rtol=2e-2)
weight = torch.randn_like(exact)
fast_grads = torch.autograd.grad((fast.double() * weight).sum(), (q, k, v))
exact_grads = torch.autograd.grad((exact * weight).sum(), (q, k, v))
for mine, theirs in zip(fast_grads, exact_grads):
    torch.testing.assert_close(mine.double(), theirs.double(), atol=5e-2, rtol=5e-2)
"""

LOGPROBS = """
import torch
from parallel import collectives, device, groups
from parallel.dims import ParallelDims
collectives.init_process_group(0, 1, "127.0.0.1", 29513, 60)
groups.initialize(ParallelDims(), 0)
from parallel.logprobs import linear_logprobs

torch.manual_seed(0)
hidden = torch.randn(3000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = (torch.randn(32000, 256, device="cuda", dtype=torch.bfloat16) * 0.05).requires_grad_()
targets = torch.randint(0, 31990, (3000,), device="cuda")
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
logprobs, entropy = linear_logprobs(hidden, weight, targets, groups.tp_group(), 31990, 0.7, 512, needs_entropy=True)
mine = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
peak = torch.cuda.max_memory_allocated() - before
assert peak < 6 * 512 * 32000 * 4 + 3 * weight.numel() * 4, peak
rows = ((hidden.double() @ weight.double().T)[:, :31990] / 0.7).log_softmax(-1)
torch.testing.assert_close(logprobs.double(), rows.gather(1, targets[:, None])[:, 0], atol=5e-2, rtol=0)
theirs = torch.autograd.grad(rows.gather(1, targets[:, None]).sum() - (rows.exp() * rows).sum(), (hidden, weight))
for a, b in zip(mine, theirs):
    assert (a.double() - b.double()).norm() < 2e-2 * b.double().norm()
"""

STEP = """
import sys
from dataclasses import replace
import numpy as np
sys.path.insert(0, sys.argv[2])
from parallel import collectives, device, groups
device.patch_megatron_for_cpu()
from mrl.workers.actor_critic import MegatronActor, MegatronCritic
from mrl.algorithms.losses import PPOClip
from mrl.core.types import TrainBatch
from mrl.workers.trace_comparison import TOLERANCES, compare_traces
from mrl.workers.dp_partition import Packing, partition_step
from models.architecture import ModelSpec
from mrl.workers.parity_trace import trace_step
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig
from models_for_layouts import groups_of_responses, make

dims, dtype = ParallelDims(), sys.argv[3]
collectives.init_process_group(0, 1, "127.0.0.1", 29514, 60)
groups.initialize(dims, 0)
block, ids = groups_of_responses()
rows = np.arange(len(ids))
batch = TrainBatch.of(block, ids)
for kind in ("dense", "moe"):
    make(kind, f"{sys.argv[1]}/{kind}")
    for model in (MegatronActor, MegatronCritic):
        found = []
        for share, tokens in ((False, 10_000), (True, 60)):
            packing = Packing(tokens, share)
            spec = ModelSpec(f"{sys.argv[1]}/{kind}", dims, dtype, OptimConfig(lr=1e-4, eps=1e-6), {}, share_prompts=share)
            step = partition_step(batch, dims, packing, "token_mean").rank_batches[0]
            found.append(trace_step(model(spec), block, step, None if model is MegatronCritic else PPOClip(), 1e-4, 0.7))
        tolerances = replace(TOLERANCES[dtype], outputs=max(1e-3, TOLERANCES[dtype].outputs))
        wrong = [d for d in compare_traces(*found, tolerances) if not d.within]
        assert not wrong, (kind, model, wrong[:5])
"""


def run(program: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_the_variable_length_kernel_equals_the_exact_attention():
    run(ATTENTION)


@pytest.mark.gpu
def test_chunked_logprobs_equal_those_of_whole_logits_with_bounded_memory():
    run(LOGPROBS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_over_nccl_does_not_depend_on_the_micro_batches(tmp_path, dtype):
    run(STEP, str(tmp_path), str(FOLDER.parent / "distributed"), dtype)
