"""Responses of several turns: the policy speaks, tools answer, and all of it stays token ids.

What the engine emitted is appended as it came and sent back as it came; the only tokens made from text are those of tool
results and of what the chat template puts around them (mrl/data/template.py). Nothing is ever tokenised a second time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mrl.data.template import ToolTemplate
from mrl.rewards.base import Turn
from mrl.rollout.calls import Call, CallError, Parser
from mrl.rollout.client import Completion, SamplingParams
from mrl.rollout.tools import Result, Tool, run_call
from mrl.rollout.trajectory import Trajectory, Usage

Generate = Callable[[list[int], SamplingParams], Awaitable[Completion]]


@dataclass(frozen=True)
class ToolAgent:
    """`rollout.agent`: which tools there are, how they are called, and how long a conversation may be."""

    tools: Mapping[str, Tool]  # by the name that calls use
    parser: Parser
    max_turns: int = 8  # of the assistant; a call in the last one is not answered
    max_tool_tokens: int = 512  # of one result; a longer one is cut and ends with ...
    tool_timeout_s: float = 30.0  # for one call
    max_running_tools: int = 16  # calls that run at one time
    max_concurrency: int = 256  # responses in the making at one time, over all engines
    result_role: str = "tool"  # of messages with results, in the model's chat template

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tool_tokens", "tool_timeout_s", "max_running_tools", "max_concurrency"):
            if (value := vars(self)[name]) <= 0:
                raise ValueError(f"{name}={value}: must be greater than 0.")
        if not self.tools:
            raise ValueError("tools names no tool; name at least one: tools.NAME._target_=...")
        for name, tool in self.tools.items():
            if not callable(tool):
                raise ValueError(f"tools.{name} is {type(tool).__name__}, which cannot be called.")
        if not callable(self.parser) or not isinstance(getattr(self.parser, "stops", None), tuple):
            raise ValueError(f"parser is {type(self.parser).__name__}; expected `__call__` and a tuple `stops`.")
        named = getattr(self.parser, "tool", None)
        if named is not None and named not in self.tools:
            raise ValueError(f"parser.tool={named!r} is none of the tools; there is {', '.join(self.tools)}.")

    def prepare(self, tokenizer: Any, template_args: Mapping[str, Any] | None = None) -> "Conversation":
        """With the model's tokenizer, and the variables of its chat template that prompts are rendered with.

        Raises ValueError where chat template or vocabulary cannot carry tool calls.
        """
        stops = tuple(_single_token(tokenizer, text) for text in self.parser.stops)
        return Conversation(self, tokenizer, ToolTemplate.of(tokenizer, self.result_role, template_args), stops)


def _single_token(tokenizer: Any, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(
            f"rollout.agent.parser: {text!r} should end a turn, but is {len(ids)} tokens of this model, or unknown to it; "
            "engines stop at single tokens only. Use markers from its vocabulary, or a parser without stops."
        )
    return ids[0]


@dataclass
class _Path:
    """A response as it grows."""

    room: int  # tokens left
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    calls: int = 0
    errors: int = 0
    inputs: int = 0
    cached: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens)

    def append(self, ids: Sequence[int], *, sampled: bool) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.room -= len(ids)

    def say(self, done: Completion, num_inputs: int, text: str) -> None:
        """The assistant's turn, as the engine emitted it; raises RuntimeError where it came back empty or cut."""
        if done.finish_reason == "abort" or not done.token_ids:
            raise RuntimeError(
                f"turn {len(self.turn_ends) + 1} of a response came back {done.finish_reason} and empty or cut."
            )
        assert len(done.logprobs) == len(done.token_ids), f"{len(done.logprobs)} logprobs, {len(done.token_ids)} tokens"
        self.append(done.token_ids, sampled=True)
        self.logprobs += done.logprobs
        self.turns.append(Turn("assistant", text))
        self.turn_ends.append(len(self.logprobs) - 1)
        self.inputs += num_inputs
        self.cached += done.cached_tokens
        for version, tokens in done.versions or [(int(done.weight_version), len(done.token_ids))]:
            if self.versions and self.versions[-1][0] == version:
                tokens += self.versions.pop()[1]
            self.versions.append((version, tokens))

    def hear(self, results: Sequence[Result], ids: Sequence[int]) -> None:
        """The results of its calls, framed as the template has them."""
        self.append(ids, sampled=False)
        self.turns += [Turn("tool", result.text) for result in results]

    def finished(self, last: Completion, *, cut: bool) -> Trajectory:
        """The last request's routing covers everything before it."""
        assert self.versions, "callers let it say something first"
        usage = Usage(len(self.turn_ends), self.calls, self.errors, self.inputs, self.cached)
        return Trajectory(
            self.ids,
            self.logprobs,
            cut or last.finish_reason == "length",
            self.versions[0][0],
            None if all(self.sampled) else self.sampled,
            tuple(self.turns),
            tuple(self.turn_ends),
            last.routed_experts,
            usage,
            tuple(self.versions) if len(self.versions) > 1 else (),
        )


@dataclass(frozen=True)
class Conversation:
    """An agent that knows its model's tokens."""

    agent: ToolAgent
    tokenizer: Any
    template: ToolTemplate
    stop_token_ids: tuple[int, ...]  # that end a turn, besides the model's own end

    async def __call__(
        self, generate: Generate, prompt: list[int], params: SamplingParams, running: asyncio.Semaphore
    ) -> Trajectory:
        """One response; `params.max_new_tokens` bounds all that follows the prompt. `running`: tools that may run at once.

        Raises RuntimeError where a turn came back empty or cut by an abort.
        """
        path = _Path(params.max_new_tokens)
        stops = tuple(dict.fromkeys([*params.stop_token_ids, *self.stop_token_ids]))
        while True:
            inputs = prompt + path.ids
            done = await generate(inputs, replace(params, max_new_tokens=path.room, stop_token_ids=stops))
            path.say(done, len(inputs), self.tokenizer.decode(done.token_ids, skip_special_tokens=True))
            calls = self._calls(done)
            if not calls:
                return path.finished(done, cut=False)
            if len(path.turn_ends) == self.agent.max_turns or path.room <= 0:
                return path.finished(done, cut=True)
            results = [await self._run(call, running) for call in calls]
            path.calls += len(results)
            path.errors += sum(result.failed for result in results)
            heard = self._framed(done, results)
            if len(heard) >= path.room:  # a next turn has no room, and what no turn follows is not kept
                return path.finished(done, cut=True)
            path.hear(results, heard)

    def _calls(self, done: Completion) -> list[Call | CallError]:
        """What the turn asks for; nothing where it was cut."""
        if done.finish_reason == "length":
            return []
        return self.agent.parser(self.tokenizer.decode(done.token_ids, clean_up_tokenization_spaces=False))

    async def _run(self, call: Call | CallError, running: asyncio.Semaphore) -> Result:
        async with running:
            return await run_call(self.agent.tools, call, self.agent.tool_timeout_s)

    def _framed(self, done: Completion, results: Sequence[Result]) -> list[int]:
        """Tokens between this turn and the next. A turn that a call's marker ended still lacks the template's end."""
        last = done.token_ids[-1]
        closed = last in self.template.end or last not in self.stop_token_ids
        encoded = [self.template.encode(result.text, self.agent.max_tool_tokens) for result in results]
        return self.template.wrap(encoded, closed=closed)


class Limits:
    """How much may go on at one time, over all conversations of one event loop."""

    def __init__(self, agent: ToolAgent) -> None:
        self.places = asyncio.Semaphore(agent.max_concurrency)
        self.tools = asyncio.Semaphore(agent.max_running_tools)


async def converse(
    conversation: Conversation,
    generate_of: Callable[[int], Generate],
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    limits: Limits,
) -> list[Trajectory]:
    """One response to each prompt, in order; `generate_of` says who gives the turns of the response with this number.

    Raises what the first response that fails raises; the others are given up.
    """

    async def respond(number: int) -> Trajectory:
        async with limits.places:
            return await conversation(generate_of(number), prompts[number], sampling[number], limits.tools)

    return await asyncio.gather(*(respond(number) for number in range(len(prompts))))
