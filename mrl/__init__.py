"""mrl: RL for language models with a Ray controller, Megatron-Core trainers and SGLang engines."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent


def _check_own_packages() -> None:
    """Refuse to run if Python would import another package than mrl's own as `parallel` or `models`.

    This happens if a folder in PYTHONPATH has a module of this name. Commands of mrl then end with status 2. In other programs,
    the import raises ImportError.
    """
    for name in ("parallel", "models"):
        spec = find_spec(name)
        location = Path(spec.origin).resolve() if spec and spec.origin else None
        if location != _HOME / name / "__init__.py":
            message = (
                f"mrl needs its own package {name!r} at {_HOME / name}, but Python finds {location or 'a folder without code'}; "
                f"rename it, or remove its folder from PYTHONPATH."
            )
            if Path(sys.argv[0]).name in ("mrl", "-m"):  # `mrl COMMAND`, or `python -m mrl.MODULE`
                sys.stderr.write(f"mrl: {message}\n")
                raise SystemExit(2)
            raise ImportError(message)


def _append_working_directory() -> None:
    """Append the folder of the user's own modules to `sys.path`. See `mrl.core.installation.add_working_directory`."""
    folder = os.environ.get("MRL_WORKING_DIRECTORY")
    if folder and folder not in sys.path:
        sys.path.append(folder)


_check_own_packages()
_append_working_directory()
