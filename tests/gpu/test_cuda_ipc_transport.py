"""A process reads the transfer buffers of a sender on the same device, and the device computes checksums.

On a GPU, these buffers are in GPU memory, and the process opens them through CUDA IPC. On the CPU, they are in shared memory.
"""

import pickle
import time
from pathlib import Path

import torch

from models.conversion.mapping import Box
from mrl.weight_sync.sender import checksums, chunk_views, fill_buffer, weighted_sums
from mrl.weight_sync.transfer_plan import Bucket, TensorChunk
from mrl.weight_sync.transports import CudaIpcSendEndpoint, SharedBuffersRecvEndpoint, SharedMemorySendEndpoint
from parallel.device import device, has_cuda, synchronize

DEADLINE_S = 100


def wait_for(file: Path) -> bytes:
    end = time.monotonic() + DEADLINE_S
    while not file.exists():
        assert time.monotonic() < end, f"{file} was not written within {DEADLINE_S} s"
        time.sleep(0.01)
    return file.read_bytes()


def write(file: Path, content: object) -> None:
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(pickle.dumps(content))
    part.rename(file)


def send(folder: Path) -> None:
    torch.set_num_threads(1)
    shapes = [(300, 70), (5,), (64, 64)]
    chunks = [TensorChunk(f"t{i}", Box.whole(s), "p", "bfloat16", 2) for i, s in enumerate(shapes)]
    torch.manual_seed(0)
    tensors = {p.name: torch.randn(p.box.sizes, device=device()) for p in chunks}
    buckets = [Bucket(0, n, (0,), tuple(chunks)) for n in range(4)]
    endpoint_class = CudaIpcSendEndpoint if has_cuda() else SharedMemorySendEndpoint
    send_endpoint = endpoint_class(buckets[0].nbytes)
    write(folder / "handle", (send_endpoint.handle(), buckets))
    wait_for(folder / "connected")
    send_endpoint.on_connected()
    for bucket in buckets:
        buffer = send_endpoint.transfer_buffers[bucket.index % 2]
        hashes = fill_buffer(buffer, bucket, lambda name, box, bucket=bucket: tensors[name] + bucket.index)
        if has_cuda():  # on a CPU, the checksum is another function
            sent = [(tensors[p.name] + bucket.index).bfloat16().view(-1).view(torch.uint8).cpu() for p in chunks]
            assert hashes == weighted_sums(sent)
        send_endpoint.send(bucket.index, bucket.nbytes, [0])
        write(folder / f"sent.{bucket.index}", hashes)
        wait_for(folder / f"acknowledged.{bucket.index}")
    send_endpoint.close()


def receive(folder: Path) -> None:
    torch.set_num_threads(1)
    handle, buckets = pickle.loads(wait_for(folder / "handle"))
    recv_endpoint = SharedBuffersRecvEndpoint({0: handle})
    (folder / "connected").touch()
    for bucket in buckets:
        hashes = pickle.loads(wait_for(folder / f"sent.{bucket.index}"))
        data = recv_endpoint.receive(0, bucket.index, bucket.nbytes)
        mine = [torch.empty(p.box.sizes, dtype=torch.bfloat16, device=device()) for p in bucket.chunks]
        for target, chunk in zip(mine, chunk_views(data, bucket), strict=True):
            target.copy_(chunk)
        synchronize()
        assert checksums(mine) == hashes
        (folder / f"acknowledged.{bucket.index}").touch()
    recv_endpoint.close()


def test_a_receiver_reads_the_slots_of_a_sender_on_its_device(start_process, tmp_path):
    for process in [start_process(send, tmp_path), start_process(receive, tmp_path)]:
        process.join(DEADLINE_S + 20)
        assert process.exitcode == 0, process
