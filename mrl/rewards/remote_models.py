"""JSON over HTTP to a model served elsewhere: bounded concurrency, a limit for each call, retries."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from mrl.config.secrets import key_in
from mrl.rewards.reward_calls import gather_scores
from mrl.rewards.reward_types import Response, Score, as_number

# FROM: A language model as the judge of responses.
# FROM: A scalar reward model that SGLang serves.

Json = dict[str, Any]
Post = Callable[[Json], Awaitable[Any]]
"""A request's body -> the answer's."""


class RemoteError(Exception):
    """The service answered, but with no result."""


class Busy(RemoteError):
    """It may answer better later: 408, 425, 429, or 5xx."""


@dataclass(frozen=True, kw_only=True)
class HttpService:
    """How a served model is asked; base of the rewards that do.

    A call is repeated after a failure of the network, a timeout, or an answer 408, 425, 429 or 5xx, with growing pauses.

    Raises: ValueError for a malformed URL, limits that are not positive, or an `api_key_env` that is not set,
    or whose key no HTTP header can carry.
    """

    url: str  # of the server, http://HOST:PORT
    concurrency: int = 32  # calls at a time
    timeout_s: float = 60.0  # for one try of a call
    attempts: int = 3  # tries of a call
    deadline_s: float = 240.0  # for a whole batch of responses; what has no answer by then has failed
    api_key_env: str | None = None  # environment variable, where rewards are computed, with the key; sent as Bearer

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
        """The score of each call, which is given a function that posts JSON to `path`; failures are recorded."""
        import httpx  # here, because the driver only builds this object

        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(timeout=self.timeout_s, limits=limits, headers=self._headers()) as client:

            async def post(body: Json) -> Any:
                return await self._post(client, self.url.rstrip("/") + path, body)

            bound = [_with(call, post) for call in calls]
            return await gather_scores(bound, concurrency=self.concurrency, deadline_s=self.deadline_s)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {key_in(self.api_key_env)}"} if self.api_key_env else {}

    async def _post(self, client: Any, url: str, body: Json) -> Any:
        import httpx
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.attempts),
            wait=wait_random_exponential(multiplier=0.25, max=10),
            retry=retry_if_exception_type((httpx.TransportError, Busy, TimeoutError)),
            reraise=True,
        )
        try:
            return await retrying(self._try, client, url, body)
        except (TimeoutError, httpx.TimeoutException):
            raise RemoteError(f"{url} gave no answer within {self.timeout_s} s, {self.attempts} times") from None

    async def _try(self, client: Any, url: str, body: Json) -> Any:
        async with asyncio.timeout(self.timeout_s):  # httpx's own limit is for each read
            answer = await client.post(url, json=body)
        if answer.status_code in (408, 425, 429) or answer.status_code >= 500:
            raise Busy(f"{url} answered {answer.status_code}: {answer.text[:200]}")
        if answer.status_code != 200:
            raise RemoteError(f"{url} answered {answer.status_code}: {answer.text[:200]}")
        return answer.json()


def _with(call: Callable[[Post], Awaitable[Score]], post: Post) -> Callable[[], Awaitable[Score]]:
    return lambda: call(post)


TEMPLATE = """Grade an answer to a question.

Question:
{prompt}

Reference answer:
{ground_truth}

Answer to grade:
{response}

Say briefly what is right and wrong with it. Then end with one line of this form, N from 0 (useless) to 10 (perfect):
Score: N"""

_PLACES = ("prompt", "response", "ground_truth")


@dataclass(frozen=True, kw_only=True)
class Judge(HttpService):
    """Asks a model behind an OpenAI-style /v1/chat/completions for a number, and scales it to 0..1.

    Where the judge's answer has no number of the pattern, or one outside `low`..`high`, the response's scoring failed.

    Raises: ValueError for a template without {response}, a pattern that is no regular expression with one group, or
    `low` not below `high`.
    """

    in_process: ClassVar[bool] = True  # it only waits

    model: str  # name that the server knows it by
    template: str = (
        TEMPLATE  # the question, with {prompt}, {response} and {ground_truth}; other braces stay as they are
    )
    pattern: str = r"[Ss]core:\s*\**\s*(-?\d+(?:\.\d+)?)"  # of the number in the answer; the last one counts
    low: float = 0.0  # this number becomes 0
    high: float = 10.0  # this number becomes 1
    max_tokens: int = 1024  # of the judge's answer
    temperature: float = 0.0  # of the judge
    extra: Json | None = None  # further fields of the request, such as chat_template_kwargs

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{response}" not in self.template:
            raise ValueError(
                f"template={self.template[:80]!r}: {{response}} is missing; the judge would see no response."
            )
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression: {error}.") from error
        if groups != 1:
            raise ValueError(f"pattern={self.pattern!r}: expected one group, around the number; got {groups}.")
        if not self.low < self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}.")

    async def __call__(self, responses: list[Response]) -> list[Score]:
        """Scores of 0..1; failures of the service or of its answer are recorded."""
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
        places = "|".join(_PLACES)  # replaced in one pass: braces in a response are only text
        content = re.sub(rf"\{{({places})\}}", lambda found: values[found[1]], self.template)
        question = dict(role="user", content=content)
        settings = dict(model=self.model, max_tokens=self.max_tokens, temperature=self.temperature)
        return settings | dict(messages=[question]) | (self.extra or {})


def _message_text(message: dict[str, Any]) -> str:
    """A message of the prompt as the judge reads it; the role is named where it is not the user's."""
    content = message["content"]
    return content if message["role"] == "user" else f"[{message['role']}] {content}"


@dataclass(frozen=True, kw_only=True)
class RewardModel(HttpService):
    """The score that a sequence-classification model with one output gives the conversation: prompt, then response.

    The server is SGLang with `--is-embedding` and the reward model; it is asked by /classify, with token ids made here by
    the reward model's own tokenizer and chat template.

    Raises: ValueError when `tokenizer` is no folder with tokenizer.json and a chat template.
    """

    in_process: ClassVar[bool] = True  # it only waits

    tokenizer: str  # Hugging Face folder of the reward model, for its tokenizer and chat template
    scale: float = 1.0  # the score is multiplied by this
    max_tokens: int | None = None  # of the conversation; the score of a longer one fails, without asking

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "tokenizer", str(Path(self.tokenizer).expanduser().resolve())
        )  # workers may run elsewhere
        _tokenizer(self.tokenizer)

    async def __call__(self, responses: list[Response]) -> list[Score]:
        """Scores of the served model; failures of the service are recorded."""
        return await self.ask_all("/classify", [partial(self._score, response) for response in responses])

    async def _score(self, response: Response, post: Post) -> Score:
        ids = self.encode(response)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return Score.failed(f"{len(ids)} tokens are more than the {self.max_tokens} that the reward model may get.")
        answer = await post(dict(input_ids=ids))
        found = answer["embedding"]
        if len(found) != 1:
            raise ValueError(f"{self.url} gives {len(found)} numbers; a reward model gives one.")
        return Score(self.scale * as_number(found[0]))

    def encode(self, response: Response) -> list[int]:
        """Token ids of the conversation as the reward model sees it."""
        turns = [dict(role=turn.role, content=turn.text) for turn in response.turns]
        messages = response.prompt + (turns or [dict(role="assistant", content=response.text)])
        tokenizer = _tokenizer(self.tokenizer)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]


@cache
def _tokenizer(folder: str) -> Any:
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"tokenizer={folder}: tokenizer.json is missing; name the reward model's folder.")
    from transformers import PreTrainedTokenizerFast  # 2 s

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer={folder}: it has no chat template, which says how prompt and response are joined.")
    return tokenizer
