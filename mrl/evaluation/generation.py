"""`mrl generate`: all prompts of a plan answered, scored and written, from where an earlier process stopped."""

import shutil
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from models.conversion.partial_folder import Progress as BytesProgress
from mrl.data.tokenizer import load_tokenizer
from mrl.evaluation import model, questions, scoring
from mrl.evaluation.engines import Asker, Request, engines
from mrl.evaluation.plan import GenerationPlan
from mrl.evaluation.questions import Question
from mrl.evaluation.store import Row
from mrl.rewards.scorer import Scorer
from mrl.rollout.client import Completion

AHEAD = 2
"""Files whose prompts the engines have while an older one is completed: the slowest response of a file leaves no gap."""

Answers = list[Future[list[Completion]]]


class Progress(Protocol):
    """Who wants to know how far a generation is, in responses."""

    def begin(self, total: int, done: int) -> None: ...

    def advance(self, responses: int, tokens: int) -> None: ...


def generate(plan: GenerationPlan, progress: Progress, converting: AbstractContextManager[BytesProgress]) -> Row:
    """Answer what is missing; returns the totals, as in generate.json. `converting`: shows how a Megatron checkpoint is read.

    Raises:
        ValueError: a mistake in the files, found before engines start; or a reward that gives no scores.
        EngineError: an engine failed. Finished files are kept.
    """
    asked, settings = plan.questions(), plan.config.generate
    with plan.store as store:
        store.bind(questions.digest(asked))
        scratch = store.folder / model.CONVERTED
        folder = plan.source.served(scratch, converting)
        with (
            engines(plan, folder) as clients,
            Asker(clients, settings.requests_in_flight, logprobs=settings.logprobs) as asker,
        ):
            totals = Generation(plan, asked, asker, progress).run()
        shutil.rmtree(scratch, ignore_errors=True)
        store.finish(totals)
    return totals


class Generation:
    """The files of one plan: which are missing, their requests, their rows."""

    def __init__(self, plan: GenerationPlan, asked: Sequence[Question], asker: Asker, progress: Progress) -> None:
        self.plan, self.asker, self.progress = plan, asker, progress
        self.settings = plan.config.generate
        size = self.settings.prompts_per_file
        self.parts = [asked[at : at + size] for at in range(0, len(asked), size)]

    def run(self) -> Row:
        """Write every file that is not there yet, in order; returns the totals."""
        start, samples = time.monotonic(), self.settings.samples
        missing = [number for number in range(len(self.parts)) if not self.plan.store.has(number)]
        prompts = sum(map(len, self.parts))
        self.progress.begin(prompts * samples, (prompts - sum(len(self.parts[n]) for n in missing)) * samples)
        pending: deque[tuple[int, Answers]] = deque()
        with scoring.scorer_of(self.plan.reward, self.plan.config.scoring) as scorer:
            for number in missing:
                pending.append((number, self.asker.ask(self._requests(number))))
                if len(pending) > AHEAD:
                    self._complete(*pending.popleft(), scorer)
            while pending:
                self._complete(*pending.popleft(), scorer)
        seconds = round(time.monotonic() - start, 3)
        return dict(responses=prompts * samples, prompts=prompts, files=len(self.parts), last_run_s=seconds)

    def _requests(self, number: int) -> list[Request]:
        seed, sampling = self.plan.config.run.seed, self.plan.sampling
        return [(q.tokens, replace(sampling, seed=q.seed(seed, sample))) for q, sample in self._places(number)]

    def _places(self, number: int) -> list[tuple[Question, int]]:
        return [(question, sample) for question in self.parts[number] for sample in range(self.settings.samples)]

    def _complete(self, number: int, answers: Answers, scorer: Scorer | None) -> None:
        """Wait for the responses of one file, score and write them."""
        done: list[Completion] = []
        for answer in answers:
            done += answer.result()
            self.progress.advance(len(answer.result()), sum(len(c.token_ids) for c in answer.result()))
        texts = self._tokenizer.batch_decode([c.token_ids for c in done], skip_special_tokens=True)
        rows = [
            question.answered(sample, completion, text, logprobs=self.settings.logprobs)
            for (question, sample), completion, text in zip(self._places(number), done, texts, strict=True)
        ]
        if scorer:
            rows = scoring.with_scores(rows, scorer(questions.responses(rows)))
        self.plan.store.write(number, rows)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.plan.source.folder)
