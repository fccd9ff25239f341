"""What engines are asked for: prompts, seeds, which prompts share a request, and in which order requests are sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mrl.data.tokenizer import load_tokenizer
from mrl.hang_report.process_registry import track_activity
from mrl.rollout.client import SamplingParams
from mrl.rollout.engine_pool import MAX_RESPONSES_PER_REQUEST, EnginePool
from mrl.rollout.rollout_log import CompletionCache
from mrl.rollout.spec import RolloutSpec
from mrl.rollout.trajectory import Trajectory

TRAINING, HELD_OUT = 0, 1
"""First element of a seed's path: (TRAINING, number of the response in the run) or (HELD_OUT, row)."""


@dataclass(frozen=True)
class PromptRequest:
    """A prompt drawn for a group of responses."""

    number: int  # position in the order of drawing since the run began
    row: int  # row of the data set
    admitted_version: int  # weight version when it entered the staleness buffer; none of its tokens is older


@dataclass(frozen=True)
class UnscoredGroup:
    """The G responses to a prompt request, before they are scored."""

    request: PromptRequest
    prompt: list[int]
    trajectories: list[Trajectory]
    greedy: Trajectory | None = None


class RequestBuilder:
    """Samples the groups of prompt requests from the engine pool.

    This is not part of RolloutWorker, because Ray lets calls overlap if the actor class has a coroutine.
    """

    def __init__(self, spec: RolloutSpec, engines: EnginePool, cache: CompletionCache) -> None:
        """`cache`: completions in it are not sampled again, and new completions are added to it."""
        self.spec, self._engines, self._cache = spec, engines, cache
        self._conversation = None
        if spec.agent:
            self._conversation = spec.agent.prepare(load_tokenizer(spec.model_path, spec.chat), spec.chat.args)
        self.lengths = ResponseLengths(spec.max_response_tokens / 2)
        self._one_group_per_request = bool(spec.extra_groups or spec.staleness or spec.agent)

    def split(self, requests: Sequence[PromptRequest]) -> Sequence[Sequence[PromptRequest]]:
        """Decide which prompt requests share an HTTP request, in the order in which these are sent.

        If a step waits for all groups anyway, several groups share a request, which costs the engines less.
        """
        if self._one_group_per_request:
            return [
                [request] for request in longest_first(requests, lambda request: self.lengths.expected(request.row))
            ]
        return split_over_engines(requests, len(self._engines.urls), self.spec.responses_per_prompt)

    async def sample(self, requests: Sequence[PromptRequest]) -> list[UnscoredGroup]:
        """Sample G responses to each prompt, and a greedy one if the advantage needs it, all from one engine."""
        size, rows = self.spec.responses_per_prompt, ", ".join(str(request.row) for request in requests)
        prompts = []
        for request in requests:
            with track_activity(f"tokenising the prompt of row {request.row}"):
                prompts.append(self.spec.train.encode(request.row))
        numbers = [size * request.number + member for request in requests for member in range(size)]
        sampling = self._sampling_params(self.spec.temperature, [(TRAINING, number) for number in numbers])
        work = None
        if self._one_group_per_request:
            work = size * sum(self.lengths.expected(request.row) for request in requests)
        with track_activity(f"sampling {len(requests)} x {size} responses to rows {rows}"):
            repeated = [prompt for prompt in prompts for _ in range(size)]
            trajectories = await self._respond(repeated, sampling, numbers, self._cache, work)
            greedy: Sequence[Trajectory | None] = [None] * len(requests)
            if self.spec.needs_greedy:
                params = self._sampling_params(0.0, [()] * len(requests))
                greedy = await self._respond(prompts, params, range(len(prompts)))
        return [
            UnscoredGroup(request, prompt, trajectories[n * size : (n + 1) * size], likeliest)
            for n, (request, prompt, likeliest) in enumerate(zip(requests, prompts, greedy, strict=True))
        ]

    async def _respond(
        self,
        prompts: list[list[int]],
        sampling: list[SamplingParams],
        numbers: Sequence[int],
        cache: CompletionCache | None = None,
        work: float | None = None,
    ) -> list[Trajectory]:
        """Sample one response to each prompt, all on the engine that has the least work."""
        session = self._engines.open_session()
        if self._conversation:
            sessions = [session] * len(prompts)
            return await self._engines.converse(self._conversation, numbers, prompts, sampling, cache, sessions)
        completions = await self._engines.generate(numbers, prompts, sampling, cache, session, work)
        return [Trajectory.from_completion(completion) for completion in completions]

    def respond_now(
        self, prompts: list[list[int]], temperature: float, seed_paths: Sequence[tuple[int, ...]]
    ) -> list[Trajectory]:
        """Sample one response to each prompt, spread over all engines, and wait. Not for use inside the event loop."""
        sampling = self._sampling_params(temperature, seed_paths)
        if self._conversation:
            return self._engines.converse_all(self._conversation, prompts, sampling)
        return [Trajectory.from_completion(completion) for completion in self._engines.generate_all(prompts, sampling)]

    def _sampling_params(self, temperature: float, seed_paths: Sequence[tuple[int, ...]]) -> list[SamplingParams]:
        """Sampling parameters of one response per seed path; with `rollout.deterministic` each has its seed."""
        params = SamplingParams(self.spec.max_response_tokens, temperature)
        if not self.spec.deterministic:
            return [params] * len(seed_paths)
        return [replace(params, seed=seed_of(self.spec.seed, *path)) for path in seed_paths]


def seed_of(seed: int, *path: int) -> int:
    """63-bit seed of the response at this path in a run with this seed; a response that is sampled again gets it again.

    All turns of a response share one seed: SGLang draws a token by the seed and the token's position, which only grows.
    """
    return int(np.random.SeedSequence([seed, *path]).generate_state(1, np.uint64)[0] >> 1)


def longest_first[T](requests: Sequence[T], expected_length: Callable[[T], float]) -> list[T]:
    """Sort requests so that those with the longest expected responses are sent first."""
    return sorted(requests, key=lambda request: -expected_length(request))


def split_over_engines[T](requests: Sequence[T], num_engines: int, responses_per_prompt: int) -> list[list[T]]:
    """Split prompt requests into equal shares for the engines, and each share into HTTP requests of limited size."""
    shares = np.array_split(np.arange(len(requests)), max(1, num_engines))
    size = max(1, MAX_RESPONSES_PER_REQUEST // responses_per_prompt)
    parts = [share[start : start + size] for share in shares for start in range(0, len(share), size)]
    return [[requests[place] for place in part.tolist()] for part in parts]


@dataclass
class ResponseLengths:
    """Mean response length of each row of the data set, and of all rows, learned from sampled groups."""

    initial_guess: float  # tokens, until something was sampled
    rows: dict[int, float] = field(default_factory=dict)  # row -> mean length of its last group
    _sum: float = 0.0
    _count: int = 0

    def learn(self, row: int, lengths: list[int]) -> None:
        """Add the response lengths, in tokens, of a group of this row."""
        self.rows[row] = sum(lengths) / len(lengths)
        self._sum, self._count = self._sum + sum(lengths), self._count + len(lengths)

    def expected(self, row: int) -> float:
        """Expected tokens of a response: the mean of the row's last group, or of all responses so far."""
        return self.rows.get(row, self._sum / self._count if self._count else self.initial_guess)
