"""Image models compute the log-probabilities and gradients of transformers in every layout. Some packs have no images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_layouts import make_actor
from tiny_families import IMAGE_FAMILIES, IMAGE_TOKEN, make_image_family, prompts_with_images

from mrl.algorithms.losses import CrossEntropy
from mrl.algorithms.objective import TokenWeighting, sequence_mean
from mrl.core.types import TokenBlock, TrainBatch
from mrl.workers.dp_partition import Packing, partition_step
from parallel.dims import ParallelDims
from parallel.trainer_config import LoraConfig

NAMES = list(IMAGE_FAMILIES)
SIZE = 2  # number of responses to a prompt


def block_with_images() -> tuple[TokenBlock, np.ndarray]:
    """Return (block of two responses to each of four prompts, groups). Three of the prompts have images."""
    rng = np.random.default_rng(5)
    prompts, images = prompts_with_images()
    responses = [rng.integers(0, 37, rng.integers(2, 9)).tolist() for _ in range(SIZE * len(prompts))]
    block = TokenBlock.from_lists([prompt for prompt in prompts for _ in range(SIZE)], responses)
    of_rows = {row: images[row // SIZE] for row in range(len(responses)) if images[row // SIZE] is not None}
    column = rng.standard_normal(len(responses)).astype(np.float32).repeat(block.sampled_lengths)
    return replace(block, images=of_rows).with_columns(advantages=column), np.repeat(np.arange(len(prompts)), SIZE)


def share_of(rank: int, dims: ParallelDims, shared: bool, max_tokens: int = 70):
    block, groups = block_with_images()
    batch = TrainBatch.of(block, groups if shared else None)
    step = partition_step(batch, dims, Packing(max_tokens), TokenWeighting(sequence_mean))
    return block, step.replica_batches[dims.coords(rank).dp]


def logprobs_of_transformers(model, block: TokenBlock) -> list[torch.Tensor]:
    """Return the log-probabilities of each row's response, from whole logits of one row at a time."""
    found = []
    for row in range(len(block.lengths)):
        ids = torch.tensor(np.concatenate([block.prompt(row), block.response(row)]).astype(np.int64))
        images, inputs = block.images.get(row), {}
        if images is not None:
            inputs = dict(
                pixel_values=torch.from_numpy(images.pixel_values),
                image_grid_thw=torch.from_numpy(images.grid_thw),
                mm_token_type_ids=(ids == IMAGE_TOKEN).int()[None],
            )
        model.model.rope_deltas = None  # transformers keeps it from the last call
        start = block.prompt_lengths[row]
        rows = model(ids[None], **inputs).logits[0].log_softmax(-1)[start - 1 : -1]
        found.append(rows.gather(1, ids[start:, None])[:, 0])
    return found


def reference(folder):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs(rank: int, folder, dims: ParallelDims, shared: bool):
    actor = make_actor(folder, dims)
    block, share = share_of(rank, dims, shared)
    columns = actor.compute_logprobs(block, share)
    return [column.numpy() for column in columns], np.concatenate(share.micro_batches)


LAYOUTS = [
    ParallelDims(**sizes)
    for sizes in (
        {},
        dict(tp=2),
        dict(tp=2, sp=False),
        dict(pp=2),
        dict(cp=2),
        dict(dp=2),
        dict(tp=2, pp=2, cp=2),
    )
]


@pytest.mark.extended_except("tp2 pp2 cp2 sp-qwen3_vl")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_log_probabilities_equal_those_of_transformers(run_ranks, tmp_path, name, dims):
    """Prompts are shared by the responses of a group, and then computed for each response."""
    make_image_family(name, tmp_path)
    block, _ = block_with_images()
    with torch.no_grad():
        expected = [row.numpy() for row in logprobs_of_transformers(reference(tmp_path), block)]
    assert np.std(np.concatenate(expected)) > 0.2
    for shared in (True, False):
        for columns, order in run_ranks(dims, logprobs, tmp_path, dims, shared):
            if columns:
                wanted = np.concatenate([expected[row] for row in order])
                np.testing.assert_allclose(np.concatenate(columns), wanted, atol=1e-4)


def gradients(rank: int, folder, dims: ParallelDims, train_vision: bool):
    actor = make_actor(folder, dims, train_vision=train_vision)
    block, share = share_of(rank, dims, shared=True)
    head, loss = actor.head_and_loss(CrossEntropy(), 1.0)
    actor.accumulate_gradients(actor.micro_batches(block, share), head, loss, share, all_reduce=True)
    if not actor.participates_in_export:
        return {}
    return {name: gradient.clone().numpy() for name, gradient in actor.export_gradients()}


def gradients_of_transformers(folder) -> dict[str, np.ndarray]:
    """Return the gradients under the names in the checkpoint."""
    model, (block, _) = reference(folder), block_with_images()
    rows = logprobs_of_transformers(model, block)
    (-sum(row.mean() for row in rows) / len(rows)).backward()
    found = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    if model.config.model_type == "qwen3_vl":
        return found
    return {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): g
        for name, g in found.items()
    }


@pytest.mark.extended_except("tp2 pp2 cp2 sp-qwen3_vl")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_gradients_equal_those_of_transformers(run_ranks, tmp_path, name, dims):
    """Compares every tensor of the decoder and of the tower. Some replicas and micro-batches have no images."""
    make_image_family(name, tmp_path)
    expected = gradients_of_transformers(tmp_path)
    found = run_ranks(dims, gradients, tmp_path, dims, True)[0]
    assert found.keys() == expected.keys()
    for tensor, gradient in expected.items():
        largest = np.abs(gradient).max()
        assert largest > 1e-6, f"{tensor}: a gradient of zero proves nothing"
        np.testing.assert_allclose(found[tensor], gradient, rtol=0, atol=5e-5 * max(1, largest), err_msg=tensor)


def adapter_gradients(rank: int, folder, dims: ParallelDims):
    """Return the initial LoRA adapters and their gradients, by the names of PEFT."""
    actor = make_actor(folder, dims, lora=LoraConfig(rank=2, alpha=6.0))
    block, share = share_of(rank, dims, shared=True)
    head, loss = actor.head_and_loss(CrossEntropy(), 1.0)
    actor.accumulate_gradients(actor.micro_batches(block, share), head, loss, share, all_reduce=True)
    if not actor.participates_in_export:
        return {}, {}
    initial = {name: tensor.clone().numpy() for name, tensor in actor.adapters.export()}
    return initial, {name: gradient.clone().numpy() for name, gradient in actor.export_gradients()}


@pytest.mark.extended_except("one process-qwen3_vl")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(tp=2, pp=2, cp=2)], ids=str)
def test_gradients_of_adapters_follow_from_those_of_the_weights(run_ranks, tmp_path, name, dims):
    """With B = 0, the gradient of B is alpha / rank times (gradient of W) A^T, and that of A is 0. The tower has no adapters."""
    make_image_family(name, tmp_path)
    expected = gradients_of_transformers(tmp_path)
    initial, found = run_ranks(dims, adapter_gradients, tmp_path, dims)[0]
    of_b = {peft: gradient for peft, gradient in found.items() if "lora_B" in peft}
    assert len(of_b) == 2 * 7 and not any("visual" in peft for peft in found)
    for peft, gradient in of_b.items():
        weight, of_a = peft.removeprefix("base_model.model.").replace("lora_B.", ""), peft.replace("lora_B", "lora_A")
        if name == "qwen2_5_vl":  # its checkpoints do not have the names of the modules, see Family.peft_prefixes
            weight = weight.replace("model.language_model.", "model.")
        wanted = 3.0 * expected[weight] @ initial[of_a].T
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=5e-5 * max(1, np.abs(wanted).max()), err_msg=peft)
        assert np.abs(wanted).max() > 1e-6 and not found[of_a].any()


def train_and_compare(rank: int, folder, train_vision: bool):
    """Return the names of the tensors that an optimizer step changes."""
    actor = make_actor(folder, ParallelDims(), train_vision=train_vision)
    before = {name: tensor.clone() for name, tensor in actor.export()}
    block, share = share_of(rank, ParallelDims(), shared=True)
    actor.update(block, [share], CrossEntropy(), [1e-2])
    return {name for name, tensor in actor.export() if not torch.equal(tensor, before[name])}


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_only_a_trained_tower_changes(run_ranks, tmp_path, name):
    make_image_family(name, tmp_path)
    (frozen,), (trained,) = (run_ranks(ParallelDims(), train_and_compare, tmp_path, each) for each in (False, True))
    assert frozen and not any("visual" in name for name in frozen)
    assert {name for name in trained if "visual" not in name} == frozen
    assert any("visual.blocks.0" in name for name in trained)
    assert set(run_ranks(ParallelDims(), gradients, tmp_path, ParallelDims(), False)[0]) == frozen


def noisy_gradients(rank: int, folder, dims: ParallelDims) -> list[np.ndarray]:
    """Return the reduced gradients of the tower. Before the reduction, each rank has an error of its own."""
    from models.image_model import tower_parameters

    actor = make_actor(folder, dims, train_vision=True)
    parameters = tower_parameters(chunk.module for chunk in actor.chunks)
    for parameter in parameters:
        parameter.register_hook(lambda gradient: gradient + rank)
    block, share = share_of(rank, dims, shared=True)
    head, loss = actor.head_and_loss(CrossEntropy(), 1.0)
    actor.accumulate_gradients(actor.micro_batches(block, share), head, loss, share, all_reduce=True)
    return [parameter.main_grad.clone().numpy() for parameter in parameters]


@pytest.mark.extended
def test_tensor_parallel_ranks_have_equal_gradients_of_the_tower(run_ranks, tmp_path):
    """Otherwise the copies of the tower drift apart, because kernels on GPUs sum in no fixed order."""
    make_image_family("qwen3_vl", tmp_path)
    dims = ParallelDims(tp=2)
    first, second = run_ranks(dims, noisy_gradients, tmp_path, dims)
    assert first
    for mine, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, other)
