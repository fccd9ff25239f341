"""Terminal output of a run: messages during the start, and progress during the training."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mrl.core import metrics as declared
from mrl.core.metric_families import shown_evaluation
from mrl.tracking.tracker import Metrics

logger = logging.getLogger(__name__)

HEADLINE = (
    "reward/mean",
    "loss/sft",
    "preference/accuracy",
    "eval/reward_sampled",
    "eval/reward_greedy",
    "rollout/response_length_mean_tokens",
    "mismatch/logprob_abs_max",
)
"""Metrics in the progress display, in this order (see also `headline`)."""
BETWEEN_STEPS = ("time/evaluate_s", "time/checkpoint_s")
"""Times of the phases that run between two steps. The time of a step does not include them."""


class ConsoleSink:
    """Shows the progress of a run: a live display on a terminal, otherwise one line every `every_s` seconds.

    The sink prints the mean rewards and accuracies of every evaluation. At the end, it prints those of the first and of the last
    evaluation side by side.
    """

    def __init__(
        self,
        total: int,
        *,
        title: str = "",
        every_s: float = 10.0,
        samples_every: int = 0,
        read_samples: Callable[[int], str] | None = None,
        console: Any = None,
        startup: "Startup | None" = None,
    ) -> None:
        """Prepare the display. The live display starts when the first metrics other than eval/* arrive.

        Args:
            total: number of steps of the run.
            title: name of the run.
            every_s: seconds between two progress lines if the output is not a terminal.
            samples_every: number of steps between two outputs of sampled responses; 0: no such output.
            read_samples: returns the text of the sampled responses of a step, or "".
            console: rich console. Default: the console of `startup`, or a console on standard output.
            startup: startup display. It pauses when the live display starts, because the two would overwrite each other.
        """
        from rich.console import Console  # a slow import, and most processes that import this module print nothing

        self.total, self.title, self.every_s = total, title, every_s
        self.console = console or (startup.console if startup else Console(file=sys.stdout))
        self._startup = startup
        self._samples_every, self._read_samples = samples_every, read_samples
        self._evaluations: list[Metrics] = []
        self._has_legend = False  # whether `format_legend` was shown
        self._latest: dict[str, float] = {}
        self._printed_s = float("-inf")  # time.monotonic() of the last progress line
        self._display = _LiveDisplay(self.console, total, title) if _can_redraw(self.console) else None

    def log(self, step: int, metrics: Metrics) -> None:
        self._latest |= metrics
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluation:
            self._evaluations.append(evaluation)
            self._print_line(f"step {step:>4}  held-out {_format_metrics(shown_evaluation(evaluation))}")
        if not self._has_legend and (legend := format_legend(metrics.keys() - evaluation.keys())):
            self._has_legend = True
            self._print_line(legend)
        if self._display:
            self._update_display(step, is_trained=len(evaluation) < len(metrics))
        elif len(evaluation) < len(metrics) and (self._is_due() or step == self.total):
            self._print_line(
                f"step {step:>4}/{self.total}  {_format_headline(metrics)}  {_format_phases(metrics)}".rstrip()
            )

        is_due = bool(self._samples_every) and "reward/mean" in metrics and step % self._samples_every == 0
        if self._read_samples and is_due and (text := self._read_samples(step)):
            self._print_line(text)

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """Do nothing: the terminal shows repeated steps again."""

    def close(self, failed: bool = False) -> None:
        if self._display:
            self._display.stop()
        if len(self._evaluations) > 1:
            before, after = self._evaluations[0], self._evaluations[-1]
            changes = [
                f"{declared.label(name)} {before[name]:.3f} -> {after[name]:.3f} ({after[name] - before[name]:+.3f})"
                for name in shown_evaluation(before) | shown_evaluation(after)
                if name in before and name in after
            ]
            self._print_line("held-out, before -> after: " + ", ".join(changes))

    def _update_display(self, step: int, is_trained: bool) -> None:
        """Update the live display. After the first training step, pause the startup display and start the live display."""
        assert self._display, "the output is a terminal"
        if is_trained and not self._display.is_started:
            if self._startup:
                self._startup.pause()
            self._display.start()
        if self._display.is_started:
            self._display.update(step, self._latest)

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now - self._printed_s < self.every_s:
            return False
        self._printed_s = now
        return True

    def _print_line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _can_redraw(console: Any) -> bool:
    """Whether the console is a terminal that can replace lines. A terminal with TERM=dumb cannot."""
    return console.is_terminal and not console.is_dumb_terminal


def show_warning(text: str) -> None:
    """Log a warning. mrl.core.run_warnings shows the warning on the terminal, above the progress display if there is one."""
    logger.warning("%s", text)


class Startup:
    """Shows what a run waits for before its first step, and logs which parts of the run are ready.

    A line reports each part that is ready. While the run waits for a part, a terminal shows a spinner with the name of the part.
    Without a terminal, a line repeats the name every `every_s` seconds.
    """

    def __init__(self, console: Any = None, every_s: float = 5.0) -> None:
        from rich.console import Console  # a slow import, and most processes that import this module print nothing

        self.console = console or Console(file=sys.stdout)
        self._every_s, self._start, self._waiting_for = every_s, time.monotonic(), ""
        self._status = self.console.status("starting") if _can_redraw(self.console) else None
        self._closed, self._printed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def wait_for(self, what: str) -> None:
        """Show that the run waits for `what` now. Does nothing after `close`."""
        self._waiting_for = what
        if self._closed.is_set():
            return
        if self._status:
            self._status.update(f"waiting for {what}")
            self._status.start()
        elif self._thread is None:
            self._thread = threading.Thread(target=self._repeat, name="startup", daemon=True)
            self._thread.start()

    def ready(self, what: str) -> None:
        """Print and log `what`, such as "engines ready (2)", with the seconds since the start."""
        text = f"{what} after {self._seconds()}"
        logger.info(text)
        self._print(text)

    def log(self, step: int, metrics: Metrics) -> None:
        """End the display after the first step. The tracker of a run calls this method, because the display is also a sink."""
        if "reward/mean" in metrics:
            self.close()

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """Do nothing: the display ends with the first step."""

    def pause(self) -> None:
        """Remove the spinner, because another display starts on the terminal. The next `wait_for` shows the spinner again."""
        if self._status:
            self._status.stop()

    def close(self, failed: bool = False) -> None:
        """End the display, because the first step is finished or the run ends. A second call does nothing."""
        self._closed.set()
        self._printed.set()  # wakes the thread
        if self._status:
            self._status.stop()

    def _repeat(self) -> None:
        while not self._closed.is_set():
            if self._printed.wait(self._every_s):  # a line was printed, so wait again
                self._printed.clear()
            elif not self._closed.is_set():
                self._print(f"waiting for {self._waiting_for} ({self._seconds()} since the start)")

    def _print(self, text: str) -> None:
        self._printed.set()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._start:.1f} s"


class _LiveDisplay:
    """Live display of ConsoleSink: a progress bar above two lines of metrics."""

    def __init__(self, console: Any, total: int, title: str) -> None:
        from rich import progress
        from rich.live import Live

        self.progress = progress.Progress(
            progress.TextColumn("[bold]{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("[dim]left"),
            progress.TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self.task = self.progress.add_task(title, total=total)
        self.live = Live(self.progress, console=console, refresh_per_second=2)

    @property
    def is_started(self) -> bool:
        return self.live.is_started

    def start(self) -> None:
        self.live.start()

    def update(self, step: int, latest: Metrics) -> None:
        from rich.console import Group
        from rich.text import Text

        self.progress.update(self.task, completed=step)
        lines = [Text(_format_headline(latest), style="bold green"), Text(_format_phases(latest), style="cyan")]
        self.live.update(Group(self.progress, *lines))

    def stop(self) -> None:
        self.live.stop()


def _format_metrics(metrics: Metrics) -> str:
    return "  ".join(f"{declared.label(name)} {declared.find(name).text(value)}" for name, value in metrics.items())


def _format_headline(metrics: Metrics) -> str:
    return _format_metrics({name: metrics[name] for name in headline(metrics)})


def headline(names: Iterable[str]) -> list[str]:
    """Return those of `names` that the progress display shows: the metrics of HEADLINE.

    If all held-out sets of a run have sampling settings of their own, the display also shows the mean rewards of the first two
    sets.
    """
    chosen = [name for name in HEADLINE if name in names]
    if not any(name.startswith("eval/") for name in chosen):
        chosen += [name for name in names if name.startswith("eval/") and name.endswith("/reward")][:2]
    return chosen


def _format_phases(metrics: Metrics) -> str:
    """Return text such as `1.02 s a step, 4,210 tokens/s (rollout 0.55, other 0.47; before the step: evaluate 2.10)`.

    In the parentheses, the times before the semicolon add up to the time of the step. Phases that round to 0.00 s are
    omitted.
    """
    if "time/step_s" not in metrics:
        return ""
    seconds = {name: value for name, value in metrics.items() if name.startswith("time/") and name != "time/step_s"}
    before = {name: seconds.pop(name) for name in BETWEEN_STEPS if name in seconds}
    inside = {declared.label(name): value for name, value in seconds.items()}
    inside["other"] = max(0.0, metrics["time/step_s"] - sum(inside.values()))
    parts = [_format_seconds(inside), _format_seconds({declared.label(name): value for name, value in before.items()})]
    phases = "; before the step: ".join(filter(None, parts))
    rate = f", {metrics['throughput/tokens_per_s']:,.0f} tokens/s" if "throughput/tokens_per_s" in metrics else ""
    return f"{metrics['time/step_s']:.2f} s a step{rate}" + (f" ({phases})" if phases else "")


def _format_seconds(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)


def format_legend(names: Iterable[str]) -> str:
    """Return the meaning of each of `names` that the progress display shows."""
    return "; ".join(f"{declared.label(name)}: {declared.find(name).meaning}" for name in headline(list(names)))
