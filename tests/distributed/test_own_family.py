"""A model family in a file outside the repository is loaded, trained and exported like a built-in one."""

import json
from pathlib import Path

import pytest
from models_for_layouts import groups_of_responses
from tiny_families import make_family

from models.architecture import ModelSpec
from models.families import llama
from mrl.algorithms.losses import PPOClip
from mrl.core.types import TrainBatch
from mrl.data.batching import CostModel
from mrl.workers.dp_partition import Packing, partition_step
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig


def one_step(rank: int, path, dims: ParallelDims, family: str | None, exported):
    """Train one optimizer step; return the gradient norm and export the initial weights to `exported`."""
    from mrl.workers.actor_critic import MegatronActor

    block, groups = groups_of_responses()
    batch = TrainBatch.of(block, groups)
    step = partition_step(batch, dims, Packing(60, True, CostModel(1.0, 0.01)))
    actor = MegatronActor(ModelSpec(str(path), dims, "float32", OptimConfig(lr=1e-4), {}, family=family))
    actor.export_hf(exported, {})
    (report,) = actor.update(block, [step.replica_batches[dims.coords(rank).dp]], PPOClip(), [1e-4])
    return report.maxima["optim/grad_norm"]


@pytest.mark.extended
def test_a_family_from_a_file_trains_like_a_built_in_family(run_ranks, tmp_path):
    from safetensors.torch import load_file

    text = Path(llama.__file__).read_text().replace("LlamaForCausalLM", "MineForCausalLM").replace("LLAMA =", "MINE =")
    (tmp_path / "mine.py").write_text(text)
    ours = make_family("llama_biased", tmp_path / "ours")
    theirs = make_family("llama_biased", tmp_path / "theirs")
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config | dict(architectures=["MineForCausalLM"])))

    dims = ParallelDims(tp=2)
    expected = run_ranks(dims, one_step, ours, dims, None, tmp_path / "a")
    found = run_ranks(dims, one_step, theirs, dims, f"{tmp_path}/mine.py:MINE", tmp_path / "b")
    assert found == expected and found[0] > 0
    source, copy = load_file(theirs / "model.safetensors"), load_file(tmp_path / "b/model.safetensors")
    assert source.keys() == copy.keys() and all(source[name].equal(copy[name]) for name in source)
    assert json.loads((tmp_path / "b/config.json").read_text())["architectures"] == ["MineForCausalLM"]
