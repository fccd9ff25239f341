"""mrl: reinforcement learning for language models with a Ray controller, Megatron-Core workers and SGLang engines."""

from importlib.util import find_spec
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent


def _refuse_intruders() -> None:
    """Raise ImportError when `parallel` or `models` would be somebody else's package (a folder of weights, say)."""
    for name in ("parallel", "models"):
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found != _HOME / name:
            raise ImportError(
                f"mrl needs its own package {name!r} at {_HOME / name}, but Python finds {found or 'none with code'}; "
                f"rename that folder, or start mrl from another directory."
            )


_refuse_intruders()
