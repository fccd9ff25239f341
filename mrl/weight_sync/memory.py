"""The memory of all engines of a run, given back and taken again as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx

from mrl.weight_sync.control import EngineControl, EngineError, Memory


class EngineMemory:
    """Engines that nobody answers for have no memory: the next push finds and replaces them. Safe to repeat."""

    def __init__(
        self, urls: Callable[[], Sequence[str]], timeout_s: float, hold: Callable[[bool], object] = lambda held: None
    ) -> None:
        """`urls`: of the engines there are now; `timeout_s`: for each request; `hold`: is told whether they sleep."""
        self._urls, self._timeout_s, self._hold = urls, timeout_s, hold
        self._released: dict[str, set[Memory]] = {}  # URL -> what it has given back
        self._pushed: set[str] = set()  # of engines that had their weights from a trainer

    @property
    def unproven(self) -> bool:
        """Whether an engine lost the weights that it was started with before any were pushed: it can prove nothing then."""
        return bool(self._released.keys() - self._pushed)

    def sleep(self) -> int:
        """Stop generating, requests back in the queue, and give weights and KV cache back. Raises EngineError.

        Returns 0: engines do not say what they keep.
        """
        self._hold(True)
        self._each(self._release)
        return 0

    def wake_weights(self) -> None:
        """Take the memory of the weights again; what is in it must be pushed."""
        self._each(lambda engine: self._resume(engine, "weights"))

    def wake_cache(self) -> None:
        """Take the memory of the KV cache again, and go on generating."""

        def go_on(engine: EngineControl) -> None:
            self._resume(engine, "kv_cache")
            engine.resume()
            self._pushed.add(engine.url)

        self._each(go_on)
        self._hold(False)

    def forget(self, urls: Sequence[str] | None = None) -> None:
        """These engines (None: all) were replaced by others, which have all their memory."""
        for url in list(self._released) if urls is None else urls:
            self._released.pop(url, None)
            self._pushed.discard(url)

    def _release(self, engine: EngineControl) -> None:
        released = self._released.setdefault(engine.url, set())
        engine.pause("retract")
        tags: list[Memory] = ["kv_cache", "weights"]
        if tags := [tag for tag in tags if tag not in released]:
            engine.release_memory(tags)
            released.update(tags)

    def _resume(self, engine: EngineControl, tag: Memory) -> None:
        if tag in (released := self._released.get(engine.url, set())):
            engine.resume_memory([tag])
            released.discard(tag)

    def _each(self, act: Callable[[EngineControl], None]) -> None:
        """All engines at once; the first error that is raised, when all have answered."""

        def one(url: str) -> None:
            with EngineControl(url, self._timeout_s) as engine, suppress(httpx.TransportError):
                try:
                    act(engine)
                except httpx.TimeoutException as error:
                    raise EngineError(f"{url} did not answer within {self._timeout_s} s: {error!r}") from error

        urls = self._urls()
        if not urls:
            return
        with ThreadPoolExecutor(len(urls), thread_name_prefix="engine_memory") as pool:
            for answer in [pool.submit(one, url) for url in urls]:
                answer.result()
