"""Hugging Face checkpoints on disk: headers are checked, without torch, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from models.families import family_of
from models.spec import HFConfig

if TYPE_CHECKING:
    from torch import Tensor


class HFWeights:
    """The tensors of a Hugging Face folder by name, read lazily."""

    def __init__(self, folder: str | Path) -> None:
        """Open `folder`; raises ValueError when it holds no safetensors."""
        self.folder = Path(folder)
        self._file_of: dict[str, Path] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "numpy") as file:
                self._file_of |= dict.fromkeys(file.keys(), path)
        if not self._file_of:
            raise ValueError(f"model.path={folder}: no *.safetensors found; a Hugging Face model folder is expected.")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, from the file headers."""
        found = {}
        for path in sorted(set(self._file_of.values())):
            with safe_open(path, "numpy") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], "pt") as file:
            return file.get_tensor(name)


def check_checkpoint(folder: str | Path) -> HFConfig:
    """Compare config and tensors of a Hugging Face folder without loading weights; returns the config.

    Raises:
        ValueError: a tensor is missing, not known to the family, or of another shape than the config says.
    """
    config = HFConfig.load(folder)
    family = family_of(config)
    arch = family.read(config)
    expected, found = family.hf_shapes(arch), HFWeights(folder).shapes()
    if arch.tied_embeddings:
        found.pop("lm_head.weight", None)  # some writers store the tied tensor twice
    problems = [f"{name} is missing (expected {list(expected[name])})" for name in expected.keys() - found.keys()]
    problems += [f"{name} {list(found[name])} is not in the table" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} is {list(found[name])}, config.json says {list(expected[name])}"
        for name in expected.keys() & found.keys()
        if expected[name] != found[name]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        raise ValueError(f"{folder}: config.json and weights disagree in {len(problems)} tensors: {shown}.")
    return config
