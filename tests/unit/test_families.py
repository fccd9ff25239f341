"""models.families: every config field is accounted for, defaults are those of transformers, and users can add families."""

import json
import re
from functools import partial
from math import log
from pathlib import Path

import pytest
import torch
import transformers
from family_configs import read, saved, tiny_fields
from tiny_families import FAMILIES as TINY
from tiny_families import IMAGE_FAMILIES, LLAMA3_ROPE, LONG_ROPE, SIZES, YARN_ROPE, config_class
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from models.families import FAMILIES, family_of, llama, load_family, resolve_family_path
from models.hf_config import IGNORED_FIELDS, HFConfig

PREFIXES = sorted({prefix for prefix, _ in TINY.values()})


@pytest.fixture
def fields(tmp_path):
    """`fields(name)` returns the config.json of a tiny model."""
    return partial(tiny_fields, tmp_path)


# fields of which no family supports the default: half of the head_dim of Glm4Moe, 42, is odd; sliding windows
NOT_DEFAULT: dict[str, dict] = {"Glm4Moe": dict(head_dim=128), "Mistral": dict(sliding_window=None)}


def test_every_family_has_a_tiny_model():
    of_images = {f"{prefix}ForConditionalGeneration" for prefix, *_ in IMAGE_FAMILIES.values()}
    assert {f"{prefix}ForCausalLM" for prefix in PREFIXES} | of_images == FAMILIES.keys()


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_default_config_of_transformers_is_accepted(tmp_path, prefix):
    found = saved(tmp_path, prefix, **NOT_DEFAULT.get(prefix, {}))
    listed = found.get("layers_block_type", ())  # Nemotron-H has no field with the number of layers
    assert read(found).num_layers == found.get("num_hidden_layers", len(listed)) > 0


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_reward_model_has_the_name_of_the_classifier_of_transformers(prefix):
    reward_model = HFConfig("c", dict(architectures=[f"{prefix}ForCausalLM"])).as_reward_model()
    assert reward_model.as_reward_model() == reward_model
    assert reward_model.family_architecture == f"{prefix}ForCausalLM"
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config_class(prefix).model_type)
    without = ("DeepseekV32", "Glm4Moe", "GlmMoeDsa", "MiniMaxM2", "NemotronH")
    assert known == (None if prefix in without else reward_model.architecture)


@pytest.mark.parametrize("name", TINY)
def test_an_unknown_field_is_named_in_the_error(fields, name):
    known = fields(name)
    read(known)
    for value in (True, None, 0.5):
        with pytest.raises(
            ValueError, match=rf"^config.json: scale_depth={value} is not known to \w+ForCausalLM in mrl"
        ):
            read(known | dict(scale_depth=value))


@pytest.mark.extended_after(4)
@pytest.mark.parametrize("name", TINY)
def test_a_missing_field_has_the_default_of_transformers(tmp_path, fields, name):
    """A config without a field gives the same architecture as the config in which transformers writes the default."""
    known = fields(name)
    refused = []
    for left_out in known.keys() - {"architectures", "model_type"}:
        part = {name: value for name, value in known.items() if name != left_out}
        try:
            found = read(part)
        except ValueError as error:
            spelling = {"num_local_experts": "num_experts"}.get(left_out, left_out)
            assert re.match(rf"config.json: (field '{spelling}'|.*\b{spelling}=)", str(error))
            refused.append(left_out)
            continue
        (tmp_path / "config.json").write_text(json.dumps(part))
        transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
        assert found == read(json.loads((tmp_path / "config.json").read_text())), left_out
    assert {"hidden_size", "vocab_size"} <= set(refused), "sizes have no default"


def test_no_ignored_field_is_read_by_a_family():
    ignored = [name for names in IGNORED_FIELDS.values() for name in names]
    assert len(ignored) == len(set(ignored))
    for family in FAMILIES.values():
        assert not family.defaults.keys() & set(ignored)


@pytest.mark.extended_after(20)
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", dict(hidden_act="gelu"), "hidden_act='gelu' is not supported; expected 'silu'"),
        ("llama", dict(attention_dropout=0.1), "attention_dropout=0.1 is not supported; expected 0.0"),
        ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
        ("llama", dict(quantization_config=dict(bits=4)), "quantization_config={'bits': 4} is not known"),
        (
            "llama",
            dict(layer_types=["full_attention"] * 2),
            "layer_types=['full_attention', 'full_attention'] is not known",
        ),
        (
            "llama",
            dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)),
            "rope_type='dynamic' is not implemented",
        ),
        (
            "llama",
            dict(rope_parameters=YARN_ROPE | dict(mscale_dim=1)),
            "mscale_dim=1 is not a field of rope_type='yarn'",
        ),
        ("llama", dict(rope_parameters=SIZES["rope_parameters"] | dict(partial_rotary_factor=0.5)), "partial_rotary"),
        ("llama", dict(rope_interleaved=True), "rope_interleaved=True is not supported; expected False"),
        ("llama", dict(rope_theta=7.0), "rope_theta=7.0, but 5000.0 in the parameters of the rotary embedding"),
        ("llama", dict(rope_scaling=YARN_ROPE), "differ; remove one"),
        ("qwen2", dict(use_sliding_window=True), "use_sliding_window=True is not supported; expected False"),
        ("qwen2", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types=['full_attention', 'sliding"),
        ("qwen2", dict(use_mrope=True), "use_mrope=True is not supported"),
        ("qwen2", dict(attention_bias=False), "attention_bias=False is not known to Qwen2ForCausalLM"),
        ("qwen3", dict(layer_types=["full_attention"]), "for each of the 2 layers"),
        ("glm4_moe", dict(norm_topk_prob=False), "norm_topk_prob=False is not supported; expected True"),
        (
            "glm4_moe",
            dict(num_experts_per_tok=6),
            "ranked by their best two experts; expected 4 or 5 experts per token",
        ),
        ("glm4_moe", dict(n_group=None), "n_group=None is not supported; expected a number of 1 or more"),
        ("glm4_moe", dict(topk_group=0), "topk_group=0 is not supported; expected a number of 1 or more"),
        ("glm4_moe_plain", dict(num_experts_per_tok=1), "num_experts_per_tok=1 is not supported; expected at least 2"),
        ("deepseek_v3", dict(rope_interleave=False), "rope_interleave=False is not supported; expected True"),
        ("deepseek_v3", dict(scoring_func="softmax"), "scoring_func='softmax' is not supported; expected 'sigmoid'"),
        ("deepseek_v3", dict(quantization_config=dict(bits=8)), "quantization_config={'bits': 8} is not supported"),
        (
            "deepseek_v32",
            dict(indexer_rope_interleave=True),
            "indexer_rope_interleave=True is not supported; expected False",
        ),
        ("deepseek_v32", dict(index_topk=0), "index_topk=0 is not supported; expected a number of 1 or more"),
        ("deepseek_v32", dict(q_lora_rank=None), "q_lora_rank=None is not supported; expected a number of 1 or more"),
        (
            "deepseek_v32",
            dict(index_head_dim=4),
            "index_head_dim=4 is not supported; expected at least qk_rope_head_dim=6",
        ),
        (
            "deepseek_v32",
            dict(mlp_layer_types=["sparse", "sparse"]),
            "first_k_dense_replace=1 and mlp_layer_types=['sparse', 'sparse'] do not agree",
        ),
        (
            "deepseek_v32",
            dict(layer_types=["full_attention"] * 2),
            "layer_types=['full_attention', 'full_attention'] is not",
        ),
        ("deepseek_v32", dict(index_topk_freq=2), "index_topk_freq=2 is not known to DeepseekV32ForCausalLM"),
        (
            "glm_moe_dsa",
            dict(indexer_rope_interleave=False),
            "indexer_rope_interleave=False is not supported; expected True",
        ),
        ("glm_moe_dsa", dict(indexer_types=["shared", "full"]), "and full for the first layer"),
        ("glm_moe_dsa", dict(moe_router_dtype="bfloat16"), "moe_router_dtype='bfloat16' is not supported"),
        ("glm_moe_dsa", dict(indexer_types=["full"]), "expected full or shared for each of the 2 layers"),
        ("gemma3", dict(hidden_activation="silu"), "hidden_activation='silu' is not supported; expected 'gelu_pytorch"),
        ("gemma3", dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0 is not supported"),
        ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is not supported"),
        ("gpt_oss", dict(swiglu_alpha=1.0), "swiglu_alpha=1.0 is not supported; expected 1.702"),
        ("gpt_oss", dict(experts_per_token=4), "experts_per_token=4 is not supported; expected None or 2"),
        (
            "gpt_oss",
            dict(layer_types=["full_attention"]),
            "sliding_attention or full_attention for each of the 2 layers",
        ),
        (
            "gpt_oss",
            dict(quantization_config=dict(quant_method="fp8")),
            "expected quant_method='mxfp4' or no quantization",
        ),
        ("gpt_oss", dict(num_experts=8), "num_experts=8, num_local_experts=4 are names of one field"),
        ("minimax_m2", dict(use_qk_norm=False), "use_qk_norm=False is not supported; expected True"),
        ("minimax_m2", dict(sliding_window=4096), "sliding_window=4096 is not supported; expected None"),
        ("minimax_m2", dict(attn_type_list=[1, 0]), "attn_type_list=[1, 0] is not supported"),
        ("minimax_m2", dict(num_experts_per_tok=1), "num_experts_per_tok=1 is not supported; expected at least 2"),
        ("minimax_m2", dict(quantization_config=dict(bits=8)), "quantization_config={'bits': 8} is not known"),
        ("olmo2", dict(sliding_window=9), "sliding_window=9 is not known to Olmo2ForCausalLM"),
        ("olmo3", dict(sliding_window=None), "sliding_window=None is not supported; expected a number of tokens"),
        ("olmo3", dict(layer_types=["full_attention"]), "sliding_attention or full_attention for each of the 4 layers"),
        ("olmo3", dict(layer_types=["linear_attention"] * 4), "layer_types=['linear_attention', "),
        ("olmo3", dict(rope_theta=10000.0), "rope_theta=10000.0 is not supported; expected 500000.0"),
        ("olmo3", dict(rope_parameters=YARN_ROPE), "expected parameters for full_attention and for sliding_attention"),
        (
            "olmo3",
            dict(rope_parameters=None, rope_scaling=dict(YARN_ROPE, truncate=False)),
            "truncate=false of the rotary",
        ),
        ("phi3", dict(sliding_window=47), "sliding_window=47 is not supported; expected null, or at least"),
        ("phi3", dict(resid_pdrop=0.1), "resid_pdrop=0.1 is not supported; expected 0.0"),
        ("phi3", dict(attention_bias=True), "attention_bias=True is not supported; expected False"),
        ("phi3", dict(rope_parameters=YARN_ROPE), "a rotary embedding of YarnRope is not supported"),
        (
            "phi3_long",
            dict(rope_parameters=LONG_ROPE["rope_parameters"] | dict(short_factor=[1.0, 2.0])),
            "short_factor=[1.0, 2.0] of the rotary embedding: expected a list of 3 positive numbers",
        ),
        (
            "phi3_long",
            dict(rope_parameters=LONG_ROPE["rope_parameters"] | dict(factor=2.0)),
            "factor=2.0 of the rotary embedding is not supported; expected max_position_embeddings /",
        ),
        ("mistral", dict(sliding_window=63), "sliding_window=63 is not supported; expected null, or at least"),
        ("mistral", dict(attention_bias=True), "attention_bias=True is not known to MistralForCausalLM"),
        ("qwen3_5", dict(attn_output_gate=False), "attn_output_gate=False is not supported; expected True"),
        ("qwen3_5", dict(output_gate_type="sigmoid"), "output_gate_type='sigmoid' is not supported"),
        (
            "qwen3_5",
            dict(layer_types=["full_attention"]),
            "linear_attention or full_attention for each of the 2 layers",
        ),
        ("qwen3_5", dict(layer_types=["sliding_attention"] * 2), "layer_types=['sliding_attention', "),
        ("qwen3_5", dict(linear_num_key_heads=3), "linear_num_value_heads=8 is not supported; expected a multiple of"),
        ("qwen3_5", dict(num_experts=4), "num_experts=4 is not known to Qwen3_5ForCausalLM"),
        ("qwen3_next", dict(use_sliding_window=True), "use_sliding_window=True is not supported; expected False"),
        ("nemotron_h", dict(mlp_hidden_act="silu"), "mlp_hidden_act='silu' is not supported; expected 'relu2'"),
        ("nemotron_h", dict(mlp_bias=True), "mlp_bias=True is not supported; expected False"),
        ("nemotron_h", dict(tie_word_embeddings=True), "tie_word_embeddings=True is not supported; expected False"),
        (
            "nemotron_h",
            dict(time_step_limit=[0.0, 0.1]),
            "time_step_limit=[0.0, 0.1] is not supported; expected [0.0, Inf",
        ),
        ("nemotron_h", dict(attention_head_dim=8), "attention_head_dim=8 is not supported; expected None or 16"),
        ("nemotron_h", dict(n_groups=3), "mamba_num_heads=8 is not supported; expected a multiple of n_groups=3"),
        ("nemotron_h", dict(mamba_n_groups=8), "n_groups=4, mamba_n_groups=8 are names of one field"),
        (
            "nemotron_h",
            dict(layers_block_type=["mamba", "mamba2"]),
            "expected linear_attention or full_attention or mamba",
        ),
        (
            "nemotron_h",
            dict(hybrid_override_pattern="M-*|"),
            "hybrid_override_pattern='M-*|' is not supported; expected M",
        ),
        ("nemotron_h", dict(hybrid_override_pattern="M-*-"), "and num_hidden_layers=None differ; remove all but one"),
        ("nemotron_h", dict(num_hidden_layers=3), "and num_hidden_layers=3 differ; remove all but one of these fields"),
        ("nemotron_h_moe", dict(moe_latent_size=16), "moe_latent_size=16 is not supported; expected None"),
        ("nemotron_h_moe", dict(n_shared_experts=2), "n_shared_experts=2 is not supported; expected 1"),
        ("nemotron_h_moe", dict(norm_topk_prob=False), "norm_topk_prob=False is not supported; expected True"),
        (
            "glm4",
            dict(rope_parameters=YARN_ROPE | dict(short_factor=[1.0])),
            "short_factor=[1.0] is not a field of rope",
        ),
        (
            "ministral3",
            dict(rope_parameters=YARN_ROPE),
            "expected numbers in llama_4_scaling_beta and in original_max_pos",
        ),
        ("ministral3", dict(sliding_window=9), "sliding_window=9 is not supported; expected None"),
        ("smollm3", dict(no_rope_layers=[1]), "no_rope_layers=[1] is not supported; expected 0 or 1 for each of the 2"),
        ("smollm3", dict(no_rope_layers=[1, 2]), "no_rope_layers=[1, 2] is not supported; expected 0 or 1"),
        ("mixtral", dict(sliding_window=4096), "sliding_window=4096 is not supported; expected None"),
        ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise=0.1 is not supported"),
    ],
)
def test_an_unsupported_value_raises_an_error(fields, name, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(fields(name) | change)


@pytest.mark.parametrize("rope", [SIZES["rope_parameters"], LLAMA3_ROPE, YARN_ROPE], ids=lambda r: r["rope_type"])
def test_the_rotary_fields_of_transformers_4_give_the_same_embedding(fields, rope):
    new = fields("llama") | dict(rope_parameters=rope)
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    scaling = {("type" if name == "rope_type" else name): value for name, value in rope.items() if name != "rope_theta"}
    old |= dict(rope_theta=rope["rope_theta"], rope_scaling=scaling if rope["rope_type"] != "default" else None)
    assert read(old) == read(new)


def test_the_field_rotary_dim_sets_the_rotated_components(fields):
    known = {name: value for name, value in fields("minimax_m2").items() if name != "partial_rotary_factor"}
    known |= dict(rope_parameters=SIZES["rope_parameters"])
    assert read(known | dict(rotary_dim=8)).rope.dim == 8
    assert read(known | dict(rotary_dim=8, partial_rotary_factor=0.25)).rope.dim == 4
    assert read(known | dict(rotary_dim=None)).rope.dim == 16


def test_the_config_says_which_layers_have_no_rope(fields):
    assert read(fields("smollm3")).transformer["no_rope_freq"] == [0, 1]
    by_interval = {name: value for name, value in fields("smollm3").items() if name != "no_rope_layers"}
    assert read(by_interval | dict(num_hidden_layers=5, layer_types=None)).transformer["no_rope_freq"] == [
        0,
        1,
        0,
        1,
        0,
    ]
    assert "no_rope_freq" not in read(fields("smollm3") | dict(no_rope_layers=[1, 1])).transformer


def test_the_queries_of_ministral_grow_with_the_position(fields):
    scaling = read(fields("ministral3")).query_scaling
    factors = scaling.factors(torch.tensor([0, 15, 16, 33]))
    assert factors.tolist() == pytest.approx([1.0, 1.0, 1 + 0.1 * log(2), 1 + 0.1 * log(3)])


def test_seed_oss_has_no_dropout(fields):
    assert fields("seed_oss")["attention_dropout"] == 0.1
    assert "attention_dropout" not in read(fields("seed_oss")).transformer


def test_a_family_can_rotate_a_part_of_each_head():
    config = HFConfig("c", dict(rope_theta=1e4), defaults=dict(partial_rotary_factor=0.5))
    assert config.rope(16, partial=True).dim == 8
    said = HFConfig("c", dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.25)))
    assert said.rope(16, partial=True).dim == 4


OWN = Path(llama.__file__).read_text().replace("LlamaForCausalLM", "MineForCausalLM").replace("LLAMA =", "MINE =")


def test_a_user_defined_family_is_loaded_from_its_file(tmp_path, fields, monkeypatch):
    (tmp_path / "mine.py").write_text(OWN)
    known = fields("llama_biased")
    reference = f"{tmp_path}/mine.py:MINE"
    config = HFConfig("config.json", known | dict(architectures=["MineForCausalLM"]), reference)
    family = family_of(config)
    assert family.read(config) == read(known)
    assert family is load_family(reference)
    monkeypatch.chdir(tmp_path)
    assert resolve_family_path("mine.py:MINE") == reference
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        resolve_family_path("mine:MINE") == "mine:MINE" and load_family("mine:MINE").architecture == "MineForCausalLM"
    )


def test_the_family_in_the_documentation_works(tmp_path, fields):
    page = (Path(__file__).parents[2] / "docs/tutorials/model.md").read_text()
    (text,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "MINE = " in block)
    (tmp_path / "shown.py").write_text(text)
    known = fields("llama") | dict(architectures=["MineForCausalLM"], residual_scale=1.0)
    reference = f"{tmp_path}/shown.py:MINE"
    config = HFConfig("config.json", known, reference)
    arch = family_of(config).read(config)
    assert arch == read(fields("llama"))
    assert family_of(config).hf_shapes(arch) == FAMILIES["LlamaForCausalLM"].hf_shapes(arch)
    scaled = HFConfig("config.json", known | dict(residual_scale=0.5), reference)
    with pytest.raises(ValueError, match=r"residual_scale=0.5 is not supported; expected 1.0"):
        family_of(scaled).read(scaled)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{folder}/none.py:MINE", "cannot be imported (FileNotFoundError"),
        ("no.such.package:MINE", "cannot be imported (ModuleNotFoundError"),
        ("{folder}/mine.py:YOURS", "has no YOURS; expected a Family"),
        ("{folder}/mine.py:translate", "it is a function; expected a models.architecture.Family"),
        ("{folder}/broken.py:MINE", "cannot be imported (ZeroDivisionError"),
        ("{folder}/mine.py", "expected 'package.module:NAME' or '/path/file.py:NAME'"),
        (
            "models.families.qwen:QWEN2",
            "it is the family of 'Qwen2ForCausalLM', but config.json has 'MineForCausalLM'",
        ),
    ],
)
def test_a_family_that_cannot_be_loaded_is_explained(tmp_path, reference, message):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("1 / 0")
    reference = reference.format(folder=tmp_path)
    config = HFConfig("config.json", dict(architectures=["MineForCausalLM"]), reference)
    with pytest.raises(ValueError, match=f"^model.family={re.escape(reference)}: .*{re.escape(message)}"):
        family_of(config)


def test_the_error_for_an_unknown_architecture_lists_the_known_ones_and_model_family():
    with pytest.raises(
        ValueError, match=r"'MineForCausalLM' is not supported; known: DeepseekV32ForCausalLM, .*model.family"
    ):
        family_of(HFConfig("config.json", dict(architectures=["MineForCausalLM"])))
