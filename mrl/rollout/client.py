"""HTTP client of one SGLang server: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrl.weight_sync.control import EngineControl, EngineError

__all__ = ["Completion", "EngineClient", "EngineError", "SamplingParams"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # tokens; -1: all
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end of sequence
    ignore_eos: bool = False  # go on to max_new_tokens

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


class EngineClient(EngineControl):
    """One server: sampling, and the control plane it inherits. Safe to use from several threads."""

    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        logprobs: bool = True,
        routed_experts: bool = False,
    ) -> list[Completion]:
        """One response to each prompt, in order, all in one request. Repeat a prompt for several responses to it:
        SGLang's own `n` sends the prompts through one by one first.

        `routed_experts` needs a mixture of experts on a server with `enable_return_routed_experts`; raises EngineError
        where it does not report them.
        """
        if not input_ids:
            return []
        body = dict(input_ids=input_ids, sampling_params=sampling.body(), return_logprob=logprobs)
        if routed_experts:
            body["return_routed_experts"] = True
        answers = self._parse("/generate", self._post("/generate", body))
        done = [_completion(answer) for answer in answers]
        if not routed_experts:
            return done
        return [
            replace(completion, routed_experts=self._routing(answer, len(prompt) + len(completion.token_ids) - 1))
            for prompt, answer, completion in zip(input_ids, answers, done, strict=True)
        ]

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


def _completion(answer: Mapping[str, Any]) -> Completion:
    info = answer["meta_info"]
    spans = info.get("weight_versions")  # [{version, start, end}], oldest first
    return Completion(
        answer["output_ids"],
        [entry[0] for entry in info.get("output_token_logprobs") or ()],
        info["finish_reason"]["type"],
        spans[0]["version"] if spans else info["weight_version"],
    )
