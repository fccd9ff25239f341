"""Simulated SGLang servers that take realistic time but compute nothing: for measurements of rollout schedules.

    python benchmarks/simulated_engine.py --engines 4 --step-ms 20 --request-ms 0.2 --median 400 --sigma 1 --longest 4000
    python benchmarks/simulated_engine.py --recorded completions.jsonl

The servers have the part of SGLang's HTTP interface that mrl uses. Time is real, but no work is done for each token. Instead,
mrl.planner.engine_time computes when the next response finishes, and a timer waits until then. The script prints one URL for each
engine, and serves until it is killed.
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

MAX_WAIT_S = 3600.0  # longest wait of the timer if no response is running; a new request ends the wait


@dataclass(frozen=True)
class ScriptedResponse:
    """A response that is determined before the request arrives."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]  # log-probability of each token
    finish_reason: str = "stop"


Script = Callable[[Sequence[int], int], ScriptedResponse]
"""A function that takes the token ids of a prompt and a number, and returns the response.

The number is the sampling seed of the request. If the request has no seed, the number counts the earlier requests with this
prompt and without a seed.
"""


@dataclass(frozen=True)
class LogNormalScript:
    """Responses of log-normal length, truncated at `longest` tokens. The length depends only on the prompt and the number."""

    median: float  # median length, in tokens
    sigma: float  # standard deviation of the logarithm of the length
    longest: int  # largest length, in tokens
    seed: int = 0

    def length(self, prompt: Sequence[int], number: int) -> int:
        """Return the number of tokens in this response."""
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
        """Read a file with a JSON object per line. Its keys are prompt, seed, token_ids, logprobs and finish_reason."""
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

    scripted: ScriptedResponse
    done: asyncio.Future[dict[str, Any]]
    # (replaced weight version, number of tokens when it was replaced), for each change of the weight version
    changes: list[tuple[str, int]] = field(default_factory=list)


class RejectedRequestError(Exception):
    """An HTTP request that the engine answers with status 400 and this message."""


class SimulatedEngine:
    """One server. Servers that share `script` and `counts` give the same response to a request."""

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
        """Answer when the last response of the request has finished.

        As in SGLang, requests that arrive during a pause wait until the pause ends.
        """
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
        scripted, longest = self.script(prompt, number), params["max_new_tokens"]
        if len(scripted.token_ids) > longest:
            scripted = ScriptedResponse(scripted.token_ids[:longest], scripted.logprobs[:longest], "length")
        pending = PendingResponse(scripted, asyncio.get_running_loop().create_future())
        self.queue.add(SimulatedRequest(pending, key, len(prompt), len(scripted.token_ids)))
        self._woken.set()
        return pending

    def pause(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Pause the engine. The mode is retract, in_place or abort."""
        self._unpaused.clear()
        self._answer(self.queue.pause(PauseMode(body.get("mode", "abort"))), "abort")
        return {"status": "ok", "message": "Generation paused successfully."}

    def resume(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Resume the engine. Has no effect if the engine is not paused."""
        self.queue.resume()
        self._unpaused.set()
        return {"status": "ok", "message": "Generation continued successfully."}

    def begin_update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Open a weight update session. The request is rejected if a session is open already."""
        if self.updating:
            raise RejectedRequestError("a weight update session is open already")
        self.updating = True
        return {"success": True, "message": "begun"}

    def end_update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Close the weight update session. The request is rejected if no session is open."""
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
        """Abort all requests. Aborting a single request is not supported."""
        if not body.get("abort_all"):
            raise RejectedRequestError("only abort_all is supported")
        self._answer(self.queue.abort(lambda _: True), "abort")
        return {}

    def flush(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Empty the prefix cache.

        The request is rejected if requests are running, or if requests are waiting and the engine is not paused.
        """
        if self.queue.running or (self.queue.waiting and not self.queue.paused):
            raise RejectedRequestError("Cache not flushed because there are pending requests.")
        self.queue.flush()
        return {}

    def loads(self) -> dict[str, Any]:
        """Return the load of the engine, with a timestamp that every call advances if the engine is not paused.

        The liveness check of mrl reads the timestamp.
        """
        self.beats += not self.queue.paused
        running, waiting = len(self.queue.running), len(self.queue.waiting)
        return {"loads": [{"timestamp": self.beats, "num_running_reqs": running, "num_waiting_reqs": waiting}]}

    def server_info(self) -> dict[str, Any]:
        """Return the settings of the engine, and the totals of its work so far."""
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
        """Advance the queue to the current time, and answer the requests whose responses have finished."""
        self._answer(self.queue.advance(time.monotonic()), "")

    def _answer(self, requests: Sequence[SimulatedRequest], reason: str) -> None:
        for request in requests:
            pending: PendingResponse = request.key
            if not pending.done.done():
                pending.done.set_result(self._completion(request, pending, reason or pending.scripted.finish_reason))

    def _completion(self, request: SimulatedRequest, pending: PendingResponse, reason: str) -> dict[str, Any]:
        """Return the answer in the format of SGLang 0.5.23."""
        tokens = min(int(request.decoded + 1e-9), len(pending.scripted.token_ids))
        ids = list(pending.scripted.token_ids[:tokens])
        logprobs = [[x, token, None] for x, token in zip(pending.scripted.logprobs[:tokens], ids, strict=True)]
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
    """Return which weight version sampled which tokens of a response, as [{version, start, end}] in the order of the tokens.

    `changes` are pairs (replaced version, number of tokens when it was replaced). `version` sampled the last tokens.
    """
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
    """Serve each engine on a free port of this machine.

    Returns the URLs of the engines, and the runners, which the caller must clean up.
    """
    runners = [web.AppRunner(engine.application(), handler_cancellation=True, access_log=None) for engine in engines]
    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    return [f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners], runners


@contextmanager
def serving(engines: Sequence[SimulatedEngine]) -> Iterator[list[str]]:
    """Serve the engines in a thread of this process until the context exits. Yields the URLs of the engines."""
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
    parser.add_argument("--step-ms", type=float, default=20.0, help="duration of a decoding step without requests")
    parser.add_argument(
        "--request-ms", type=float, default=0.2, help="duration that each running request adds to a decoding step"
    )
    parser.add_argument("--prefill-ms", type=float, default=0.02, help="duration of the prefill of one token")
    parser.add_argument("--max-running", type=int, default=64, help="requests that one engine runs at one time")
    parser.add_argument("--median", type=float, default=400, help="median response length, tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logarithm of the length")
    parser.add_argument("--longest", type=int, default=4000, help="longest response, tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    parser.add_argument("--recorded", type=Path, help="answer with the recorded responses in this file")
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
