"""mrl: RL for language models with a Ray controller, Megatron-Core trainers and SGLang engines."""

from importlib.util import find_spec
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent


def _check_own_packages() -> None:
    """Raise ImportError if Python would import another package than mrl's own as `parallel` or `models`.

    This happens if the working directory has a folder of this name, such as a folder of weights.
    """
    for name in ("parallel", "models"):
        spec = find_spec(name)
        location = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if location != _HOME / name:
            raise ImportError(
                f"mrl needs its own package {name!r} at {_HOME / name}, but Python finds {location or 'a folder without code'}; "
                f"rename that folder, or start mrl from another directory."
            )


_check_own_packages()
