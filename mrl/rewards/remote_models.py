"""Rewards from remote models over HTTP: a language model as judge, and a scalar reward model served by SGLang."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from mrl.config.secrets import engine_key_from
from mrl.rewards.reward_types import Response, Score, as_number, gather_scores

Json = dict[str, Any]
Post = Callable[[Json], Awaitable[Any]]
"""Posts a JSON body and returns the JSON of the answer."""


class RemoteError(Exception):
    """The service answered with an error, or did not answer in time."""


class RetryableError(RemoteError):
    """The service answered with a status that may be temporary: 408, 425, 429 or 5xx."""


@dataclass(frozen=True, kw_only=True)
class HttpService:
    """Base class of rewards that call an HTTP service, with bounded concurrency, time limits and retries.

    A call is retried with growing pauses after a network error, a timeout, or an answer 408, 425, 429 or 5xx.

    Raises ValueError for a malformed URL, limits that are not positive, an `api_key_env` that is not set, and a key
    that is not valid in an HTTP header.
    """

    url: str  # base URL of the server, http://HOST:PORT
    concurrency: int = 32  # number of concurrent calls
    timeout_s: float = 60.0  # seconds, limit of one attempt
    attempts: int = 3  # largest number of attempts per call
    deadline_s: float = 240.0  # seconds, limit of a whole batch; calls that have no answer by then fail
    api_key_env: str | None = None  # environment variable of the process that runs rewards; sent as Bearer token

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r}: expected http://HOST:PORT or https://HOST.")
        for name in ("concurrency", "timeout_s", "attempts", "deadline_s"):
            if vars(self)[name] <= 0:
                raise ValueError(f"{name}={vars(self)[name]}: must be greater than 0.")
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ValueError(
                f"api_key_env={self.api_key_env}: this environment variable is not set; export the key in it."
            )
        self._headers()

    async def ask_all(self, path: str, calls: Sequence[Callable[[Post], Awaitable[Score]]]) -> list[Score]:
        """Run the calls concurrently and return their scores. Each call gets a function that posts JSON to `path`."""
        import httpx  # not at the top: the driver only builds this object

        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(timeout=self.timeout_s, limits=limits, headers=self._headers()) as client:

            async def post(body: Json) -> Any:
                return await self._post(client, self.url.rstrip("/") + path, body)

            bound = [_bind_post(call, post) for call in calls]
            return await gather_scores(bound, concurrency=self.concurrency, deadline_s=self.deadline_s)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {engine_key_from(self.api_key_env)}"} if self.api_key_env else {}

    async def _post(self, client: Any, url: str, body: Json) -> Any:
        import httpx
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait_random_exponential(multiplier=0.25, max=10),
            retry=retry_if_exception_type((httpx.TransportError, RetryableError, TimeoutError)),
            reraise=True,
        )
        try:
            return await retrying(self._try, client, url, body)
        except (TimeoutError, httpx.TimeoutException):
            raise RemoteError(f"{url} gave no answer within {self.timeout_s} s in {self.attempts} attempts") from None

    async def _try(self, client: Any, url: str, body: Json) -> Any:
        async with asyncio.timeout(self.timeout_s):  # the limit of httpx applies to each read
            answer = await client.post(url, json=body)
        if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
            raise RetryableError(f"{url} answered {answer.status_code}: {answer.text[:200]}")
        if answer.status_code != 200:
            raise RemoteError(f"{url} answered {answer.status_code}: {answer.text[:200]}")
        return answer.json()


def _bind_post(call: Callable[[Post], Awaitable[Score]], post: Post) -> Callable[[], Awaitable[Score]]:
    return lambda: call(post)


JUDGE_TEMPLATE = """Grade an answer to a question.

Question:
{prompt}

Reference answer:
{ground_truth}

Answer to grade:
{response}

Say briefly what is right and wrong with it. Then end with one line of this form, N from 0 (useless) to 10 (perfect):
Score: N"""

_PLACEHOLDERS = ("prompt", "response", "ground_truth")


@dataclass(frozen=True, kw_only=True)
class Judge(HttpService):
    """Asks a language model to grade a response with a number, and scales the number to [0, 1].

    The server must offer OpenAI's /v1/chat/completions. Scoring a response fails if the judge's answer does not match
    `pattern`, or if the number is outside [low, high].

    Raises ValueError for a template without {response}, a pattern that is not a regular expression with one group, and
    unless low < high.
    """

    in_process: ClassVar[bool] = True  # it only waits for the network

    model: str  # name of the model on the server
    template: str = JUDGE_TEMPLATE  # message with {prompt}, {response} and {ground_truth}; other braces are kept
    # regular expression that finds the number in the answer; the last match counts
    pattern: str = r"[Ss]core:\s*\**\s*(-?\d+(?:\.\d+)?)"
    low: float = 0.0  # number that becomes score 0
    high: float = 10.0  # number that becomes score 1
    max_tokens: int = 1024  # longest answer of the judge
    temperature: float = 0.0  # sampling temperature of the judge
    extra: Json | None = None  # additional fields of the request, such as chat_template_kwargs

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{response}" not in self.template:
            raise ValueError(
                f"template={self.template[:80]!r}: {{response}} is missing; the judge would see no response."
            )
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {error}.") from error
        if groups != 1:
            raise ValueError(f"pattern={self.pattern!r}: expected one group, around the number; got {groups}.")
        if not self.low < self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}.")

    async def __call__(self, responses: list[Response]) -> list[Score]:
        """Return scores in [0, 1]. A failing service or an invalid answer gives a failed score."""
        return await self.ask_all("/v1/chat/completions", [partial(self._score, response) for response in responses])

    async def _score(self, response: Response, post: Post) -> Score:
        answer = await post(self._body(response))
        text = answer["choices"][0]["message"]["content"] or ""
        found = re.findall(self.pattern, text)
        if not found:
            return Score.failed(f"the judge's answer has no number like {self.pattern}: {text[-200:]!r}")
        number = float(found[-1])
        if not self.low <= number <= self.high:
            return Score.failed(f"the judge's number {found[-1]} is not from {self.low:g} to {self.high:g}.")
        return Score((number - self.low) / (self.high - self.low))

    def _body(self, response: Response) -> Json:
        values = dict(
            prompt="\n\n".join(_message_text(message) for message in response.prompt),
            response=response.text,
            ground_truth=str(response.ground_truth),
        )
        places = "|".join(_PLACEHOLDERS)  # one pass, so that braces in a response are not replaced
        content = re.sub(rf"\{{({places})\}}", lambda found: values[found[1]], self.template)
        question = dict(role="user", content=content)
        settings = dict(model=self.model, max_tokens=self.max_tokens, temperature=self.temperature)
        return settings | dict(messages=[question]) | (self.extra or {})


def _message_text(message: dict[str, Any]) -> str:
    """Return a prompt message as text for the judge. Messages of other roles than user begin with the role."""
    content = message["content"]
    return content if message["role"] == "user" else f"[{message['role']}] {content}"


@dataclass(frozen=True, kw_only=True)
class RewardModel(HttpService):
    """Scores the conversation (prompt and response) with a sequence-classification model that has one output.

    The server is SGLang with `--is-embedding`. The conversation is tokenised here, with the reward model's own
    tokenizer and chat template, and sent to /classify.

    Raises ValueError unless `tokenizer` is a folder with tokenizer.json and a chat template.
    """

    in_process: ClassVar[bool] = True  # it only waits for the network

    tokenizer: str  # Hugging Face folder of the reward model, with tokenizer and chat template
    scale: float = 1.0  # factor of the score
    max_tokens: int | None = None  # longest conversation; scoring a longer one fails without a request

    def __post_init__(self) -> None:
        super().__post_init__()
        # an absolute path, because workers may have another working directory
        object.__setattr__(self, "tokenizer", str(Path(self.tokenizer).expanduser().resolve()))
        _tokenizer(self.tokenizer)

    async def __call__(self, responses: list[Response]) -> list[Score]:
        """Return the scores of the served model. A failing service gives failed scores."""
        return await self.ask_all("/classify", [partial(self._score, response) for response in responses])

    async def _score(self, response: Response, post: Post) -> Score:
        ids = self.encode(response)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return Score.failed(f"{len(ids)} tokens are more than max_tokens={self.max_tokens} of the reward model.")
        answer = await post(dict(input_ids=ids))
        found = answer["embedding"]
        if len(found) != 1:
            raise ValueError(f"{self.url} gives {len(found)} numbers; a reward model gives one.")
        return Score(self.scale * as_number(found[0]))

    def encode(self, response: Response) -> list[int]:
        """Return the token ids of the conversation under the reward model's chat template."""
        turns = [dict(role=turn.role, content=turn.text) for turn in response.turns]
        messages = response.prompt + (turns or [dict(role="assistant", content=response.text)])
        tokenizer = _tokenizer(self.tokenizer)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]


@cache
def _tokenizer(folder: str) -> Any:
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"tokenizer={folder}: tokenizer.json is missing; name the reward model's folder.")
    from transformers import PreTrainedTokenizerFast  # takes 2 s to import

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer={folder}: it has no chat template to render the conversation.")
    return tokenizer
