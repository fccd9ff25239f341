"""Client for the control requests of one SGLang server: pause, update session, weight version, memory, checksums.

Requests are synchronous and use keep-alive connections. This module also defines the errors of a weight sync.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, Self

import httpx
import orjson

from mrl.config.process_schema import PauseMode
from mrl.config.secrets import ENGINE_KEY, authorization

RETRY_S = 0.02  # seconds between two attempts of a request that a busy engine refuses
# Number of further attempts to open a connection. A request is sent only over an open connection, so no request is sent twice.
CONNECT_RETRIES = 3

WEIGHT_LOADER = "mrl.weight_sync.receiver.handle_message"
"""Value of the server argument `custom_weight_loader`, with which engines must be started for live weight sync."""

MROPE_BUFFER = ".rotary_emb.axis_map"
"""Suffix of a buffer's name. SGLang's interleaved multimodal RoPE computes this buffer from the config, not from weights."""

MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
"""Parts of an engine's GPU memory that can be released and allocated again.

A release discards the contents of the KV cache. It also discards the contents of the weights if enable_weights_cpu_backup is
not set. SGLang keeps a copy of CUDA graphs on the host.
"""


@cache
def _tls() -> ssl.SSLContext:
    """Return a TLS context with the root certificates of SSL_CERT_FILE or SSL_CERT_DIR, by default those of the package certifi.

    The result is cached, because reading the certificates takes 40 ms and a run can have hundreds of clients.
    """
    return httpx.create_ssl_context()


def adapter_name(version: int, push: int) -> str:
    """Return a name for the LoRA adapters of weight version `version`. `push`: number that is larger for later pushes."""
    return f"version_{version}_{push}"


def adapter_version(name: str) -> int:
    """Return the weight version that a name from `adapter_name` contains."""
    return int(name.split("_")[1])


def push_number(name: str) -> int:
    """Return the number of the push that has loaded the adapters with this name."""
    return int(name.split("_")[2])


class EngineError(RuntimeError):
    """An engine refused a request, or did not finish it before its deadline."""


class EngineControl:
    """Typed requests to one server. Every request has a deadline.

    A refused request raises EngineError. A request without an answer raises httpx.TransportError.
    """

    def __init__(self, url: str, timeout_s: float = 600.0) -> None:
        """Create a client for the server at `url`, which is http://host:port.

        `timeout_s` is the deadline of one request. Some methods have a deadline of their own.
        """
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=self.url,
            timeout=timeout_s,
            transport=httpx.HTTPTransport(retries=CONNECT_RETRIES, verify=_tls()),
            headers=authorization(self.url),
            trust_env=False,
        )

    def pause(self, mode: PauseMode = PauseMode.retract) -> None:
        """Stop generation until `resume()`."""
        self._call("/pause_generation", mode=mode)

    def resume(self) -> None:
        """Resume generation. Does nothing on an engine that is not paused."""
        self._call("/continue_generation")

    def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Release GPU memory until `resume_memory`.

        The engine must be paused in another mode than `in_place`. It may have queued requests.

        SGLang frees the memory only if the engine was started with enable_memory_saver. On a CPU nothing is freed.
        """
        self._call("/release_memory_occupation", tags=list(tags))

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate released memory again. MemoryTag says which contents are lost; lost weights have undefined values.

        If the memory was not released before, the SGLang process exits.
        """
        self._call("/resume_memory_occupation", tags=list(tags))

    def begin_weight_update(self) -> None:
        """Open a weight update session, which `update_weights_from_tensor` needs."""
        self._call("/begin_weight_update")

    def end_weight_update(self) -> None:
        """Close the weight update session."""
        self._call("/end_weight_update")

    def abandon_weight_update(self) -> None:
        """Close a weight update session that a trainer left open when it died. Does nothing if none is open.

        A paused engine stays paused, because it may hold only a part of a push.
        """
        # EngineError is raised if no session is open. If there is another reason, the next `begin_weight_update` fails.
        with suppress(EngineError):
            self.end_weight_update()

    def update_weights_from_tensor(
        self,
        payloads: Sequence[str],
        load_format: str,
        *,
        timeout_s: float,
        selector: Literal["target", "draft"] = "target",
    ) -> None:
        """Send one serialized payload to each tensor-parallel rank, within a weight update session.

        `load_format`: name of SGLang's loader for the payload, such as WEIGHT_LOADER. `selector`: whether SGLang passes the
        payload to the model or to the draft model of speculative decoding.
        """
        body = dict(serialized_named_tensors=payloads, load_format=load_format, flush_cache=False, selector=selector)
        path = "/update_weights_from_tensor"
        self._parse(path, self._post(path, body, timeout_s))

    def update_weights_from_disk(self, folder: str) -> None:
        """Have the engine load a Hugging Face folder that the engine can read. No weight update session is needed."""
        self._call("/update_weights_from_disk", model_path=folder, flush_cache=False)

    def adapters(self) -> list[str]:
        """Return the names of the loaded LoRA adapters."""
        return [card["id"] for card in self._get("/v1/models")["data"] if card.get("parent")]

    def load_adapter(self, name: str, folder: str) -> None:
        """Load the LoRA adapters of a PEFT folder, in addition to all adapters that are loaded already.

        The engine must be able to read the folder. Requests use the adapters if their field `lora_path` is `name`. The folder
        must exist until the adapters are unloaded, because the engine maps its files into memory.
        """
        self._call("/load_lora_adapter", lora_name=name, lora_path=folder)

    def unload_adapter(self, name: str, timeout_s: float) -> None:
        """Wait until no request uses the LoRA adapters `name`, and unload them.

        Raises EngineError if requests still use them after `timeout_s`. SGLang (0.5.23) then still waits, without a limit.
        Meanwhile, it neither loads nor unloads other adapters.
        """
        path = "/unload_lora_adapter"
        try:
            answer = self._post(path, dict(lora_name=name), timeout_s)
        except httpx.ReadTimeout:
            raise EngineError(
                f"{self.url} could not unload the LoRA adapters {name} within {timeout_s:.3g} s, because requests still use "
                "them; set a larger weight_sync.timeout_s, or a smaller rollout.max_response_tokens."
            ) from None
        self._parse(path, answer)

    def set_weight_version(self, version: str) -> None:
        """Set the version of the weights that the engine serves."""
        self._call("/update_weight_version", new_version=version, abort_all_requests=False)

    def flush_cache(self, timeout_s: float = 30.0) -> None:
        """Empty the KV cache.

        While a generation is ending, an engine refuses this request. The request is then repeated until the deadline.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            answer = self._http.post("/flush_cache")
            if answer.status_code == httpx.codes.OK:
                return
            if time.monotonic() > deadline:
                raise EngineError(f"{self.url} did not flush its cache within {timeout_s} s: {answer.text.strip()}")
            time.sleep(RETRY_S)

    def weight_version(self) -> str:
        """Return the version that `set_weight_version` has set."""
        return str(self.model_info()["weight_version"])

    def model_info(self) -> dict[str, Any]:
        """Return SGLang's /model_info."""
        return self._get("/model_info")

    def server_info(self) -> dict[str, Any]:
        """Return SGLang's /server_info: the resolved server arguments and the state of the server."""
        return self._get("/server_info")

    def checksums(self) -> list[dict[str, str]]:
        """Return one dict for each tensor-parallel rank: SGLang's name of a parameter or buffer -> hash of its values."""
        ranks = self._call("/weights_checker", action="checksum", skip_tensor_list=[MROPE_BUFFER])["ranks"]
        # Every data-parallel group reports all ranks, so a rank may be reported several times.
        by_rank = {_first(rank["parallelism_info"])["tp_rank"]: rank["checksums"] for rank in ranks}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def health(self) -> bool:
        """Return whether the engine accepts requests."""
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
        """Send a POST request, and never send it twice. Raises EngineError if the engine refuses it."""
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
    text = content.get("message") or content.get("error_message")  # answers about adapters have the second key
    return str(text or (error.get("message") if isinstance(error, dict) else error) or content)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


class WeightSyncError(RuntimeError):
    """The weights did not reach every engine. `failed`: URL of each engine that failed -> reason."""

    def __init__(self, message: str, failed: dict[str, str] | None = None) -> None:
        super().__init__(message, failed or {})
        self.failed = failed or {}

    def __str__(self) -> str:
        return str(self.args[0])


class WeightMismatchError(RuntimeError):
    """An engine does not hold the weights that were sent to it."""


class PeerError(RuntimeError):
    """Another rank of the weight sync failed, or did not answer before the deadline."""
