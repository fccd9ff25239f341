"""Writes the page of `mrl report`: puts the data, the styles and the scripts into one HTML file."""

import html
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import orjson

from mrl.config.secrets import redacted
from parallel.durable_files import write_file

PAGE_BYTES = 5_000_000  # samples are added to the page of a run until the page has this size
RESERVE_BYTES = 100_000  # part of the page that stays free, because the size of the samples is only estimated
SCRIPTS = ("elements.js", "charts.js", "tokens.js", "samples.js", "page.js")  # in the order in which the page runs them


def asset(name: str) -> str:
    """Return the text of a file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def write_page(path: Path, data: Mapping[str, Any]) -> int:
    """Write the page atomically. Returns its size in bytes."""
    content = render(data)
    write_file(path, content)
    return len(content)


def render(data: Mapping[str, Any]) -> bytes:
    """Return the page as UTF-8. `data` are JSON values; "title" is the title of the page."""
    page = Template(asset("page.html")).substitute(
        title=html.escape(str(data["title"])),
        style=asset("page.css"),
        data=script_json(data),
        script="\n".join(asset(name) for name in SCRIPTS),
    )
    return page.encode("utf-8", errors="replace")


def script_json(data: Mapping[str, Any]) -> str:
    """Return JSON for a script element of HTML: no text of a sample can end the element. NaN becomes null."""
    text = orjson.dumps(redacted(data), default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def samples_budget(data: Mapping[str, Any]) -> int:
    """Return how many bytes remain for the samples on a page that contains `data`."""
    return max(0, PAGE_BYTES - RESERVE_BYTES - len(render({"title": "", **data})))


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text for a sentence, such as 0.125, 12,500 or 1.2e-07."""
    if value is None or not math.isfinite(value):
        return "not a number"
    if value and abs(value) < 10**-digits:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
