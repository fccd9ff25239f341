"""Hugging Face folders written from live weights: whole or not at all."""

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

_COMPANIONS = ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer*", "vocab*", "merges.txt")
_COMPANIONS += ("special_tokens_map.json", "added_tokens.json")


def write_export(
    tensors: Iterable[tuple[str, Tensor]], source: str | Path, target: str | Path, notes: dict[str, str]
) -> None:
    """Write a Hugging Face folder at `target`: `tensors`, config and tokenizer files of `source`, `notes` (name -> text).

    The folder appears under its name only when it is complete; one that is there already is an error, never replaced.
    """
    target = Path(target)
    if target.exists():
        raise FileExistsError(f"{target} exists already; exports never replace a folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        _write(tensors, source, partial)
        for name, text in notes.items():
            (partial / name).write_text(text + "\n")
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(tensors: Iterable[tuple[str, Tensor]], source: str | Path, partial: Path) -> None:
    weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors}
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    for pattern in _COMPANIONS:
        for path in Path(source).glob(pattern):
            shutil.copy(path, partial / path.name)
    config = json.loads((partial / "config.json").read_text())
    dtype = {str(t.dtype).removeprefix("torch.") for t in weights.values()}
    config["dtype"] = dtype.pop() if len(dtype) == 1 else str(torch.float32).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
