"""Small HTTP servers that answer like SGLang and can be made to fail in ways that a real server cannot."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from aiohttp import web
from safetensors.torch import load_file

from mrl.config.process_schema import FaultToleranceConfig
from mrl.rollout.client import SamplingParams
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.spec import RolloutSpec

BROKEN = 0
"""Value for `statuses`: the server breaks the connection instead of answering."""


def reserve_port() -> socket.socket:
    """Return a socket that is bound to a free port of 127.0.0.1. While the socket is open, no other process gets the port.

    The socket does not listen. Connections to the port are refused unless a server of this process listens on it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


class HttpEngine:
    """HTTP server that completes each prompt with one token: the prompt's first token plus one.

    `statuses`: HTTP statuses of the first answers; later answers have status 200. `computing`: whether the heartbeat advances.
    """

    ready_status = 200
    server_info: ClassVar[dict] = {"enable_deterministic_inference": True}
    key = ""  # API key that requests must have; "": they need none

    def __init__(self, *, delay_s: float = 0.01, statuses: tuple[int, ...] = (), computing: bool = True) -> None:
        self.delay_s, self.statuses, self.computing = delay_s, list(statuses), computing
        self.inputs: list[list[int]] = []
        self.seeds: list[int | None] = []
        self.lora_paths: list[str | None] = []  # of each request
        self.posts = self.busy = self.busiest = self.heartbeats = 0
        self._port = reserve_port()  # stays open after `stop`, so that connections to this port are refused
        self.url = f"http://127.0.0.1:{self._port.getsockname()[1]}"
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def _serve(self, ready: threading.Event) -> None:
        async def start() -> None:
            app = web.Application()
            app.router.add_post("/generate", self.generate)
            app.router.add_post("/v1/completions", self.generate)
            app.router.add_get("/v1/loads", self.loads)
            app.router.add_get("/ready", lambda request: asyncio.sleep(0, web.Response(status=self.ready_status)))
            app.router.add_get("/server_info", self.describe)
            self.add_routes(app.router)
            # With `handler_cancellation`, the handler of a request stops when the client disconnects.
            self._runner = web.AppRunner(app, handler_cancellation=True)
            await self._runner.setup()
            await web.TCPSite(self._runner, *self._port.getsockname(), reuse_address=True).start()
            ready.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add further requests that the server answers."""

    async def loads(self, request: web.Request) -> web.Response:
        self.heartbeats += self.computing
        return web.json_response({"loads": [{"timestamp": float(self.heartbeats)}]})

    def refuses(self, request: web.Request) -> bool:
        return bool(self.key) and request.headers.get("authorization") != f"Bearer {self.key}"

    async def describe(self, request: web.Request) -> web.Response:
        if self.refuses(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response(self.server_info)

    async def generate(self, request: web.Request) -> web.Response:
        if self.refuses(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        self.posts += 1
        self.lora_paths.append(body.get("lora_path"))
        self.inputs += body.get("input_ids", [])
        self.seeds += [params.get("sampling_seed") for params in body.get("sampling_params", [])]
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.busy -= 1
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            if status == BROKEN and request.transport:
                request.transport.abort()
            return web.json_response({"error": {"message": "out of tokens"}}, status=status)
        return web.json_response(self.answers(body))

    def answers(self, body: dict) -> Any:
        """Return the JSON of the answer to one request."""
        return [self.answer(ids) for ids in body["input_ids"]]

    def completion(self, ids: list[int]) -> list[int]:
        return [ids[0] + 1]

    def answer(self, ids: list[int]) -> dict:
        tokens = self.completion(ids)
        info = dict(
            finish_reason={"type": "stop"},
            output_token_logprobs=[[-0.5, token] for token in tokens],
            weight_version="3",
            cached_tokens=len(ids) - 1,
        )
        return {"output_ids": tokens, "meta_info": info}

    def stop(self) -> None:
        """Close the connections and refuse new ones."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)


class AdapterEngine(HttpEngine):
    """HTTP server that keeps the LoRA adapters that it gets, as an engine with room for three of them.

    `refuse`: whether it refuses new adapters. `in_use`: whether requests use all adapters for a minute.
    """

    tp = 2
    server_info: ClassVar[dict] = dict(
        device="cpu",
        dtype="float32",
        tp_size=tp,
        ep_size=1,
        enable_dp_attention=False,
        internal_states=[{}],
        max_loras_per_batch=3,
    )

    def __init__(self, *, refuse: bool = False, in_use: bool = False) -> None:
        self.refuse, self.in_use = refuse, in_use
        self.loaded: dict[str, dict[str, Any]] = {}  # name -> matrices A and B by their names in PEFT
        self.configs: dict[str, dict[str, Any]] = {}  # name -> fields of adapter_config.json
        self.folders: dict[str, Path] = {}  # name -> folder of the loaded adapters
        self.load_bytes: list[int] = []  # length of each request to load adapters
        self.unloaded: list[str] = []
        self.version = "0"
        super().__init__()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/models", self.models)
        router.add_post("/load_lora_adapter", self.load)
        router.add_post("/unload_lora_adapter", self.unload)
        router.add_post("/update_weight_version", self.set_version)

    async def models(self, request: web.Request) -> web.Response:
        cards = [dict(id="base", parent=None), *(dict(id=name, parent="base") for name in reversed(self.loaded))]
        return web.json_response({"data": cards})

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refuse:
            return web.json_response({"success": False, "error_message": "no room"}, status=400)
        name, folder = body["lora_name"], Path(body["lora_path"])
        assert name not in self.loaded and all(path.is_dir() for path in self.folders.values())
        self.load_bytes.append(request.content_length or 0)
        self.loaded[name], self.folders[name] = load_file(folder / "adapter_model.safetensors"), folder
        self.configs[name] = json.loads((folder / "adapter_config.json").read_text())
        return web.json_response({"success": True, "error_message": ""})

    async def unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        await asyncio.sleep(60 * self.in_use)
        del self.loaded[name], self.folders[name]
        self.unloaded.append(name)
        return web.json_response({"success": True, "error_message": ""})

    async def set_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})


def spec_of(run_dir, **settings) -> RolloutSpec:
    """Return the spec of an engine pool. Prompts and rewards are None, because the pool does not use them."""
    unused = dict(
        train=None, test=None, reward=None, advantage_pipeline=None, rollout_filter=None, evaluations=(), replay=None
    )
    plain = dict(
        needs_greedy=False, rollout_logprobs_as_old=False, record=False, prompts_per_step=1, responses_per_prompt=1
    )
    sampling = dict(sampling=SamplingParams(8), num_engines=0, engine_urls=(), engine_tp=1, seed=0)
    ours = dict(
        model_path="",
        run_dir=str(run_dir),
        request_timeout_s=30.0,
        fault_tolerance=FaultToleranceConfig(engine_stall_timeout_s=30.0),
    )
    return RolloutSpec(**unused | plain | sampling | ours | settings)


@contextmanager
def engine_pool(*servers: HttpEngine, **settings):
    """Context with an engine pool of these servers, which is ready for requests."""
    engines = EnginePool(spec_of("none", engine_urls=tuple(server.url for server in servers), **settings))
    engines.wait_ready(10)
    try:
        yield engines
    finally:
        engines.close()
