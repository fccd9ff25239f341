"""The control plane of one SGLang server: pause, update session, versions, checksums. Synchronous, keep-alive."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import httpx
import orjson

RETRY_S = 0.02  # between two tries of something the engine refused because it was busy
CONNECT_TRIES = 3  # only for connections that could not be made: nothing was sent, so any request may be repeated

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of running requests: ended; put back in the queue and recomputed; kept with their old KV cache."""


class EngineError(RuntimeError):
    """An engine answered that it did not do what it was asked."""


class EngineControl:
    """Typed calls to one server. Every call has a deadline; a refusal is an EngineError with the engine's words."""

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        """`url`: http://host:port; `timeout_s`: for one request, unless the call has its own deadline."""
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.url, timeout=timeout_s, transport=httpx.HTTPTransport(retries=CONNECT_TRIES), trust_env=False
        )

    def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating, until `resume()`."""
        self._call("/pause_generation", mode=mode)

    def resume(self) -> None:
        """Go on generating; harmless on an engine that was not paused."""
        self._call("/continue_generation")

    def begin_weight_update(self) -> None:
        """Open an update session; weights are refused outside one."""
        self._call("/begin_weight_update")

    def end_weight_update(self) -> None:
        """Close the update session."""
        self._call("/end_weight_update")

    def init_weights_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None:
        """Join a process group whose rank 0 sends weights; returns when the group is complete."""
        self._call(
            "/init_weights_update_group",
            master_address=address,
            master_port=port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group,
            backend=backend,
        )

    def destroy_weights_group(self, group: str) -> None:
        """Leave the process group."""
        self._call("/destroy_weights_update_group", group_name=group)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group: str,
        version: str | None = None,
        load_format: str | None = "flattened_bucket",
    ) -> None:
        """Receive these tensors by broadcast and load them; `version` names the weights from now on."""
        self._call(
            "/update_weights_from_distributed",
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            group_name=group,
            weight_version=version,
            load_format=load_format,
            flush_cache=False,
        )

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
        ranks = self._call("/weights_checker", action="checksum")["ranks"]
        ranks.sort(key=lambda rank: _first(rank["parallelism_info"])["tp_rank"])
        return [rank["checksums"] for rank in ranks]

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

    def _post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self._http.post(path, content=orjson.dumps(body), headers={"content-type": "application/json"})

    def _parse(self, path: str, answer: httpx.Response) -> Any:
        try:
            content = orjson.loads(answer.content) if answer.content else {}
        except orjson.JSONDecodeError:
            content = {"message": answer.text}
        refused = isinstance(content, dict) and content.get("success") is False
        if answer.status_code != httpx.codes.OK or refused:
            raise EngineError(f"{self.url}{path} answered {answer.status_code}: {_message(content)}")
        return content


def _message(content: Any) -> str:
    if not isinstance(content, dict):
        return str(content)
    error = content.get("error")
    return str(content.get("message") or (error.get("message") if isinstance(error, dict) else error) or content)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
