"""The data of the page of one run."""

import time
from typing import Any

from mrl.tracking.report.answers import answers, health
from mrl.tracking.report.charts import (
    distributions,
    learning_charts,
    mean_spent,
    metric_rows,
    time_chart,
    time_sentences,
)
from mrl.tracking.report.page import samples_budget
from mrl.tracking.report.provenance import provenance
from mrl.tracking.report.recorded_run import RecordedRun
from mrl.tracking.report.sample_table import sample_table
from mrl.tracking.timeline_summary import RankWork


def run_data(run: RecordedRun, reload_every_s: int = 0) -> dict[str, Any]:
    """Return the data of the page. A browser reloads the page every `reload_every_s` seconds; 0: never."""
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
        "spent": mean_spent(run),
        "ranks": [_rank_values(rank) for rank in run.ranks],
        "timeline": run.timeline,
        "distributions": distributions(run),
        "metrics": metric_rows(run),
        "provenance": provenance(run),
        "damaged": run.damaged,
    }
    return data | {"samples": sample_table(run, samples_budget(data))}


def _rank_values(rank: RankWork) -> dict[str, Any]:
    """Return the name and the tokens of a trainer rank, and how many seconds of its passes each activity takes."""
    seconds = {"computing_s": rank.computing_s, "reducing_s": rank.reducing_s, "other_s": rank.bubble_s}
    return {"process": rank.timeline.process, "tokens": rank.tokens} | seconds


def _subtitle(run: RecordedRun) -> str:
    model = str(run.setting("model.path", "")).rstrip("/").rpartition("/")[2]
    words = [
        f"{len(run.metrics)} step{'' if len(run.metrics) == 1 else 's'}",
        f"model {model}" if model not in ("", "model") else "",
        f"outcome: {run.outcome}",
    ]
    return " · ".join(word for word in words if word)
