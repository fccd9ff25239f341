"""A language model as the judge of responses."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from mrl.rewards.base import Response, Score
from mrl.rewards.remote import Json, Post, Service

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
class Judge(Service):
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
            prompt="\n\n".join(_text(message) for message in response.prompt),
            response=response.text,
            ground_truth=str(response.ground_truth),
        )
        places = "|".join(_PLACES)  # replaced in one pass: braces in a response are only text
        content = re.sub(rf"\{{({places})\}}", lambda found: values[found[1]], self.template)
        question = dict(role="user", content=content)
        settings = dict(model=self.model, max_tokens=self.max_tokens, temperature=self.temperature)
        return settings | dict(messages=[question]) | (self.extra or {})


def _text(message: dict[str, Any]) -> str:
    """A message of the prompt as the judge reads it; the role is named where it is not the user's."""
    content = message["content"]
    return content if message["role"] == "user" else f"[{message['role']}] {content}"
