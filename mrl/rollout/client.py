"""HTTP client of one SGLang server, and an event loop in its own thread, which runs many requests at the same time.

The client sends token ids, and receives token ids and log-probabilities.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

from mrl.config.secrets import authorization
from mrl.data.images import RequestImages
from mrl.weight_sync.engine_control import EngineControl, EngineError, adapter_version
from parallel.spans import is_recording, record

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "Completion",
    "EngineClient",
    "EngineError",
    "EngineFaultError",
    "EngineUnreachableError",
    "EventLoopThread",
    "ResponsesAbortedError",
    "SamplingParams",
]

TRAINING, HELD_OUT = 0, 1
"""Kinds of responses in a training run. The kind is the first number of the tuple by which `response_seed` identifies a response.

The tuple is (TRAINING, serial number of the response in the run) or (HELD_OUT, row of the held-out prompts, index of the response
among the responses to this prompt). The tuple is empty for the greedy response to a training prompt, because this response
needs no random numbers. EvaluationPrompt.seed uses other tuples for `mrl generate` and `mrl evaluate`.
"""
RETRYABLE_STATUSES = (408, 425, 429)
"""HTTP statuses below 500 after which a request may be repeated, because the engine is at fault, not the request."""


class EngineFaultError(EngineError):
    """The engine failed, and the request is valid. Another engine, or the same engine later, may answer the request."""


class ResponsesAbortedError(EngineFaultError):
    """The engine aborted responses of the request, for example because it was paused with weight_sync.pause_mode=abort."""


class EngineUnreachableError(EngineError):
    """The connection to the engine's address failed, so the request was not sent."""


MAX_STOPS = 32  # largest number of stop texts that SGLang 0.5.23 accepts in a request


def _is_number(value: Any, low: float, high: float = math.inf) -> bool:
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and low <= float(value) <= high and math.isfinite(value)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _are_texts(value: Any) -> bool:
    return (
        isinstance(value, tuple) and len(value) <= MAX_STOPS and all(isinstance(each, str) and each for each in value)
    )


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: _is_count(value, 1), "a whole number of tokens, 1 or more"),
    "temperature": (lambda value: _is_number(value, 0), "0 (greedy decoding) or a number above 0"),
    "top_p": (lambda value: _is_number(value, 0, 1) and value > 0, "a number above 0 and at most 1"),
    "top_k": (lambda value: _is_count(value, 1) or value == -1, "a whole number, 1 or more, or -1 for all tokens"),
    "min_p": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1"),
    "repetition_penalty": (lambda value: _is_number(value, 0, 2) and value > 0, "a number above 0 and at most 2"),
    "stop": (_are_texts, f"a text or a list of at most {MAX_STOPS} texts, none of which is empty"),
    "stop_token_ids": (lambda value: all(_is_count(each, 0) for each in value), "a list of token ids"),
    "n": (lambda value: _is_count(value, 1), "a whole number of responses, 1 or more"),
}
"""Field of SamplingParams -> (function that returns whether a value is valid, description of the valid values)."""
SAMPLING_KEYS = {"max_response_tokens": "max_new_tokens"} | {name: name for name in _RULES if name != "max_new_tokens"}
"""Config key -> field of SamplingParams."""


def _check_field(name: str, value: Any, key: str) -> None:
    is_valid, expected = _RULES[name]
    if not is_valid(value):
        raise ValueError(f"{key}={value!r}: expected {expected}.")


@dataclass(frozen=True)
class SamplingParams:
    """How the responses to a prompt are sampled.

    Raises ValueError for a value that SGLang would refuse. Also raises ValueError for n > 1 with temperature 0, because all
    greedy responses to a prompt are equal.
    """

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy sampling
    # Sample only from the smallest set of most likely tokens whose probabilities add up to top_p or more.
    top_p: float = 1.0
    top_k: int = -1  # sample only from the top_k most likely tokens; -1 allows all tokens
    min_p: float = 0.0  # sample only tokens whose probability is at least min_p times the largest probability
    repetition_penalty: float = 1.0  # a value above 1 lowers the probability of each token that has already occurred
    # Texts that end a response. The response contains the text that ends it. The server needs a tokenizer to find stop texts.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # tokens that end a response, in addition to the end-of-sequence token
    n: int = 1  # number of responses to the prompt; callers send the prompt n times (see EngineClient.generate)
    ignore_eos: bool = False  # whether sampling continues after an end-of-sequence token
    # Seed of a response, 63 bits. Only servers with enable_deterministic_inference use it. None: such a server uses the seed 42.
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in _RULES:
            _check_field(name, getattr(self, name), name)
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n={self.n} with temperature=0: greedy responses to a prompt are equal; set n to 1, or raise temperature."
            )

    @classmethod
    def of(cls, node: Mapping[str, Any], key: str, base: SamplingParams) -> SamplingParams:
        """Return a copy of `base` with the values of the config node `node`. `key`: config key of `node`, for error messages.

        The keys of `node` are keys of SAMPLING_KEYS. Raises ValueError, which names the config key, for an invalid value.
        """
        chosen: dict[str, Any] = {}
        for name, value in node.items():
            if name in ("stop", "stop_token_ids") and isinstance(value, str | list):
                value = (value,) if isinstance(value, str) else tuple(value)
            _check_field(SAMPLING_KEYS[name], value, f"{key}.{name}")
            chosen[SAMPLING_KEYS[name]] = value
        try:
            return replace(base, **chosen)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None

    def body(self) -> dict[str, Any]:
        """Return the JSON object `sampling_params` with which SGLang samples one response.

        The object always has `max_new_tokens` and `temperature`. Other fields are omitted if they equal SGLang's defaults.
        """
        body: dict[str, Any] = dict(max_new_tokens=self.max_new_tokens, temperature=self.temperature)
        for name, default in dict(top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0).items():
            if getattr(self, name) != default:
                body[name] = getattr(self, name)
        if self.stop:
            body["stop"] = list(self.stop)
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.seed is not None:
            body["sampling_seed"] = self.seed
        return body


def response_seed(seed: int, *response_id: int) -> int:
    """Return the seed of a response, 63 bits. A response that is sampled again gets the same seed.

    `seed`: the seed of the run. `response_id` identifies the response (see TRAINING, HELD_OUT). All turns of a response share
    one seed. SGLang derives the random number of a token from this seed and from the token's position, which differs
    between turns.
    """
    return int(np.random.SeedSequence([seed, *response_id]).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response of R tokens to a prompt of P tokens."""

    token_ids: list[int]  # [R], with the end-of-sequence token
    # [R] log-probability of each token at the sampling temperature (greedy: at temperature 1), before top-p and top-k; empty if
    # the request did not ask for log-probabilities
    logprobs: list[float]
    finish_reason: str  # "stop", "length" or "abort"
    weight_version: str  # weight version that sampled the first token; see `versions` for later tokens
    # [P+R-1, layers, topk] experts of each token of prompt and response, except the last token, which the engine samples but
    # does not process. None if the request did not ask for routed experts.
    routed_experts: NDArray[np.int16] | None = None
    cached_tokens: int = 0  # number of prompt tokens that the engine found in its prefix cache
    # (weight version, number of tokens that this version sampled), oldest version first; empty if there is only one version
    versions: tuple[tuple[int, int], ...] = ()


class EngineClient(EngineControl):
    """HTTP client of one server, for sampling and the control requests of EngineControl. Several threads may share a client."""

    adapter: str | None = None
    """Name of the loaded LoRA adapters that the next requests will use. None: no adapters."""

    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        logprobs: bool = True,
        routed_experts: bool = False,
        images: Sequence[RequestImages | None] = (),
    ) -> list[Completion]:
        """Sample one response to each prompt, with one HTTP request, and wait for the responses.

        For several responses to a prompt, repeat the prompt. SGLang's parameter `n` is slower, because SGLang then first prefills
        the prompts one by one.

        Args:
            input_ids: token ids of each prompt.
            sampling: parameters of all prompts, or a sequence with the parameters of each prompt.
            logprobs: whether to return the log-probabilities of the sampled tokens.
            routed_experts: whether to return the experts of each token. The model must then be a mixture of experts, and the
                server must have been started with `enable_return_routed_experts`.
            images: images of each prompt; empty if no prompt has images.

        Returns:
            The completions in the order of the prompts.

        Raises:
            EngineError: the server refuses the request, or does not return the routed experts.
            httpx.TransportError: the server cannot be reached, or does not answer before the deadline of the client.
        """
        if not input_ids:
            return []
        adapter = self.adapter
        body = _generate_body(input_ids, sampling, logprobs, routed_experts, images, adapter)
        answers = self._parse("/generate", self._post("/generate", body))
        self._check_images(answers, input_ids, images)
        return [
            self._completion(answer, prompt, routed_experts, adapter)
            for prompt, answer in zip(input_ids, answers, strict=True)
        ]

    async def generate_async(
        self,
        http: aiohttp.ClientSession,
        input_ids: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        logprobs: bool = True,
        routed_experts: bool = False,
        images: Sequence[RequestImages | None] = (),
    ) -> list[Completion]:
        """Sample like `generate`, but asynchronously and without a deadline. Use this method for many concurrent requests.

        Raises EngineUnreachableError or EngineFaultError if the engine failed or aborted a response. Raises EngineError if the
        engine refused the request.
        """
        adapter = self.adapter
        body = orjson.dumps(_generate_body(input_ids, sampling, logprobs, routed_experts, images, adapter))
        started_at = time.time()
        status, content, _ = await self.post_async(http, "/generate", body)
        answers = self._read("/generate", status, content)
        self._check_images(answers, input_ids, images)
        pairs = zip(answers, input_ids, strict=True)
        completions = [self._completion(answer, prompt, routed_experts, adapter) for answer, prompt in pairs]
        if aborted := [
            done.finish_reason for done in completions if done.finish_reason == "abort" or not done.token_ids
        ]:
            error = ResponsesAbortedError if "abort" in aborted else EngineFaultError
            raise error(f"{self.url}/generate aborted {len(aborted)} of {len(completions)} responses ({aborted[0]}).")
        if is_recording():
            sizes = dict(
                responses=len(completions),
                prompt_tokens=sum(map(len, input_ids)),
                tokens=sum(len(done.token_ids) for done in completions),
                cached_tokens=sum(done.cached_tokens for done in completions),
            )
            record("request", "request", started_at, time.time() - started_at, engine=self.url, **sizes)
        return completions

    def top_logprobs(self, tokens: Sequence[int], first: int, k: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """Compute the k most probable tokens that could follow each prefix of a sequence, at temperature 1. Samples nothing.

        Args:
            tokens: token ids of the sequence.
            first: index of the first position at which the most probable tokens are returned; 1 or more.
            k: number of most probable tokens at each position.

        Returns:
            Log-probabilities [n, k], the largest first, and token ids [n, k], for the n positions from `first` to the last token.

        Raises:
            EngineError: the server refuses the request, or returns arrays of another shape.
            httpx.TransportError: the server cannot be reached, or does not answer before the deadline of the client.
        """
        body = dict(
            input_ids=[list(tokens)],
            sampling_params=[dict(max_new_tokens=0, temperature=1.0)],
            return_logprob=True,
            logprob_start_len=first - 1,  # SGLang answers with the probabilities at all positions after this index
            top_logprobs_num=k,
            return_flat_raw_top_logprobs=True,
            return_flat_raw_top_logprobs_b64=True,
            **_adapter_field(self.adapter),
        )
        (answer,) = self._parse("/generate", self._post("/generate", body))
        info, shape = answer["meta_info"], [len(tokens) - first, k]
        if (found := info.get("input_top_logprobs_shape")) != shape:
            raise EngineError(
                f"{self.url} returned the most probable tokens as an array of shape {found}; expected {shape}, as from SGLang "
                "0.5.23."
            )
        logprobs, ids = (
            np.frombuffer(base64.b64decode(info[f"input_top_logprobs_{name}_flat_b64"]), dtype).reshape(shape)
            for name, dtype in (("val", "<f4"), ("idx", "<i4"))
        )
        return logprobs, ids

    async def post_async(self, http: aiohttp.ClientSession, path: str, body: bytes) -> tuple[int, bytes, str]:
        """Send a JSON body by POST, without a deadline. Returns the status, the content and the content type of the answer.

        Raises EngineUnreachableError or EngineFaultError if the engine failed. If the engine refuses the request, returns the
        engine's answer.
        """
        import aiohttp  # imported here because the import takes half a second and other users of this module do not need it

        headers = {"content-type": "application/json"} | authorization(self.url)
        try:
            async with http.post(f"{self.url}{path}", data=body, headers=headers) as response:
                status, content, kind = response.status, await response.read(), response.content_type
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachableError(f"takes no connections: {error}") from error
        except (OSError, aiohttp.ClientError) as error:
            raise EngineFaultError(f"{self.url}{path} cannot be reached: {type(error).__name__}: {error}") from error
        if status in RETRYABLE_STATUSES or status >= 500:
            raise EngineFaultError(f"{self.url}{path} answered {status}: {content[:200].decode(errors='replace')}")
        return status, content, kind

    async def heartbeat(self, http: aiohttp.ClientSession, timeout_s: float) -> Hashable:
        """Return a value that changes whenever the scheduler has computed something; None if the server does not answer.

        Some versions of SGLang do not report such a value. For these versions, each call returns a new value, as if the
        scheduler had computed something.
        """
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with http.get(
                f"{self.url}/v1/loads", params={"include": "core"}, headers=authorization(self.url), timeout=limit
            ) as answer:
                if answer.status != httpx.codes.OK:
                    return time.monotonic()
                return tuple(load["timestamp"] for load in orjson.loads(await answer.read())["loads"])
        except (TimeoutError, OSError, aiohttp.ClientError):
            return None
        except (KeyError, TypeError, ValueError):
            return time.monotonic()

    def _check_images(
        self,
        answers: Sequence[Mapping[str, Any]],
        input_ids: Sequence[Sequence[int]],
        images: Sequence[RequestImages | None],
    ) -> None:
        """Raise EngineError if a prompt with images has more or fewer tokens in SGLang than in the trainer."""
        for answer, prompt, files in zip(answers, input_ids, images or [None] * len(input_ids), strict=True):
            if files and (found := answer["meta_info"]["prompt_tokens"]) != len(prompt):
                raise EngineError(
                    f"{self.url} read {found} tokens of a prompt with images that has {len(prompt)} tokens; its image processor "
                    "differs from the one in the folder model.path."
                )

    def _completion(
        self, answer: Mapping[str, Any], prompt: Sequence[int], routed_experts: bool, adapter: str | None
    ) -> Completion:
        """Return the completion of one prompt. `answer`: SGLang's JSON object for this prompt. `adapter`: as in the request."""
        info = answer["meta_info"]
        # A request keeps its adapters until it ends, so report the version of these adapters. The server may have newer ones.
        if adapter is not None:
            info = info | dict(weight_versions=None, weight_version=str(adapter_version(adapter)))
        spans = info.get("weight_versions")  # [{version, start, end}], oldest first
        parts = [(span["version"], span["end"] - span["start"]) for span in spans or () if span["end"] > span["start"]]
        token_ids = answer["output_ids"]
        entries = info.get("output_token_logprobs") or ()
        return Completion(
            token_ids=token_ids,
            logprobs=[math.nan if entry[0] is None else entry[0] for entry in entries],
            finish_reason=info["finish_reason"]["type"],
            weight_version=spans[0]["version"] if spans else info["weight_version"],
            routed_experts=self._routing(info, len(prompt) + len(token_ids) - 1) if routed_experts else None,
            cached_tokens=info.get("cached_tokens", 0),
            versions=tuple((int(version), tokens) for version, tokens in parts) if len(parts) > 1 else (),
        )

    def _routing(self, info: Mapping[str, Any], num_tokens: int) -> NDArray[np.int16] | None:
        """Return the routed experts [tokens, layers, topk] of a response. SGLang 0.5.23 sends them as int32 in base64."""
        encoded = info.get("routed_experts")
        if encoded is None:
            if info["finish_reason"]["type"] == "abort":
                return None
            raise EngineError(
                f"{self.url} reports no routed experts; start it with enable_return_routed_experts=True and a model that is "
                "a mixture of experts."
            )
        flat = np.frombuffer(base64.b64decode(encoded), np.int32)
        shape = (num_tokens, *self._routing_shape)
        if flat.size != num_tokens * shape[1] * shape[2]:
            raise EngineError(
                f"{self.url} reports {flat.size} routed experts; expected the shape {shape} [tokens, layers, topk]."
            )
        return flat.reshape(shape).astype(np.int16)

    @cached_property
    def _routing_shape(self) -> tuple[int, int]:
        """(layers, experts per token) of the engine's model, from its config.json, because SGLang does not report these sizes."""
        path = Path(self.model_info()["model_path"]) / "config.json"
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        return config["num_hidden_layers"], config["num_experts_per_tok"]


def _generate_body(
    input_ids: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    logprobs: bool,
    routed_experts: bool,
    images: Sequence[RequestImages | None] = (),
    adapter: str | None = None,
) -> dict[str, Any]:
    """Return the JSON body of a request to SGLang's /generate."""
    params = sampling.body() if isinstance(sampling, SamplingParams) else [each.body() for each in sampling]
    body: dict[str, Any] = dict(input_ids=input_ids, sampling_params=params, return_logprob=logprobs)
    body |= _adapter_field(adapter)
    if any(images):
        pairs = list(zip(images, input_ids, strict=True))
        body["input_ids"] = [each.request_tokens(prompt) if each else prompt for each, prompt in pairs]
        # SGLang 0.5.23 expects [None] for a prompt without images.
        body["image_data"] = [list(each.files) if each else [None] for each in images]
    return body | {"return_routed_experts": True} if routed_experts else body


def _adapter_field(adapter: str | None) -> dict[str, str]:
    """Return the field of a request's JSON body that names the LoRA adapters; {} for None."""
    return {} if adapter is None else {"lora_path": adapter}


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
