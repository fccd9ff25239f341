"""HTTP client of one SGLang server: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


class EngineClient(EngineControl):
    """One server: sampling, and the control plane it inherits. Safe to use from several threads."""

    def generate(
        self, input_ids: Sequence[Sequence[int]], sampling: SamplingParams, *, logprobs: bool = True
    ) -> list[Completion]:
        """One response to each prompt, in order, all in one request. Repeat a prompt for several responses to it:
        SGLang's own `n` sends the prompts through one by one first."""
        if not input_ids:
            return []
        body = dict(input_ids=input_ids, sampling_params=sampling.body(), return_logprob=logprobs)
        answers = self._parse("/generate", self._post("/generate", body))
        return [_completion(answer) for answer in answers]


def _completion(answer: Mapping[str, Any]) -> Completion:
    info = answer["meta_info"]
    spans = info.get("weight_versions")  # [{version, start, end}], oldest first
    return Completion(
        answer["output_ids"],
        [entry[0] for entry in info.get("output_token_logprobs") or ()],
        info["finish_reason"]["type"],
        spans[0]["version"] if spans else info["weight_version"],
    )
