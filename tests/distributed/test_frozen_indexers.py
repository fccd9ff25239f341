"""Sparse attention in whole models: frozen indexers, keys that several layers read, and sequences without a choice."""

import numpy as np
import pytest
import torch
from models_for_layouts import make
from test_layouts import ragged_block, share_of
from test_logits import LENGTHS, expected_logits, load, loss, sequences
from tiny_families import SIZES, make_family

from models.architecture import ModelSpec
from mrl.algorithms.losses import CrossEntropy
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
FROZEN = (".indexer.", "e_score_correction_bias")


def train(rank: int, path, dims: ParallelDims, dtype: str):
    """Return (exported tensors before, and after two optimizer steps, numbers of trained elements and of moments)."""
    from mrl.workers.actor_critic import MegatronActor
    from parallel.optimizer import optimizer_tensors

    actor = MegatronActor(ModelSpec(str(path), dims, dtype, OptimConfig(lr=1e-2), {}))
    exports = [exported(actor)]
    block = ragged_block(40)
    share = share_of(block, dims, 40, rank)
    actor.update(block, [share, share], CrossEntropy(), [1e-2, 1e-2])
    exports.append(exported(actor))
    names = {name for chunk in actor.chunks for name, p in chunk.module.named_parameters() if p.requires_grad}
    assert not [name for name in names if ".indexer." in name]
    state = {t.untyped_storage()._cdata for t in optimizer_tensors(actor.optimizer)}
    frozen = [p for chunk in actor.chunks for name, p in chunk.module.named_parameters() if ".indexer." in name]
    assert frozen and not any(p.untyped_storage()._cdata in state for p in frozen)
    return exports


def exported(actor) -> dict[str, tuple[str, bytes]]:
    """Return name -> (dtype, bytes) of all tensors, on the ranks that take part in the export."""
    if not actor.participates_in_export:
        return {}
    return {
        name: (str(tensor.dtype), tensor.detach().clone().contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in actor.export()
    }


@pytest.mark.extended
@pytest.mark.parametrize("dims", [ParallelDims(), ParallelDims(dp=2, ep=2), ParallelDims(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_steps_change_all_weights_except_those_of_the_indexers(run_ranks, tmp_path, dtype, dims):
    make("shared_sparse", tmp_path)
    before, after = run_ranks(dims, train, tmp_path, dims, dtype)[0]
    same = {name for name in before if before[name] == after[name]}
    assert same == {name for name in before if any(part in name for part in FROZEN)}
    of_indexers = {name: dtype for name, (dtype, _) in after.items() if ".indexer." in name}
    assert len(of_indexers) == 2 * 5, "of layers 0 and 2"
    for name, found in of_indexers.items():
        assert found == ("torch.float32" if ".k_norm." in name else f"torch.{dtype}")


def logits_and_keys(model, packed):
    """Return (logits of one pack of both sequences, layers whose chosen keys the pack still has)."""
    tokens = torch.cat(sequences())[None]
    logits = model(tokens, packed.position_ids[None], None, packed_seq_params=packed)
    return logits[0, :, : SIZES["vocab_size"]], sorted(packed.chosen_keys)


def kept_keys(rank: int, folder, recompute: dict):
    from models.conversion.hf_reader import HFWeights, check_hf_folder
    from models.conversion.weight_bridge import WeightBridge
    from models.model_builder import build_model
    from parallel.packing import Segment, pack

    def new_pack():
        return pack([Segment(length) for length in LENGTHS], torch.device("cpu"))

    hf, dims = check_hf_folder(folder), ParallelDims()
    chunks = build_model(hf, dims, torch.float32, **recompute)
    WeightBridge(hf, chunks, dims).load(HFWeights(folder))
    model = chunks[0]
    with torch.no_grad():
        _, after_scoring = logits_and_keys(model.eval(), new_pack())
    first, second = new_pack(), new_pack()
    model.train()
    kept = [logits_and_keys(model, packed) for packed in (first, second)]
    loss(kept[1][0]).backward()  # the packs of a pipeline are in flight at the same time
    kept_of_other = sorted(first.chosen_keys)
    loss(kept[0][0]).backward()
    return after_scoring, kept[0][1], kept_of_other, sorted(first.chosen_keys), sorted(second.chosen_keys)


@pytest.mark.extended
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["", "recompute"])
def test_chosen_keys_are_kept_only_until_the_last_layer_has_read_them(run_ranks, tmp_path, recompute):
    folder = make_family("glm_moe_dsa", tmp_path, num_hidden_layers=4)
    ((after_scoring, between, of_other, *after),) = run_ranks(ParallelDims(), kept_keys, folder, recompute)
    assert after_scoring == [] and between == of_other == [0, 2] and after == [[], []]


def calls_of_indexers(rank: int, folder):
    """Return (number of calls of indexers, logits) for a pack whose sequences have fewer tokens than an indexer chooses."""
    from parallel.packing import Segment, pack
    from parallel.sparse_attention import LightningIndexer

    model, _ = load(folder)
    calls = []
    for module in model.modules():
        if isinstance(module, LightningIndexer):
            module.register_forward_pre_hook(lambda *args: calls.append(args))
    with torch.no_grad():
        logits, _ = logits_and_keys(model, pack([Segment(length) for length in LENGTHS], torch.device("cpu")))
    return len(calls), logits.numpy()


@pytest.mark.extended
@pytest.mark.parametrize(("topk", "expected_calls"), [(max(LENGTHS), 0), (min(LENGTHS), 2)])
def test_an_indexer_computes_nothing_if_no_sequence_is_longer_than_its_choice(
    run_ranks, tmp_path, topk, expected_calls
):
    from transformers import AutoModelForCausalLM

    folder = make_family("deepseek_v32", tmp_path, index_topk=topk)
    ((calls, found),) = run_ranks(ParallelDims(), calls_of_indexers, folder)
    assert calls == expected_calls
    with torch.no_grad():
        expected = expected_logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)
