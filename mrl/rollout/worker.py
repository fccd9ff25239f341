"""A Ray actor that samples: has the engines, prompts and rewards, and keeps tokens off the driver."""

import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import ray
from numpy.typing import NDArray

from mrl.algorithms.inputs import ScoredBatch
from mrl.core.types import AdvantageResult, Column, Handle, Rollouts, assemble
from mrl.data.prompts import PromptDataset
from mrl.hang_report.process_registry import register_process, registry_folder, track_activity
from mrl.rewards.reward_types import Response, Score
from mrl.rewards.scorer import Scorer
from mrl.rollout import rollout_log
from mrl.rollout.buffer import PromptRequest, RolloutPipeline, StalenessBuffer, StepGroups, UnscoredGroup
from mrl.rollout.engine_pool import Engines
from mrl.rollout.request_builder import HELD_OUT, RequestBuilder
from mrl.rollout.rollout_log import CompletionCache, Entry, RolloutLog, digests
from mrl.rollout.spec import RolloutSpec
from mrl.rollout.step_metrics import LengthBias, SampledStep, failures
from mrl.rollout.trajectory import Group, Sample, Trajectory, control_columns, spans, to_block, to_scored, trajectories


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
        register_process(registry_folder(spec.run_dir), "rollout", "the rollout worker", "rollout")
        self.engines = Engines(spec)
        self.train, self.test = spec.train, spec.test
        self.train.decode([])  # reads the tokenizer while the engines start
        self._scorer = Scorer(spec.reward, **asdict(spec.scoring))
        self._scorer.start()  # while the engines start
        self._one_scores = threading.Lock()  # the stream, or an evaluation
        self._batch, self._taken = SampledStep(), Entry([], [], [], [], [])  # of the step that was gathered last
        self._draws = 0  # times that prompts were drawn for the step
        self._read: Entry | None = None  # what the journal has of the step, while more of its prompts are to be drawn
        self._journal = RolloutLog(Path(spec.run_dir) / "journal", spec.journal_key)
        self._kept = CompletionCache(self._journal.folder)
        if len(self._kept):
            logging.info("%d answers of an earlier process are taken up", len(self._kept))
        self._sampler, self._selection = RequestBuilder(spec, self.engines, self._kept), LengthBias()
        size = spec.prompts_per_step
        self._stream = RolloutPipeline(
            StalenessBuffer(size, spec.staleness, spec.extra_groups, spec.in_order, (spec.max_rounds - 1) * size),
            self.engines,
            self._sampler.answer,
            self._scored,
            self._keeps,
            self._sampler.together,
        )
        self._all_refused = False  # of the last collected batch, by the filter
        self._last: tuple[ScoredBatch, Column] | None = (
            None  # the last collected batch, and the engines' log-probabilities
        )

    def replace_engines(self, urls: list[str], timeout_s: float) -> list[str]:
        """End these engines and start others in their place; returns the URLs of all when they are ready."""
        return self.engines.replace(urls, timeout_s)

    def take_failed_engines(self) -> dict[str, str]:
        """Engines that failed while they sampled and are to be replaced, and why; each is told once."""
        return self.engines.take_failed()

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait for the engines; returns their URLs."""
        return self.engines.wait_ready(timeout_s)

    def sample(self, first: int, rows: NDArray[np.int64], step: int) -> int:
        """Take prompts in, the first of which is number `first` of the run, and wait for the groups that the step trains.

        Returns how many more prompts to draw in place of refused ones; 0 when the groups are there, for `collect`. Called
        again with the same prompts it goes on waiting. What the journal has of the step is taken from there.
        """
        if self.spec.replay:
            groups = self._replayed(step)
            self._batch = SampledStep([g for g in groups if self._keeps(g)], [g for g in groups if not self._keeps(g)])
            return 0
        stream = self._stream
        stream.admit(first, rows.tolist(), step)
        entry, chosen = self._journaled(step), None
        if entry is None:
            self._kept.turn(step)
            stream.go_on(step)
            chosen = stream.wait(step, self.spec.request_timeout_s)
        self._draws += 1  # a call that raised is made again, and counts then
        if entry is None:
            if chosen is None:
                return stream.room()
            entry = self._entry(step, chosen)
        elif (missing := max(entry.all_numbers, default=-1) + 1 - stream.window.drawn) > 0:
            return missing
        self._batch = SampledStep(entry.groups, entry.refused, self._draws, *stream.take_seconds())
        self._draws, self._taken, self._read = 0, entry, None
        return 0

    def _journaled(self, step: int) -> Entry | None:
        """What the journal has of the step, for the prompts that the run draws; they are taken out of the stream."""
        entry = self._read or self._journal.get(step)
        if entry is None:
            return None
        if self._read is None and not self._stream.known([*entry.numbers, *entry.refused_numbers], entry.rows):
            self._journal.remove(step, "answers other prompts than the run draws now")
            return None
        self._stream.take(entry.all_numbers)
        self._read = entry
        return entry

    def _entry(self, step: int, chosen: StepGroups[Group]) -> Entry:
        """The step's groups, in the journal now, and what was answered for them forgotten.

        Unless nothing could be scored: a run that ends for that shall score the same answers anew when it goes on.
        """
        entry = Entry(chosen.numbers, chosen.groups, chosen.refused_numbers, chosen.refused, chosen.dropped)
        if None in failures([*entry.groups, *entry.refused]):
            entry = self._journal.put(step, entry)
            self._kept.forget(step - self._stream.window.staleness + 1)
        return entry

    def resume(self, drawn: int, waiting: Sequence[Sequence[int]], step: int) -> None:
        """Give up what is in the making, and begin anew before `step` with these tickets (number, row, born) of `drawn` so far.

        What engines had answered of them is taken up again; nothing is asked before `gather`.
        """
        self._stream.restart(drawn, [PromptRequest(*ticket) for ticket in waiting], step)
        self._kept.read()
        self._draws, self._read = 0, None

    def set_paused(self, paused: bool) -> None:
        """Whether engines are paused on purpose, so that nobody takes them for stuck."""
        self.engines.hold(paused)

    def discard_log(self, before_step: int) -> None:
        """GroupFilter no journal of the steps before this one."""
        self._journal.forget(before_step)

    def collect(self, step: int) -> Rollouts:
        """What the step was given, laid out; the driver gets lengths, rewards and a handle."""
        batch, taken, waiting = self._batch, self._taken, self._stream.waiting()
        groups, self._all_refused = batch.groups(self.spec.prompts_per_step), not batch.kept
        block, columns = to_block(groups), control_columns(groups)
        if self.spec.record:
            rollout_log.write_recording(Path(self.spec.run_dir) / "rollouts", step, block, **columns)
        self._last = (to_scored(groups), block.rollout_logprobs)
        numbers = taken.numbers or taken.refused_numbers
        return Rollouts(
            block=ray.put(block),
            prompt_lengths=block.prompt_lengths,
            response_lengths=block.response_lengths,
            sampled_lengths=block.sampled_lengths,
            **columns,
            digests=digests([sample for group in groups for sample in group.samples]),
            spans=spans(groups),
            tickets=np.array(numbers[: len(groups)] or np.arange(len(groups))),
            rewards=self._last[0].rewards,
            waiting=[(ticket.number, ticket.row, ticket.born) for ticket in waiting],
            drawn=self._stream.window.drawn,
            numbers={
                **batch.numbers(),
                **self.engines.take_numbers(),
                "rollout/waiting_groups": float(len(waiting)),
                "rollout/dropped_groups": float(len(taken.dropped)),
                **self._selection.of_step(taken, self._stream.finished()),
            },
        )

    def estimate(self, columns: Mapping[str, list[Handle]], kl_coef: float, step: int) -> AdvantageResult:
        """Advantages, and all columns that the losses need, of what was collected last."""
        assert self._last, "estimate() needs a collect() before it"
        scored, rollout_logprobs = self._last
        computed = {name: assemble(ray.get(parts), scored.lengths) for name, parts in columns.items()}
        old = {"old_logprobs": rollout_logprobs} if self.spec.old_from_rollout else {}
        found = self.spec.advantage_pipeline(scored, computed | old, kl_coef, [self.spec.seed, step])
        made = {**computed, **found.columns}
        rejected = found.rejected | self._all_refused
        return AdvantageResult(ray.put(made), found.without_advantage, rejected, found.numbers)

    def _scored(self, drafts: list[UnscoredGroup]) -> list[Group]:
        """The groups that drafts become."""
        rows = np.array([draft.ticket.row for draft in drafts for _ in draft.paths])
        paths = [path for draft in drafts for path in draft.paths]
        scores = iter(
            self._score(self.train, rows, paths, [draft.ticket.number for draft in drafts for _ in draft.paths])
        )
        greedy = [(draft.ticket.row, draft.greedy) for draft in drafts if draft.greedy is not None]
        likeliest = iter(self._score(self.train, np.array([row for row, _ in greedy]), [path for _, path in greedy]))
        groups = []
        for draft in drafts:
            samples = [Sample(draft.ticket.row, draft.prompt, path, next(scores)) for path in draft.paths]
            groups.append(Group(samples, next(likeliest) if draft.greedy is not None else None))
            self._sampler.lengths.learn(draft.ticket.row, [path.num_sampled for path in draft.paths])
        return groups

    def _keeps(self, group: Group) -> bool:
        """Whether a group is trained."""
        return self.spec.keep is None or self.spec.keep(group.rewards)

    def _replayed(self, step: int) -> list[Group]:
        """The groups of a recorded step, scored again."""
        assert self.spec.replay, "callers look first"
        block, columns = rollout_log.read_recording(self.spec.replay, step)
        paths = trajectories(block, columns["truncated"], columns["weight_versions"])
        scores = self._score(self.train, columns["rows"], paths)
        members: dict[int, list[Sample]] = {}
        for number, group in enumerate(columns["groups"].tolist()):
            prompt = block.prompt(number).tolist()
            sample = Sample(int(columns["rows"][number]), prompt, paths[number], scores[number])
            members.setdefault(group, []).append(sample)
        return [Group(samples) for samples in members.values()]

    def _score(
        self, data: PromptDataset, rows: NDArray[np.int64], paths: Sequence[Trajectory], groups: Sequence[int] = ()
    ) -> list[Score]:
        """Scores of responses to these rows of `data`; those of one of `groups`, or else to one row, belong together."""
        if not paths:
            return []
        with track_activity(f"scoring {len(paths)} responses to rows {', '.join(map(str, np.unique(rows)))}"):
            answered = responses(data, rows, paths, groups)
            with self._one_scores:
                return self._scorer(answered)

    def evaluate(self, temperature: float) -> dict[str, float]:
        """Mean reward of one response per held-out prompt, of each named set, and of all under ""; 0 is greedy.

        Empty without a test set or an engine.
        """
        if self.test is None or not self.engines.urls:
            return {}
        sets = {name: np.array(rows[: self.spec.eval_rows]) for name, rows in self.test.sets().items()}
        rows = np.concatenate(list(sets.values()))
        places = [(HELD_OUT, row) for row in rows.tolist()]
        paths = self._sampler.respond_now([self.test.encode(row) for row in rows.tolist()], temperature, places)
        rewards = np.array([score.value for score in self._score(self.test, rows, paths)])
        if self.spec.agent:
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
        self._stream.close()
        self.engines.close()
        self._scorer.close()


def responses(
    data: PromptDataset, rows: NDArray[np.int64], paths: Sequence[Trajectory], groups: Sequence[int] = ()
) -> list[Response]:
    """What a reward sees of responses to these rows of the data; those of one of `groups`, or else to one row, are a group."""
    texts = data.decode([path.token_ids for path in paths])
    turns = [path.texts(data.decode) for path in paths]
    _, group_of = np.unique(groups or rows, return_inverse=True)
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
        for row, group, path, text, said in zip(rows.tolist(), group_of.tolist(), paths, texts, turns, strict=True)
    ]
