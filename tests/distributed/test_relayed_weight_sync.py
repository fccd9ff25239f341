"""Whole pushes to engines that share GPUs with the trainer: real processes, with shared memory in place of CUDA IPC.

There are four simulated GPUs on two simulated hosts. Each trainer rank and each engine rank reports that its weights are on one
of these GPUs. As with CUDA, an engine rank cannot open a transfer buffer on another GPU. The engines answer the control
requests that SGLang servers answer. Each engine rank is a process that runs mrl's receiver on plain tensors.
"""

import base64
import json
import multiprocessing
import os
import pickle
import socket
import sys
import types
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest
import torch
from rank_processes import prepare_fork

from models.architecture import Architecture
from models.families.qwen import QWEN3
from mrl.config.process_schema import WeightSyncConfig
from mrl.config.secrets import engine_key
from mrl.weight_sync import receiver, session, transports
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes
from mrl.weight_sync.sender import RelaySender
from mrl.weight_sync.transfer_plan import ProcessLocation
from parallel.dims import ParallelDims
from parallel.rope import Rope

SIZES = dict(vocab=41, hidden=8, ffn=16, q=8 * 4, kv=2 * 4, head_dim=4, experts=4, moe_ffn=8)
ARCH = Architecture(
    41, 64, Rope(rope_theta=1e4, dim=4), False, dict(num_layers=4, num_attention_heads=8, num_query_groups=2), SIZES
)
GPUS = [ProcessLocation(f"host {n // 2}", f"gpu {n}") for n in range(4)]  # trainer rank n is on GPU n
DIMS = ParallelDims(tp=2, dp=2)
BUCKET_BYTES = 512
DIE_AT_BUCKET = 5


def weights_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in QWEN3.hf_shapes(ARCH).items()}


class TrainerWeights:
    """The weights of one version, with the interface of a trainer rank."""

    dims, rows, sizes, version = DIMS, QWEN3.param_mappings(ARCH), SIZES, 1

    def stage(self, name):
        return 0

    def reader(self):
        tensors = weights_of(self.version)
        return lambda name, box: tensors[name][box.slices]


class EngineModel:
    """Parameters of one engine rank."""

    def __init__(self, layout, tp_rank):
        self.layout, self.tp_rank = layout, tp_rank
        self.named = {name: torch.nn.Parameter(torch.zeros(s)) for name, s in layout.param_shapes(tp_rank).items()}

    def named_parameters(self):
        return self.named.items()

    def parameters(self):
        return iter(self.named.values())

    def holds(self, version):
        tensors = weights_of(version)
        return all(
            torch.equal(
                self.named[s.param].data[(box := s.box_in_param(s.box)).slices],
                tensors[s.name][s.box.slices].view(box.sizes),
            )
            for s in self.layout.shards(self.tp_rank)
        )


def engine_rank(pipe, location, parallel_sizes, tp_rank, kill_file):
    """Main function of the process of one engine rank."""
    for name in (
        "sglang",
        "sglang.srt",
        "sglang.srt.runtime_context",
        "sglang.srt.model_loader",
        "sglang.srt.model_loader.loader",
    ):
        sys.modules[name] = types.ModuleType(name)
    context = sys.modules["sglang.srt.runtime_context"]
    context.get_parallel = lambda: types.SimpleNamespace(tp_rank=tp_rank)
    context.get_model = lambda: types.SimpleNamespace(model_path="/no/such/folder", load_format="auto")
    sys.modules["sglang.srt.model_loader.loader"].post_load_weights = lambda model: None
    receiver.location_of = lambda device: location
    open_handle, receive, received = transports._open_handle, transports.SharedBuffersRecvEndpoint.receive, []

    def open_on_own_gpu(handle):
        assert handle[2] == location.gpu, f"{handle[2]} is not visible on {location.gpu}"
        return open_handle(handle)

    def receive_or_die(self, sender, index, nbytes):
        received.append(index)
        if len(received) > DIE_AT_BUCKET and kill_file.exists():
            os._exit(9)
        return receive(self, sender, index, nbytes)

    transports._open_handle, transports.SharedBuffersRecvEndpoint.receive = open_on_own_gpu, receive_or_die
    model = EngineModel(EngineLayout.of(QWEN3, ARCH, parallel_sizes), tp_rank)
    while True:
        request = pipe.recv()
        if isinstance(request, int):
            pipe.send(model.holds(request))
        else:
            received.clear()
            receiver.handle_message(model, pickle.loads(base64.b64decode(request)))
            pipe.send(None)


class EngineRanks:
    """The processes of an engine's ranks. If one of them dies, the whole server ends, as in SGLang."""

    def __init__(self, places, parallel_sizes, kill_file):
        context, self.pipes, self.versions = multiprocessing.get_context("fork"), [], []
        for tp_rank, location in enumerate(places):
            ours, theirs = context.Pipe()
            context.Process(target=engine_rank, args=(theirs, location, parallel_sizes, tp_rank, kill_file)).start()
            theirs.close()
            self.pipes.append(ours)

    def ask(self, requests):
        try:
            for pipe, request in zip(self.pipes, requests, strict=True):
                pipe.send(request)
            return [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError):
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(9)

    def set_version(self, version):
        self.versions.append((version, self.ask([version] * len(self.pipes))))


class EngineHandler(BaseHTTPRequestHandler):
    """Answers the requests that a push sends to an SGLang server."""

    protocol_version = "HTTP/1.1"
    ranks: EngineRanks

    def do_GET(self):
        info = dict(device="cpu", dtype="float32", enable_dp_attention=False, tp_size=len(self.ranks.pipes), ep_size=1)
        self.answer(info | dict(internal_states=[{}], versions=self.ranks.versions))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "{}")
        if "serialized_named_tensors" in body:
            self.ranks.ask(body["serialized_named_tensors"])
        if "new_version" in body:
            self.ranks.set_version(int(body["new_version"]))
        self.answer({"success": True})

    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def serve_engine(listener, places, parallel_sizes, kill_file):
    """Main function of the process of an engine's server."""
    EngineHandler.ranks = EngineRanks(places, parallel_sizes, kill_file)
    server = ThreadingHTTPServer(listener.getsockname(), EngineHandler, bind_and_activate=False)
    server.socket = listener
    server.serve_forever()


def versions_of(url):
    """Return [version, whether each rank held exactly these weights] for each version that an engine has served."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        return json.loads(answer.read())["versions"]


class SimulatedIpcBuffers(transports.SharedMemorySendEndpoint):
    """Transfer buffers in shared memory that claim to be on the GPU of this trainer rank."""

    def handle(self):
        return *super().handle(), GPUS[torch.distributed.get_rank()].gpu


def push_twice(rank, urls, kill_file):
    """Push versions 1 and 2. An engine dies during the second push. Returns (report 1, versions of all engines, report 2)."""
    session.location_of = lambda device: GPUS[rank]
    session.CudaIpcSendEndpoint = SimulatedIpcBuffers
    session._local_address = lambda url: (
        "localhost"
    )  # for several real hosts, this would be an address that other hosts can reach; simulated hosts are one machine
    weights = TrainerWeights()
    sync = session.LiveSync(
        urls,
        weights,
        partial(EngineLayout.of, QWEN3, ARCH),
        WeightSyncConfig(bucket_bytes=BUCKET_BYTES, timeout_s=60.0),
    )
    assert isinstance(sync.sender, RelaySender)
    first = sync.push(1)
    after_first = [versions_of(url) for url in urls]
    torch.distributed.barrier()
    if rank == 0:
        kill_file.touch()
    torch.distributed.barrier()
    weights.version = 2
    second = sync.push(2)
    sync.close()
    return first, after_first, second


@pytest.mark.extended
@pytest.mark.parametrize(
    ("tp", "places"),
    [(1, [3, 0, 2]), (2, [2, 0, 3, 1])],
    ids=["three engines; GPU 1 has none", "two engines of two ranks, each on both hosts"],
)
def test_a_push_over_relays_reaches_every_engine_and_goes_on_without_one_that_dies(run_ranks, tmp_path, tp, places):
    engine_key()  # every process inherits the key
    context, kill_files, urls, servers = multiprocessing.get_context("fork"), [], [], []
    prepare_fork()
    for number in range(len(places) // tp):
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        kill_files.append(tmp_path / f"kill_{number}")
        own = [GPUS[n] for n in places[number * tp : (number + 1) * tp]]
        servers.append(
            context.Process(target=serve_engine, args=(listener, own, EngineParallelSizes(tp), kill_files[-1]))
        )
        servers[-1].start()
        urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
        listener.close()
    try:
        reports = run_ranks(DIMS, push_twice, urls, kill_files[0], timeout_s=300)
        layout = EngineLayout.of(QWEN3, ARCH, EngineParallelSizes(tp))
        held = sum(shard.box.numel * 4 for tp_rank in range(tp) for shard in layout.shards(tp_rank))
        for first, after_first, second in reports:
            assert not first.failed and after_first == [[[1, [True] * tp]]] * len(urls)
            assert set(second.failed) == {urls[0]}, "the dead engine is the only one that is left out"
        assert sum(first.bytes for first, _, _ in reports) >= held * len(urls)
        assert [versions_of(url)[-1] for url in urls[1:]] == [[2, [True] * tp]] * (len(urls) - 1)
    finally:
        for server in servers:
            processes = [*psutil.Process(server.pid).children(), server] if server.is_alive() else [server]
            for process in processes:
                process.kill()
            server.join()
