"""RolloutWorker: the Ray actor that samples responses and scores them. It holds the engines, the prompts and the reward.

The driver calls this actor through the rollout manager. The driver sees lengths and rewards, but no tokens.
mrl.core.types explains the letters in shapes such as [R] and [B].
"""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from mrl.algorithms.advantages import Advantage
from mrl.algorithms.filters import filter_values
from mrl.algorithms.inputs import ScoredBatch
from mrl.algorithms.losses import Loss
from mrl.core.code_locations import describe_plug_in
from mrl.core.metrics import Metrics
from mrl.core.run_warnings import forward_warnings
from mrl.core.sample_file import SampleFile, spread
from mrl.core.types import (
    AdvantageResult,
    Column,
    Handle,
    Rollouts,
    TeacherPart,
    TokenBlock,
    assemble_column,
)
from mrl.data.prompts import PromptDataset
from mrl.hang_report.process_registry import register_process, registry_folder, track_activity
from mrl.rewards.reward_types import Response, Reward, Score
from mrl.rewards.scorer import Scorer
from mrl.rollout.client import HELD_OUT
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.response_metrics import (
    HeldOutResponses,
    LengthBias,
    SampledStep,
    prompt_rewards,
    score_failures,
    source_names,
)
from mrl.rollout.rollout_log import (
    CompletionCache,
    RolloutLog,
    read_recording,
    sample_digests,
    text_samples,
    write_recording,
)
from mrl.rollout.rollout_pipeline import GroupSampler, RolloutPipeline, UnscoredGroup
from mrl.rollout.served_models import ServedModels, top_k_of_rows
from mrl.rollout.spec import RolloutSpec
from mrl.rollout.staleness_buffer import PromptRequest, StalenessBuffer
from mrl.rollout.trajectory import (
    Group,
    Sample,
    StepGroups,
    Trajectory,
    block_trajectories,
    driver_columns,
    known_rollout_logprobs,
    offline_groups,
    prompt_images,
    to_block,
    to_scored_batch,
    version_spans,
    with_offline_advantages,
    with_offline_column,
    with_offline_part,
)
from parallel import spans


class RolloutWorker:
    """Samples responses from its engines, scores them, and puts token blocks into Ray's object store.

    To get the data of a step, the driver calls three methods. It repeats `sample` until the result is 0. Then `collect` returns
    the step's responses, and `estimate` computes their advantages.
    """

    def __init__(self, spec: RolloutSpec) -> None:
        """Start the engines. Returns before the engines are ready; `wait_ready` waits for them."""
        self.spec = spec
        log_dir = Path(spec.run_dir) / "logs"
        logging.basicConfig(
            filename=log_dir / "rollout.log", level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # at level INFO, httpx logs every request
        forward_warnings("rollout worker", spec.run_dir)
        register_process(registry_folder(spec.run_dir), "rollout", "the rollout worker", "rollout")
        if spec.timeline:
            spans.start(Path(spec.run_dir) / spans.FOLDER, "rollout", 0, "rollout worker")
        self.engines = EnginePool(spec)
        self.served = ServedModels(spec.served, spec.fault_tolerance.max_restarts)
        self.train, self.test = spec.train, spec.test
        self.train.decode([])  # loads the tokenizer while the engines start
        own_rewards = [evaluation.reward for evaluation in spec.evaluations if evaluation.reward is not None]
        self._scorer = Scorer(spec.reward, further_rewards=own_rewards, **spec.scoring.limits)
        self._scorer.start()  # starts the processes of the reward while the engines start
        self._scorer_lock = threading.Lock()  # the scoring thread and `evaluate` share the scorer
        self._log = RolloutLog(Path(spec.run_dir) / "rollout_log", spec.log_key)
        self._sample_file = SampleFile(Path(spec.run_dir)) if spec.samples_per_step else None
        self._cache = CompletionCache(self._log.folder)
        if len(self._cache):
            logging.info("%d completions of an earlier process are used", len(self._cache))
        self._sampler = GroupSampler(spec, self.engines, self._cache)
        size = spec.prompts_per_step
        buffer: StalenessBuffer[Group] = StalenessBuffer(
            groups_per_step=size,
            staleness=spec.staleness,
            extra_groups=spec.extra_groups,  # groups in flight beyond those that steps need (over-sampling)
            in_order=spec.in_order,
            # Largest number of rejected groups that a step replaces
            max_replaced_groups=(spec.max_sampling_rounds - 1) * size,
        )
        self._pipeline = RolloutPipeline(buffer, self.engines, self._sampler, self._score_groups, self._passes_filter)
        self._length_bias = LengthBias()
        self._source_names = source_names(spec.train.rows_per_data_source)  # data source -> its name in metrics
        self._rounds = 0  # how often prompts were drawn for the step that is being sampled
        # Groups of the step that is being sampled, if the rollout log has them
        self._step_from_log: StepGroups[Group] | None = None
        self._sampled_step = SampledStep()  # groups of the last step for which `sample` returned 0
        # The groups of `_sampled_step`, with the serial numbers of their prompt requests
        self._groups_with_numbers: StepGroups[Group] = StepGroups(
            numbers=[], groups=[], filtered_numbers=[], filtered=[], dropped=[]
        )
        self._all_filtered = False  # whether the rollout filter rejected every group of the last collected step
        # The sampled groups of the last collected step, and the rewards and tokens of these groups and of the offline rows
        self._collected_step: tuple[list[Group], ScoredBatch, TokenBlock] | None = None
        # Columns [R] of the last collected step: arguments and results of `estimate`
        self._columns: dict[str, Column] = {}

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait until every engine and every served model takes requests; return the URLs of all engines."""
        deadline = time.monotonic() + timeout_s
        urls = self.engines.wait_ready(timeout_s)
        self.served.wait_ready(deadline - time.monotonic())
        return urls

    def replace_engines(self, urls: list[str], timeout_s: float) -> list[str]:
        """Replace these engines by new engines, and wait until every engine takes requests. Returns the URLs of all engines."""
        return self.engines.replace(urls, timeout_s)

    def take_failed_engines(self) -> dict[str, str]:
        """Return URL -> reason of failure, for the engines that failed since the last call. See `replace_engines`."""
        return self.engines.take_failed()

    def offload_served(self, name: str) -> None:
        """Release the device memory of a served model."""
        self.served.offload(name)

    def load_served(self, name: str) -> None:
        """Load a served model to its devices again."""
        self.served.load(name)

    def begin_step(self, step: int) -> None:
        """Assign all later spans of the timeline to training step `step`. The first step is 1."""
        spans.begin_step(step)

    def record_paused(self, paused: bool) -> None:
        """Record whether the driver has paused the engines. A paused engine that computes nothing does not count as failed."""
        self.engines.paused = paused

    def set_adapter(self, name: str, urls: list[str]) -> None:
        """Let all further requests to these engines use the LoRA adapters `name`, which the engines have loaded."""
        self.engines.set_adapter(name, urls)

    def sample(self, first_number: int, rows: NDArray[np.int64], step: int, sizes: Sequence[int] | None = None) -> int:
        """Add prompts to the staleness buffer, and wait for the groups on which `step` trains.

        `rows`: rows of the data set, one per prompt. `first_number`: serial number of the prompt request for the
        first row. `step`: index of the step, from 0. `sizes`: number of responses to each row. None: all rows get
        rollout.responses_per_prompt responses. If the rollout log has the groups of the step, or if rollout.replay is set, the
        step gets the groups on disk, and nothing is sampled.

        Returns 0 if the groups are ready for `collect`. Otherwise returns the number of prompts that the driver must draw for
        the next call, for example in place of rejected groups. If a call fails, the driver may repeat the call with the same
        prompts.
        """
        self.served.check()
        if self.spec.replay:
            self._sampled_step = SampledStep()
            for group in self._replay(step):
                (self._sampled_step.kept if self._passes_filter(group) else self._sampled_step.filtered).append(group)
            return 0
        pipeline = self._pipeline
        pipeline.admit(first_number, rows.tolist(), step, sizes)
        taken = self._read_log(step)
        if taken is None:
            self._cache.begin_step(step)
            pipeline.send_requests(step)
            with spans.span("wait for groups"):
                groups_of_step = pipeline.wait_step(step, self.spec.request_timeout_s)
            self._rounds += 1  # after the wait, because the driver repeats a call whose wait failed
            if groups_of_step is None:
                return pipeline.free_capacity()
            taken = self._write_log(step, groups_of_step)
        else:
            self._rounds += 1
            if (missing := max(taken.all_numbers, default=-1) + 1 - pipeline.buffer.num_drawn) > 0:
                return missing
        self._sampled_step = SampledStep(taken.groups, taken.filtered, self._rounds, *pipeline.take_seconds())
        self._rounds, self._groups_with_numbers, self._step_from_log = 0, taken, None
        return 0

    def _read_log(self, step: int) -> StepGroups[Group] | None:
        """Return the groups of the step from the rollout log, and remove their prompt requests from the pipeline.

        Returns None if the log does not have the step. If the run has drawn other prompts than those in the log, deletes the
        entry and returns None.
        """
        logged = self._step_from_log or self._log.get(step)
        if logged is None:
            return None
        if self._step_from_log is None:
            rows = [group.row for group in [*logged.groups, *logged.filtered]]
            if not self._pipeline.has_requests([*logged.numbers, *logged.filtered_numbers], rows):
                self._log.remove(step, "holds other prompts than the run draws now")
                return None
        self._pipeline.remove(logged.all_numbers)
        self._step_from_log = logged
        return logged

    def _write_log(self, step: int, groups: StepGroups[Group]) -> StepGroups[Group]:
        """Write the groups to the rollout log, and delete the cached completions that no later step needs.

        If no response of the step could be scored, nothing is written or deleted. The run then ends. A resumed run scores the
        cached completions again.
        """
        if None in score_failures([*groups.groups, *groups.filtered]):  # None: the response was scored
            groups = self._log.put(step, groups)
            self._cache.discard(step - self.spec.staleness + 1)
        return groups

    def resume(self, num_drawn: int, untrained: Sequence[Sequence[int]], step: int) -> None:
        """Cancel all running requests, and continue from the state before `step`. The next call must be `sample`.

        `num_drawn`: number of prompts that were drawn so far. `untrained`: the prompt requests that no step has taken, each as
        (serial number, row, min_weight_version, size). The completions of these requests are used again, if
        rollout_log.CompletionCache holds them. A request without size asks for rollout.responses_per_prompt responses.
        """
        self._pipeline.restart(num_drawn, [PromptRequest(*request) for request in untrained], step)
        self._cache.read()
        self._rounds, self._step_from_log = 0, None

    def discard_log(self, before_step: int) -> None:
        """Delete the entries of the rollout log for steps before `before_step`."""
        self._log.discard(before_step)

    def collect(self, step: int) -> Rollouts:
        """Put the responses of the last sampled step into Ray's object store as a token block.

        Returns a handle of the block, and the columns that the driver sees, such as lengths and rewards.
        """
        sampled, taken, untrained = self._sampled_step, self._groups_with_numbers, self._pipeline.untrained_requests()
        groups, self._all_filtered = sampled.trained_groups(self.spec.prompts_per_step), not sampled.kept
        if self.spec.record:
            write_recording(Path(self.spec.run_dir) / "rollouts", step, to_block(groups), **driver_columns(groups))
        offline = offline_groups(self.spec.offline, step)
        block = replace(to_block([*groups, *offline]), images=prompt_images(self.train, groups))
        columns: dict[str, Any] = driver_columns([*groups, *offline])
        scored, num_offline = to_scored_batch([*groups, *offline]), sum(len(group.samples) for group in offline)
        if num_offline:
            scored = with_offline_advantages(with_offline_part(scored, num_offline), num_offline, self.spec.offline)
            block = with_offline_column(block, num_offline)
        self._collected_step, self._columns = (groups, scored, block), {}
        numbers = taken.numbers or taken.filtered_numbers
        return Rollouts(
            block=ray.put(block),
            prompt_lengths=block.prompt_lengths,
            response_lengths=block.response_lengths,
            sampled_lengths=block.sampled_lengths,
            **columns,
            digests=sample_digests([sample for group in [*groups, *offline] for sample in group.samples]),
            version_spans=version_spans(groups),
            request_numbers=np.array(numbers[: len(groups)] or np.arange(len(groups))),
            rewards=scored.rewards,
            untrained_requests=[
                (each.serial_number, each.row, each.min_weight_version, *([each.size] if each.size else []))
                for each in untrained
            ],
            prompt_rewards=prompt_rewards(taken),
            num_offline=num_offline,
            all_filtered=self._all_filtered,
            num_drawn_requests=self._pipeline.buffer.num_drawn,
            sampling_metrics={
                **sampled.metrics(lambda row: self._source_names.get(self.train.data_source(row))),
                **self.engines.take_metrics(),
                "rollout/waiting_groups": float(len(untrained)),
                "rollout/dropped_groups": float(len(taken.dropped)),
                **self._length_bias.update(taken, self._pipeline.finished()),
            },
        )

    def estimate(
        self,
        columns: Mapping[str, list[Handle]],
        kl_coef: float,
        step: int,
        rows: NDArray[np.bool_] | None = None,
        advantage: Advantage | None = None,
        loss: Loss | None = None,
    ) -> AdvantageResult:
        """Compute the advantages of the last collected step, and put all columns that the losses need into Ray's object store.

        See RolloutManager.estimate for the arguments.
        """
        assert self._collected_step, "collect() must be called before estimate()"
        _, scored, block = self._collected_step
        computed = {name: assemble_column(ray.get(parts), scored.lengths) for name, parts in columns.items()}
        pipeline, from_engine = self.spec.advantage_pipeline.with_parts(advantage, loss), {}
        rollout_logprobs = known_rollout_logprobs(block, computed.get("old_logprobs"))
        if "rollout_logprobs" in pipeline.required_inputs:
            from_engine["rollout_logprobs"] = rollout_logprobs
        if self.spec.rollout_logprobs_as_old:
            from_engine["old_logprobs"] = rollout_logprobs
        with spans.span("advantages"):
            result = pipeline.for_selected_rows(rows, scored, computed | from_engine, kl_coef, [self.spec.seed, step])
        estimated = {
            name: _with_rows(self._columns.get(name), values, rows, scored) for name, values in result.columns.items()
        }
        self._columns |= computed | estimated
        # If the rollout filter rejected all sampled groups, the step trains only on the offline rows.
        is_sampled = np.arange(len(scored.lengths)) < sum(len(group.samples) for group in self._collected_step[0])
        excluded = result.excluded | (self._all_filtered & is_sampled)
        handle = ray.put({**computed, **result.columns})
        has_returns = "returns" in result.columns
        return AdvantageResult(handle, result.zero_advantage, excluded, result.metrics, result.counts, has_returns)

    def compute_teacher_outputs(
        self, block: TokenBlock, rows: NDArray[np.int64], teacher: str, top_k: int
    ) -> tuple[TeacherPart, float]:
        """Request a served teacher's most probable tokens at each sampled token of these rows of `block`.

        Returns a handle of the teacher's outputs, and the seconds that the teacher took. Raises the errors of `top_k_of_rows`.
        """
        start = time.perf_counter()
        with track_activity("waiting for the teacher"), spans.span("teacher outputs"):
            outputs = top_k_of_rows(lambda: self.served.urls(teacher), block, rows, top_k, self.spec.request_timeout_s)
        return TeacherPart(rows, ray.put(outputs)), time.perf_counter() - start

    def write_samples(self, step: int) -> None:
        """Write samples of the last collected step to samples.jsonl, with the columns of all calls of `estimate` for this step.

        In the order of their rewards, the samples are spread evenly over the sampled responses. The call runs while the trainer
        ranks update the weights. Ray runs the calls of this actor one after another, so the groups and the columns of the step do
        not change during the call.
        """
        assert self._sample_file, "the driver calls this only if the run keeps samples"
        assert self._collected_step, "collect() must be called before write_samples()"
        groups = self._collected_step[0]
        rewards = [sample.score.value for group in groups for sample in group.samples]
        chosen = spread(rewards, self.spec.samples_per_step)
        self._sample_file.write(step + 1, text_samples(groups, chosen, self.train, self._columns))

    def _passes_filter(self, group: Group) -> bool:
        """Return whether steps may train on this group: the rollout filter accepts it, or there is no rollout filter."""
        rollout_filter = self.spec.rollout_filter
        if rollout_filter is None:
            return True
        parts = [sample.score.parts for sample in group.samples]
        kept = rollout_filter(filter_values(getattr(rollout_filter, "metric", None), group.rewards, parts))
        if not isinstance(kept, bool | np.bool_):
            raise ValueError(
                f"rollout.filter: {describe_plug_in(rollout_filter)} returned {kept!r}; expected True or False."
            )
        return bool(kept)

    def _replay(self, step: int) -> list[Group]:
        """Return the groups of a recorded step. The responses are scored again."""
        assert self.spec.replay, "only called if rollout.replay is set"
        block, columns = read_recording(self.spec.replay, step)
        trajectories = block_trajectories(block, columns["truncated"], columns["weight_versions"])
        scores = self._score(self.train, columns["rows"], trajectories)
        members: dict[int, list[Sample]] = {}
        for index, group in enumerate(columns["groups"].tolist()):
            prompt = block.prompt(index).tolist()
            sample = Sample(int(columns["rows"][index]), prompt, trajectories[index], scores[index])
            members.setdefault(group, []).append(sample)
        return [Group(samples) for samples in members.values()]

    def _score_groups(self, unscored: list[UnscoredGroup]) -> list[Group]:
        """Score all responses of these groups, and their greedy responses. Runs in the scoring thread."""
        rows = np.array([group.request.row for group in unscored for _ in group.trajectories])
        trajectories = [trajectory for group in unscored for trajectory in group.trajectories]
        group_ids = [group.request.serial_number for group in unscored for _ in group.trajectories]
        scores = iter(self._score(self.train, rows, trajectories, group_ids))
        greedy = [(group.request.row, group.greedy) for group in unscored if group.greedy is not None]
        greedy_rows = np.array([row for row, _ in greedy])
        greedy_scores = iter(self._score(self.train, greedy_rows, [trajectory for _, trajectory in greedy]))
        groups = []
        for group in unscored:
            row = group.request.row
            samples = [Sample(row, group.prompt, trajectory, next(scores)) for trajectory in group.trajectories]
            groups.append(Group(samples, next(greedy_scores) if group.greedy is not None else None))
            self._sampler.lengths.learn(row, [trajectory.num_sampled for trajectory in group.trajectories])
        return groups

    def _score(
        self,
        data: PromptDataset,
        rows: NDArray[np.int64],
        trajectories: Sequence[Trajectory],
        groups: Sequence[int] = (),
    ) -> list[Score]:
        """Score responses. `rows`: row of `data` that holds the prompt of each response.

        `groups`: for each response, an integer that identifies its group. If `groups` is empty, the responses to a row form a
        group.
        """
        if not trajectories:
            return []
        with track_activity(f"scoring {len(trajectories)} responses to rows {', '.join(map(str, np.unique(rows)))}"):
            return self._call_scorer(_reward_inputs(data, rows, trajectories, groups))

    def _call_scorer(self, responses: list[Response], reward: Reward | None = None) -> list[Score]:
        """Score responses with `reward`, the reward of a held-out set. None: score with the reward of the run."""
        with self._scorer_lock, spans.span("score responses", "reward", responses=len(responses)):
            return self._scorer(responses, reward)

    def evaluate(self, index: int, step: int) -> Metrics:
        """Sample and score the held-out prompts of `spec.evaluations[index]`. Returns the metrics eval/*.

        Returns {} if there are no held-out prompts or no engines, or if no response could be scored. `step`: number of finished
        steps.
        """
        if self.test is None or not self.engines.urls:
            return {}
        evaluation = self.spec.evaluations[index]
        rows_of_set = evaluation.rows(self.test.rows_by_source())
        rows = np.repeat([row for rows in rows_of_set.values() for row in rows], evaluation.sampling.n)
        members = np.arange(len(rows)) % evaluation.sampling.n
        seed_ids = [(HELD_OUT, row, member) for row, member in zip(rows.tolist(), members.tolist(), strict=True)]
        prompts = [self.test.encode(row) for row in rows.tolist()]
        images = [self.test.request_images(row) for row in rows.tolist()] if self.test.has_images else ()
        trajectories = self._sampler.respond_now(prompts, evaluation.sampling, seed_ids, images)
        if self.spec.agent:
            calls = np.mean([trajectory.usage.tool_calls for trajectory in trajectories if trajectory.usage])
            logging.info("held-out prompts, %s: %.3f tool calls per response", evaluation.sampling, calls)
        with track_activity(f"scoring {len(trajectories)} responses to held-out prompts"):
            responses = _reward_inputs(self.test, rows, trajectories)
            scores = self._call_scorer(responses, evaluation.reward)
        found = HeldOutResponses.of(evaluation, rows_of_set, responses, scores, evaluation.reward or self.spec.reward)
        if self.spec.record:
            found.write(Path(self.spec.run_dir) / "rollouts" / f"evaluation_{step:06d}_{index}.jsonl")
        return found.metrics()

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds (user and system) of this process, and those of all engine processes, for benchmarks."""
        times = os.times()
        return dict(rollout=times.user + times.system, engine=self.engines.cpu_seconds())

    def close(self) -> None:
        """End all engines and the processes of the reward."""
        spans.stop()
        self._pipeline.close()
        self.engines.close()
        self._scorer.close()
        self.served.close()


def _with_rows(earlier: Column | None, values: Column, rows: NDArray[np.bool_] | None, scored: ScoredBatch) -> Column:
    """Return the column `values` [R], but with the `earlier` values for the responses outside the mask `rows` [B]."""
    if rows is None or earlier is None:
        return values
    return np.where(np.repeat(rows, scored.lengths), values, earlier)


def _reward_inputs(
    data: PromptDataset, rows: NDArray[np.int64], trajectories: Sequence[Trajectory], groups: Sequence[int] = ()
) -> list[Response]:
    """Return the input of the reward: the responses with the metadata of their prompts. For the arguments, see `_score`."""
    texts = data.decode([trajectory.token_ids for trajectory in trajectories])
    turns = [trajectory.texts(data.decode) for trajectory in trajectories]
    _, group_of = np.unique(groups or rows, return_inverse=True)
    items = zip(rows.tolist(), group_of.tolist(), trajectories, texts, turns, strict=True)
    return [
        Response(
            text=response_turns[-1].text if response_turns else text,
            group=group,
            num_tokens=trajectory.num_sampled,
            truncated=trajectory.truncated,
            turns=response_turns,
            **data.reward_fields(row),
        )
        for row, group, trajectory, text, response_turns in items
    ]
