"""mrl: RL for language models with a Ray controller, Megatron-Core trainers and SGLang engines.

The functions of mrl.api are also attributes of this package: `import mrl; mrl.train(["experiment=quickstart"])`.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.api import CommandError, EvaluationResult, TrainResult, convert, evaluate, generate, load_config, train

__all__ = ["CommandError", "EvaluationResult", "TrainResult", "convert", "evaluate", "generate", "load_config", "train"]

_HOME = Path(__file__).resolve().parent.parent


def _check_own_packages() -> None:
    """Refuse to run if `import parallel` or `import models` would not import mrl's own package.

    Python finds another module if a folder of PYTHONPATH contains a module `parallel` or `models`. Commands of mrl then end with
    status 2. In other programs, `import mrl` then raises ImportError.
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
    """Append the folder of the user's modules to `sys.path`. At the end of the path, these modules hide no other modules.

    Also delete PYTHONSAFEPATH if mrl has set it. mrl/core/code_locations.py gives the reasons.
    """
    if os.environ.get("PYTHONSAFEPATH") == "mrl":
        del os.environ["PYTHONSAFEPATH"]
    folder = os.environ.get("MRL_WORKING_DIRECTORY")
    if folder and folder not in sys.path:
        sys.path.append(folder)


def __getattr__(name: str) -> Any:
    """Import mrl.api only when one of its functions is used: most processes of a run use none of these functions."""
    if name in __all__:
        return getattr(import_module("mrl.api"), name)
    raise AttributeError(f"module 'mrl' has no attribute {name!r}; its functions are {', '.join(__all__)}")


_check_own_packages()
_append_working_directory()
