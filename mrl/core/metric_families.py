"""The class Metric declares a metric. FAMILIES declares metrics whose names have a variable part, such as a data source."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "max", "last"]


@dataclass(frozen=True)
class Metric:
    """Declaration of one metric."""

    unit: str  # empty for a number without unit
    meaning: str  # what the value measures, for plots and docs/reference/metrics.md
    number_format: str = ".3f"  # Python format specification of the value
    label: str = ""  # name in the progress display; if empty, mrl.core.metrics.label makes one from the metric's name
    good: str = ""  # what the values of a healthy run look like
    reduction: Reduction = "mean"  # how the values of several steps become one number, for tables of runs

    def text(self, value: float) -> str:
        """Format the value with its unit."""
        return f"{value:{self.number_format}} {self.unit}".rstrip()


def _reward_metric(meaning: str, label: str, good: str = "rises over the run") -> Metric:
    return Metric("", meaning, label=label, good=good)


def _held_out_metric(meaning: str, label: str) -> Metric:
    return Metric("", meaning, label=label, good="rises with reward/mean", reduction="last")


# Variable part of a metric's name in FAMILIES -> words for `Metric.meaning`
_OF_RESPONSES = {"reward": "mean reward of the responses", "accuracy": "fraction of correct responses"}
_HOW = {"sampled": ", sampled at temperature 1", "greedy": ", with greedy decoding"}
_OF_GROUPS = {
    "pass": "at least one of {k} responses is correct",
    "maj": "the most frequent answer of {k} responses is correct",
}
FAMILIES: dict[str, Callable[..., Metric]] = {
    r"time/([a-z][a-z_]*)_s": lambda phase: Metric(
        "s", f"wall time of the phase {phase}", ".2f", good="constant after the first step"
    ),
    r"own/(\w+)": lambda name: Metric(
        "", f"{name}, reported by a user's plug-in", good="see the documentation of the plug-in"
    ),
    r"reward/(\w+)_mean": lambda part: _reward_metric(f"mean of the reward's part {part}", part),
    r"reward/(\w+)/mean": lambda source: _reward_metric(
        f"mean reward of the responses to prompts of the data source {source}", source
    ),
    r"reward/(\w+)/(\w+)_mean": lambda source, part: _reward_metric(
        f"mean of the reward's part {part} for the data source {source}", f"{source} {part}"
    ),
    r"reward/(\w+)/failed_fraction": lambda source: _reward_metric(
        f"fraction of the responses for the data source {source} that could not be scored; their reward is 0",
        f"{source} failed",
        "0",
    ),
    r"eval/(\w+)/(reward|accuracy)": lambda held_out, quantity: _held_out_metric(
        f"{_OF_RESPONSES[quantity]} to the prompts of held-out set {held_out}", f"{held_out} {quantity}"
    ),
    r"eval/(\w+)/(reward|accuracy)_(sampled|greedy)": lambda held_out, quantity, how: _held_out_metric(
        f"{_OF_RESPONSES[quantity]} to the prompts of held-out set {held_out}{_HOW[how]}",
        f"{held_out} {how}" if quantity == "reward" else f"{held_out} {quantity} {how}",
    ),
    r"eval/(\w+)/(pass|maj)_at_(\d+)": lambda held_out, kind, k: _held_out_metric(
        f"probability that {_OF_GROUPS[kind].format(k=k)}, averaged over the prompts of held-out set {held_out}",
        f"{held_out} {kind}@{k}",
    ),
}
"""Regular expression that matches the names of a family -> function that declares the metric.

The arguments of the function are the variable parts of the name."""


def name_part(text: str) -> str:
    """Return a text, such as a data source, in the form that it has in a metric name: letters, digits and underscores."""
    return re.sub(r"\W+", "_", text)


def find_member(name: str) -> Metric | None:
    """Return the declaration of a metric of a family, or None if the name belongs to no family."""
    for pattern, declare in FAMILIES.items():
        if match := re.fullmatch(pattern, name):
            return declare(*match.groups())
    return None


def shown_evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics eval/* that are shown during a run: mean rewards, and accuracies that differ from mean rewards.

    With a reward that is 0 or 1, the accuracy equals the mean reward, and is not shown a second time.
    """
    shown = {}
    for name, value in metrics.items():
        quantity = name.rpartition("/")[2].partition("_")[0]
        if not name.startswith("eval/") or quantity not in ("reward", "accuracy"):
            continue
        if quantity == "reward" or metrics.get(name.replace("accuracy", "reward")) != value:
            shown[name] = value
    return shown
