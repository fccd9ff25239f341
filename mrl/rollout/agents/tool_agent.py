"""Multi-turn responses: the policy samples a turn, tools run the calls in this turn, and the policy continues with the results.

For the next turn, the sampled token ids are sent to the engine unchanged. The text of a turn is never tokenized again. Only the
tool results, and the chat template around them, are tokenized (see mrl/data/tokenizer.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mrl.data.tokenizer import ToolTemplate
from mrl.rewards.reward_types import Turn
from mrl.rollout.agents.tools import Tool, ToolCall, ToolCallError, ToolParser, ToolResult, run_call
from mrl.rollout.client import Completion, SamplingParams
from mrl.rollout.trajectory import ResponseUsage, Trajectory

GenerateTurn = Callable[[list[int], SamplingParams], Awaitable[Completion]]  # input token ids, parameters -> one turn


@dataclass(frozen=True)
class ToolAgent:
    """The object that `rollout.agent` configures: the tools, the parser of their calls, and the limits of a response."""

    tools: Mapping[str, Tool]  # tool name -> tool
    parser: ToolParser  # finds the tool calls in a turn
    max_turns: int = 8  # maximal number of assistant turns; calls in turn number `max_turns` are not run
    max_tool_tokens: int = 512  # maximal length of one tool result; a longer result is cut and ends with "..."
    tool_timeout_s: float = 30.0  # time limit of one tool call
    max_running_tools: int = 16  # maximal number of tool calls that run at the same time
    max_concurrency: int = 256  # maximal number of responses that are sampled at the same time, over all engines
    result_role: str = "tool"  # role of tool results in the model's chat template

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tool_tokens", "tool_timeout_s", "max_running_tools", "max_concurrency"):
            if (value := vars(self)[name]) <= 0:
                raise ValueError(f"{name}={value}: must be greater than 0.")
        if not self.tools:
            raise ValueError("tools is empty; add at least one tool: tools.NAME._target_=...")
        for name, tool in self.tools.items():
            if not callable(tool):
                raise ValueError(f"tools.{name} is an object of type {type(tool).__name__}, which cannot be called.")
        if not callable(self.parser) or not isinstance(getattr(self.parser, "stops", None), tuple):
            raise ValueError(
                f"parser has the type {type(self.parser).__name__}; expected an object with `__call__` and a tuple `stops`."
            )
        named = getattr(self.parser, "tool", None)
        if named is not None and named not in self.tools:
            raise ValueError(f"parser.tool={named!r} is not a tool; the tools are {', '.join(self.tools)}.")

    def prepare(self, tokenizer: Any, template_args: Mapping[str, Any] | None = None) -> "BoundToolAgent":
        """Return the agent bound to the tokenizer of a model.

        `template_args`: variables of the chat template, the same as for prompts.
        Raises ValueError if a stop text is not one token, or if the chat template cannot render tool results.
        """
        stops = tuple(_single_token(tokenizer, text) for text in self.parser.stops)
        return BoundToolAgent(self, tokenizer, ToolTemplate.of(tokenizer, self.result_role, template_args), stops)


def _single_token(tokenizer: Any, text: str) -> int:
    """Return the id of the token that is exactly `text`. Raises ValueError if there is no such token."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(
            f"rollout.agent.parser: {text!r} should end a turn, but this model has no single token for it; engines stop at "
            "single tokens only. Use markers from the model's vocabulary, or a parser without stops."
        )
    return ids[0]


@dataclass
class _ResponseBuilder:
    """The turns and tool results of an unfinished response. Trajectory and ResponseUsage describe most of the fields."""

    tokens_left: int  # number of tokens until the token limit of the response
    ids: list[int] = field(default_factory=list)  # `token_ids` of Trajectory
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)  # index in `logprobs` of the last token of each assistant turn
    tool_calls: int = 0
    tool_errors: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)

    def _append(self, ids: Sequence[int], *, sampled: bool) -> None:
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.tokens_left -= len(ids)

    def add_assistant_turn(self, completion: Completion, num_inputs: int, text: str) -> None:
        """Append a sampled turn. `num_inputs`: number of input tokens of the HTTP request. `text`: the decoded turn.

        Raises RuntimeError if the completion is empty or was aborted.
        """
        if completion.finish_reason == "abort" or not completion.token_ids:
            raise RuntimeError(
                f"turn {len(self.turn_ends) + 1} of a response is empty or was aborted by an engine (finish reason "
                f"{completion.finish_reason})."
            )
        num_logprobs, num_tokens = len(completion.logprobs), len(completion.token_ids)
        assert num_logprobs == num_tokens, f"{num_logprobs} log-probabilities for {num_tokens} tokens"
        self._append(completion.token_ids, sampled=True)
        self.logprobs += completion.logprobs
        self.turns.append(Turn("assistant", text))
        self.turn_ends.append(len(self.logprobs) - 1)
        self.input_tokens += num_inputs
        self.cached_tokens += completion.cached_tokens
        for version, tokens in completion.versions or [(int(completion.weight_version), num_tokens)]:
            if self.versions and self.versions[-1][0] == version:
                tokens += self.versions.pop()[1]
            self.versions.append((version, tokens))

    def add_tool_results(self, results: Sequence[ToolResult], ids: Sequence[int]) -> None:
        """Append the results of a turn's tool calls. `ids`: tokens of the results, with the chat template around them."""
        self._append(ids, sampled=False)
        self.turns += [Turn("tool", result.text) for result in results]

    def to_trajectory(self, last: Completion, *, truncated: bool) -> Trajectory:
        """Return the finished response.

        `last`: the completion of the last turn; its routed experts include the experts of all earlier tokens. `truncated`:
        whether the token limit or the turn limit prevents another turn.
        """
        assert self.versions, "a response has at least one assistant turn"
        usage = ResponseUsage(
            len(self.turn_ends), self.tool_calls, self.tool_errors, self.input_tokens, self.cached_tokens
        )
        return Trajectory(
            token_ids=self.ids,
            logprobs=self.logprobs,
            truncated=truncated or last.finish_reason == "length",
            weight_version=self.versions[0][0],
            sampled=None if all(self.sampled) else self.sampled,
            turns=tuple(self.turns),
            turn_ends=tuple(self.turn_ends),
            routed_experts=last.routed_experts,
            usage=usage,
            versions=tuple(self.versions) if len(self.versions) > 1 else (),
        )


@dataclass(frozen=True)
class BoundToolAgent:
    """A tool agent that is bound to the tokenizer of a model. A call of the object samples one multi-turn response."""

    agent: ToolAgent
    tokenizer: Any  # Hugging Face tokenizer
    template: ToolTemplate  # tokenizes tool results with the chat template around them
    stop_token_ids: tuple[int, ...]  # tokens of the parser that end a turn, in addition to the end-of-sequence token

    async def __call__(
        self, generate_turn: GenerateTurn, prompt: list[int], params: SamplingParams, tool_limit: asyncio.Semaphore
    ) -> Trajectory:
        """Sample one response. `params.max_new_tokens` limits the length of the response, tool results included.

        `generate_turn` samples one turn. `tool_limit` limits the number of tool calls that run at the same time. Raises
        RuntimeError if a turn is empty or was aborted.
        """
        response = _ResponseBuilder(params.max_new_tokens)
        stops = tuple(dict.fromkeys([*params.stop_token_ids, *self.stop_token_ids]))
        while True:
            inputs = prompt + response.ids
            turn_params = replace(params, max_new_tokens=response.tokens_left, stop_token_ids=stops)
            completion = await generate_turn(inputs, turn_params)
            text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            response.add_assistant_turn(completion, len(inputs), text)
            calls = self._parse_calls(completion)
            if not calls:
                return response.to_trajectory(completion, truncated=False)
            if len(response.turn_ends) == self.agent.max_turns or response.tokens_left <= 0:
                return response.to_trajectory(completion, truncated=True)
            results = []
            for call in calls:
                async with tool_limit:
                    results.append(await run_call(self.agent.tools, call, self.agent.tool_timeout_s))
            response.tool_calls += len(results)
            response.tool_errors += sum(result.failed for result in results)
            result_ids = self._tokenize_results(completion, results)
            if len(result_ids) >= response.tokens_left:  # another turn would exceed the token limit
                return response.to_trajectory(completion, truncated=True)
            response.add_tool_results(results, result_ids)

    def _parse_calls(self, completion: Completion) -> list[ToolCall | ToolCallError]:
        """Return the tool calls in a turn. The calls of a turn that was cut at the token limit are ignored."""
        if completion.finish_reason == "length":
            return []
        return self.agent.parser(self.tokenizer.decode(completion.token_ids, clean_up_tokenization_spaces=False))

    def _tokenize_results(self, completion: Completion, results: Sequence[ToolResult]) -> list[int]:
        """Return the token ids between this turn and the next turn: the tool results, with the chat template around them.

        If the turn stopped at a token of the parser, the template's end-of-turn token is still missing and is put before the
        results.
        """
        last = completion.token_ids[-1]
        turn_ended = last in self.template.end_of_turn or last not in self.stop_token_ids
        encoded = [self.template.encode(result.text, self.agent.max_tool_tokens) for result in results]
        return self.template.wrap(encoded, turn_ended=turn_ended)


class ConcurrencyLimits:
    """Limits how many responses are sampled, and how many tool calls run, at the same time in one engine pool."""

    def __init__(self, agent: ToolAgent) -> None:
        self.responses = asyncio.Semaphore(agent.max_concurrency)
        self.tools = asyncio.Semaphore(agent.max_running_tools)


async def generate_multi_turn_responses(
    bound_agent: BoundToolAgent,
    generate_turn_of: Callable[[int], GenerateTurn],
    prompts: Sequence[list[int]],
    sampling: Sequence[SamplingParams],
    limits: ConcurrencyLimits,
) -> list[Trajectory]:
    """Sample one response to each prompt. Returns the responses in the order of the prompts.

    `generate_turn_of(i)` returns the function that samples a turn of response i. `sampling`: parameters of each response. Raises
    the error of the first response that fails.
    """

    async def respond(index: int) -> Trajectory:
        async with limits.responses:
            return await bound_agent(generate_turn_of(index), prompts[index], sampling[index], limits.tools)

    return await asyncio.gather(*(respond(index) for index in range(len(prompts))))
