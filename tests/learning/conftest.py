"""Fixtures of the end-to-end tests, for training runs that take minutes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from e2e.conftest import inputs, make_once, quickstart, start_mrl, warm  # noqa: F401
