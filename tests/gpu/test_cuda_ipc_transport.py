"""CUDA IPC transport between two processes on one GPU, and checksums computed on the GPU. Run with `pytest -m gpu`.

Sender and receiver run in separate processes, because CUDA does not survive a fork.
"""

import subprocess
import sys

import pytest

SENDER = """
import pickle, sys, time
from pathlib import Path
import torch
from models.conversion.mapping import Box
from mrl.weight_sync.sender import _weighted_sum, checksum, fill_buffer
from mrl.weight_sync.transfer_plan import Bucket, TensorChunk
from mrl.weight_sync.transports import CudaIpcSendEndpoint

folder = Path(sys.argv[1])
shapes = [(300, 70), (5,), (64, 64)]
chunks = [TensorChunk(f"t{i}", Box.whole(s), "p", "bfloat16", 2) for i, s in enumerate(shapes)]
torch.manual_seed(0)
tensors = {p.name: torch.randn(p.box.sizes, device="cuda") for p in chunks}
buckets = [Bucket(0, n, (0,), tuple(chunks)) for n in range(4)]
send_endpoint = CudaIpcSendEndpoint(buckets[0].nbytes)
(folder / "handle").write_bytes(pickle.dumps((send_endpoint.handle(), buckets)))
for bucket in buckets:
    slot = send_endpoint.slots[bucket.index % 2]
    hashes = fill_buffer(slot, bucket, lambda name, box: tensors[name] + bucket.index)
    assert hashes == tuple(
        _weighted_sum((tensors[p.name] + bucket.index).bfloat16().view(-1).view(torch.uint8).cpu()) for p in chunks
    )
    send_endpoint.send(bucket.index, bucket.nbytes, [0])
    (folder / f"sent.{bucket.index}.part").write_bytes(pickle.dumps(hashes))
    (folder / f"sent.{bucket.index}.part").rename(folder / f"sent.{bucket.index}")
    while not (folder / f"acknowledged.{bucket.index}").exists():
        time.sleep(0.01)
"""

RECEIVER = """
import pickle, sys, time
from pathlib import Path
import torch
from mrl.weight_sync.sender import checksum, chunk_views
from mrl.weight_sync.transports import SharedSlotsRecvEndpoint

folder = Path(sys.argv[1])
while not (folder / "handle").exists():
    time.sleep(0.05)
handle, buckets = pickle.loads((folder / "handle").read_bytes())
recv_endpoint = SharedSlotsRecvEndpoint({0: handle})
for bucket in buckets:
    while not (folder / f"sent.{bucket.index}").exists():
        time.sleep(0.01)
    hashes = pickle.loads((folder / f"sent.{bucket.index}").read_bytes())
    data = recv_endpoint.receive(0, bucket.index, bucket.nbytes)
    mine = [torch.empty(p.box.sizes, dtype=torch.bfloat16, device="cuda") for p in bucket.chunks]
    for target, chunk in zip(mine, chunk_views(data, bucket)):
        target.copy_(chunk)
    torch.cuda.current_stream().synchronize()
    assert tuple(checksum(t) for t in mine) == hashes
    (folder / f"acknowledged.{bucket.index}").touch()
recv_endpoint.close()
"""


@pytest.mark.gpu
def test_a_receiver_reads_the_senders_slots_through_cuda_ipc(tmp_path):
    programs = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for code in (SENDER, RECEIVER)
    ]
    try:
        for program in programs:
            _, errors = program.communicate(timeout=120)
            assert program.returncode == 0, errors
    finally:
        for program in programs:
            program.kill()
