"""models.families: every config field is accounted for, defaults are those of transformers, and users can add families."""

import json
import re
from copy import deepcopy
from pathlib import Path

import pytest
import transformers
from tiny_families import FAMILIES as TINY
from tiny_families import LLAMA3_ROPE, SIZES, YARN_ROPE

from models.architecture import Architecture
from models.families import FAMILIES, family_of, llama, load_family, resolve_family_path
from models.hf_config import IGNORED_FIELDS, HFConfig

PREFIXES = sorted({prefix for prefix, _ in TINY.values()})


def saved(folder: Path, prefix: str, **fields) -> dict:
    """Return the config.json that transformers writes."""
    fields = deepcopy(fields)  # some config classes modify their arguments
    config = getattr(transformers, f"{prefix}Config")(architectures=[f"{prefix}ForCausalLM"], **fields)
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def read(fields: dict, path="config.json") -> Architecture:
    config = HFConfig(path, fields)
    return family_of(config).read(config)


@pytest.fixture
def fields(tmp_path):
    """`fields(name)` returns the config.json of a tiny model."""

    def of(name: str) -> dict:
        prefix, its_own = TINY[name]
        return saved(tmp_path, prefix, **(SIZES | its_own))

    return of


def test_every_family_has_a_tiny_model():
    assert {f"{prefix}ForCausalLM" for prefix in PREFIXES} == FAMILIES.keys()


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_default_config_of_transformers_is_accepted(tmp_path, prefix):
    fields = dict(head_dim=128) if prefix == "Glm4Moe" else {}  # the default head_dim is 42, and half of it is odd
    found = saved(tmp_path, prefix, **fields)
    assert read(found).num_layers == found["num_hidden_layers"]


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


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama_mlp_biased", {}, "has mlp_bias, which SGLang silently ignores"),
        ("qwen3", dict(rope_parameters=YARN_ROPE | dict(attention_factor=0.8)), "attention_factor=0.8 of the rotary"),
    ],
)
def test_a_config_that_sglang_computes_differently_raises_an_error(fields, name, change, message):
    config = HFConfig("config.json", fields(name) | change)
    family = family_of(config)
    with pytest.raises(ValueError, match=message):
        family.check_engine(config, family.read(config))


ALIKE = ["llama", "llama_attention_biased", "qwen2", "qwen3_biased", "mixtral", "glm4_moe", "deepseek_v3"]


@pytest.mark.parametrize("name", ALIKE)
def test_a_config_that_sglang_computes_equally_is_accepted(fields, name):
    config = HFConfig("config.json", fields(name))
    family_of(config).check_engine(config, read(fields(name)))


def test_a_missing_field_that_only_sglang_needs_raises_an_error(fields):
    left = {name: value for name, value in fields("deepseek_v3").items() if name != "topk_method"}
    config = HFConfig("config.json", left)
    with pytest.raises(
        ValueError, match='SGLang requires fields that transformers omits; add "topk_method": "noaux_tc"'
    ):
        family_of(config).check_engine(config, read(left))


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
    (text,) = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/tutorials/model.md").read_text(), re.DOTALL
    )
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
        ValueError, match=r"'MineForCausalLM' is not supported; known: DeepseekV3ForCausalLM, .*model.family"
    ):
        family_of(HFConfig("config.json", dict(architectures=["MineForCausalLM"])))
