"""GPUs by nvidia-smi: cards, driver, and how they are linked."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mrl.doctor.facts import Card, Gpus

QUERY = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version", "mig.mode.current")
ERRORS = "ecc.errors.uncorrected.volatile.total"
NONE = "no devices were found"  # in a job without GPUs on a host that has some
TIMEOUT_S = 20.0  # a driver that hangs is a finding
MIB = 2**20


class NoAnswer(Exception):
    """nvidia-smi failed; the text says why."""


def gpus() -> Gpus:
    """What nvidia-smi says, and how many Slurm gave; none where neither a GPU's device file is there nor nvidia-smi finds any."""
    return replace(_found(), given=_given())


def _given() -> int | None:
    """GPUs of this host's part of the job, which may be none."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    return _number(os.environ.get("SLURM_GPUS_ON_NODE", "0"))


def _found() -> Gpus:
    if not shutil.which("nvidia-smi"):
        devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
        return Gpus(error=f"/dev has {', '.join(devices)}, but no nvidia-smi is on PATH" if devices else "")
    try:
        lines = _query(*QUERY)
        errors = dict(enumerate(map(_number, _optional(ERRORS))))
        cards = [_card(line, errors) for line in lines if selected(line, os.environ.get("CUDA_VISIBLE_DEVICES"))]
    except NoAnswer as error:
        return Gpus(error="" if NONE in str(error).lower() else str(error))
    fabric = next(iter(_optional("fabric.state")), "")
    topology = links(_text("topo", "-m", needed=False))
    visible = {str(card.index) for card in cards}
    topology = {pair: link for pair, link in topology.items() if visible.issuperset(pair.split("-"))}
    return Gpus(cards, "", _cuda(), topology, fabric, hidden=len(cards) < len(lines))


def _card(line: str, errors: Mapping[int, int]) -> Card:
    try:
        index, _, name, total, used, driver, mig = (part.strip() for part in line.split(","))
        number = int(index)
    except ValueError:
        raise NoAnswer(f"nvidia-smi says {line!r}") from None
    memory, taken = _number(total) * MIB, _number(used) * MIB
    return Card(number, name, memory, taken, driver, mig == "Enabled", errors.get(number, 0))


def selected(line: str, variable: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES lets a process see this card: by number, or by the beginning of its UUID."""
    if variable is None:
        return True
    index, uuid = (part.strip() for part in line.split(",")[:2])
    return any(
        part == index or (len(part) > 3 and uuid.startswith(part)) for part in variable.replace(" ", "").split(",")
    )


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0  # [N/A], [Not Supported]


def _optional(field: str) -> list[str]:
    """Of each card; empty where this driver does not know the field."""
    try:
        return [line.strip() for line in _query(field)]
    except NoAnswer:
        return []


def _query(*fields: str) -> list[str]:
    return _text(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits").splitlines()


def _cuda() -> str:
    """Newest CUDA that the driver runs; drivers spell it differently."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", _text(needed=False))
    return found[1] if found else ""


def _text(*arguments: str, needed: bool = True) -> str:
    """What nvidia-smi prints; raises NoAnswer where it fails and is needed."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"nvidia-smi has not answered for {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise NoAnswer(f"nvidia-smi cannot be run: {error}") from None
    if done.returncode and needed:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise NoAnswer(lines[0] if lines else f"nvidia-smi ended with status {done.returncode}")
    return "" if done.returncode else done.stdout


def links(matrix: str) -> dict[str, str]:
    """Pairs of GPUs ("0-1") -> how they are linked, of `nvidia-smi topo -m`."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", matrix).splitlines()]
    columns = next((row for row in rows if row and row[0] == "GPU0" and "X" not in row), [])
    found = {}
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row:
            for name, link in zip(columns, row[1:], strict=False):
                if re.fullmatch(r"GPU\d+", name) and int(name[3:]) > int(row[0][3:]):
                    found[f"{row[0][3:]}-{name[3:]}"] = link
    return found
