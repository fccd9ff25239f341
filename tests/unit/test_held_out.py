"""Evaluation on held-out sets: how each set is sampled and scored, and the numbers that are reported about its responses."""

import json
import threading
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from http_engines import HttpEngine, engine_pool

from mrl.config import hydra_entry
from mrl.controller.plan_prompts import plan_evaluations
from mrl.core import metrics as declared
from mrl.data.sources import HELD_OUT_KEYS
from mrl.rewards.by_source import BySource
from mrl.rewards.reward_types import Response, Score, Weighted
from mrl.rewards.rule_based import GSM8K, ExactMatch, Length
from mrl.rewards.scorer import Scorer
from mrl.rollout.client import SAMPLING_KEYS, EngineError, SamplingParams, response_seed
from mrl.rollout.response_metrics import HeldOutEvaluation, HeldOutResponses, correct_responses, evaluation_values
from mrl.rollout.rollout_pipeline import GroupSampler
from mrl.rollout.worker import RolloutWorker


def subset_means(n: int, k: int, value) -> float:
    """Return the exact mean of `value` over all subsets of k of the n responses."""
    subsets = list(combinations(range(n), k))
    return float(sum(map(value, subsets), Fraction(0)) / len(subsets))


def expected_values(lines: list[dict], n: int) -> dict[str, float]:
    """Return the metrics of recorded responses, counted over all subsets of the responses to each prompt."""
    prompts = [lines[start : start + n] for start in range(0, len(lines), n)]
    found = {
        "reward": float(np.mean([line["reward"] for line in lines], dtype=np.float64)),
        "accuracy": sum(line["correct"] for line in lines) / len(lines),
    }
    for k in sorted({2**power for power in range(1, n) if 2**power <= n} | {n}):
        passes, majorities = [], []
        for prompt in prompts:
            right: dict[str, list[bool]] = {}
            for line in prompt:
                right.setdefault(line["answer"], []).append(line["correct"])
            worth = {answer: Fraction(sum(each), len(each)) for answer, each in right.items()}

            def vote(subset, prompt=prompt, worth=worth) -> Fraction:
                answers = [prompt[index]["answer"] for index in subset if prompt[index]["answer"] is not None]
                most = max((answers.count(answer) for answer in answers), default=0)
                winners = {answer for answer in answers if answers.count(answer) == most}
                return sum((worth[answer] for answer in winners), Fraction(0)) / max(1, len(winners))

            passes.append(subset_means(n, k, lambda subset, p=prompt: Fraction(any(p[i]["correct"] for i in subset))))
            majorities.append(subset_means(n, k, vote))
        found |= {f"pass_at_{k}": float(np.mean(passes)), f"maj_at_{k}": float(np.mean(majorities))}
    return found


@pytest.mark.parametrize("n", [2, 3, 6, 8])
def test_pass_and_maj_at_k_are_those_of_all_subsets_of_the_recorded_responses(tmp_path, n):
    draw, rows = np.random.default_rng(n), range(3, 10)
    texts = [f"#### {draw.integers(4)}" if draw.random() < 0.8 else "none" for _ in range(n * len(rows))]
    responses = [Response("sums", text, "1", group=index // n) for index, text in enumerate(texts)]
    reward = GSM8K()
    scores = Scorer(reward)(responses)
    evaluation = HeldOutEvaluation({"aime-24": None}, SamplingParams(8, n=n))
    found = HeldOutResponses.of(evaluation, {"aime-24": rows}, responses, scores, reward)
    found.write(tmp_path / "new/evaluation.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "new/evaluation.jsonl").read_text().splitlines()]
    assert [(line["row"], line["sample"]) for line in lines] == [(row, member) for row in rows for member in range(n)]
    assert {None, "1.0"} < {line["answer"] for line in lines} <= {None, "0.0", "1.0", "2.0", "3.0"}
    expected = {f"eval/aime_24/{name}": value for name, value in expected_values(lines, n).items()}
    assert found.metrics() == pytest.approx(expected, abs=1e-12)
    assert len(expected) == 2 + 2 * {2: 1, 3: 2, 6: 3, 8: 3}[n]
    declared.check(expected)


def test_a_response_is_correct_if_its_part_or_its_reward_is_1():
    assert correct_responses([Score(1.0), Score(0.0), Score.failed("hangs")]) == [True, False, False]
    assert correct_responses([Score(1.0), Score(0.5)]) is None, "the reward is not only 0 or 1"
    parts = [Score(0.7, parts={"acc": 1.0, "form": 0.0}), Score(1.0, parts={"acc": 0.5}), Score(1.0)]
    assert correct_responses(parts) == [True, False, True], "each response by its own part"
    assert correct_responses([Score(0.9, parts={"correct": 0.0, "acc": 1.0})]) == [False], "the first name counts"
    assert correct_responses([Score.failed("judge down", {"correct": 1.0})]) == [False]


def test_a_reward_without_a_meaning_of_correct_has_only_a_mean():
    scores = [Score(0.25), Score(0.5), Score(1.0), Score(0.25)]
    assert evaluation_values(scores, ["a"] * 4, n=2) == {"reward": 0.5}
    assert evaluation_values([Score(1.0), Score(0.0)], ["a", "b"], n=1) == {"reward": 0.5, "accuracy": 0.5}
    assert evaluation_values([Score.failed("x")] * 2, [None] * 2, n=2) == {}


def test_default_sets_have_metrics_of_each_named_set_and_of_all_together(caplog):
    evaluation = HeldOutEvaluation(
        {"": None, "a b": 2, "c": None}, SamplingParams(8), "greedy", has_overall_metrics=True
    )
    rows = evaluation.rows({"": range(2), "a b": range(2, 6), "c": range(6, 7)})
    assert rows == {"": range(2), "a b": range(2, 4), "c": range(6, 7)}
    scores = [Score(1.0), Score(0.0), Score(1.0), Score(1.0), Score.failed("judge down")]
    responses = [Response("s", "x", "x")] * 5
    found = HeldOutResponses.of(evaluation, rows, responses, scores, ExactMatch()).metrics()
    assert found == {
        "eval/a_b/reward_greedy": 1.0,
        "eval/a_b/accuracy_greedy": 1.0,
        "eval/reward_greedy": 0.6,
        "eval/accuracy_greedy": 0.6,
    }
    assert "no response to the held-out prompts of c could be scored, for example: judge down" in caplog.text
    declared.check(found)


def test_answers_come_from_the_reward_of_the_source():
    reward = Weighted({"short": Length(10), "task": BySource({"gsm8k": GSM8K()}, default=ExactMatch())})
    responses = [Response("gsm8k", "#### 7.0", "7"), Response("other", " 7 ", "7"), Response("gsm8k", "7", "7")]
    evaluation = HeldOutEvaluation({"x": None}, SamplingParams(8))
    found = HeldOutResponses.of(evaluation, {"x": range(3)}, responses, [Score(1.0)] * 3, reward)
    assert found.answers == ["7.0", "7", None]


class EchoEngine(HttpEngine):
    """An engine that answers with the last token of the prompt, and keeps the sampling parameters of the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.params: list[dict] = []

    async def generate(self, request):
        self.params += (await request.json())["sampling_params"]
        return await super().generate(request)

    def completion(self, ids):
        return [ids[-1]]


def worker_on(engines, evaluations, reward, further=(), record=False, tmp_path=None) -> RolloutWorker:
    """Return a rollout worker. A held-out row has the token ids [row, row]; set `a` has rows 0 and 1, set `b` rows 2 to 4."""
    spec = replace(engines.spec, evaluations=evaluations, reward=reward, record=record, run_dir=str(tmp_path))
    worker = object.__new__(RolloutWorker)
    worker.spec, worker.engines = spec, engines
    worker.test = Mock(
        rows_by_source=lambda: {"a": range(2), "b": range(2, 5)},
        encode=lambda row: [row, row],
        has_images=False,
        decode=lambda responses: ["".join(map(str, ids)) for ids in responses],
        reward_fields=lambda row: dict(
            data_source="s", ground_truth=str(row), extra_info={}, prompt=[], ability="", style=""
        ),
    )
    worker._sampler = GroupSampler(spec, engines, Mock())
    worker._scorer, worker._scorer_lock = Scorer(reward, further_rewards=further), threading.Lock()
    return worker


def test_an_evaluation_sends_the_sampling_of_its_set_and_scores_by_its_reward(tmp_path):
    own = SamplingParams(7, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.5, stop=("###",), n=2)
    other = Length(1)
    evaluations = (
        HeldOutEvaluation({"a": None}, SamplingParams(8, temperature=0.0), "greedy"),
        HeldOutEvaluation({"b": 2}, own, reward=other),
    )
    server = EchoEngine()
    with engine_pool(server, deterministic=False, seed=3) as engines:
        engines.spec = replace(engines.spec, deterministic=True)
        worker = worker_on(engines, evaluations, ExactMatch(), [other], record=True, tmp_path=tmp_path)
        first, second, again = worker.evaluate(0, 4), worker.evaluate(1, 4), worker.evaluate(1, 5)
    server.stop()
    assert first == {"eval/a/reward_greedy": 1.0, "eval/a/accuracy_greedy": 1.0}
    assert (
        second
        == again
        == {"eval/b/reward": 0.0, "eval/b/accuracy": 0.0, "eval/b/pass_at_2": 0.0, "eval/b/maj_at_2": 0.0}
    )
    assert server.inputs == [[0, 0], [1, 1], *[[2, 2]] * 2, *[[3, 3]] * 2, *[[2, 2]] * 2, *[[3, 3]] * 2]
    greedy, sampled = server.params[:2], server.params[2:6]
    assert [params["temperature"] for params in greedy] == [0.0, 0.0] and greedy[0]["max_new_tokens"] == 8
    assert sampled[0] | {"sampling_seed": 0} == dict(
        max_new_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.5,
        stop=["###"],
        sampling_seed=0,
    )
    seeds = [params["sampling_seed"] for params in server.params]
    assert seeds[:6] == [response_seed(3, 1, row) for row in (0, 1)] + [
        response_seed(3, 1, row, member) for row in (2, 3) for member in (0, 1)
    ]
    assert len(set(seeds[:6])) == 6 and seeds[6:] == seeds[2:6], "the same seeds in every evaluation"
    recorded = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert recorded == ["evaluation_000004_0.jsonl", "evaluation_000004_1.jsonl", "evaluation_000005_1.jsonl"]


def test_without_engines_or_held_out_prompts_there_is_nothing_to_report():
    worker = object.__new__(RolloutWorker)
    worker.test, worker.engines = None, SimpleNamespace(urls=["http://engine"])
    assert worker.evaluate(0, 0) == {}
    worker.test, worker.engines = Mock(), SimpleNamespace(urls=[])
    assert worker.evaluate(0, 0) == {}


def test_a_scorer_may_have_several_rewards_that_share_worker_processes():
    exact, weighted = ExactMatch(), Weighted({"right": ExactMatch(), "sum": BySource({"s": GSM8K(strict=False)})})
    responses = [Response("s", "4", "4"), Response("s", "so 4", "4")]
    with Scorer(exact, further_rewards=[weighted]) as scorer:
        assert [score.value for score in scorer(responses)] == [1.0, 0.0]
        assert [score.value for score in scorer(responses, weighted)] == [2.0, 1.0]


def evaluations_of(*overrides: str):
    argv = hydra_entry.check_overrides(["experiment=quickstart", "run.dir=out", *overrides])
    return plan_evaluations(hydra_entry.compose_config(argv))


@pytest.mark.extended
def test_by_default_all_sets_are_sampled_once_at_temperature_1_and_once_greedily():
    sets = "data.test_sets={plain: [a.jsonl], few: {files: [b.jsonl], rows: 3}}"
    sampled, greedy = evaluations_of(sets, "trainer.eval_rows=20")
    assert (
        (sampled.metric_suffix, greedy.metric_suffix) == ("sampled", "greedy")
        and sampled.has_overall_metrics
        and greedy.has_overall_metrics
    )
    assert sampled.sets == greedy.sets == {"": 20, "plain": 20, "few": 3}
    assert sampled.sampling == SamplingParams(7) and greedy.sampling == SamplingParams(7, temperature=0.0)
    assert sampled.reward is None
    assert evaluations_of("data.test=[]") == ()


@pytest.mark.extended
def test_a_set_says_how_it_is_sampled_and_scored():
    reward = "{_target_: mrl.rewards.rule_based.GSM8K, strict: false}"
    sets = (
        "data.test_sets={aime: {files: [a.jsonl], n: 16, temperature: 0.6, top_p: 0.95, top_k: 20, max_response_tokens: 40}, "
        f"gsm: {{files: [b.jsonl], reward: {reward}, stop: 'Q:', rows: 5}}}}"
    )
    *_, aime, sampled, greedy = evaluations_of(sets)
    assert aime == HeldOutEvaluation({"aime": None}, SamplingParams(40, 0.6, 0.95, 20, n=16))
    assert sampled.sampling == SamplingParams(7, stop=("Q:",)) and greedy.sampling == replace(
        sampled.sampling, temperature=0.0
    )
    assert (sampled.metric_suffix, greedy.metric_suffix) == ("sampled", "greedy") and not sampled.has_overall_metrics
    assert sampled.reward is greedy.reward == GSM8K(strict=False) and sampled.sets == {"gsm": 5}


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("n: 0", r"data.test_sets.x.n=0: expected a whole number of responses, 1 or more"),
        ("n: 1.5", r"data.test_sets.x.n=1.5: expected a whole number"),
        ("n: 1001", r"data.test_sets.x.n=1001: at most 1000 responses"),
        ("n: 2, temperature: 0", r"data.test_sets.x: n=2 with temperature=0: greedy responses to a prompt are equal"),
        ("temperature: -1", r"data.test_sets.x.temperature=-1: expected 0 \(greedy decoding\) or a number above 0"),
        ("temperature: hot", r"data.test_sets.x.temperature='hot': expected 0"),
        ("top_p: 0", r"data.test_sets.x.top_p=0: expected a number above 0 and at most 1"),
        ("top_p: 1.01", r"data.test_sets.x.top_p=1.01: expected a number above 0 and at most 1"),
        ("top_k: 0", r"data.test_sets.x.top_k=0: expected a whole number, 1 or more, or -1"),
        ("min_p: 2", r"data.test_sets.x.min_p=2: expected a number from 0 to 1"),
        ("repetition_penalty: 3", r"data.test_sets.x.repetition_penalty=3: expected a number above 0 and at most 2"),
        ("stop: ['']", r"data.test_sets.x.stop=\('',\): expected a text or a list"),
        ("stop: 3", r"data.test_sets.x.stop=3: expected a text or a list"),
        ("stop_token_ids: [a]", r"data.test_sets.x.stop_token_ids=\('a',\): expected a list of token ids"),
        (
            "max_response_tokens: 0",
            r"data.test_sets.x.max_response_tokens=0: expected a whole number of tokens, 1 or more",
        ),
        ("rows: 0", r"data.test_sets.x.rows=0: expected a number of rows"),
        ("reward: gsm8k", r"data.test_sets.x.reward='gsm8k': expected a node with _target_"),
        ("reward: {_target_: mrl.rewards.rule_based.GSM8}", r"data.test_sets.x.reward._target_=.*cannot be imported"),
        (
            "reward: {_target_: mrl.rewards.rule_based.GSM8K, strikt: 1}",
            r"data.test_sets.x.reward.strikt: .* has no argument 'strikt'; did you mean 'strict'",
        ),
        (
            "reward: {_target_: mrl.rewards.reward_types.call_reward}",
            r"data.test_sets.x.reward: .* cannot be called with",
        ),
    ],
)
def test_a_mistake_in_the_settings_of_a_set_names_its_key(settings, message):
    with pytest.raises(ValueError, match=message):
        evaluations_of(f"data.test_sets={{x: {{files: [a.jsonl], {settings}}}}}")


@pytest.mark.extended
def test_two_sets_cannot_have_the_same_metrics():
    with pytest.raises(ValueError, match=r"data.test_sets.a.b: its metrics would have the same names as those of a-b"):
        evaluations_of("data.test_sets={a-b: [a.jsonl], a.b: [b.jsonl]}")


def test_the_keys_of_a_held_out_set_are_those_of_the_sampling_parameters():
    assert set(HELD_OUT_KEYS) == {"reward", "rows", *SAMPLING_KEYS}


def test_an_external_server_without_a_tokenizer_is_refused_if_a_set_has_stop_texts(monkeypatch):
    server, evaluations = HttpEngine(), (HeldOutEvaluation({"x": None}, SamplingParams(8, stop=("Q:",))),)
    monkeypatch.setattr("mrl.rollout.client.EngineClient.server_info", lambda self: {"skip_tokenizer_init": True})
    with (
        pytest.raises(ValueError, match="was started with --skip-tokenizer-init"),
        engine_pool(server, evaluations=evaluations),
    ):
        raise EngineError("not reached")
    monkeypatch.setattr("mrl.rollout.client.EngineClient.server_info", lambda self: {"skip_tokenizer_init": False})
    with engine_pool(server, evaluations=evaluations) as engines:
        assert engines.urls == [server.url]
    server.stop()
