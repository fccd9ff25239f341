"""The Megatron model of every family computes the same logits and gradients as transformers."""

import pytest
from tiny_families import FAMILIES, SIZES, make_family

from parallel.dims import ParallelDims

LENGTHS = (37, 20)  # of the two sequences in one pack


def sequences():
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, SIZES["vocab_size"], (length,), generator=generator) for length in LENGTHS]


def load(folder):
    """Load the model in `folder` into Megatron, and return (model, bridge)."""
    import torch

    from models.conversion.hf_reader import HFWeights, check_hf_folder
    from models.conversion.weight_bridge import WeightBridge
    from models.model_builder import build_model

    hf, dims = check_hf_folder(folder), ParallelDims()
    chunks = build_model(hf, dims, torch.float32)
    bridge = WeightBridge(hf, chunks, dims)
    bridge.load(HFWeights(folder))
    return chunks[0].eval(), bridge


def logits_of(model):
    """Return logits [tokens of both sequences, vocabulary] of Megatron's model for one pack of both sequences."""
    import torch

    from parallel.packing import Segment, pack

    packed = pack([Segment(length) for length in LENGTHS], torch.device("cpu"))
    tokens = torch.cat(sequences())[None]
    return model(tokens, packed.position_ids[None], None, packed_seq_params=packed)[0, :, : SIZES["vocab_size"]]


def expected_logits(model):
    """Return the same logits, which a transformers model computes for one sequence at a time."""
    import torch

    return torch.cat([model(sequence[None]).logits[0] for sequence in sequences()])


def our_logits(rank: int, folder):
    import torch

    with torch.no_grad():
        return logits_of(load(folder)[0]).numpy()


@pytest.mark.extended_except("qwen3", "glm4_moe", "deepseek_v3", "gemma3", "qwen3_5", "gpt_oss", "nemotron_h")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(run_ranks, tmp_path, name):
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_family(name, tmp_path)
    with torch.no_grad():
        expected = expected_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    assert expected.std() > 0.5, "logits near zero would hide everything"
    (found,) = run_ranks(ParallelDims(), our_logits, folder)
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-5)


def loss(logits):
    """Return a scalar that depends on every logit."""
    import torch

    return (logits.log_softmax(-1) * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum()


def our_gradients(rank: int, folder):
    model, bridge = load(folder)
    loss(logits_of(model)).backward()
    return {name: gradient.numpy() for name, gradient in bridge.export(lambda parameter: parameter.grad)}


def their_gradients(model) -> dict:
    """Return the gradients of a transformers model under the names in the checkpoint, which has a matrix for each expert."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None, "the choice of keys has no gradient"
            continue
        stem, is_stack, matrix = name.partition(".experts.")
        if not is_stack:
            found[name] = parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            if model.config.model_type == "gpt_oss":  # the checkpoint stacks the experts, too; mrl has them one by one
                found[f"{stem}.experts.{expert}.{matrix}"] = gradient.t() if gradient.dim() == 2 else gradient
                continue
            matrices = ["gate_proj", "up_proj"] if matrix == "gate_up_proj" else [matrix]
            for one, part in zip(matrices, gradient.chunk(len(matrices)), strict=True):
                found[f"{stem}.experts.{expert}.{one}.weight"] = part
    if model.config.model_type == "nemotron_h":
        return {name.replace("model.", "backbone."): gradient for name, gradient in found.items()}
    if model.config.model_type not in ("minimax_m2", "mixtral"):
        return found
    matrices = dict(gate_proj="w1", up_proj="w3", down_proj="w2", mlp="block_sparse_moe")
    return {".".join(matrices.get(part, part) for part in name.split(".")): tensor for name, tensor in found.items()}


@pytest.mark.extended_except("qwen3", "qwen3_moe", "deepseek_v3")
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_those_of_transformers(run_ranks, tmp_path, name):
    """Compares every tensor, including biases and tied embeddings."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_family(name, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loss(expected_logits(model)).backward()
    (found,) = run_ranks(ParallelDims(), our_gradients, folder)
    expected = their_gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = gradient.abs().max().item()
        assert largest > 1e-3, f"{name}: a gradient of zero proves nothing"
        torch.testing.assert_close(torch.from_numpy(found[name]), gradient, rtol=0, atol=5e-5 * largest)
