"""Measures rates of one device: matrix products, the log-probability head, transfers between processes, checksums.

Each function `measure_*` is a section of `mrl bench gpu` (see mrl.bench.sections). This module does not import Megatron.
"""

import multiprocessing
import platform
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor

from models.conversion.mapping import Box
from mrl.bench.sections import SectionJob, Value
from mrl.core.code_locations import CONF
from mrl.core.processes import kill_with_parent
from mrl.weight_sync.sender import checksums, chunk_views, fill_buffer
from mrl.weight_sync.transfer_plan import Bucket, TensorChunk
from mrl.weight_sync.transports import (
    NUM_TRANSFER_BUFFERS,
    CudaIpcSendEndpoint,
    SharedBuffersRecvEndpoint,
    SharedMemorySendEndpoint,
)
from parallel.device import device, has_cuda, set_threads, synchronize
from parallel.durable_files import fsync_path, hash_file
from parallel.logprobs import linear_logprobs

GIB, MIB = 1 << 30, 1 << 20
MIN_TIMED_S = 0.02  # if a call takes less time, several calls are timed together
FIRST_FP8_CAPABILITY = (8, 9)  # compute capability of the first cards with fp8 matrix products (Ada)
PACKAGES = (
    *("torch", "transformer-engine", "flash-attn", "flash-attn-3", "megatron-core", "triton", "liger-kernel", "apex"),
    *("sglang", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "mrl"),
)
"""Packages whose versions the report contains."""


def read_machine(job: SectionJob) -> None:
    """Section machine: report the card, and the versions of packages that affect the measurements."""
    facts = dict(
        python=platform.python_version(),
        host_cores=psutil.cpu_count(),
        host_memory_gib=round(psutil.virtual_memory().total / GIB, 1),
        cuda_of_torch=torch.version.cuda,
        versions={name: _version(name) for name in PACKAGES},
    )
    if not has_cuda():
        job.set_machine(facts | dict(card=None, free_gib=0.0))
        return
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    facts |= dict(
        card=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_gib=round(total / GIB, 1),
        free_gib=round(free / GIB, 1),
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        cudnn=torch.backends.cudnn.version(),
    )
    published = published_tflops(properties.name)
    job.set_machine(facts | dict(published_bf16_tflops=published))
    if published:
        job.set_rate("published", published)


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def published_tflops(card: str) -> float | None:
    """Return the card's peak of dense bfloat16 matrix products in TFLOP/s; None if conf/cluster does not have the card.

    `card` is the name that CUDA reports, such as "NVIDIA H100 80GB HBM3". The result for PCIe and NVL cards is None, because
    their peaks may differ from those of the SXM cards in conf/cluster.
    """
    words = set(re.findall(r"[a-z0-9]+", card.lower()))
    if words & {"pcie", "nvl"}:
        return None
    for path in sorted((CONF / "cluster").glob("*.yaml")):
        hardware = (yaml.safe_load(path.read_text()) or {}).get("hardware") or {}
        if hardware.get("name") in words:
            return float(hardware["tflops_bf16"])
    return None


def seconds_of(run: Callable[[], object], budget_s: float = 0.5, least: int = 3) -> float:
    """Return the median duration of a call of `run` in seconds. The first call is not timed.

    Calls are repeated for `budget_s` seconds, in at least `least` timed intervals. The device is idle before and after each
    interval. If a call takes less than MIN_TIMED_S, an interval has several calls.
    """
    _timed(run, 1)
    first = _timed(run, 1)
    calls = max(1, ceil(MIN_TIMED_S / max(first, 1e-7)))
    times, end = [first] if calls == 1 else [], time.monotonic() + budget_s
    while len(times) < least or time.monotonic() < end:
        times.append(_timed(run, calls))
    return median(times)


def _timed(run: Callable[[], object], calls: int) -> float:
    synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize()
    return (time.perf_counter() - begun) / calls


def peak_memory(run: Callable[[], object]) -> list[Value]:
    """Call `run` once. Returns the peak memory during the call, minus the memory in use before the call; [] if that is unknown.

    On a GPU, memory means the bytes that torch has allocated. On a CPU, it means the resident memory of the process.
    """
    if has_cuda():
        synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        synchronize()
        return [("peak memory", (torch.cuda.max_memory_allocated() - before) / MIB, "MiB")]
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the recorded peak to the current size
        before = _resident_peak()
        run()
        return [("peak memory", (_resident_peak() - before) / MIB, "MiB")]
    except OSError:  # the kernel does not allow the write
        return []


def _resident_peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


# Matrix products.

# size -> (m, k, n) of products [m, k] x [k, n]. The second product has the shape of the gate and up projections of Qwen3-4B, or,
# for the size toy, of the toy model in model_steps.py.
MATRICES = {
    "full": ((8192, 8192, 8192), (16384, 2560, 19456)),
    "small": ((4096, 4096, 4096), (8192, 2560, 19456)),
    "toy": ((256, 256, 256), (512, 64, 192)),
}


def measure_matrix_products(job: SectionJob) -> None:
    """Section matrix: measure the TFLOP/s of matrix products in bfloat16 and fp8, or in float32 on a CPU."""
    set_threads()
    dtype, best = torch.bfloat16 if has_cuda() else torch.float32, 0.0
    for m, k, n in MATRICES[job.spec.size]:
        shape, name = f"[{m}, {k}] x [{k}, {n}]", str(dtype).removeprefix("torch.")
        with job.case(f"{shape} in {name}"):
            left, right = (torch.randn(s, device=device(), dtype=dtype) for s in ((m, k), (k, n)))
            out = left @ right
            rate = 2 * m * k * n / seconds_of(lambda a=left, b=right, c=out: torch.mm(a, b, out=c)) / 1e12
            best = max(best, rate)
            job.row(f"{shape} {name}", *job.efficiency(rate))
        if not has_cuda():
            continue
        if torch.cuda.get_device_capability() < FIRST_FP8_CAPABILITY:
            job.leave_out(f"{shape} in fp8", "this card has no fp8 matrix products")
            continue
        with job.case(f"{shape} in fp8"):
            rate = 2 * m * k * n / seconds_of(fp8_product(m, k, n)) / 1e12
            job.row(f"{shape} float8_e4m3fn", ("rate", rate, "TFLOP/s"))
    if not has_cuda():
        job.leave_out("matrix products in bfloat16 and fp8", "they are measured on a GPU only")
    if best:
        job.set_rate("measured", best)


def fp8_product(m: int, k: int, n: int) -> Callable[[], Tensor]:
    """Return a function that computes one product of fp8 matrices with one scale for each matrix."""
    left = torch.randn(m, k, device=device()).to(torch.float8_e4m3fn)
    right = torch.randn(n, k, device=device()).to(torch.float8_e4m3fn).t()  # the kernel needs column-major order
    scale = torch.ones((), device=device())
    return lambda: torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=has_cuda())


# Log-probability head.


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of the output layer and of the chunks of logits."""

    positions: int  # number of tokens whose log-probabilities are computed
    hidden: int  # hidden size of the model
    vocab: int  # size of the vocabulary
    # chunk sizes to measure, in positions. The second is the number that mrl would choose.
    chunks: tuple[int, ...]


HEADS = {
    "full": HeadSizes(16384, 4096, 151936, (256, 1024, 4096)),
    "small": HeadSizes(8192, 2560, 151936, (256, 1024, 4096)),
    "toy": HeadSizes(512, 64, 4096, (64, 256)),
}
DEFAULT_CHUNK = 1024  # default of trainer.logprob_chunk
CHECKED_POSITIONS = 64  # number of positions at which the results are compared with float32 logits


def whole_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, needs_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [T] and entropies [T] of T positions, computed from all logits [T, V] at once.

    `hidden` [T, H], `weight` [V, H]: inputs of the output layer. `targets` [T]: token ids. If `needs_entropy` is false, the
    entropies are zeros.
    """
    logprobs = F.log_softmax((hidden @ weight.T).float(), -1)
    entropies = -(logprobs.exp() * logprobs).sum(-1) if needs_entropy else logprobs.new_zeros(len(hidden))
    return logprobs.gather(1, targets[:, None])[:, 0], entropies


def measure_head(job: SectionJob) -> None:
    """Section head: measure time and memory of the log-probabilities (forward and backward pass), for each method."""
    set_threads()
    sizes = HEADS[job.spec.size]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if has_cuda() else torch.float32
    hidden = torch.randn(sizes.positions, sizes.hidden, device=device(), dtype=dtype).requires_grad_()
    weight = torch.randn(sizes.vocab, sizes.hidden, device=device(), dtype=dtype) / sizes.hidden**0.5
    weight.requires_grad_()
    targets = torch.randint(sizes.vocab, (sizes.positions,), device=device())
    with torch.no_grad():
        few = slice(0, CHECKED_POSITIONS)
        expected = whole_logprobs(hidden[few].float(), weight.float(), targets[few])[0]
    # FLOPs of the forward and backward pass, without recomputed products.
    flops = 6 * sizes.positions * sizes.hidden * sizes.vocab
    for name, logprobs in head_methods(job, sizes).items():

        def run(logprobs=logprobs) -> None:
            values = logprobs(hidden, weight, targets)
            torch.autograd.grad(values if values.dim() == 0 else values.sum(), (hidden, weight))

        with job.case(f"{name}, forward and backward"):
            with torch.no_grad():
                values = logprobs(hidden, weight, targets)
            memory, seconds = peak_memory(run), seconds_of(run)
            checked: list[Value] = []
            if values.dim():  # Liger returns only the sum
                checked = [("largest error", (values[few] - expected).abs().max().item(), "nats")]
            job.row(name, ("time", 1e3 * seconds, "ms"), *memory, *job.efficiency(flops / seconds / 1e12), *checked)


def head_methods(job: SectionJob, sizes: HeadSizes) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return name -> function of (hidden, weight, targets) that returns log-probabilities [T], or minus their sum (Liger)."""

    def chunked(chunk: int, needs_entropy: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            group = dist.group.WORLD
            assert isinstance(group, dist.ProcessGroup), "measure_head has created the group"
            return linear_logprobs(hidden, weight, targets, group, sizes.vocab, 1.0, chunk, needs_entropy)[0]

        return logprobs

    default = min(DEFAULT_CHUNK, sizes.chunks[-1])
    methods = {f"mrl, chunks of {chunk}": chunked(chunk, False) for chunk in sizes.chunks}
    methods[f"mrl, chunks of {default}, with entropies (mrl's choice)"] = chunked(default, True)
    if find_spec("liger_kernel") is None:
        job.leave_out("Liger's fused linear cross-entropy", "Liger is not installed; pip install liger-kernel")
    elif not has_cuda():
        job.leave_out("Liger's fused linear cross-entropy", "its kernels need a GPU")
    else:
        loss = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(reduction="sum")
        methods["Liger's fused linear cross-entropy"] = lambda hidden, weight, targets: loss(weight, hidden, targets)
    return methods | {
        "whole logits in torch": lambda hidden, weight, targets: whole_logprobs(hidden, weight, targets)[0]
    }


# Transfers and checksums.


@dataclass(frozen=True)
class TransferSizes:
    """Sizes of a weight push (buckets), and of a file of a checkpoint (file_bytes)."""

    bucket_bytes: int
    num_buckets: int
    file_bytes: int


TRANSFERS = {
    "full": TransferSizes(64 * MIB, 64, GIB),
    "small": TransferSizes(64 * MIB, 16, 256 * MIB),
    "toy": TransferSizes(MIB, 16, 4 * MIB),
}
PEER_TIMEOUT_S = 300.0  # longest wait for a message of the other process, which may first import torch from a slow disk


def measure_ipc(job: SectionJob) -> None:
    """Section ipc: measure the GB/s from one process to another on one device, through transfer buffers.

    mrl/weight_sync/transports.py explains transfer buffers.
    """
    set_threads()
    sizes, context = TRANSFERS[job.spec.size], multiprocessing.get_context("spawn")
    name = "CUDA IPC" if has_cuda() else "shared memory"
    job.progress(f"starting the receiver of {name}")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive_buckets, args=(theirs, sizes), daemon=True)
    receiver.start()
    theirs.close()  # otherwise this process would not notice when the receiver ends
    endpoint = (CudaIpcSendEndpoint if has_cuda() else SharedMemorySendEndpoint)(sizes.bucket_bytes)
    source = torch.randint(0, 256, (sizes.bucket_bytes,), dtype=torch.uint8, device=device())
    ours.send((endpoint.handle(), checksums([source])))
    mapped_s = _receive(ours)
    endpoint.on_connected()
    for turn in ("warm-up", "push"):
        job.progress(f"{turn} of {sizes.num_buckets} buckets through {name}")
        begun = time.perf_counter()
        for index in range(sizes.num_buckets):
            if index >= NUM_TRANSFER_BUFFERS:
                _receive(ours)  # the acknowledgement of the bucket that used this transfer buffer
            endpoint.transfer_buffers[index % NUM_TRANSFER_BUFFERS].copy_(source)
            endpoint.send(index, sizes.bucket_bytes, [0])  # to receiver 0
            ours.send(index)
        for _ in range(NUM_TRANSFER_BUFFERS):
            _receive(ours)
        seconds = time.perf_counter() - begun
    copy_s, correct = _receive(ours)
    receiver.join(PEER_TIMEOUT_S)
    endpoint.close()
    if not correct:
        raise RuntimeError(f"{name}: the receiver read other bytes than the sender wrote")
    total = sizes.bucket_bytes * sizes.num_buckets
    job.row(
        f"{name}, {sizes.num_buckets} buckets of {sizes.bucket_bytes / MIB:.0f} MiB",
        ("push", total / seconds / 1e9, "GB/s"),
        ("copy in the receiver", total / copy_s / 1e9, "GB/s"),
        ("mapping of the slots", 1e3 * mapped_s, "ms"),
    )


def _receive(connection: Connection):
    if not connection.poll(PEER_TIMEOUT_S):
        raise RuntimeError(f"the other process sent nothing within {PEER_TIMEOUT_S:.0f} s")
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError("the other process has ended; its error is above this line") from None


def receive_buckets(connection: Connection, sizes: TransferSizes) -> None:
    """Receive the warm-up and the push in a separate process: copy each bucket out of its buffer and acknowledge it."""
    kill_with_parent()
    set_threads()
    handle, expected = _receive(connection)
    begun = time.perf_counter()
    endpoint = SharedBuffersRecvEndpoint({0: handle})
    connection.send(time.perf_counter() - begun)
    target = torch.empty(sizes.bucket_bytes, dtype=torch.uint8, device=device())
    for _ in range(2):
        copy_s = 0.0
        for _ in range(sizes.num_buckets):
            index = _receive(connection)
            begun = time.perf_counter()
            target.copy_(endpoint.receive(0, index, sizes.bucket_bytes))
            synchronize()
            copy_s += time.perf_counter() - begun
            connection.send(index)
    connection.send((copy_s, checksums([target]) == expected))
    endpoint.close()


def measure_checksums(job: SectionJob) -> None:
    """Section hashing: measure the fraction of the time that checksums take in a weight push, and in writing a checkpoint."""
    set_threads()
    sizes = TRANSFERS[job.spec.size]
    with job.case("checksums of a weight push"):
        bucket = bucket_of(sizes.bucket_bytes)
        buffer, copy = (torch.empty(bucket.nbytes, dtype=torch.uint8, device=device()) for _ in range(2))
        values = {c.name: torch.randn(c.box.sizes, device=device(), dtype=torch.bfloat16) for c in bucket.chunks}

        def fill() -> Sequence[int]:
            return fill_buffer(buffer, bucket, lambda name, box: values[name])

        fill_s = seconds_of(fill)
        copy_s = seconds_of(lambda: copy.copy_(buffer))
        hash_s = seconds_of(lambda: checksums(chunk_views(buffer, bucket)))
        # fill_s includes the checksums of the sender. The receiver copies the bucket and computes its checksums again.
        push_s = fill_s + copy_s + hash_s
        job.row(
            f"weight push, bucket of {bucket.nbytes / MIB:.0f} MiB",
            ("checksums", bucket.nbytes / hash_s / 1e9, "GB/s"),
            ("copy", bucket.nbytes / copy_s / 1e9, "GB/s"),
            ("share of checksums in a push", 100 * min(1.0, 2 * hash_s / push_s), "%"),
        )
    with job.case("hash of a file of a checkpoint"), TemporaryDirectory(prefix="mrl-bench-") as folder:
        path, data = Path(folder, "file"), bytes(sizes.file_bytes)
        begun = time.perf_counter()
        path.write_bytes(data)
        fsync_path(path)
        write_s = time.perf_counter() - begun
        hash_s = seconds_of(lambda: hash_file(path), least=1)
        job.row(
            f"checkpoint, file of {sizes.file_bytes / MIB:.0f} MiB",
            ("hash", sizes.file_bytes / hash_s / 1e9, "GB/s"),
            ("write and sync", sizes.file_bytes / write_s / 1e9, "GB/s"),
            ("share of the hash", 100 * hash_s / (write_s + hash_s), "%"),
        )


def bucket_of(nbytes: int) -> Bucket:
    """Return a bucket of bfloat16 matrices with about `nbytes` bytes. Each matrix takes half of the remaining bytes."""
    width, chunks, left = 64, [], nbytes // 2
    while left >= width:
        rows = max(1, left // 2 // width)
        chunks.append(TensorChunk(f"t{len(chunks)}", Box.whole((rows, width)), "p", "bfloat16", 2))
        left -= rows * width
    return Bucket(0, 0, (0,), tuple(chunks))
