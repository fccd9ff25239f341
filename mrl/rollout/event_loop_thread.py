"""EventLoopThread: an asyncio event loop in a thread of its own, which the engine pool uses for its requests."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class EventLoopThread:
    """An asyncio event loop in its own thread. The first call of `submit` starts the thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop, and return its future. The thread of the loop must not wait for the future."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run_loop, name=self._name, daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run_loop(self) -> None:
        assert self._loop is not None, "submit() sets it"
        self._loop.run_forever()

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel all running coroutines and end the thread."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        try:
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(timeout_s)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(timeout_s)


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
