"""Requests for the groups of a step: how the engines sample them, groups of different sizes, and the rewards that prompts get."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from http_engines import engine_pool, spec_of
from sampled_groups import group
from test_held_out import EchoEngine

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.advantages import GDPO, GRPO
from mrl.algorithms.losses import PPOClip
from mrl.checkpoint.run_dir import SampleLedger
from mrl.core.metrics import check
from mrl.core.types import OFFLINE, AdvantageResult, Rollouts
from mrl.data.offline import OfflineRow, OfflineRows
from mrl.rewards.reward_types import Score
from mrl.rollout.client import SamplingParams, response_seed
from mrl.rollout.response_metrics import LengthBias, SampledStep, prompt_rewards
from mrl.rollout.rollout_pipeline import GroupSampler
from mrl.rollout.staleness_buffer import PromptRequest, StalenessBuffer
from mrl.rollout.trajectory import StepGroups
from mrl.rollout.worker import RolloutWorker

GRPO_WITHOUT_STD = GRPO(scale_rewards="none")


def sample(requests, **settings):
    """Sample groups of these requests on a server; return the groups and the parameters that the server got."""
    server = EchoEngine()
    with engine_pool(server, seed=5, **settings) as engines:
        spec = replace(engines.spec, deterministic=True, train=Mock(encode=lambda row: [row, row], has_images=False))
        cache = Mock(get=lambda number, inputs: None)
        groups = engines.submit(GroupSampler(spec, engines, cache).sample(requests)).result(10)
    server.stop()
    return groups, server.params


def test_responses_of_a_step_are_sampled_as_the_config_says():
    own = SamplingParams(
        7, temperature=0.5, top_p=0.9, top_k=5, repetition_penalty=1.5, stop=("#",), stop_token_ids=(9,)
    )
    groups, params = sample([PromptRequest(0, 11, 0), PromptRequest(1, 12, 0)], responses_per_prompt=3, sampling=own)
    assert [len(group.trajectories) for group in groups] == [3, 3]
    expected = dict(max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=5, repetition_penalty=1.5)
    expected |= dict(stop=["#"], stop_token_ids=[9])
    assert all(each | {"sampling_seed": 0} == expected | {"sampling_seed": 0} for each in params)
    assert [each["sampling_seed"] for each in params] == [response_seed(5, 0, number) for number in range(6)]


def test_the_defaults_send_no_parameter_that_changes_the_distribution():
    _, params = sample([PromptRequest(0, 11, 0)], sampling=SamplingParams(8))
    assert [each.keys() for each in params] == [{"max_new_tokens", "temperature", "sampling_seed"}]


def test_groups_of_different_sizes_have_responses_with_numbers_of_their_own():
    requests = [PromptRequest(0, 11, 0, size=1), PromptRequest(1, 12, 0, size=3), PromptRequest(2, 13, 0, size=2)]
    groups, params = sample(requests, responses_per_prompt=2, max_group_size=4)
    assert [[t.token_ids for t in group.trajectories] for group in groups] == [[[11]], [[12]] * 3, [[13]] * 2]
    numbers = [0, 4, 5, 6, 8, 9]
    assert [each["sampling_seed"] for each in params] == [response_seed(5, 0, number) for number in numbers]


def test_a_reward_that_calls_a_server_gets_each_group_when_it_is_sampled():
    requests = [PromptRequest(number, 11, 0) for number in range(4)]

    def sizes_of_requests(needs_server: bool, deterministic: bool) -> list[int]:
        reward = SimpleNamespace(needs_server=needs_server)
        spec = spec_of("none", reward=reward, deterministic=deterministic)
        return [len(part) for part in GroupSampler(spec, SimpleNamespace(urls=["one"]), Mock()).split(requests)]

    assert sizes_of_requests(True, deterministic=False) == [1] * 4
    assert sizes_of_requests(True, deterministic=True) == [4], "the responses of an engine are rounded as before"
    assert sizes_of_requests(False, deterministic=False) == [4]


def test_a_request_keeps_its_size_until_it_is_trained():
    buffer = StalenessBuffer(groups_per_step=2, staleness=1)
    buffer.admit([5, 6], 0, [3, 1])
    state = [(r.serial_number, r.row, r.min_weight_version, r.size) for r in buffer.untrained_requests]
    assert state == [(0, 5, 0, 3), (1, 6, 0, 1)]
    buffer.restore(2, [PromptRequest(*request) for request in state], step=0)
    assert [request.size for request in buffer.in_flight.values()] == [3, 1]
    assert PromptRequest(*(7, 8, 0)).size is None, "a checkpoint without sizes"


def test_prompts_get_the_mean_reward_of_their_scored_responses_in_the_order_of_drawing():
    failed = Score.failed("judge down")
    step = StepGroups(
        numbers=[1, 4], groups=[group(11, Score(1.0), failed), group(14, failed, failed)],
        filtered_numbers=[3, 0], filtered=[group(13, Score(0.0), Score(0.0)), group(10, Score(1.0), Score(0.5))], dropped=[2],
    )  # fmt: skip
    assert prompt_rewards(step) == [(10, 0.75), (11, 1.0), (13, 0.0)]


def rollouts(groups, rewards, num_offline=0) -> Rollouts:
    size = len(groups)
    lengths = np.arange(1, size + 1)
    return Rollouts(
        block=None, prompt_lengths=lengths, response_lengths=lengths, sampled_lengths=lengths, rows=np.arange(size),
        groups=np.array(groups), digests=np.arange(size, dtype=np.uint64), truncated=np.arange(size) == 1,
        weight_versions=np.full(size, 4), rewards=np.array(rewards), num_offline=num_offline,
    )  # fmt: skip


def test_the_mean_reward_counts_each_prompt_once_whatever_its_number_of_responses():
    unequal = rollouts([0, 0, 0, 1], [1.0, 1.0, 1.0, 0.0])
    assert unequal.metrics(4)["reward/mean"] == pytest.approx(0.5)
    rewards = np.random.default_rng(0).random(4)
    assert rollouts([0, 0, 1, 1], rewards).metrics(4)["reward/mean"] == float(rewards.mean()), (
        "bit-equal for equal groups"
    )


def test_metrics_describe_the_policy_and_not_the_rows_of_a_file():
    sampled, both = rollouts([0, 0], [1.0, 0.0]), rollouts([0, 0, 1, 1], [1.0, 0.0, 7.0, 8.0], num_offline=2)
    offline = {"batch/offline_samples": 2.0, "batch/offline_reward_mean": 7.5}
    assert both.metrics(5) == sampled.metrics(5) | offline
    assert both.num_sampled == 2


def test_the_ledger_lists_sampled_groups_of_any_size_and_the_rows_of_the_file(tmp_path):
    both = replace(
        rollouts([0, 0, 1, 2], [1.0, 0.0, 1.0, 1.0], num_offline=1),
        rows=np.array([7, 7, 8, -4]),
        request_numbers=np.array([5, 6]),
        version_spans=np.array([[0, 4, 1], [1, 4, 2], [2, 4, 3]]),
    )
    ledger = SampleLedger(tmp_path / "ledger.jsonl", 0)
    ledger.record(1, both, [2], [np.array([0.1, 0.1, 0.2, 0.5])])
    ledger.close()
    line = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert [row for row, _ in line["groups"]] == [7, 8] and line["requests"] == [5, 6]
    assert line["lengths"] == [[1, 2], [3]] and line["prompts"] == [1, 3]
    assert line["offline"] == [3] and line["updates"] == [{"4": [6, 1.0]}]


def collected(monkeypatch, kept, filtered, offline, advantage=GRPO_WITHOUT_STD) -> tuple[Rollouts, AdvantageResult]:
    """Return what a rollout worker sends to the driver for a step with these groups, and the worker's advantages."""
    local = SimpleNamespace(put=lambda value: value, get=lambda value: value)
    monkeypatch.setattr("mrl.rollout.worker.ray", local)
    worker = object.__new__(RolloutWorker)
    pipeline = AdvantagePipeline(advantage, PPOClip())
    worker.spec = spec_of("none", prompts_per_step=2, offline=offline, advantage_pipeline=pipeline)
    worker._sampled_step = SampledStep(kept, filtered)
    numbers = list(range(len(kept) + len(filtered)))
    worker._groups_with_numbers = StepGroups(numbers[: len(kept)], kept, numbers[len(kept) :], filtered, [])
    waiting = Mock(num_drawn=3)
    worker._pipeline = Mock(untrained_requests=lambda: [PromptRequest(2, 9, 4, 5)], finished=dict, buffer=waiting)
    worker.engines, worker.train = Mock(take_metrics=dict), Mock(data_source=lambda row: "s", has_images=False)
    worker._source_names, worker._length_bias = {}, LengthBias()
    return worker.collect(4), worker.estimate({}, 0.0, 4)


def offline_rows(**options) -> OfflineRows:
    rows = [OfflineRow(n, [7], [5, 6, 2], float(n), None if n else [-0.5, -0.5, -0.5]) for n in range(2)]
    return OfflineRows([rows], rows_per_step=2, seed=0, **options)


def test_a_step_trains_the_rows_of_a_file_after_the_sampled_groups(monkeypatch):
    kept = [group(11, Score(1.0), Score(0.0), Score(1.0)), group(12, Score(0.0))]
    rollouts, estimates = collected(monkeypatch, kept, [], offline_rows())
    assert rollouts.num_offline == 2 and rollouts.rows.tolist() == [11, 11, 11, 12, -1, -2]
    assert rollouts.groups.tolist() == [0, 0, 0, 1, 2, 2] and rollouts.request_numbers.tolist() == [0, 1]
    assert rollouts.untrained_requests == [(2, 9, 4, 5)] and rollouts.prompt_rewards == [(11, 2 / 3), (12, 0.0)]
    assert rollouts.weight_versions.tolist() == [3, 3, 3, 3, 4, 4] and rollouts.version_spans[:, 0].tolist() == [
        0,
        1,
        2,
        3,
    ]
    lengths, block = rollouts.sampled_lengths, rollouts.block
    assert block.columns[OFFLINE].tolist() == np.repeat([0, 0, 0, 0, 1, 1], lengths).tolist()
    assert np.isnan(block.rollout_logprobs[-3:]).all() and (block.rollout_logprobs[-6:-3] == -0.5).all()
    advantages = np.split(estimates.columns["advantages"], np.cumsum(lengths)[:-1])
    expected = [1 / 3, -2 / 3, 1 / 3, 0.0, -0.5, 0.5]
    for part, value in zip(advantages, expected, strict=True):
        assert part.tolist() == pytest.approx([value] * len(part))
    assert not estimates.excluded.any()
    metrics = rollouts.metrics(4)
    assert metrics["reward/mean"] == pytest.approx(1 / 3) and metrics["batch/offline_reward_mean"] == 0.5
    check(metrics)


def test_rows_of_a_file_keep_their_offline_advantage_and_are_trained_if_the_filter_rejects_all_groups(monkeypatch):
    filtered = [group(11, Score(1.0), Score(1.0)), group(12, Score(0.0), Score(0.0))]
    rollouts, estimates = collected(monkeypatch, [], filtered, offline_rows(advantage=0.25))
    assert estimates.columns["advantages"][-6:].tolist() == [0.25] * 6
    assert estimates.excluded.tolist() == [True] * 4 + [False] * 2
    assert estimates.zero_advantage.tolist() == [True] * 4 + [False] * 2
    assert rollouts.prompt_rewards == [(11, 1.0), (12, 0.0)], "prompts learn from rejected groups, too"


def test_gdpo_reads_the_rewards_of_rows_of_a_file(monkeypatch):
    kept = [group(11, Score(1.0, gdpo_parts={"right": 1.0}), Score(0.0, gdpo_parts={"right": 0.0}))]
    rollouts, estimates = collected(monkeypatch, kept, [], offline_rows(), GDPO(normalize_batch=False))
    ends = np.cumsum(rollouts.sampled_lengths)
    assert estimates.columns["advantages"][ends - 1].tolist() == pytest.approx([0.707, -0.707, -0.707, 0.707], abs=1e-3)


def test_a_step_without_rows_of_a_file_has_no_column_for_them(monkeypatch):
    rollouts, _ = collected(monkeypatch, [group(11, Score(1.0), Score(0.0))], [], None)
    assert rollouts.num_offline == 0 and not rollouts.block.columns
    assert "batch/offline_samples" not in rollouts.metrics(4)
