"""Rehearsal of a run: calls the reward function and the agent with made-up responses, before any process of the run starts."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mrl.config.schema import Config, ScoringConfig
from mrl.controller.plan_models import chat_template
from mrl.controller.plan_train import TrainPlan
from mrl.core.code_locations import describe_error
from mrl.data.prompts import PromptDataset
from mrl.data.tokenizer import load_tokenizer
from mrl.placement.ray_cluster import copy_for_actor
from mrl.rewards.reward_types import (
    INVALID_RESULT,
    CallResult,
    CombinedReward,
    Response,
    Reward,
    Score,
    Turn,
    call_reward,
)
from mrl.rewards.scorer import WorkerPool
from mrl.rollout.agents.tool_agent import ToolAgent
from mrl.rollout.client import Completion, SamplingParams
from mrl.rollout.response_metrics import rewards_of_sets

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0  # longest wait, at the end of the rehearsal, for a new worker process that is still starting
# Responses are made up for this many rows of each combination of data source, ability and style.
NUM_ROWS = 2
PLAIN_TEXT = "This is a made-up response."
EXPECTED = "expected a finite number, a bool, a dict whose key 'score' is a finite number, or a Score for each response"
# Failures that may be temporary: the server of a reward may start later than the run, and a first call may load a model.
_TEMPORARY_FAILURE = re.compile(r"\w*(Connect|Timeout|Network|HTTP)\w*: |no score within ")


def rehearse(plan: TrainPlan) -> None:
    """Call the agent with a made-up turn, and each reward with made-up responses to the first rows that this reward scores.

    These rows are the first rows of each combination of data source, ability and style in the training data. For the reward of a
    held-out set, they are rows of this set. Before these calls, this function logs the first prompts, as the chat template
    renders them. If scoring.rehearse is false, it does nothing else.

    A reward runs in a worker process, or in a thread if it has `in_process = True`, with the time limits of the run. The worker
    process ends before this function returns. Rewards that have `needs_server = True` are not called.

    Raises ValueError if the agent fails, if a reward cannot be pickled or returns an invalid score, or if a reward fails for all
    responses of a combination. Failures for only some responses, and failures that may be temporary (a network error or a
    timeout), are logged as a warning.
    """
    tokenizer = load_tokenizer(plan.model_path, chat_template(plan.config))
    rows = range(min(NUM_ROWS, len(plan.train)))
    for row in rows:
        logger.info("row %d, rendered by the chat template: %r", row, tokenizer.decode(plan.train.encode(row)))
    if not plan.config.scoring.rehearse:
        return
    if plan.agent:
        rehearse_agent(plan.agent, tokenizer, plan.config)
    responses = _make_up_responses(plan.train, range(len(plan.train)), multi_turn=plan.agent is not None)
    rehearse_reward(plan.reward, responses, plan.config.scoring)
    for name, reward in rewards_of_sets(plan.evaluations).items():
        assert plan.test is not None, "an evaluation has held-out prompts"
        responses = _make_up_responses(plan.test, plan.test.rows_by_source()[name], multi_turn=plan.agent is not None)
        rehearse_reward(reward, responses, plan.config.scoring, f"data.test_sets.{name}.reward")


def _make_up_responses(data: PromptDataset, rows: Sequence[int], multi_turn: bool) -> list[Response]:
    """Return responses to the first rows of each combination of data source, ability and style."""
    first: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        example = data.examples[row]
        chosen = first.setdefault((example.data_source, example.ability, example.style), [])
        if len(chosen) < NUM_ROWS:
            chosen.append(row)
    return [
        _make_up_response(data, row, multi_turn, is_right=row == chosen[0])
        for chosen in first.values()
        for row in chosen
    ]


def _make_up_response(data: PromptDataset, row: int, multi_turn: bool, is_right: bool) -> Response:
    """Return a response to the prompt of a row. Its text is the ground truth if `is_right`, and otherwise a plain sentence.

    The text is also a plain sentence if the ground truth is neither a text nor a number.
    """
    truth = data.ground_truth(row)
    text = str(truth) if is_right and isinstance(truth, str | int | float) else PLAIN_TEXT
    return Response(
        text=text,
        group=row,
        num_tokens=max(1, len(text) // 4),
        turns=(Turn("assistant", text),) if multi_turn else (),
        **data.reward_fields(row),
    )


def rehearse_reward(reward: Reward, responses: list[Response], settings: ScoringConfig, key: str = "reward") -> None:
    """Call a reward, or each inner reward of a combined reward, with the responses that it scores.

    The responses of each combination of data source, ability and style form one batch. After a failure that may be temporary,
    the reward is not called again, because each further call could take as long. `key`: config key of the reward. Raises
    ValueError as `rehearse` does.
    """
    named = list(_named_rewards(reward, responses, key))
    rewards = [(name, each, given) for name, each, given in named if given and not getattr(each, "needs_server", False)]
    in_workers = [each for _, each, _ in rewards if not getattr(each, "in_process", False)]
    # A call may change a reward that runs in this process. For example, the reward may open a connection. So a copy is called,
    # and the reward of the run stays unchanged.
    copies = {name: _copy(name, each) for name, each, _ in rewards if getattr(each, "in_process", False)}
    pool = WorkerPool(in_workers, 1, settings.memory_gb) if in_workers else None
    try:
        for name, each, given in rewards:
            index = next((i for i, other in enumerate(in_workers) if other is each), None)
            for part in _by_combination(given):
                if _check_scores(name, _call(copies.get(name, each), index, pool, part, settings), part):
                    break
    finally:
        if pool:
            pool.wait_started(START_TIMEOUT_S)
            pool.close()


def _copy(name: str, reward: Reward) -> Reward:
    """Return a copy of a reward that has `in_process = True`. Ray copies the reward for the rollout worker in the same way.

    Raises ValueError if the reward cannot be copied. `name` is the config key of the reward.
    """
    try:
        return copy_for_actor(reward)
    except Exception as error:  # pickle and the user's code may raise anything
        raise ValueError(
            f"{name}: the reward cannot be sent to the rollout worker: {describe_error(error)}\n"
            "  The run pickles the reward. Create locks, connections and open files in the first call, not in __init__."
        ) from error


def _named_rewards(
    reward: Reward, responses: list[Response], name: str
) -> Iterator[tuple[str, Reward, list[Response]]]:
    """Yield (config key, reward, its responses) for each inner reward, or for `reward` itself if it is not combined."""
    if not isinstance(reward, CombinedReward):
        yield name, reward, responses
        return
    for key, indices in reward.assign(responses).items():
        yield from _named_rewards(reward.inner_rewards[key], [responses[i] for i in indices], f"{name}.{key}")


def _by_combination(responses: Sequence[Response]) -> list[list[Response]]:
    """Return one list of responses for each combination of data source, ability and style."""
    found: dict[tuple[str, str, str], list[Response]] = {}
    for response in responses:
        found.setdefault((response.data_source, response.ability, response.style), []).append(response)
    return list(found.values())


def _call(
    reward: Reward, index: int | None, pool: WorkerPool | None, responses: list[Response], settings: ScoringConfig
) -> list[Score]:
    """Return one score for each response. `index`: index of the reward in `pool`; None: the reward has `in_process = True`.

    A reward that has `per_sample = True` is called once for each response. Any other reward is first called with all responses.
    If this call fails, the reward is then called once for each response, with two exceptions: the scores were invalid, or the
    reward has `whole_groups = True`.
    """

    def run(batches: Sequence[list[Response]]) -> list[CallResult]:
        """Call the reward once for each batch. A result is the scores of the batch, or the reason why the call failed."""
        if pool is None or index is None:
            return [_call_in_thread(reward, batch, settings.sample_timeout_s * len(batch)) for batch in batches]
        return pool.run(index, list(batches), settings.sample_timeout_s, time.monotonic() + settings.timeout_s)

    if not getattr(reward, "per_sample", False):
        [result] = run([responses])
        if isinstance(result, list):
            return result
        if getattr(reward, "whole_groups", False) or result.startswith(INVALID_RESULT):
            return [Score.failed(result)] * len(responses)
    results = run([[response] for response in responses])
    return [result[0] if isinstance(result, list) else Score.failed(result) for result in results]


def _call_in_thread(reward: Reward, batch: list[Response], limit_s: float) -> CallResult:
    """Call a reward that has `in_process = True` in a thread. Wait at most `limit_s` seconds for its scores."""
    results: list[CallResult] = []
    thread = threading.Thread(target=lambda: results.append(call_reward(reward, batch)), daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else f"no score within {limit_s:.1f} s."


def _check_scores(name: str, scores: Sequence[Score], responses: Sequence[Response]) -> bool:
    """Raise ValueError if a score is invalid, or if all scores failed and the first reason is not temporary.

    For other failures, log a warning. Returns whether the first reason may be temporary. `name`: config key of the reward.
    """
    failures = [(score.failure, response) for score, response in zip(scores, responses, strict=True) if score.failure]
    if not failures:
        return False
    invalid = [failure for failure in failures if failure[0].startswith(INVALID_RESULT)]
    reason, response = (invalid or failures)[0]
    called = (
        f"It was called with the made-up response {response.text!r:.60} to row {response.group} of the "
        f"{'held-out prompts' if name.startswith('data.') else 'training data'}"
    )
    may_be_temporary = _TEMPORARY_FAILURE.match(reason) is not None
    if not invalid and (len(failures) < len(scores) or may_be_temporary):
        logger.warning(
            "%s: the reward function failed for %d of %d made-up responses: %s. In the run, a response that cannot be scored "
            "gets the reward 0. %s.",
            name,
            len(failures),
            len(scores),
            reason,
            called,
        )
        return may_be_temporary
    expected = f"\n  {EXPECTED}." if invalid else ""
    raise ValueError(
        f"{name}: the reward function failed before the start: {reason}{expected}\n  {called}.\n"
        "  Correct the function. To start the run without this test, set scoring.rehearse=false."
    )


def rehearse_agent(agent: ToolAgent, tokenizer: Any, config: Config) -> None:
    """Let the agent respond with a single made-up turn, which calls no tool. Raises ValueError if the agent fails."""
    bound_agent = agent.prepare(tokenizer, config.data.template_args)
    ids = tokenizer.encode(PLAIN_TEXT, add_special_tokens=False)[: config.rollout.max_response_tokens]

    async def generate_turn(inputs: list[int], params: SamplingParams) -> Completion:
        tokens = [*ids, tokenizer.eos_token_id]
        return Completion(tokens, logprobs=[0.0] * len(tokens), finish_reason="stop", weight_version="0")

    async def respond() -> object:
        params = SamplingParams(config.rollout.max_response_tokens + 1)
        return await bound_agent(generate_turn, [tokenizer.eos_token_id], params, asyncio.Semaphore(1))

    try:
        asyncio.run(asyncio.wait_for(respond(), 2 * agent.tool_timeout_s))
    except Exception as error:  # user code may raise anything
        raise ValueError(
            f"rollout.agent: the agent failed before the start: {describe_error(error)}\n"
            f"  It was called with the made-up turn {PLAIN_TEXT!r}, which calls no tool.\n"
            "  Correct the agent. To start the run without this test, set scoring.rehearse=false."
        ) from error
