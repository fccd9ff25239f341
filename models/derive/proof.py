"""Proves with tiny models in one process that a family is correct: compares bytes after a conversion, logits and all gradients.

In shapes, T is the number of tokens, and V is the size of the vocabulary.
"""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.conversion.convert_checkpoint import LOGITS_LIMIT, ConversionCheck, check_round_trip
from models.conversion.hf_reader import HFWeights
from models.derive.formulas import difference
from models.derive.tiny_config import build_config
from models.derive.tiny_model import TinyModel, num_parameters
from models.families import family_of
from models.hf_config import HFConfig
from parallel import device
from parallel.dims import ParallelDims

GRADIENT_LIMIT = 5e-5
"""Largest allowed `difference` (models.derive.formulas) between a tensor's gradients in mrl and in transformers.

Round-off depends on the instructions of the CPU: on one CPU, the difference of a correct family is slightly above 2e-5.
"""
ROUND_OFF = 1e-6
"""A gradient counts as round-off if its largest element, divided by the largest element of all gradients, is at most this.

Without a rotary embedding, for example, a bias of the keys adds the same number to all scores of a query and has no gradient.
"""
LENGTHS = (37, 20)  # numbers of tokens of the two sequences in one pack


def prove(models: list[tuple[str, dict[str, Any]]], family: str) -> list[ConversionCheck]:
    """Compare the family with transformers on random models. `models`: (title, tiny config) of each model.

    `family`: reference to the family, see `models.families.load_family`. Initializes and destroys a process group.
    """
    device.patch_megatron_for_cpu()
    from parallel import groups  # imports Megatron

    checks = []
    with groups.one_process():
        for title, fields in models:
            with TemporaryDirectory() as folder:
                try:
                    checks += _prove_model(title, TinyModel(fields), Path(folder), family)
                except (ValueError, AssertionError, KeyError) as error:  # the family does not fit the model
                    checks.append(ConversionCheck(f"{title}: conversion", str(error), False))
    return checks


def check_whole_config(found: dict[str, Any], path: Path, family: str) -> ConversionCheck:
    """Check that the family reads the original config `found`, and that its table has as many parameters as transformers' model.

    `path`: file of the config. `family`: see `prove`.
    """
    config = HFConfig(path, found, family)
    try:
        table = family_of(config)
        arch = table.read(config)
    except ValueError as error:
        return ConversionCheck("the config", str(error), False)
    shapes = [
        shape for row in table.param_mappings(arch) if not row.is_buffer for shape in row.hf_shapes(arch.sizes).values()
    ]
    ours, theirs = sum(torch.Size(shape).numel() for shape in shapes), num_parameters(found)
    return ConversionCheck(
        "the config", f"{ours:,} parameters in the table, {theirs:,} in transformers", ours == theirs
    )


def _prove_model(title: str, model: TinyModel, folder: Path, family: str) -> list[ConversionCheck]:
    model.save(folder)
    config = HFConfig.load(folder, family)
    round_trip = check_round_trip(config)
    logits, gradients = _megatron(config)
    expected, their_gradients = _transformers(model)
    worst = (logits[:, : expected.shape[1]] - expected).abs().max().item()
    largest = expected.abs().max().item()
    detail = f"largest difference {worst:.1e}, largest logit {largest:.1f}, {sum(LENGTHS)} tokens, float32"
    return [
        replace(round_trip, name=f"{title}: bytes"),
        ConversionCheck(f"{title}: logits", detail, worst <= LOGITS_LIMIT * max(1.0, largest)),
        compare_gradients(title, gradients, their_gradients),
    ]


def compare_gradients(title: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> ConversionCheck:
    """Compare the gradients of mrl (`ours`) and transformers (`theirs`) by Hugging Face name.

    A gradient that consists only of round-off in both models counts as equal.
    """
    name = f"{title}: gradients"
    if missing := sorted(ours.keys() ^ theirs.keys()):
        return ConversionCheck(name, f"only one model has a gradient of {missing[0]}", False)
    largest = {n: max(ours[n].abs().max().item(), gradient.abs().max().item()) for n, gradient in theirs.items()}
    limit = ROUND_OFF * max(largest.values())
    errors = {n: difference(ours[n], theirs[n]) if largest[n] > limit else 0.0 for n in theirs}
    worst = max(errors, key=lambda n: errors[n])
    # an expert that no token chooses has no gradient in either model
    if zero := [n for n, gradient in theirs.items() if not gradient.any() and ".experts." not in n]:
        return ConversionCheck(name, f"the gradient of {zero[0]} is zero, which proves nothing", False)
    detail = f"largest difference {errors[worst]:.1e} of the largest gradient ({worst}), {len(theirs)} tensors"
    return ConversionCheck(name, detail, errors[worst] <= GRADIENT_LIMIT)


def sequences(vocab_size: int) -> list[Tensor]:
    """Return the random sequences of the proof."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in LENGTHS]


def _loss(logits: Tensor) -> Tensor:
    """Return a scalar that depends on every logit. logits: [T, V]."""
    return (logits.log_softmax(-1) * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum()


def _transformers(model: TinyModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits [T, V] and gradients by the names in the checkpoint."""
    reference = model.model
    trained = {name for name, _ in reference.named_parameters()}
    buffers = {name for name, owner in model.owners.items() if owner not in trained}
    logits = torch.cat([reference(tokens[None]).logits[0] for tokens in sequences(model.config.vocab_size)])
    reference.zero_grad()
    _loss(logits).backward()
    # save_pretrained renames and splits tensors for the checkpoint. So each gradient is put in place of its weight, and saved.
    for parameter in reference.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    with TemporaryDirectory() as folder:
        model.save(Path(folder))
        gradients = load_file(Path(folder) / "model.safetensors")
    return logits.detach(), {name: gradient for name, gradient in gradients.items() if name not in buffers}


def _megatron(config: HFConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits [T, padded V] and gradients by Hugging Face name."""
    from models.conversion.weight_bridge import WeightBridge  # after patch_megatron_for_cpu
    from models.model_builder import build_model
    from parallel.packing import Segment, pack

    dims = ParallelDims()
    (gpt,) = build_model(config, dims, torch.float32)
    gpt = gpt.to(device.device()).eval()
    bridge = WeightBridge(config, [gpt], dims)
    bridge.load(HFWeights(config.path.parent))
    vocab = bridge.arch.vocab_size
    packed = pack([Segment(length) for length in LENGTHS], device.device())
    tokens = torch.cat(sequences(vocab))[None].to(device.device())
    logits = gpt(tokens, packed.position_ids[None], None, packed_seq_params=packed)[0].float().cpu()
    _loss(logits[:, :vocab]).backward()

    def gradient(parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    return logits.detach(), {name: tensor.cpu().clone() for name, tensor in bridge.export(gradient)}


def write_model(fields: dict[str, Any], folder: Path) -> None:
    """Write a random model of a tiny config to `folder` in Hugging Face format."""
    TinyModel(fields).save(folder)
    config = folder / "config.json"
    architecture = build_config(fields).architectures
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": architecture}, indent=2) + "\n")
