"""Correction biases are weights that the optimizer does not update; multi-token prediction layers are ignored."""

import numpy as np
import pytest
from models_for_layouts import groups_of_responses, make
from safetensors.numpy import load_file, save_file

from models.architecture import ModelSpec
from models.conversion.hf_reader import check_hf_folder
from mrl.algorithms.losses import PPOClip
from mrl.core.types import TrainBatch
from mrl.workers.dp_partition import Packing, partition_step
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

pytestmark = pytest.mark.extended


def bias_after_a_step(rank: int, path, folder, dims: ParallelDims, restore: bool):
    """Return the loaded correction biases, and those after an update step or after loading the updated checkpoint."""
    from mrl.workers.actor_critic import MegatronActor

    megatron = dict(moe_router_bias_update_rate=0.125)
    actor = MegatronActor(ModelSpec(str(path), dims, "bfloat16", OptimConfig(lr=1e-4), megatron))
    before = biases(actor)
    if restore:
        actor.load(folder)
    else:
        block, groups = groups_of_responses()
        batch = TrainBatch.of(block, groups)
        share = partition_step(batch, dims, Packing(60)).replica_batches[dims.coords(rank).dp]
        actor.update(block, [share], PPOClip(), [1e-4])
        actor.save(folder)
    return before, biases(actor)


def biases(actor) -> dict[str, np.ndarray]:
    tensors = actor.export() if actor.participates_in_export else []
    return {name: tensor.clone().numpy() for name, tensor in tensors if name.endswith("e_score_correction_bias")}


def test_correction_biases_are_saved_in_float32_and_updated_only_on_request(run_ranks, tmp_path):
    make("glm", tmp_path / "model")
    loaded = load_file(tmp_path / "model/model.safetensors")
    first, second = ParallelDims(dp=2, ep=2), ParallelDims(tp=2, pp=2)
    before, moved = run_ranks(first, bias_after_a_step, tmp_path / "model", tmp_path / "saved", first, False)[0]
    assert len(before) == 3
    for name, bias in before.items():
        assert bias.dtype == np.float32 and bias.tobytes() == loaded[name].tobytes()
        np.testing.assert_allclose(np.abs(moved[name] - bias), 0.125, atol=1e-6)
    again = run_ranks(second, bias_after_a_step, tmp_path / "model", tmp_path / "saved", second, True)[0]
    for name, bias in again[1].items():
        assert bias.tobytes() == moved[name].tobytes()


def exported(rank: int, path) -> set[str]:
    from mrl.workers.actor_critic import MegatronActor

    check_hf_folder(path)
    return {
        name
        for name, _ in MegatronActor(ModelSpec(str(path), ParallelDims(), "float32", OptimConfig(lr=1e-4), {})).export()
    }


@pytest.mark.parametrize("kind", ["glm", "deepseek"])
def test_multi_token_prediction_layers_are_ignored(run_ranks, tmp_path, kind):
    make(kind, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    matrix = np.ones((32, 64), np.float32)
    save_file(
        weights | {"model.layers.4.eh_proj.weight": matrix}, tmp_path / "model.safetensors"
    )  # a fifth layer in a model of four
    assert run_ranks(ParallelDims(), exported, tmp_path) == [weights.keys()]
    save_file(weights | {"model.layers.3.eh_proj.weight": matrix}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.3\.eh_proj\.weight .* is not in the table"):
        check_hf_folder(tmp_path)
