"""JSON over HTTP to a model served elsewhere: bounded concurrency, a limit for each call, retries."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.config.secrets import key_in
from mrl.rewards.base import Score
from mrl.rewards.concurrent import gather

Json = dict[str, Any]
Post = Callable[[Json], Awaitable[Any]]
"""A request's body -> the answer's."""


class RemoteError(Exception):
    """The service answered, but with no result."""


class Busy(RemoteError):
    """It may answer better later: 408, 425, 429, or 5xx."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """How a served model is asked; base of the rewards that do.

    A call is repeated after a failure of the network, a timeout, or an answer 408, 425, 429 or 5xx, with growing pauses.

    Raises: ValueError for a malformed URL, limits that are not positive, or an `api_key_env` that is not set,
    or whose key no HTTP header can carry.
    """

    url: str  # of the server, http://HOST:PORT
    concurrency: int = 32  # calls at a time
    timeout_s: float = 60.0  # for one try of a call
    attempts: int = 3  # tries of a call
    deadline_s: float = 240.0  # for a whole batch of responses; what has no answer by then has failed
    api_key_env: str | None = None  # environment variable, where rewards are computed, with the key; sent as Bearer

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r}: expected http://HOST:PORT or https://HOST.")
        for name in ("concurrency", "timeout_s", "attempts", "deadline_s"):
            if vars(self)[name] <= 0:
                raise ValueError(f"{name}={vars(self)[name]}: must be greater than 0.")
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ValueError(
                f"api_key_env={self.api_key_env}: this environment variable is not set; export the key in it."
            )
        self._headers()

    async def ask_all(self, path: str, calls: Sequence[Callable[[Post], Awaitable[Score]]]) -> list[Score]:
        """The score of each call, which is given a function that posts JSON to `path`; failures are recorded."""
        import httpx  # here, because the driver only builds this object

        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(timeout=self.timeout_s, limits=limits, headers=self._headers()) as client:

            async def post(body: Json) -> Any:
                return await self._post(client, self.url.rstrip("/") + path, body)

            bound = [_with(call, post) for call in calls]
            return await gather(bound, concurrency=self.concurrency, deadline_s=self.deadline_s)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {key_in(self.api_key_env)}"} if self.api_key_env else {}

    async def _post(self, client: Any, url: str, body: Json) -> Any:
        import httpx
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait_random_exponential(multiplier=0.25, max=10),
            retry=retry_if_exception_type((httpx.TransportError, Busy, TimeoutError)),
            reraise=True,
        )
        try:
            return await retrying(self._try, client, url, body)
        except (TimeoutError, httpx.TimeoutException):
            raise RemoteError(f"{url} gave no answer within {self.timeout_s} s, {self.attempts} times") from None

    async def _try(self, client: Any, url: str, body: Json) -> Any:
        async with asyncio.timeout(self.timeout_s):  # httpx's own limit is for each read
            answer = await client.post(url, json=body)
        if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
            raise Busy(f"{url} answered {answer.status_code}: {answer.text[:200]}")
        if answer.status_code != 200:
            raise RemoteError(f"{url} answered {answer.status_code}: {answer.text[:200]}")
        return answer.json()


def _with(call: Callable[[Post], Awaitable[Score]], post: Post) -> Callable[[], Awaitable[Score]]:
    return lambda: call(post)
