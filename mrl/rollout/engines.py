"""The engines of a rollout worker: started, asked together, and replaced where they fail."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mrl.hang_report.register import FOLDER, NAME, forget, stacks
from mrl.rollout.agent import Conversation, Generate, Limits, converse
from mrl.rollout.answers import Answers
from mrl.rollout.asking import Engine, Seat, Service
from mrl.rollout.client import Completion, EngineClient, EngineError, SamplingParams
from mrl.rollout.dealing import POST_RESPONSES
from mrl.rollout.host import HostedEngine, listen_address
from mrl.rollout.loop import Loop
from mrl.rollout.outside import OutsideEngine, check_seeds
from mrl.rollout.server import EngineServer
from mrl.rollout.spec import RolloutSpec
from mrl.rollout.trajectory import Trajectory

log = logging.getLogger(__name__)


CLOSE_S = 15.0


class Engines:
    """All engines of one worker. The driver replaces those that failed, with their weights."""

    def __init__(self, spec: RolloutSpec) -> None:
        """Start the engines at once; `wait_ready` waits for them."""
        self.spec = spec
        self._arguments = dict(spec.server_args, model_path=spec.model_path, tp_size=spec.engine_tp)
        if spec.routed_experts:
            self._arguments["enable_return_routed_experts"] = True
        self._stacks = stacks(spec.run_dir)
        forget(self._stacks, "engine_*")  # of an earlier start in this folder
        self._numbers = itertools.count()  # of engines so far, replaced ones included
        self._servers: list[EngineServer | HostedEngine | OutsideEngine] = [
            OutsideEngine(url) for url in spec.engine_urls
        ]
        self._servers = self._servers or [self._start(place) for place in range(spec.num_engines)]
        self._renewing = threading.Lock()
        self._loop = Loop("engines")
        faults = spec.faults
        self._service = Service(
            faults.engine_tries, faults.engine_stall_s, lambda engine: self._renew(engine.client.url)
        )
        self._limits: Limits | None = None  # of conversations
        self._told: set[Engine] = set()  # failed engines that the driver knows of
        self._untold: dict[str, str] = {}  # URL -> why, of engines that failed and are back: it must know of these too
        self._replaced = self._redone = 0  # until numbers were taken last
        self._were_ready = False  # all, once

    def _start(self, place: int) -> EngineServer | HostedEngine:
        server = self._make_server(place, next(self._numbers))
        server.start()
        return server

    def _make_server(self, place: int, number: int) -> EngineServer | HostedEngine:
        """A child of ours, or an engine on the slots of this place."""
        name = f"engine_{number}"
        arguments = dict(self._arguments, random_seed=self.spec.seed + number)
        log, env = Path(self.spec.run_dir) / "logs" / f"{name}.log", {FOLDER: str(self._stacks), NAME: name}
        if self.spec.slots is not None:
            return HostedEngine(partial(self.spec.slots, place), arguments, log, env)
        return EngineServer(dict(arguments, host=listen_address()), log, env=env)

    @property
    def urls(self) -> list[str]:
        """Of all engines, those that still start included."""
        return [server.url for server in self._servers]

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait for the engines, all of which are then in service; returns their URLs."""
        deadline = time.monotonic() + timeout_s
        for place in range(len(self._servers)):
            self._wait(place, deadline)
        failed = self._failures()
        before = {engine.client.url: engine for engine in self._service.engines if engine.failure is None}
        engines = [before.get(server.url) or self._in_service(server) for server in self._servers]
        if not self._were_ready:
            self._loop.start(self._service.open()).result()
        self._loop.start(self._service.enlist(engines)).result()
        self._were_ready, self._told = True, set()
        self._untold |= {url: why for url, why in failed.items() if url in self.urls}
        return self.urls

    def _wait(self, place: int, deadline: float) -> None:
        """Wait for one engine, and for others in its place where it ends before it is ready.

        Before engines were ready once, one that was not killed ends for a mistake, such as a wrong argument: no other is tried.
        """
        for left in reversed(range(1 + (self.spec.faults.engine_tries if self._were_ready else 1))):
            server = self._servers[place]
            try:
                return server.wait_ready(max(1.0, deadline - time.monotonic()))
            except RuntimeError as error:
                ours = not isinstance(server, OutsideEngine) and (self._were_ready or server.was_killed)
                if not ours or not left:
                    raise
                log.warning("%s", error)
                self._renew(server.url)

    def _in_service(self, server: EngineServer | HostedEngine | OutsideEngine) -> Engine:
        client = EngineClient(server.url, timeout_s=self.spec.request_timeout_s)
        if isinstance(server, OutsideEngine):
            if self.spec.deterministic:
                check_seeds(client, "rollout.deterministic")
            return Engine(client, server.alive, "rollout.engine_urls")
        return Engine(client, server.alive, str(server.log_path))

    def replace(self, urls: Sequence[str], timeout_s: float) -> list[str]:
        """End these engines and start others in their place; returns the URLs of all when they are ready."""
        for url in urls:
            self._renew(url)
        return self.wait_ready(timeout_s)

    def _renew(self, url: str) -> None:
        """End an engine of ours and start its successor; one that was renewed already is known no more."""
        with self._renewing:
            for place, server in enumerate(self._servers):
                if server.url == url and not isinstance(
                    server, OutsideEngine
                ):  # an outside one may come back by itself
                    log.warning("engine %s is replaced", url)
                    server.stop(timeout_s=5.0)
                    forget(self._stacks, server.log_path.stem)
                    self._servers[place] = self._start(place)

    def complete(
        self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], kept: Answers | None = None
    ) -> list[Completion]:
        """One response to each prompt, in order, spread evenly over the engines. Raises as `Round.ask`.

        What is `kept` already is not asked for.
        """

        async def all_parts() -> list[Completion]:
            engines = self._alive()
            answers = await asyncio.gather(
                *(
                    self.answers(part, [prompts[i] for i in part], [sampling[i] for i in part], kept, engines[engine])
                    for engine, part in _parts(len(prompts), len(engines))
                )
            )
            return [completion for answer in answers for completion in answer]

        return self._round(all_parts)

    async def answers(
        self,
        numbers: Sequence[int],
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        kept: Answers | None = None,
        engine: Engine | Seat | None = None,
        work: float | None = None,
    ) -> list[Completion]:
        """Of the responses with these numbers what is kept, and one request for the others, which are kept then.

        The engine is the one given, else the one with least to do. To be awaited in the loop of `start`.
        """
        found = {} if kept is None else _known(kept, numbers, prompts)
        missing = [place for place, number in enumerate(numbers) if number not in found]
        if missing:
            seat = engine if isinstance(engine, Seat) else Seat(engine or self._service.idlest())
            inputs, params = [prompts[place] for place in missing], [sampling[place] for place in missing]
            routed = self.spec.routed_experts
            done = await self._service.ask(seat, inputs, params, routed_experts=routed, work=work)
            asked = [numbers[place] for place in missing]
            if kept is not None:
                kept.put(asked, inputs, done)
            found |= dict(zip(asked, done, strict=True))
        return [found[number] for number in numbers]

    def converse(
        self,
        conversation: Conversation,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        kept: Answers | None = None,
    ) -> list[Trajectory]:
        """One response of several turns to each prompt, in order; all turns of one from one engine, unless that fails.

        A turn that an engine does not answer is asked of another one; turns before it, and their tools, are not repeated.
        """

        async def all_responses() -> list[Trajectory]:
            engines = self._alive()
            seats = [Seat(engines[number * len(engines) // len(prompts)]) for number in range(len(prompts))]
            numbers = range(len(prompts))
            return await self.conversations(conversation, numbers, prompts, sampling, kept, seats)

        return self._round(all_responses)

    async def conversations(
        self,
        conversation: Conversation,
        numbers: Sequence[int],
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        kept: Answers | None,
        seats: Sequence[Seat],
    ) -> list[Trajectory]:
        """Responses of several turns, with these numbers. To be awaited in the loop of `start`."""

        def generate_of(place: int) -> Generate:
            async def generate(inputs: list[int], params: SamplingParams) -> Completion:
                (done,) = await self.answers([numbers[place]], [inputs], [params], kept, seats[place])
                return done

            return generate

        self._limits = self._limits or Limits(conversation.agent)
        return await converse(conversation, generate_of, prompts, sampling, self._limits)

    def seat(self) -> Seat:
        """With the engine that has least to do. Raises NoEngineError."""
        return Seat(self._service.idlest())

    def start[T](self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in the loop in which engines are asked."""
        return self._loop.start(work)

    def hold(self, held: bool) -> None:
        """Whether engines are paused on purpose, so that nobody takes them for stuck."""
        self._service.held = held

    def _alive(self) -> list[Engine]:
        """Engines that have not failed. Raises NoEngineError."""
        self._service.idlest()
        return [engine for engine in self._service.engines if engine.failure is None]

    def _round[T](self, work: Callable[[], Awaitable[T]]) -> T:
        deadline_s = self.spec.request_timeout_s

        async def run() -> T:
            async with asyncio.timeout(deadline_s):
                return await work()

        try:
            return self._loop.start(run()).result()
        except TimeoutError:
            raise late(deadline_s) from None

    def take_failed(self) -> dict[str, str]:
        """URLs of engines that failed since the last call, and why."""
        failed, self._untold = self._untold | self._failures(), {}
        self._told |= {engine for engine in self._service.engines if engine.failure}
        self._replaced += len(failed)
        return failed

    def _failures(self) -> dict[str, str]:
        failed = [engine for engine in self._service.engines if engine not in self._told]
        return {engine.client.url: engine.failure for engine in failed if engine.failure}

    def take_numbers(self) -> dict[str, float]:
        """Metrics of what failed since the last call; engines count when `take_failed` has told of them."""
        redone, self._redone = self._service.redone - self._redone, self._service.redone
        replaced, self._replaced = self._replaced, 0
        return {"rollout/replaced_engines": float(replaced), "rollout/redone_responses": float(redone)}

    def cpu_seconds(self) -> float:
        """User and system seconds of all engines' process trees."""
        return sum(server.cpu_seconds() for server in self._servers)

    def close(self) -> None:
        """End every engine of ours."""
        if self._were_ready:
            with suppress(TimeoutError):  # a failed engine that does not end: its supervisor sees to it
                self._loop.start(self._service.close()).result(CLOSE_S)
        self._loop.close()
        for server in self._servers:
            server.stop()


def late(deadline_s: float) -> EngineError:
    """What to say when responses take too long."""
    return EngineError(
        f"not all responses were there after rollout.request_timeout_s={deadline_s:g}, though the engines computed; "
        "let it be longer, or rollout.max_response_tokens smaller."
    )


def _known(kept: Answers, numbers: Sequence[int], prompts: Sequence[list[int]]) -> dict[int, Completion]:
    """Answers that are there already, by the response's number."""
    pairs = ((number, kept.get(number, prompt)) for number, prompt in zip(numbers, prompts, strict=True))
    return {number: done for number, done in pairs if done is not None}


def _parts(responses: int, engines: int) -> list[tuple[int, list[int]]]:
    """Even shares of the responses for the engines, each share in parts of one request; (engine, numbers of responses)."""
    return [
        (engine, share[start : start + POST_RESPONSES].tolist())
        for engine, share in enumerate(np.array_split(np.arange(responses), engines))
        for start in range(0, len(share), POST_RESPONSES)
    ]
