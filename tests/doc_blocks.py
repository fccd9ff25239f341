"""Reads the commands in the ```bash blocks of README.md, CONTRIBUTING.md, AGENTS.md and docs/."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"(?:<!-- needs: (?P<needs>[^>]+?) -->\n)?```bash\n(?P<text>.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One ```bash block. `needs`: what its commands need but a test machine does not have, such as "a cluster", or None."""

    page: str
    line: int
    commands: tuple[str, ...]
    needs: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """Return every command block, in the order of the pages."""
    found = []
    for page in filter(Path.exists, PAGES):
        text = page.read_text()
        for match in FENCE.finditer(text):
            lines = match["text"].replace("\\\n", " ").splitlines()
            commands = tuple(line.strip() for line in lines if line.strip() and not line.strip().startswith("#"))
            name = str(page.relative_to(ROOT))
            found.append(Block(name, text[: match.start()].count("\n") + 1, commands, match["needs"]))
    return found


def mrl_arguments(command: str) -> list[str] | None:
    """Return the arguments of an `mrl` command, or None for another command."""
    words = shlex.split(command, comments=True)
    program = words[0] if words else ""
    return words[1:] if program in ("mrl", ".venv/bin/mrl") else None
