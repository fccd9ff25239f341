"""draft"""

from dataclasses import dataclass

import httpx
import orjson


@dataclass(frozen=True)
class SamplingParams:
    max_new_tokens: int
    temperature: float


@dataclass(frozen=True)
class Completion:
    token_ids: list
    logprobs: list
    finish_reason: str
    weight_version: str


class EngineClient:
    def __init__(self, url, timeout_s=600):
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=timeout_s)

    def post(self, path, **kw):
        r = self.http.post(path, content=orjson.dumps(kw), headers={"content-type": "application/json"})
        r.raise_for_status()
        return r

    def generate(self, ids, p):
        out = orjson.loads(
            self.post(
                "/generate",
                input_ids=ids,
                sampling_params=dict(max_new_tokens=p.max_new_tokens, temperature=p.temperature),
                return_logprob=True,
            ).content
        )
        return [
            Completion(
                o["output_ids"],
                [x[0] for x in o["meta_info"]["output_token_logprobs"]],
                o["meta_info"]["finish_reason"]["type"],
                o["meta_info"]["weight_version"],
            )
            for o in out
        ]
