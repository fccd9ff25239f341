"""Writes and checks folders of PEFT, the library of Hugging Face for adapters.

A folder has adapter_config.json with the settings, and adapter_model.safetensors with the matrices A and B.
models.conversion.lora_mapping describes the names of the matrices.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.architecture import Architecture, Family
from models.conversion.hf_reader import ITEM_BYTES, TORCH_NAMES, read_header
from models.conversion.lora_mapping import adapter_shapes
from parallel.durable_files import atomic_folder
from parallel.trainer_config import LoraConfig

if TYPE_CHECKING:  # the driver checks folders without importing torch
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "adapter"
"""Name of the PEFT folder inside an exported Hugging Face folder, which has the merged weights."""
_DEFAULTS: dict[str, Any] = dict(
    bias="none",
    use_dora=False,
    use_rslora=False,
    fan_in_fan_out=False,
    modules_to_save=None,
    rank_pattern={},
    alpha_pattern={},
    layers_to_transform=None,
    layer_replication=None,
)
"""Field of adapter_config.json -> its only supported value, which is also PEFT's default."""
_INITIAL_VALUES = (True, False, "gaussian", None)
"""Supported values of init_lora_weights. With other values, PEFT may also change the weights of the base model."""


def write_peft(matrices: Mapping[str, "Tensor"], lora: LoraConfig, model_path: str, target: str | Path) -> None:
    """Write a PEFT folder `target`. `matrices`: name in PEFT -> tensor on the CPU, for every matrix A and B.

    `model_path`: folder of the base model. `target` must not exist yet, and appears when it is complete.
    """
    from safetensors.torch import save_file  # imports torch

    fields = peft_config(matrices, lora, model_path)
    with atomic_folder(target) as folder:
        assert folder is not None, f"{target} exists already"
        (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
        save_file(dict(matrices), folder / WEIGHTS, {"format": "pt"})


def on_host(tensors: Iterable[tuple[str, "Tensor"]]) -> dict[str, "Tensor"]:
    """Copy tensors to the CPU. Each copy has memory of its own."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}


def peft_config(names: Iterable[str], lora: LoraConfig, model_path: str) -> dict[str, Any]:
    """Return the fields of adapter_config.json. `names`: names of the matrices A and B in PEFT."""
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    return dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model_path,
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=_target_modules(names),
        inference_mode=True,
        **_DEFAULTS,
    )


def _target_modules(names: Iterable[str]) -> list[str]:
    """Return the whole names of the modules with adapters.

    A short name, such as gate_proj, could also be the name of a matrix without an adapter, such as the gate_proj of an expert.
    """
    return sorted({name.removeprefix("base_model.model.").rsplit(".", 2)[0] for name in names})


def base_model(folder: str | Path) -> str:
    """Return the folder of the base model of a PEFT folder that mrl has written."""
    return json.loads((Path(folder) / CONFIG).read_text())["base_model_name_or_path"]


def check_peft(lora: LoraConfig, family: Family, arch: Architecture) -> None:
    """Raise ValueError if the folder `lora.path` does not have exactly the adapters that `lora` describes."""
    folder, key = Path(str(lora.path)), f"lora.path={lora.path}"
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise ValueError(f"{key}: {', '.join(missing)} is missing; expected a folder that PEFT or mrl has written.")
    fields = json.loads((folder / CONFIG).read_text())
    for name, expected in dict(_DEFAULTS, peft_type="LORA").items():
        if (found := fields.get(name, expected) or None) != (expected or None):
            raise ValueError(f"{key}: {name}={found!r} in {CONFIG} is not supported; expected {expected!r}.")
    if (initial := fields.get("init_lora_weights")) not in _INITIAL_VALUES:
        raise ValueError(
            f"{key}: init_lora_weights={initial!r} in {CONFIG} is not supported, because it may change the weights of the base "
            "model; expected true, false or 'gaussian'."
        )
    for name, field, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if (found := fields.get(name)) != value:
            raise ValueError(
                f"lora.{field}={value}: the adapters in {folder} have {name}={found}; set lora.{field}={found}."
            )
    _check_matrices(lora, family, arch, folder / WEIGHTS)


def peft_warnings(lora: LoraConfig, dtype: str) -> list[str]:
    """Return warnings if the adapters in lora.path had dropout, or if their dtype is wider than model.dtype=`dtype`."""
    folder, found = Path(str(lora.path)), []
    if dropout := json.loads((folder / CONFIG).read_text()).get("lora_dropout"):
        found.append(
            f"lora.path={folder}: was trained with lora_dropout={dropout}, but mrl's adapters have no dropout."
        )
    stored = {entry.dtype for entry in read_header(folder / WEIGHTS).values()}
    itemsize = next(ITEM_BYTES[name] for name, torch_name in TORCH_NAMES.items() if torch_name == dtype)
    if wider := sorted(name for name in stored if ITEM_BYTES[name] > itemsize):
        found.append(
            f"lora.path={folder}: its matrices are {', '.join(wider)}, and are rounded to model.dtype={dtype}."
        )
    return found


def _check_matrices(lora: LoraConfig, family: Family, arch: Architecture, path: Path) -> None:
    expected = adapter_shapes(lora, family, arch)
    entries = read_header(path)
    found = {name: entry.shape for name, entry in entries.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        first, advice = wrong[0], "set lora.targets to the matrices of these adapters."
        if first not in found:
            reason = f"is missing; {advice}"
        elif first not in expected:
            reason = f"belongs to a matrix that lora.targets does not name; {advice}"
        else:
            reason = (
                f"has the shape {found[first]}; expected {expected[first]}. The adapters do not belong to model.path."
            )
        raise ValueError(f"lora.path: {len(wrong)} tensors of {path} do not fit; the first, {first}, {reason}")
    if bad := next((name for name, entry in entries.items() if entry.dtype not in ITEM_BYTES), None):
        raise ValueError(f"lora.path: {bad} in {path} is {entries[bad].dtype}; expected {', '.join(ITEM_BYTES)}.")
