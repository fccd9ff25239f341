"""What is on the disk, and not only in the kernel's memory."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
