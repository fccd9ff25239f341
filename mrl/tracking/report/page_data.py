"""The data of the pages of `mrl report`: the page of one run, two runs side by side, and the points of a sweep."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mrl.tracking.report.answers import (
    STANDARD_ERRORS_OF_A_CLEAR_CHANGE,
    Answer,
    answers,
    first_and_last_mean,
    found_problems,
    health,
    problems,
)
from mrl.tracking.report.charts import (
    COMPONENT_TEXTS,
    component_shares,
    describe,
    distributions,
    learning_charts,
    mean_component_times,
    mean_step_s,
    metric_rows,
    overlaid_charts,
    time_chart,
    time_sentences,
    time_text,
)
from mrl.tracking.report.page import number, samples_budget
from mrl.tracking.report.provenance import provenance, settings
from mrl.tracking.report.recorded_run import RecordedRun, Sample
from mrl.tracking.report.sample_table import sample_table
from mrl.tracking.timeline import RankWork, percent


def run_data(run: RecordedRun, reload_every_s: int = 0) -> dict[str, Any]:
    """Return the data of the page of a run. A browser reloads the page every `reload_every_s` seconds; 0: never."""
    data: dict[str, Any] = {
        "kind": "run",
        "title": run.name,
        "subtitle": _subtitle(run),
        "written": time.time(),
        "reload_every_s": reload_every_s,
        "health": health(run),
        "answers": answers(run),
        "charts": learning_charts(run),
        "resumes": run.resumed_steps,
        "time": time_chart(run),
        "sentences": time_sentences(run),
        "components": mean_component_times(run),
        "ranks": [_rank_values(rank) for rank in run.ranks],
        "timeline": run.timeline,
        "distributions": distributions(run),
        "metrics": metric_rows(run),
        "provenance": provenance(run),
        "damaged": run.damaged,
    }
    return data | {"samples": sample_table(run, samples_budget(data))}


def _rank_values(rank: RankWork) -> dict[str, Any]:
    """Return the name and the tokens of a rank, and for how many seconds it computed, reduced gradients, and did the rest."""
    seconds = {"computing_s": rank.computing_s, "reducing_s": rank.reducing_s, "other_s": rank.other_s}
    return {"process": rank.timeline.process, "tokens": rank.tokens} | seconds


def _subtitle(run: RecordedRun) -> str:
    model = str(run.setting("model.path", "")).rstrip("/").rpartition("/")[2]
    words = [
        f"{len(run.metrics)} step{'' if len(run.metrics) == 1 else 's'}",
        f"model {model}" if model not in ("", "model") else "",
        f"outcome: {run.outcome}",
    ]
    return " · ".join(word for word in words if word)


MAX_PAIRS = 200  # largest number of prompts whose samples are shown side by side
KEYS_WITHOUT_EFFECT = ("run.dir", "run.name", "tracking.")  # prefixes of keys that do not change the results of a run


# Two runs.


def pair_data(first: RecordedRun, second: RecordedRun) -> dict[str, Any]:
    """Return the data of the page that shows two runs side by side."""
    runs, labels = (first, second), _labels(first, second)
    differences = config_differences(first, second)
    step, rows = metric_differences(first, second)
    return {
        "kind": "pair",
        "title": f"{labels[0]} and {labels[1]}",
        "subtitle": f"{len(first.metrics)} and {len(second.metrics)} steps",
        "written": time.time(),
        "labels": labels,
        "answers": [asdict(answer) for answer in _pair_answers(runs, labels, differences, step)],
        "charts": overlaid_charts(dict(enumerate(runs)), labels),
        "differences": differences,
        "packages": _package_differences(first, second),
        "step": step,
        "metrics": rows,
        "pairs": sample_pairs(first, second),
    }


def _labels(first: RecordedRun, second: RecordedRun) -> list[str]:
    if first.name != second.name:
        return [first.name, second.name]
    return [str(run.folder) for run in (first, second)]


def config_differences(first: RecordedRun, second: RecordedRun) -> list[list[str]]:
    """Return [key, value in the first run, value in the second run] for each key that differs.

    Keys that do not change the results (KEYS_WITHOUT_EFFECT) come last.
    """
    one, two = settings(first), settings(second)
    keys = [key for key in {**one, **two} if one.get(key, "") != two.get(key, "")]
    keys.sort(key=lambda key: (key.startswith(KEYS_WITHOUT_EFFECT), key))
    return [[key, one.get(key, ""), two.get(key, "")] for key in keys]


def _package_differences(first: RecordedRun, second: RecordedRun) -> list[list[str]]:
    """Return ["commit" or package, value in the first run, value in the second run] for each value that differs."""
    rows = [["commit", *(run.start.commit or "" if run.start else "" for run in (first, second))]]
    one, two = first.packages, second.packages
    rows += [[name, one.get(name, ""), two.get(name, "")] for name in sorted({**one, **two})]
    return [row for row in rows if row[1] != row[2]]


def metric_differences(first: RecordedRun, second: RecordedRun) -> tuple[int, list[list[Any]]]:
    """Return (last step that both runs have, [metric, first, second, difference, unit, meaning] of each metric at this step)."""
    common = sorted(first.metrics.keys() & second.metrics.keys())
    if not common:
        return 0, []
    one, two = first.metrics[common[-1]], second.metrics[common[-1]]
    rows = []
    for name in sorted(one.keys() & two.keys()):
        meaning, unit, _ = describe(name)
        rows.append([name, one[name], two[name], two[name] - one[name], unit, meaning])
    return common[-1], rows


def sample_pairs(first: RecordedRun, second: RecordedRun) -> list[dict[str, Any]]:
    """Return {prompt, expected answer, last four samples of each run} for each prompt for which both runs kept samples.

    The result has at most MAX_PAIRS prompts, sorted by the last step in which the first run sampled them, newest first.
    """
    one, two = _by_prompt(first), _by_prompt(second)
    shared = sorted(one.keys() & two.keys(), key=lambda prompt: -max(each["step"] for each in one[prompt]))
    return [
        dict(
            prompt=prompt,
            ground_truth=one[prompt][-1]["ground_truth"],
            first=one[prompt][-4:],
            second=two[prompt][-4:],
        )
        for prompt in shared[:MAX_PAIRS]
    ]


def _by_prompt(run: RecordedRun) -> dict[str, list[Sample]]:
    found = defaultdict(list)
    for step, samples in run.samples:
        for sample in samples:
            found[str(sample.get("prompt", ""))].append(
                dict(step=step, response=sample.get("response", ""), reward=sample.get("reward"))
                | {"ground_truth": sample.get("ground_truth")}
            )
    return found


def _pair_answers(
    runs: Sequence[RecordedRun], labels: Sequence[str], differences: Sequence[Sequence[str]], step: int
) -> list[Answer]:
    """Return the questions about two runs with their answers.

    `differences`: see `config_differences`. `step`: last step that both runs finished; 0: there is none. The arguments of each
    `Answer` are question, text, state, and section of the page with the details.
    """
    real = [row for row in differences if not row[0].startswith(KEYS_WITHOUT_EFFECT)]
    changed = "; ".join(f"{key} from {one or 'nothing'} to {two or 'nothing'}" for key, one, two in real[:5])
    more = f"; and {len(real) - 5} more keys" if len(real) > 5 else ""
    what = f"{changed}{more}." if real else "The configs are equal, except for names, folders and tracking."
    if any(not run.config for run in runs):
        what = "Not recorded: one of the folders has no run.json."
    return [
        Answer("What changed between these runs?", what, "", "differences"),
        Answer("Which run has the higher reward?", _better_text(runs, labels), "", "learning"),
        Answer("Which run is faster?", _faster_text(runs, labels), "", "metrics"),
        Answer(
            "Where does each run spend its time?",
            " ".join(f"{label}: {time_text(run)}" for run, label in zip(runs, labels, strict=True)),
            "",
            "metrics",
        ),
        Answer("Does one of the runs have a problem?", _problem_text(runs, labels), "", "learning"),
        Answer(
            "At which step does the table compare the metrics?",
            f"Step {step}, the last step that both runs finished." if step else "Not recorded: the runs share no step.",
            "",
            "metrics",
        ),
        Answer("Was the software the same?", _software_text(*runs), "", "differences"),
    ]


def _better_text(runs: Sequence[RecordedRun], labels: Sequence[str]) -> str:
    common = sorted(set(runs[0].series("reward/mean")) & set(runs[1].series("reward/mean")))
    if not common:
        return "Not recorded: the runs share no step with a reward."
    last = common[-10:]
    values = [np.array([run.series("reward/mean")[step] for step in last]) for run in runs]
    means = [float(each.mean()) for each in values]
    where = f"steps {last[0]} to {last[-1]}: {number(means[0])} for {labels[0]}, {number(means[1])} for {labels[1]}"
    error = math.sqrt(sum(np.var(each, ddof=1) for each in values) / len(last)) if len(last) > 1 else math.nan
    if not abs(means[1] - means[0]) > 2 * error:
        return f"No clear difference over the {where}."
    return f"{labels[int(means[1] > means[0])]}, over the {where}."


def _faster_text(runs: Sequence[RecordedRun], labels: Sequence[str]) -> str:
    seconds = [mean_step_s(run) for run in runs]
    if not all(seconds):
        return "Not recorded: one of the runs has no time/step_s."
    quick = int(seconds[1] < seconds[0])
    largest = [
        f" In {labels[quick]}, the largest part of a step is {COMPONENT_TEXTS[part]}, {percent(share)}."
        for part, share in component_shares(runs[quick]).items()
    ]
    return (
        f"{labels[quick]}: a step takes {number(seconds[quick])} s, {number(seconds[1 - quick])} s in the other run (means, "
        "without evaluation and checkpoints)." + "".join(largest[:1])
    )


def _problem_text(runs: Sequence[RecordedRun], labels: Sequence[str]) -> str:
    found = [
        f"{label}: {text}"
        for run, label in zip(runs, labels, strict=True)
        for text in [*problems(run), *([run.error] if run.error else [])][:2]
    ]
    return " ".join(found) or "The health check reports nothing for either run."


def _software_text(first: RecordedRun, second: RecordedRun) -> str:
    starts = [run.start for run in (first, second) if run.start]
    if len(starts) < 2:
        return "Not recorded: one of the folders has no starts.jsonl."
    has_commits = all(start.commit for start in starts)
    rows = [row for row in _package_differences(first, second) if has_commits or row[0] != "commit"]
    if rows:
        more = f"; and {len(rows) - 5} more" if len(rows) > 5 else ""
        return f"No: {'; '.join(_version_texts(rows[:5]))}{more}."
    if not has_commits:
        return "Unknown: at least one of the runs has no recorded commit. The recorded packages are the same."
    if any(start.changed_files != 0 for start in starts):
        return "Unknown: the commit and the recorded packages are the same, but there were changes without a commit."
    return "Yes: the commit and the recorded packages are the same."


def _version_texts(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"{name} {one or 'absent'} in the first run, {two or 'absent'} in the second" for name, one, two in rows]


# A sweep.


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep."""

    run: RecordedRun | None  # None if the point has not started
    overrides: dict[str, str]  # config key -> value
    state: str  # done, failed, running or waiting
    value: float | None  # result of the point, by which points are ranked (see `_result_text`)
    steps: int  # number of finished steps
    reason: str  # why the point failed
    command: str  # trains the point again


def sweep_data(
    title: str, metric: str, maximize: bool, points: Sequence[SweepPoint], metric_steps: int
) -> dict[str, Any]:
    """Return the data of the page of a sweep. `metric_steps`: number of last steps over which a result is averaged."""
    keys = list(dict.fromkeys(key for point in points for key in point.overrides))
    labels = [
        f"point {n} ({' '.join(f'{key}={value}' for key, value in point.overrides.items())})"
        for n, point in enumerate(points)
    ]
    runs = {n: point.run for n, point in enumerate(points) if point.run}
    explained_variance = explain_variance(points, keys)
    done = [n for n, point in enumerate(points) if point.value is not None and point.state == "done"]
    better = "larger" if maximize else "smaller"
    best = (max if maximize else min)(done, key=lambda n: points[n].value or 0.0, default=None)
    return {
        "kind": "sweep",
        "title": f"Sweep {title}",
        "subtitle": f"{len(points)} points; result: {_result_text(metric, metric_steps)}; {better} is better",
        "written": time.time(),
        "labels": labels,
        "answers": [
            asdict(answer) for answer in _sweep_answers(points, labels, metric, best, explained_variance, metric_steps)
        ],
        "charts": overlaid_charts(runs, labels),
        "keys": keys,
        "metric": metric,
        "best": best,
        "points": [
            dict(
                values=[p.overrides.get(key, "") for key in keys],
                state=p.state,
                steps=p.steps,
                value=p.value,
                reason=p.reason or _trouble_text(p),
            )
            for p in points
        ],
        "explained_variance": explained_variance,
    }


def _result_text(metric: str, metric_steps: int) -> str:
    """Say how the result of a point is computed from the metric."""
    if metric.startswith("eval/"):
        return f"{metric} of the last evaluation"
    return f"mean of {metric} over the last {metric_steps} steps"


def _trouble_text(point: SweepPoint) -> str:
    """Return the first problem that the health check finds in the run of a point; "" if it finds none."""
    found = found_problems(point.run) if point.run else []
    return "; ".join(f"problem “{name}” {where}" for name, where, _ in found[:1])


def explain_variance(points: Sequence[SweepPoint], keys: Sequence[str]) -> list[tuple[str, float]]:
    """Return (key, fraction of the variance of the results that the key explains), largest first.

    The fraction is eta squared, computed for each key alone. Points without a finite result do not count.
    """
    measured = _measured(points)
    results = np.array([point.value for point in measured], dtype=float)
    total = float(((results - results.mean()) ** 2).sum()) if len(results) > 1 else 0.0
    found = []
    for key in keys:
        groups = defaultdict(list)
        for point in measured:
            groups[point.overrides.get(key, "")].append(point.value)
        if total and len(groups) > 1:
            between = sum(len(group) * (np.mean(group) - results.mean()) ** 2 for group in groups.values())
            found.append((key, float(between / total)))
    return sorted(found, key=lambda each: -each[1])


def _measured(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Return the points with a finite result."""
    return [point for point in points if point.value is not None and math.isfinite(point.value)]


def _sweep_answers(
    points: Sequence[SweepPoint],
    labels: Sequence[str],
    metric: str,
    best: int | None,
    explained_variance: Sequence[tuple[str, float]],
    metric_steps: int,
) -> list[Answer]:
    """Return the questions about a sweep with their answers.

    `best`: index of the best point. `explained_variance`: result of `explain_variance`.
    """
    found = "No finished point has a result yet."
    again = "Wait for the points, or run the sweep's command again: it runs the points that are missing."
    if best is not None:
        result = _result_text(metric, metric_steps)
        found = f"P{labels[best][1:]}: the {result} is {number(points[best].value, 4)}."
        again = points[best].command
    margin = _margin_text(points, best, metric, metric_steps)
    return [
        Answer("Which point is the best?", found, "good" if best is not None else "", "points"),
        Answer("Why is this point the best?", _reasons_text(points, labels, best), "", "learning"),
        Answer("Which key changes the result most?", _variance_text(points, explained_variance), "", "parallel"),
        Answer("How much better is the best point?", margin, "", "learning"),
        Answer("Did a point fail or have a problem?", *_points_failed(points, labels), "points"),
        Answer("How much of the sweep is done?", _states_text(points), "", "points"),
        Answer("How do I train the best point again?", again, "", "points"),
    ]


def _points_failed(points: Sequence[SweepPoint], labels: Sequence[str]) -> tuple[str, str]:
    named = list(zip(points, labels, strict=True))
    failed = [f"{label} failed: {point.reason}" for point, label in named if point.state == "failed"]
    troubled = [
        f"{label} has the {text}"
        for point, label in named
        if point.state != "failed" and (text := _trouble_text(point))
    ]
    text = "; ".join([*failed, *troubled])
    if text:
        return f"{'' if failed else 'No point failed, but '}{text}.", "bad"
    return "No point failed, and the health check found no problem.", "good"


def _variance_text(points: Sequence[SweepPoint], explained_variance: Sequence[tuple[str, float]]) -> str:
    measured = _measured(points)
    if not explained_variance:
        return _no_effect_text(measured)
    spread = ", ".join(f"{key} explains {percent(share)}" for key, share in explained_variance)
    is_single = any(
        len({point.overrides.get(key, "") for point in measured}) == len(measured) for key, _ in explained_variance
    )
    single = " With as many values as points, a key explains everything by construction." if is_single else ""
    return f"{spread} of the variance of the results of {len(measured)} points.{single}"


def _no_effect_text(measured: Sequence[SweepPoint]) -> str:
    if len(measured) > 1 and len({point.value for point in measured}) == 1:
        return "None: all points have the same result."
    return "Not recorded: fewer than two points with different values have a result."


def _reasons_text(points: Sequence[SweepPoint], labels: Sequence[str], best: int | None) -> str:
    """Say how the mean reward of each point changed, the best point first, and name the first problem of each point."""
    order = sorted(range(len(points)), key=lambda n: n != best)
    parts, counts = [], set()
    for n in order:
        run = points[n].run
        values = list(run.series("reward/mean").values()) if run else []
        if run and len(values) > 1:
            before, after, _, count = first_and_last_mean(values)
            counts.add(count)
            change = f"went from {number(before)} to {number(after)}"
            if number(before) == number(after):
                change = f"stayed at {number(after)}"
            trouble = f", with the {text}" if (text := _trouble_text(points[n])) else ""
            parts.append(f"The mean reward of {labels[n]} {change}{trouble}.")
    if not parts:
        return "Not recorded: no point has two steps with rewards."
    low, high = min(counts), max(counts)
    steps = "the first and of the last step" if high == 1 else f"the first and of the last {high} steps"
    if low != high:
        steps = f"the first and of the last {low} to {high} steps"
    return f"{' '.join(parts)} The values are means of {steps}."


def _margin_text(points: Sequence[SweepPoint], best: int | None, metric: str, metric_steps: int) -> str:
    others = [p for n, p in enumerate(points) if n != best and p.value is not None and p.state == "done"]
    if best is None or not others:
        return "Not recorded: a comparison needs two finished points with results."
    value = points[best].value or 0.0
    nearest = min(others, key=lambda each: abs((each.value or 0.0) - value))
    lead = abs(value - (nearest.value or 0.0))
    error = _standard_error([points[best], nearest], metric, metric_steps)
    verdict = "The standard error is unknown, so the lead can be noise."
    if math.isfinite(error):
        factor = STANDARD_ERRORS_OF_A_CLEAR_CHANGE
        verdict = (
            f"The lead is {'clear: it is more' if lead > factor * error else 'within the noise: it is not more'} than twice "
            f"the standard error of the difference, {number(error, 2)}."
        )
    return (
        f"By {number(lead, 2)}: the nearest other result of a finished point is {number(nearest.value, 4)}. {verdict}"
    )


def _standard_error(points: Sequence[SweepPoint], metric: str, metric_steps: int) -> float:
    """Return the standard error of the difference between the results of two points (means of the metric); NaN if unknown."""
    values = [list(point.run.series(metric).values())[-metric_steps:] if point.run else [] for point in points]
    if metric.startswith("eval/") or any(len(each) < 2 for each in values):
        return math.nan
    return math.sqrt(sum(np.var(each, ddof=1) / len(each) for each in values))


def _states_text(points: Sequence[SweepPoint]) -> str:
    """Return how many points are in each state."""
    counts = {state: sum(p.state == state for p in points) for state in ("done", "failed", "running", "waiting")}
    return f"Of {len(points)} points: {', '.join(f'{count} {state}' for state, count in counts.items() if count)}."
