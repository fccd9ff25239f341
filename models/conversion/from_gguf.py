"""Converts a GGUF file, the format of llama.cpp, to a Hugging Face folder. Quantized weights are dequantized."""

from pathlib import Path
from typing import Any

import torch

from parallel.durable_files import apply_umask, atomic_folder


def from_gguf(source: Path, output: Path, dtype: torch.dtype) -> None:
    """Write model, tokenizer and chat template of the GGUF file `source` to the folder `output`. Weights get the dtype `dtype`.

    `output` appears when it is complete. Raises ValueError if `source` is not a GGUF file of a model that transformers can
    read, or if `output` exists.
    """
    from transformers import AutoTokenizer  # takes seconds to import

    if not source.is_file() or source.suffix != ".gguf":
        raise ValueError(f"gguf={source}: no such file; expected a file whose name ends with .gguf.")
    if output.exists():
        raise ValueError(f"output={output}: exists already; name another folder.")
    try:
        model = _read_model(source).to(dtype)
        tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except (
        ValueError,
        KeyError,
        OSError,
        RuntimeError,
        NotImplementedError,
    ) as error:  # unknown architecture or bad file
        raise ValueError(f"gguf={source}: transformers cannot read it: {error}") from error
    with atomic_folder(output) as partial:
        if partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            apply_umask(partial)


def _read_model(source: Path) -> Any:
    """Return the model with float32 weights.

    `from_pretrained` with a GGUF file needs the package accelerate, so this function loads the tensors itself. Raises ValueError
    if the file lacks a weight, or has a weight that the model does not use.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    vars(config).pop("_model_name_or_path", None)  # name of the model in the GGUF file; config.json has no such field
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    if missing := [name for name in missing if name not in tied]:
        raise ValueError(f"it has no weights for {', '.join(missing[:3])}.")
    if unexpected:
        raise ValueError(f"it has weights that the model does not use: {', '.join(unexpected[:3])}.")
    return model
