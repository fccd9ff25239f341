"""models.families: configs that SGLang computes differently are refused, and so are engines that cannot hold a family."""

# ruff: noqa: F811 - fixtures of another file

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_families import fields, read  # noqa: F401
from tiny_families import GEMMA, LONG_ROPE, RECURRENT, SIZES, YARN_ROPE, config_class

from models.families import family_of
from models.hf_config import HFConfig
from mrl.config import hydra_entry
from mrl.controller.plan_models import engine_parallel_sizes
from mrl.weight_sync.engine_layout import EngineParallelSizes, check_heads
from parallel.rope import Rope

GEMMA_ROPE = GEMMA["rope_parameters"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama_mlp_biased", {}, "has mlp_bias, which SGLang silently ignores"),
        ("seed_oss", {}, "SGLang 0.5.23 does not implement SeedOssForCausalLM"),
        ("gemma3", dict(tie_word_embeddings=False), "has untied embeddings, which SGLang silently ignores"),
        (
            "gemma3",
            dict(rope_parameters=dict(GEMMA_ROPE, full_attention=YARN_ROPE)),
            "has RoPE scaling, except",
        ),
        (
            "gemma3",
            dict(rope_parameters=dict(GEMMA_ROPE, sliding_attention=GEMMA_ROPE["full_attention"])),
            "except linear scaling in layers with full attention, which SGLang silently ignores",
        ),
        ("gpt_oss_plain", {}, "has tied embeddings, which SGLang silently ignores"),
        (
            "deepseek_v32",
            dict(index_head_dim=64),
            "index_head_dim=64, but SGLang 0.5.23 caches keys of indexers only with 128",
        ),
        ("gpt_oss", dict(quantization_config=dict(quant_method="mxfp4")), "SGLang would keep the experts in MXFP4"),
        ("minimax_m2", dict(rotary_dim=None, partial_rotary_factor=0.25), "has partial_rotary_factor, which SGLang"),
        ("olmo2", dict(head_dim=16), "has a head_dim other than hidden_size / num_attention_heads, which SGLang"),
        ("olmo3", {}, "SGLang 0.5.23 does not implement Olmo3ForCausalLM"),
        ("qwen3_5", {}, 'SGLang requires fields that transformers omits; add "full_attention_interval": 4'),
        ("qwen3_5", dict(full_attention_interval=3), ", layer_types that differ from full_attention_interval, which"),
        ("qwen3_5", dict(full_attention_interval=2), "has a rotary embedding that differs from rope_theta and partial"),
        ("qwen3_5_biased", dict(full_attention_interval=2), "has a rotary embedding .*, proj_bias, qkv_bias, which"),
        ("qwen3_next", dict(full_attention_interval=2, mlp_only_layers=[0]), "layers without experts, which SGLang"),
        ("nemotron_h", {}, 'names for the values of layers_block_type; write "attention" in place of "full_attention"'),
        (
            "nemotron_h",
            dict(layers_block_type=["mamba"]),
            "has n_groups other than 8, and no field mamba_n_groups with the same value",
        ),
        (
            "phi3",
            dict(rope_parameters=SIZES["rope_parameters"] | dict(partial_rotary_factor=0.5)),
            "has rope_parameters.partial_rotary_factor, which SGLang silently ignores",
        ),
        (
            "phi3",
            dict(
                rope_parameters=SIZES["rope_parameters"] | dict(partial_rotary_factor=0.5), partial_rotary_factor=0.75
            ),
            "has rope_parameters.partial_rotary_factor, which SGLang silently ignores",
        ),
        (
            "phi3_long",
            dict(rope_parameters=LONG_ROPE["rope_parameters"] | dict(attention_factor=0.8)),
            "attention_factor=0.8 of the rotary",
        ),
        ("qwen3", dict(rope_parameters=YARN_ROPE | dict(attention_factor=0.8)), "attention_factor=0.8 of the rotary"),
        ("ministral3", {}, "has a query scaling with original_max_position_embeddings other than 16384, which SGLang"),
        ("smollm3", {}, "SGLang 0.5.23 does not implement SmolLM3ForCausalLM"),
    ],
)
def test_a_config_that_sglang_computes_differently_raises_an_error(fields, name, change, message):
    config = HFConfig("config.json", fields(name) | change)
    family = family_of(config)
    with pytest.raises(ValueError, match=message):
        family.check_engine(config, family.read(config))


ALIKE = [
    *(
        "llama",
        "llama_attention_biased",
        "gemma3",  # with linear scaling
        "qwen2",
        "qwen3_biased",
        "gpt_oss",
        "minimax_m2",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "phi3_long",
    ),
    *("glm4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4", "glm4_plain"),
]


@pytest.mark.extended_after(5)
@pytest.mark.parametrize("name", ALIKE)
def test_a_config_that_sglang_computes_equally_is_accepted(fields, name):
    config = HFConfig("config.json", fields(name))
    family_of(config).check_engine(config, read(fields(name)))


def test_nemotron_h_has_an_engine_with_the_fields_that_sglang_reads(fields):
    known = fields("nemotron_h") | dict(layers_block_type=["mamba", "mlp", "attention", "mamba"], mamba_n_groups=4)
    config = HFConfig("config.json", known)
    family_of(config).check_engine(config, read(known))
    config = HFConfig("config.json", {name: value for name, value in known.items() if name != "n_groups"})
    with pytest.raises(ValueError, match='SGLang requires fields that transformers omits; add "n_groups": 8'):
        family_of(config).check_engine(config, read(config.fields))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_a_published_style_of_gated_delta_nets_has_an_engine(fields, name):
    """Qwen3-Next has the rotary fields of transformers 4, and Qwen3.5 has positions of images in its rotary parameters."""
    known = fields(name) | dict(full_attention_interval=2, partial_rotary_factor=0.5)
    del known["rope_parameters"]
    new = dict(RECURRENT["rope_parameters"], mrope_section=[2, 1, 1], mrope_interleaved=True)
    known |= dict(rope_parameters=new) if name == "qwen3_5" else dict(rope_theta=5000.0, rope_scaling=None)
    config = HFConfig("config.json", known)
    arch = read(known)
    family_of(config).check_engine(config, arch)
    assert arch.rope == Rope(rope_theta=5000.0, dim=8)
    assert [arch.is_recurrent(layer) for layer in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("name", "stored", "is_refused"),
    [("gpt_oss", "float32", True), ("qwen3_5", "float32", True)]
    + [("gpt_oss", "bfloat16", False), ("gpt_oss", None, False), ("qwen3", "float32", False)],
)
def test_an_engine_that_takes_the_dtype_of_config_json_must_find_its_own(fields, name, stored, is_refused):
    config = HFConfig("config.json", fields(name) | dict(dtype=stored, torch_dtype=None))
    with pytest.raises(ValueError, match='Write "dtype": "bfloat16" there') if is_refused else nullcontext():
        family_of(config).check_engine_dtype(config, "bfloat16")


def test_an_engine_divides_the_heads_of_gated_delta_nets(fields):
    arch = read(fields("qwen3_5") | dict(linear_num_key_heads=2))
    check_heads(arch, EngineParallelSizes(tp=2))
    with pytest.raises(ValueError, match=r"^rollout.engine_tp=4: 4 ranks cannot share linear_num_key_heads=2 evenly"):
        check_heads(arch, EngineParallelSizes(tp=4))


def test_a_missing_field_that_only_sglang_needs_raises_an_error(fields):
    left = {name: value for name, value in fields("deepseek_v3").items() if name != "topk_method"}
    config = HFConfig("config.json", left)
    with pytest.raises(
        ValueError, match='SGLang requires fields that transformers omits; add "topk_method": "noaux_tc"'
    ):
        family_of(config).check_engine(config, read(left))


def test_gemma_with_plain_rotary_embeddings_has_an_engine(fields):
    ropes = GEMMA_ROPE | dict(full_attention=dict(rope_type="default", rope_theta=1e6))
    config = HFConfig("config.json", fields("gemma3") | dict(rope_parameters=ropes))
    family_of(config).check_engine(config, family_of(config).read(config))


@pytest.mark.extended
def test_sglang_scales_the_rotary_embeddings_of_gemma_in_layers_with_full_attention(fields):
    """SGLang passes the parameters of these layers to its module, and plain ones for layers with a window."""
    from sglang.srt.models.gemma3_causal import Gemma3RotaryEmbedding  # the import takes seconds

    known = fields("gemma3")
    config = config_class("Gemma3").from_dict(known)
    config.rope_parameters = dict(GEMMA_ROPE["full_attention"])
    assert torch.equal(Gemma3RotaryEmbedding(config).inv_freq, read(known).rope.inv_freq())


@pytest.mark.extended
@pytest.mark.parametrize(("name", "is_refused"), [("olmo2", True), ("qwen3", False)])
def test_engine_ranks_with_the_same_key_head_cannot_normalize_all_keys_together(fields, tmp_path, name, is_refused):
    """Both models have two key/value heads."""
    hf = HFConfig("config.json", fields(name))
    keys = [f"model.path={tmp_path}", "model.dtype=float32", "run.dir=out", "rollout.engine_tp=4"]
    config = hydra_entry.compose_config(hydra_entry.check_overrides(keys))
    actor = SimpleNamespace(hf=hf, arch=family_of(hf).read(hf))
    if not is_refused:
        assert engine_parallel_sizes(config, actor).tp == 4
        return
    message = "2 key/value heads of Olmo2ForCausalLM, it would count a head twice; use at most 2"
    with pytest.raises(ValueError, match=rf"rollout.engine_tp=4: .* {message}"):
        engine_parallel_sizes(config, actor)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("dtype", "deterministic", "device", "is_refused"),
    [
        ("float32", "false", "cuda", True),
        ("float32", "true", "cuda", False),
        ("bfloat16", "false", "cuda", False),
        ("float32", "false", "cpu", False),
    ],
)
def test_engines_on_gpus_compute_in_float32_only_in_deterministic_inference(
    fields, tmp_path, dtype, deterministic, device, is_refused
):
    hf = HFConfig("config.json", fields("qwen3"))
    actor = SimpleNamespace(hf=hf, arch=family_of(hf).read(hf))
    keys = [f"model.path={tmp_path}", f"model.dtype={dtype}", "run.dir=out", f"rollout.deterministic={deterministic}"]
    keys += [f"sglang.device={device}"]
    config = hydra_entry.compose_config(hydra_entry.check_overrides(keys))
    with (
        pytest.raises(ValueError, match=r"^model.dtype=float32: .* or set rollout.deterministic=true\.$")
        if is_refused
        else nullcontext()
    ):
        engine_parallel_sizes(config, actor)


def test_engines_with_sparse_attention_compute_in_bfloat16(fields):
    config = HFConfig("config.json", fields("glm_moe_dsa"))
    family_of(config).check_engine_dtype(config, "bfloat16")
    with pytest.raises(
        ValueError, match=r"computes GlmMoeDsaForCausalLM only in bfloat16, not in float16; set sglang.dtype="
    ):
        family_of(config).check_engine_dtype(config, "float16")


def test_sglang_rotates_the_pairs_of_the_indexer_that_the_config_names(fields):
    """Without the field, SGLang would rotate the pairs of DeepSeek-V3.2."""
    left = {name: value for name, value in fields("glm_moe_dsa").items() if name != "indexer_rope_interleave"}
    config = HFConfig("config.json", left)
    with pytest.raises(ValueError, match='add "indexer_rope_interleave": true'):
        family_of(config).check_engine(config, read(left))


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", ["minimax_m2", "gpt_oss", "deepseek_v32", "glm_moe_dsa"])
def test_engines_of_some_families_need_gpus(fields, tmp_path, name):
    hf = HFConfig("config.json", fields(name))
    actor = SimpleNamespace(hf=hf, arch=family_of(hf).read(hf))
    keys = [f"model.path={tmp_path}", "model.dtype=float32", "run.dir=out", "sglang.device=cpu"]
    config = hydra_entry.compose_config(hydra_entry.check_overrides(keys))
    with pytest.raises(ValueError, match=rf"SGLang 0.5.23 has no kernels for {hf.architecture} on a CPU"):
        engine_parallel_sizes(config, actor)


@pytest.mark.extended
def test_engine_ranks_that_share_an_expert_cannot_receive_biases(fields, tmp_path):
    hf = HFConfig("config.json", fields("gpt_oss"))
    actor = SimpleNamespace(hf=hf, arch=family_of(hf).read(hf))
    keys = [f"model.path={tmp_path}", "run.dir=out", "rollout.engine_tp=2", "cluster.address=auto"]

    def parallel_sizes(*more: str) -> EngineParallelSizes:
        return engine_parallel_sizes(hydra_entry.compose_config(hydra_entry.check_overrides([*keys, *more])), actor)

    with pytest.raises(
        ValueError, match=r"2 engine ranks would share each expert.* set sglang.ep_size=2, or weight_sync"
    ):
        parallel_sizes()
    assert parallel_sizes("sglang.ep_size=2").ep == 2 and parallel_sizes("weight_sync.transport=disk").tp == 2
