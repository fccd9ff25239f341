"""DeepSeek-V3 (arXiv:2412.19437): multi-head latent attention; dense layers, then MoE layers with sigmoid routing.

The MoE layers also have shared experts. decoder_blocks.py explains sigmoid routing. The norms in the attention use
`rms_norm_eps`, as in SGLang and Megatron. For these norms, transformers always uses 1e-6, which is also the value of
`rms_norm_eps` in the published configs.
"""

from dataclasses import replace

from models.architecture import Architecture, Family
from models.conversion.mapping import ParamMapping
from models.conversion.mtp_mapping import NUMBERED_LAYERS
from models.families.decoder_blocks import (
    DEFAULTS,
    DENSE_MLP,
    EMBEDDINGS,
    SIGMOID_ROUTED_MOE,
    SIGMOID_ROUTED_MOE_DEFAULTS,
    SIGMOID_ROUTED_MOE_FUSED_PARAMS,
    read_decoder,
    read_sigmoid_routed_moe,
    sigmoid_routed_moe_parts,
)
from models.hf_config import HFConfig
from parallel.rope import Rope, YarnRope

_MEGATRON_LAYER, _HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_MEGATRON_ATTENTION, _HF_ATTENTION = f"{_MEGATRON_LAYER}.self_attention", f"{_HF_LAYER}.self_attn"

# Symbols in the shapes:
#   q: queries of all heads
#   kv_a: the low-rank vector of keys and values (kv_lora), and the rotated part of the key, which all heads share
#   kv_b: for all heads, the part of the key that is not rotated, and the value
#   o: attention outputs of all heads
#   q_lora: the low-rank vector of queries
LATENT_ATTENTION = (
    ParamMapping(f"{_MEGATRON_LAYER}.input_layernorm.weight", (f"{_HF_LAYER}.input_layernorm.weight",), (("hidden",),)),
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.linear_q_proj.weight",
        (f"{_HF_ATTENTION}.q_proj.weight",),
        (("q", "hidden"),),
        0,
        part="full_rank_q",
    ),
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.linear_q_down_proj.weight",
        (f"{_HF_ATTENTION}.q_a_proj.weight",),
        (("q_lora", "hidden"),),
        part="q_lora",
    ),
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.q_layernorm.weight",
        (f"{_HF_ATTENTION}.q_a_layernorm.weight",),
        (("q_lora",),),
        part="q_lora",
    ),
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.linear_q_up_proj.weight",
        (f"{_HF_ATTENTION}.q_b_proj.weight",),
        (("q", "q_lora"),),
        0,
        part="q_lora",
    ),
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.linear_kv_down_proj.weight",
        (f"{_HF_ATTENTION}.kv_a_proj_with_mqa.weight",),
        (("kv_a", "hidden"),),
    ),
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.kv_layernorm.weight", (f"{_HF_ATTENTION}.kv_a_layernorm.weight",), (("kv_lora",),)
    ),
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.linear_kv_up_proj.weight",
        (f"{_HF_ATTENTION}.kv_b_proj.weight",),
        (("kv_b", "kv_lora"),),
        0,
    ),
    ParamMapping(
        f"{_MEGATRON_ATTENTION}.linear_proj.weight", (f"{_HF_ATTENTION}.o_proj.weight",), (("hidden", "o"),), 1
    ),
)


def translate(config: HFConfig) -> Architecture:
    """Translate a DeepSeek-V3 config. Raises ValueError if a value is not supported."""
    config.expect(attention_bias=False, rope_interleave=True, quantization_config=None, moe_layer_freq=1)
    config.expect(scoring_func="sigmoid", topk_method="noaux_tc", num_key_value_heads=config["num_attention_heads"])
    config.read_fields.update(("ep_size", "aux_loss_alpha", "seq_aux"))  # they do not change the logits
    unrotated, rotated, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    # transformers 5 writes these two fields as well.
    config.expect(head_dim=(None, rotated), qk_head_dim=(None, unrotated + rotated))
    heads, q_lora, kv_lora = config["num_attention_heads"], config["q_lora_rank"], config["kv_lora_rank"]
    rope = config.rope(rotated)
    arch = read_decoder(
        config,
        parts=sigmoid_routed_moe_parts(config) | {"q_lora" if q_lora else "full_rank_q"},
        rope=rope,
        multi_latent_attention=True,
        q_lora_rank=q_lora,
        kv_lora_rank=kv_lora,
        qk_head_dim=unrotated,
        qk_pos_emb_head_dim=rotated,
        v_head_dim=value,
        **_softmax_scale(rope),
        **read_sigmoid_routed_moe(config),
    )
    key, key_and_value = unrotated + rotated, unrotated + value
    sizes = {name: arch.sizes[name] for name in ("vocab", "hidden", "ffn", "experts", "moe_ffn", "shared_ffn")}
    sizes |= dict(
        q=heads * key,
        q_lora=q_lora or 0,
        kv_a=kv_lora + rotated,
        kv_lora=kv_lora,
        kv_b=heads * key_and_value,
        o=heads * value,
    )
    return replace(arch, sizes=sizes, transformer=arch.transformer | dict(kv_channels=key))


def _softmax_scale(rope: Rope) -> dict[str, float]:
    """Return the fields from which Megatron computes YaRN's softmax scale.

    This scale contains the factor `yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2`.
    """
    if not isinstance(rope, YarnRope):
        return {}
    return dict(rotary_scaling_factor=rope.factor, mscale_all_dim=rope.mscale_all_dim or 0.0)


DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    translate=translate,
    table=(*EMBEDDINGS, *LATENT_ATTENTION, *DENSE_MLP, *SIGMOID_ROUTED_MOE),
    engine_fused_params={
        "fused_qkv_a_proj_with_mqa.weight": ("q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
        "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
    }
    | SIGMOID_ROUTED_MOE_FUSED_PARAMS,
    defaults=DEFAULTS
    | SIGMOID_ROUTED_MOE_DEFAULTS
    | dict(
        attention_bias=False,
        rope_interleave=True,
        quantization_config=None,
        moe_layer_freq=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        head_dim=None,
        qk_head_dim=None,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
    ),
    engine_required_fields=("moe_layer_freq", "scoring_func", "topk_method"),
    has_mtp_layers=True,
    mtp=NUMBERED_LAYERS,
)
