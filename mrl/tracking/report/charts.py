"""Learning curves, times and distributions of a run as JSON values, with few enough points for a page."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mrl.core import metrics as declared
from mrl.core.metric_families import name_part
from mrl.tracking.report.page import number
from mrl.tracking.report.recorded_run import RecordedRun
from mrl.tracking.timeline import BETWEEN_STEPS, between_steps_text, percent

CHARTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("Reward", {"reward/mean": "mean reward"}),
    ("Parts of the reward", {r"reward/(?!mean|std)\w+_mean": ""}),
    ("Reward by data source", {r"reward/\w+/mean": ""}),
    ("Held-out reward", {r"eval/(\w+/)?reward\w*": ""}),
    ("Held-out accuracy", {r"eval/(\w+/)?accuracy\w*": ""}),
    ("Held-out pass@k and maj@k", {r"eval/\w+/(pass|maj)_at_\d+": ""}),
    ("Response length", {"rollout/response_length_mean_tokens": "mean length"}),
    (
        "Truncated and failed responses",
        {"rollout/truncated_fraction": "truncated", "reward/failed_fraction": "not scored"},
    ),
    (
        "Groups without a signal",
        {"reward/uniform_groups_fraction": "equal rewards", "batch/zero_advantage_fraction": "advantages of 0"},
    ),
    ("Entropy", {"policy/entropy_mean": "mean entropy"}),
    ("KL to the reference", {"policy/kl_ref": "in the loss", "policy/kl_reward": "in the reward"}),
    ("Gradient norm", {"optim/grad_norm": "actor", "critic/grad_norm": "critic"}),
    ("Mismatch of trainer and engine", {"mismatch/logprob_abs_mean": "mean", "mismatch/logprob_abs_max": "largest"}),
    ("Clipped tokens", {"loss/clip_fraction": "clipped", "loss/dual_clip_fraction": "dual clip"}),
    ("Staleness", {"rollout/staleness_mean": "mean", "rollout/staleness_max": "largest"}),
    ("Turns and tool calls", {"rollout/turns_mean": "turns", "rollout/tool_calls_mean": "tool calls"}),
    ("Failed tool calls", {"rollout/tool_errors_fraction": "failed"}),
    ("Critic", {"critic/explained_variance": "explained variance"}),
    ("Supervised loss", {"loss/sft": "loss", "loss/sft_held_out": "held-out"}),
    ("Preferences in the right order", {"preference/accuracy": "accuracy", "preference/held_out_accuracy": "held-out"}),
    ("Throughput", {"throughput/tokens_per_s": "response tokens"}),
    ("Time of a step", {"time/step_s": "step"}),
    ("Metrics of plug-ins", {r"own/.*": ""}),
)
"""(title, {regular expression of metric names: label}) of each chart. If a label is empty, the metric's name gives the label."""
MAX_POINTS = 600  # `thinned` reduces a curve with more points than this to at most MAX_POINTS + 2 points
MAX_COLUMNS = 60  # largest number of columns of a distribution; a column is a group of consecutive steps
NUM_BINS = 14  # largest number of rows of a distribution
GOOD_VERBS = ("rises", "falls", "changes", "follows", "has")  # first words of Metric.good that are verbs
INTERVAL_Z = 1.96  # normal quantile of a 95 % interval


def learning_charts(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the charts of one run. The result omits charts without values."""
    charts = []
    for title, chosen in _recorded_charts([run]):
        series = [one for name, label in chosen if (one := _series(run, name, label))["points"]]
        if series:
            charts.append(_chart(title, series[0]["name"], series) | {"meaning": _meanings(series)})
    return charts


def overlaid_charts(runs: Mapping[int, RecordedRun], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return at most two charts for each entry of CHARTS, one for each of its first two recorded metrics.

    A chart has one curve for each run. `runs`: n -> a run; labels[n] is its label, and n selects its color.
    """
    charts = []
    for title, chosen in _recorded_charts(list(runs.values())):
        for name, label in chosen[:2]:
            series = [_series(run, name, labels[n]) | {"run": n} for n, run in runs.items()]
            if any(one["points"] for one in series):
                charts.append(_chart(f"{title}: {label}" if len(chosen) > 1 else title, name, series))
    return charts


def _recorded_charts(runs: Sequence[RecordedRun]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (title, [(metric, its label)]) for each chart for which at least one run recorded metrics."""
    names = sorted(
        {name for run in runs for each in (run.metrics, run.evaluations) for v in each.values() for name in v}
    )
    found = [
        (
            title,
            [(n, label or _label(n)) for pattern, label in patterns.items() for n in names if re.fullmatch(pattern, n)],
        )
        for title, patterns in CHARTS
    ]
    return [(title, chosen) for title, chosen in found if chosen]


def _chart(title: str, name: str, series: list[dict[str, Any]]) -> dict[str, Any]:
    meaning, unit, good = describe(name)
    subject = "the value" if len({one["name"] for one in series}) == 1 else f"“{series[0]['label']}”"
    return {"title": title, "unit": unit, "meaning": meaning, "good": _good_sentence(subject, good), "series": series}


def _good_sentence(subject: str, good: str) -> str:
    """Return a sentence that says what `subject` does in a healthy run; "" if `good` is empty.

    If `good` refers to another metric or place ("see ..."), the sentence is this reference.
    """
    if good.startswith("see "):
        return f"{good[:1].upper()}{good[1:]}."
    verb = "" if good.partition(" ")[0] in GOOD_VERBS else "is "
    return f"In a healthy run, {subject} {verb}{good}." if good else ""


def _meanings(series: Sequence[dict[str, Any]]) -> str:
    """Return what the curves of a chart mean."""
    texts = {one["label"]: describe(one["name"])[0] for one in series}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{label}: {text[:1].lower()}{text[1:]}" for label, text in texts.items() if text)


def describe(name: str) -> tuple[str, str, str]:
    """Return (meaning, unit, what a good value looks like) of a metric; empty texts if it is not declared."""
    try:
        metric = declared.find(name)
    except ValueError:
        return "", "", ""
    return metric.meaning, metric.unit, str(getattr(metric, "good", ""))


def _label(name: str) -> str:
    """Make a label from a metric's name: eval/reward_greedy -> greedy, reward/correct_mean -> correct, reward/a/mean -> a."""
    words = name.partition("/")[2].removeprefix("reward_").removesuffix("_mean").removesuffix("/mean")
    return re.sub("[_/]", " ", words) or name


def _series(run: RecordedRun, name: str, label: str) -> dict[str, Any]:
    points = thinned(sorted(run.series(name).items()))
    rounded = [[step, _rounded(value)] for step, value in points]
    rows = _evaluated_rows(run, name)
    if rows is not None and all(0 <= value <= 1 for _, value in points):
        rounded = [[step, _rounded(value), *map(_rounded, interval(value, rows))] for step, value in points]
    return {"name": name, "label": label, "points": rounded}


def _evaluated_rows(run: RecordedRun, name: str) -> int | None:
    """Return the largest number of prompts in the held-out set of a metric eval/*; None if the config sets no limit.

    For a metric of all held-out sets together, returns trainer.eval_rows. For a metric of another kind, returns None.
    """
    if not name.startswith("eval/"):
        return None
    sets = run.setting("data.test_sets", {})
    settings = next((node for held_out, node in sets.items() if name.startswith(f"eval/{name_part(held_out)}/")), {})
    rows = settings.get("rows") if isinstance(settings, dict) else None
    rows = run.setting("trainer.eval_rows") if rows is None else rows
    return rows if isinstance(rows, int) else None


def interval(mean: float, rows: int) -> tuple[float, float]:
    """Return the Wilson interval (95 %) of a mean of `rows` rewards between 0 and 1.

    The formula assumes that each reward is either 0 or 1. At the same mean, rewards such as 0.5 vary less, so the interval is
    wider than necessary for them.
    """
    z2 = INTERVAL_Z**2
    center = (mean + z2 / (2 * rows)) / (1 + z2 / rows)
    half = INTERVAL_Z / (1 + z2 / rows) * math.sqrt(mean * (1 - mean) / rows + z2 / (4 * rows**2))
    return max(0.0, center - half), min(1.0, center + half)


def thinned(points: Sequence[tuple[int, float]], most: int = MAX_POINTS) -> list[tuple[int, float]]:
    """Return at most `most` + 2 points: the first, the last, and the lowest and highest of each of `most // 2` intervals."""
    if len(points) <= most:
        return list(points)
    kept = {points[0], points[-1]}
    for part in np.array_split(np.arange(len(points)), most // 2):
        inside = [points[i] for i in part]
        kept |= {min(inside, key=lambda point: point[1]), max(inside, key=lambda point: point[1])}
    return sorted(kept)


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


COMPONENT_TEXTS = {
    "engine": "sampling in the engines",
    "megatron": "Megatron's passes and optimizer",
    "critic": "the critic",
    "sync_engine": "loading weights in the engines",
    "reward": "rewards",
    "controller": "the controller",
}
"""Component -> words for it. The component is a part of the name of a metric: component_time/<component>_s."""


def mean_step_s(run: RecordedRun) -> float:
    """Return the mean duration of a step, without evaluation and checkpoints; 0 if no step has time/step_s."""
    return _mean(run.series("time/step_s").values())


def component_shares(run: RecordedRun) -> dict[str, float]:
    """Return component -> its fraction of the total time of all steps, from component_time/*. The largest comes first."""
    total = sum(run.series("time/step_s").values())
    seconds = {part: sum(run.series(f"component_time/{part}_s").values()) for part in COMPONENT_TEXTS}
    shares = {part: value / total for part, value in seconds.items() if value} if total else {}
    return dict(sorted(shares.items(), key=lambda each: -each[1]))


def mean_component_times(run: RecordedRun) -> list[tuple[str, float]]:
    """Return (component, seconds that it takes in a step on average), largest first."""
    return [(COMPONENT_TEXTS[part], share * mean_step_s(run)) for part, share in component_shares(run).items()]


def time_text(run: RecordedRun) -> str:
    """Say how long a step takes on average, and which share of this time each component takes (if 0.5 % or more)."""
    shares = component_shares(run)
    if not shares:
        return "Not recorded: no step has time/step_s and component_time/*."
    first = next(iter(shares))
    others = ", ".join(
        f"{COMPONENT_TEXTS[part]} {percent(share)}" for part, share in list(shares.items())[1:] if share >= 0.005
    )
    return (
        f"A step takes {number(mean_step_s(run))} s on average, without evaluation and checkpoints. "
        f"The largest part, {percent(shares[first])}, is {COMPONENT_TEXTS[first]}" + (f"; {others}." if others else ".")
    )


def time_sentences(run: RecordedRun) -> list[str]:
    """Return sentences about the time of a step. Without a timeline, they also say how long evaluations and checkpoints took."""
    between = {name: sum(run.series(f"time/{name}_s").values()) for name in BETWEEN_STEPS}
    return [
        text
        for text in (time_text(run), _idle_text(run), *([] if run.timeline else between_steps_text(between)))
        if text
    ]


def _idle_text(run: RecordedRun) -> str:
    """Say during which share of a step the slowest trainer rank trains. Returns "" if this share is unknown."""
    share = component_shares(run).get("megatron")
    if share is None:
        return ""
    return (
        f"The slowest trainer rank trains during {percent(share)} of a step. In the other {percent(1 - share)}, the ranks "
        "compute log-probabilities or wait. Engines on the same GPUs can use the time in which they wait."
    )


def time_chart(run: RecordedRun) -> dict[str, Any] | None:
    """Return the mean seconds of each phase, for at most MAX_COLUMNS groups of steps; None if no step has time/step_s."""
    steps = [step for step, values in run.metrics.items() if "time/step_s" in values]
    if not steps:
        return None
    names = {name for step in steps for name in run.metrics[step] if re.fullmatch(r"time/\w+_s", name)}
    names -= {"time/step_s", *(f"time/{name}_s" for name in BETWEEN_STEPS)}
    columns = np.array_split(np.array(steps), min(MAX_COLUMNS, len(steps)))
    phases = {
        name[5:-2]: [_mean(run.metrics[int(step)].get(name, 0.0) for step in column) for column in columns]
        for name in sorted(names, key=lambda name: -_mean(run.metrics[step].get(name, 0.0) for step in steps))
    }
    return {"steps": [[int(column[0]), int(column[-1])] for column in columns], "phases": phases}


def _mean(values: Iterable[float]) -> float:
    found = [value for value in values if math.isfinite(value)]
    return float(f"{sum(found) / len(found):.5g}") if found else 0.0


def distributions(run: RecordedRun) -> list[dict[str, Any]]:
    """Return how lengths and rewards are distributed in each group of steps."""
    lengths: Mapping[int, Sequence[float]] = run.lengths
    source = "all trained responses"
    if not any(lengths.values()):
        lengths, source = _sample_values(run, "num_tokens"), "the kept samples"
    found = [
        ("Response length (sampled tokens)", source, lengths),
        ("Reward", "the kept samples", _sample_values(run, "reward")),
    ]
    return [chart for title, of, values in found if (chart := _distribution(f"{title} of {of}", values))]


def _sample_values(run: RecordedRun, name: str) -> dict[int, list[float]]:
    return {
        step: [one[name] for one in samples if isinstance(one.get(name), int | float)] for step, samples in run.samples
    }


def _distribution(title: str, values: Mapping[int, Sequence[float]]) -> dict[str, Any] | None:
    steps = [step for step in values if values[step]]
    if not steps:
        return None
    columns = np.array_split(np.array(steps), min(MAX_COLUMNS, len(steps)))
    everything = np.concatenate([values[step] for step in steps])
    low, high = float(everything.min()), float(everything.max())
    edges = _edges(everything, low, high)
    counts = [np.histogram(np.concatenate([values[int(s)] for s in column]), edges)[0].tolist() for column in columns]
    return {
        "title": title,
        "steps": [[int(column[0]), int(column[-1])] for column in columns],
        "edges": [float(f"{edge:.5g}") for edge in edges],
        "counts": counts,
    }


def _edges(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return the edges of the rows: a row for each number if values are whole numbers in a small range, else NUM_BINS rows."""
    if high - low < NUM_BINS and np.all(values == np.round(values)):
        return np.arange(low - 0.5, high + 1)
    return np.linspace(low, high if high > low else low + 1, NUM_BINS + 1)


def metric_rows(run: RecordedRun) -> list[list[Any]]:
    """Return [name, first value, last value, smallest, largest, unit, meaning, text about good values] of each metric."""
    names = sorted({name for values in (*run.metrics.values(), *run.evaluations.values()) for name in values})
    rows = []
    for name in names:
        values = list(run.series(name).values())
        meaning, unit, good = describe(name)
        numbers = map(_rounded, (values[0], values[-1], min(values), max(values)))
        rows.append([name, *numbers, unit, meaning, good])
    return rows
