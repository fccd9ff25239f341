"""Short answers to the first questions about a run. The answers come from the data that the run recorded."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mrl.algorithms.distillation import reads_rewards
from mrl.algorithms.inputs import required_inputs_of
from mrl.config.instantiate import instantiate
from mrl.core import metrics as declared
from mrl.tracking.learning_health import (
    MIN_FAILED_FRACTION,
    MISMATCH_NATS,
    RULES,
    LearningHealth,
    LearningSettings,
    StepView,
)
from mrl.tracking.report.charts import describe, time_text
from mrl.tracking.report.page import number
from mrl.tracking.report.provenance import changed_keys, go_on_text
from mrl.tracking.report.recorded_run import RecordedRun, Sample
from mrl.tracking.report.sample_table import no_samples_text
from mrl.tracking.timeline import NOISE, SMALLEST_SHARE, RankWork, percent

STANDARD_ERRORS_OF_A_CLEAR_CHANGE = 2.0  # a clear change of the mean reward exceeds this number of standard errors
LARGE_FRACTION = 0.5  # from this fraction on, failed or truncated responses explain a low reward
MANY_TRUNCATED = 0.05  # from this fraction on, truncated responses are a problem
MANY_EQUAL_GROUPS = 0.9  # from this fraction on, groups with equal rewards slow learning down
MAX_NAMED_KEYS = 12  # number of changed config keys that an answer names
QUOTE_CHARACTERS = 90  # length of a quoted response
NOT_RECORDED = "Not recorded"  # begins an answer for which the run has no data


@dataclass(frozen=True)
class Answer:
    """One question with its answer."""

    question: str
    text: str
    state: str = ""  # "good", "bad", or "" for neither
    link: str = ""  # section of the page with the details


def answers(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the questions with their answers as JSON values."""
    found = (
        Answer("Is the model learning?", *_learning(run), "learning"),
        Answer("Why is the reward what it is?", *_reward(run)),
        Answer("What does the model write?", _writing(run), "", "samples"),
        Answer("Did anything fail?", *_failures(run), "provenance"),
        Answer("Is the training stable?", *_stability(run), "learning"),
        Answer("What takes the time?", time_text(run), "", "time"),
        Answer("Which rank is slow?", _slow_rank(run), "", "time"),
        Answer("Are responses cut off?", *_truncation(run), "learning"),
        Answer("Do the trainer and the engines agree?", *_agreement(run), "learning"),
        Answer("Was the run resumed?", _resumes(run), "", "provenance"),
        Answer("Which config keys differ from their defaults?", _changes(run), "", "provenance"),
        Answer("How do I go on?", go_on_text(run), "", "next"),
    )
    return [asdict(answer) for answer in found]


def health(run: RecordedRun) -> dict[str, Any]:
    """Return the state of the run ("good", "bad" or "unknown"), a headline, and one line for each problem."""
    lines: list[str] = []
    if run.error:
        lines.append(f"The run ended with an error: {run.error}")
    lines += problems(run)
    if not run.metrics:
        state = "bad" if run.error else "unknown"
        headline = "The run failed before its first step." if run.error else "No step was recorded yet."
        return {"state": state, "headline": headline, "lines": lines}
    steps = f"{len(run.metrics)} step{'s' if len(run.metrics) > 1 else ''}"
    outcome = {"not recorded": "", "running": ", and the run goes on"}.get(run.outcome, f"; the run {_ended(run)}")
    headline = f"{steps}, no problem found{outcome}." if not lines else f"{steps}{outcome}. What needs attention:"
    return {"state": "bad" if lines else "good", "headline": headline, "lines": lines}


def _ended(run: RecordedRun) -> str:
    if run.reached_goal:
        return (
            f"stopped at step {max(run.metrics)} of {run.setting('trainer.max_steps')}: "
            f"trainer.stop_reward={run.setting('trainer.stop_reward')} was reached"
        )
    return {
        "finished": "finished",
        "failed": "failed",
        "unhealthy": "was ended by the health check",
        "preempted": "was preempted",
        "interrupted": "was interrupted",
    }.get(run.outcome, f"ended with the outcome {run.outcome}")


def problems(run: RecordedRun) -> list[str]:
    """Return the problems that the health check reports. If the run is too short for the check, return those of its last step."""
    return [
        f"{text.rstrip('.')}. The problem “{name}” was present {where}." for name, where, text in found_problems(run)
    ]


def found_problems(run: RecordedRun) -> list[tuple[str, str, str]]:
    """Return (name of the problem, the steps that have it, its description) for each problem of `problems`."""
    reported: list[str] = []
    check = LearningHealth(_settings(run), reported.append)
    for step, metrics in run.metrics.items():
        check.check(step, metrics)
    totals_from = len(reported)
    check.report_totals()
    totals = [total.partition(": ") for total in reported[totals_from:]]
    texts = [text.partition(": ") for text in reported[:totals_from]]  # step N: description
    found = [
        (name, where, f"{text[:1].upper()}{text[1:].rstrip('.')}. These are the values of {step}.")
        for (step, _, text), (name, _, where) in zip(texts, totals, strict=True)
    ]
    if not found and 0 < len(run.metrics) < max(rule.patience for rule in RULES.values()):
        found = _problems_of_last_step(run)
    return found


def _problems_of_last_step(run: RecordedRun) -> list[tuple[str, str, str]]:
    """Return the problems of the last step of a run that is too short for the health check."""
    view = StepView(now=run.last, first=(), settings=_settings(run))
    where = f"in step {max(run.metrics)}"
    return [(name, where, text[:1].upper() + text[1:]) for name, rule in RULES.items() if (text := rule.find(view))]


def _settings(run: RecordedRun) -> LearningSettings:
    target = str(run.setting("algorithm.advantage._target_", "the advantage"))
    advantage, loss = _own_part(run, "algorithm.advantage"), _own_part(run, "algorithm.loss")
    return LearningSettings(
        responses_per_prompt=int(run.setting("rollout.responses_per_prompt", 1)),
        max_response_tokens=int(run.setting("rollout.max_response_tokens", 0)),
        lr=float(run.setting("optim.lr", math.nan)),
        advantage=target.rpartition(".")[2],
        group_relative=getattr(advantage, "group_relative", False),
        reads_rewards=reads_rewards(advantage, required_inputs_of(advantage) | required_inputs_of(loss)),
        mask_truncated=bool(run.setting("algorithm.mask_truncated", False)),
    )


def _own_part(run: RecordedRun, key: str) -> object:
    """Build the part of the algorithm that the recorded config has at `key`. Returns None if the part has classes outside mrl.

    A report does not run a user's code, so it does not build such a part.
    """
    node = run.setting(key, {})
    targets = re.findall(r'"_target_": "([^"]*)"', json.dumps(node, default=str))
    if not targets or not all(re.fullmatch(r"mrl\.algorithms\.\w+\.\w+", target) for target in targets):
        return None
    try:
        return instantiate(node, key)
    except ValueError:  # another version of mrl recorded the part
        return None


def first_and_last_mean(values: Sequence[float]) -> tuple[float, float, float, int]:
    """Return (mean of the first steps, mean of the last steps, standard error of the difference, number of averaged steps)."""
    count = max(1, min(10, len(values) // 3))
    first, last = np.array(values[:count]), np.array(values[-count:])
    error = math.sqrt((np.var(first, ddof=1) + np.var(last, ddof=1)) / count) if count > 1 else math.nan
    return float(first.mean()), float(last.mean()), error, count


def _learning(run: RecordedRun) -> tuple[str, str]:
    values = list(run.series("reward/mean").values())
    held_out = _held_out_text(run)
    if len(values) < 2:
        return (
            (f"Too early to say: only one step has a reward.{held_out}", "")
            if values
            else (f"{NOT_RECORDED}: no step has a reward.", "")
        )
    if min(values) == max(values):
        return f"No: the mean reward of every step is {number(values[0])}.{held_out}", "bad"
    before, after, error, count = first_and_last_mean(values)
    change = f"the mean reward went from {number(before)} to {number(after)}, {_averaged(count)}"
    if math.isnan(error):
        return f"Too few steps to tell a change from noise: {change}.{held_out}", ""
    if after - before > STANDARD_ERRORS_OF_A_CLEAR_CHANGE * error and after > before:
        return f"Yes: {change}.{held_out}", "good"
    if before - after > STANDARD_ERRORS_OF_A_CLEAR_CHANGE * error and after < before:
        return f"No, the reward falls: {change}.{held_out}", "bad"
    return f"No clear change: {change}, which is within the noise (standard error {number(error, 2)}).{held_out}", ""


def _averaged(count: int) -> str:
    return f"each averaged over {count} steps" if count > 1 else "each of one step"


def _held_out_text(run: RecordedRun) -> str:
    measured = {name for evaluation in run.evaluations.values() for name in evaluation}
    of_sets = sorted(name for name in measured if re.fullmatch(r"eval/\w+/reward", name))
    for name in ("eval/reward_sampled", "eval/reward_greedy", *of_sets):
        values = list(run.series(name).values())
        if len(values) > 1:
            what = declared.label(name).removesuffix(" reward")
            return f" Held-out reward ({what}): {number(values[0])} at the first evaluation, {number(values[-1])} at the last."
    return " Held-out reward: fewer than two evaluations were recorded."


def _reward(run: RecordedRun) -> tuple[str, str, str]:
    """Return (text, state, section with the details)."""
    last, step = run.last, max(run.metrics, default=0)
    if "reward/mean" not in last:
        reason = " The run ended with an error, which the top of this page shows." if run.error else ""
        return f"{NOT_RECORDED}: no step has a reward.{reason}", "bad" if reason else "", "provenance"
    mean = last["reward/mean"]
    start = f"In step {step} the mean reward is {number(mean)}"
    failed, truncated = last.get("reward/failed_fraction", 0.0), last.get("rollout/truncated_fraction", 0.0)
    if failed >= LARGE_FRACTION:
        reason = (
            f"{percent(failed)} of the responses could not be scored and count as 0{_failure_text(run)}. "
            f"Correct the reward function; logs/rollout.log has the reasons."
        )
        return f"{start}, because {reason}", "bad", "samples"
    if truncated >= LARGE_FRACTION:
        limit = run.setting("rollout.max_response_tokens", "?")
        text = f"{percent(truncated)} of the responses are cut at rollout.max_response_tokens={limit} before they end"
        return f"{start}: {text}. Raise this key.", "bad", "samples"
    if zero := [name[7:-5] for name, value in _parts(last).items() if value == 0]:
        parts, have = ("parts", "have") if len(zero) > 1 else ("part", "has")
        start += f", and the reward {parts} {', '.join(zero)} {have} a mean of 0"
    if not mean > 0 and not any(sample.get("reward", 0) > 0 for sample in _samples(run)):
        return f"{start}. {_empty_text(run)}{_compare_text(run)}", "bad", "samples"
    parts = ", ".join(f"{name[7:-5]} {number(value)}" for name, value in _parts(last).items())
    details = f" ({parts})" if parts else ""
    shares = f"{percent(failed)} of the responses failed and {percent(truncated)} were truncated"
    return f"{start}{details}; {shares}.{_equal_groups_text(last)}", "", "learning"


def _compare_text(run: RecordedRun) -> str:
    """Say how to find out why no reward is above 0."""
    why = "either the prompts are too hard, or the reward function does not find the answers in the responses"
    if any(sample.get("ground_truth") for sample in _samples(run)):
        return f"Compare the responses with the expected answers in the samples: {why}."
    return f"Compare the responses in the samples with the answers that you expect: {why}."


def _equal_groups_text(last: dict[str, float]) -> str:
    """Say in which fraction of the groups all rewards are equal, and whether this is a problem."""
    equal = last.get("reward/uniform_groups_fraction", 0.0)
    if not equal:
        return ""
    verdict = "This is no problem while the reward rises, because the other groups teach the model."
    if last.get("reward/std") == 0:
        verdict = "If the advantages compare the responses of a group, this step teaches the model nothing."
    elif equal >= MANY_EQUAL_GROUPS:
        verdict = (
            "If the advantages compare the responses of a group, few groups teach the model: use prompts of medium "
            "difficulty, or raise rollout.responses_per_prompt."
        )
    return f" In {percent(equal)} of the groups all rewards are equal. {verdict}"


def _parts(metrics: dict[str, float]) -> dict[str, float]:
    return {n: v for n, v in metrics.items() if re.fullmatch(r"reward/\w+_mean", n)}


def _samples(run: RecordedRun) -> list[Sample]:
    return run.samples[-1][1] if run.samples else []


def _empty_text(run: RecordedRun) -> str:
    samples = _samples(run)
    empty = sum(not str(sample.get("response", "")).strip() for sample in samples)
    return f"{empty} of the {len(samples)} kept responses are empty. " if empty else ""


def _failure_text(run: RecordedRun) -> str:
    reasons = [str(sample["failure"]) for sample in _samples(run) if sample.get("failure")]
    return f", for example: {reasons[0][:300]}" if reasons else ""


def _writing(run: RecordedRun) -> str:
    samples = _samples(run)
    if not samples:
        return f"{NOT_RECORDED}: {no_samples_text(run)}."
    best, worst = samples[0], samples[-1]
    if best.get("reward") == worst.get("reward"):
        reward = number(best.get("reward"))
        step = run.samples[-1][0]
        return f"In step {step}, all kept responses have the reward {reward}, for example: “{_quote(best)}”."
    quotes = [
        f"{title} (reward {number(one.get('reward'))}): “{_quote(one)}”"
        for title, one in (("best", best), ("worst", worst))
    ]
    return f"Step {run.samples[-1][0]}, {'; '.join(quotes)}."


def _quote(sample: Sample) -> str:
    turns = [str(turn.get("text", "")) for turn in sample.get("turns") or []]
    text = " ".join((" → ".join(turns) if len(turns) > 1 else str(sample.get("response", ""))).split())
    return text if len(text) <= QUOTE_CHARACTERS else f"{text[:QUOTE_CHARACTERS]}…"


COUNTS = {
    "rollout/replaced_engines": "engines failed during sampling and were replaced",
    "weight_sync/replaced_engines": "engines failed during a weight sync and were replaced",
    "rollout/retried_responses": "responses were requested again",
    "mismatch/nan_tokens": "trained tokens had no log-probability from the engine",
}
"""Metrics that count failures, with the words for their sum."""
FAILED_FRACTIONS = {
    "reward/failed_fraction": "responses of a step could not be scored",
    "rollout/tool_errors_fraction": "tool calls of a step failed",
}
"""Metrics that are fractions of failures, with the words for their largest value."""


def _failures(run: RecordedRun) -> tuple[str, str]:
    found = ["the run ended with the error at the top of this page"] if run.error else []
    for name, words in COUNTS.items():
        if total := sum(run.series(name).values()):
            found.append(f"{total:,.0f} {words}")
    largest = 0.0
    for name, words in FAILED_FRACTIONS.items():
        if worst := max(run.series(name).values(), default=0.0):
            found.append(f"up to {percent(worst)} of the {words}")
            largest = max(largest, worst)
    found += [f"damaged file: {text}" for text in run.damaged]
    if found:
        return f"Yes: {'; '.join(found)}.", "bad" if run.error or run.damaged or largest >= MIN_FAILED_FRACTION else ""
    if not run.metrics:
        return f"{NOT_RECORDED}: no step finished.", ""
    return "No failed response, failed tool call, replaced engine, retry or damaged line was recorded.", "good"


STABILITY = {
    "policy/entropy_mean": "entropy",
    "policy/kl_ref": "KL to the reference",
    "optim/grad_norm": "gradient norm",
    "mismatch/logprob_abs_mean": "mismatch",
}
"""Metric -> its name in the answer about stability."""
UNSTABLE = ("entropy", "differ by", "diverge")  # problems with one of these words in their text are about stability


def _stability(run: RecordedRun) -> tuple[str, str]:
    parts, missing = [], []
    for name, word in STABILITY.items():
        values = list(run.series(name).values())
        if values:
            parts.append(f"{word} {number(values[0])} to {number(values[-1])} (largest {number(max(values))})")
        else:
            missing.append(word)
    if not parts:
        return f"{NOT_RECORDED}: no step has entropy, KL, gradient norm or mismatch.", ""
    bad = [text for text in problems(run) if any(word in text for word in UNSTABLE)]
    absent = f" Not recorded: {', '.join(missing)}." if missing else ""
    norms = list(run.series("optim/grad_norm").values())
    measured = f"{'; '.join(parts)}.{absent}"
    if bad:
        return f"No, see the problems above. Measured: {measured}", "bad"
    if norms and norms[-1] == 0:
        return f"The weights do not change, because the gradient norm is 0. Measured: {measured}", "bad"
    return f"Nothing exceeds the limits of the health check: {measured}", "good"


def _slow_rank(run: RecordedRun) -> str:
    if found := [text for text in run.timeline if "longer than the others" in text]:
        return " ".join(found)
    if len(run.ranks) == 1 or (not run.ranks and run.has_one_rank):
        return "The run has only one trainer rank."
    if run.ranks and not run.timeline:
        return f"{NOT_RECORDED}: the timeline has no complete step yet."
    if run.ranks:
        if len({_model_and_stage(rank) for rank in run.ranks}) == len(run.ranks):
            return "No two ranks compute the same pipeline stage of the same model, so no ranks can be compared."
        return (
            "No rank is clearly slower than the others. A rank is clearly slower if it computes more than "
            f"{percent(NOISE)} longer than the other ranks of the same model and pipeline stage."
        )
    if imbalance := list(run.series("batch/imbalance").values()):
        excess = float(np.mean(imbalance)) - 1
        work = f"one replica has {percent(excess)} more work than the mean of the replicas"
        return (
            "No timeline was recorded (tracking.timeline=true records one). Estimated from the batches, "
            f"{work if excess >= SMALLEST_SHARE else 'all replicas have equal work'}."
        )
    return f"{NOT_RECORDED}: tracking.timeline=true records it."


def _model_and_stage(rank: RankWork) -> tuple[str, int]:
    return rank.timeline.role, rank.timeline.coords.get("pp", 0)


def _truncation(run: RecordedRun) -> tuple[str, str]:
    values = list(run.series("rollout/truncated_fraction").values())
    if not values:
        return f"{NOT_RECORDED}: no step has rollout/truncated_fraction.", ""
    _, last, _, count = first_and_last_mean(values)
    is_problem = any(name == "truncated responses" for name, _, _ in found_problems(run))
    verdict = "Yes" if last >= MANY_TRUNCATED or is_problem else "Hardly" if max(values) else "No"
    steps = f"the last {count} steps" if count > 1 else "the last step"
    text = (
        f"{verdict}: {percent(last)} of the responses of {steps} were truncated at rollout.max_response_tokens="
        f"{run.setting('rollout.max_response_tokens', '?')}, {percent(float(np.mean(values)))} of those of the whole run, and "
        f"{percent(max(values))} of those of the worst step."
    )
    return text, "bad" if verdict == "Yes" else ""


def _agreement(run: RecordedRun) -> tuple[str, str]:
    mean, largest = run.series("mismatch/logprob_abs_mean"), run.series("mismatch/logprob_abs_max")
    if not mean:
        return f"{NOT_RECORDED}: no step has mismatch/logprob_abs_mean.", ""
    step, worst, good = max(mean), max(mean.values()), describe("mismatch/logprob_abs_mean")[2]
    most = f", and by at most {number(largest[step], 2)}" if step in largest else ""
    text = (
        f"in step {step}, their log-probabilities of a token differ by {number(mean[step], 2)} nats on average{most}. The "
        f"largest mean of a step is {number(worst, 2)}. The health check warns above {MISMATCH_NATS}, where the difference can "
        f"harm learning. Rounding alone explains smaller differences: {good}."
    )
    return (f"No: {text}", "bad") if worst > MISMATCH_NATS else (f"Yes: {text}", "good")


def _resumes(run: RecordedRun) -> str:
    if not run.start:
        return f"{NOT_RECORDED}: the folder has no starts.jsonl."
    if not run.resumed_steps:
        return "No, it started at step 0 and was never resumed."
    steps = ", ".join(map(str, run.resumed_steps))
    times = "once" if len(run.resumed_steps) == 1 else f"{len(run.resumed_steps)} times"
    return f"Yes, {times}: from the checkpoint after step {steps}."


def _changes(run: RecordedRun) -> str:
    if not run.config:
        return f"{NOT_RECORDED}: the folder has no config."
    changed = changed_keys(run)
    given = [each for each in changed if each["given"] and each["key"] != "run.dir"]
    names = [f"{each['key']}={each['value']}" if len(each["value"]) < 60 else each["key"] for each in given]
    more = f" and {len(names) - MAX_NAMED_KEYS} more" if len(names) > MAX_NAMED_KEYS else ""
    groups = sum(not each["given"] for each in changed)
    parts = [f"the command line sets {', '.join(names[:MAX_NAMED_KEYS])}{more}"] if names else []
    parts += [f"config groups set {'the other ' if names else ''}{groups}, which Provenance lists"] if groups else []
    return f"{len(given) + groups} keys differ from their defaults{': ' if parts else ''}{'; '.join(parts)}."
