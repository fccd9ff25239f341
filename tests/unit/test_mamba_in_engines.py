"""Nemotron-H in engines: SGLang's names of the parameters, the parts that each rank holds, and the decays that SGLang stores."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny_families import FAMILIES, SIZES, make_family

from models.architecture import Architecture
from models.conversion.hf_reader import HFWeights
from models.conversion.mapping import Box
from models.families.nemotron_h import NEMOTRON_H
from models.hf_config import HFConfig
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes, check_heads
from mrl.weight_sync.session import negative_exp_reader

BLOCKS = {  # kind of layer -> class of its block in SGLang
    "linear_attention": ("layers/attention/mamba/mamba.py", "MambaMixer2"),
    "full_attention": ("models/nemotron_h.py", "NemotronHAttention"),
    "mlp": ("models/nemotron_h.py", "NemotronHMLP"),
    "moe": ("models/nemotron_h.py", "NemotronHMoE"),
}


def architecture(name: str) -> Architecture:
    fields = SIZES | FAMILIES[name][1] | dict(architectures=[NEMOTRON_H.architecture])
    return NEMOTRON_H.read(HFConfig("config.json", fields))


def attributes(file: str, name: str) -> set[str]:
    """Return the names of the attributes that the methods of a class of SGLang set. `file`: path below sglang/srt."""
    tree = ast.parse(Path(find_spec("sglang").submodule_search_locations[0], "srt", file).read_text())
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    targets = [target for node in ast.walk(found) if isinstance(node, ast.Assign) for target in node.targets]
    return {target.attr for target in targets if isinstance(target, ast.Attribute)}


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_moe"])
def test_parameters_have_the_names_of_sglang(name):
    params = [
        p.split(".") for p in EngineLayout.of(NEMOTRON_H, architecture(name), EngineParallelSizes()).param_shapes(0)
    ]
    outside = {path[1] for path in params if path[0] == "model"}
    assert outside <= attributes("models/nemotron_h.py", "NemotronHModel") | {
        "layers"
    }  # one statement sets three values
    assert outside == {"embed_tokens", "layers", "norm_f"} and {p[0] for p in params} == {"model", "lm_head"}
    for layer, kind in enumerate(FAMILIES[name][1]["layers_block_type"]):
        mine = [path[3:] for path in params if path[:3] == ["model", "layers", str(layer)]]
        assert {path[0] for path in mine} == {"norm", "mixer"}
        assert {path[1] for path in mine if path[0] == "mixer"} <= attributes(*BLOCKS[kind])


def test_sglang_stores_minus_the_exponential_of_the_decays():
    """A statement of SGLang's layer says this, and its shards have the same elements as the shards of A_log."""
    source = Path(find_spec("sglang").submodule_search_locations[0], "srt", BLOCKS["linear_attention"][0]).read_text()
    assert "lambda x: -torch.exp(x.float())" in source
    (row,) = {row.hf for row in NEMOTRON_H.rows(architecture("nemotron_h")) if row.negative_exp_in_engine}
    assert row == ("backbone.layers.{layer}.mixer.A_log",)
    logs = torch.linspace(-2, 2, 8, dtype=torch.bfloat16)
    read = negative_exp_reader(lambda name, box: logs[box.slices], {"A_log"})
    box = Box((4,), (4,))
    assert torch.equal(read("A_log", box), -torch.exp(logs[4:].float())) and torch.equal(read("D", box), logs[4:])


def test_sglang_does_not_limit_the_steps_of_mamba_2():
    """transformers raises them to at least time_step_min. mrl computes what engines compute."""
    source = Path(find_spec("sglang").submodule_search_locations[0], "srt", BLOCKS["linear_attention"][0]).read_text()
    assert source.count("dt_limit=") == source.count('dt_limit=(0.0, float("inf"))') == 1


def test_decays_and_correction_biases_are_float32():
    layout = EngineLayout.of(NEMOTRON_H, architecture("nemotron_h_moe"), EngineParallelSizes(2))
    in_float32 = {param for param in layout.param_shapes(0) if layout.dtype_of(param, "bfloat16") == "float32"}
    biases = {f"model.layers.{layer}.mixer.gate.e_score_correction_bias" for layer in (1, 3)}
    assert in_float32 == {"model.layers.0.mixer.A"} | biases


def test_each_rank_has_its_part_of_every_section(tmp_path):
    """The sections of the input projection are gates, values, keys, queries and numbers of heads."""
    tensors, arch = HFWeights(make_family("nemotron_h", tmp_path)), architecture("nemotron_h")
    layout = EngineLayout.of(NEMOTRON_H, arch, EngineParallelSizes(2))
    values, states, heads = (arch.sizes[name] for name in ("values", "states", "mamba_heads"))
    sections = {"in_proj.weight": [values, values, states, states, heads], "conv1d.bias": [values, states, states]}
    for rank in range(2):
        shards = layout.shards(rank)
        for name, rows in sections.items():
            whole = tensors[f"backbone.layers.0.mixer.{name}"]
            expected = torch.cat([part.chunk(2)[rank] for part in whole.split(rows)])
            found = torch.zeros_like(expected)
            for shard in (s for s in shards if s.param == f"model.layers.0.mixer.{name}"):
                found[shard.box_in_param(shard.box).slices] = whole[shard.box.slices]
            assert torch.equal(found, expected)


def test_engines_stack_the_up_projections_of_experts():
    arch = architecture("nemotron_h_moe")
    shapes = EngineLayout.of(NEMOTRON_H, arch, EngineParallelSizes(2)).param_shapes(0)
    assert shapes["model.layers.1.mixer.experts.w13_weight"] == (6, 12, 32)
    assert shapes["model.layers.1.mixer.experts.w2_weight"] == (6, 32, 12)
    assert shapes["model.layers.1.mixer.shared_experts.up_proj.weight"] == (10, 32)


def test_an_engine_divides_the_groups_of_mamba_2():
    arch = architecture("nemotron_h")
    check_heads(arch, EngineParallelSizes(4))
    arch.transformer["mamba_num_groups"] = 2
    with pytest.raises(ValueError, match=r"^rollout.engine_tp=4: 4 ranks cannot share n_groups=2 evenly"):
        check_heads(arch, EngineParallelSizes(4))
