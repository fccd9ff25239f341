"""The report of an autopsy as text: the verdict first, then everything that was seen."""

import time
from collections.abc import Sequence
from pathlib import Path

from mrl.hang_report.probe import Seen
from mrl.hang_report.verdict import Verdict, behind, name_of, size, tell


def text(
    what: str, verdict: Verdict, everyone: Sequence[Seen], hosts: Sequence[str] = (), more: Sequence[str] = ()
) -> str:
    """The whole report. `what`: why it was made; `hosts`: what there is to say of them; `more`: lines for the end."""
    lines = [what, "", f"Diagnosis: {verdict.sentence}.", ""]
    lines += [*hosts, ""] if hosts else []
    lines += ["Processes", *(f"  {tell(seen)}" for seen in everyone), ""]
    lines += ["Last collectives of each rank", *_collectives(everyone), ""]
    for seen in everyone:
        lines += _of(seen)
    return "\n".join([*lines, *more]) + "\n"


def write(folder: Path, content: str) -> Path:
    """Write it to the first autopsy_<n>.txt that `folder` has not. Raises OSError; there is no file then."""
    number = 1
    while True:
        path = folder / f"autopsy_{number}.txt"
        try:
            file = path.open("x")
        except FileExistsError:
            number += 1
            continue
        try:
            with file:
                file.write(content)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path


def _collectives(everyone: Sequence[Seen]) -> list[str]:
    lines, now = [], time.time()
    for seen in everyone:
        for last in seen.collectives:
            messages = f", {last.messages} messages" if last.messages else ""
            lag = "   <- behind" if behind(seen, everyone).find(name_of(last)) >= 0 else ""
            lines.append(
                f"  {seen.title}: {name_of(last)}: {last.entered} collectives{messages}; the last: {last.operation}, "
                f"{size(last.nbytes)}, {max(0.0, now - last.at):.1f} s ago{lag}"
            )
    return lines


def _of(seen: Seen) -> list[str]:
    kernel = f", in {seen.wchan}" if seen.wchan else ""
    lines = [f"{seen.title}: pid {seen.record.pid} on {seen.record.host}, {seen.state}{kernel}"]
    lines += [f"  for {time.time() - note.since:.1f} s: {note.text}" for note in seen.notes]
    for number, stack in enumerate(seen.stacks):
        lines.append("  main thread, most recent call first" if number == 0 else f"  thread {number}")
        lines += [f"    {frame.file}:{frame.line} {frame.function}" for frame in stack]
    return [*lines, ""]
