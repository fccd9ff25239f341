"""An asyncio event loop in a thread of its own: requests go on while their process does other things."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class Loop:
    """Starts with the first coroutine it is given."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None

    def start[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in the loop; its future may be waited for in any other thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        assert self._loop is not None, "start() makes it"
        self._loop.run_forever()

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancel what runs, and end the thread."""
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
