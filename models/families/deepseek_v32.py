"""DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5 (arXiv:2602.15763): DeepSeek-V3 with sparse attention.

Each token attends to the keys that a lightning indexer chooses, see parallel/sparse_attention.py. The weights of the indexer are
frozen. In a GLM-5 model, a layer may use the keys that an earlier layer has chosen.

The two families rotate the components of the indexer's queries and keys in different pairs: DeepSeek-V3.2 rotates component i and
component i + n / 2 (n: number of rotated components), and GLM-5 rotates neighbors. The pairs of the attention itself are
neighbors in both families.

As in DeepSeek-V3, the norms in the attention use `rms_norm_eps`, as in SGLang and Megatron. For these norms, transformers always
uses 1e-6. The published configs of GLM-5 have 1e-5, so for GLM-5 the outputs of mrl and of transformers differ a little.
"""

from dataclasses import replace

from models.architecture import Architecture, Family
from models.conversion.mapping import ParamMapping
from models.families import deepseek_v3
from models.families.decoder_blocks import DENSE_MLP, EMBEDDINGS, SIGMOID_ROUTED_MOE
from models.families.deepseek_v3 import DEEPSEEK_V3, LATENT_ATTENTION
from models.hf_config import HFConfig

_INDEXER = "decoder.layers.{layer}.self_attention.core_attention.indexer"
_HF_INDEXER = "model.layers.{layer}.self_attn.indexer"
# values of indexer_types: the layer has an indexer, or it uses the keys that an earlier layer has chosen
_FULL, _SHARED = "full", "shared"


def _row(name: str, *shape: str, is_buffer: bool = False) -> ParamMapping:
    return ParamMapping(
        f"{_INDEXER}.{name}",
        (f"{_HF_INDEXER}.{name}",),
        (shape,),
        present_in="indexer_layers",
        is_buffer=is_buffer,
        is_frozen=True,
    )


# Symbols in the shapes: queries of all heads of an indexer (index_q), its single key (index_dim), number of heads (index_heads)
INDEXER = (
    _row("wq_b.weight", "index_q", "q_lora"),
    _row("wk.weight", "index_dim", "hidden"),
    _row("weights_proj.weight", "index_heads", "hidden"),
    _row("k_norm.weight", "index_dim", is_buffer=True),
    _row("k_norm.bias", "index_dim", is_buffer=True),
)
TABLE = (*EMBEDDINGS, *LATENT_ATTENTION, *INDEXER, *DENSE_MLP, *SIGMOID_ROUTED_MOE)


def translate_deepseek(config: HFConfig) -> Architecture:
    """Translate a DeepSeek-V3.2 config. Raises ValueError if a value is not supported."""
    config.expect(indexer_rope_interleave=False)
    return _translate(config, [_FULL] * config["num_hidden_layers"], interleaved=False)


def translate_glm(config: HFConfig) -> Architecture:
    """Translate a GLM-5 config. Raises ValueError if a value is not supported."""
    config.expect(indexer_rope_interleave=True, moe_router_dtype=(None, "float32"))
    config.read_fields.add("index_share_for_mtp_iteration")  # only matters for MTP layers
    return _translate(config, _indexer_types(config), interleaved=True)


def _translate(config: HFConfig, indexer_types: list[str], *, interleaved: bool) -> Architecture:
    _check_layers(config)
    heads, channels, topk = (_positive(config, f"index_{name}") for name in ("n_heads", "head_dim", "topk"))
    _positive(config, "q_lora_rank")
    arch = deepseek_v3.translate(config)
    assert arch.rope is not None, "latent attention has a rotary embedding"
    if arch.rope.dim > channels:
        raise ValueError(
            f"{config.path}: index_head_dim={channels} is not supported; expected at least qk_rope_head_dim={arch.rope.dim}."
        )
    return replace(
        arch,
        indexer_layers=tuple(kind == _FULL for kind in indexer_types),
        sizes=arch.sizes | dict(index_q=heads * channels, index_dim=channels, index_heads=heads),
        transformer=arch.transformer
        | dict(
            dsa_indexer_n_heads=heads,
            dsa_indexer_head_dim=channels,
            dsa_indexer_topk=topk,
            dsa_indexer_rope_interleaved=interleaved,
        ),
    )


def _positive(config: HFConfig, name: str) -> int:
    value = config[name]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{config.path}: {name}={value!r} is not supported; expected a number of 1 or more.")
    return value


def _check_layers(config: HFConfig) -> None:
    """Raise ValueError if the lists of the kinds of layers do not agree with the other fields."""
    count, num_dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    config.expect(mlp_bias=False, layer_types=(None, ["indexed_attention"] * count))
    expected = ["dense" if layer < num_dense else "sparse" for layer in range(count)]
    if (kinds := config["mlp_layer_types"]) not in (None, expected):
        raise ValueError(
            f"{config.path}: first_k_dense_replace={num_dense} and mlp_layer_types={kinds!r} do not agree, and SGLang reads only "
            f"the first of these fields; expected mlp_layer_types={expected!r}."
        )


def _indexer_types(config: HFConfig) -> list[str]:
    """Return the kind of each layer of a GLM-5 model. The fields have the same priorities as in transformers."""
    count, kinds, pattern = config["num_hidden_layers"], config["indexer_types"], config["index_topk_pattern"]
    every, offset = config["index_topk_freq"], config["index_skip_topk_offset"]
    if kinds is None and pattern is not None:
        kinds = [{"F": _FULL, "S": _SHARED}.get(kind, kind) for kind in pattern]
    if kinds is None:
        kinds = [_SHARED if max(layer - offset + 1, 0) % max(every, 1) else _FULL for layer in range(count)]
    if len(kinds) != count or not set(kinds) <= {_FULL, _SHARED} or kinds[0] != _FULL:
        raise ValueError(
            f"{config.path}: indexer_types={kinds!r} is not supported; expected {_FULL} or {_SHARED} for each of the {count} "
            f"layers, and {_FULL} for the first layer."
        )
    return kinds


_DEFAULTS = DEEPSEEK_V3.defaults | dict(
    rope_interleave=True,
    mlp_bias=False,
    mlp_layer_types=None,
    layer_types=None,
    index_topk=2048,
    index_head_dim=128,
    index_n_heads=64,
    indexer_rope_interleave=False,
)
DEEPSEEK_V32 = Family(
    architecture="DeepseekV32ForCausalLM",
    translate=translate_deepseek,
    table=TABLE,
    engine_fused_params=DEEPSEEK_V3.engine_fused_params,
    defaults=_DEFAULTS,
    engine_required_fields=("moe_layer_freq", "scoring_func", "topk_method"),
    engine_dtype="bfloat16",  # SGLang stores weights_proj in bfloat16, and its sparse attention computes in bfloat16
    engine_needs_gpu=True,  # because of the kernels of sparse attention
    has_mtp_layers=True,
)
GLM_MOE_DSA = Family(
    architecture="GlmMoeDsaForCausalLM",
    translate=translate_glm,
    table=TABLE,
    # On a GPU, SGLang fuses two matrices of an indexer whose RoPE rotates neighbors.
    engine_fused_params=DEEPSEEK_V3.engine_fused_params
    | {"indexer.wk_weights_proj.weight": ("indexer.wk.weight", "indexer.weights_proj.weight")},
    defaults=_DEFAULTS
    | dict(
        rms_norm_eps=1e-5,
        n_group=1,
        topk_group=1,
        index_n_heads=32,
        indexer_rope_interleave=True,
        indexer_types=None,
        index_topk_pattern=None,
        index_topk_freq=1,
        index_skip_topk_offset=2,
        moe_router_dtype=None,
    ),
    # Without the first field, SGLang would rotate other pairs of components in the indexer.
    engine_required_fields=("indexer_rope_interleave", "moe_layer_freq", "scoring_func", "topk_method"),
    engine_dtype="bfloat16",
    engine_needs_gpu=True,
    has_mtp_layers=True,
)
