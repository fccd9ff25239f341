"""What engines are asked for: prompts, seeds, which requests they share, and of which engine."""

from collections.abc import Sequence
from dataclasses import replace

from mrl.data.tokenizer import load_tokenizer
from mrl.hang_report.notes import doing
from mrl.rollout import dealing
from mrl.rollout.answers import Answers
from mrl.rollout.client import SamplingParams
from mrl.rollout.engines import Engines
from mrl.rollout.lengths import Lengths
from mrl.rollout.seeds import TRAINING, seed_of
from mrl.rollout.spec import RolloutSpec
from mrl.rollout.stream import Draft
from mrl.rollout.trajectory import Trajectory
from mrl.rollout.window import Ticket


class Sampler:
    """Turns tickets into drafts. A class of its own: Ray takes an actor with a coroutine for one whose calls may overlap."""

    def __init__(self, spec: RolloutSpec, engines: Engines, kept: Answers) -> None:
        """`kept`: what engines have answered already; what they answer is put there."""
        self.spec, self._engines, self._kept = spec, engines, kept
        self._conversation = None
        if spec.agent:
            self._conversation = spec.agent.prepare(load_tokenizer(spec.model_path, spec.chat), spec.chat.args)
        self.lengths = Lengths(spec.max_response_tokens / 2)
        self._apart = bool(spec.window_extra or spec.staleness or spec.agent)  # each group is asked for by itself

    async def answer(self, tickets: Sequence[Ticket]) -> list[Draft]:
        """G responses to each ticket's prompt, and a greedy one where the advantage asks for it, in one request each."""
        size, rows = self.spec.responses_per_prompt, ", ".join(str(ticket.row) for ticket in tickets)
        prompts = [self._prompt(ticket.row) for ticket in tickets]
        numbers = [size * ticket.number + member for ticket in tickets for member in range(size)]
        sampling = self._sampling(self.spec.temperature, [(TRAINING, number) for number in numbers])
        work = size * sum(self.lengths.expected(ticket.row) for ticket in tickets) if self._apart else None
        with doing(f"sampling {len(tickets)} x {size} responses to rows {rows}"):
            paths = await self._respond(
                [prompt for prompt in prompts for _ in range(size)], sampling, self._kept, numbers, work
            )
            greedy: Sequence[Trajectory | None] = [None] * len(tickets)
            if self.spec.needs_greedy:
                greedy = await self._respond(prompts, self._sampling(0.0, [()] * len(tickets)))
        parts = zip(tickets, prompts, greedy, strict=True)
        return [
            Draft(ticket, prompt, paths[n * size : (n + 1) * size], likeliest)
            for n, (ticket, prompt, likeliest) in enumerate(parts)
        ]

    def _prompt(self, row: int) -> list[int]:
        with doing(f"tokenising the prompt of row {row}"):
            return self.spec.train.encode(row)

    def together(self, tickets: Sequence[Ticket]) -> Sequence[Sequence[Ticket]]:
        """Tickets by the request they share. Those that a step waits for anyway share one, which costs engines less."""
        if self._apart:
            return [[ticket] for ticket in dealing.apart(tickets, lambda ticket: self.lengths.expected(ticket.row))]
        return dealing.together(tickets, len(self._engines.urls), self.spec.responses_per_prompt)

    def respond_now(
        self, prompts: list[list[int]], temperature: float, places: Sequence[tuple[int, ...]]
    ) -> list[Trajectory]:
        """One response to each prompt, spread over all engines; waits for them. Not to be called in the engines' loop."""
        sampling = self._sampling(temperature, places)
        if self._conversation:
            return self._engines.converse(self._conversation, prompts, sampling)
        return [Trajectory.of(completion) for completion in self._engines.complete(prompts, sampling)]

    def _sampling(self, temperature: float, places: Sequence[tuple[int, ...]]) -> list[SamplingParams]:
        """How to sample the response at each of these places, where seeds are wanted each with the seed of its place."""
        plain = SamplingParams(self.spec.max_response_tokens, temperature)
        if not self.spec.deterministic:
            return [plain] * len(places)
        return [replace(plain, seed=seed_of(self.spec.seed, *place)) for place in places]

    async def _respond(
        self,
        prompts: list[list[int]],
        sampling: list[SamplingParams],
        kept: Answers | None = None,
        numbers: Sequence[int] = (),
        work: float | None = None,
    ) -> list[Trajectory]:
        """One response to each prompt, all from the engine that has least to do."""
        seat, numbers = self._engines.seat(), numbers or range(len(prompts))
        if self._conversation:
            seats = [seat] * len(prompts)
            return await self._engines.conversations(self._conversation, numbers, prompts, sampling, kept, seats)
        return [
            Trajectory.of(completion)
            for completion in await self._engines.answers(numbers, prompts, sampling, kept, seat, work)
        ]
