"""Plans of MTP layers (layers for multi-token prediction): their training, and their use for speculative decoding in engines.

The checks raise ValueError for a mistake in the config, before any process starts. The message names the config key.
"""

from pathlib import Path
from typing import Any

from models.conversion.hf_reader import HFWeights, has_weights
from models.families import family_of
from models.hf_config import HFConfig
from mrl.config.process_schema import LoraSync, Transport
from mrl.config.schema import Config
from mrl.controller.plan_engine_dtype import engines_use_cpus, is_fp8
from mrl.rollout.engines.server_args import speculates

SPECULATION = ("EAGLE", "NEXTN")
"""Values of sglang.speculative_algorithm that let SGLang draft with the MTP layer of the model: two names of one algorithm."""

_MEGATRON_CONFLICTS = {
    "pipeline_model_parallel_layout": "mrl puts MTP layers on the last pipeline stage, and does not read this layout",
    "fine_grained_activation_offloading": "Megatron does not find the weights of MTP layers, which it must not offload",
}
"""Field of Megatron that the config must not set if MTP layers are trained -> the reason."""


def check_mtp_settings(config: Config, head: str) -> None:
    """Raise ValueError if MTP layers cannot be trained as the config says. `head`: output head of the trained model."""
    key = "model.train_mtp=true"
    if head != "vocabulary":
        raise ValueError(
            f"{key}: a reward model has no output layer, which MTP layers need to predict tokens; leave it false."
        )
    if config.lora.rank:
        raise ValueError(
            f"{key} with lora.rank={config.lora.rank}: only the adapters are trained, and MTP layers have none; set "
            "model.train_mtp=false, or lora.rank=0."
        )
    if config.trainer.share_prompts:
        raise ValueError(
            f"{key} with trainer.share_prompts=true: an MTP layer reads the embedding of the next token, so the last token of a "
            "prompt has another state for each response, and responses cannot share it; set trainer.share_prompts=false."
        )
    for name, reason in _MEGATRON_CONFLICTS.items():
        if value := config.megatron.get(name):
            raise ValueError(f"{key} with megatron.{name}={value}: {reason}; leave the field out.")
    group = config.megatron.get("recompute_num_layers") or 1
    if config.megatron.get("recompute_method") == "uniform" and group > 1:
        raise ValueError(
            f"{key} with megatron.recompute_num_layers={group}: Megatron recomputes MTP layers one by one; set it to 1."
        )


def check_speculation(config: Config, hf: HFConfig) -> None:
    """Raise ValueError if engines cannot use the MTP layer of the model for speculative decoding as the config says.

    `hf`: config.json of the trained model.
    """
    if not speculates(config.sglang):
        return
    algorithm = str(config.sglang["speculative_algorithm"])
    key = f"sglang.speculative_algorithm={algorithm}"
    if algorithm.upper() not in SPECULATION:
        raise ValueError(
            f"{key}: trainers send no weights for this algorithm; expected {' or '.join(SPECULATION)}, which use the MTP layer "
            "of the model."
        )
    if engines_use_cpus(config):
        raise ValueError(
            f"{key}: on CPUs, SGLang 0.5.23 has no kernels for it, and would take the most probable token instead of a sample; "
            "use GPUs, or leave the argument out."
        )
    for setting, reason in _conflicts_of_speculation(config).items():
        raise ValueError(f"{key} with {setting}: {reason}; change one of the two.")
    family = family_of(hf)
    count = family.count_mtp_layers(hf, key)
    if count > 1:
        raise ValueError(
            f"{key}: the model has {count} MTP layers, but SGLang 0.5.23 drafts with one; leave the argument out."
        )
    _check_mtp_tensors(hf, key)


def _conflicts_of_speculation(config: Config) -> dict[str, str]:
    """Return the settings of this config that do not work with speculative decoding, as `key=value` -> reason."""
    rollout, sglang = config.rollout, config.sglang
    ignored = "SGLang 0.5.23 does not apply it exactly to tokens that it drafts"
    thresholds = [f"speculative_accept_threshold_{name}" for name in ("single", "acc")]
    candidates = [
        ("rollout.min_p", rollout.min_p, rollout.min_p > 0, ignored),
        ("rollout.repetition_penalty", rollout.repetition_penalty, rollout.repetition_penalty != 1, ignored),
        (
            "rollout.routing_replay",
            "true",
            rollout.routing_replay,
            "SGLang does not report the experts of drafted tokens",
        ),
        ("sglang.quantization", "fp8", is_fp8(config), "such engines start with random weights, also of the MTP layer"),
        (
            "weight_sync.transport",
            "disk",
            config.weight_sync.transport == Transport.disk,
            "the folders for engines have no MTP layers",
        ),
        (
            "weight_sync.lora",
            "adapter",
            bool(config.lora.rank) and config.weight_sync.lora == LoraSync.adapter,
            "SGLang would apply the adapters to the model, but not to its MTP layer",
        ),
        *(
            (f"sglang.{name}", sglang.get(name), sglang.get(name, 1.0) != 1.0, "samples would not follow the policy")
            for name in thresholds
        ),
    ]
    return {f"{name}={value}": reason for name, value, is_set, reason in candidates if is_set}


def _check_mtp_tensors(hf: HFConfig, key: str) -> None:
    """Raise ValueError if the model's folder has weights but lacks tensors of the MTP layer: SGLang would leave them random."""
    folder = hf.path.parent
    if not has_weights(folder):
        return
    names = family_of(hf).mtp_names(hf)
    stored = HFWeights(folder).shapes()
    if missing := [name for name in names if name not in stored]:
        raise ValueError(
            f"{key}: {folder} has no MTP layer: {len(missing)} of its {len(names)} tensors are missing, such as {missing[0]}; "
            "leave the argument out, or use the published weights."
        )


def draft_server_args(config: Config, model_path: str) -> dict[str, Any]:
    """Return the server arguments that make the MTP layer in `model_path` the draft model; {} without speculative decoding."""
    if not speculates(config.sglang):
        return {}
    return dict(speculative_draft_model_path=str(Path(model_path).resolve()))
