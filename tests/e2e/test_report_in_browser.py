"""The page of `mrl report` in a real browser: accessible, with few elements, and without requests and errors."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from mrl.commands.report import main

pytestmark = pytest.mark.extended
INSTALL = "run `make browser` and `apt-get install -y chromium`"
SCHEMES = [("light", 1200), ("dark", 1200), ("light", 375), ("dark", 375)]
SMALLEST_TEXT = """() => {
  const texts = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && e.textContent.trim());
  const scale = (svg) => (svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1);
  return Math.min(...texts.map((e) => parseFloat(getComputedStyle(e).fontSize) * scale(e.closest("svg"))));
}"""
"""JavaScript that returns the size of the page's smallest text in pixels. It includes the scaling of charts."""
CONTROLS = """() => {
  const all = [...document.querySelectorAll("a, button, input, select, summary, [tabindex='0']")];
  const visible = all.filter((e) => e.checkVisibility({ visibilityProperty: true, contentVisibilityAuto: true }));
  return visible.map((e, n) => { e.dataset.control = n; return String(n); });
}"""
"""JavaScript that gives a number to each visible control of the page, and returns these numbers."""


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium. `make test-all` requires it."""
    chromium = shutil.which("chromium")
    if not chromium or not find_spec("playwright"):
        (pytest.fail if os.environ.get("MRL_NEEDS_BROWSER") else pytest.skip)(f"no browser: {INSTALL}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """The page of a run with 10,000 samples."""
    from mrl.core.jsonl import JsonLinesFile

    folder = tmp_path_factory.mktemp("large")
    metrics, kept = JsonLinesFile(folder / "metrics.jsonl"), JsonLinesFile(folder / "samples.jsonl", 1 << 60)
    for step in range(1, 101):
        metrics.write(
            step, {"reward/mean": step / 100, "optim/grad_norm": 1.0, "time/step_s": 1.0, "time/update_s": 1.0}
        )
        texts = [
            {"prompt": f"q{n % 25}", "response": f"</script> a{n} \x1b", "reward": 1 - n / 100} for n in range(100)
        ]
        values = {"tokens": ["</script>", " a"], "logprobs": [-0.1, -2.0], "advantages": [1.0, 1.0]}
        kept.write(step, {"samples": [text | values | {"group": n % 25} for n, text in enumerate(texts)]})
    assert main([str(folder)]) == 0
    return folder / "report.html"


def open_page(browser, path: Path, scheme: str = "light", width: int = 1200):
    """Open a page, and return it with a list to which its errors and its network requests are added."""
    page, seen = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900}), []
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else seen.append(request.url))
    page.goto(path.resolve().as_uri())
    page.wait_for_selector("h2")
    return page, seen


@pytest.mark.parametrize(("scheme", "width"), SCHEMES)
def test_a_real_run_is_accessible_and_makes_no_request(browser, recorded, tmp_path, scheme, width):
    from axe_core_python.sync_playwright import Axe

    assert main([str(recorded.folder), "-o", str(tmp_path / "page.html")]) == 0
    page, seen = open_page(browser, tmp_path / "page.html", scheme, width)
    page.wait_for_selector("[role=option]")
    assert Axe().run(page)["violations"] == [] and seen == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(SMALLEST_TEXT) >= 12


def test_10000_samples_open_quickly_and_can_be_filtered_colored_and_read_by_keyboard(browser, large):
    assert large.stat().st_size <= 5_000_000
    page, seen = open_page(browser, large)
    page.wait_for_selector("[role=option]")
    assert page.locator("[role=option]").count() < 60
    page.get_by_label("Step", exact=True).select_option("7")
    page.get_by_label("Search", exact=True).fill("a42")
    assert page.locator("[role=option]").count() == 1 and "step=7" in page.url and "q=a42" in page.url
    page.get_by_label("Color of tokens").select_option("logprobs")
    assert page.locator(".token").count() == 2
    page.get_by_label("Search", exact=True).fill("")
    page.locator("[role=listbox]").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("[aria-selected=true]").get_attribute("aria-posinset") == "2"
    page.reload()
    assert page.get_by_label("Step", exact=True).input_value() == "7" and seen == []


def test_every_control_and_the_values_of_tokens_are_reachable_by_keyboard(browser, large):
    page, _ = open_page(browser, large)
    page.wait_for_selector("[role=option]")
    controls, reached = set(page.evaluate(CONTROLS)), set()
    for _ in range(len(controls) + 1):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.control"))
    assert controls <= reached
    page.get_by_label("Tokens of the response").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    text = page.locator(".detail .readout").inner_text()
    assert text.startswith("Token 2 of 2") and "log-probability -2" in text and "advantage 1" in text


def test_scrolling_10000_samples_keeps_only_the_visible_rows_in_the_page(browser, large):
    """The work for one frame must not grow with the number of samples."""
    page, _ = open_page(browser, large)
    page.wait_for_selector("[role=option]")
    most_rows, last = page.evaluate(
        """async () => { const list = document.querySelector(".list"); let most = 0;
        for (let n = 0; n <= 100; n++) { list.scrollTop = n / 100 * list.scrollHeight;
        await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame);
        most = Math.max(most, list.querySelectorAll("[role=option]").length); }
        return [most, [...list.querySelectorAll("[role=option]")].at(-1).getAttribute("aria-posinset")]; }"""
    )
    assert most_rows < 60 and int(last) == 10_000
