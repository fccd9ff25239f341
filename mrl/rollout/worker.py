"""A Ray actor that samples: has the engines, prompts and rewards, and keeps tokens off the driver."""

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import ray
from numpy.typing import NDArray

from mrl.algorithms.inputs import Scored
from mrl.autopsy.notes import doing
from mrl.autopsy.register import register, stacks
from mrl.data.prompts import PromptDataset
from mrl.data.tokenizer import load_tokenizer
from mrl.rewards.base import Response, Score
from mrl.rewards.scorer import Scorer
from mrl.rollout import recording
from mrl.rollout.answers import Answers
from mrl.rollout.batch import Batch, failures
from mrl.rollout.client import SamplingParams
from mrl.rollout.engines import Engines
from mrl.rollout.journal import Journal, digests
from mrl.rollout.seeds import HELD_OUT, TRAINING, seed_of
from mrl.rollout.spec import RolloutSpec
from mrl.rollout.trajectory import Group, Sample, Trajectory, control_columns, to_block, to_scored, trajectories
from mrl.types import Column, Estimates, Handle, Rollouts, assemble


class RolloutWorker:
    """Samples responses from its engines, scores them, and hands token blocks to the object store."""

    def __init__(self, spec: RolloutSpec) -> None:
        """Start the engines at once; `wait_ready` waits for them."""
        self.spec = spec
        log_dir = Path(spec.run_dir) / "logs"
        logging.basicConfig(
            filename=log_dir / "rollout.log", level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request
        register(stacks(spec.run_dir), "rollout", "the rollout worker", "rollout")
        self.engines = Engines(spec)
        self.train, self.test = spec.train, spec.test
        self.train.decode([])  # reads the tokenizer while the engines start
        self._conversation = None
        if spec.agent:
            self._conversation = spec.agent.prepare(load_tokenizer(spec.model_path, spec.chat), spec.chat.args)
        self._scorer = Scorer(spec.reward, **asdict(spec.scoring))
        self._scorer.start()  # while the engines start
        self._batch = Batch()
        self._journal = Journal(Path(spec.run_dir) / "journal", spec.journal_key)
        self._all_refused = False  # of the last collected batch, by the filter
        self._last: tuple[Scored, Column] | None = None  # the last collected batch, and the engines' log-probabilities

    def replace_engines(self, urls: list[str], timeout_s: float) -> list[str]:
        """End these engines and start others in their place; returns the URLs of all when they are ready."""
        return self.engines.replace(urls, timeout_s)

    def failed_engines(self) -> dict[str, str]:
        """Engines that failed while they sampled and are to be replaced, and why; each is told once."""
        return self.engines.take_failed()

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait for the engines; returns their URLs."""
        return self.engines.wait_ready(timeout_s)

    def sample(self, rows: NDArray[np.int64], step: int, number: int) -> int:
        """Answer these prompts and score the answers, in the step's round `number`; returns how many more groups it needs.

        Groups that the filter refuses do not count. What the journal has of the round is taken from there.
        """
        if number == 0:
            self._batch = Batch()  # a step may begin again
        if self.spec.replay:
            fresh = self._replayed(step)
        else:
            fresh = self._journal.get(step, number, rows.tolist())
            fresh = fresh or self._sampled(rows, step, number)
        self._batch.add(fresh, self.spec.keep)
        return 0 if self.spec.replay else self.spec.prompts_per_step - len(self._batch.kept)

    def _sampled(self, rows: NDArray[np.int64], step: int, number: int) -> list[Group]:
        """The groups of a round, but for the answers that an earlier process had; they are in the journal now.

        Unless nothing could be scored: a run that ends for that shall score the same answers anew when it goes on.
        """
        kept = Answers(self._journal.folder, step, number)
        if len(kept):
            logging.info("step %d: %d answers of an earlier process are taken up", step, len(kept))
        groups = self._answered(rows, step, kept)
        if None in failures(groups):
            groups = self._journal.put(step, number, groups)
            kept.remove()
        return groups

    def forget(self, before: int) -> None:
        """Keep no journal of the steps before this one."""
        self._journal.forget(before)

    def collect(self, step: int) -> Rollouts:
        """What was sampled since the last call, laid out; the driver gets lengths, rewards and a handle."""
        batch, self._batch = self._batch, Batch()
        groups, self._all_refused = batch.groups(self.spec.prompts_per_step), not batch.kept
        block, columns = to_block(groups), control_columns(groups)
        if self.spec.record:
            recording.write(Path(self.spec.run_dir) / "rollouts", step, block, **columns)
        self._last = (to_scored(groups), block.rollout_logprobs)
        return Rollouts(
            block=ray.put(block),
            prompt_lengths=block.prompt_lengths,
            response_lengths=block.response_lengths,
            sampled_lengths=block.sampled_lengths,
            **columns,
            digests=digests([sample for group in groups for sample in group.samples]),
            rewards=self._last[0].rewards,
            numbers=batch.numbers() | self.engines.take_numbers(),
        )

    def estimate(self, columns: Mapping[str, list[Handle]], kl_coef: float, step: int) -> Estimates:
        """Advantages, and all columns that the losses need, of what was collected last."""
        assert self._last, "estimate() needs a collect() before it"
        scored, rollout_logprobs = self._last
        computed = {name: assemble(ray.get(parts), scored.lengths) for name, parts in columns.items()}
        old = {"old_logprobs": rollout_logprobs} if self.spec.old_from_rollout else {}
        found = self.spec.estimator(scored, computed | old, kl_coef, [self.spec.seed, step])
        made = {**computed, **found.columns}
        rejected = found.rejected | self._all_refused
        return Estimates(ray.put(made), found.without_advantage, rejected, found.numbers)

    def _answered(self, rows: NDArray[np.int64], step: int, kept: Answers) -> list[Group]:
        """G scored responses to each prompt row, and a greedy one where the advantage asks for it."""
        size, start = self.spec.responses_per_prompt, time.perf_counter()
        first = size * self._batch.drawn  # of the responses of this step
        places = [(TRAINING, step, first + number) for number in range(size * len(rows))]
        with doing(f"tokenising the prompts of rows {', '.join(map(str, rows.tolist()))}"):
            prompts = [self.train.encode(row) for row in rows.tolist()]
        sampling, likely = self._sampling(self.spec.temperature, places), self._sampling(0.0, [()] * len(rows))
        with doing(f"sampling {len(rows)} x {size} responses"):
            paths = self._respond([prompt for prompt in prompts for _ in range(size)], sampling, kept)
            greedy = self._respond(prompts, likely) if self.spec.needs_greedy else []
        sampled = time.perf_counter()
        scores = self._score(self.train, np.repeat(rows, size), paths)
        likeliest = self._score(self.train, rows, greedy) if greedy else [None] * len(rows)
        self._batch.engine_s += sampled - start
        self._batch.reward_s += time.perf_counter() - sampled
        samples = [
            Sample(row, prompts[number // size], path, score)
            for number, (row, path, score) in enumerate(zip(np.repeat(rows, size).tolist(), paths, scores, strict=True))
        ]
        return [Group(samples[n * size : (n + 1) * size], likeliest[n]) for n in range(len(rows))]

    def _replayed(self, step: int) -> list[Group]:
        """The groups of a recorded step, scored again."""
        assert self.spec.replay, "callers look first"
        block, columns = recording.read(self.spec.replay, step)
        paths = trajectories(block, columns["truncated"], columns["weight_versions"])
        scores = self._score(self.train, columns["rows"], paths)
        members: dict[int, list[Sample]] = {}
        for number, group in enumerate(columns["groups"].tolist()):
            prompt = block.prompt(number).tolist()
            sample = Sample(int(columns["rows"][number]), prompt, paths[number], scores[number])
            members.setdefault(group, []).append(sample)
        return [Group(samples) for samples in members.values()]

    def _sampling(self, temperature: float, places: Sequence[tuple[int, ...]]) -> list[SamplingParams]:
        """How to sample the response at each of these places, where seeds are wanted each with the seed of its place."""
        plain = SamplingParams(self.spec.max_response_tokens, temperature)
        if not self.spec.deterministic:
            return [plain] * len(places)
        return [replace(plain, seed=seed_of(self.spec.seed, *place)) for place in places]

    def _respond(
        self, prompts: list[list[int]], sampling: list[SamplingParams], kept: Answers | None = None
    ) -> list[Trajectory]:
        if self._conversation:
            return self.engines.converse(self._conversation, prompts, sampling, kept)
        return [Trajectory.of(completion) for completion in self.engines.complete(prompts, sampling, kept)]

    def _score(self, data: PromptDataset, rows: NDArray[np.int64], paths: Sequence[Trajectory]) -> list[Score]:
        """Scores of responses to these rows of `data`; those to one row are a group."""
        with doing(f"scoring {len(paths)} responses to rows {', '.join(map(str, np.unique(rows)))}"):
            return self._scorer(responses(data, rows, paths))

    def evaluate(self, temperature: float) -> dict[str, float]:
        """Mean reward of one response per held-out prompt, of each named set, and of all under ""; 0 is greedy.

        Empty without a test set or an engine.
        """
        if self.test is None or not self.engines.urls:
            return {}
        sets = {name: np.array(rows[: self.spec.eval_rows]) for name, rows in self.test.sets().items()}
        rows = np.concatenate(list(sets.values()))
        sampling = self._sampling(temperature, [(HELD_OUT, row) for row in rows.tolist()])
        paths = self._respond([self.test.encode(row) for row in rows.tolist()], sampling)
        rewards = np.array([score.value for score in self._score(self.test, rows, paths)])
        if self._conversation:
            calls = np.mean([path.usage.tool_calls for path in paths if path.usage])
            logging.info("held out, temperature %g: %.3f tool calls per response", temperature, calls)
        ends = np.cumsum([len(part) for part in sets.values()])[:-1]
        parts = zip(sets, np.split(rewards, ends), strict=True)
        return {re.sub(r"\W+", "_", name): float(part.mean()) for name, part in parts if name} | {
            "": float(rewards.mean())
        }

    def cpu_seconds(self) -> dict[str, float]:
        """User and system seconds of this process and of the engines' process trees, for benchmarks."""
        times = os.times()
        return dict(rollout=times.user + times.system, engine=self.engines.cpu_seconds())

    def close(self) -> None:
        """End every engine, and the reward's processes."""
        self.engines.close()
        self._scorer.close()


def responses(data: PromptDataset, rows: NDArray[np.int64], paths: Sequence[Trajectory]) -> list[Response]:
    """What a reward sees of responses to these rows of the data."""
    texts = data.decode([path.token_ids for path in paths])
    turns = [path.texts(data.decode) for path in paths]
    _, groups = np.unique(rows, return_inverse=True)
    return [
        Response(
            data_source=data.data_source(row),
            text=said[-1].text if said else text,  # of a conversation, what the policy says in the end
            ground_truth=data.ground_truth(row),
            extra_info=data.extra_info(row),
            prompt=data.messages(row),
            group=group,
            num_tokens=path.num_sampled,
            truncated=path.truncated,
            turns=said,
        )
        for row, group, path, text, said in zip(rows.tolist(), groups.tolist(), paths, texts, turns, strict=True)
    ]
