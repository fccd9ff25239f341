"""Hugging Face checkpoints on disk: headers checked before anything is loaded, exports written whole or not at all."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.families import family_of
from models.spec import HFConfig

_COMPANIONS = ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer*", "vocab*", "merges.txt")
_COMPANIONS += ("special_tokens_map.json", "added_tokens.json")


class HFWeights:
    """The tensors of a Hugging Face folder by name, read lazily."""

    def __init__(self, folder: str | Path) -> None:
        """Open `folder`; raises ValueError when it holds no safetensors."""
        self.folder = Path(folder)
        self._file_of: dict[str, Path] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self._file_of |= dict.fromkeys(file.keys(), path)
        if not self._file_of:
            raise ValueError(f"model.path={folder}: no *.safetensors found; a Hugging Face model folder is expected.")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, from the file headers."""
        found = {}
        for path in sorted(set(self._file_of.values())):
            with safe_open(path, "pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return found

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


def write_export(tensors: Iterable[tuple[str, Tensor]], source: str | Path, target: str | Path) -> None:
    """Write a Hugging Face folder at `target`: `tensors`, and config and tokenizer files copied from `source`.

    The folder appears under its name only when it is complete.
    """
    target = Path(target)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    for pattern in _COMPANIONS:
        for path in Path(source).glob(pattern):
            shutil.copy(path, partial / path.name)
    config = json.loads((partial / "config.json").read_text())
    dtype = {str(t.dtype).removeprefix("torch.") for t in weights.values()}
    config["dtype"] = dtype.pop() if len(dtype) == 1 else str(torch.float32).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
