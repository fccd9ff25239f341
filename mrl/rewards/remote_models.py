"""Rewards from remote models over HTTP: a language model that judges, and a scalar reward model that SGLang serves."""

import asyncio
import itertools
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from mrl.config.secrets import authorization, engine_key_from
from mrl.core.code_locations import quick_package_metadata
from mrl.rewards.reward_types import Response, Reward, Score, as_number, gather_scores, single_rewards

Json = dict[str, Any]
Post = Callable[[Json], Awaitable[Any]]
"""Function that sends a JSON body by POST and returns the JSON of the answer."""


class RemoteError(Exception):
    """The service answered with an error, or it did not answer in time."""


class RetryableError(RemoteError):
    """The service answered with a status that may be temporary: 408, 425, 429 or 5xx."""


_SERVERS: dict[str, list[str]] = {}  # name of a model under the config key `roles` -> URLs of its servers


def set_servers(role: str, urls: Sequence[str]) -> None:
    """Record the URLs at which SGLang serves a model under the config key `roles`. The owner of the servers calls this."""
    _SERVERS[role] = list(urls)


def called_roles(reward: Reward) -> list[str]:
    """Return the names of the models under the config key `roles` that a reward, or an inner reward of it, calls."""
    return [name for each in single_rewards(reward) if (name := getattr(each, "role", ""))]


@dataclass(frozen=True, kw_only=True)
class HttpService:
    """Base class of rewards that call an HTTP service. It limits the concurrency and the time of calls, and repeats failed calls.

    The service is at `url`, or it is a model under the config key `roles` that the run itself serves. The calls are distributed
    over all servers of such a model. A failed call is repeated after a network error, a timeout, or an answer with the status
    408, 425, 429 or 5xx. The pauses between attempts grow.

    Raises ValueError if both or neither of `url` and `role` are given, the URL is malformed, or a limit is not positive.
    Also raises ValueError if the environment variable that `api_key_env` names is not set, or if its value is not allowed in an
    HTTP header.
    """

    needs_server: ClassVar[bool] = True

    url: str = ""  # base URL of the server, for example http://HOST:PORT
    role: str = ""  # name of a model under the config key `roles` that the run serves, in place of `url`
    concurrency: int = 32  # largest number of concurrent calls to the service
    timeout_s: float = 60.0  # time limit of one attempt in seconds
    attempts: int = 3  # largest number of attempts per call to `url`; calls to a `role` are repeated until `deadline_s`
    # Time limit (s) of one call of the reward, for all its responses. Calls to the service that have not finished by then fail.
    deadline_s: float = 240.0
    api_key_env: str | None = None  # name of an environment variable, whose value is sent as Bearer token

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.role):
            raise ValueError(
                f"url={self.url!r}, role={self.role!r}: give the URL of a server, or the name of a served role."
            )
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r}: expected http://HOST:PORT or https://HOST.")
        for name in ("concurrency", "timeout_s", "attempts", "deadline_s"):
            if vars(self)[name] <= 0:
                raise ValueError(f"{name}={vars(self)[name]}: must be greater than 0.")
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ValueError(
                f"api_key_env={self.api_key_env}: this environment variable is not set; set it to the key of the service."
            )
        self._headers()

    async def ask_all(self, path: str, calls: Sequence[Callable[[Post], Awaitable[Score]]]) -> list[Score]:
        """Run the calls concurrently and return their scores. Each call gets a function that sends JSON to `path`."""
        import httpx  # imported here, because the driver builds this object but sends no requests

        limits = httpx.Limits(max_connections=self.concurrency)
        async with httpx.AsyncClient(timeout=self.timeout_s, limits=limits, headers=self._headers()) as client:
            number = itertools.count()

            async def post(body: Json) -> Any:
                return await self._post(client, path, body, next(number))

            bound = [_bind_post(call, post) for call in calls]
            return await gather_scores(bound, concurrency=self.concurrency, deadline_s=self.deadline_s)

    def _headers(self) -> dict[str, str]:
        if self.role:
            return authorization()
        return {"Authorization": f"Bearer {engine_key_from(self.api_key_env)}"} if self.api_key_env else {}

    def _url(self, path: str, number: int) -> str:
        """Return the URL for attempt `number`. With `role`, consecutive attempts go to different servers if there are several."""
        if not self.role:
            return self.url.rstrip("/") + path
        if not (urls := _SERVERS.get(self.role)):
            raise RemoteError(f"no server of roles.{self.role} runs")
        return urls[number % len(urls)] + path

    async def _post(self, client: Any, path: str, body: Json, number: int) -> Any:
        import httpx
        from tenacity import (
            AsyncRetrying,
            retry_if_exception_type,
            stop_after_attempt,
            stop_after_delay,
            wait_random_exponential,
        )

        retrying = AsyncRetrying(
            stop=stop_after_delay(self.deadline_s) if self.role else stop_after_attempt(self.attempts),
            wait=wait_random_exponential(multiplier=0.25, max=10),
            retry=retry_if_exception_type((httpx.TransportError, RetryableError, TimeoutError)),
            reraise=True,
        )
        attempts = itertools.count(number)

        async def attempt() -> Any:  # tenacity awaits the result only if the function is declared async
            return await self._try(client, self._url(path, next(attempts)), body)

        try:
            return await retrying(attempt)
        except (TimeoutError, httpx.TimeoutException):
            url, tried = self._url(path, number), next(attempts) - number
            raise RemoteError(f"{url} gave no answer within {self.timeout_s} s in {tried} attempts") from None

    async def _try(self, client: Any, url: str, body: Json) -> Any:
        async with asyncio.timeout(self.timeout_s):  # the timeout of httpx limits each read, not the whole request
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
    """Asks a language model, the judge, to grade a response with a number. The score is the number, scaled to [0, 1].

    The server must offer OpenAI's /v1/chat/completions. Scoring a response fails if the answer of the judge does not
    match `pattern`, or if the number is outside [low, high].

    Raises ValueError for a template without {response}, for a pattern that is not a regular expression with one group,
    and for low >= high.
    """

    in_process: ClassVar[bool] = True  # the reward only waits for the network

    model: str = ""  # name of the model on the server; not needed for a model under the config key `roles`
    template: str = JUDGE_TEMPLATE  # message to the judge; {prompt}, {response} and {ground_truth} are replaced
    # Regular expression that finds the number in the answer of the judge. The last match counts.
    pattern: str = r"[Ss]core:\s*\**\s*(-?\d+(?:\.\d+)?)"
    low: float = 0.0  # number that gives the score 0
    high: float = 10.0  # number that gives the score 1
    max_tokens: int = 1024  # length limit of the answer of the judge
    temperature: float = 0.0  # sampling temperature of the judge
    extra: Json | None = None  # additional fields of the request, such as chat_template_kwargs

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{response}" not in self.template:
            raise ValueError(
                f"template={self.template[:80]!r}: {{response}} is missing, so the judge would see no response."
            )
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {error}.") from error
        if groups != 1:
            raise ValueError(
                f"pattern={self.pattern!r}: expected one group, around the number; the pattern has {groups}."
            )
        if not self.low < self.high:
            raise ValueError(f"low={self.low}: must be below high={self.high}.")

    async def __call__(self, responses: list[Response]) -> list[Score]:
        """Return scores in [0, 1]. A response gets a failed score if the service fails or if its answer is invalid."""
        return await self.ask_all("/v1/chat/completions", [partial(self._score, response) for response in responses])

    async def _score(self, response: Response, post: Post) -> Score:
        answer = await post(self._body(response))
        text = answer["choices"][0]["message"]["content"] or ""
        found = re.findall(self.pattern, text)
        if not found:
            return Score.failed(f"the judge's answer has no match of {self.pattern}: {text[-200:]!r}")
        number = float(found[-1])
        if not self.low <= number <= self.high:
            return Score.failed(
                f"the judge's number {found[-1]} is not in the range from {self.low:g} to {self.high:g}."
            )
        return Score((number - self.low) / (self.high - self.low))

    def _body(self, response: Response) -> Json:
        values = dict(
            prompt="\n\n".join(_message_text(message) for message in response.prompt),
            response=response.text,
            ground_truth=str(response.ground_truth),
        )
        names = "|".join(_PLACEHOLDERS)
        # All placeholders are replaced in one pass, so that a placeholder inside the response is not replaced.
        content = re.sub(rf"\{{({names})\}}", lambda found: values[found[1]], self.template)
        question = dict(role="user", content=content)
        settings = dict(model=self.model, max_tokens=self.max_tokens, temperature=self.temperature)
        return settings | dict(messages=[question]) | (self.extra or {})


def _message_text(message: dict[str, Any]) -> str:
    """Return a message of the prompt as text for the judge. The text begins with the role if the role is not user."""
    content = message["content"]
    return content if message["role"] == "user" else f"[{message['role']}] {content}"


@dataclass(frozen=True, kw_only=True)
class RewardModel(HttpService):
    """Scores the conversation (prompt and response) with a sequence-classification model that has one output.

    The server is SGLang with `--is-embedding`. This class tokenizes the conversation with the tokenizer and the chat
    template of the reward model, and sends the tokens to /classify.

    Raises ValueError if `tokenizer` is not a folder with tokenizer.json and a chat template.
    """

    in_process: ClassVar[bool] = True  # the reward only waits for the network

    tokenizer: str  # Hugging Face folder of the reward model, with tokenizer and chat template
    scale: float = 1.0  # the output of the model is multiplied by this factor
    max_tokens: int | None = None  # limit of the tokens of a conversation; scoring fails for longer conversations

    def __post_init__(self) -> None:
        super().__post_init__()
        # The path is made absolute, because workers may have another working directory.
        object.__setattr__(self, "tokenizer", str(Path(self.tokenizer).expanduser().resolve()))
        _tokenizer(self.tokenizer)

    async def __call__(self, responses: list[Response]) -> list[Score]:
        """Return the scores of the reward model. A response gets a failed score if the service fails."""
        return await self.ask_all("/classify", [partial(self._score, response) for response in responses])

    async def _score(self, response: Response, post: Post) -> Score:
        ids = self.encode(response)
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            return Score.failed(
                f"the conversation has {len(ids)} tokens; max_tokens={self.max_tokens} is the limit of the reward model."
            )
        answer = await post(dict(input_ids=ids))
        outputs = answer["embedding"]
        if len(outputs) != 1:
            name = self.url or f"roles.{self.role}"
            raise ValueError(f"{name} returned {len(outputs)} numbers; expected a model with one output.")
        return Score(self.scale * as_number(outputs[0]))

    def encode(self, response: Response) -> list[int]:
        """Return the token ids of the conversation, rendered by the chat template of the reward model."""
        turns = [dict(role=turn.role, content=turn.text) for turn in response.turns]
        messages = response.prompt + (turns or [dict(role="assistant", content=response.text)])
        tokenizer = _tokenizer(self.tokenizer)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]


@cache
def _tokenizer(folder: str) -> Any:
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"tokenizer={folder}: tokenizer.json is missing; give the folder of the reward model.")
    with quick_package_metadata():
        from transformers import PreTrainedTokenizerFast  # takes a second

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if not tokenizer.chat_template:
        raise ValueError(
            f"tokenizer={folder}: the tokenizer has no chat template, which is needed to render the conversation."
        )
    return tokenizer
