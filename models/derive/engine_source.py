"""Reads from SGLang's source which tensors of a model SGLang stores as one tensor, and which config fields it reads.

The source is parsed, not imported, because SGLang needs a GPU or patches to be imported.
"""

import ast
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_IMPORT = re.compile(r"^from (sglang\.srt\.models\.[\w.]+) import", re.MULTILINE)
_LATENT_FUSION = ("fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa"))


@dataclass(frozen=True)
class EngineSource:
    """What SGLang's source says about one architecture."""

    file: Path
    text: str  # source of the model and of the model files that it imports
    stacked: dict[str, tuple[str, ...]]  # fused module in SGLang -> the modules that it combines, in order
    expert_matrices: tuple[str, str, str] | None  # names of gate, up and down of an expert

    def mentions(self, name: str) -> bool:
        """Whether the source mentions the config field."""
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None

    def derive_fused_params(self, tensors: set[str]) -> dict[str, tuple[str, ...]]:
        """Return `engine_fused_params` of a family whose tensors have these names (with {layer} and {expert})."""
        found = {}
        for fused, parts in self.stacked.items():
            for kind in ("weight", "bias"):
                names = tuple(f"{part}.{kind}" for part in parts)
                if all(any(t.endswith(f".{name}") and "{expert}" not in t for t in tensors) for name in names):
                    found[f"{fused}.{kind}"] = names
        if self.expert_matrices:
            gate, up, down = (f"experts.{{expert}}.{name}.weight" for name in self.expert_matrices)
            if all(any(t.endswith(f".{name}") for t in tensors) for name in (gate, up, down)):
                found |= {"experts.w13_weight": (gate, up), "experts.w2_weight": (down,)}
        return found


def read_engine_source(architecture: str) -> EngineSource | None:
    """Return what SGLang's source says about the architecture, or None if SGLang is not installed or does not have it."""
    folder = _models_folder()
    if folder is None:
        return None
    is_entry = re.compile(rf"^EntryClass\b[^=]*=[^=]*?\b{re.escape(architecture)}\b", re.MULTILINE)
    file = next((path for path in sorted(folder.glob("*.py")) if is_entry.search(path.read_text())), None)
    if file is None:
        return None
    texts = [file.read_text()]
    texts += [path.read_text() for path in _imported(texts[0], folder)]
    stacked: dict[str, tuple[str, ...]] = next((found for text in texts if (found := _stacked(text))), {})
    if any(f'"{_LATENT_FUSION[0]}"' in text for text in texts):
        stacked[_LATENT_FUSION[0]] = _LATENT_FUSION[1]
    matrices = next((found for text in texts if (found := _expert_matrices(text))), None)
    return EngineSource(file, "\n".join(texts), stacked, matrices)


def _models_folder() -> Path | None:
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "srt" / "models"
    return folder if folder.is_dir() else None


def _imported(text: str, folder: Path) -> list[Path]:
    names = [name.removeprefix("sglang.srt.models.") for name in _IMPORT.findall(text)]
    paths = [folder / f"{name.replace('.', '/')}.py" for name in dict.fromkeys(names)]
    return [path for path in paths if path.is_file() and path.name != "utils.py"]


def _stacked(text: str) -> dict[str, tuple[str, ...]]:
    """Return the first list `stacked_params_mapping` of a source file: fused module -> its modules, in order."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.List):
            continue
        target = node.targets[0]
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if name == "stacked_params_mapping":
            found: dict[str, tuple[str, ...]] = {}
            for entry in node.value.elts:
                fused, part = (str(value).lstrip(".") for value in ast.literal_eval(entry)[:2])
                found[fused] = (*found.get(fused, ()), part)
            return found
    return {}


def _expert_matrices(text: str) -> tuple[str, str, str] | None:
    """Return the names of gate, up and down in the first call of `make_expert_params_mapping`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "make_expert_params_mapping":
            values = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            names = [values.get(f"ckpt_{kind}_proj_name") for kind in ("gate", "up", "down")]
            if all(isinstance(name, str) for name in names):
                return names[0], names[1], names[2]  # type: ignore[return-value]
    return None
