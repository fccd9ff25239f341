"""Checks a trace by the rules of the trace event format, and loads traces into Perfetto (scripts/fetch_perfetto.sh)."""

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PERFETTO = ROOT / "build/perfetto"


def check_trace_format(events: Iterable[Mapping[str, Any]]) -> None:
    """Assert what the trace event format requires of complete events and of metadata events."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    named = set()
    for event in events:
        assert event["ph"] in ("X", "M") and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["cat"], str)
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"]))
        elif event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
    assert rows and set(rows) <= named
    for row in rows.values():
        open_ends: list[int] = []
        for start, negative in sorted(row):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            # Times are rounded to microseconds, so a span may end one microsecond after the span that contains it.
            assert not open_ends or start - negative <= open_ends[-1] + 1, "spans of a row nest"
            open_ends.append(start - negative)


def has_perfetto() -> bool:
    """Return whether Perfetto's trace processor has been downloaded, and Node.js, which runs it, is installed."""
    return (PERFETTO / "trace_processor.wasm").exists() and shutil.which("node") is not None


def query_perfetto(trace: Path, *queries: str) -> list[list[list[Any]]]:
    """Load a trace into Perfetto's trace processor, and return the rows of each SQL query."""
    line = ["node", str(ROOT / "tests/perfetto.js"), str(PERFETTO), str(trace), *queries]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(row) for row in done.stdout.splitlines()]
