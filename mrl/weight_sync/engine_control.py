"""The control plane of one SGLang server: pause, update session, versions, checksums. Synchronous, keep-alive."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, Literal, Self

import httpx
import orjson

from mrl.config.secrets import ENGINE_KEY, authorization

# FROM: The memory of all engines of a run, given back and taken again as one.

RETRY_S = 0.02  # between two tries of something the engine refused because it was busy
CONNECT_TRIES = 3  # only for connections that could not be made: nothing was sent, so any request may be repeated

WEIGHT_LOADER = "mrl.weight_sync.receiver.load"
"""What engines of live syncs are started with as `custom_weight_loader`."""

Memory = Literal["kv_cache", "weights"]
"""What of an engine's memory can be given back for a time; what was in it is lost."""

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of running requests: ended; put back in the queue and recomputed; kept with their old KV cache."""


@cache
def _tls() -> ssl.SSLContext:
    """The machine's certificates, read once: that takes 40 ms, and hundreds of engines have a client each."""
    return httpx.create_ssl_context()


class EngineError(RuntimeError):
    """An engine answered that it did not do what it was asked."""


class EngineControl:
    """Typed calls to one server. Every call has a deadline; a refusal is an EngineError with the engine's words."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        """`url`: http://host:port; `timeout_s`: for one request, unless the call has its own deadline."""
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.url,
            timeout=timeout_s,
            transport=httpx.HTTPTransport(retries=CONNECT_TRIES, verify=_tls()),
            headers=authorization(),
            trust_env=False,
        )

    def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating, until `resume()`."""
        self._call("/pause_generation", mode=mode)

    def resume(self) -> None:
        """Go on generating; harmless on an engine that was not paused."""
        self._call("/continue_generation")

    def release_memory(self, tags: Sequence[Memory]) -> None:
        """Give device memory back, until `resume_memory`. The engine must be paused, but not `in_place`; requests may wait.

        SGLang frees it where the engine was started with enable_memory_saver; a CPU's memory stays where it is.
        """
        self._call("/release_memory_occupation", tags=list(tags))

    def resume_memory(self, tags: Sequence[Memory]) -> None:
        """Take memory again that was given back, and no other: SGLang ends over that. Weights hold anything then."""
        self._call("/resume_memory_occupation", tags=list(tags))

    def begin_weight_update(self) -> None:
        """Open an update session; weights are refused outside one."""
        self._call("/begin_weight_update")

    def end_weight_update(self) -> None:
        """Close the update session."""
        self._call("/end_weight_update")

    def abandon_weight_update(self) -> None:
        """Close an update session that a trainer left open when it died; where there is none, nothing happens.

        The engine stays paused if it was: what it holds may be half of a push.
        """
        with suppress(EngineError):  # none is open; `begin_weight_update` tells of everything else
            self.end_weight_update()

    def update_weights_from_tensor(self, payloads: Sequence[str], load_format: str, *, timeout_s: float) -> None:
        """Hand one serialised payload to each tensor-parallel rank, in its update session."""
        body = dict(serialized_named_tensors=payloads, load_format=load_format, flush_cache=False)
        path = "/update_weights_from_tensor"
        self._parse(path, self._post(path, body, timeout_s))

    def update_weights_from_disk(self, folder: str) -> None:
        """Load a Hugging Face folder that the engine can read, outside an update session."""
        self._call("/update_weights_from_disk", model_path=folder, flush_cache=False)

    def set_weight_version(self, version: str) -> None:
        """Name the weights that the engine serves from now on."""
        self._call("/update_weight_version", new_version=version, abort_all_requests=False)

    def flush_cache(self, timeout_s: float = 30.0) -> None:
        """Empty the KV cache. Right after a generation the engine still refuses: asked again until the deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._http.post("/flush_cache")
            if answer.status_code == httpx.codes.OK:
                return
            if time.monotonic() > deadline:
                raise EngineError(f"{self.url} did not flush its cache within {timeout_s} s: {answer.text.strip()}")
            time.sleep(RETRY_S)

    def weight_version(self) -> str:
        """Version of the weights the engine has, as its last update named it."""
        return str(self.model_info()["weight_version"])

    def model_info(self) -> dict[str, Any]:
        """SGLang's /model_info."""
        return self._get("/model_info")

    def server_info(self) -> dict[str, Any]:
        """SGLang's /server_info: its server arguments as resolved, and its state."""
        return self._get("/server_info")

    def checksums(self) -> list[dict[str, str]]:
        """A hash of every tensor the engine holds, by the engine's names, one dict per tensor-parallel rank."""
        ranks = self._call("/weights_checker", action="checksum")["ranks"]  # data-parallel groups report each all ranks
        by_rank = {_first(rank["parallelism_info"])["tp_rank"]: rank["checksums"] for rank in ranks}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def health(self) -> bool:
        """Whether the engine takes requests."""
        try:
            return self._http.get("/ready", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get(self, path: str) -> dict[str, Any]:
        return self._parse(path, self._http.get(path))

    def _call(self, path: str, **body: Any) -> dict[str, Any]:
        """POST, never repeated once sent; raises EngineError on a refusal."""
        return self._parse(path, self._post(path, body))

    def _post(self, path: str, body: Mapping[str, Any], timeout_s: float | None = None) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return self._http.post(path, content=orjson.dumps(body), headers=headers, timeout=timeout_s or self.timeout_s)

    def _parse(self, path: str, answer: httpx.Response) -> Any:
        return self._read(path, answer.status_code, answer.content)

    def _read(self, path: str, status: int, answer: bytes) -> Any:
        try:
            content = orjson.loads(answer) if answer else {}
        except orjson.JSONDecodeError:
            content = {"message": answer.decode("utf-8", "replace")}
        refused = isinstance(content, dict) and content.get("success") is False
        if status != httpx.codes.OK or refused:
            hint = f"; set {ENGINE_KEY} to this server's key." if status == httpx.codes.UNAUTHORIZED else ""
            raise EngineError(f"{self.url}{path} answered {status}: {_message(content)}{hint}")
        return content


def _message(content: Any) -> str:
    if not isinstance(content, dict):
        return str(content)
    error = content.get("error")
    return str(content.get("message") or (error.get("message") if isinstance(error, dict) else error) or content)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


class EnginePoolMemory:
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
