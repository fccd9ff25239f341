"""pass@k over k, with confidence bands."""

from collections.abc import Sequence
from pathlib import Path

from mrl.evaluation.report import Summary

COLOURS = ("#4C78A8", "#E45756", "#54A24B", "#B279A2", "#F58518", "#72B7B2", "#9D755D", "#79706E")


def draw(path: Path, summaries: Sequence[Summary], *, title: str, confidence: float) -> None:
    """One line per summary, of pass@k; dashed, of maj@k. Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, summary in enumerate(summaries):
        colour = COLOURS[number % len(COLOURS)]
        for estimates, style, name in ((summary.pass_at, "o-", "pass@k"), (summary.maj_at, "s--", "maj@k")):
            ks, found = list(estimates), list(estimates.values())
            axes.plot(ks, [e.value for e in found], style, color=colour, label=f"{summary.name}, {name}", markersize=5)
            ends = [e.low or 0.0 for e in found], [1.0 if e.high is None else e.high for e in found]
            axes.fill_between(ks, *ends, color=colour, alpha=0.15 if name == "pass@k" else 0.07, linewidth=0)
    axes.set_xscale("log", base=2)
    ks = list(summaries[0].pass_at)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set(
        xlabel="k: responses to a prompt",
        ylabel=f"share of prompts, with {confidence:.0%} intervals",
        ylim=(-0.02, 1.02),
    )
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best", fontsize=9)
    unfinished = path.with_suffix(".part.png")
    figure.savefig(unfinished)
    unfinished.replace(path)
