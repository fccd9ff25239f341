"""Facts about this host's GPUs from nvidia-smi: cards, driver, and the links between cards."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mrl.doctor.host_facts import GpuCard, HostGpus

CARD_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version", "mig.mode.current")
ERROR_FIELD = "ecc.errors.uncorrected.volatile.total"
NO_DEVICES = "no devices were found"  # message of nvidia-smi in a job without GPUs on a host that has GPUs
TIMEOUT_S = 20.0  # if nvidia-smi takes longer, the driver probably hangs
MIB = 2**20


class NvidiaSmiError(Exception):
    """nvidia-smi failed; the message has the reason."""


def read_gpus() -> HostGpus:
    """Read the GPUs of this host, and how many of them Slurm allocated.

    The result has no card and no error if nvidia-smi is not installed and /dev has no GPU, or if nvidia-smi finds no device.
    """
    return replace(_query_gpus(), allocated=_slurm_allocation())


def _slurm_allocation() -> int | None:
    """Return the number of GPUs that Slurm gave this job on this host; None outside of a job."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    return _number(os.environ.get("SLURM_GPUS_ON_NODE", "0"))


def _query_gpus() -> HostGpus:
    if not shutil.which("nvidia-smi"):
        devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
        return HostGpus(error=f"/dev has {', '.join(devices)}, but no nvidia-smi is on PATH" if devices else "")
    try:
        lines = _query(*CARD_FIELDS)
        errors = dict(enumerate(map(_number, _query_optional(ERROR_FIELD))))
        cards = [
            _parse_card(line, errors) for line in lines if is_visible(line, os.environ.get("CUDA_VISIBLE_DEVICES"))
        ]
    except NvidiaSmiError as error:
        return HostGpus(error="" if NO_DEVICES in str(error).lower() else str(error))
    fabric = next(iter(_query_optional("fabric.state")), "")
    visible = {str(card.index) for card in cards}
    links = parse_links(_run("topo", "-m", required=False))
    links = {pair: link for pair, link in links.items() if visible.issuperset(pair.split("-"))}
    return HostGpus(cards, "", _cuda_version(), links, fabric, hidden=len(cards) < len(lines))


def _parse_card(line: str, errors: Mapping[int, int]) -> GpuCard:
    try:
        index, _, name, total, used, driver, mig = (part.strip() for part in line.split(","))
        card_index = int(index)
    except ValueError:
        raise NvidiaSmiError(f"nvidia-smi says {line!r}") from None
    memory, taken = _number(total) * MIB, _number(used) * MIB
    return GpuCard(card_index, name, memory, taken, driver, mig == "Enabled", errors.get(card_index, 0))


def is_visible(line: str, variable: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES shows a card to this process: by its index, or by a prefix of its UUID.

    `line`: the card's line in nvidia-smi's answer to a query of CARD_FIELDS. `variable`: the value of CUDA_VISIBLE_DEVICES.
    """
    if variable is None:
        return True
    index, uuid = (part.strip() for part in line.split(",")[:2])
    return any(
        part == index or (len(part) > 3 and uuid.startswith(part)) for part in variable.replace(" ", "").split(",")
    )


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0  # nvidia-smi may print [N/A] or [Not Supported]


def _query_optional(field: str) -> list[str]:
    """Return the value of a field for each card; [] if the driver does not know the field."""
    try:
        return [line.strip() for line in _query(field)]
    except NvidiaSmiError:
        return []


def _query(*fields: str) -> list[str]:
    return _run(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits").splitlines()


def _cuda_version() -> str:
    """Return the newest CUDA version that the driver supports. The label of the version in the output differs between drivers."""
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", _run(required=False))
    return match[1] if match else ""


def _run(*arguments: str, required: bool = True) -> str:
    """Return the output of nvidia-smi. If it fails, raise NvidiaSmiError if `required`, otherwise return ""."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NvidiaSmiError(f"nvidia-smi did not answer within {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise NvidiaSmiError(f"nvidia-smi cannot be run: {error}") from None
    if done.returncode and required:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise NvidiaSmiError(lines[0] if lines else f"nvidia-smi ended with status {done.returncode}")
    return "" if done.returncode else done.stdout


def parse_links(matrix: str) -> dict[str, str]:
    """Return pair of GPUs ("0-1") -> kind of link, from the output of `nvidia-smi topo -m`."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", matrix).splitlines()]
    columns = next((row for row in rows if row and row[0] == "GPU0" and "X" not in row), [])
    links = {}
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row:
            for name, link in zip(columns, row[1:], strict=False):
                if re.fullmatch(r"GPU\d+", name) and int(name[3:]) > int(row[0][3:]):
                    links[f"{row[0][3:]}-{name[3:]}"] = link
    return links
