"""An HTTP endpoint with OpenAI's API in front of the engines of a pool, for harnesses that know only one URL."""

import asyncio
import hmac
from typing import TYPE_CHECKING, Self

from mrl.config.secrets import authorization
from mrl.evaluation.engines import EngineWatcher
from mrl.rollout.client import EngineError
from mrl.rollout.engine_pool import deadline_error

if TYPE_CHECKING:
    from aiohttp import web

MAX_BODY_BYTES = 256 * 1024**2  # largest request


class OpenAIEndpoint:
    """HTTP server on this machine that forwards each request to one of the engines. A context manager starts and ends it.

    It requires the engine key as API key. The engines need a tokenizer. If an engine fails, another one gets its requests. The
    server runs in the event loop of the pool.
    """

    def __init__(self, watcher: EngineWatcher, limit: int) -> None:
        """`limit`: largest number of concurrent requests to one engine."""
        self.url = ""  # http://HOST:PORT/v1, set when the server has started
        self._watcher, self._limit = watcher, limit
        self._runner: web.AppRunner | None = None

    def __enter__(self) -> Self:
        self._watcher.pool.submit(self._start()).result()
        return self

    def __exit__(self, *error: object) -> None:
        if self._runner is not None:
            self._watcher.pool.submit(self._runner.cleanup()).result()

    async def _start(self) -> None:
        from aiohttp import web  # the import takes half a second

        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _forward(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), authorization()["authorization"].encode()):
            return web.json_response(_error("the API key is not the engine key (MRL_ENGINE_KEY)"), status=401)
        path, body = request.path, await request.read()
        try:
            status, content, kind = await self._watcher.call(lambda: self._post(path, body), self._limit)
        except EngineError as error:
            return web.json_response(_error(str(error)), status=502)
        return web.Response(status=status, body=content, content_type=kind)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        timeout_s = self._watcher.pool.spec.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._watcher.pool.forward(path, body)
        except TimeoutError:
            raise deadline_error(timeout_s) from None


def _error(message: str) -> dict[str, dict[str, str]]:
    return {"error": {"message": message}}
