"""Engines that take as long as SGLang would and compute nothing: for measuring what a schedule of rollouts is worth.

    python benchmarks/simulated_engine.py --engines 4 --step-ms 20 --request-ms 0.2 --median 400 --sigma 1 --longest 4000
    python benchmarks/simulated_engine.py --recorded completions.jsonl

Speaks what mrl needs of SGLang's HTTP. Time is real, but nothing is done for each token: a timer waits for the next response
that is done (mrl.planner.engine_queue says when). Prints one URL per engine, then serves until it is killed.
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

from mrl.planner.engine_queue import EngineQueue, EngineSpeeds, SimulatedRequest

NEVER_S = 3600.0  # a timer that only what comes in ends


@dataclass(frozen=True)
class Scripted:
    """A response that is known before it is asked for."""

    token_ids: Sequence[int]  # [R]
    logprobs: Sequence[float]  # [R]
    finish_reason: str = "stop"


Script = Callable[[Sequence[int], int], Scripted]
"""(prompt's token ids, its sampling seed or, without one, how often it was asked for before) -> the response."""


@dataclass(frozen=True)
class LongTailed:
    """Responses of log-normal length, cut at `longest` tokens; the same for the same prompt and number, whoever asks when."""

    median: float  # tokens
    sigma: float  # of the logarithm of the length
    longest: int  # tokens
    seed: int = 0

    def length(self, prompt: Sequence[int], number: int) -> int:
        """Tokens of this response."""
        place = np.array([self.seed, number, *prompt], np.int64).tobytes()
        uniform = (xxhash.xxh3_64_intdigest(place) + 0.5) / 2**64
        tokens = self.median * np.exp(self.sigma * NormalDist().inv_cdf(uniform))
        return int(min(max(1, round(tokens)), self.longest))

    def __call__(self, prompt: Sequence[int], number: int) -> Scripted:
        tokens = self.length(prompt, number)
        return Scripted([prompt[-1]] * tokens, [-0.5] * tokens)


class Recorded:
    """Answers with what was recorded of this prompt and number. Raises LookupError where nothing was."""

    def __init__(self, path: Path) -> None:
        """`path`: lines of {"prompt": [ids], "seed": number, "token_ids": [ids], "logprobs": [...], "finish_reason": ...}."""
        self._known: dict[tuple[tuple[int, ...], int], Scripted] = {}
        for line in path.read_bytes().splitlines():
            entry = orjson.loads(line)
            said = Scripted(entry["token_ids"], entry["logprobs"], entry["finish_reason"])
            self._known[tuple(entry["prompt"]), entry["seed"]] = said

    def __call__(self, prompt: Sequence[int], number: int) -> Scripted:
        try:
            return self._known[tuple(prompt), number]
        except KeyError:
            raise LookupError(f"nothing is recorded for seed {number} of the prompt {list(prompt)[:8]}...") from None


@dataclass(eq=False)
class Asked:
    """A response that somebody waits for."""

    said: Scripted
    done: asyncio.Future[dict[str, Any]]
    changes: list[tuple[str, int]] = field(default_factory=list)  # (version that ended, tokens by then)


class Refusal(Exception):
    """What is asked cannot be done, in words."""


class SimulatedEngine:
    """One server. Several share a `script` and `asked`, so that it does not matter which of them is asked."""

    def __init__(self, speeds: EngineSpeeds, script: Script, asked: Counter[tuple[int, ...]], name: str = "") -> None:
        self.script, self.asked, self.name = script, asked, name
        self.queue = EngineQueue(speeds, now=time.monotonic())
        self.version, self.updating, self.beats = "0", False, 0
        self._woken = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    def application(self) -> web.Application:
        """Its routes, as SGLang has them."""
        app = web.Application(client_max_size=1 << 30)
        posts: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = {
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/begin_weight_update": self.begin_update,
            "/end_weight_update": self.end_update,
            "/update_weight_version": self.set_version,
            "/update_weights_from_disk": lambda body: {"success": True, "message": "nothing is held"},
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
        for path, answer in posts.items():
            app.router.add_post(path, partial(self._posted, answer))
        for path, told in gets.items():
            app.router.add_get(path, partial(self._got, told))
        app.cleanup_ctx.append(self._running)
        return app

    async def generate(self, request: web.Request) -> web.Response:
        """Answers when the last of its prompts is done. Requests that come during a pause wait for its end, as SGLang's do."""
        body = orjson.loads(await request.read())
        prompts, params = body["input_ids"], body["sampling_params"]
        params = [params] * len(prompts) if isinstance(params, dict) else params
        while not self._unpaused.is_set():
            await self._unpaused.wait()
        self._catch_up()
        try:
            ours = [self._ask(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
        except LookupError as error:
            return _json({"error": {"message": str(error)}}, 400)
        try:
            answers = await asyncio.gather(*(asked.done for asked in ours))
        except asyncio.CancelledError:  # nobody waits any more
            self._catch_up()
            gone = {id(asked) for asked in ours}
            self.queue.abort(lambda one: id(one.key) in gone)
            raise
        return _json([_without_logprobs(answer) for answer in answers] if not body.get("return_logprob") else answers)

    def _ask(self, prompt: Sequence[int], params: Mapping[str, Any]) -> Asked:
        key = tuple(prompt)
        number = params.get("sampling_seed")
        if number is None:
            number = self.asked[key]
            self.asked[key] += 1
        said, longest = self.script(prompt, number), params["max_new_tokens"]
        if len(said.token_ids) > longest:
            said = Scripted(said.token_ids[:longest], said.logprobs[:longest], "length")
        asked = Asked(said, asyncio.get_running_loop().create_future())
        self.queue.add(SimulatedRequest(asked, key, len(prompt), len(said.token_ids)))
        self._woken.set()
        return asked

    def pause(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Modes retract, in_place and abort."""
        self._unpaused.clear()
        self._answer(self.queue.pause(body.get("mode", "abort")), "abort")
        return {"status": "ok", "message": "Generation paused successfully."}

    def resume(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Harmless where nothing is paused."""
        self.queue.resume()
        self._unpaused.set()
        return {"status": "ok", "message": "Generation continued successfully."}

    def begin_update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Refused while a session is open."""
        if self.updating:
            raise Refusal("a weight update session is open already")
        self.updating = True
        return {"success": True, "message": "begun"}

    def end_update(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Refused where no session is open."""
        if not self.updating:
            raise Refusal("no weight update session is open")
        self.updating = False
        return {"success": True, "message": "ended"}

    def set_version(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Tokens from now on are of this version."""
        for request in [*self.queue.running, *self.queue.waiting]:
            if tokens := self.queue.decoded(request):
                request.key.changes.append((self.version, tokens))
        self.version = body["new_version"]
        return {"success": True, "message": f"Weight version updated to {self.version}", "new_version": self.version}

    def abort(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """All requests; which one is meant by an id is not known here."""
        if not body.get("abort_all"):
            raise Refusal("only abort_all is understood")
        self._answer(self.queue.abort(lambda _: True), "abort")
        return {}

    def flush(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Refused while requests run, or wait and are not paused."""
        if self.queue.running or (self.queue.waiting and not self.queue.paused):
            raise Refusal("Cache not flushed because there are pending requests.")
        self.queue.flush()
        return {}

    def loads(self) -> dict[str, Any]:
        """Shows signs of life whenever it is looked at while it is not paused."""
        self.beats += not self.queue.paused
        running, waiting = len(self.queue.running), len(self.queue.waiting)
        return {"loads": [{"timestamp": self.beats, "num_running_reqs": running, "num_waiting_reqs": waiting}]}

    def server_info(self) -> dict[str, Any]:
        """What it was started with, and what it has done."""
        queue = self.queue
        did = dict(busy_s=queue.busy_s, request_seconds=queue.request_seconds, prefilled_tokens=queue.prefilled_tokens)
        return dict(vars(queue.speeds), **did, name=self.name, enable_deterministic_inference=True)

    async def ready(self, request: web.Request) -> web.Response:
        """As SGLang's: not while it is paused."""
        return web.Response(status=503 if self.queue.paused else 200)

    async def _posted(
        self, answer: Callable[[Mapping[str, Any]], Mapping[str, Any]], request: web.Request
    ) -> web.Response:
        content = await request.read()
        self._catch_up()
        try:
            return _json(answer(orjson.loads(content) if content else {}))
        except Refusal as refusal:
            return _json({"success": False, "message": str(refusal)}, 400)
        finally:
            self._woken.set()

    async def _got(self, told: Callable[[], Mapping[str, Any]], request: web.Request) -> web.Response:
        self._catch_up()
        return _json(told())

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        yield
        task.cancel()

    async def _watch(self) -> None:
        while True:
            self._woken.clear()
            self._catch_up()
            wait_s = min(self.queue.next_finish() - time.monotonic(), NEVER_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._woken.wait()

    def _catch_up(self) -> None:
        """Bring the queue to this moment, and answer what is done."""
        self._answer(self.queue.advance(time.monotonic()), "")

    def _answer(self, requests: Sequence[SimulatedRequest], reason: str) -> None:
        for request in requests:
            asked: Asked = request.key
            if not asked.done.done():
                asked.done.set_result(self._completion(request, asked, reason or asked.said.finish_reason))

    def _completion(self, request: SimulatedRequest, asked: Asked, reason: str) -> dict[str, Any]:
        """As SGLang 0.5.23 answers."""
        tokens = min(int(request.decoded + 1e-9), len(asked.said.token_ids))
        ids = list(asked.said.token_ids[:tokens])
        logprobs = [[x, token, None] for x, token in zip(asked.said.logprobs[:tokens], ids, strict=True)]
        info = dict(
            finish_reason={"type": reason},
            prompt_tokens=request.prompt_tokens,
            completion_tokens=tokens,
            cached_tokens=request.cached_tokens,
            output_token_logprobs=logprobs,
            weight_versions=spans(asked.changes, self.version, tokens),
            weight_version=self.version,
        )
        return {"text": "", "output_ids": ids, "meta_info": info}


def spans(changes: Sequence[tuple[str, int]], version: str, tokens: int) -> list[dict[str, Any]]:
    """[{version, start, end}] of a response's tokens, oldest first; `changes`: (version that ended, tokens by then)."""
    found: list[dict[str, Any]] = []
    for name, end in [*changes, (version, tokens)]:
        start = found[-1]["end"] if found else 0
        if found and name == found[-1]["version"]:
            found[-1]["end"] = end
        elif end > start or not found:
            found.append(dict(version=name, start=start, end=end))
    return found


def _without_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    del answer["meta_info"]["output_token_logprobs"]
    return answer


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


async def start(engines: Sequence[SimulatedEngine]) -> tuple[list[str], list[web.AppRunner]]:
    """Serve each on a free port of this machine; their URLs, and what to clean up in the end."""
    runners = [web.AppRunner(engine.application(), handler_cancellation=True, access_log=None) for engine in engines]
    for runner in runners:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    return [f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners], runners


@contextmanager
def serving(engines: Sequence[SimulatedEngine]) -> Iterator[list[str]]:
    """Their URLs; they are served by a thread of this process until the context ends."""
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


def alike(number: int, speeds: EngineSpeeds, script: Script) -> list[SimulatedEngine]:
    """So many engines that say the same."""
    asked: Counter[tuple[int, ...]] = Counter()
    return [SimulatedEngine(speeds, script, asked) for _ in range(number)]


async def _serve(engines: Sequence[SimulatedEngine]) -> None:
    urls, _ = await start(engines)
    print("\n".join(urls), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of a decoding step, besides its requests")
    parser.add_argument("--request-ms", type=float, default=0.2, help="of a decoding step, for each running request")
    parser.add_argument("--prefill-ms", type=float, default=0.02, help="of a prompt token")
    parser.add_argument("--max-running", type=int, default=64, help="requests of one engine")
    parser.add_argument("--median", type=float, default=400, help="length of a response, tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the length")
    parser.add_argument("--longest", type=int, default=4000, help="response, tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--recorded", type=Path, help="answer with the completions in this file")
    known = parser.parse_args()
    milliseconds = known.step_ms, known.request_ms, known.prefill_ms
    speeds = EngineSpeeds(*(value / 1000 for value in milliseconds), known.max_running)
    script = (
        Recorded(known.recorded) if known.recorded else LongTailed(known.median, known.sigma, known.longest, known.seed)
    )
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(alike(known.engines, speeds, script)))


if __name__ == "__main__":
    main()
