"""HTTP client of one SGLang server: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray

from mrl.config.secrets import authorization
from mrl.weight_sync.engine_control import EngineControl, EngineError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Completion", "EngineClient", "EngineError", "EngineFault", "EngineGone", "SamplingParams"]

BUSY = (408, 425, 429)  # HTTP answers, besides 5xx, for which the request is not to blame


class EngineFault(EngineError):
    """The engine is to blame, not the request: another engine may answer it, or this one a little later."""


class EngineGone(EngineError):
    """Nobody listens where the engine was; nothing was sent."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # tokens; -1: all
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end of sequence
    ignore_eos: bool = False  # go on to max_new_tokens
    seed: int | None = None  # 63 bits; heeded by servers with enable_deterministic_inference, which take 42 for None

    def body(self) -> dict[str, Any]:
        """As SGLang's sampling_params."""
        body: dict[str, Any] = dict(max_new_tokens=self.max_new_tokens, temperature=self.temperature)
        if self.top_p != 1.0:
            body["top_p"] = self.top_p
        if self.top_k != -1:
            body["top_k"] = self.top_k
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.seed is not None:
            body["sampling_seed"] = self.seed
        return body


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response of R tokens."""

    token_ids: list[int]  # [R], the end-of-sequence token included
    logprobs: list[float]  # [R] log-probability of each token at the sampling temperature, before top-p and top-k
    finish_reason: str  # stop, length or abort
    weight_version: str  # of the weights that made the first token; an update may have come in between
    # [P+R-1, layers, topk] experts that each token of prompt and response went to, the last excepted: nothing was computed
    # for it. None where it was not asked for.
    routed_experts: NDArray[np.int16] | None = None
    cached_tokens: int = 0  # of the prompt, found in the engine's prefix cache
    versions: tuple[
        tuple[int, int], ...
    ] = ()  # (version, tokens) in order, where an update came in between; else empty


class EngineClient(EngineControl):
    """One server: sampling, and the control plane it inherits. Safe to use from several threads."""

    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        logprobs: bool = True,
        routed_experts: bool = False,
    ) -> list[Completion]:
        """One response to each prompt, in order, all in one request. Repeat a prompt for several responses to it:
        SGLang's own `n` sends the prompts through one by one first.

        `sampling`: of all prompts, or one for each.
        `routed_experts` needs a mixture of experts on a server with `enable_return_routed_experts`; raises EngineError
        where it does not report them.
        """
        if not input_ids:
            return []
        body = _body(input_ids, sampling, logprobs, routed_experts)
        answers = self._parse("/generate", self._post("/generate", body))
        return [
            self._completion(answer, prompt, routed_experts) for prompt, answer in zip(input_ids, answers, strict=True)
        ]

    async def generate_async(
        self,
        http: aiohttp.ClientSession,
        input_ids: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        routed_experts: bool = False,
    ) -> list[Completion]:
        """As `generate`, for many requests at one time; waits as long as it takes.

        Raises EngineGone or EngineFault where the engine is to blame, EngineError where the request is.
        """
        import aiohttp  # half a second, for who asks many things at one time only

        body = orjson.dumps(_body(input_ids, sampling, True, routed_experts))
        headers = {"content-type": "application/json"} | authorization()
        try:
            async with http.post(f"{self.url}/generate", data=body, headers=headers) as answer:
                status, content = answer.status, await answer.read()
        except aiohttp.ClientConnectorError as error:
            raise EngineGone(f"takes no connections: {error}") from error
        except (OSError, aiohttp.ClientError) as error:
            raise EngineFault(f"{self.url}/generate cannot be reached: {type(error).__name__}: {error}") from error
        if status in BUSY or status >= 500:
            raise EngineFault(f"{self.url}/generate answered {status}: {content[:200].decode(errors='replace')}")
        answers = self._read("/generate", status, content)
        done = [self._completion(a, prompt, routed_experts) for a, prompt in zip(answers, input_ids, strict=True)]
        if given_up := [one.finish_reason for one in done if one.finish_reason == "abort" or not one.token_ids]:
            raise EngineFault(f"{self.url}/generate gave {len(given_up)} of {len(done)} responses up ({given_up[0]}).")
        return done

    async def heartbeat(self, http: aiohttp.ClientSession, timeout_s: float) -> Hashable:
        """What changes whenever the scheduler has computed something; None where the server does not answer.

        Of a server that does not tell (another version of SGLang) it changes with every look.
        """
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with http.get(
                f"{self.url}/v1/loads", params={"include": "core"}, headers=authorization(), timeout=limit
            ) as answer:
                if answer.status != httpx.codes.OK:
                    return time.monotonic()
                return tuple(load["timestamp"] for load in orjson.loads(await answer.read())["loads"])
        except (TimeoutError, OSError, aiohttp.ClientError):
            return None
        except (KeyError, TypeError, ValueError):
            return time.monotonic()

    def _completion(self, answer: Mapping[str, Any], prompt: Sequence[int], routed_experts: bool) -> Completion:
        done = _completion(answer)
        if not routed_experts:
            return done
        return replace(done, routed_experts=self._routing(answer, len(prompt) + len(done.token_ids) - 1))

    def _routing(self, answer: Mapping[str, Any], num_tokens: int) -> NDArray[np.int16] | None:
        """SGLang 0.5.23 sends int32 [tokens, layers, topk] as base64."""
        encoded = answer["meta_info"].get("routed_experts")
        if encoded is None:
            if answer["meta_info"]["finish_reason"]["type"] == "abort":
                return None
            raise EngineError(
                f"{self.url} reports no routed experts; start it with enable_return_routed_experts=True on a mixture of "
                f"experts."
            )
        flat = np.frombuffer(base64.b64decode(encoded), np.int32)
        shape = (num_tokens, *self._routing_shape)
        if flat.size != num_tokens * shape[1] * shape[2]:
            raise EngineError(
                f"{self.url} reports {flat.size} routed experts, expected {shape} [tokens, layers, topk]."
            )
        return flat.reshape(shape).astype(np.int16)

    @cached_property
    def _routing_shape(self) -> tuple[int, int]:
        """(layers, experts per token) of the engine's model; the engine does not say, its model folder does."""
        path = Path(self.model_info()["model_path"]) / "config.json"
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        return config["num_hidden_layers"], config["num_experts_per_tok"]


def _body(
    input_ids: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    logprobs: bool,
    routed_experts: bool,
) -> dict[str, Any]:
    """As SGLang's /generate takes it."""
    params = sampling.body() if isinstance(sampling, SamplingParams) else [each.body() for each in sampling]
    body = dict(input_ids=input_ids, sampling_params=params, return_logprob=logprobs)
    return body | {"return_routed_experts": True} if routed_experts else body


def _completion(answer: Mapping[str, Any]) -> Completion:
    info = answer["meta_info"]
    spans = info.get("weight_versions")  # [{version, start, end}], oldest first
    parts = [(span["version"], span["end"] - span["start"]) for span in spans or () if span["end"] > span["start"]]
    versions = tuple((int(version), tokens) for version, tokens in parts) if len(parts) > 1 else ()
    return Completion(
        answer["output_ids"],
        [entry[0] for entry in info.get("output_token_logprobs") or ()],
        info["finish_reason"]["type"],
        spans[0]["version"] if spans else info["weight_version"],
        cached_tokens=info.get("cached_tokens", 0),
        versions=versions,
    )
