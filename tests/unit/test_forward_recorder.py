"""The recorder of an engine's forward pass: what it records, and how the parts of several ranks are joined."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from models.families import family_of
from models.hf_config import HFConfig
from mrl.rollout.engines import forward_recorder
from mrl.rollout.engines.forward_recorder import (
    engine_trace,
    engine_weights,
    read_forward_recording,
    record_forward,
    recording_args,
    write_request,
)
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes


class InPlace(torch.nn.Module):
    """A module that overwrites its input, as SGLang's fused norms do."""

    def forward(self, x):
        return x.mul_(2), None


class Decoder(torch.nn.Module):
    """A decoder with the module names of SGLang's models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(5, 3)
        self.layers = torch.nn.ModuleList([InPlace()])
        self.norm = torch.nn.Linear(3, 3)

    def forward(self, tokens):
        hidden, _ = self.layers[0](self.embed_tokens(tokens))
        return self.norm(hidden)


class Logits(torch.nn.Module):
    """An output layer that returns an object, as SGLang's LogitsProcessor does."""

    def forward(self, hidden, head):
        return SimpleNamespace(next_token_logits=head(hidden[-1:]))


@torch.no_grad()
def test_a_pass_is_recorded_only_on_request_and_before_it_is_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(forward_recorder, "_tp_rank", lambda: 0)
    (spec,) = recording_args(tmp_path)["forward_hooks"]
    hook = record_forward(spec["config"])
    model, head, logits = Decoder(), torch.nn.Linear(3, 5, bias=False), Logits()
    for module in (*model.modules(), logits):
        module.register_forward_hook(hook)
    tokens = torch.tensor([1, 4])

    def run():
        return logits(model(tokens), head)

    run()
    with pytest.raises(ValueError, match="the engine recorded no forward pass"):
        read_forward_recording(tmp_path, "a", 1)
    request = write_request(tmp_path, "a", ["model.norm", "lm_head"])
    expected = run().next_token_logits
    request.unlink()
    (arrays,) = read_forward_recording(tmp_path, "a", 1)
    np.testing.assert_array_equal(arrays["model.embed_tokens/out0"], model.embed_tokens.weight[tokens])
    np.testing.assert_array_equal(arrays["model.layers.0/out0"], 2 * model.embed_tokens.weight[tokens])
    np.testing.assert_array_equal(arrays["logits_processor/out0"], expected)
    weights = {name.removeprefix("weight/") for name in arrays if name.startswith("weight/")}
    assert weights == {"model.norm.weight", "model.norm.bias", "lm_head.weight"}
    run()
    assert len(list(tmp_path.iterdir())) == 1, "without a request, nothing is recorded"


CONFIG = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hf = HFConfig.load(folder)
    return family_of(hf), family_of(hf).read(hf)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_weights_of_all_ranks_are_joined_under_hugging_face_names(model, tp):
    family, arch = model
    layout, rng = EngineLayout.of(family, arch, EngineParallelSizes(tp)), np.random.default_rng(0)
    expected = {name: rng.normal(size=shape).astype(np.float32) for name, shape in family.hf_shapes(arch).items()}
    ranks = []
    for rank in range(tp):
        arrays = {f"weight/{name}": np.zeros(shape, np.float32) for name, shape in layout.param_shapes(rank).items()}
        for shard in layout.shards(rank):
            box = shard.box_in_param(shard.box)
            arrays[f"weight/{shard.param}"][box.slices] = expected[shard.name][shard.box.slices]
        ranks.append(arrays)
    found = engine_weights(ranks, layout)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_heads_of_all_ranks_are_joined(model, tp):
    arch = model[1]
    heads, groups, d = (
        arch.transformer["num_attention_heads"],
        arch.transformer["num_query_groups"],
        arch.sizes["head_dim"],
    )
    query, key = (np.arange(2 * n * d, dtype=np.float32).reshape(2, n * d) for n in (heads, groups))
    ranks = []
    for rank in range(tp):
        mine = np.split(query, tp, axis=1)[rank]
        owned = np.split(key, min(tp, groups), axis=1)[rank * min(tp, groups) // tp]
        arrays = {"model.embed_tokens/out0": query, "model.norm/out0": query, "logits_processor/out0": query}
        for layer in range(arch.num_layers):
            prefix = f"model.layers.{layer}.self_attn."
            arrays[f"{prefix}qkv_proj/out0"] = np.concatenate([mine, owned, owned], axis=1)
            arrays[f"{prefix}q_norm/out0"] = mine.reshape(-1, d)
            arrays[f"{prefix}o_proj/out0"] = query
        ranks.append(arrays)
    trace = engine_trace(ranks, arch)
    for point, expected in (("query", query), ("normed_query", query), ("key", key), ("value", key)):
        np.testing.assert_array_equal(trace[f"layers.1.{point}"], expected, err_msg=point)
    assert ("layers.0.attention_output" in trace) == (tp == 1), "ranks have partial sums"
