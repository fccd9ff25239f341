"""Simulated SGLang servers that take realistic time but compute nothing: for measurements of rollout schedules.

    python benchmarks/simulated_engine.py --engines 4 --step-ms 20 --request-ms 0.2 --median 400 --sigma 1 --longest 4000
    python benchmarks/simulated_engine.py --recorded completions.jsonl

Serves the part of SGLang's HTTP interface that mrl uses. Time is real, but no work is done per token: a timer waits until the
next response finishes, at the time that mrl.planner.engine_time computes. Prints one URL per engine, then serves until killed.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import orjson
import xxhash
from aiohttp import web

from mrl.config.process_schema import PauseMode
from mrl.planner.engine_time import EngineQueue, EngineSpeeds, SimulatedRequest

MAX_WAIT_S = 3600.0  # of the timer if no response is running; a new request ends the wait


@dataclass(frozen=True)
class ScriptedResponse:
    """A response that is fixed before it is requested."""

    token_ids: Sequence[int]  # [R]
    logprobs: Sequence[float]  # [R]
    finish_reason: str = "stop"


Script = Callable[[Sequence[int], int], ScriptedResponse]
"""(token ids of the prompt, number) -> the response. The number is the sampling seed, else how often the prompt came before."""


@dataclass(frozen=True)
class LogNormalScript:
    """Responses of log-normal length, truncated at `longest` tokens. The length depends only on the prompt and the number."""

    median: float  # tokens
    sigma: float  # of the logarithm of the length
    longest: int  # tokens
    seed: int = 0

    def length(self, prompt: Sequence[int], number: int) -> int:
        """Return the tokens of this response."""
        key = np.array([self.seed, number, *prompt], np.int64).tobytes()
        uniform = (xxhash.xxh3_64_intdigest(key) + 0.5) / 2**64
        tokens = self.median * np.exp(self.sigma * NormalDist().inv_cdf(uniform))
        return int(min(max(1, round(tokens)), self.longest))

    def __call__(self, prompt: Sequence[int], number: int) -> ScriptedResponse:
        tokens = self.length(prompt, number)
        return ScriptedResponse([prompt[-1]] * tokens, [-0.5] * tokens)


class RecordedScript:
    """Responses from a recording, by prompt and number. Raises LookupError for a response that was not recorded."""

    def __init__(self, path: Path) -> None:
        """`path`: lines of {"prompt": [ids], "seed": number, "token_ids": [ids], "logprobs": [...], "finish_reason": ...}."""
        self._responses: dict[tuple[tuple[int, ...], int], ScriptedResponse] = {}
        for line in path.read_bytes().splitlines():
            entry = orjson.loads(line)
            response = ScriptedResponse(entry["token_ids"], entry["logprobs"], entry["finish_reason"])
            self._responses[tuple(entry["prompt"]), entry["seed"]] = response

    def __call__(self, prompt: Sequence[int], number: int) -> ScriptedResponse:
        try:
            return self._responses[tuple(prompt), number]
        except KeyError:
            raise LookupError(
                f"no response is recorded for seed {number} of the prompt {list(prompt)[:8]}..."
            ) from None


@dataclass(eq=False)
class PendingResponse:
    """A requested response, and the future that its HTTP handler waits for."""

    script: ScriptedResponse
    done: asyncio.Future[dict[str, Any]]
    changes: list[tuple[str, int]] = field(default_factory=list)  # (weight version that ended, tokens by then)


class RejectedRequestError(Exception):
    """An HTTP request that the engine answers with status 400 and this message."""


class SimulatedEngine:
    """One server. Servers that share `script` and `counts` give the same responses, whichever of them gets a request."""

    def __init__(self, speeds: EngineSpeeds, script: Script, counts: Counter[tuple[int, ...]], name: str = "") -> None:
        self.script, self.counts, self.name = script, counts, name
        self.queue = EngineQueue(speeds, now=time.monotonic())
        self.version, self.updating, self.beats = "0", False, 0
        self._woken = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    def application(self) -> web.Application:
        """Return the web application with SGLang's routes."""
        app = web.Application(client_max_size=1 << 30)
        posts: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/begin_weight_update": self.begin_update,
            "/end_weight_update": self.end_update,
            "/update_weight_version": self.set_version,
            "/update_weights_from_disk": lambda body: {"success": True, "message": "a simulated engine has no weights"},
            "/abort_request": self.abort,
            "/flush_cache": self.flush,
        }
        gets: dict[str, Callable[[], Mapping[str, Any]]] = {
            "/model_info": lambda: {"model_path": "simulated", "weight_version": self.version},
            "/server_info": self.server_info,
            "/v1/loads": self.loads,
        }
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/ready", self.ready)
        for path, handler in posts.items():
            app.router.add_post(path, partial(self._handle_post, handler))
        for path, handler in gets.items():
            app.router.add_get(path, partial(self._handle_get, handler))
        app.cleanup_ctx.append(self._run_timer)
        return app

    async def generate(self, request: web.Request) -> web.Response:
        """Answer when the last response has finished. As in SGLang, requests that arrive during a pause wait for its end."""
        body = orjson.loads(await request.read())
        prompts, params = body["input_ids"], body["sampling_params"]
        params = [params] * len(prompts) if isinstance(params, dict) else params
        while not self._unpaused.is_set():
            await self._unpaused.wait()
        self._advance_to_now()
        try:
            pending = [self._enqueue(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
        except LookupError as error:
            return _json({"error": {"message": str(error)}}, 400)
        try:
            answers = await asyncio.gather(*(one.done for one in pending))
        except asyncio.CancelledError:  # the client has disconnected
            self._advance_to_now()
            ids = {id(one) for one in pending}
            self.queue.abort(lambda request: id(request.key) in ids)
            raise
        return _json([_without_logprobs(answer) for answer in answers] if not body.get("return_logprob") else answers)

    def _enqueue(self, prompt: Sequence[int], params: Mapping[str, Any]) -> PendingResponse:
        key = tuple(prompt)
        number = params.get("sampling_seed")
        if number is None:
            number = self.counts[key]
            self.counts[key] += 1
        script, longest = self.script(prompt, number), params["max_new_tokens"]
        if len(script.token_ids) > longest:
            script = ScriptedResponse(script.token_ids[:longest], script.logprobs[:longest], "length")
        pending = PendingResponse(script, asyncio.get_running_loop().create_future())
        self.queue.add(SimulatedRequest(pending, key, len(prompt), len(script.token_ids)))
        self._woken.set()
        return pending

    def pause(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Pause in mode retract, in_place or abort."""
        self._unpaused.clear()
        self._answer(self.queue.pause(PauseMode(body.get("mode", "abort"))), "abort")
        return {"status": "ok", "message": "Generation paused successfully."}

    def resume(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Resume; has no effect if the engine is not paused."""
        self.queue.resume()
        self._unpaused.set()
        return {"status": "ok", "message": "Generation continued successfully."}

    def begin_update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Open a weight update session; rejected if one is open."""
        if self.updating:
            raise RejectedRequestError("a weight update session is open already")
        self.updating = True
        return {"success": True, "message": "begun"}

    def end_update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Close the weight update session; rejected if none is open."""
        if not self.updating:
            raise RejectedRequestError("no weight update session is open")
        self.updating = False
        return {"success": True, "message": "ended"}

    def set_version(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Set the weight version of the tokens that are decoded from now on."""
        for request in [*self.queue.running, *self.queue.waiting]:
            if tokens := self.queue.decoded(request):
                request.key.changes.append((self.version, tokens))
        self.version = body["new_version"]
        return {"success": True, "message": f"Weight version updated to {self.version}", "new_version": self.version}

    def abort(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Abort all requests. Aborting by id is not supported."""
        if not body.get("abort_all"):
            raise RejectedRequestError("only abort_all is supported")
        self._answer(self.queue.abort(lambda _: True), "abort")
        return {}

    def flush(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Empty the prefix cache; rejected while requests run, or wait without a pause."""
        if self.queue.running or (self.queue.waiting and not self.queue.paused):
            raise RejectedRequestError("Cache not flushed because there are pending requests.")
        self.queue.flush()
        return {}

    def loads(self) -> dict[str, Any]:
        """Return the load. Its timestamp advances on every call unless the engine is paused: mrl's liveness check reads it."""
        self.beats += not self.queue.paused
        running, waiting = len(self.queue.running), len(self.queue.waiting)
        return {"loads": [{"timestamp": self.beats, "num_running_reqs": running, "num_waiting_reqs": waiting}]}

    def server_info(self) -> dict[str, Any]:
        """Return the settings of the engine, and totals of its work."""
        queue = self.queue
        totals = dict(
            busy_s=queue.busy_s, request_seconds=queue.request_seconds, prefilled_tokens=queue.prefilled_tokens
        )
        return dict(vars(queue.speeds), **totals, name=self.name, enable_deterministic_inference=True)

    async def ready(self, request: web.Request) -> web.Response:
        """Return 503 while the engine is paused, as SGLang does."""
        return web.Response(status=503 if self.queue.paused else 200)

    async def _handle_post(
        self, handler: Callable[[Mapping[str, Any]], Mapping[str, Any]], request: web.Request
    ) -> web.Response:
        content = await request.read()
        self._advance_to_now()
        try:
            return _json(handler(orjson.loads(content) if content else {}))
        except RejectedRequestError as error:
            return _json({"success": False, "message": str(error)}, 400)
        finally:
            self._woken.set()

    async def _handle_get(self, handler: Callable[[], Mapping[str, Any]], request: web.Request) -> web.Response:
        self._advance_to_now()
        return _json(handler())

    async def _run_timer(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._timer())
        yield
        task.cancel()

    async def _timer(self) -> None:
        while True:
            self._woken.clear()
            self._advance_to_now()
            wait_s = min(self.queue.next_finish() - time.monotonic(), MAX_WAIT_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._woken.wait()

    def _advance_to_now(self) -> None:
        """Advance the queue to the current time, and answer the responses that have finished."""
        self._answer(self.queue.advance(time.monotonic()), "")

    def _answer(self, requests: Sequence[SimulatedRequest], reason: str) -> None:
        for request in requests:
            pending: PendingResponse = request.key
            if not pending.done.done():
                pending.done.set_result(self._completion(request, pending, reason or pending.script.finish_reason))

    def _completion(self, request: SimulatedRequest, pending: PendingResponse, reason: str) -> dict[str, Any]:
        """Return the answer in the format of SGLang 0.5.23."""
        tokens = min(int(request.decoded + 1e-9), len(pending.script.token_ids))
        ids = list(pending.script.token_ids[:tokens])
        logprobs = [[x, token, None] for x, token in zip(pending.script.logprobs[:tokens], ids, strict=True)]
        info = dict(
            finish_reason={"type": reason},
            prompt_tokens=request.prompt_tokens,
            completion_tokens=tokens,
            cached_tokens=request.cached_tokens,
            output_token_logprobs=logprobs,
            weight_versions=version_spans(pending.changes, self.version, tokens),
            weight_version=self.version,
        )
        return {"text": "", "output_ids": ids, "meta_info": info}


def version_spans(changes: Sequence[tuple[str, int]], version: str, tokens: int) -> list[dict[str, Any]]:
    """Return [{version, start, end}] of a response's tokens, oldest first. `changes`: (version that ended, tokens by then)."""
    spans: list[dict[str, Any]] = []
    for name, end in [*changes, (version, tokens)]:
        start = spans[-1]["end"] if spans else 0
        if spans and name == spans[-1]["version"]:
            spans[-1]["end"] = end
        elif end > start or not spans:
            spans.append(dict(version=name, start=start, end=end))
    return spans


def _without_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    del answer["meta_info"]["output_token_logprobs"]
    return answer


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


async def start(engines: Sequence[SimulatedEngine]) -> tuple[list[str], list[web.AppRunner]]:
    """Serve each engine on a free port of this machine. Returns their URLs, and the runners to clean up at the end."""
    runners = [web.AppRunner(engine.application(), handler_cancellation=True, access_log=None) for engine in engines]
    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    return [f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners], runners


@contextmanager
def serving(engines: Sequence[SimulatedEngine]) -> Iterator[list[str]]:
    """Serve the engines in a thread of this process until the context ends; yields their URLs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    urls, runners = asyncio.run_coroutine_threadsafe(start(engines), loop).result(10)
    try:
        yield urls
    finally:
        for runner in runners:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def identical_engines(number: int, speeds: EngineSpeeds, script: Script) -> list[SimulatedEngine]:
    """Return engines that give the same responses."""
    counts: Counter[tuple[int, ...]] = Counter()
    return [SimulatedEngine(speeds, script, counts) for _ in range(number)]


async def _serve(engines: Sequence[SimulatedEngine]) -> None:
    urls, _ = await start(engines)
    print("\n".join(urls), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=20.0, help="fixed part of a decoding step")
    parser.add_argument("--request-ms", type=float, default=0.2, help="part of a decoding step per running request")
    parser.add_argument("--prefill-ms", type=float, default=0.02, help="prefill of one token")
    parser.add_argument("--max-running", type=int, default=64, help="requests that one engine runs at one time")
    parser.add_argument("--median", type=float, default=400, help="median response length, tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="sigma of the logarithm of the length")
    parser.add_argument("--longest", type=int, default=4000, help="longest response, tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    parser.add_argument("--recorded", type=Path, help="give the responses in this file")
    args = parser.parse_args()
    milliseconds = args.step_ms, args.request_ms, args.prefill_ms
    speeds = EngineSpeeds(*(value / 1000 for value in milliseconds), args.max_running)
    script = (
        RecordedScript(args.recorded)
        if args.recorded
        else LogNormalScript(args.median, args.sigma, args.longest, args.seed)
    )
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(identical_engines(args.engines, speeds, script)))


if __name__ == "__main__":
    main()
