"""The data of pages that compare runs: two runs side by side, and the points of a sweep."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mrl.tracking.report.answers import (
    COMPONENT_TEXTS,
    Answer,
    first_and_last_mean,
    found_problems,
    problems,
    spent_shares,
    time_text,
)
from mrl.tracking.report.charts import describe, overlaid_charts
from mrl.tracking.report.page import number
from mrl.tracking.report.provenance import settings
from mrl.tracking.report.recorded_run import RecordedRun, Sample

MAX_PAIRS = 200  # prompts whose samples are shown side by side
KEYS_WITHOUT_EFFECT = ("run.dir", "run.name", "tracking.")  # beginnings of keys that do not change what a run computes


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
        "charts": overlaid_charts(runs, labels),
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
    rows = [["commit", str(first.start.get("commit") or ""), str(second.start.get("commit") or "")]]
    one, two = first.start.get("packages") or {}, second.start.get("packages") or {}
    rows += [[name, one.get(name, ""), two.get(name, "")] for name in sorted({**one, **two})]
    return [row for row in rows if row[1] != row[2]]


def metric_differences(first: RecordedRun, second: RecordedRun) -> tuple[int, list[list[Any]]]:
    """Return (last step that both runs have, [metric, first, second, difference, unit, meaning] at this step)."""
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
    """Return {prompt, samples of the first run, samples of the second run} for each prompt of which both runs kept samples.

    The prompt that the first run sampled last comes first.
    """
    one, two = _by_prompt(first), _by_prompt(second)
    shared = sorted(one.keys() & two.keys(), key=lambda prompt: -max(each["step"] for each in one[prompt]))
    return [dict(prompt=prompt, first=one[prompt][-4:], second=two[prompt][-4:]) for prompt in shared[:MAX_PAIRS]]


def _by_prompt(run: RecordedRun) -> dict[str, list[Sample]]:
    found = defaultdict(list)
    for step, samples in run.samples:
        for sample in samples:
            found[str(sample.get("prompt", ""))].append(
                dict(step=step, response=sample.get("response", ""), reward=sample.get("reward"))
            )
    return found


def _pair_answers(
    runs: Sequence[RecordedRun], labels: Sequence[str], differences: Sequence[Sequence[str]], step: int
) -> list[Answer]:
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
        Answer("Does one of them have a problem?", _problem_text(runs, labels), "", "learning"),
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
    seconds = [list(run.series("time/step_s").values()) for run in runs]
    if not all(seconds):
        return "Not recorded: one of the runs has no time/step_s."
    medians = [float(np.median(each)) for each in seconds]
    quick = int(medians[1] < medians[0])
    largest = [
        f" In {labels[quick]}, the largest part of a step is {COMPONENT_TEXTS[part]}, {share:.0%}."
        for part, share in spent_shares(runs[quick]).items()
    ]
    return (
        f"{labels[quick]}: a step takes {number(medians[quick])} s, {number(medians[1 - quick])} s in the other run (medians)."
        + "".join(largest[:1])
    )


def _problem_text(runs: Sequence[RecordedRun], labels: Sequence[str]) -> str:
    found = [
        f"{label}: {text}"
        for run, label in zip(runs, labels, strict=True)
        for text in [*problems(run), *([run.error] if run.error else [])][:2]
    ]
    return " ".join(found) or "The health check reports nothing for either run."


def _software_text(first: RecordedRun, second: RecordedRun) -> str:
    if not (first.start and second.start):
        return "Not recorded: one of the folders has no starts.jsonl."
    rows = _package_differences(first, second)
    return (
        f"No: {'; '.join(_version_texts(rows[:5]))}{f'; and {len(rows) - 5} more' if len(rows) > 5 else ''}."
        if rows
        else "Yes: the commit and all packages are the same."
    )


def _version_texts(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"{name} {one or 'absent'} in the first run, {two or 'absent'} in the second" for name, one, two in rows]


# A sweep.


@dataclass(frozen=True)
class SweepPoint:
    """One point of a sweep."""

    run: RecordedRun | None  # None if the point has not started
    overrides: dict[str, str]
    state: str
    value: float | None  # final value of the metric that ranks the points
    steps: int
    reason: str  # why the point failed
    command: str  # trains the point again


def sweep_data(title: str, metric: str, maximize: bool, points: Sequence[SweepPoint]) -> dict[str, Any]:
    """Return the data of the page of a sweep."""
    keys = list(dict.fromkeys(key for point in points for key in point.overrides))
    labels = [
        f"point {n} ({' '.join(f'{key}={value}' for key, value in point.overrides.items())})"
        for n, point in enumerate(points)
    ]
    started = [(point.run, label) for point, label in zip(points, labels, strict=True) if point.run]
    matters = effects(points, keys)
    done = [n for n, point in enumerate(points) if point.value is not None and point.state == "done"]
    best = (max if maximize else min)(done, key=lambda n: points[n].value or 0.0, default=None)
    return {
        "kind": "sweep",
        "title": f"Sweep {title}",
        "subtitle": f"{len(points)} points, {metric}, {'larger' if maximize else 'smaller'} is better",
        "written": time.time(),
        "labels": [label for _, label in started],
        "answers": [asdict(answer) for answer in _sweep_answers(points, labels, metric, best, matters)],
        "charts": overlaid_charts([run for run, _ in started], [label for _, label in started]),
        "keys": keys,
        "metric": metric,
        "best": best,
        "points": [
            dict(
                values=[p.overrides.get(key, "") for key in keys],
                state=p.state,
                steps=p.steps,
                value=p.value,
                reason=p.reason,
            )
            for p in points
        ],
        "effects": matters,
    }


def effects(points: Sequence[SweepPoint], keys: Sequence[str]) -> list[tuple[str, float]]:
    """Return (key, fraction of the variance of the results that the key explains), largest first.

    The fraction is eta squared of each key alone. Points without a finite result do not count.
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
    matters: Sequence[tuple[str, float]],
) -> list[Answer]:
    failed = [
        f"{label}: {point.reason}" for point, label in zip(points, labels, strict=True) if point.state == "failed"
    ]
    measured = _measured(points)
    found = "No finished point has a result yet."
    again = "Wait for the points, or run the sweep's command again: it runs the points that are missing."
    if best is not None:
        found = f"P{labels[best][1:]}, with {metric} {number(points[best].value, 4)}."
        again = points[best].command
    spread = ", ".join(f"{key} explains {share:.0%}" for key, share in matters)
    every = f" of the variance of the results of {len(measured)} points." if matters else ""
    single = (
        " With as many values as points, a key explains everything by construction."
        if any(len({point.overrides.get(key, "") for point in measured}) == len(measured) for key, _ in matters)
        else ""
    )
    return [
        Answer("Which point is the best?", found, "good" if best is not None else "", "points"),
        Answer("Why is it the best?", _reasons_text(points, labels, best), "", "learning"),
        Answer(
            "Which key changes the result most?",
            f"{spread}{every}{single}" if matters else _no_effect_text(measured),
            "",
            "parallel",
        ),
        Answer("How much better is the best point?", _margin_text(points, best), "", "learning"),
        Answer("Did a point fail?", "; ".join(failed) or "No point failed.", "bad" if failed else "good", "points"),
        Answer("How much of the sweep is done?", _states_text(points), "", "points"),
        Answer("How do I train the best point again?", again, "", "points"),
    ]


def _no_effect_text(measured: Sequence[SweepPoint]) -> str:
    if len(measured) > 1 and len({point.value for point in measured}) == 1:
        return "None: all points have the same result."
    return "Not recorded: fewer than two points with different values have a result."


def _reasons_text(points: Sequence[SweepPoint], labels: Sequence[str], best: int | None) -> str:
    """Say how the mean reward of each point changed, the best point first, and name the first problem of each point."""
    order = sorted(range(len(points)), key=lambda n: n != best)
    parts = []
    for n in order:
        run = points[n].run
        values = list(run.series("reward/mean").values()) if run else []
        if run and len(values) > 1:
            before, after, _, _ = first_and_last_mean(values)
            change = f"went from {number(before)} to {number(after)}"
            if number(before) == number(after):
                change = f"stayed at {number(after)}"
            trouble = "".join(f", with the problem “{name}” {where}" for name, where, _ in found_problems(run)[:1])
            parts.append(f"The mean reward of {labels[n]} {change}{trouble}.")
    if best is None or not parts:
        return "Not recorded: no finished point has a result and two steps with rewards."
    return " ".join(parts)


def _margin_text(points: Sequence[SweepPoint], best: int | None) -> str:
    others = [p.value for n, p in enumerate(points) if n != best and p.value is not None and p.state == "done"]
    if best is None or not others:
        return "Not recorded: a comparison needs two finished points with results."
    value, run = points[best].value or 0.0, points[best].run
    nearest = min(others, key=lambda each: abs(each - value))
    error = (
        first_and_last_mean(list(run.series("reward/mean").values()))[2]
        if run and len(run.series("reward/mean")) > 1
        else math.nan
    )
    noise = (
        f"; the standard error of the best point's mean reward is about {number(error / math.sqrt(2), 2)}"
        if math.isfinite(error)
        else ""
    )
    return f"By {number(abs(value - nearest), 2)}: the nearest other result of a finished point is {number(nearest, 4)}{noise}."


def _states_text(points: Sequence[SweepPoint]) -> str:
    """Return how many points are in each state."""
    counts = {state: sum(p.state == state for p in points) for state in ("done", "failed", "running", "waiting")}
    return f"Of {len(points)} points: {', '.join(f'{count} {state}' for state, count in counts.items() if count)}."
