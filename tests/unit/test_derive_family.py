"""mrl family derive: probes find what tensors do, and derived families are equal to the built-in ones."""

import difflib
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_families import FAMILIES as TINY
from tiny_families import SIZES, config_class

import models.families
from models.derive.engine_source import read_engine_source
from models.derive.formulas import AttentionOptions, Routing, attend, gated_mlp, rms_norm, rotate, route
from models.derive.probes import match_attention, match_mlp, match_moe, match_norm
from models.derive.proof import compare_gradients
from models.derive.proposal import family_from_code, other_rope_fields, propose
from models.derive.tiny_config import build_config, read_fields, shrink
from models.derive.tiny_model import Call
from models.families import FAMILIES
from models.hf_config import HFConfig
from mrl.commands import certify
from mrl.commands import family as command
from mrl.config import hydra_entry
from parallel.rope import QueryScaling

T, H, A, G, D = 16, 28, 4, 2, 6  # tokens, hidden size, heads, key/value groups, size of a head


def config_of(prefix: str, **fields) -> dict:
    """Return the fields of config.json that transformers writes."""
    config = config_class(prefix)(architectures=[f"{prefix}ForCausalLM"], **deepcopy(fields))
    return json.loads(config.to_json_string())


def tiny(name: str) -> dict:
    prefix, fields = TINY[name]
    return config_of(prefix, **(SIZES | fields))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + 7 * len(shape)))


# probes of single blocks


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("eps", [1e-3, 1e-2])
def test_the_probe_of_norms_finds_epsilon_and_the_offset_of_the_weight(plus_one, eps):
    x, weight = random(T, H), random(H)
    call = Call(x, rms_norm(x, weight, eps, plus_one))
    found = match_norm(weight, call, dict(some_eps=1e-3, rms_norm_eps=1e-2))
    assert found is not None and (found["eps"], found["plus_one"]) == (eps, plus_one)
    assert match_norm(weight, Call(x, torch.nn.functional.layer_norm(x, [H], weight)), {}) is None


def attention_call(options: AttentionOptions, sinks: bool = False, norms: str = ""):
    """Return (tensors, call, rotary) of an attention block. Its matrices have names that say nothing."""
    tensors = {
        "w.weight": random(G * D, H),
        "x.weight": random(H, A * D),
        "y.weight": random(A * D, H) + 0.1,
        "z.weight": random(G * D, H) - 0.1,
        "x.bias": random(H),
    }
    sizes = (G, A) if norms == "whole" else (1, 1)
    tensors |= {"n.weight": random(sizes[0] * D) + 1, "m.weight": random(sizes[1] * D) - 1} if norms else {}
    tensors |= {"s": random(A)} if sinks else {}
    x = random(T, H)
    angles = torch.outer(torch.arange(T).float(), torch.tensor([1.0, 0.3]))
    cos_sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    q = (x @ tensors["y.weight"].T).unflatten(-1, (A, D))
    k, v = ((x @ tensors[name].T).unflatten(-1, (G, D)) for name in ("w.weight", "z.weight"))
    if norms == "before":
        q, k = rms_norm(q, tensors["m.weight"], 1e-6), rms_norm(k, tensors["n.weight"], 1e-6)
    if norms == "whole":
        q, k = (
            rms_norm(s.flatten(1), tensors[f"{n}.weight"], 1e-6).unflatten(1, (-1, D))
            for n, s in zip("mn", (q, k), strict=True)
        )
    q, k = rotate(q, *cos_sin, options.rope), rotate(k, *cos_sin, options.rope)
    if options.scaling is not None:
        q = q * options.scaling.factors(torch.arange(T))[:, None, None]
    y = attend(q, k, v, options, tensors.get("s")) @ tensors["x.weight"].T + tensors["x.bias"]
    return tensors, Call(x, y), [cos_sin]


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        (AttentionOptions(), {}),
        (AttentionOptions(rope="interleaved"), {}),
        (AttentionOptions(rope="none"), {}),
        (AttentionOptions(window=5), dict(sliding_window=5)),
        (AttentionOptions(softcap=2.0), dict(attn_logit_softcapping=2.0)),
        (AttentionOptions(scale=0.25), dict(query_pre_attn_scalar=16)),
        (
            AttentionOptions(scaling=QueryScaling(0.1, 6)),
            dict(rope_parameters=dict(llama_4_scaling_beta=0.1, original_max_position_embeddings=6)),
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value)[17:-1],
)
def test_the_probe_of_attention_finds_the_tensors_and_the_variant(options, extra):
    tensors, call, rotary = attention_call(options)
    found = match_attention(tensors, call, extra, A, rotary)
    assert found is not None and found.options["attention"] == options
    assert found.slots == dict(q="y.weight", k="w.weight", v="z.weight", o="x.weight", o_bias="x.bias")


@pytest.mark.parametrize(("norms", "slot"), [("before", "norm"), ("whole", "projection_norm")])
def test_the_probe_of_attention_finds_norms_of_queries_and_keys(norms, slot):
    tensors, call, rotary = attention_call(AttentionOptions(), norms=norms)
    found = match_attention(tensors, call, {}, A, rotary)
    assert found is not None and found.options["attention"].norm == norms
    assert (found.slots[f"q_{slot}"], found.slots[f"k_{slot}"]) == ("m.weight", "n.weight")


def test_the_probe_of_attention_finds_sinks():
    tensors, call, rotary = attention_call(AttentionOptions(), sinks=True)
    found = match_attention(tensors, call, {}, A, rotary)
    assert found is not None and found.slots["sinks"] == "s"


def test_the_probe_of_attention_refuses_an_unknown_formula():
    tensors, call, rotary = attention_call(AttentionOptions(scale=0.3))
    assert match_attention(tensors, call, {}, A, rotary) is None


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_the_probe_of_mlps_distinguishes_gate_and_up(activation):
    tensors = {"a": random(20, H), "b": random(20, H) + 0.2, "c": random(H, 20)}
    x = random(T, H) * 0.2  # small, because the two forms of GELU only differ for small numbers
    found = match_mlp(tensors, Call(x, gated_mlp(x, tensors["b"], tensors["a"], tensors["c"], activation)))
    assert found is not None and found.slots == dict(gate="b", up="a", down="c")
    assert found.options["activation"] == activation


def test_the_probe_of_mlps_finds_an_mlp_without_a_gate():
    tensors = {"a": random(20, H), "c": random(H, 20)}
    x = random(T, H)
    found = match_mlp(tensors, Call(x, torch.relu(x @ tensors["a"].T) @ tensors["c"].T))
    assert found is not None and found.slots == dict(up="a", down="c") and found.options["activation"] == "relu"


def test_the_probe_of_mlps_finds_gate_and_up_in_one_matrix():
    tensors = {"a": random(H, 20), "b": random(40, H)}
    x = random(T, H)
    found = match_mlp(tensors, Call(x, gated_mlp(x, *tensors["b"].chunk(2), tensors["a"], "silu")))
    assert found is not None and found.slots == dict(gate_up="b", down="a")
    up_first = gated_mlp(x, *reversed(tensors["b"].chunk(2)), tensors["a"], "silu")
    assert match_mlp(tensors, Call(x, up_first)) is None


@pytest.mark.parametrize(
    "routing",
    [
        Routing("softmax", True),
        Routing("softmax", False),
        Routing("sigmoid", True, 1.7),
        Routing("sigmoid", True, 1.7, groups=3, chosen_groups=2),
    ],
    ids=str,
)
def test_the_probe_of_experts_finds_the_routing_and_the_shared_experts(routing):
    experts, width = 6, 10
    x, tensors = random(T, H), {"gate": random(experts, H) * 0.3, "bias": torch.linspace(-0.2, 0.2, experts)}
    shared = dict(zip("efg", (random(14, H), random(14, H) + 0.1, random(H, 14)), strict=True))
    outputs = []
    for expert in range(experts):
        matrices = random(width, H) + expert, random(width, H) - expert, random(H, width) + expert
        tensors |= {f"experts.{expert}.{name}.weight": m for name, m in zip("wuv", matrices, strict=True)}
        outputs.append(gated_mlp(x, *matrices, "silu"))
    weights = route(x @ tensors["gate"].T, 3, routing, tensors["bias"])
    y = torch.einsum("te,eth->th", weights, torch.stack(outputs)) + gated_mlp(x, *shared.values(), "silu")
    fields = dict(num_experts_per_tok=3, routed_scaling_factor=1.7, n_group=3, topk_group=2)
    found = match_moe(tensors | shared, Call(x, y), fields, experts)
    assert found is not None and found.options["routing"] == routing
    names = {
        slot: f"experts.{{expert}}.{name}.weight" for slot, name in zip(("gate", "up", "down"), "wuv", strict=True)
    }
    names |= dict(router="gate", correction="bias", shared_gate_proj="e", shared_up_proj="f", shared_down_proj="g")
    assert found.slots == names


# the config


def test_the_tiny_config_has_different_sizes_that_two_ranks_can_divide():
    fields = shrink(config_of("DeepseekV3"))
    names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim")
    sizes = [fields[name] for name in names]
    assert len(set(sizes)) == len(sizes) and all(size % 2 == 0 for size in sizes)
    assert build_config(fields).num_hidden_layers == fields["num_hidden_layers"] == 4


def test_the_sequences_of_the_probes_are_longer_than_each_window_and_chunk_of_the_tiny_config():
    fields = dict(sliding_window=4096, attention_chunk_size=8192, local_window=512)
    others = dict(sliding_window_pattern=6, max_window_layers=2, use_local_window=True, chunk_size_feed_forward=0)
    tiny_fields = shrink(config_of("Llama") | fields | others)
    assert {name: tiny_fields[name] for name in fields} == dict.fromkeys(fields, 5)
    assert {name: tiny_fields[name] for name in others} == others


def test_lists_with_a_value_for_each_layer_keep_a_layer_of_each_kind():
    a, b = "full_attention", "sliding_attention"
    lists = dict(layer_types=[a, a, b, b, a], no_rope_layers=[1, 0, 0, 1, 1], eos_token_id=[1, 2, 3, 4, 5])
    fields = shrink(config_of("Llama", num_hidden_layers=5) | lists)
    assert (fields["layer_types"], fields["no_rope_layers"]) == ([a, a, b, b], [1, 0, 0, 1])
    assert fields["eos_token_id"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("{", "not JSON"),
        ('{"model_type": "mine"}', "model_type='mine' is not in the installed transformers"),
        (
            '{"model_type": "llama", "architectures": ["LlamaModel"]}',
            "expected a list of one name that ends in ForCausalLM",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_an_error(tmp_path, capsys, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_fields(tmp_path / "config.json")
    assert command.main(["derive", str(tmp_path / "config.json")]) == 2
    assert message in capsys.readouterr().err


def test_wrong_arguments_are_named(capsys):
    assert command.main(["derive", "model", "--nonsense"]) == 2
    assert "'--nonsense'" in capsys.readouterr().err
    assert command.main(["make"]) == 2 and command.main(["derive"]) == 2
    assert "needs MODEL" in capsys.readouterr().err


def test_an_existing_output_file_is_refused_before_the_model_is_read(tmp_path, capsys):
    output = tmp_path / "own.py"
    output.write_text("mine")
    assert command.main(["derive", str(tmp_path / "no_model"), "--output", str(output)]) == 2
    assert f"--output {output}: the file exists; choose another name or remove it" in capsys.readouterr().err
    assert output.read_text() == "mine"


def test_a_config_without_the_sizes_of_a_decoder_is_an_error():
    with pytest.raises(ValueError, match="GPT2LMHeadModel: its config has no number in hidden_size"):
        shrink(config_of("GPT2") | dict(architectures=["GPT2LMHeadModel"]))


# SGLang's source


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("architecture", "fused", "experts"),
    [
        ("LlamaForCausalLM", {"qkv_proj": ("q_proj", "k_proj", "v_proj")}, None),
        ("MixtralForCausalLM", {"qkv_proj": ("q_proj", "k_proj", "v_proj")}, ("w1", "w3", "w2")),
        (
            "DeepseekV3ForCausalLM",
            {"fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")},
            ("gate_proj", "up_proj", "down_proj"),
        ),
    ],
)
def test_the_fused_tensors_are_read_from_the_source_of_sglang(architecture, fused, experts):
    source = read_engine_source(architecture)
    assert source is not None and source.expert_matrices == experts
    assert {name: source.stacked.get(name) for name in fused} == fused
    assert read_engine_source("NoSuchForCausalLM") is None


# whole families

FAMILY_NAMES = ["llama", "qwen3", "qwen2", "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "mistral"]
ADOPTED = {"glm4": "glm4.py", "ministral3": "ministral3.py", "smollm3": "smol_lm3.py"}  # the command wrote these files
FAMILY_NAMES += list(ADOPTED)
HAND_EDITS = {  # in addition to the docstring
    "ministral3": """\
+_OTHER_PERIOD = "a query scaling with original_max_position_embeddings other than 16384"  # SGLang always takes 16384
+
-    return replace(arch, query_scaling=read_query_scaling(config))
+    arch = replace(arch, query_scaling=(scaling := read_query_scaling(config)))
+    return arch if scaling.period == 16384 else replace(arch, parts=frozenset([_OTHER_PERIOD]))
+    engine_unsupported_parts=frozenset([_OTHER_PERIOD]),
"""
}
PARTS_BY_HAND = {"ministral3": FAMILIES["Ministral3ForCausalLM"].engine_unsupported_parts}
# families with operators or settings that no derived family has
BY_HAND = [
    "deepseek_v32",
    "gemma3",
    "glm_moe_dsa",
    "gpt_oss",
    "minimax_m2",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen3_5",
    "qwen3_next",
    "seed_oss",
]
SAME_CLASS = {name: [other for other in TINY if TINY[other][0] == TINY[name][0]] for name in FAMILY_NAMES}


def test_every_family_is_derived_here_or_written_by_hand():
    assert {TINY[name][0] for name in [*FAMILY_NAMES, *BY_HAND, "nemotron_h"]} == {
        prefix for prefix, _ in TINY.values()
    }


def test_a_config_without_a_number_of_layers_is_refused():
    with pytest.raises(ValueError, match=r"NemotronHForCausalLM: its config has no number in num_hidden_layers"):
        propose(tiny("nemotron_h"))


@pytest.mark.extended_except("olmo2")
@pytest.mark.parametrize("name", BY_HAND)
def test_a_model_with_other_operators_is_never_derived(name):
    assert propose(tiny(name)).problems


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_derived_family_is_equal_to_the_built_in_one(name):
    """The derivation does not use the registry. The families agree on all tiny models of the architecture."""
    proposal = propose(tiny(name))
    assert not proposal.problems
    derived, built_in = family_from_code(proposal.plan), FAMILIES[proposal.plan.architecture]
    for other in SAME_CLASS[name]:
        config = HFConfig(Path("config.json"), tiny(other))
        arch = built_in.read(config)
        arch = replace(arch, parts=arch.parts - PARTS_BY_HAND.get(name, frozenset()))
        assert derived.read(config) == arch, other
        assert derived.param_mappings(arch) == built_in.param_mappings(arch), other
        assert derived.fused_params_of(arch) == built_in.fused_params_of(arch), other
    assert derived.has_mtp_layers == built_in.has_mtp_layers
    assert derived.supported_by_sglang == built_in.supported_by_sglang
    assert derived.engine_unsupported_parts == built_in.engine_unsupported_parts - PARTS_BY_HAND.get(name, frozenset())


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", ADOPTED)
def test_an_adopted_family_is_the_file_that_the_command_writes(name):
    """The command gets the default config of transformers. The docstring, and the lines in HAND_EDITS, are written by hand."""
    written = propose(config_of(TINY[name][0])).plan.code()
    found = (Path(models.families.__file__).parent / ADOPTED[name]).read_text()
    assert "`mrl family derive` wrote this file" in found
    imports = "\nfrom "  # the docstring ends before the first import
    before, after = (text[text.index(imports) :].splitlines() for text in (written, found))
    edits = [line.replace(" ", "", 1) for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert edits == HAND_EDITS.get(name, "").splitlines()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("prefix", "lines"),
    [
        ("Gemma2", ["multiplies by 1 + weight", "embedding: it is multiplied by", "soft cap"]),
        ("Phi3", ["operator Phi3Attention (self_attn)"]),
        ("Granite", ["(config: embedding_multiplier)"]),
    ],
)
def test_unknown_operators_are_named(prefix, lines):
    extra = dict(embedding_multiplier=3.0, residual_multiplier=0.5) if prefix == "Granite" else {}
    problems = propose(config_of(prefix, **(dict(pad_token_id=0) | extra))).problems
    for line in lines:
        assert any(line in problem for problem in problems), (line, problems)


@pytest.mark.extended
def test_a_field_of_the_rotary_embedding_that_nothing_explains_is_named():
    found = tiny("ministral3")
    proposal = propose(found)
    assert 'without=("llama_4_scaling_beta", "max_position_embeddings")' in proposal.plan.code()
    proposal.problems.clear()
    assert other_rope_fields(proposal, has_scaling=False) == ("llama_4_scaling_beta", "max_position_embeddings")
    assert proposal.problems == [
        "rope_parameters: llama_4_scaling_beta=0.1 changes the logits, and no known operator uses it"
    ]


def test_round_off_in_place_of_a_gradient_of_zero_is_no_difference():
    theirs = dict(a=torch.tensor([1.0, 2.0]), bias=torch.tensor([1e-8, -2e-8]))
    assert compare_gradients("m", dict(theirs, bias=torch.tensor([2e-8, 1e-8])), theirs).passed
    assert not compare_gradients("m", dict(theirs, bias=torch.tensor([1e-3, 1e-3])), theirs).passed
    assert not compare_gradients("m", dict(theirs, a=torch.tensor([1.0, 2.1])), theirs).passed


@pytest.mark.extended
def test_a_family_that_is_not_proven_is_not_written(tmp_path, capsys):
    model, output = tmp_path / "config.json", tmp_path / "gemma.py"
    model.write_text(json.dumps(config_of("Gemma2", pad_token_id=0)))
    assert command.main(["derive", str(model), "--output", str(output)]) == 1
    assert not output.exists()
    out = capsys.readouterr().out
    assert "unknown: embedding: it is multiplied by" in out and "no file is written" in out
    assert command.main(["derive", str(model), "--output", str(output), "--draft"]) == 1
    assert output.read_text().startswith("# not proven: ")


@pytest.mark.extended
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_derived_family_is_proven_and_written(tmp_path, capsys, name):
    model, output = tmp_path / "config.json", tmp_path / "mine.py"
    model.write_text(json.dumps(tiny(name)))
    status = command.main(["derive", str(model), "--output", str(output)])
    out = capsys.readouterr().out
    assert status == 0 and "DIFFERS" not in out and ": proven; model.family=" in out
    assert output.is_file()
    assert command.main(["derive", str(model), "--output", str(output)]) == 2, "an existing file is never overwritten"


@pytest.mark.extended
def test_the_check_of_a_layout_has_the_verdict_of_mrl_certify(monkeypatch, tmp_path, capsys):
    config = hydra_entry.compose_config(hydra_entry.check_overrides(["experiment=quickstart", f"run.dir={tmp_path}"]))
    monkeypatch.setattr(certify.plan_tools, "plan_parity", lambda config: SimpleNamespace(dims="tp2"))
    monkeypatch.setattr(certify.build, "certify", lambda plan, loss: [])
    certify.certify_layout(config)
    done = SimpleNamespace(stdout=capsys.readouterr().out, stderr="", returncode=0)
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **options: done)
    check = command._certify("tp", "mine.py:MINE", tmp_path)
    assert check.passed and "agree with those of one process" in check.detail
